// What the pages share: numbers, tables, and charts on canvas. Each page has it in the same function as its own script.

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
    else if (name === "style") node.style.cssText = value;  // an attribute would need a policy that allows it
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

// Whether lists of values, all positive, span more than an order of magnitude.
function decades(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const v of list) if (v !== null && Math.abs(v) < 1e100) { low = Math.min(low, v); high = Math.max(high, v); }
  return low > 0 && high > 30 * low;
}

// ---- A chart: series of {label, colour, dash, x, y, low, high, width, alpha, note}.

class Chart {
  constructor(name) {
    this.name = name;
    this.series = [];
    this.hidden = new Set();
    this.zoom = null;
    this.focus = null;
    this.pointer = null;  // where values are asked for
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
    this.pointer = null;
    this.reset.disabled = !box;
    this.tip.hidden = true;
    this.later();
    this.tabulate();
  }

  get visible() { return this.series.filter((s, i) => !this.hidden.has(i)); }

  // A colour of the page's style sheet.
  ink(name) { return getComputedStyle(this.plot).getPropertyValue(name); }

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
    pen.fillStyle = this.ink("--soft");
    pen.strokeStyle = this.ink("--grid");
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
    pen.strokeStyle = this.ink("--axis");
    pen.beginPath(); pen.moveTo(box.left, box.bottom + 0.5); pen.lineTo(box.right, box.bottom + 0.5); pen.stroke();

    pen.save();
    pen.beginPath(); pen.rect(box.left, box.top - 3, box.right - box.left + 4, box.bottom - box.top + 5); pen.clip();
    this.series.forEach((s, i) => { if (!this.hidden.has(i)) this.fill(pen, s, this.faint(i)); });
    this.series.forEach((s, i) => { if (!this.hidden.has(i)) this.stroke(pen, s, this.faint(i)); });
    pen.restore();
    if (this.pointer) this.hover(...this.pointer); else this.sized(this.over, width, height);
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
    this.pointer = [px, py];
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
    pen.strokeStyle = this.ink("--axis"); pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(first.qx, box.top); pen.lineTo(first.qx, box.bottom); pen.stroke(); pen.setLineDash([]);
    for (const f of rows.slice().reverse()) {
      pen.fillStyle = f.s.colour; pen.strokeStyle = this.ink("--paper");
      pen.beginPath(); pen.arc(f.qx, f.qy, f === first ? 5 : 3.2, 0, 7); pen.fill(); pen.stroke();
    }
    const more = f => f.s.low && f.s.high[f.i] > f.s.low[f.i] ? ` (${number(f.s.low[f.i])} to ${number(f.s.high[f.i])})` : "";
    this.tip.replaceChildren(
      el("div", {}, el("span", {}, `${this.x.label}`), el("span", {}, exact(first.s.x[first.i], this.x.kind))),
      ...rows.slice().sort((a, b) => a.qy - b.qy).map(f => el("div", {class: f === first ? "near" : null, style: `color: ${f.s.colour}`},
        el("span", {}, f.s.label), el("span", {}, number(f.s.y[f.i]) + more(f)))));
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
      from = next = this.pointer = null;
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
    this.pointer = null;
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
