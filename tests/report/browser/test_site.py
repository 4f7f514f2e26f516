"""The documentation site in a real browser, from a folder and from a server; see `make browser`.

The tutorials are not run here. `make docs` does that.
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from .opened import Page, wait

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[3]
PAGES = ["index", "gallery", "examples", "coming-from", "methods", "tutorials/your-own-problem", "mathematics/bilevel"]
PAGES += [
    "mathematics/minimax",
    "mathematics/compositional",
    "mathematics/single-level",
    "mathematics/weighted-nodes",
    "reference/methods",
    "reference/running",
]
PAGES += ["reproduction", "reproduction/delay", "which-method", "peers", "clock", "robust", "scale", "many-devices"]
PAGES += ["search", "genindex"]
WIDE, NARROW = 1440, 390


@pytest.fixture(scope="session")
def sites(tmp_path_factory: Any) -> list[Path]:
    """Two builds of the site, from the same sources."""
    pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    arguments = ["-q", "-E", "-W", "-D", "nb_execution_mode=off", "-D", "suppress_warnings=myst-nb.lexer"]
    builds = [
        subprocess.Popen(
            [sys.executable, "-m", "sphinx", *arguments, "-d", folder / f"{k}-read", ROOT / "docs", folder / f"{k}"]
        )
        for k in range(2)
    ]
    assert [build.wait() for build in builds] == [0, 0]
    return [folder / "0", folder / "1"]


@pytest.fixture(scope="session")
def site(sites: list[Path]) -> Path:
    return sites[0]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="session")
def host(site: Path, tmp_path_factory: Any) -> Iterator[str]:
    """A static host with two versions, of which the older has no gallery; and a site without versions."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "alone").mkdir()
    for name in ("0.2", "0.1", "alone/site"):
        shutil.copytree(site, folder / name)
    (folder / "0.1" / "gallery.html").unlink()
    subprocess.run([sys.executable, ROOT / "tools" / "versions.py", folder], check=True)
    with http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()


