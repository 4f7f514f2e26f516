"use strict";
// Draws the report from the JSON in #data: charts on canvas, tables in HTML. `window.report` is there for tests.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);

// ---- Words and numbers.

const words = name => name.replaceAll("_", " ");
const UNITS = {
  count: [[1e9, "G"], [1e6, "M"], [1e3, "k"]],
  bytes: [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"], [0, " B"]],
  seconds: [[0, " s"]],
};

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

function amount(value, kind, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  for (const [unit, sign] of UNITS[kind] || [])
    if (Math.abs(value) >= unit) return number(Number((value / (unit || 1)).toPrecision(digits)), digits) + sign;
  return number(value, digits);
}

// For tables: counts in full.
function exact(value, kind) {
  if (kind === "count" && Number.isFinite(value)) return Math.round(value).toLocaleString("en-US");
  return amount(value, kind);
}

function text(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value, 6);
  if (Array.isArray(value)) return value.map(text).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([k, v]) => `${k}: ${text(v)}`).join(", ");
  return String(value);
}

// ---- HTML.

function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") node.toggleAttribute(name, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null));
  return node;
}

function table(head, rows, {caption = null, foot = null, className = null, mark = () => false, left = []} = {}) {
  const cell = (value, i) => i ? el("td", {class: left.includes(i) ? "word" : null}, value) : el("th", {scope: "row"}, value);
  const box = el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "table"}, el("table", {class: className},
    el("thead", {}, el("tr", {}, head.map((name, i) => el("th", {scope: "col", class: left.includes(i) ? "word" : null}, name)))),
    el("tbody", {}, rows.map(row => el("tr", {class: mark(row) ? "differs" : null}, row.map(cell)))),
    foot ? el("tfoot", {}, el("tr", {}, foot.map(cell))) : null));
  return caption ? el("div", {class: "titled"}, el("p", {}, caption), box) : box;
}

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

// ---- Ticks of an axis, from a to b.

