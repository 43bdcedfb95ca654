"use strict";
// What pages share: elements, numbers, and charts on canvas (lines over a shared axis, stacked areas, heat maps). Texts are set or
// drawn, never parsed as HTML.

const byId = (id) => document.getElementById(id);

function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "text") node.textContent = value;
    else if (key === "color") node.style.setProperty("--run", value);
    else if (key === "class") node.className = value;
    else if (key in node && key !== "list") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

// Names of files and folders may hide their direction of writing or be very long.
const clean = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd").slice(0, 4000);

const stored = (key, fallback) => { try { return JSON.parse(localStorage.getItem("ferrotron." + key)) ?? fallback; } catch { return fallback; } };
const store = (key, value) => { try { localStorage.setItem("ferrotron." + key, JSON.stringify(value)); } catch { /* a private window */ } };

// Rows of colour, name and value beside the pointer; none without an event.
function showTip(event, title, rows) {
  const tip = byId("tip");
  if (!event || !rows.length) { tip.hidden = true; return; }
  tip.replaceChildren(el("h3", { text: title }), ...rows.slice(0, 14).map((r) => el("div", {}, el("i", { color: r.color }), el("span", { text: r.name }), el("b", { text: r.text }))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), gap = 14;
  const right = event.clientX + gap + box.width < innerWidth - 6;
  tip.style.left = `${Math.max(6, right ? event.clientX + gap : event.clientX - gap - box.width)}px`;
  tip.style.top = `${Math.min(Math.max(6, event.clientY + gap), innerHeight - box.height - 6)}px`;
}

const COLORS = ["#3b82f6", "#f97316", "#22a559", "#e11d74", "#8b5cf6", "#0ea5b7", "#b7791f", "#7c8798", "#ef4444", "#84a910"];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- numbers ----
const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

function short(x) {
  if (x === null || x === undefined || !isFinite(x)) return "–";
  const a = Math.abs(x);
  if (a === 0) return "0";
  for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]]) {
    if (a >= unit) {
      const y = x / (unit === 1e4 ? 1e3 : unit);
      return trimmed(y.toFixed(Math.abs(y) < 10 ? 2 : Math.abs(y) < 100 ? 1 : 0)) + name;
    }
  }
  if (a >= 100) return x.toLocaleString("en-US", { maximumFractionDigits: 0 });
  if (a >= 0.001) return String(Number(x.toPrecision(4)));
  return x.toExponential(1);
}

function bytes(x) {
  if (x === null || x === undefined || !isFinite(x)) return "–";
  let unit = 0;
  while (Math.abs(x) >= 1024 && unit < 5) { x /= 1024; unit++; }
  return trimmed(x.toFixed(unit && Math.abs(x) < 100 ? 1 : 0)) + " " + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit];
}

function duration(s) {
  if (!isFinite(s) || s < 0) return "–";
  if (s < 60) return `${s < 10 ? s.toFixed(1) : s.toFixed(0)} s`;
  const m = Math.floor(s / 60), h = Math.floor(m / 60), d = Math.floor(h / 24);
  if (m < 60) return `${m} min ${Math.floor(s % 60)} s`;
  return h < 24 ? `${h} h ${m % 60} min` : `${d} d ${h % 24} h`;
}

// Round numbers of bytes.
function byteTicks(min, max, n) {
  const unit = Math.pow(1024, Math.max(0, Math.floor(Math.log2(Math.max(max, 1)) / 10)));
  return ticks(min / unit, max / unit, n).map((x) => x * unit);
}

// Round numbers in a range, about n of them.
function ticks(min, max, n) {
  const raw = (max - min) / Math.max(1, n);
  if (!(raw > 0)) return [min];
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = power * ([1, 2, 5, 10].find((k) => k * power >= raw * 0.999) || 10);
  const out = [];
  for (let i = Math.ceil(min / step - 1e-9); i * step <= max + step * 1e-9; i++) out.push(Math.abs(i * step) < step * 1e-9 ? 0 : i * step);
  return out;
}

