//! The picture of runs on a terminal: a table, charts, expert loads and what happened last.

use super::chart::{Chart, Curve};
use super::runs::{WatchedRun, now};
use super::screen::{Area, RUNS, Screen, Style};
use crate::format;
use crate::progress;
use ferrotron_core::events::{Event, RunHistory, decimate};
use ferrotron_tensor::format_bytes;

/// What the user has chosen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choices {
    /// Logarithmic axes for loss and gradient norm.
    pub log: bool,
    /// Smoothed losses.
    pub smooth: bool,
    /// The first of the smaller panels that is shown.
    pub first: usize,
    /// Only this run, by index; otherwise all of them overlaid.
    pub only: Option<usize>,
}

/// Smallest panel.
const PANEL: (usize, usize) = (26, 6);
/// Largest panel of the smaller ones.
const PANEL_MAX_WIDTH: usize = 70;

/// A metric that is drawn over steps.
struct Metric {
    title: &'static str,
    column: &'static str,
    format: fn(f64) -> String,
    log: bool,
}

fn short(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        a if a >= 1000.0 => format::count(x as u64),
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 1.0 => format!("{x:.2}"),
        a if a >= 0.001 => format!("{x:.4}"),
        _ => format!("{x:.1e}"),
    }
}

fn bytes(x: f64) -> String {
    format_bytes(x.max(0.0) as usize).replace("iB", "").replace(' ', "")
}

const LOSS: Metric = Metric { title: "loss", column: "loss", format: short, log: true };
/// Most of the smaller panels: the metrics and the expert loads.
pub const PANELS: usize = METRICS.len() + 1;
const METRICS: [Metric; 7] = [
    Metric { title: "tokens/s", column: "tokens_per_s", format: short, log: false },
    Metric { title: "learning rate", column: "lr", format: short, log: false },
    Metric { title: "memory, peak", column: "memory", format: bytes, log: false },
    Metric { title: "gradient norm", column: "grad_norm", format: short, log: true },
    Metric { title: "expert imbalance, max/mean", column: "imbalance", format: short, log: false },
    Metric { title: "J/token", column: "energy_j_per_token", format: short, log: false },
    Metric { title: "TFLOP/s", column: "tflops", format: short, log: false },
];

/// The color of a run.
fn color(i: usize) -> u8 {
    RUNS[i % RUNS.len()]
}

/// Draws everything.
pub fn draw(runs: &[WatchedRun], choices: &Choices, width: usize, height: usize) -> Screen {
    let mut screen = Screen::new(width, height);
    let (title, rest) = screen.area().split_top(1);
    header(&mut screen, title, runs, choices);
    if runs.is_empty() {
        screen.text(0, 2, width, "There is no run here yet.", Style::default());
        return screen;
    }
    // The table takes at most a third, what happened at most a fifth.
    let rows = (runs.len() + 1).min((height / 3).max(2));
    let (area, rest) = rest.split_top(rows);
    table(&mut screen, area, runs, choices);
    let notes = notes(runs);
    let lines = notes.len().min((height / 5).clamp(2, 12));
    let (charts, log) = rest.split_top(rest.height.saturating_sub(lines));
    for (i, (run, line)) in notes.iter().rev().take(log.height).rev().enumerate() {
        let at = screen.text(0, log.y + i, width, "● ", Style::of(color(*run)));
        screen.text(at, log.y + i, width - at.min(width), line, Style::DIM);
    }
    panels(&mut screen, charts, runs, choices);
    screen
}

fn header(screen: &mut Screen, area: Area, runs: &[WatchedRun], choices: &Choices) {
    let at = screen.text(0, area.y, area.width, "ferrotron watch", Style::BOLD);
    let running = runs.iter().filter(|r| r.state() == "running").count();
    let text = format!("  {} runs, {running} running", runs.len());
    let at = at + screen.text(at, area.y, area.width - at.min(area.width), &text, Style::DIM);
    let on = |is: bool| if is { "on" } else { "off" };
    let long =
        format!("l log {}  s smooth {}  ←→ panels  0-9 one run  q quit", on(choices.log), on(choices.smooth));
    let keys = if area.width >= at + long.chars().count() + 2 { long } else { "l s ←→ 0-9 q".into() };
    screen.text_right(at, area.y, area.width - at.min(area.width), &keys, Style::DIM);
}

