//! What the page is told of a run, as JSON: curves at the resolution of the screen, and the latest of everything else.

use super::super::runs::{WatchedRun, WatchedRuns, now};
use crate::progress;
use ferrotron_core::events::{Event, RerunOutcome, RunHistory, decimate};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;

/// Most points of a curve that a page may ask for.
const MAX_POINTS: usize = 4000;
/// Notes of a run that are sent.
const NOTES: usize = 200;
/// Steps of an expert-load heat map.
const LOAD_STEPS: usize = 160;

/// What curves are drawn over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Axis {
    #[default]
    Step,
    Tokens,
    /// Hours since the run began.
    Time,
}

impl std::str::FromStr for Axis {
    type Err = ();
    fn from_str(text: &str) -> Result<Axis, ()> {
        match text {
            "step" => Ok(Axis::Step),
            "tokens" => Ok(Axis::Tokens),
            "time" => Ok(Axis::Time),
            _ => Err(()),
        }
    }
}

/// The part of the curves that is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    pub axis: Axis,
    pub points: usize,
    /// The range on the axis.
    pub from: f64,
    pub to: f64,
    /// Weight of the past in the moving average of the loss, 0 for none.
    pub smooth: f64,
}

/// A curve. Numbers are sent in single precision: a screen shows less.
#[derive(Serialize)]
struct Series {
    x: Vec<f64>,
    y: Vec<f32>,
}

/// Everything about all runs.
pub fn all(runs: &WatchedRuns, query: &Query) -> Value {
    let runs: Vec<Value> = runs.runs.iter().enumerate().map(|(id, run)| of_run(id, run, query)).collect();
    json!({ "now": now(), "runs": runs })
}

fn of_run(id: usize, run: &WatchedRun, query: &Query) -> Value {
    let h = run.history();
    let x = positions(h, query.axis);
    let from = x.partition_point(|x| *x < query.from);
    let to = x.partition_point(|x| *x <= query.to).max(from);
    // A point on either side, so that lines reach the border.
    let range = from.saturating_sub(1)..(to + 1).min(x.len());
    let points = query.points.clamp(16, MAX_POINTS);
    let mut series = BTreeMap::new();
    for name in h.steps.names().filter(|n| is_plotted(n)) {
        let values = h.steps.column(name);
        series.insert(name.to_string(), curve(&x, values, range.clone(), points));
    }
    if query.smooth > 0.0 {
        let smoothed = moving_average(h.steps.column("loss"), query.smooth.min(0.9999));
        series.insert("loss, smoothed".into(), curve(&x, &smoothed, range, points));
    }
    let at = |step: u64| position_of(h, &x, step);
    let marks: Vec<Value> =
        marks(h).map(|(step, kind)| json!({ "x": at(step), "step": step, "kind": kind })).collect();
    json!({
        "id": id,
        "name": run.name,
        "path": run.dir().to_string_lossy(),
        "state": run.state(),
        "error": run.error,
        "revision": run.revision,
        "start": h.start,
        "end": h.end,
        "time": h.last_time,
        "events": h.events,
        "unreadable": h.unreadable,
        "step": h.steps.step.last(),
        "last": last_values(h),
        "losses": h.steps.column("loss").last().map(|x| *x as f32),
        "pace": pace(h),
        "series": series,
        "evals": h.evals.iter().map(|e| json!([at(e.step), e.loss as f32, e.step])).collect::<Vec<_>>(),
        "fp8": h.fp8.iter().map(|p| json!([at(p.step), p.saturation as f32, p.underflow as f32, p.error as f32, p.step]))
            .collect::<Vec<_>>(),
        "operands": worst_operands(h),
        "load_layers": h.loads.last().map(|l| l.layers.iter().map(|(layer, _)| *layer).collect::<Vec<_>>()),
        "sections": h.sections,
        "checkpoints": h.checkpoints.iter().rev().take(NOTES).collect::<Vec<_>>(),
        "configs": configs(run),
        "marks": marks,
        "notes": notes(h),
    })
}

/// Metrics of single layers stay out: there may be thousands.
fn is_plotted(name: &str) -> bool {
    !name.starts_with("moe/") && !matches!(name, "batch" | "num_zeros")
}

/// Where each step is on the axis.
fn positions(h: &RunHistory, axis: Axis) -> Vec<f64> {
    match axis {
        Axis::Step => h.steps.step.iter().map(|s| *s as f64).collect(),
        Axis::Tokens => h.steps.column("tokens").to_vec(),
        Axis::Time => {
            let first = h.steps.time.first().copied().unwrap_or(0.0);
            let begun = first - h.steps.column("seconds").first().filter(|s| s.is_finite()).unwrap_or(&0.0);
            h.steps.time.iter().map(|t| (t - begun) / 3600.0).collect()
        }
    }
}

/// Where a step is on the axis: at the first logged step that is not before it.
fn position_of(h: &RunHistory, x: &[f64], step: u64) -> Option<f64> {
    let i = h.steps.step.partition_point(|s| *s < step);
    x.get(i).or(x.last()).copied()
}

fn curve(x: &[f64], values: &[f64], range: Range<usize>, points: usize) -> Series {
    let (x, values) = (x.get(range.clone()).unwrap_or(&[]), values.get(range).unwrap_or(&[]));
    let kept = decimate(values, points);
    Series { x: kept.iter().map(|i| x[*i]).collect(), y: kept.iter().map(|i| values[*i] as f32).collect() }
}

