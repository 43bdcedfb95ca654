// The page of a profile. Its data is in the page; whatever is in it is set as text or drawn, never parsed as HTML.

const { subject, profile } = JSON.parse(byId("data").textContent);
const view = { theme: stored("theme", "auto"), range: null, drag: null };

const time = (s) => {
  if (s === null || s === undefined || !isFinite(s)) return "–";
  const a = Math.abs(s);
  const [x, unit] = a >= 1 ? [s, "s"] : a >= 1e-3 ? [s * 1e3, "ms"] : [s * 1e6, "µs"];
  return a === 0 ? "0" : `${Math.abs(x) >= 100 ? x.toFixed(0) : trimmed(x.toPrecision(3))} ${unit}`;
};
const percent = (x) => (x === null || x === undefined || !isFinite(x) ? "–" : `${x >= 0.1 || x === 0 ? (x * 100).toFixed(0) : (x * 100).toFixed(1)} %`);
const mean = (of) => profile.breakdown.reduce((sum, r) => sum + of(r), 0) / Math.max(1, profile.breakdown.length);

// ---- colours ----
const FIXED = { "communication": "#e11d74", "host": "#94a0b3", "forward": "#7d8ca6", "backward": "#566480" };
const PARTS = [["compute", "compute", "#3b82f6"], ["exposed communication", "exposed_communication", "#e11d74"], ["exposed copies", "exposed_copies", "#f97316"], ["idle", "idle", "#94a0b3"]];
const PALETTE = ["#3b82f6", "#22a559", "#f97316", "#8b5cf6", "#0ea5b7", "#b7791f", "#84a910", "#d6457e", "#64748b", "#ef6c5a", "#14a37f", "#a855f7", "#c2913a", "#7c8798"];
const familyColor = {};
profile.families.forEach((f, i) => { familyColor[f.name] = PALETTE[i % PALETTE.length]; });
const colorOf = ([name, family]) => (family === "pass" ? (name.startsWith("backward") ? FIXED.backward : FIXED.forward) : FIXED[family] || familyColor[family] || "#7c8798");

// ---- the step in numbers ----
function figures() {
  const floor = profile.families.reduce((sum, f) => sum + (f.floor_s || 0), 0);
  const exposed = mean((r) => r.exposed_communication), idle = subject.idle_s;
  const tflops = profile.flops / profile.step_s / 1e12;
  const grade = (share, warn, bad) => (share > bad ? "bad" : share > warn ? "warn" : "good");
  const out = [
    ["Step", time(profile.step_s), subject.untraced_steps ? `traced: ${time(profile.traced_step_s)}` : "traced"],
    ["Tokens/s", short(profile.tokens / profile.step_s), `${short(profile.tokens)} per step`],
    subject.peak_tflops
      ? ["MFU", percent(tflops / subject.peak_tflops), `${short(tflops)} of ${short(subject.peak_tflops)} TFLOP/s`]
      : ["Model TFLOP/s", short(Number(tflops.toPrecision(3))), profile.ranks > 1 ? "all ranks together" : "without recomputation"],
  ];
  if (floor > 0) out.push(["Of roofline", percent(floor / profile.step_s), `the least time is ${time(floor)}`]);
  if (profile.ranks > 1) out.push(["Exposed communication", percent(exposed / profile.traced_step_s), `${time(exposed)} per step and rank`, grade(exposed / profile.traced_step_s, 0.05, 0.2)]);
  out.push(["Nothing runs", percent(idle / profile.step_s), `${time(idle)} between kernels`, grade(idle / profile.step_s, 0.1, 0.3)]);
  const m = profile.memory;
  out.push(["Peak memory", bytes(m.total_peak), m.capacity ? `of ${bytes(m.capacity)}` : `rank ${m.rank}`]);
  byId("figures").replaceChildren(...out.map(([name, value, more, kind]) => el("div", { class: `figure ${kind || ""}` }, el("span", { text: name }), el("b", { text: value }), el("em", { text: more || "", title: more || "" }))));
}

// ---- what to change ----
const PRICES = { "same results": ["#16a34a", "same results"], "more memory": ["#3b82f6", "same results, more memory"], "other numerics": ["#d97706", "other numerics: compare the loss"], "another batch": ["#8b5cf6", "another batch: check the learning rate"] };

