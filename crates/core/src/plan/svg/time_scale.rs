//! The time axis, with a cut in the steady state of long steps.

use super::{LEFT, RIGHT, StepTrace};
use crate::pipeline::OpKind;

/// Passes that a picture shows over all lanes, at most.
const MOST_OPS: usize = 2880;
/// Passes on each side of a cut; with one lane, where parts of passes are drawn as well, fewer.
const OPS_BESIDE_CUT: usize = 64;
const OPS_BESIDE_CUT_WITH_PARTS: usize = 12;
/// And so many after the warm-up.
const OPS_AFTER_WARMUP: usize = 24;
/// Pixels of the cut.
const GAP: f64 = 40.0;

/// A part of the step that is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Seconds.
    pub from: f64,
    pub to: f64,
    /// Pixels.
    pub left: f64,
    pub right: f64,
}

impl Window {
    pub(super) fn x(&self, time: f64) -> f64 {
        let part = (time - self.from) / (self.to - self.from).max(1e-12);
        self.left + part.clamp(0.0, 1.0) * (self.right - self.left)
    }

    pub(super) fn shows(&self, from: f64, to: f64) -> bool {
        from < self.to && to > self.from
    }
}

/// From seconds to pixels.
pub(super) struct TimeScale {
    pub windows: Vec<Window>,
    end: f64,
}

impl TimeScale {
    pub(super) fn of(trace: &StepTrace, lanes: usize) -> TimeScale {
        let end = trace.end;
        let whole = Window { from: 0.0, to: end, left: LEFT, right: RIGHT };
        let ops = trace.ranks.first().map_or(&[][..], |r| &r.ops);
        let warmup = ops.iter().take_while(|o| o.op.kind == OpKind::Forward).count();
        let half = match lanes {
            1 => OPS_BESIDE_CUT_WITH_PARTS,
            n => OPS_BESIDE_CUT.max(warmup + OPS_AFTER_WARMUP).min(MOST_OPS / 2 / n.max(1)),
        };
        if ops.len() <= 2 * half {
            return TimeScale { windows: vec![whole], end };
        }
        let (first, last) = (ops[half].start, ops[ops.len() - half].start);
        let per_second = (RIGHT - LEFT - GAP) / (first + end - last);
        let middle = LEFT + first * per_second;
        let windows = vec![
            Window { to: first, right: middle, ..whole },
            Window { from: last, left: middle + GAP, ..whole },
        ];
        TimeScale { windows, end }
    }

    /// The seconds that are not drawn.
    pub(super) fn cut(&self) -> Option<(f64, f64)> {
        let [first, last] = self.windows[..] else { return None };
        Some((first.to, last.from))
    }

    /// Round times inside a window.
    pub(super) fn ticks(&self, window: &Window) -> Vec<f64> {
        let shown: f64 = self.windows.iter().map(|w| w.to - w.from).sum();
        let rough = shown / 12.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(rough);
        let first = (window.from / step).ceil() as usize;
        (first..first + 30).map(|i| i as f64 * step).take_while(|t| *t <= window.to).collect()
    }

    /// A time or duration in the unit of the axis.
    pub(super) fn format(&self, seconds: f64) -> String {
        match self.end < 1.0 {
            true => format!("{} ms", short(seconds * 1e3)),
            false => format!("{} s", short(seconds)),
        }
    }
}

/// Three decimals at most, none of them a zero at the end.
fn short(x: f64) -> String {
    let text = format!("{x:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