/// Curves of a metric, those of the chosen run last, at the resolution of `width` columns.
fn curves(runs: &[WatchedRun], choices: &Choices, column: &str, width: usize, smooth: bool) -> Vec<Curve> {
    let shown = runs.iter().enumerate().filter(|(i, _)| choices.only.is_none_or(|only| only == *i));
    let curve = |(i, run): (usize, &WatchedRun)| {
        let steps = &run.history().steps;
        let values = steps.column(column);
        let smoothed;
        let values = if smooth {
            smoothed = smoothed_values(values);
            &smoothed
        } else {
            values
        };
        // Two dots to a column, a minimum and a maximum to a dot.
        let points = decimate(values, 4 * width).into_iter().map(|k| (steps.step[k] as f64, values[k]));
        Curve { color: color(i), points: points.collect() }
    };
    shown.map(curve).filter(|c| c.points.iter().any(|(_, y)| y.is_finite())).collect()
}

/// Exponential moving average over about 20 values, without the bias of its start.
fn smoothed_values(values: &[f64]) -> Vec<f64> {
    const KEEP: f64 = 0.95;
    let (mut sum, mut weight) = (0.0, 0.0);
    let mut next = |x: &f64| {
        if !x.is_finite() {
            return *x;
        }
        (sum, weight) = (KEEP * sum + (1.0 - KEEP) * x, KEEP * weight + 1.0 - KEEP);
        sum / weight
    };
    values.iter().map(&mut next).collect()
}

fn chart(runs: &[WatchedRun], choices: &Choices, m: &Metric, width: usize) -> Option<Chart> {
    let smooth = choices.smooth && m.column == "loss";
    let curves = curves(runs, choices, m.column, width, smooth);
    let mut now: Vec<String> = curves.iter().filter_map(|c| Some((m.format)(c.points.last()?.1))).collect();
    now.truncate(1);
    let log = choices.log && m.log;
    let title = format!("{}{}", m.title, if log { ", log" } else { "" });
    (!curves.is_empty()).then(|| Chart {
        title,
        now: if curves.len() == 1 { now.join("") } else { String::new() },
        curves,
        log,
        format: m.format,
    })
}

fn panels(screen: &mut Screen, area: Area, runs: &[WatchedRun], choices: &Choices) {
    // Only metrics that some run has.
    let mut small: Vec<&Metric> = METRICS.iter().collect();
    small.retain(|m| runs.iter().any(|r| r.history().steps.last(m.column).is_some()));
    let loads = runs.iter().enumerate().filter(|(i, _)| choices.only.is_none_or(|only| only == *i));
    let loads = loads.map(|(i, r)| (i, r.history())).rfind(|(_, history)| !history.loads.is_empty());
    // A heat map of expert loads is another panel, right after the throughput.
    let count = small.len() + usize::from(loads.is_some());
    let columns = (area.width / PANEL.0).clamp(1, area.width.div_ceil(PANEL_MAX_WIDTH).max(3));
    let wanted = count.div_ceil(columns);
    // The loss has half the height, or what smaller panels leave.
    let rows = (area.height / 2 / PANEL.1).min(wanted);
    let panel_height = (area.height / 2).checked_div(rows).map_or(0, |height| height.max(PANEL.1));
    let (top, below) = area.split_top(area.height - rows * panel_height);
    match chart(runs, choices, &LOSS, top.width) {
        Some(chart) => chart.draw(screen, top),
        None => {
            screen.text(top.x, top.y, top.width, "no step has ended yet", Style::DIM);
        }
    }
    if rows == 0 || count == 0 {
        return;
    }
    let shown = count.min(rows * columns);
    let columns = shown.div_ceil(rows).max(1);
    let width = below.width / columns;
    let first = choices.first % count;
    for slot in 0..shown {
        let which = (first + slot) % count;
        let (x, y) = (below.x + slot % columns * width, below.y + slot / columns * panel_height);
        let area = Area { x, y, width: width.saturating_sub(1), height: panel_height };
        match (loads, which) {
            (Some((i, history)), 1) => expert_loads(screen, area, history, color(i)),
            (Some(_), n) if n > 1 => metric(screen, area, runs, choices, small[n - 1]),
            (_, n) => metric(screen, area, runs, choices, small[n.min(small.len() - 1)]),
        }
    }
}