function logTicks(min, max, n) {
  const low = Math.floor(Math.log10(min)), high = Math.ceil(Math.log10(max));
  let digits = high - low <= 1 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : high - low <= 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((high - low) / Math.max(1, n)));
  const out = [];
  for (let p = low; p <= high; p += every) for (const d of digits) out.push(d * Math.pow(10, p));
  const inside = out.filter((x) => x >= min * 0.999 && x <= max * 1.001);
  return inside.length >= 2 ? inside : ticks(min, max, n).filter((x) => x > 0);
}

// The index of the value of a rising array that is nearest to x.
function nearest(array, x) {
  let low = 0, high = array.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (array[mid] < x) low = mid + 1; else high = mid;
  }
  return low > 0 && x - array[low - 1] < array[low] - x ? low - 1 : low;
}

function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  const width = Math.max(1, Math.round(box.width)), height = Math.max(1, Math.round(box.height));
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  g.lineJoin = "round";
  return { g, width, height };
}

// ---- lines ----
class LineChart {
  // options: format (of y), log, stack, zero (the axis begins at 0), left (least pixels beside the axis)
  constructor(plot, options, shared) {
    Object.assign(this, { plot, options, shared, series: [], marks: [], range: null });
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    plot.append(this.canvas);
    this.listen();
  }

  // series: { name, color, x, y, faint, dots, dash }; marks: { x, kind, text }
  set(series, marks, xRange) {
    this.series = this.options.stack ? stacked(series) : series;
    this.marks = marks || [];
    this.xRange = xRange;
    const latest = series.filter((s) => !s.faint && s.y.length).map((s) => `${s.name} ${this.options.format(s.y[s.y.length - 1])}`);
    this.canvas.setAttribute("aria-label", latest.slice(0, 10).join(", "));
    this.plot.dataset.points = String(series.reduce((n, s) => n + s.x.length, 0));
    this.draw();
  }

