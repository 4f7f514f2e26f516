// Draws the report from the JSON in #data. `window.report` is there for tests.
const data = JSON.parse(document.getElementById("data").textContent);

function choose(name, id, options, value, change) {
  const list = el("select", {id, onchange: event => change(event.target.value)},
    options.map(([key, label]) => el("option", {value: key}, label)));
  list.value = value;
  return el("label", {}, name, list);
}

function tick(name, id, value, change) {
  const box = el("input", {type: "checkbox", id, onchange: event => change(event.target.checked)});
  box.checked = value;
  return el("label", {class: "tick"}, box, name);
}

function section(id, title, ...children) {
  document.getElementById("contents").append(el("a", {href: `#${id}`}, title));
  document.getElementById("main").append(el("section", {id, "aria-labelledby": `${id}-title`}, el("h2", {id: `${id}-title`}, title), ...children));
}

// ---- What is shown.

const numbers = (run, name) => run.data[name] || [];
const has = (run, name) => Boolean(run.data[name]);
const lineRuns = data.lines.map((_, k) => data.runs.filter(run => run.line === k));
const axes = data.across.filter(axis => data.runs.some(run => has(run, axis.name)));
const state = {metric: data.first, x: axes[0].name, each: false, xlog: false, ylog: {}};
const axis = name => axes.find(entry => entry.name === name);
const kept = new Map();

// The mean over the runs of a line, from the lowest to the highest, of each round that all of them have a value of.
function together(k, x, y) {
  const key = JSON.stringify([k, x, y]);
  if (!kept.has(key)) kept.set(key, average(lineRuns[k].filter(run => has(run, x) && has(run, y)), x, y));
  return kept.get(key);
}

function average(runs, x, y) {
  if (runs.length === 1) return {x: numbers(runs[0], x), y: numbers(runs[0], y).map(v => v ?? NaN)};
  const rounds = new Map();
  for (const run of runs) {
    const at = numbers(run, "round"), xs = numbers(run, x), ys = numbers(run, y);
    for (let i = 0; i < at.length; i++) if (ys[i] !== null && xs[i] !== null) {
      const sum = rounds.get(at[i]) || {x: 0, y: 0, low: Infinity, high: -Infinity, count: 0};
      sum.x += xs[i]; sum.y += ys[i]; sum.count++;
      sum.low = Math.min(sum.low, ys[i]); sum.high = Math.max(sum.high, ys[i]);
      rounds.set(at[i], sum);
    }
  }
  const rows = [...rounds.keys()].sort((a, b) => a - b).map(round => rounds.get(round)).filter(row => row.count === runs.length);
  return {x: rows.map(r => r.x / r.count), y: rows.map(r => r.y / r.count), low: rows.map(r => r.low), high: rows.map(r => r.high)};
}

// A metric that falls by orders of magnitude has a logarithmic axis, unless it is switched.
function logarithmic(metric) {
  if (metric in state.ylog) return state.ylog[metric];
  const known = data.metrics.find(entry => entry.name === metric);
  if (known && known.higher) return false;
  return decades(data.runs.map(run => numbers(run, metric)));
}

const curves = new Chart("curves");
const legend = el("div", {class: "legend", role: "group", "aria-label": "Runs shown"});
const summary = el("div");

function shownSeries() {
  const found = [], many = data.lines.length > 12;
  data.lines.forEach((line, k) => {
    const look = {label: line.label, colour: line.colour, dash: line.dash, line: k, width: many ? 1.2 : 1.8, shade: many ? 0.06 : 0.16};
    if (!state.each) found.push({...look, ...together(k, state.x, state.metric)});
    else for (const run of lineRuns[k]) if (has(run, state.x) && has(run, state.metric)) {
      const name = lineRuns[k].length > 1 ? `${line.label}, seed ${run.seed ?? "?"}` : line.label;
      found.push({...look, ...average([run], state.x, state.metric), label: name, width: lineRuns[k].length > 1 ? 1.2 : look.width});
    }
  });
  return found;
}

const off = new Set();  // the lines that are switched off

function update() {
  const series = shownSeries();
  curves.hidden = new Set([...series.keys()].filter(i => off.has(series[i].line)));
  const across = axis(state.x);
  const log = document.getElementById("ylog");
  if (log) log.checked = logarithmic(state.metric);
  curves.show(series, {label: across.label, kind: across.kind, log: state.xlog}, {label: words(state.metric), kind: null, log: logarithmic(state.metric)});
  [...legend.querySelectorAll("button[data-line]")].forEach(button => button.setAttribute("aria-pressed", String(!off.has(Number(button.dataset.line)))));
  summarise();
}

