//! One lane per pipeline rank: its passes, and what comes after them.

use super::style::{EXPOSED, KERNELS, pass_class};
use super::time_scale::{TimeScale, Window};
use super::{LEFT, RIGHT, StepTrace, block, text};
use crate::pipeline::OpKind;
use crate::plan::step_trace::{RankTrace, TracedOp};
use std::fmt::Write;

/// Narrower blocks are not drawn.
const LEAST: f64 = 0.25;
/// Width of a digit; a number takes so much and a margin.
const DIGIT: f64 = 5.0;

/// Draws the lanes of some ranks with the time axis under them; returns where it ends.
pub(super) fn draw(out: &mut String, trace: &StepTrace, ranks: &[usize], scale: &TimeScale, top: f64) -> f64 {
    let alone = trace.ranks.len() == 1;
    let (height, step) = if alone { (40.0, 80.0) } else { (24.0, 28.0) };
    let mut y = top;
    for &rank in ranks {
        let name = if alone { "passes".into() } else { format!("pp rank {rank}") };
        text(out, "t r", LEFT - 6.0, y + height / 2.0 + 4.0, &name);
        for window in &scale.windows {
            block(out, "lane", [window.left, y, window.right - window.left, height]);
            out.push('\n');
            lane(out, trace, &trace.ranks[rank], window, [y, height], scale);
        }
        if alone {
            text(out, "t r", LEFT - 6.0, y + height + 20.0, "parts");
            for window in &scale.windows {
                block(out, "lane", [window.left, y + height + 4.0, window.right - window.left, 24.0]);
                parts(out, &trace.ranks[rank], window, [y + height + 4.0, 24.0], scale);
            }
        }
        y += step;
    }
    axis(out, scale, top, y)
}

fn lane(
    out: &mut String,
    trace: &StepTrace,
    rank: &RankTrace,
    window: &Window,
    [y, height]: [f64; 2],
    scale: &TimeScale,
) {
    for op in rank.ops.iter().filter(|op| window.shows(op.start, op.end())) {
        let _ = write!(out, "<g><title>{}</title>", tooltip(op, scale));
        let mut at = op.start;
        for (kind, seconds) in &op.parts {
            let end = at + seconds.total();
            segment(out, &pass_class(*kind, op.op.chunk), window, at, end, [y, height]);
            // What is exposed: as high as its share of the part.
            let mut bottom = y + height;
            for (class, _, of) in EXPOSED {
                let share = height * of(seconds) / seconds.total().max(1e-12);
                if share >= LEAST {
                    bottom -= share;
                    segment(out, class, window, at, end, [bottom, share]);
                }
            }
            at = end;
        }
        let (left, right) = (window.x(op.start), window.x(op.end()));
        let number = op.op.micro_batch.to_string();
        if right - left >= DIGIT * number.len() as f64 + 5.0 {
            let (x, y) = ((left + right) / 2.0, y + 9.5);
            let _ = write!(out, "<text class=\"n\" x=\"{x:.1}\" y=\"{y:.1}\">{number}</text>");
        }
        out.push_str("</g>\n");
    }
    let after = [
        ("dp", "exposed data-parallel communication of the whole step", trace.passes_end, rank.dp),
        ("op", "optimizer", trace.dp_end, rank.optimizer),
    ];
    for (class, name, from, seconds) in
        after.into_iter().filter(|a| a.3 > 0.0 && window.shows(a.2, a.2 + a.3))
    {
        let _ = write!(out, "<g><title>{name}: {}</title>", scale.format(seconds));
        segment(out, class, window, from, from + seconds, [y, height]);
        out.push_str("</g>\n");
    }
}

/// The parts of every pass, one after another.
fn parts(out: &mut String, rank: &RankTrace, window: &Window, place: [f64; 2], scale: &TimeScale) {
    for op in rank.ops.iter().filter(|op| window.shows(op.start, op.end())) {
        let mut at = op.start;
        for (_, seconds) in &op.parts {
            for (class, name, of) in KERNELS.iter().chain(&EXPOSED) {
                let end = at + of(seconds);
                if window.x(end) - window.x(at) >= LEAST {
                    let _ = write!(out, "<g><title>{name}: {}</title>", scale.format(of(seconds)));
                    segment(out, class, window, at, end, place);
                    out.push_str("</g>\n");
                }
                at = end;
            }
        }
    }
}

fn segment(out: &mut String, class: &str, window: &Window, from: f64, to: f64, [y, height]: [f64; 2]) {
    let (left, right) = (window.x(from), window.x(to));
    if right - left >= LEAST {
        block(out, class, [left, y, right - left, height]);
    }
}

fn tooltip(op: &TracedOp, scale: &TimeScale) -> String {
    let kind = match op.op.kind {
        OpKind::Forward => "forward",
        OpKind::Backward => "backward",
        OpKind::BackwardInput => "input gradient",
        OpKind::WeightGrad => "weight gradient",
    };
    let chunk = op.op.chunk;
    let mut text = format!(
        "{kind}, micro-batch {}, chunk {chunk}: {}",
        op.op.micro_batch,
        scale.format(op.end() - op.start)
    );
    for (_, name, of) in EXPOSED {
        let seconds: f64 = op.parts.iter().map(|(_, s)| of(s)).sum();
        if seconds > 1e-3 * (op.end() - op.start) {
            let _ = write!(text, "; {name} {}", scale.format(seconds));
        }
    }
    text
}

/// The time axis, and lines through the lanes; returns where it ends.
fn axis(out: &mut String, scale: &TimeScale, top: f64, y: f64) -> f64 {
    for window in &scale.windows {
        for tick in scale.ticks(window) {
            let x = window.x(tick);
            let _ = writeln!(out, "<path class=\"grid\" d=\"M{x:.1} {top:.1}V{:.1}\"/>", y + 4.0);
            // Labels stay clear of the cut and of the border.
            if x + 14.0 < window.right.min(RIGHT) || scale.windows.len() == 1 && x + 4.0 < RIGHT {
                text(out, "a", x, y + 16.0, &scale.format(tick));
            }
        }
    }
    if let [first, last] = scale.windows[..] {
        let (x, middle) = ((first.right + last.left) / 2.0, (top + y) / 2.0);
        text(out, "a", x, middle, "⋯");
        text(out, "a", x, y + 16.0, "⋯");
    }
    y + 20.0
}
