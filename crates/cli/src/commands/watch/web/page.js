"use strict";
// The page of `ferrotron watch --web`: asks for the runs' curves when the server says that there is something new, and draws them.
// Whatever comes from a run (names, reasons, samples, paths) is set as text, never as HTML.

const view = {
  data: null, focus: null, chosen: false, hidden: new Set(), seen: new Set(), zoom: null,
  axis: stored("axis", "step"), smooth: stored("smooth", 33), theme: stored("theme", "auto"), log: stored("log", {}), layer: null,
};
const MOST_SHOWN = 10;
const colorOf = (run) => COLORS[run.id % COLORS.length];
const nameOf = (run) => clean(run.name);
const shownRuns = () => view.data.runs.filter((run) => !view.hidden.has(run.path));
const focused = () => view.data.runs.find((run) => run.path === view.focus) || view.data.runs[0];

// ---- what charts share ----
const shared = {
  hover: null,
  formatX: (x) => (view.axis === "time" ? (x < 2 ? `${Number((x * 60).toPrecision(3))} min` : `${Number(x.toPrecision(3))} h`) : short(x)),
  setHover(x, chart, event) {
    shared.hover = x;
    for (const c of cards) if (c.chart instanceof LineChart && !c.node.hidden && c.chart.range) c.chart.draw();
    if (x === null || !chart) return shared.showTip(null);
    const unit = { step: "step ", tokens: "", time: "" }[view.axis], after = view.axis === "tokens" ? " tokens" : "";
    const at = view.axis === "step" ? Math.round(x).toLocaleString("en-US") : shared.formatX(x);
    const rows = chart.rows(x);
    const near = chart.marks.filter((m) => m.x !== null && Math.abs(chart.X(m.x) - chart.X(x)) < 6);
    near.slice(0, 3).forEach((m) => rows.push({ name: m.text, color: css("--warn"), text: m.kind.replace("_", " ") }));
    shared.showTip(event, unit + at + after, rows);
  },
  setZoom(range) {
    view.zoom = range;
    byId("zoom").hidden = !range;
    refresh();
  },
  showTip,
};

// ---- charts ----
const percent = (x) => (x === null || !isFinite(x) ? "–" : `${Number(x.toPrecision(3))} %`);
const series = (run, name) => run.series[name] || { x: [], y: [] };
const has = (run, name) => series(run, name).y.some((y) => y !== null && isFinite(y));
const lineOf = (run, name, more) => ({ name: nameOf(run), color: colorOf(run), ...series(run, name), ...more });
const peak = (run) => (run.start && run.start.peak_tflops) || null;
const lines = (name, more) => () => shownRuns().filter((run) => has(run, name)).map((run) => lineOf(run, name, more));

function lossSeries() {
  const out = [];
  for (const run of shownRuns()) {
    const smooth = view.smooth > 0 && has(run, "loss, smoothed");
    if (has(run, "loss")) out.push(lineOf(run, "loss", { faint: smooth, nulls: true }));
    if (smooth) out.push(lineOf(run, "loss, smoothed"));
    if (run.evals.length) {
      const inside = run.evals.filter((e) => e[0] !== null && (!view.zoom || (e[0] >= view.zoom[0] && e[0] <= view.zoom[1])));
      out.push({ name: `${nameOf(run)}, eval`, color: colorOf(run), x: inside.map((e) => e[0]), y: inside.map((e) => e[1]), dots: true, dash: [3, 3] });
    }
  }
  return out;
}

function mfuSeries() {
  const runs = shownRuns().filter((run) => has(run, "tflops"));
  const all = runs.length && runs.every(peak);
  card("mfu").title.textContent = all ? "MFU" : "Model TFLOP/s";
  card("mfu").chart.options.format = all ? percent : short;
  return runs.map((run) => {
    const s = lineOf(run, "tflops");
    return all ? { ...s, y: s.y.map((y) => (y === null ? null : (100 * y) / peak(run))) } : s;
  });
}

const CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "workspace", "communication"];
function memorySeries() {
  const run = focused();
  const of = CATEGORIES.filter((c) => has(run, `memory_peaks/${c}`));
  if (!of.length) { // logs from before there were categories
    return has(run, "memory") ? [{ ...lineOf(run, "memory"), name: "tensors" }] : [];
  }
  return of.map((c) => ({ name: c, color: COLORS[CATEGORIES.indexOf(c)], ...series(run, `memory_peaks/${c}`) }));
}