function drawLegend() {
  const swatch = line => {
    const box = document.createElement("template");
    box.innerHTML = `<svg width="28" height="10" aria-hidden="true"><line x1="0" x2="28" y1="5" y2="5" stroke="${line.colour}" stroke-width="2.5" stroke-dasharray="${line.dash.join(" ")}"/></svg>`;
    return box.content.firstChild;
  };
  const only = asked => {
    const parts = asked.toLowerCase().split(/\s+/);
    off.clear();
    data.lines.forEach((line, k) => { if (!parts.every(part => line.label.toLowerCase().includes(part))) off.add(k); });
    update();
  };
  const toggle = k => { if (off.has(k)) off.delete(k); else off.add(k); update(); };
  const look = k => {
    const place = k === null ? -1 : curves.series.findIndex(s => s.line === k);
    curves.focus = place < 0 || curves.hidden.has(place) || state.each ? null : place;
    curves.later();
  };
  const box = el("input", {type: "search", id: "only", placeholder: "only those with…", "aria-label": "Show only lines whose names have these words", oninput: () => only(box.value)});
  if (data.lines.length > 2) legend.append(el("div", {class: "all"},
    el("button", {type: "button", onclick: () => only(box.value = "")}, "All"),
    el("button", {type: "button", onclick: () => { data.lines.forEach((_, k) => off.add(k)); update(); }}, "None"),
    data.lines.length > 8 ? box : null));
  data.lines.forEach((line, k) => legend.append(el("button", {type: "button", "data-line": k, "aria-pressed": "true",
    onclick: () => toggle(k), onpointerenter: () => look(k), onpointerleave: () => look(null)},
    swatch(line), el("span", {}, line.label + (lineRuns[k].length > 1 ? ` (${lineRuns[k].length} seeds)` : "")))));
}

const last = list => { for (let i = list.length - 1; i >= 0; i--) if (list[i] !== null) return list[i]; return null; };
const mean = list => list.length ? list.reduce((a, b) => a + b, 0) / list.length : null;
const spread = list => list.length > 1 && Math.max(...list) > Math.min(...list) ? `${number(mean(list))} (${number(Math.min(...list))} to ${number(Math.max(...list))})` : number(mean(list));

// What each line came to, of the metric that is shown, and what it has cost.
function summarise() {
  const higher = data.metrics.find(entry => entry.name === state.metric).higher;
  const costs = axes.filter(entry => entry.name !== "round");
  const head = ["", "runs", "rounds", `last ${words(state.metric)}`, ...(higher === null ? [] : ["best"]), ...costs.map(entry => entry.label)];
  const unequal = [];
  const rows = data.lines.flatMap((line, k) => {
    const runs = lineRuns[k].filter(run => has(run, state.metric));
    if (!runs.length) return [];
    const ends = runs.map(run => last(numbers(run, "round"))), end = Math.min(...ends);
    if (end < Math.max(...ends)) unequal.push(`${line.label} (round ${end})`);
    const upto = (run, name) => numbers(run, name).filter((_, i) => numbers(run, "round")[i] <= end);
    const of = name => runs.map(run => last(upto(run, name))).filter(v => v !== null);
    const best = runs.map(run => { const own = upto(run, state.metric).filter(v => v !== null); return own.length ? own.reduce((a, b) => higher ? Math.max(a, b) : Math.min(a, b)) : null; }).filter(v => v !== null);
    return [[line.label, String(runs.length), exact(mean(of("round")), "count"), spread(of(state.metric)), ...(higher === null ? [] : [spread(best)]),
      ...costs.map(entry => exact(mean(of(entry.name)), entry.kind))]];
  });
  const seeds = lineRuns.some(runs => runs.length > 1) ? "; means over the runs of a line, and from the lowest to the highest" : "";
  summary.replaceChildren(table(head, rows, {caption: `What it came to, and what it cost${seeds}`}));
  if (unequal.length) summary.append(el("p", {class: "note"}, `Runs of different length count up to the end of the shortest: ${unequal.join("; ")}.`));
  const stopped = data.runs.filter(run => run.stopped);
  if (stopped.length) summary.append(el("p", {class: "note"}, `Stopped early: ${stopped.map(run => `${run.name}: ${run.stopped}`).join("; ")}`));
}

section("curves", "Curves",
  el("div", {class: "controls"},
    choose("Metric", "metric", data.metrics.map(entry => [entry.name, words(entry.name)]), state.metric, value => { state.metric = value; curves.zoomTo(null); update(); }),
    choose("Across", "across", axes.map(entry => [entry.name, entry.label]), state.x, value => { state.x = value; curves.zoomTo(null); update(); }),
    lineRuns.some(runs => runs.length > 1) ? choose("Seeds", "seeds", [["mean", "mean and range"], ["each", "each run"]], "mean", value => { state.each = value === "each"; update(); }) : null,
    tick("log y", "ylog", logarithmic(state.metric), value => { state.ylog[state.metric] = value; curves.zoomTo(null); update(); }),
    tick("log x", "xlog", false, value => { state.xlog = value; curves.zoomTo(null); update(); }),
    curves.reset),
  el("div", {class: "side"}, curves.node, legend),
  el("p", {class: "note"}, "Point at a line for its values; drag to zoom, double-click to go back; a name switches its line off and on."),
  summary);
