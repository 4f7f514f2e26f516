// Rookery's pages on a server and from a folder: the choice of a version, and the search without a network.
(() => {
  "use strict";
  if (location.protocol === "file:") {
    DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false; // a browser does not fetch other files of a folder
    return;
  }
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const list = new URL("../versions.json", root); // [{"version": "0.2.0", "path": "0.2.0/"}, ...], the newest first

  function choice(versions) {
    const label = document.createElement("label");
    label.className = "versions";
    label.textContent = "Version ";
    const select = label.appendChild(document.createElement("select"));
    for (const { version, path } of versions) {
      const folder = new URL(path, list).href;
      select.add(new Option(version, folder, false, folder === root.href));
    }
    select.addEventListener("change", async () => {
      const page = location.href.slice(root.href.length);
      const there = await fetch(select.value + page, { method: "HEAD" }).catch(() => ({ ok: false }));
      location.href = there.ok ? select.value + page : select.value + "index.html";
    });
    return label;
  }

  fetch(list)
    .then((reply) => (reply.ok ? reply.json() : []))
    .then((versions) => versions.length && document.querySelector(".sidebar-brand").after(choice(versions)))
    .catch(() => {}); // a site without versions
})();