function fp8Series() {
  const out = [];
  for (const run of shownRuns().filter((r) => r.fp8.length)) {
    const x = run.fp8.map((p) => p[0]);
    out.push({ name: `${nameOf(run)}, saturation`, color: colorOf(run), x, y: run.fp8.map((p) => p[1]), dots: true });
    out.push({ name: `${nameOf(run)}, underflow`, color: colorOf(run), x, y: run.fp8.map((p) => p[2]), dash: [4, 3] });
  }
  return out;
}

const MARKED = true;
// name, title, where it is drawn, series, options of the chart, and how to get what is not in a log.
const cards = [
  { id: "loss", title: "Loss", size: "large", get: lossSeries, format: short, log: true, marks: MARKED, legend: true },
  { id: "throughput", title: "Throughput", unit: "tokens/s", get: lines("tokens_per_s"), format: short, zero: true, marks: MARKED },
  { id: "mfu", title: "Model TFLOP/s", get: mfuSeries, format: short, zero: true },
  { id: "norm", title: "Gradient norm", get: lines("grad_norm", { nulls: true }), format: short, log: true, marks: MARKED },
  { id: "lr", title: "Learning rate", get: lines("lr"), format: short, zero: true },
  { id: "memory", title: "Memory by category", unit: "peak so far", get: memorySeries, format: bytes, stack: true, focus: true, legend: true },
  { id: "fp8", title: "FP8 saturation", unit: "worst operand; dashed: underflow", get: fp8Series, format: percent, zero: true, absent: ["FP8 saturation", "precision.stats_every=50"] },
  { id: "loads", title: "Expert load", heat: true, focus: true, absent: ["the expert-load heat map", 'moe.log=["losses", "imbalance", "loads"]'] },
  { id: "imbalance", title: "Expert imbalance", unit: "most loaded expert over the mean", get: lines("imbalance"), format: short },
  { id: "ranks", title: "Ranks", unit: "seconds of a step", ranks: true, focus: true, absent: ["ranks and stragglers", "fault.straggler_every=20"] },
  { id: "energy", title: "Energy", unit: "J/token", get: lines("energy_j_per_token"), format: short, zero: true, absent: ["energy", "train.energy=true on GPUs"] },
];
const card = (id) => cards.find((c) => c.id === id);

function buildCards() {
  for (const c of cards) {
    c.title = el("span", { text: c.title });
    c.of = el("small");
    c.tools = el("span", { class: "tools" });
    c.plot = el("div", { class: c.ranks ? "ranks" : "plot" });
    c.legendNode = el("div", { class: "legend", hidden: true });
    c.node = el("section", { class: `card ${c.size || ""}`, id: `card-${c.id}`, hidden: true }, el("h2", {}, c.title, c.of, c.tools), c.plot, c.legendNode);
    byId("charts").append(c.node);
    if (c.heat) {
      c.chart = new HeatMap(c.plot, shared);
      c.select = el("select", { title: "Layer" });
      c.select.addEventListener("change", () => { view.layer = Number(c.select.value); loadHeat(focused()); });
      c.tools.append(c.select);
    } else if (!c.ranks) {
      c.chart = new LineChart(c.plot, { format: c.format, log: !!view.log[c.id], stack: c.stack, zero: c.zero }, shared);
      if (c.log) {
        const button = el("button", { text: "log", title: "Logarithmic axis" });
        const press = () => button.setAttribute("aria-pressed", String(!!view.log[c.id]));
        button.addEventListener("click", () => {
          view.log[c.id] = c.chart.options.log = !view.log[c.id];
          store("log", view.log);
          press();
          c.chart.draw();
        });
        press();
        c.tools.append(button);
      }
    }
  }
  const resized = new ResizeObserver((entries) => entries.forEach((e) => {
    const found = cards.find((c) => c.plot === e.target);
    if (found && found.chart && !found.node.hidden) found.chart.draw();
  }));
  cards.forEach((c) => resized.observe(c.plot));
}