drawLegend();
update();

// ---- Clients: quantiles of a metric over the clients.

const QUANTILES = [0, 10, 50, 90, 100];
const quantiled = data.metrics.filter(entry => entry.quantiles);
if (quantiled.length) {
  const chart = new Chart("clients"), has5 = (run, m) => has(run, `${m}_q50`);
  const pick = {metric: quantiled[0].name, line: null, x: axes[0].name};
  const lines = () => data.lines.map((line, k) => [String(k), line.label]).filter(([k]) => lineRuns[k].some(run => has5(run, pick.metric)));
  const box = el("div", {class: "controls"});
  const show = () => {
    if (!lines().some(([k]) => k === pick.line)) pick.line = lines()[0][0];
    const k = Number(pick.line), q = Object.fromEntries(QUANTILES.map(n => [n, together(k, pick.x, `${pick.metric}_q${n}`)]));
    const look = {x: q[50].x, y: q[50].y, colour: "#0072B2"};
    const series = [
      {...look, label: "all clients", y: q[50].y.map(() => NaN), low: q[0].y, high: q[100].y, shade: 0.12, quiet: true},
      {...look, label: "8 of 10 clients", y: q[50].y.map(() => NaN), low: q[10].y, high: q[90].y, shade: 0.22, quiet: true},
      ...[[100, "highest client"], [90, "90 % are below"], [50, "median client"], [10, "10 % are below"], [0, "lowest client"]].map(([n, label]) =>
        ({...look, x: q[n].x, y: q[n].y, label, width: n === 50 ? 2.2 : 0.7, alpha: n === 50 ? 1 : 0.6})),
      {...together(k, pick.x, pick.metric), low: null, high: null, label: "mean", colour: "#D55E00", dash: [6, 4], width: 1.6},
    ];
    const across = axis(pick.x);
    chart.show(series, {label: across.label, kind: across.kind, log: false}, {label: `${words(pick.metric)} of the clients`, kind: null, log: false});
    box.replaceChildren(
      choose("Metric", "client-metric", quantiled.map(entry => [entry.name, words(entry.name)]), pick.metric, value => { pick.metric = value; chart.zoomTo(null); show(); }),
      choose("Run", "client-line", lines(), pick.line, value => { pick.line = value; chart.zoomTo(null); show(); }),
      choose("Across", "client-across", axes.map(entry => [entry.name, entry.label]), pick.x, value => { pick.x = value; chart.zoomTo(null); show(); }),
      chart.reset);
  };
  chart.plot.classList.add("low");
  section("clients", "Clients", box, chart.node, el("p", {class: "note"}, "Solid: the median client; dashed: the mean over all. The dark band holds eight of ten clients, the pale one all of them. Of several seeds, the mean of each."));
  show();
  window.reportClients = chart;
}

// ---- Weights: of clients as they evolve, and of clients or samples at the end.

const COLOURS = data.colours;
const weighted = data.runs.filter(run => run.weights || run.series);
if (weighted.length) {
  const over = new Chart("weights over rounds"), end = new Chart("weights at the end"), rows = el("div"), box = el("div", {class: "controls"});
  const show = run => {
    const groups = run.weights ? [...new Set(run.weights.group)] : [""];
    const colour = group => COLOURS[groups.indexOf(group) % COLOURS.length];
    const members = run.weights ? run.weights.group : [];
    over.node.hidden = !run.series;
    if (run.series) {
      const across = axis(axes[0].name), names = Object.keys(run.series);
      over.show(names.map((name, k) => ({label: `client ${name}${members[k] ? `, ${members[k]}` : ""}`, colour: colour(members.length === names.length ? members[k] : groups[0]),
        x: numbers(run, across.name), y: run.series[name].map(v => v ?? NaN), width: 1.2, alpha: 0.75})), {label: across.label, kind: across.kind, log: false}, {label: "weight", kind: null, log: false});
    }
    const final = run.weights || {group: Object.keys(run.series).map(() => ""), weight: Object.values(run.series).map(last)};
    const own = [...new Set(final.group)].map(group => [group, final.weight.filter((v, i) => final.group[i] === group && v !== null).sort((a, b) => a - b)]).filter(([, values]) => values.length);
    end.show(own.map(([group, values]) => ({label: group || "all", colour: colour(run.weights ? group : ""), x: values.map((_, i) => values.length > 1 ? 100 * i / (values.length - 1) : 50), y: values})),
      {label: "% of the group, by weight", kind: null, log: false}, {label: "weight at the end", kind: null, log: false});
    const middle = values => values.length % 2 ? values[(values.length - 1) / 2] : (values[values.length / 2 - 1] + values[values.length / 2]) / 2;
    rows.replaceChildren(table(["group", "how many", "mean", "lowest", "median", "highest"],
      own.map(([group, v]) => [el("span", {class: "mark", style: `border-color: ${colour(run.weights ? group : "")}`}, group || "all"), String(v.length), number(mean(v)), number(v[0]), number(middle(v)), number(v[v.length - 1])]), {caption: "Weights at the end"}));
  };
  const names = weighted.map((run, k) => [String(k), `${data.lines[run.line].label}${run.seed === null ? "" : `, seed ${run.seed}`}`]);
  box.append(choose("Run", "weights-run", names, "0", value => { over.zoomTo(null); end.zoomTo(null); show(weighted[Number(value)]); }));
  section("weights", "Weights", box, el("div", {class: "two"}, over.node, end.node), rows);
  show(weighted[0]);
}