function ticks(a, b, log, room) {
  if (!log) {
    const raw = (b - a) / Math.max(2, room), base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(k => k * base).find(k => k >= raw * 0.999);
    const found = [];
    for (let k = Math.ceil(a / step - 1e-9); k * step <= b + 1e-9 * step; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }
  const low = Math.floor(Math.log10(a)), high = Math.ceil(Math.log10(b)), found = [];
  const every = Math.max(1, Math.ceil((high - low) / room));
  const within = (high - low) * 3 <= room ? [1, 2, 5] : [1];
  for (let k = low; k <= high; k += every) for (const m of within) found.push(m * 10 ** k);
  const shown = found.filter(v => v >= a * 0.9999 && v <= b * 1.0001);
  return shown.length >= 2 ? shown : ticks(a, b, false, room).filter(v => v > 0);
}

// ---- A chart: series of {label, colour, dash, x, y, low, high, width, alpha, note}.

class Chart {
  constructor(name) {
    this.name = name;
    this.series = [];
    this.hidden = new Set();
    this.zoom = null;
    this.focus = null;
    this.canvas = el("canvas", {role: "img"});
    this.over = el("canvas", {"aria-hidden": "true"});
    this.tip = el("div", {class: "tip", hidden: true});
    this.plot = el("div", {class: "plot"}, this.canvas, this.over, this.tip);
    this.note = el("p", {class: "note", "aria-live": "polite"});
    this.rows = el("div");
    this.numbers = el("details", {ontoggle: () => this.tabulate()}, el("summary", {}, "The chart as a table"), this.rows);
    this.caption = el("figcaption");
    this.node = el("figure", {}, this.caption, this.plot, this.note, this.numbers);
    this.reset = el("button", {type: "button", disabled: true, onclick: () => this.zoomTo(null)}, "Reset zoom");
    this.listen();
    new ResizeObserver(() => this.later()).observe(this.plot);
  }

  show(series, x, y) {
    Object.assign(this, {series, x, y});
    this.caption.textContent = `${y.label} by ${x.label}`;
    this.tip.hidden = true;
    this.later();
    this.tabulate();
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  zoomTo(box) {
    this.zoom = box;
    this.reset.disabled = !box;
    this.tip.hidden = true;
    this.later();
    this.tabulate();
  }

  get visible() { return this.series.filter((s, i) => !this.hidden.has(i)); }

  // What can be drawn: finite, not beyond reason, and positive on a logarithmic axis.
  usable(value, axis) { return Number.isFinite(value) && value < 1e100 && value > (axis.log ? 0 : -1e100); }

  range() {
    const far = {x: [Infinity, -Infinity], y: [Infinity, -Infinity]};
    const take = (range, value) => { if (value < range[0]) range[0] = value; if (value > range[1]) range[1] = value; };
    const zoom = this.zoom;
    let lost = 0;
    for (const s of this.visible) for (let i = 0; i < s.x.length; i++) {
      const inside = !zoom || (s.x[i] >= zoom.x[0] && s.x[i] <= zoom.x[1]);
      if (!Number.isFinite(s.y[i])) continue;
      if (!this.usable(s.x[i], this.x) || !this.usable(s.y[i], this.y)) { lost++; continue; }
      take(far.x, s.x[i]);
      if (!inside) continue;
      take(far.y, s.y[i]);
      if (s.low && this.usable(s.low[i], this.y)) take(far.y, s.low[i]);
      if (s.high && this.usable(s.high[i], this.y)) take(far.y, s.high[i]);
    }
    if (zoom) { far.x = [...zoom.x]; if (zoom.y) far.y = [...zoom.y]; }
    for (const [axis, range] of [[this.x, far.x], [this.y, far.y]]) {
      if (!(range[0] <= range[1])) range.splice(0, 2, axis.log ? 0.1 : 0, 1);
      if (range[0] === range[1]) {
        const by = axis.log ? 2 : Math.abs(range[0]) / 10 || 1;
        range.splice(0, 2, axis.log ? range[0] / by : range[0] - by, axis.log ? range[1] * by : range[1] + by);
      }
    }
    if (!(zoom && zoom.y)) {
      const [a, b] = far.y;
      if (this.y.log) { const by = (b / a) ** 0.04; far.y = [a / by, b * by]; }
      else far.y = [a - (b - a) * 0.04, b + (b - a) * 0.04];
    }
    return {...far, lost};
  }

  draw() {
    const begin = performance.now();
    const {width, height} = this.plot.getBoundingClientRect();
    if (!this.x || width < 50) return;
    const pen = this.sized(this.canvas, width, height);
    const {x, y, lost} = this.range();
    pen.font = "12px system-ui, sans-serif";
    const marks = ticks(...y, this.y.log, height / 48);
    const names = marks.map(v => amount(v, this.y.kind, 6));
    const left = 14 + Math.max(...names.map(name => pen.measureText(name).width), 10);
    const box = this.box = {left, top: 8, right: width - 14, bottom: height - 40};
    const flat = (v, axis) => axis.log ? Math.log10(v) : v;
    const scale = (range, axis, a, b) => {
      const low = flat(range[0], axis), high = flat(range[1], axis);
      return {to: v => a + (flat(v, axis) - low) / (high - low) * (b - a),
              from: p => { const v = low + (p - a) / (b - a) * (high - low); return axis.log ? 10 ** v : v; }};
    };
    const across = this.across = scale(x, this.x, box.left, box.right), up = this.up = scale(y, this.y, box.bottom, box.top);

    pen.lineWidth = 1;
    pen.fillStyle = "#5b6673";
    pen.strokeStyle = "#e6eaee";
    pen.textAlign = "right"; pen.textBaseline = "middle";
    marks.forEach((v, i) => {
      const at = Math.round(up.to(v)) + 0.5;
      if (at < box.top - 1 || at > box.bottom + 1) return;
      pen.beginPath(); pen.moveTo(box.left, at); pen.lineTo(box.right, at); pen.stroke();
      pen.fillText(names[i], box.left - 6, at);
    });
    pen.textBaseline = "top";
    for (const v of ticks(...x, this.x.log, (box.right - box.left) / 80)) {
      const at = Math.round(across.to(v)) + 0.5, name = amount(v, this.x.kind, 6);
      pen.beginPath(); pen.moveTo(at, box.bottom); pen.lineTo(at, box.bottom + 4); pen.stroke();
      const half = pen.measureText(name).width / 2;
      pen.textAlign = at + half > width ? "right" : at - half < 0 ? "left" : "center";
      pen.fillText(name, at, box.bottom + 6);
    }
    pen.textAlign = "center";
    pen.fillText(this.x.label, (box.left + box.right) / 2, box.bottom + 23);
    pen.strokeStyle = "#8a949e";
    pen.beginPath(); pen.moveTo(box.left, box.bottom + 0.5); pen.lineTo(box.right, box.bottom + 0.5); pen.stroke();

    pen.save();
    pen.beginPath(); pen.rect(box.left, box.top - 3, box.right - box.left + 4, box.bottom - box.top + 5); pen.clip();
    this.series.forEach((s, i) => { if (!this.hidden.has(i)) this.fill(pen, s, this.faint(i)); });
    this.series.forEach((s, i) => { if (!this.hidden.has(i)) this.stroke(pen, s, this.faint(i)); });
    pen.restore();
    this.sized(this.over, width, height);
    this.note.textContent = !this.visible.length ? "Nothing is switched on." : lost ? `${lost} values do not fit on a logarithmic axis, or are too large, and are left out.` : "";
    this.canvas.setAttribute("aria-label", `${this.y.label} by ${this.x.label}, ${this.visible.length} lines; the table below has the numbers`);
    this.took = performance.now() - begin;
    this.draws = (this.draws || 0) + 1;
  }

  faint(i) { return this.focus === null || this.focus === i ? 1 : 0.12; }

  sized(canvas, width, height) {
    const dense = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
    const pen = canvas.getContext("2d");
    pen.scale(dense, dense);
    return pen;
  }

  stroke(pen, s, alpha) {
    pen.strokeStyle = pen.fillStyle = s.colour;
    pen.globalAlpha = alpha * (s.alpha ?? 1);
    pen.lineWidth = s.width ?? 1.8;
    pen.lineJoin = "round";
    pen.setLineDash(s.dash || []);
    pen.beginPath();
    let down = false, alone = true, px = 0, py = 0;
    const dot = () => { if (down && alone) { pen.moveTo(px + 2.2, py); pen.arc(px, py, 2.2, 0, 7); } };
    for (let i = 0; i < s.x.length; i++) {
      if (!this.usable(s.x[i], this.x) || !this.usable(s.y[i], this.y)) { dot(); down = false; continue; }
      const qx = this.across.to(s.x[i]), qy = this.up.to(s.y[i]);
      if (down) { pen.lineTo(qx, qy); alone = false; } else { pen.moveTo(qx, qy); alone = true; }
      down = true; px = qx; py = qy;
    }
    dot();
    pen.stroke();
    pen.setLineDash([]);
    if (s.x.length <= 40) {  // few evaluations: each is marked
      pen.beginPath();
      for (let i = 0; i < s.x.length; i++) if (this.usable(s.x[i], this.x) && this.usable(s.y[i], this.y)) {
        const qx = this.across.to(s.x[i]), qy = this.up.to(s.y[i]);
        pen.moveTo(qx + 2.4, qy); pen.arc(qx, qy, 2.4, 0, 7);
      }
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  fill(pen, s, alpha) {
    if (!s.low) return;
    const floor = v => this.usable(v, this.y) ? this.up.to(v) : this.box.bottom;
    const good = [...s.x.keys()].filter(i => this.usable(s.x[i], this.x) && Number.isFinite(s.low[i]) && Number.isFinite(s.high[i]));
    if (good.length < 2) return;
    pen.globalAlpha = alpha * (s.shade ?? 0.16);
    pen.fillStyle = s.colour;
    pen.beginPath();
    for (const i of good) pen.lineTo(this.across.to(s.x[i]), floor(s.high[i]));
    for (const i of good.reverse()) pen.lineTo(this.across.to(s.x[i]), floor(s.low[i]));
    pen.fill();
    pen.globalAlpha = 1;
  }

  // The point of a series that is nearest to x.
  nearest(s, x) {
    let a = 0, b = s.x.length;
    while (a < b) { const m = (a + b) >> 1; if (s.x[m] < x) a = m + 1; else b = m; }
    let best = -1;
    for (let i = Math.max(0, a - 3); i < Math.min(s.x.length, a + 3); i++)
      if (this.usable(s.x[i], this.x) && this.usable(s.y[i], this.y) && (best < 0 || Math.abs(s.x[i] - x) < Math.abs(s.x[best] - x))) best = i;
    return best;
  }

  hover(px, py) {
    const box = this.box, pen = this.sized(this.over, this.plot.clientWidth, this.plot.clientHeight);
    this.tip.hidden = true;
    if (!box || px < box.left - 8 || px > box.right + 8 || py < 0 || py > box.bottom + 12) return;
    const x = this.across.from(px), found = [];
    this.series.forEach((s, k) => {
      const i = this.hidden.has(k) || s.quiet ? -1 : this.nearest(s, x);
      if (i < 0) return;
      const qx = this.across.to(s.x[i]), qy = this.up.to(s.y[i]);
      if (qx < box.left - 1 || qx > box.right + 1 || qy < box.top - 4 || qy > box.bottom + 4) return;
      found.push({s, i, qx, qy, far: Math.hypot(qx - px, qy - py)});
    });
    if (!found.length) return;
    found.sort((a, b) => a.far - b.far);
    const first = found[0];
    const rows = found.filter(f => Math.abs(f.qx - first.qx) < 24).slice(0, 8);
    pen.strokeStyle = "#8a949e"; pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(first.qx, box.top); pen.lineTo(first.qx, box.bottom); pen.stroke(); pen.setLineDash([]);
    for (const f of rows.slice().reverse()) {
      pen.fillStyle = f.s.colour; pen.strokeStyle = "#fff";
      pen.beginPath(); pen.arc(f.qx, f.qy, f === first ? 5 : 3.2, 0, 7); pen.fill(); pen.stroke();
    }
    const more = f => f.s.low && f.s.high[f.i] > f.s.low[f.i] ? ` (${number(f.s.low[f.i])} to ${number(f.s.high[f.i])})` : "";
    const counted = f => f.s.count && f.s.count[f.i] < f.s.of ? `, ${f.s.count[f.i]} of ${f.s.of} seeds` : "";
    this.tip.replaceChildren(
      el("div", {}, el("span", {}, `${this.x.label}`), el("span", {}, exact(first.s.x[first.i], this.x.kind))),
      ...rows.slice().sort((a, b) => a.qy - b.qy).map(f => el("div", {class: f === first ? "near" : null, style: `color: ${f.s.colour}`},
        el("span", {}, f.s.label), el("span", {}, number(f.s.y[f.i]) + more(f) + counted(f)))));
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth, tall = this.tip.offsetHeight;
    const place = first.qx + 14 + wide > this.plot.clientWidth ? Math.max(0, first.qx - 14 - wide) : first.qx + 14;
    this.tip.style.left = `${Math.min(place, Math.max(0, this.plot.clientWidth - wide))}px`;
    this.tip.style.top = `${Math.max(0, Math.min(py - tall / 2, this.plot.clientHeight - tall))}px`;
  }

  listen() {
    const at = event => { const r = this.plot.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
    let from = null, next = null;
    const follow = () => {
      if (next && from) this.drag(from, next); else if (next) this.hover(...next);
      next = null;
    };
    this.canvas.addEventListener("pointerdown", event => {
      if (event.button) return;
      from = at(event);
      if (event.pointerType === "mouse") this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", event => {
      if (!next) requestAnimationFrame(follow);
      next = at(event);
    });
    this.canvas.addEventListener("pointerup", event => {
      const begin = from, end = at(event);
      from = next = null;
      if (begin && Math.abs(begin[0] - end[0]) > 8) this.zoomBetween(begin, end); else this.hover(...end);
    });
    const leave = () => {
      from = next = null;
      this.tip.hidden = true;
      if (this.box) this.sized(this.over, this.plot.clientWidth, this.plot.clientHeight);
    };
    this.canvas.addEventListener("pointercancel", leave);
    this.canvas.addEventListener("pointerleave", event => { if (!from && event.pointerType === "mouse") leave(); });  // a finger leaves when it is lifted
    this.canvas.addEventListener("dblclick", () => this.zoomTo(null));
  }

  // A drag along the x axis keeps the y axis free: it follows what is to be seen.
  selected([ax, ay], [bx, by]) {
    const clip = (v, low, high) => Math.min(Math.max(v, low), high), box = this.box;
    const wide = [clip(Math.min(ax, bx), box.left, box.right), clip(Math.max(ax, bx), box.left, box.right)];
    const tall = [clip(Math.min(ay, by), box.top, box.bottom), clip(Math.max(ay, by), box.top, box.bottom)];
    return {wide, tall: tall[1] - tall[0] < 24 ? null : tall};
  }

  drag(from, to) {
    if (!this.box) return;
    const pen = this.sized(this.over, this.plot.clientWidth, this.plot.clientHeight);
    this.tip.hidden = true;
    const {wide, tall} = this.selected(from, to), [top, bottom] = tall || [this.box.top, this.box.bottom];
    pen.fillStyle = "rgba(0, 114, 178, .12)"; pen.strokeStyle = "rgba(0, 114, 178, .6)";
    pen.fillRect(wide[0], top, wide[1] - wide[0], bottom - top);
    pen.strokeRect(wide[0], top, wide[1] - wide[0], bottom - top);
  }

  zoomBetween(from, to) {
    const {wide, tall} = this.selected(from, to);
    if (wide[1] - wide[0] < 4) return;
    this.zoomTo({x: wide.map(this.across.from), y: tall ? [this.up.from(tall[1]), this.up.from(tall[0])] : null});
  }

  // Up to nine places on the x axis, and the last value at or before each.
  tabulate() {
    if (!this.numbers.open || !this.x) return;
    const [a, b] = this.range().x;
    const places = ticks(a, b, this.x.log, 8).filter(v => v <= b);
    if (places[places.length - 1] < b) places.push(b);
    const shown = this.visible.filter(s => !s.quiet);
    const value = (s, place) => {
      let found = null;
      for (let i = 0; i < s.x.length && s.x[i] <= place * (1 + 1e-12); i++) if (Number.isFinite(s.y[i])) found = s.y[i];
      return number(found);
    };
    this.rows.replaceChildren(table([`${this.y.label} by ${this.x.label}`, ...places.map(v => amount(v, this.x.kind))],
      shown.map(s => [s.label, ...places.map(place => value(s, place))])));
  }
}

// ---- What is shown.

const numbers = (run, name) => run.data[name] || [];
const has = (run, name) => Boolean(run.data[name]);
const lineRuns = data.lines.map((_, k) => data.runs.filter(run => run.line === k));
const axes = data.across.filter(axis => data.runs.some(run => has(run, axis.name)));
const state = {metric: data.first, x: axes[0].name, each: false, xlog: false, ylog: {}};
const axis = name => axes.find(entry => entry.name === name);
const kept = new Map();

// The mean over the runs of a line, round by round, from the lowest to the highest.
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
  const rows = [...rounds.keys()].sort((a, b) => a - b).map(round => rounds.get(round));
  return {x: rows.map(r => r.x / r.count), y: rows.map(r => r.y / r.count), low: rows.map(r => r.low), high: rows.map(r => r.high),
    count: rows.map(r => r.count), of: runs.length};
}

// A metric that falls by orders of magnitude has a logarithmic axis, unless it is switched.
function logarithmic(metric) {
  if (metric in state.ylog) return state.ylog[metric];
  const known = data.metrics.find(entry => entry.name === metric);
  if (known && known.higher) return false;
  let low = Infinity, high = -Infinity;
  for (const run of data.runs) for (const v of numbers(run, metric)) if (v !== null && Math.abs(v) < 1e100) { low = Math.min(low, v); high = Math.max(high, v); }
  return low > 0 && high > 30 * low;
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
  const rows = data.lines.flatMap((line, k) => {
    const runs = lineRuns[k].filter(run => has(run, state.metric));
    if (!runs.length) return [];
    const of = name => runs.map(run => last(numbers(run, name))).filter(v => v !== null);
    const best = runs.map(run => { const own = numbers(run, state.metric).filter(v => v !== null); return own.length ? own.reduce((a, b) => higher ? Math.max(a, b) : Math.min(a, b)) : null; }).filter(v => v !== null);
    return [[line.label, String(runs.length), exact(mean(of("round")), "count"), spread(of(state.metric)), ...(higher === null ? [] : [spread(best)]),
      ...costs.map(entry => exact(mean(of(entry.name)), entry.kind))]];
  });
  const seeds = lineRuns.some(runs => runs.length > 1) ? "; means over the runs of a line, and from the lowest to the highest" : "";
  summary.replaceChildren(table(head, rows, {caption: `What it came to, and what it cost${seeds}`}));
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
  el("h3", {}, `${paper.name}: ${paper.claims.filter(c => c.holds).length} of ${paper.claims.length} hold`),
  paper.claims.map(c => el("div", {class: c.holds ? "claim" : "claim fails"},
    el("p", {}, el("span", {class: "verdict"}, c.holds ? "✓ holds" : "✗ does not hold"), c.claim, " ", el("span", {class: "where"}, c.ours ? "(our own)" : `(${c.where})`)),
    c.note ? el("p", {class: "where"}, c.note) : null,
    el("details", {}, el("summary", {}, "Measured"), table(["figure", "value"], Object.entries(c.figures || {}).map(([name, value]) => [name, text(value)]), {className: "settings"})))),
]).flat(2));

const count = data.runs.length;
document.getElementById("about").textContent = `${count} run${count === 1 ? "" : "s"}, ${data.lines.length} line${data.lines.length === 1 ? "" : "s"} · ${data.made}`;
window.report = {data, state, curves, update};
})();