  limits() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    const [from, to] = this.xRange || [-Infinity, Infinity];
    for (const s of this.series) {
      for (let i = 0; i < s.x.length; i++) {
        const x = s.x[i], y = s.y[i];
        if (x === null || x < from || x > to) continue;
        if (x < x0) x0 = x;
        if (x > x1) x1 = x;
        if (y === null || !isFinite(y) || (this.options.log && y <= 0)) continue;
        if (y < y0) y0 = y;
        if (y > y1) y1 = y;
      }
    }
    if (x0 > x1 || y0 > y1) return null;
    if (isFinite(from)) x0 = from;
    if (isFinite(to)) x1 = to;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    if (this.options.log) {
      const pad = Math.max(Math.pow(y1 / y0, 0.05), 1.02);
      return { x0, x1, y0: y0 / pad, y1: y1 * pad };
    }
    if (this.options.stack || this.options.zero) y0 = Math.min(0, y0);
    const span = y1 - y0 || Math.abs(y1) * 0.1 || 1;
    return { x0, x1, y0: y0 === 0 ? 0 : y0 - span * 0.06, y1: y1 + span * 0.08 };
  }

  draw() {
    const { g, width, height } = prepare(this.canvas);
    const r = this.limits();
    this.range = r;
    g.textBaseline = "middle";
    if (!r) {
      g.fillStyle = css("--faint");
      g.textAlign = "center";
      g.fillText("no values here", width / 2, height / 2);
      return;
    }
    const rows = Math.max(2, Math.floor(height / 52));
    const yTicks = this.options.log ? logTicks(r.y0, r.y1, rows) : (this.options.format === bytes ? byteTicks : ticks)(r.y0, r.y1, rows).filter((y) => y >= r.y0 - 1e-12);
    const labels = yTicks.map(this.options.format);
    const left = Math.max(Math.ceil(Math.max(...labels.map((t) => g.measureText(t).width), 18)) + 9, this.options.left || 0);
    const box = { left, right: width - 8, top: 7, bottom: height - 19 };
    this.box = box;
    const scaleY = this.options.log ? Math.log : (y) => y;
    const [sy0, sy1] = [scaleY(r.y0), scaleY(r.y1)];
    const X = (x) => box.left + ((x - r.x0) / (r.x1 - r.x0)) * (box.right - box.left);
    const Y = (y) => box.bottom - ((scaleY(y) - sy0) / (sy1 - sy0)) * (box.bottom - box.top);
    this.X = X;
    this.Y = Y;
    // Grid and labels.
    g.strokeStyle = css("--grid");
    g.fillStyle = css("--faint");
    g.lineWidth = 1;
    g.textAlign = "right";
    let above = Infinity;
    yTicks.forEach((y, i) => {
      const at = Math.round(Y(y)) + 0.5;
      if (at < box.top - 2 || at > box.bottom + 2) return;
      g.beginPath(); g.moveTo(box.left, at); g.lineTo(box.right, at); g.stroke();
      if (Math.abs(above - at) > 13) { g.fillText(labels[i], box.left - 6, at); above = at; }
    });
    g.textAlign = "center";
    let rightmost = -Infinity;
    for (const x of ticks(r.x0, r.x1, Math.max(2, Math.floor((box.right - box.left) / 64)))) {
      const text = this.shared.formatX(x), half = g.measureText(text).width / 2;
      const at = Math.min(Math.max(X(x), box.left + half - 4), box.right - half + 4);
      if (at - half > rightmost + 8) { g.fillText(text, at, height - 8); rightmost = at + half; }
    }
    g.save();
    g.beginPath(); g.rect(box.left - 1, 0, box.right - box.left + 3, box.bottom + 2); g.clip();
    for (const m of this.marks) this.mark(g, box, m);
    for (const s of this.series) if (s.base) this.area(g, s);
    for (const s of this.series) this.line(g, s);
    g.restore();
    this.cross(g, box);
  }

  line(g, s) {
    g.strokeStyle = s.color;
    g.globalAlpha = s.faint ? 0.28 : 1;
    g.lineWidth = s.faint ? 1 : 1.7;
    g.setLineDash(s.dash || []);
    g.beginPath();
    let pen = false;
    for (let i = 0; i < s.x.length; i++) {
      const y = s.y[i];
      if (y === null || !isFinite(y) || (this.options.log && y <= 0)) { pen = false; continue; }
      const px = this.X(s.x[i]), py = this.Y(y);
      if (pen) g.lineTo(px, py); else g.moveTo(px, py);
      pen = true;
    }
    g.stroke();
    g.setLineDash([]);
    g.fillStyle = s.color;
    const single = s.x.length === 1;
    if (s.dots || single) {
      for (let i = 0; i < s.x.length; i++) {
        if (s.y[i] === null || !isFinite(s.y[i])) continue;
        g.beginPath(); g.arc(this.X(s.x[i]), this.Y(s.y[i]), s.x.length > 60 ? 1.8 : 2.8, 0, 7); g.fill();
      }
    }
    // Values that are not finite are crosses at the top.
    if (!s.faint && this.box) {
      g.strokeStyle = css("--bad");
      g.lineWidth = 1.4;
      for (let i = 0; i < s.x.length; i++) {
        if (s.y[i] !== null) continue;
        const px = this.X(s.x[i]), py = this.box.top + 5;
        if (!s.nulls) continue;
        g.beginPath(); g.moveTo(px - 3, py - 3); g.lineTo(px + 3, py + 3); g.moveTo(px + 3, py - 3); g.lineTo(px - 3, py + 3); g.stroke();
      }
    }
    g.globalAlpha = 1;
  }

  area(g, s) {
    g.fillStyle = s.color;
    g.globalAlpha = 0.5;
    g.beginPath();
    s.x.forEach((x, i) => (i ? g.lineTo(this.X(x), this.Y(s.y[i])) : g.moveTo(this.X(x), this.Y(s.y[i]))));
    for (let i = s.x.length - 1; i >= 0; i--) g.lineTo(this.X(s.x[i]), this.Y(s.base[i]));
    g.closePath();
    g.fill();
    g.globalAlpha = 1;
  }

  mark(g, box, m) {
    if (m.x === null || !isFinite(m.x)) return;
    const color = css({ fault: "--bad", save_failed: "--bad", restart: "--warn", rerun: "--warn", straggler: "--warn", memory_growth: "--warn" }[m.kind] || "--faint");
    const at = Math.round(this.X(m.x)) + 0.5;
    g.strokeStyle = g.fillStyle = color;
    g.lineWidth = 1;
    g.setLineDash([4, 3]);
    g.beginPath(); g.moveTo(at, box.top + 8); g.lineTo(at, box.bottom); g.stroke();
    g.setLineDash([]);
    g.beginPath(); g.moveTo(at - 4, box.top); g.lineTo(at + 4, box.top); g.lineTo(at, box.top + 8); g.fill();
  }

  // The crosshair of all charts, and the range that is being dragged here.
  cross(g, box) {
    const hover = this.shared.hover;
    if (this.drag) {
      const [a, b] = [this.drag.from, this.drag.to].map(this.X);
      g.fillStyle = css("--accent");
      g.globalAlpha = 0.14;
      g.fillRect(Math.min(a, b), box.top, Math.abs(b - a), box.bottom - box.top);
      g.globalAlpha = 1;
    }
    if (hover === null || hover < this.range.x0 || hover > this.range.x1) return;
    const at = Math.round(this.X(hover)) + 0.5;
    g.strokeStyle = css("--faint");
    g.lineWidth = 1;
    g.globalAlpha = 0.6;
    g.beginPath(); g.moveTo(at, box.top); g.lineTo(at, box.bottom); g.stroke();
    g.globalAlpha = 1;
    for (const s of this.series) {
      const i = s.faint ? -1 : nearest(s.x, hover);
      if (i < 0 || s.y[i] === null || !isFinite(s.y[i]) || (this.options.log && s.y[i] <= 0)) continue;
      const px = this.X(s.x[i]);
      if (Math.abs(px - at) > 14) continue;
      g.fillStyle = s.color;
      g.beginPath(); g.arc(px, this.Y(s.y[i]), 3.2, 0, 7); g.fill();
    }
  }

  valueAt(event) {
    const box = this.canvas.getBoundingClientRect(), { left, right } = this.box, r = this.range;
    const share = (event.clientX - box.left - left) / (right - left);
    return r.x0 + Math.min(1, Math.max(0, share)) * (r.x1 - r.x0);
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (e) => {
      if (!this.range) return;
      const x = this.valueAt(e);
      if (this.drag) this.drag.to = x;
      this.shared.setHover(x, this, e);
    });
    canvas.addEventListener("pointerleave", () => this.shared.setHover(null));
    canvas.addEventListener("pointerdown", (e) => {
      if (!this.range || e.button !== 0 || e.pointerType === "touch") return;
      this.drag = { from: this.valueAt(e), to: this.valueAt(e) };
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointerup", () => {
      const d = this.drag;
      this.drag = null;
      if (d && this.range && Math.abs(d.to - d.from) > (this.range.x1 - this.range.x0) * 0.01) {
        this.shared.setZoom([Math.min(d.from, d.to), Math.max(d.from, d.to)]);
      } else this.draw();
    });
    canvas.addEventListener("dblclick", () => this.shared.setZoom(null));
  }

  // What the tooltip says at x: rows of name, colour and value.
  rows(x) {
    const out = [];
    for (const s of this.series) {
      const i = s.faint ? -1 : nearest(s.x, x);
      if (i < 0 || Math.abs(this.X(s.x[i]) - this.X(x)) > 30) continue;
      const y = s.base ? s.y[i] - s.base[i] : s.y[i];
      out.push({ name: s.name, color: s.color, text: y === null ? "not a number" : this.options.format(y), y: y === null ? Infinity : y });
    }
    return out;
  }
}