// ---- The ledger: the exchanges of a round; lines that have the same ones share a table.

const ledgers = new Map();
for (const run of data.runs) if (run.exchanges.length) {
  const key = JSON.stringify(run.exchanges);
  if (!ledgers.has(key)) ledgers.set(key, new Set());
  ledgers.get(key).add(data.lines[run.line].label);
}
if (ledgers.size) {
  const total = (rows, name) => rows.reduce((sum, row) => sum + (row[name] || 0), 0);
  section("ledger", "Ledger", el("p", {class: "note"}, "The exchanges of a round (the last one), all clients of the round together. What the whole run cost is in the table above."),
    [...ledgers].map(([key, labels]) => {
      const rows = JSON.parse(key), names = [...labels];
      const caption = names.length > 6 ? `${names.slice(0, 5).join("; ")}; and ${names.length - 5} more` : names.join("; ");
      return el("div", {style: "margin-bottom: 14px"}, table(["exchange", "kind", "shape of a reply", "how often", "sent up", "sent down"],
        rows.map(row => [row.name, row.kind, row.shape, String(row.count), amount(row.bytes_up, "bytes"), amount(row.bytes_down, "bytes")]),
        {caption, left: [1, 2], foot: ["in all", "", "", String(total(rows, "count")), amount(total(rows, "bytes_up"), "bytes"), amount(total(rows, "bytes_down"), "bytes")]}));
    }));
}

// ---- Settings: a row for each, marked where the lines differ.

const settingNames = [...new Set(data.runs.flatMap(run => Object.keys(run.settings)))];
if (settingNames.length) {
  const of = (k, name) => [...new Set(lineRuns[k].map(run => text(run.settings[name])))].join(", ");
  const rows = settingNames.map(name => [name, ...data.lines.map((_, k) => of(k, name))]);
  const differs = row => new Set(row.slice(1)).size > 1;
  const place = el("div"), many = data.lines.length > 1 && rows.some(differs);
  const show = only => {
    const shown = rows.filter(row => !only || differs(row)).map(row => many && differs(row) ? [`≠\u00a0${row[0]}`, ...row.slice(1)] : row);
    place.replaceChildren(table(["setting", ...data.lines.map(line => line.label)], shown, {className: "settings", mark: differs}));
  };
  section("settings", "Settings", many ? el("div", {class: "controls"}, tick("only what differs (≠)", "differs", true, show)) : null, place);
  show(many);
}

// ---- Claims of reproductions.

if (data.claims.length) section("claims", "Claims", data.claims.map(paper => [
  el("h3", {}, `${paper.name}: ${paper.claims.filter(c => c.verdict === "reproduced").length} of ${paper.claims.length} reproduced`),
  paper.claims.map(c => el("div", {class: c.verdict === "reproduced" ? "claim" : "claim fails"},
    el("p", {}, el("span", {class: "verdict"}, (c.verdict === "reproduced" ? "✓ " : "") + c.verdict + (c.cause ? ` (${c.cause})` : "")), c.claim, " ", el("span", {class: "where"}, c.kind === "own" ? "(our own)" : `(${c.where})`)),
    c.note ? el("p", {class: "where"}, c.note) : null,
    el("details", {}, el("summary", {}, "Measured"), table(["figure", "value"], Object.entries(c.figures || {}).map(([name, value]) => [name, text(value)]), {className: "settings"})))),
]).flat(2));

const count = data.runs.length;
document.getElementById("about").textContent = `${count} run${count === 1 ? "" : "s"}, ${data.lines.length} line${data.lines.length === 1 ? "" : "s"} · ${data.made}`;
window.report = {data, state, curves, update};
