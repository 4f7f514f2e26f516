// Fetches /status.json again and again, and shows what has changed. `window.status_page` is there for tests.
const EVERY = 1500, PATIENCE = 5000;  // milliseconds
const at = id => document.getElementById(id);
const charts = new Map();
const shown = {};  // by part of the page: what it shows, as JSON
let seen = null;  // when there was an answer

const RUN = {waiting: ["waiting", ""], running: ["running", "good"], done: ["done", "good"], interrupted: ["interrupted", "warn"],
  stopped: ["stopped: a value is not finite", "bad"], failed: ["broke off", "bad"],
  spent: ["ended: its privacy budget is spent", "warn"]};
const SITE = {connected: "good", late: "warn", gone: "bad", refused: "bad"};

const clock = new Intl.DateTimeFormat(undefined, {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"});
const day = new Intl.DateTimeFormat(undefined, {day: "numeric", month: "short"});
function moment(seconds) {
  if (typeof seconds !== "number") return text(seconds);
  const date = new Date(1000 * seconds);
  return (date.toDateString() === new Date().toDateString() ? "" : `${day.format(date)}, `) + clock.format(date);
}

// Do something if what it depends on has changed: what is selected, scrolled or opened stays as it is otherwise.
function once(part, depends, act) {
  const now = JSON.stringify(depends);
  if (shown[part] === now) return;
  shown[part] = now;
  act();
}

function head({settings, state, since, made}) {
  const title = [settings.algorithm, settings.task].filter(Boolean).join(" on ") || "Waiting for a run";
  document.title = `${title}: ${RUN[state][0]}`;
  at("title").textContent = title;
  at("state").textContent = RUN[state][0];
  at("state").className = `state ${RUN[state][1]}`;
  at("about").textContent = `since ${moment(since)} · ${made}`;
}

function tiles({progress, sites}) {
  const {rounds_done: done, rounds} = progress;
  const here = sites.filter(site => site.state === "connected").length;
  const missing = sites.length ? sites.reduce((sum, site) => sum + (site.missing || 0), 0) : progress.missing;
  const all = [
    ["sites connected", `${here} of ${sites.length}`],
    ["rounds", exact(done ?? 0, "count") + (rounds ? ` of ${exact(rounds, "count")}` : "")],
    ["exchanges", exact(progress.exchanges ?? 0, "count")],
    ["bytes up", amount(progress.bytes_up ?? 0, "bytes")],
    ["bytes down", amount(progress.bytes_down ?? 0, "bytes")],
    ["missing replies", exact(missing ?? 0, "count")],
    ...(progress.epsilon === undefined ? [] : [["ε spent", amount(progress.epsilon)]]),
  ];
  at("tiles").replaceChildren(...all.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  at("bar").hidden = !rounds;
  if (!rounds) return;
  at("bar").setAttribute("aria-valuemax", rounds);
  at("bar").setAttribute("aria-valuenow", done ?? 0);
  at("bar").firstElementChild.style.width = `${Math.min(100, 100 * (done ?? 0) / rounds)}%`;
}

function siteTable(sites) {
  if (!sites.length) return at("sites").replaceChildren(el("p", {class: "note"}, "No site is known yet."));
  const count = value => value === undefined ? "–" : exact(value, "count");
  const spent = sites.some(site => site.epsilon !== undefined);  // which only sites whose policy allows it say
  const names = ["site", "state", "rounds", "missing", "bytes up", "bytes down", ...(spent ? ["ε spent"] : []), "since"];
  at("sites").replaceChildren(table(names, sites.map(site => [
    site.name, el("span", {class: `state ${SITE[site.state] || ""}`}, site.state), count(site.rounds), count(site.missing),
    amount(site.bytes_up, "bytes"), amount(site.bytes_down, "bytes"),
    ...(spent ? [site.epsilon === undefined ? "–" : amount(site.epsilon)] : []), moment(site.since)]), {left: [1]}));
}

function metricCharts(metrics) {
  for (const [name, chart] of charts) if (!metrics.some(metric => metric.name === name)) { chart.node.remove(); charts.delete(name); }
  for (const metric of metrics) once(`metric ${metric.name}`, [metric, charts.has(metric.name)], () => {
    if (!charts.has(metric.name)) {
      const chart = new Chart(metric.name);
      chart.reset.classList.add("reset");
      chart.node.append(chart.reset);
      at("metrics").append(chart.node);
      charts.set(metric.name, chart);
    }
    const chart = charts.get(metric.name), banded = metric.low ? {low: metric.low, high: metric.high} : {};
    chart.show([{label: words(metric.name), colour: chart.ink("--line"), x: metric.x, y: metric.y, ...banded}], {label: "rounds", kind: "count", log: false},
      {label: words(metric.name), kind: null, log: !metric.higher && decades([metric.y])});
  });
  at("metrics-note").textContent = !metrics.length ? "Nothing is measured yet." : metrics.some(metric => metric.low) ? "The band holds eight of ten clients." : "";
}

function eventList(events) {
  at("events").replaceChildren(...[...events].reverse().map(event => el("li", {}, el("time", {datetime: new Date(1000 * event.at).toISOString()}, moment(event.at)), el("span", {}, event.text))));
}

function show(status) {
  once("head", [status.settings, status.state, status.since], () => head(status));
  once("tiles", [status.progress, status.sites], () => tiles(status));
  once("sites", status.sites, () => siteTable(status.sites));
  metricCharts(status.metrics);
  once("events", status.events, () => eventList(status.events));
  once("settings", status.settings, () => at("settings").lastElementChild.replaceChildren(table(["setting", ""], Object.entries(status.settings).map(([name, value]) => [name, text(value)]), {left: [1]})));
  at("settings").hidden = !Object.keys(status.settings).length;
}

function connection(there) {
  if (there) seen = Date.now() / 1000;
  at("lost").hidden = there;
  document.body.classList.toggle("stale", !there);
  if (!there) at("lost").textContent = seen ? `No connection to the coordinator. What is shown is from ${moment(seen)}.` : "No connection to the coordinator.";
}

// What there is to show; null if nobody answers.
async function fetched() {
  try {
    const answer = await fetch("status.json", {cache: "no-store", signal: AbortSignal.timeout(PATIENCE)});
    return answer.ok ? await answer.json() : null;
  } catch { return null; }
}

async function refresh() {
  try {
    const status = await fetched();
    connection(status !== null);
    if (status) show(status);
  } finally { setTimeout(refresh, EVERY); }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts.values()) { for (const series of chart.series) series.colour = chart.ink("--line"); chart.later(); }
});
window.status_page = {charts};
refresh();