function drawCards() {
  const run = focused(), many = view.data.runs.length > 1;
  const absent = [];
  for (const c of cards) {
    c.of.textContent = [c.unit, c.focus && many ? nameOf(run) : ""].filter(Boolean).join(" · ");
    let filled;
    if (c.heat) filled = drawHeat(c, run);
    else if (c.ranks) filled = drawRanks(c, run);
    else {
      const all = c.get();
      filled = all.some((s) => s.y.some((y) => y !== null && isFinite(y))) || (c.id === "loss" && all.length > 0);
      c.node.hidden = !filled;
      if (filled) {
        const marks = c.marks ? shownRuns().flatMap((r) => r.marks.map((m) => ({ ...m, text: many ? nameOf(r) : `step ${m.step}` }))) : [];
        c.chart.set(all, marks, view.zoom);
        if (c.legend) drawLegend(c, all);
      }
    }
    c.node.hidden = !filled;
    if (!filled && c.absent) absent.push(c.absent);
  }
  const note = byId("absent");
  note.replaceChildren();
  if (absent.length) {
    note.append("Not in these logs: ");
    absent.forEach(([what, key], i) => note.append(i ? "; " : "", `${what} (`, el("code", { text: key }), ")"));
    note.append(".");
  }
}

function drawLegend(c, all) {
  const rows = c.stack ? [...all].reverse() : all.filter((s) => !s.faint && !s.dots);
  const latest = (s) => { for (let i = s.y.length - 1; i >= 0; i--) if (s.y[i] !== null && isFinite(s.y[i])) return s.y[i]; return null; };
  c.legendNode.hidden = !rows.length;
  c.legendNode.replaceChildren(...rows.map((s) => el("span", {}, el("i", { color: s.color }), `${s.name} ${c.format(latest(s))}`)));
}

// ---- expert loads ----
let heatOf = "";
function drawHeat(c, run) {
  const layers = run.load_layers;
  if (!layers || !layers.length) return false;
  c.node.hidden = false;
  if (!layers.includes(view.layer)) view.layer = layers[0];
  const wanted = layers.join();
  if (c.select.dataset.layers !== wanted) {
    c.select.dataset.layers = wanted;
    c.select.replaceChildren(...layers.map((l) => el("option", { value: String(l), text: `layer ${l}` })));
  }
  c.select.value = String(view.layer);
  const now = `${run.path}\n${run.revision}\n${view.layer}`;
  if (now !== heatOf) { heatOf = now; loadHeat(run); }
  return true;
}

async function loadHeat(run) {
  try {
    const answer = await fetch(`run/${run.id}/loads/${view.layer}`);
    if (answer.ok) card("loads").chart.set(await answer.json());
  } catch { /* the stream of events tells when the server is gone */ }
}

// ---- ranks ----
const SECTIONS = ["data", "forward", "backward", "communication", "optimizer", "checkpoint"];
function drawRanks(c, run) {
  const s = run.sections;
  if (!s || !s.ranks.length) return false;
  const total = (r) => SECTIONS.reduce((sum, name) => sum + (r[name] || 0), 0);
  const most = Math.max(...s.ranks.map(total), 1e-9);
  const late = new Set(run.notes.filter((n) => n.kind === "straggler" && n.step >= s.step).map((n) => Number((/rank (\d+)/.exec(n.text) || [])[1])));
  const rows = [];
  for (const r of s.ranks) {
    const slow = late.has(r.rank) || (r.relative !== undefined && r.relative < 0.9);
    const track = el("div", { class: "track", title: SECTIONS.map((n) => `${n} ${((r[n] || 0) * 1e3).toFixed(1)} ms`).join(", ") });
    SECTIONS.forEach((name, i) => {
      const part = el("i", { color: COLORS[i] });
      part.style.width = `${(100 * (r[name] || 0)) / most}%`;
      track.append(part);
    });
    const gpu = r.gpu && r.gpu.temperature_c ? ` · ${r.gpu.temperature_c} °C` : "";
    const speed = r.relative === undefined || r.relative === null ? "" : `${(100 * r.relative).toFixed(0)} %`;
    rows.push(el("span", { class: slow ? "slow" : "", text: `rank ${r.rank}` }), track, el("span", { class: slow ? "slow" : "", text: `${(total(r) * 1e3).toFixed(0)} ms ${speed}${gpu}` }));
  }
  c.plot.replaceChildren(...rows);
  c.of.textContent = `time of a step, steps to ${s.step}, speed against the others`;
  c.legendNode.hidden = false;
  c.legendNode.replaceChildren(...SECTIONS.map((name, i) => el("span", {}, el("i", { color: COLORS[i] }), name)));
  return true;
}