/// Exponential moving average without the bias of its start; what is not finite stays so and is not averaged.
fn moving_average(values: &[f64], keep: f64) -> Vec<f64> {
    let (mut sum, mut weight) = (0.0, 0.0);
    let mut next = |x: &f64| {
        if !x.is_finite() {
            return *x;
        }
        (sum, weight) = (keep * sum + (1.0 - keep) * x, keep * weight + (1.0 - keep));
        sum / weight
    };
    values.iter().map(&mut next).collect()
}

fn last_values(h: &RunHistory) -> BTreeMap<&str, f64> {
    h.steps.names().filter(|n| is_plotted(n)).filter_map(|n| Some((n, h.steps.last(n)?))).collect()
}

/// Mean seconds of the last steps.
fn pace(h: &RunHistory) -> Option<f64> {
    let all = h.steps.column("seconds");
    let last: Vec<f64> =
        all[all.len().saturating_sub(20)..].iter().copied().filter(|x| x.is_finite()).collect();
    (!last.is_empty()).then(|| last.iter().sum::<f64>() / last.len() as f64)
}

/// FP8 operands of the last statistics, those with most saturation and error first.
fn worst_operands(h: &RunHistory) -> Vec<Value> {
    let mut all: Vec<_> = h.precision.iter().flat_map(|p| &p.operands).collect();
    all.sort_by(|a, b| b.saturation.total_cmp(&a.saturation).then(b.error.total_cmp(&a.error)));
    let shown = all.into_iter().take(8);
    shown
        .map(|o| {
            json!({
                "module": o.module, "role": o.role, "saturation": o.saturation, "underflow": o.underflow, "error": o.error,
            })
        })
        .collect()
}

/// Names of the run's configuration files.
pub fn configs(run: &WatchedRun) -> Vec<String> {
    let entries = std::fs::read_dir(run.dir()).into_iter().flatten().flatten();
    let names = entries.filter_map(|e| e.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|n| n.starts_with("config") && n.ends_with(".toml")).collect();
    names.sort();
    names
}

/// Restarts, faults and the like on the axis of steps. A verification that passed is none.
fn marks(h: &RunHistory) -> impl Iterator<Item = (u64, &'static str)> {
    h.notes.iter().rev().take(NOTES).filter_map(|line| {
        let kind = match &line.event {
            Event::Resume(_) => "resume",
            Event::Restart(_) => "restart",
            Event::Fault(_) => "fault",
            Event::Rerun(r) if r.outcome != RerunOutcome::Same => "rerun",
            Event::Straggler(_) => "straggler",
            Event::SaveFailed(_) => "save_failed",
            Event::MemoryGrowth(_) => "memory_growth",
            _ => return None,
        };
        Some((line.event.step(), kind))
    })
}

/// What happened, newest first.
fn notes(h: &RunHistory) -> Vec<Value> {
    let note = |time: f64, event: &Event| {
        let kind = match event {
            Event::Rerun(r) if r.outcome == RerunOutcome::Same => Some("verified".into()),
            _ => serde_json::to_value(event).ok().and_then(|v| Some(v.get("kind")?.as_str()?.to_string())),
        };
        let text = match event {
            Event::Sample(s) => Some(format!("{}{}", s.prompt, s.text)),
            Event::Resume(r) => {
                Some(progress::note(event).unwrap_or_else(|| format!("resumed after step {}", r.step)))
            }
            other => progress::note(other),
        };
        let prefix = format!("step {}  ", event.step());
        let text = text?;
        let text = text.strip_prefix(&prefix).unwrap_or(&text);
        Some(json!({ "time": time, "step": event.step(), "kind": kind, "text": text }))
    };
    h.notes.iter().rev().take(NOTES).filter_map(|l| note(l.time, &l.event)).collect()
}

/// Tokens per expert of one layer over time, relative to the mean: `values[step][expert]`.
pub fn loads(run: &WatchedRun, layer: usize) -> Value {
    let of_layer =
        |layers: &'_ [(usize, Vec<f64>)]| layers.iter().find(|(l, _)| *l == layer).map(|(_, n)| n.clone());
    let h = run.history();
    let all: Vec<(u64, Vec<f64>)> =
        h.loads.iter().filter_map(|l| Some((l.step, of_layer(&l.layers)?))).collect();
    let stride = all.len().div_ceil(LOAD_STEPS).max(1);
    // Counted from the newest, which is always shown.
    let mut shown: Vec<_> = all.iter().rev().step_by(stride).collect();
    shown.reverse();
    let relative = |tokens: &Vec<f64>| {
        let mean = tokens.iter().sum::<f64>() / tokens.len().max(1) as f64;
        tokens.iter().map(|n| if mean > 0.0 { (n / mean) as f32 } else { 0.0 }).collect::<Vec<f32>>()
    };
    json!({
        "layer": layer,
        "steps": shown.iter().map(|(step, _)| step).collect::<Vec<_>>(),
        "values": shown.iter().map(|(_, tokens)| relative(tokens)).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moving_average_has_no_bias_and_skips_gaps() {
        assert_eq!(moving_average(&[2.0, 2.0, 2.0], 0.9), [2.0, 2.0, 2.0]);
        let out = moving_average(&[1.0, f64::NAN, 3.0], 0.5);
        assert!(out[0] == 1.0 && out[1].is_nan() && (out[2] - 7.0 / 3.0).abs() < 1e-12, "{out:?}");
    }
}