function quoted(setting) {
  return /["'\[\] ]/.test(setting) ? `--set '${setting}'` : `--set ${setting}`;
}

function advice() {
  const rows = profile.advice.map((a) => {
    const [color, price] = PRICES[a.price] || ["#7c8798", a.price];
    const text = a.settings.map(quoted).join(" ");
    const copy = el("button", { text: "Copy", title: "Copy the options" });
    copy.addEventListener("click", () => navigator.clipboard.writeText(text).then(() => { copy.textContent = "Copied"; }, () => { copy.textContent = "Select it"; }));
    return el("li", { color },
      el("div", { class: "gain" }, el("b", { text: `−${percent(a.gain_s / profile.step_s)}` }), el("span", { text: a.price === "another batch" ? `${time(a.gain_s)} per ${short(profile.tokens)} tokens` : `${time(a.gain_s)} per step` })),
      el("div", { class: "keys" }, el("code", { text }), copy, el("em", { text: price })),
      el("p", { text: a.why + (a.memory ? ` Memory: ${a.memory}.` : "") }));
  });
  if (!rows.length) rows.push(el("li", { class: "nothing" }, el("p", { text: `Nothing stands out: no setting that this report knows is expected to save 1 % of a step. ${verdict()}` })));
  byId("advice").replaceChildren(...rows);
}

function verdict() {
  const f = profile.families[0];
  if (!f) return "";
  const roof = f.floor_s ? ` at ${percent(f.floor_s / f.measured_s)} of their roofline` : "";
  return `Most of the time is in ${f.name}: ${percent(f.measured_s / profile.traced_step_s)} of a step${roof}.`;
}

// ---- where a step goes ----
function breakdown() {
  const longest = Math.max(...profile.breakdown.map((r) => r.total), 1e-12);
  const shown = profile.breakdown.slice(0, 64);
  byId("breakdown").replaceChildren(...shown.map((r) => {
    const parts = PARTS.filter(([, key]) => r[key] > 0).map(([name, key, color]) => {
      const share = r[key] / r.total;
      const part = el("i", { color, text: share > 0.09 ? percent(share) : "", title: `${name}: ${time(r[key])} (${percent(share)})` });
      part.style.width = `${(100 * r[key]) / longest}%`;
      return part;
    });
    return el("div", { class: "rank-bar" }, el("span", { text: `rank ${r.rank}` }), el("div", { class: "track" }, ...parts), el("span", { text: time(r.total) }));
  }));
  const steps = profile.steps === 1 ? "one traced step" : `mean of ${profile.steps} traced steps`;
  byId("breakdown-of").textContent = steps + (profile.breakdown.length > shown.length ? `, the first ${shown.length} of ${profile.breakdown.length} ranks` : "");
  const used = PARTS.filter(([, key]) => profile.breakdown.some((r) => r[key] > 0));
  byId("breakdown-legend").replaceChildren(...used.map(([name, , color]) => el("span", { color }, el("i"), name === "idle" ? "idle: no kernel, no transfer" : name)));
}

// ---- timeline ----
const UNIT = 1e-7; // seconds of a tick of the timeline
const LABELS = 96; // pixels of names beside lanes
const t = profile.timeline;
const traceEnd = Math.max(1, ...t.lanes.map((l) => (l.start.length ? l.start[l.start.length - 1] + l.length[l.length.length - 1] : 0)), ...t.steps.map((s) => s[1]));
const traceStart = Math.min(...t.lanes.map((l) => (l.start.length ? l.start[0] : Infinity)), ...t.steps.map((s) => s[0]), traceEnd);

class LaneChart {
  constructor(plot) {
    this.plot = plot;
    this.canvas = el("canvas", { tabIndex: 0, role: "img" });
    plot.append(this.canvas);
    this.rows = [];
    let y = 20, rank = null;
    for (const lane of t.lanes) {
      if (lane.rank !== rank) { y += rank === null ? 0 : 8; if (profile.ranks > 1) { this.rows.push({ title: `rank ${lane.rank}`, y }); y += 17; } rank = lane.rank; }
      const height = lane.name === "layers" || lane.name === "host" ? 17 : 26;
      this.rows.push({ lane, y, height });
      y += height + 4;
    }
    plot.style.height = `${y + 4}px`;
    this.canvas.setAttribute("aria-label", `${t.lanes.length} lanes over ${time((traceEnd - traceStart) * UNIT)}`);
    this.listen();
  }

  left() { return this.plot.clientWidth < 560 ? 4 : LABELS; }

  draw() {
    const { g, width, height } = prepare(this.canvas);
    const [x0, x1] = view.range, left = this.left(), right = width - 8;
    const X = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
    Object.assign(this, { X, right });
    g.textBaseline = "middle";
    // Axis.
    const origin = originOf(view.range);
    g.fillStyle = css("--faint");
    g.strokeStyle = css("--grid");
    g.textAlign = "center";
    let last = -Infinity;
    for (const tick of ticks((x0 - origin) * UNIT, (x1 - origin) * UNIT, Math.max(2, Math.floor((right - left) / 90)))) {
      const at = X(origin + tick / UNIT), text = time(tick), half = g.measureText(text).width / 2;
      g.beginPath(); g.moveTo(Math.round(at) + 0.5, 18); g.lineTo(Math.round(at) + 0.5, height); g.stroke();
      const place = Math.min(Math.max(at, left + half), right - half);
      if (place - half > last + 8) { g.fillText(text, place, 9); last = place + half; }
    }
    // Borders of steps.
    g.strokeStyle = css("--faint");
    g.setLineDash([3, 3]);
    for (const step of t.steps) for (const at of step) {
      if (at < x0 || at > x1) continue;
      g.beginPath(); g.moveTo(Math.round(X(at)) + 0.5, 18); g.lineTo(Math.round(X(at)) + 0.5, height); g.stroke();
    }
    g.setLineDash([]);
    for (const row of this.rows) {
      g.textAlign = "left";
      if (row.title) { g.fillStyle = css("--soft"); g.font = "600 11px system-ui, sans-serif"; g.fillText(row.title, left > 8 ? 2 : left, row.y + 8); g.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"; continue; }
      if (left > 8) { g.fillStyle = css("--soft"); g.fillText(row.lane.name.slice(0, 18), 2, row.y + row.height / 2); }
      g.fillStyle = css("--track");
      g.globalAlpha = 0.45;
      g.fillRect(left, row.y, right - left, row.height);
      g.globalAlpha = 1;
      this.lane(g, row, X, left, right);
    }
    if (view.drag) {
      const [a, b] = view.drag.map(X);
      g.fillStyle = css("--accent");
      g.globalAlpha = 0.16;
      g.fillRect(Math.min(a, b), 18, Math.abs(b - a), height - 18);
      g.globalAlpha = 1;
    }
    this.plot.dataset.entries = String(t.lanes.reduce((n, l) => n + l.start.length, 0));
  }

  lane(g, { lane, y, height }, X, left, right) {
    const [x0, x1] = view.range;
    let painted = -Infinity, color = null;
    g.save();
    g.beginPath(); g.rect(left, y, right - left, height); g.clip();
    for (let i = first(lane, x0); i < lane.start.length && lane.start[i] < x1; i++) {
      const a = X(lane.start[i]), b = X(lane.start[i] + lane.length[i]);
      const mine = colorOf(t.names[lane.name_of[i]]);
      // Entries narrower than a pixel are painted once.
      if (b < painted && mine === color) continue;
      const w = Math.max(b - a - (b - a > 4 ? 0.8 : 0), 0.6);
      g.fillStyle = mine;
      g.fillRect(a, y, w, height);
      [painted, color] = [Math.max(Math.ceil(a * 2) / 2, b), mine];
      if (w > 34) {
        const from = Math.max(a, left) + 4, room = Math.min(b, right) - from - 4;
        const text = t.names[lane.name_of[i]][0];
        if (room > 24) { g.fillStyle = "#fff"; g.fillText(fitted(g, text, room), from, y + height / 2 + 0.5); }
      }
    }
    g.restore();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect(), left = this.left();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left - left) / (this.right - left)));
    return view.range[0] + share * (view.range[1] - view.range[0]);
  }

  hover(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top;
    const row = this.rows.find((r) => r.lane && y >= r.y && y < r.y + r.height);
    if (!row) return showTip(null);
    const x = this.at(event), lane = row.lane, slack = ((view.range[1] - view.range[0]) / this.right) * 2;
    let best = -1;
    for (let i = first(lane, x - slack); i < lane.start.length && lane.start[i] <= x + slack; i++) if (lane.start[i] + lane.length[i] >= x - slack) best = i;
    if (best < 0) return showTip(null);
    const [name, family] = t.names[lane.name_of[best]], s = lane.length[best] * UNIT;
    showTip(event, `rank ${lane.rank}, ${lane.name}`, [{ name: clean(name), color: colorOf([name, family]), text: time(s) }, { name: "of a step", color: "transparent", text: percent(s / profile.traced_step_s) }]);
  }

  listen() {
    const c = this.canvas;
    c.addEventListener("pointerdown", (e) => {
      if (e.button !== 0 || e.pointerType === "touch") return;
      view.drag = [this.at(e), this.at(e)];
      c.setPointerCapture(e.pointerId);
    });
    c.addEventListener("pointermove", (e) => {
      if (view.drag) { view.drag[1] = this.at(e); this.draw(); } else this.hover(e);
    });
    c.addEventListener("pointerleave", () => showTip(null));
    c.addEventListener("pointerup", () => {
      const drag = view.drag;
      view.drag = null;
      if (drag && Math.abs(drag[1] - drag[0]) > (view.range[1] - view.range[0]) * 0.005) show([Math.min(...drag), Math.max(...drag)]);
      else this.draw();
    });
    c.addEventListener("dblclick", () => show(whole()));
    c.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      zoom(Math.exp(e.deltaY / 300), this.at(e));
    }, { passive: false });
    c.addEventListener("keydown", (e) => {
      const act = { ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(whole()) }[e.key];
      if (act) { e.preventDefault(); act(); }
    });
  }
}