fn metric(screen: &mut Screen, area: Area, runs: &[WatchedRun], choices: &Choices, m: &Metric) {
    if let Some(chart) = chart(runs, choices, m, area.width) {
        chart.draw(screen, area);
    }
}

/// Tokens per expert of the last step as bars, a row for each layer.
fn expert_loads(screen: &mut Screen, area: Area, history: &RunHistory, color: u8) {
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let Some(last) = history.loads.last() else { return };
    let at = screen.text(area.x, area.y, area.width, "expert load", Style::BOLD);
    let text = format!("  tokens of each expert, step {}", last.step);
    screen.text(area.x + at, area.y, area.width - at.min(area.width), &text, Style::DIM);
    let rows = area.height.saturating_sub(2).max(1);
    let skip = last.layers.len().saturating_sub(rows);
    for (row, (layer, load)) in last.layers.iter().take(rows).enumerate() {
        let y = area.y + 1 + row;
        screen.text_right(area.x, y, 7, &format!("layer {layer}"), Style::DIM);
        let mean = load.iter().sum::<f64>() / load.len().max(1) as f64;
        let wide = area.width.saturating_sub(9);
        for (i, tokens) in load.iter().take(wide).enumerate() {
            // Four eighths are the mean.
            let eighths = if mean > 0.0 { (4.0 * tokens / mean).round().clamp(0.0, 8.0) } else { 0.0 };
            let alarm = mean > 0.0 && (*tokens == 0.0 || *tokens > 3.0 * mean);
            let style = Style::of(if alarm { 196 } else { color });
            let bar = if *tokens == 0.0 { '·' } else { BARS[(eighths as usize).max(1)] };
            screen.set(area.x + 8 + i, y, bar, style);
        }
    }
    if skip > 0 {
        let text = format!("and {skip} layers more");
        screen.text(area.x + 8, area.y + area.height - 1, area.width - 8, &text, Style::DIM);
    }
}

/// One row for each run.
fn table(screen: &mut Screen, area: Area, runs: &[WatchedRun], choices: &Choices) {
    let heads = [
        "run",
        "state",
        "step",
        "loss",
        "eval",
        "lr",
        "tokens/s",
        "TFLOP/s",
        "memory",
        "imbalance",
        "J/token",
        "left",
    ];
    let mut rows: Vec<(Option<usize>, Vec<String>)> = vec![(None, heads.map(String::from).to_vec())];
    let fits = area.height.saturating_sub(1);
    // Where not all fit, the last that are running, or the last of all.
    let mut order: Vec<usize> = (0..runs.len()).collect();
    if runs.len() > fits {
        order.sort_by_key(|i| (runs[*i].state() != "running", std::cmp::Reverse(*i)));
        order.truncate(fits);
        order.sort_unstable();
    }
    rows.extend(order.into_iter().map(|i| (Some(i), cells(&runs[i]))));
    // Columns that no run fills are left out, and the last ones where the terminal is narrow.
    let filled = |c: usize| rows[1..].iter().any(|(_, r)| !r[c].is_empty());
    let wide = |c: usize| rows.iter().map(|(_, r)| r[c].chars().count()).max().unwrap_or(0);
    let mut widths: Vec<(usize, usize)> =
        (0..heads.len()).filter(|c| filled(*c)).map(|c| (c, wide(c))).collect();
    if let Some(name) = widths.first_mut() {
        let mark = mark(runs.len().saturating_sub(1)).chars().count();
        name.1 = name.1.clamp(3, (area.width / 4).max(10)) + mark;
    }
    // What is left matters more than the learning rate, which has a chart of its own.
    for least in ["lr", "TFLOP/s", "imbalance", "J/token", "memory", "eval", "left"] {
        if widths.iter().map(|(_, w)| w + 2).sum::<usize>() > area.width {
            widths.retain(|(c, _)| heads[*c] != least);
        }
    }
    for (y, (run, row)) in rows.iter().enumerate().take(area.height) {
        let mut x = area.x;
        for (n, (c, width)) in widths.iter().enumerate() {
            let left = area.width.saturating_sub(x);
            let style = match run {
                None => Style::DIM,
                Some(i) if choices.only.is_some_and(|only| only != *i) => Style::DIM,
                Some(i) if n == 0 => Style { bold: true, ..Style::of(color(*i)) },
                Some(_) => state_style(&row[*c]),
            };
            if n == 0 {
                let mark = run.map_or(String::new(), mark);
                screen.text(x, area.y + y, (*width).min(left), &(mark + &row[*c]), style);
            } else {
                screen.text_right(x, area.y + y, (*width).min(left), &row[*c], style);
            }
            x += width + 2;
        }
    }
}