// ---- figures, table, lists ----
function drawFigures() {
  const run = focused(), last = run.last, node = byId("figures");
  const total = run.start ? run.start.steps : 0, step = run.step || 0;
  const left = run.state === "running" && run.pace && total > step ? `${duration((total - step) * run.pace)} left` : run.state;
  const bar = el("div", { class: "progress" }, el("i", { color: colorOf(run) }));
  bar.firstChild.style.width = `${total ? Math.min(100, (100 * step) / total) : 0}%`;
  const start = run.start;
  const about = start ? [start.recipe, `${short(start.parameters)} parameters`, start.dtype, start.ranks > 1 ? `${start.ranks} ranks` : "", start.device].filter(Boolean).map(clean).join(" · ") : "";
  const figure = (label, value, more) => el("div", { class: "figure" }, el("span", { text: label }), el("b", { text: value }), el("em", { text: more || "" }));
  const evals = run.evals, best = evals.reduce((m, e) => (e[1] !== null && e[1] < m ? e[1] : m), Infinity);
  const out = [
    el("div", { class: "figure wide", title: about }, el("span", { text: about || clean(run.path) }), el("b", { text: nameOf(run) }), bar, el("em", { text: `step ${step.toLocaleString("en-US")}${total ? ` of ${total.toLocaleString("en-US")}` : ""} · ${left}` })),
    figure("Loss", run.losses === null || run.losses === undefined ? (step ? "not a number" : "–") : run.losses.toFixed(4), last.tokens ? `${short(last.tokens)} tokens` : ""),
  ];
  if (evals.length) out.push(figure("Evaluation loss", evals[evals.length - 1][1] === null ? "not a number" : evals[evals.length - 1][1].toFixed(4), isFinite(best) ? `best ${best.toFixed(4)}` : ""));
  out.push(figure("Throughput", short(last.tokens_per_s), "tokens/s"));
  if (last.tflops) out.push(peak(run) ? figure("MFU", percent((100 * last.tflops) / peak(run)), `${short(last.tflops)} TFLOP/s`) : figure("Model FLOPs", short(last.tflops), "TFLOP/s"));
  out.push(figure("Peak memory", bytes(last.memory), last.reserved ? `${bytes(last.reserved)} reserved` : ""));
  if (last.imbalance) out.push(figure("Expert imbalance", last.imbalance.toFixed(2), "most loaded over the mean"));
  if (last.energy_j_per_token) out.push(figure("Energy", `${short(last.energy_j_per_token)} J`, `per token, ${short(last.power_w)} W`));
  node.replaceChildren(...out);
}