// The first entry of a lane that may reach x: entries nest a few levels deep at most.
function first(lane, x) {
  let low = 0, high = lane.start.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (lane.start[mid] < x) low = mid + 1; else high = mid;
  }
  return Math.max(0, low - 8);
}

function fitted(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  let n = Math.max(1, Math.floor((text.length * room) / g.measureText(text).width) - 1);
  return `${text.slice(0, n)}…`;
}

// Times count from the start of the first step in view.
function originOf([a, b]) {
  const step = t.steps.find((s) => s[1] > a + (b - a) * 0.01 && s[0] < b);
  return step ? step[0] : traceStart;
}

const whole = () => [traceStart, traceEnd];
const lastStep = () => (t.steps.length ? padded(t.steps[t.steps.length - 1]) : whole());
const padded = ([a, b]) => [a - (b - a) * 0.004, b + (b - a) * 0.004];

function show(range) {
  const least = 20, span = Math.max(range[1] - range[0], least);
  view.range = [range[0], range[0] + span];
  lanes.draw();
  drawMemory();
  byId("timeline").dataset.span = String(Math.round(span));
}
function zoom(factor, at) {
  const [a, b] = view.range, x = at === undefined ? (a + b) / 2 : at;
  const limit = whole(), grown = [x - (x - a) * factor, x + (b - x) * factor];
  show([Math.max(limit[0], grown[0]), Math.min(limit[1], grown[1])]);
}
function pan(share) {
  const [a, b] = view.range, by = (b - a) * share;
  const shift = by < 0 ? Math.max(by, traceStart - a) : Math.min(by, traceEnd - b);
  show([a + shift, b + shift]);
}