/// What stands before the name of a run.
fn mark(run: usize) -> String {
    format!("{run} ● ")
}

fn state_style(text: &str) -> Style {
    match text {
        "running" => Style::of(35),
        "failed" | "unreadable" => Style::of(196),
        "silent" | "interrupted" => Style::of(208),
        _ => Style::default(),
    }
}

/// The cells of a run's row.
fn cells(run: &WatchedRun) -> Vec<String> {
    let h = run.history();
    let last = |name: &str| h.steps.last(name);
    let total = h.start.as_ref().map_or(0, |s| s.steps);
    let step = h.steps.step.last().copied().unwrap_or(0);
    let left = last("seconds").filter(|_| run.state() == "running" && total > step).map(|s| {
        let recent = h.steps.column("seconds");
        let recent = &recent[recent.len().saturating_sub(20)..];
        let mean = recent.iter().filter(|x| x.is_finite()).sum::<f64>() / recent.len().max(1) as f64;
        format::seconds((total - step) as f64 * if mean > 0.0 { mean } else { s })
    });
    let with = |x: Option<f64>, f: &dyn Fn(f64) -> String| x.map_or(String::new(), f);
    vec![
        run.name.clone(),
        run.state().into(),
        if total > 0 { format!("{step}/{total}") } else { step.to_string() },
        // The last loss, also one that is not a number.
        with(h.steps.column("loss").last().copied(), &format::loss),
        with(h.evals.last().map(|e| e.loss), &format::loss),
        with(last("lr"), &|x| format!("{x:.2e}")),
        with(last("tokens_per_s").filter(|x| *x > 0.0), &|x| format::thousands(x as u64)),
        with(last("tflops").filter(|x| *x > 0.0), &|x| format::tflops(x).replace(" TFLOP/s", "")),
        with(last("memory").filter(|x| *x > 0.0), &|x| format_bytes(x as usize)),
        with(last("imbalance"), &|x| format!("{x:.2}")),
        with(last("energy_j_per_token"), &short),
        left.unwrap_or_default(),
    ]
}

/// What happened, oldest first: the index of the run and a line.
fn notes(runs: &[WatchedRun]) -> Vec<(usize, String)> {
    let mut all: Vec<(f64, usize, String)> = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let h = run.history();
        let noted =
            h.notes.iter().rev().take(12).filter_map(|l| Some((l.time, i, progress::note(&l.event)?)));
        all.extend(noted);
        if let Some(c) = h.checkpoints.last() {
            all.extend(
                progress::note(&Event::Checkpoint(c.clone())).map(|line| (h.last_time - 1.0, i, line)),
            );
        }
        if let Some(end) = &h.end {
            let reason = end.reason.as_ref().map_or(String::new(), |r| format!(": {r}"));
            let ending = h.state(now()).name();
            all.push((h.last_time, i, format!("step {}  {ending}{reason}", end.step)));
        }
        if let Some(e) = &run.error {
            all.push((now(), i, e.clone()));
        }
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.into_iter().map(|(_, i, line)| (i, line.replace('\n', "; "))).collect()
}