// Sums of series one above the other, at the union of their positions; a series keeps its value until the next.
function stacked(series) {
  const xs = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  let base = xs.map(() => 0);
  return series.map((s) => {
    let i = -1;
    const y = xs.map((x, k) => {
      while (i + 1 < s.x.length && s.x[i + 1] <= x) i++;
      return base[k] + (i >= 0 && isFinite(s.y[i]) ? s.y[i] : 0);
    });
    const out = { ...s, x: xs, y, base };
    base = y;
    return out;
  });
}

// ---- heat map ----
class HeatMap {
  constructor(plot, shared) {
    Object.assign(this, { plot, shared, data: null });
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    plot.append(this.canvas);
    this.canvas.addEventListener("pointermove", (e) => this.hover(e));
    this.canvas.addEventListener("pointerleave", () => this.shared.showTip(null));
  }

  // data: { layer, steps, values[step][expert] relative to the mean }
  set(data) {
    this.data = data;
    const n = data.values.length;
    this.plot.dataset.points = String(n);
    this.canvas.setAttribute("aria-label", `tokens of ${n ? data.values[0].length : 0} experts over ${n} steps, layer ${data.layer}`);
    this.draw();
  }

  draw() {
    const { g, width, height } = prepare(this.canvas);
    if (!this.data || !this.data.values.length) return;
    const { steps, values } = this.data, experts = Math.max(...values.map((v) => v.length));
    const box = { left: 30, right: width - 58, top: 4, bottom: height - 19 };
    this.box = { ...box, experts };
    const w = (box.right - box.left) / values.length, h = (box.bottom - box.top) / experts;
    const stops = ["--heat0", "--heat1", "--heat2"].map((n) => css(n).split(" ").map(Number));
    const color = (v) => {
      const [a, b, t] = v <= 1 ? [stops[0], stops[1], v] : [stops[1], stops[2], Math.min(1, v - 1)];
      return `rgb(${a.map((c, i) => Math.round(c + (b[i] - c) * t)).join(" ")})`;
    };
    const gap = h > 7 ? 1 : 0;
    values.forEach((column, i) => column.forEach((v, e) => {
      g.fillStyle = color(v);
      g.fillRect(box.left + i * w, box.top + e * h, Math.ceil(w + 0.2), Math.max(0.6, h - gap + (gap ? 0 : 0.4)));
    }));
    g.fillStyle = css("--faint");
    g.textBaseline = "middle";
    g.textAlign = "right";
    const every = Math.max(1, Math.ceil(13 / h)), round = [1, 2, 4, 8, 16, 32, 64, 128].find((k) => k >= every) || every;
    for (let e = 0; e < experts; e += round) g.fillText(String(e), box.left - 6, box.top + (e + 0.5) * h);
    g.textAlign = "left";
    g.fillText(String(steps[0]), box.left, height - 8);
    g.textAlign = "right";
    g.fillText(`step ${steps[steps.length - 1]}`, box.right, height - 8);
    // The scale.
    const bar = { x: width - 46, top: box.top + 4, bottom: box.bottom - 4 };
    for (let y = bar.top; y < bar.bottom; y++) {
      g.fillStyle = color(2 * (1 - (y - bar.top) / (bar.bottom - bar.top)));
      g.fillRect(bar.x, y, 9, 1.2);
    }
    g.fillStyle = css("--faint");
    g.textAlign = "left";
    [["2×", bar.top + 4], ["mean", (bar.top + bar.bottom) / 2], ["0", bar.bottom - 4]].forEach(([t, y]) => g.fillText(t, bar.x + 13, y));
  }

  hover(event) {
    if (!this.box || !this.data.values.length) return;
    const at = this.canvas.getBoundingClientRect(), { left, right, top, bottom, experts } = this.box;
    const i = Math.floor(((event.clientX - at.left - left) / (right - left)) * this.data.values.length);
    const e = Math.floor(((event.clientY - at.top - top) / (bottom - top)) * experts);
    const v = (this.data.values[i] || [])[e];
    if (v === undefined) return this.shared.showTip(null);
    this.shared.showTip(event, `step ${this.data.steps[i]}`, [{ name: `expert ${e}`, color: css("--accent"), text: `${v.toFixed(2)} × mean` }]);
  }
}