function zoomTools() {
  const button = (text, title, act) => { const b = el("button", { text, title }); b.addEventListener("click", act); return b; };
  const few = t.steps.length > 1 && t.steps.length <= 6;
  const steps = few ? t.steps.map((s, i) => button(`step ${i + 1}`, "Show this step", () => show(padded(s)))) : [button("last step", "Show the last step", () => show(lastStep()))];
  byId("zooms").replaceChildren(...steps, button("all", "Show everything (double click)", () => show(whole())),
    button("+", "Zoom in (Ctrl and wheel)", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)), button("←", "Earlier", () => pan(-0.25)), button("→", "Later", () => pan(0.25)));
  const used = new Map();
  for (const lane of t.lanes) for (const i of lane.name_of) used.set(t.names[i][1] === "pass" ? t.names[i][0].split(" ")[0] : t.names[i][1], colorOf(t.names[i]));
  const order = [...profile.families.map((f) => f.name), "communication", "forward", "backward", "host"].filter((name) => used.has(name));
  byId("timeline-legend").replaceChildren(...order.map((name) => el("span", { color: used.get(name) }, el("i"), name)));
  const left = [];
  if (t.more_ranks) left.push(`${t.more_ranks} more ranks`);
  if (t.more_steps) left.push(`${t.more_steps} earlier steps`);
  const host = subject.on_gpu ? "The host lane shows kernel launches on the host's clock." : "The host lane is the time between kernels, which the CPU itself computes.";
  byId("timeline-note").textContent = host + (left.length ? ` Not shown: ${left.join(" and ")}; the trace has them.` : "");
}

