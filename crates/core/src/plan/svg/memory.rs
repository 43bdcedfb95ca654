//! Memory of every pipeline rank over time: static state, saved tensors and workspace, under the limit of the device.

use super::time_scale::{TimeScale, Window};
use super::{LEFT, RIGHT, StepTrace, block, text};
use crate::plan::step_trace::RankTrace;
use ferrotron_tensor::format_bytes;
use std::fmt::Write;

/// Draws one strip per rank; returns where they end.
pub(super) fn draw(
    out: &mut String,
    trace: &StepTrace,
    ranks: &[usize],
    scale: &TimeScale,
    limit: f64,
    top: f64,
) -> f64 {
    let height = (360.0 / ranks.len().max(1) as f64).clamp(38.0, 140.0);
    let most = ranks.iter().map(|&r| trace.ranks[r].peak()).fold(limit, f64::max) * 1.05;
    text(
        out,
        "t",
        LEFT,
        top - 5.0,
        &format!("device memory; dashed: all {} of a GPU", format_bytes(limit as usize)),
    );
    let mut y = top;
    for &rank in ranks {
        let r = &trace.ranks[rank];
        let name = if trace.ranks.len() == 1 { "memory".into() } else { format!("pp rank {rank}") };
        text(out, "t r", LEFT - 6.0, y + height / 2.0 - 2.0, &name);
        let peak = format!("to {}", format_bytes(r.peak() as usize));
        text(
            out,
            if r.peak() > limit { "over r" } else { "t r" },
            LEFT - 6.0,
            y + height / 2.0 + 11.0,
            &peak,
        );
        let _ = write!(out, "<g><title>{}</title>", tooltip(r));
        let strip = Strip { bottom: y + height, per_byte: height / most };
        for window in &scale.windows {
            block(out, "lane", [window.left, y, window.right - window.left, height]);
            strip.draw(out, trace, r, window);
        }
        let line = strip.y(limit);
        let _ = writeln!(out, "<path class=\"limit\" d=\"M{LEFT} {line:.1}H{RIGHT}\"/></g>");
        y += height + 5.0;
    }
    y
}

/// From bytes to pixels.
struct Strip {
    bottom: f64,
    per_byte: f64,
}

impl Strip {
    fn y(&self, bytes: f64) -> f64 {
        self.bottom - bytes * self.per_byte
    }

    fn draw(&self, out: &mut String, trace: &StepTrace, r: &RankTrace, window: &Window) {
        let (fixed, work) = (r.memory.static_bytes() as f64, r.memory.workspace as f64);
        let saved: Vec<(f64, f64)> = r.saved.iter().map(|p| (p.time, fixed + p.bytes)).collect();
        let mut all: Vec<(f64, f64)> = saved.iter().map(|(t, bytes)| (*t, bytes + work)).collect();
        let ended = all.last().map_or(0.0, |(t, _)| *t);
        let updating = fixed + r.memory.update as f64;
        all.extend([(ended, fixed), (trace.dp_end, fixed), (trace.dp_end, updating), (trace.end, updating)]);
        self.area(out, "wk", &all, window);
        self.area(out, "sv", &saved, window);
        self.area(out, "st", &[(0.0, fixed), (trace.end, fixed)], window);
    }

    /// The area under straight lines between points.
    fn area(&self, out: &mut String, class: &str, points: &[(f64, f64)], window: &Window) {
        // At the borders of the window, between two points.
        let at = |time: f64| {
            let next = points.iter().position(|(t, _)| *t > time).unwrap_or(points.len());
            match (next.checked_sub(1).and_then(|i| points.get(i)), points.get(next)) {
                (Some((t0, b0)), Some((t1, b1))) => b0 + (b1 - b0) * (time - t0) / (t1 - t0).max(1e-12),
                (Some((_, bytes)), None) | (None, Some((_, bytes))) => *bytes,
                (None, None) => 0.0,
            }
        };
        let (left, first) = (window.left, self.y(at(window.from)));
        let _ = write!(out, "<path class=\"{class}\" d=\"M{left:.1} {:.1}V{first:.1}", self.bottom);
        for (time, bytes) in points.iter().filter(|(t, _)| *t > window.from && *t < window.to) {
            let _ = write!(out, "L{:.1} {:.1}", window.x(*time), self.y(*bytes));
        }
        let (right, last) = (window.right, self.y(at(window.to)));
        let _ = writeln!(out, "L{right:.1} {last:.1}V{:.1}z\"/>", self.bottom);
    }
}

fn tooltip(r: &RankTrace) -> String {
    let m = &r.memory;
    let saved = r.saved.iter().map(|l| l.bytes).fold(0.0, f64::max) as usize;
    let parts = [
        ("weights", m.parameters),
        ("gradients", m.gradients),
        ("optimizer state", m.optimizer),
        ("saved tensors, at most", saved),
        ("workspace", m.workspace),
    ];
    parts.map(|(name, bytes)| format!("{name} {}", format_bytes(bytes))).join("; ")
}