const COLUMNS = [
  ["State", (r) => el("span", { class: `state ${r.state}`, text: r.state })],
  ["Step", (r) => `${short(r.step || 0)}${r.start && r.start.steps ? ` / ${short(r.start.steps)}` : ""}`],
  ["Loss", (r) => (r.losses === null || r.losses === undefined ? (r.step ? "not a number" : "") : r.losses.toFixed(4))],
  ["Eval", (r) => { const e = r.evals[r.evals.length - 1]; return e && e[1] !== null ? e[1].toFixed(4) : ""; }],
  ["Tokens/s", (r) => (r.last.tokens_per_s ? short(r.last.tokens_per_s) : "")],
  ["TFLOP/s", (r) => (r.last.tflops ? short(r.last.tflops) : "")],
  ["MFU", (r) => (peak(r) && r.last.tflops ? percent((100 * r.last.tflops) / peak(r)) : "")],
  ["Memory", (r) => (r.last.memory ? bytes(r.last.memory) : "")],
  ["Imbalance", (r) => (r.last.imbalance ? r.last.imbalance.toFixed(2) : "")],
  ["J/token", (r) => (r.last.energy_j_per_token ? short(r.last.energy_j_per_token) : "")],
  ["Parameters", (r) => (r.start ? short(r.start.parameters) : "")],
  ["Last event", (r) => (r.time ? new Date(r.time * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" }) : "")],
];

function drawTable() {
  const runs = view.data.runs, all = runs.map((r) => COLUMNS.map(([, of]) => of(r)));
  const used = COLUMNS.map((_, c) => all.some((row) => row[c] !== ""));
  const head = el("tr", {}, el("th", { text: runs.length === 1 ? "Run" : `${runs.length} runs` }), ...COLUMNS.flatMap(([name], c) => (used[c] ? [el("th", { text: name, class: c ? "" : "left" })] : [])));
  byId("runs").tHead.replaceChildren(head);
  byId("runs").tBodies[0].replaceChildren(...runs.map((run, i) => {
    const off = view.hidden.has(run.path);
    const swatch = el("button", { color: colorOf(run), title: off ? "Show in the charts" : "Hide in the charts", "aria-pressed": String(!off), "aria-label": nameOf(run) });
    swatch.addEventListener("click", (e) => {
      e.stopPropagation();
      if (off) view.hidden.delete(run.path); else view.hidden.add(run.path);
      draw();
    });
    const row = el("tr", { class: `${run.path === focused().path ? "focus" : ""} ${off ? "off" : ""}`, title: clean(run.path) },
      el("td", {}, el("div", { class: "name" }, swatch, el("span", { text: nameOf(run) }))),
      ...all[i].flatMap((cell, c) => (used[c] ? [el("td", { class: c ? "" : "left" }, cell)] : [])));
    row.addEventListener("click", () => { view.focus = run.path; view.chosen = true; draw(); });
    return row;
  }));
}

function drawLists() {
  const run = focused(), many = view.data.runs.length > 1;
  byId("notes-of").textContent = byId("files-of").textContent = many ? nameOf(run) : "";
  const notes = [...run.notes];
  if (run.end) notes.unshift({ time: run.time, step: run.end.step, kind: "run_end", text: run.end.ending + (run.end.reason ? `: ${run.end.reason}` : "") });
  if (run.error) notes.unshift({ time: view.data.now, step: run.step || 0, kind: "unreadable", text: run.error });
  if (run.unreadable) notes.push({ time: run.time, step: run.step || 0, kind: "log", text: `${run.unreadable} lines of events.jsonl could not be read` });
  const list = notes.slice(0, 100).map((n) => el("li", { class: /^[a-z_]+$/.test(n.kind) && !(n.kind === "run_end" && run.end.ending === "finished") ? n.kind : "" },
    el("time", { text: n.time ? new Date(n.time * 1000).toLocaleTimeString() : "" }),
    el("span", {}, el("span", { class: "kind", text: n.kind.replace("_", " ") }), el("span", { class: "at", text: ` ${n.step.toLocaleString("en-US")}` })),
    el("p", { text: clean(n.text) })));
  byId("notes").replaceChildren(...(list.length ? list : [el("li", {}, el("p", { class: "path", text: "nothing but steps so far" }))]));
  const open = (href, text) => el("a", { href, text, target: "_blank", rel: "noopener" });
  const configs = el("div", { class: "links" }, ...run.configs.map((name) => open(`run/${run.id}/${encodeURIComponent(name)}`, clean(name))));
  const rows = run.checkpoints.map((k) => el("tr", {},
    el("td", {}, open(`run/${run.id}/checkpoint/${Number(k.step)}`, `step ${k.step.toLocaleString("en-US")}`)),
    el("td", { class: "left", text: k.best ? "best" : "" }), el("td", { text: bytes(k.bytes) }), el("td", { class: "left", text: clean(k.path) })));
  const table = rows.length ? el("table", {}, el("tbody", {}, ...rows)) : el("p", { class: "path", text: "no checkpoint yet" });
  byId("files").replaceChildren(el("p", { class: "path", text: clean(run.path) }), configs, table);
}

function draw() {
  const none = !view.data || !view.data.runs.length;
  byId("empty").hidden = !none;
  for (const node of document.querySelectorAll("main > section")) node.hidden = none;
  document.body.dataset.runs = view.data ? String(view.data.runs.length) : "";
  if (none) return;
  chooseRuns();
  drawFigures();
  drawTable();
  drawCards();
  drawLists();
  const run = focused();
  document.title = `${run.losses ? run.losses.toFixed(4) + " · " : ""}${nameOf(run)} · Ferrotron`;
  document.body.dataset.step = String(run.step || 0);
}

// The newest run that is at work is in focus until another is chosen; of many runs the newest are shown.
function chooseRuns() {
  const runs = view.data.runs;
  if (!view.chosen || !runs.some((r) => r.path === view.focus)) {
    const order = [...runs].sort((a, b) => (b.state === "running") - (a.state === "running") || b.time - a.time);
    view.focus = order[0].path;
  }
  const fresh = runs.filter((r) => !view.seen.has(r.path));
  if (fresh.length) {
    const newest = new Set([...runs].sort((a, b) => b.time - a.time).slice(0, MOST_SHOWN).map((r) => r.path));
    fresh.forEach((r) => { view.seen.add(r.path); if (!newest.has(r.path)) view.hidden.add(r.path); });
  }
}

// ---- data ----
const smoothing = () => (view.smooth > 0 ? 1 - Math.pow(10, -3 * view.smooth / 100) : 0);
let fetching = false, again = false, lastFetch = 0, timer = null;

async function refresh() {
  if (fetching) { again = true; return; }
  clearTimeout(timer);
  timer = null;
  fetching = true;
  lastFetch = performance.now();
  const plot = card("loss").plot.getBoundingClientRect().width || innerWidth * 0.6;
  const query = new URLSearchParams({ axis: view.axis, points: String(Math.round(Math.min(2000, Math.max(300, plot * 1.5)))), smooth: smoothing().toFixed(5) });
  if (view.zoom) { query.set("from", String(view.zoom[0])); query.set("to", String(view.zoom[1])); }
  try {
    const answer = await fetch(`api/data?${query}`);
    if (!answer.ok) throw new Error(String(answer.status));
    view.data = await answer.json();
    draw();
    if (!document.body.dataset.ready) document.body.dataset.ready = String(Math.round(performance.now()));
  } catch { connection(false); }
  fetching = false;
  if (again) { again = false; soon(); }
}

// At most one request in 600 ms, and none while nobody looks.
function soon() {
  if (document.hidden) { again = true; return; }
  if (timer === null) timer = setTimeout(refresh, Math.max(0, 600 - (performance.now() - lastFetch)));
}

function connection(on) {
  const node = byId("live");
  node.className = `live ${on ? "on" : "off"}`;
  node.lastElementChild.textContent = on ? "live" : "no connection to ferrotron watch";
}

function listen() {
  const events = new EventSource("api/events");
  events.addEventListener("open", () => connection(true));
  events.addEventListener("message", () => { connection(true); soon(); });
  events.addEventListener("error", () => connection(false));
  document.addEventListener("visibilitychange", () => { if (!document.hidden && again) { again = false; soon(); } });
  // A run that falls silent says nothing.
  setInterval(soon, 30000);
}

// ---- controls ----
function applyTheme() {
  const dark = view.theme === "dark" || (view.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = `Theme: ${view.theme}`;
  if (view.data) draw();
}

function controls() {
  byId("theme").addEventListener("click", () => {
    view.theme = { auto: "light", light: "dark", dark: "auto" }[view.theme] || "auto";
    store("theme", view.theme);
    applyTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
  const axes = [...byId("axis").children];
  const press = () => axes.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.axis === view.axis)));
  axes.forEach((b) => b.addEventListener("click", () => {
    view.axis = b.dataset.axis;
    store("axis", view.axis);
    press();
    shared.setZoom(null);
  }));
  press();
  const smooth = byId("smooth"), say = () => { byId("smooth-value").textContent = view.smooth > 0 ? smoothing().toFixed(view.smooth > 66 ? 3 : 2) : "off"; };
  smooth.value = String(view.smooth);
  smooth.addEventListener("input", () => { view.smooth = Number(smooth.value); store("smooth", view.smooth); say(); soon(); });
  say();
  byId("zoom").addEventListener("click", () => shared.setZoom(null));
}

buildCards();
controls();
applyTheme();
refresh();
listen();