// ---- memory ----
const m = profile.memory;
let memoryChart = null;
function drawMemory() {
  if (!memoryChart) return;
  const toMs = UNIT * 1e3, origin = originOf(view.range) * toMs, range = view.range.map((x) => x * toMs - origin);
  // A value stays until the next: a point just before each keeps lines level, and the last before the range counts too.
  const at = [], from = [], hair = (range[1] - range[0]) * 1e-7;
  let last = -1;
  m.at_ms.forEach((ms, i) => {
    const x = ms - origin;
    if (x > range[1]) return;
    if (x > range[0]) {
      if (last >= 0) { at.push(at.length ? Math.max(x - hair, at[at.length - 1]) : range[0]); from.push(last); if (at.length === 1) { at.push(x - hair); from.push(last); } }
      at.push(x);
      from.push(i);
    }
    last = i;
  });
  if (last >= 0) { at.push(range[1]); from.push(last); }
  const used = m.categories.map((name, c) => c).filter((c) => m.bytes.some((b) => b[c] > m.total_peak / 2000));
  memoryChart.shared.origin = origin;
  memoryChart.set(used.map((c) => ({ name: m.categories[c], color: COLORS[c], x: at, y: from.map((i) => m.bytes[i][c]) })), [], range);
  byId("memory-legend").replaceChildren(...used.map((c) => el("span", { color: COLORS[c] }, el("i"), `${m.categories[c]}: peak ${bytes(m.peak[c])}`)));
}
function memory() {
  const shared = {
    hover: null, origin: 0,
    formatX: (x) => time(x / 1e3),
    setHover(x, chart, event) {
      shared.hover = x;
      chart = chart || memoryChart;
      if (chart.range) chart.draw();
      if (x === null || !event) return showTip(null);
      showTip(event, `at ${shared.formatX(x)}`, chart.rows(x).reverse());
    },
    setZoom(range) { show(range ? range.map((ms) => (ms + shared.origin) / 1e3 / UNIT) : whole()); },
  };
  memoryChart = new LineChart(byId("memory"), { format: bytes, stack: true, zero: true, left: innerWidth < 620 ? 0 : LABELS }, shared);
  const of = [`rank ${m.rank}`, `peak ${bytes(m.total_peak)}`, `reserved ${bytes(m.reserved_peak)}`];
  if (m.capacity) of.push(`of ${bytes(m.capacity)}`);
  byId("memory-of").textContent = of.join(", ");
}