def scrolled(page: Page) -> None:
    """Pictures are loaded when they come into view."""
    page.browser.execute_script("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    script = "const done = arguments[0]; Promise.all([...document.images].map(i => i.decode())).then(done, done);"
    page.browser.execute_async_script(script)


@pytest.mark.parametrize(("name", "width"), [("wide", WIDE), ("narrow", NARROW)])
@pytest.mark.parametrize("where", PAGES)
def test_pages_open_from_a_folder_without_errors_and_fit(
    browser: Any, site: Path, where: str, name: str, width: int
) -> None:
    page = Page(browser, (site / f"{where}.html").as_uri(), width)
    scrolled(page)
    page.screenshot(f"site-{where.replace('/', '-')}-{name}")
    assert page.errors() == []
    assert page.ask("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than the window"
    wide = "[...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > window.innerWidth"
    inside = "!e.closest('.table-wrapper, .highlight, .math, .cell_output, math, .sig')"
    assert page.ask(f"{wide} + 1 && {inside}).map(e => e.outerHTML.slice(0, 80))") == []
    blocks = "div.math" if where.startswith(("reference", "examples")) else "div.math, .highlight pre"  # whole files
    wider = f"[...document.querySelectorAll('{blocks}')].filter(e => e.scrollWidth > e.clientWidth)"
    assert width < WIDE or page.ask(f"{wider}.map(e => e.textContent)") == [], "formulas or code that do not fit"
    assert page.ask("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)") == []
    outside = "performance.getEntriesByType('resource').map(r => r.name).filter(r => !/^(file|data):/.test(r))"
    assert page.ask(outside) == []
    assert page.ask("document.querySelectorAll('.versions').length") == 0


def test_the_menu_is_there_wide_and_narrow(browser: Any, site: Path) -> None:
    page = Page(browser, (site / "index.html").as_uri(), WIDE)
    assert page.find(".sidebar-tree a[href='gallery.html']").is_displayed()
    page = Page(browser, (site / "index.html").as_uri(), NARROW)
    entry = page.find(".sidebar-tree a[href='gallery.html']")
    left = "document.querySelector('.sidebar-drawer').getBoundingClientRect().left"
    assert page.ask(left) < 0
    page.click(".mobile-header .nav-overlay-icon")
    wait(lambda: page.ask(left) == 0)
    page.screenshot("site-menu-narrow", whole=False)
    entry.click()
    wait(lambda: browser.current_url.endswith("gallery.html"))


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("served", [False, True], ids=["folder", "server"])
def test_the_search_finds_a_method(browser: Any, site: Path, host: str, served: bool, width: int) -> None:
    page = Page(browser, f"{host}/0.2/index.html" if served else (site / "index.html").as_uri(), width)
    if width == NARROW:
        page.click(".mobile-header .nav-overlay-icon")
        wait(lambda: page.find(".sidebar-search").is_displayed())
    page.find(".sidebar-search").send_keys("FedNest\n")
    wait(lambda: "Search finished" in page.ask("document.querySelector('#search-results').textContent"))
    page.screenshot(f"site-search-{width}")
    assert page.errors() == []
    links = page.ask("[...document.querySelectorAll('#search-results li a')].map(a => a.getAttribute('href'))")
    assert any("reference/methods.html#rookery.FedNest" in link for link in links[:3])
    assert page.ask("document.documentElement.scrollWidth <= window.innerWidth")
    page.click("#search-results li a[href*='#rookery.FedNest']")
    wait(lambda: "reference/methods.html" in browser.current_url)


def still(page: Page) -> None:
    """Wait until the page no longer scrolls to its anchor."""
    seen: list[float] = []

    def same() -> bool:
        seen.append(page.ask("window.scrollY"))
        return seen[-1] > 0 and seen[-3:] == [seen[-1]] * 3

    wait(same)


def test_from_a_methods_reference_to_its_mathematics_and_back(browser: Any, site: Path) -> None:
    page = Page(browser, f"{(site / 'reference' / 'methods.html').as_uri()}#rookery.FedGDAGT", WIDE)
    still(page)
    page.click("dl:has(> dt[id='rookery.FedGDAGT']) .mathematics a")
    wait(lambda: browser.current_url.endswith("mathematics/minimax.html#method-fedgdagt"))
    assert page.find("#method-fedgdagt").text == "FedGDA-GT"
    still(page)
    page.click("a:has(> #method-fedgdagt)")
    wait(lambda: browser.current_url.endswith("reference/methods.html#rookery.FedGDAGT"))


def test_another_version_is_chosen(browser: Any, host: str) -> None:
    page = Page(browser, f"{host}/0.2/methods.html", WIDE)
    wait(lambda: page.ask("document.querySelectorAll('.versions option').length") == 2)
    page.screenshot("site-versions", whole=False)
    assert page.ask("[...document.querySelectorAll('.versions option')].map(o => o.text)") == ["0.2", "0.1"]
    assert page.ask("document.querySelector('.versions select').selectedOptions[0].text") == "0.2"
    choose(page, "0.1")
    wait(lambda: browser.current_url == f"{host}/0.1/methods.html")
    assert page.errors() == []
    page = Page(browser, f"{host}/0.2/gallery.html#tutorials", NARROW)
    choose(page, "0.1")
    wait(lambda: browser.current_url == f"{host}/0.1/index.html")


def choose(page: Page, version: str) -> None:
    from selenium.webdriver.support.ui import Select

    wait(lambda: page.ask("document.querySelectorAll('.versions option').length") == 2)
    if not page.find(".versions").is_displayed() or page.ask("window.innerWidth") == NARROW:
        page.click(".mobile-header .nav-overlay-icon")
        wait(lambda: page.ask("document.querySelector('.sidebar-drawer').getBoundingClientRect().left") == 0)
    Select(page.find(".versions select")).select_by_visible_text(version)


def test_a_site_without_versions_has_no_choice(browser: Any, host: str) -> None:
    page = Page(browser, f"{host}/alone/site/index.html", WIDE)
    wait(lambda: page.ask("performance.getEntriesByName(new URL('../versions.json', location).href).length") == 1)
    page.settle()
    assert page.ask("document.querySelectorAll('.versions').length") == 0


def test_a_downloaded_notebook_runs(browser: Any, host: str, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    page = Page(browser, f"{host}/0.2/tutorials/your-own-algorithm.html", WIDE)
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.click("p.download a")
    file = tmp_path / "your-own-algorithm.ipynb"
    wait(file.exists)
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "Federation" in json.dumps(notebook)


def pages(site: Path) -> dict[str, str]:
    return {path.relative_to(site).as_posix(): path.read_text("utf-8") for path in sorted(site.rglob("*.html"))}


def test_links_of_the_built_pages_lead_to_files_and_places(site: Path) -> None:
    found = pages(site)
    places = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in found.items()}
    lost = []
    for name, text in found.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]*)"', text)):
            target, place = urldefrag(unescape(link))
            if re.match(r"\w+:", target):
                continue
            to = (site / name).parent.joinpath(unquote(target.partition("?")[0])) if target else site / name
            where = to.resolve().relative_to(site.resolve()).as_posix()
            if not to.exists() or (place and where in places and unquote(place) not in places[where]):
                lost.append(f"{name}: {link}")
    assert lost == []
    assert {name for name, ids in places.items() if name.startswith("mathematics/") and "method-fednest" in ids} == {
        f"mathematics/{name}.html" for name in ("bilevel", "minimax", "compositional")
    }


def test_two_builds_are_alike(sites: list[Path]) -> None:
    """Byte for byte; and no page has an address in memory, or a fingerprint outside of the names of files."""
    files = [
        {path.relative_to(site): path.read_bytes() for path in site.rglob("*") if path.is_file()} for site in sites
    ]
    assert files[0].keys() == files[1].keys()
    assert [path for path, content in files[0].items() if content != files[1][path]] == []
    text = {
        name: re.sub(r"<script.*?</script>|<[^>]*>", "", page, flags=re.DOTALL)
        for name, page in pages(sites[0]).items()
    }
    odd = {name: re.findall(r"\bat 0x[0-9a-f]{6,}|\b[0-9a-f]{32,}\b", page) for name, page in text.items()}
    assert {name: words for name, words in odd.items() if words} == {}