// ---- kernels ----
function families() {
  const most = Math.max(...profile.families.map((f) => Math.max(f.measured_s, f.floor_s || 0)), 1e-12);
  const head = el("div", { class: "family-head" }, el("span", { text: "family" }), el("span", { text: subject.has_rates ? "time, and its roofline as a mark" : "time" }), el("span", { text: "time" }), el("span", { text: "of step" }), el("span", { text: subject.has_rates ? "of roofline" : "" }));
  const rows = profile.families.map((f) => {
    const track = el("div", { class: "track" }), solid = el("i"), over = el("i", { class: "over" });
    const floor = f.floor_s === null ? null : f.floor_s;
    solid.style.width = `${(100 * Math.min(floor ?? f.measured_s, f.measured_s)) / most}%`;
    over.style.width = `${(100 * Math.max(0, f.measured_s - (floor ?? f.measured_s))) / most}%`;
    track.append(solid, over);
    const bar = el("div", { class: "bar-of", color: familyColor[f.name] }, track);
    if (floor !== null) {
      const mark = el("i", { class: "floor", title: `roofline ${time(floor)}` });
      mark.style.left = `calc(${(100 * floor) / most}% - 1px)`;
      bar.append(mark);
    }
    const summary = el("summary", {}, el("span", { text: f.name }), bar, el("span", { text: time(f.measured_s) }), el("span", { text: percent(f.measured_s / profile.traced_step_s) }), el("span", { text: floor === null ? "" : percent(floor / f.measured_s), title: floor === null ? "no roofline of its own" : `at least ${time(floor)}` }));
    const kernels = el("table", {}, el("tbody", {}, ...f.kernels.map((k) => el("tr", {}, el("td", { text: clean(k.name) }), el("td", { text: `${short(Number(k.calls.toPrecision(4)))} calls` }), el("td", { text: time(k.seconds) }), el("td", { text: `${time(k.seconds / Math.max(k.calls, 1e-9))} each` })))));
    return el("details", { class: "family" }, summary, kernels);
  });
  byId("families").replaceChildren(head, ...rows);
  const c = profile.ceilings;
  const rate = (x) => short(Number(x.toPrecision(3)));
  byId("ceilings").textContent = c
    ? `Roofline: the least time for a family's FLOPs or bytes at rates that were each measured alone on this device: GEMM ${rate(c.gemm_tflops)} TFLOP/s${c.fp8_gemm_tflops ? ` (FP8 ${rate(c.fp8_gemm_tflops[0])} fprop, ${rate(c.fp8_gemm_tflops[1])} gradients)` : ""}, attention ${rate(c.attention_tflops[0])} forward and ${rate(c.attention_tflops[1])} backward, memory ${rate(c.memory_gb_s)} GB/s. Work that fits into a cache can be faster than the roofline.`
    : `No roofline: ${clean(subject.no_rates || "rates of the device were not measured")}`;
}

// ---- communication ----
function communication() {
  const rows = profile.communication;
  byId("communication-card").hidden = !rows.length;
  byId("families").closest(".pair").classList.toggle("two", rows.length > 0);
  if (!rows.length) return;
  const most = Math.max(...rows.map((r) => r.total), 1e-12), each = profile.steps * profile.ranks;
  const head = ["group", "collective", "calls", "time", "hidden", "exposed"];
  const body = rows.map((r) => el("tr", {}, el("td", { text: clean(r.group) }), el("td", { class: "left", text: clean(r.op) }), el("td", { text: short(Number((r.calls / each).toPrecision(3))) }), el("td", { text: time(r.total) }), el("td", { text: time(r.hidden) }), el("td", { text: `${time(r.exposed)} (${percent(r.exposed / profile.traced_step_s)})` })));
  const bars = rows.slice(0, 6).map((r) => {
    const track = el("div", { class: "track" });
    for (const [s, color, name] of [[r.exposed, "#e11d74", "exposed"], [r.hidden, "#3b82f6", "hidden"]]) {
      const part = el("i", { color, title: `${name}: ${time(s)}` });
      part.style.width = `${(100 * s) / most}%`;
      track.append(part);
    }
    return el("div", { class: "rank-bar" }, el("span", { text: clean(r.group) }), track, el("span", { text: time(r.total) }));
  });
  const legend = el("div", { class: "legend" }, el("span", { color: "#e11d74" }, el("i"), "exposed, with the wait for other ranks"), el("span", { color: "#3b82f6" }, el("i"), "hidden by computation"));
  byId("communication").replaceChildren(...bars, legend, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head.map((h, i) => el("th", { text: h, class: i === 1 ? "left" : "" })))), el("tbody", {}, ...body))));
}

// ---- the rest ----
function about() {
  byId("title").textContent = clean(subject.title);
  document.title = `${clean(subject.title)} · Ferrotron`;
  byId("about").replaceChildren(...subject.about.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: clean(value) })]));
  byId("notes-list").replaceChildren(...subject.notes.map((n) => el("li", { text: clean(n) })));
}

function theme() {
  const dark = view.theme === "dark" || (view.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = `Theme: ${view.theme}`;
}

theme();
about();
figures();
advice();
breakdown();
families();
communication();
memory();
zoomTools();
const lanes = new LaneChart(byId("timeline"));
show(lastStep());
byId("theme").addEventListener("click", () => {
  view.theme = { auto: "light", light: "dark", dark: "auto" }[view.theme] || "auto";
  store("theme", view.theme);
  theme();
  show(view.range);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { theme(); show(view.range); });
addEventListener("resize", () => show(view.range));
document.body.dataset.ready = "1";
