//! Colours and the legend.

use super::{StepTrace, WIDTH, block, chunks, text};
use crate::pipeline::OpKind;
use crate::plan::layer_time::Seconds;
use std::fmt::Write;

/// The class of a part of a pass, its name and its seconds.
type PassPart = (&'static str, &'static str, fn(&Seconds) -> f64);

/// Communication and waiting.
pub(super) const EXPOSED: [PassPart; 4] = [
    ("tp", "exposed TP communication", |s| s.tp),
    ("cp", "exposed CP communication", |s| s.cp),
    ("ep", "exposed EP communication", |s| s.ep),
    ("ho", "waiting for the host", |s| s.host),
];

/// Kernels by part.
pub(super) const KERNELS: [PassPart; 3] = [
    ("gm", "GEMMs", |s| s.gemm),
    ("at", "attention", |s| s.attention),
    ("mm", "memory-bound kernels", |s| s.memory),
];

/// Classes with their fill, in a light and a dark picture.
const FILLS: [(&str, &str, &str); 15] = [
    ("bg", "#ffffff", "#14161a"),
    ("lane", "#ffffff", "#23262c"),
    ("tp", "#d62728", "#ff5c5c"),
    ("cp", "#8a4fc7", "#b98aea"),
    ("ep", "#d6249f", "#ff6fd0"),
    ("ho", "#555555", "#bbbbbb"),
    ("dp", "#7b4a2f", "#c98f6b"),
    ("op", "#0f8b8d", "#3ecfcf"),
    ("gm", "#4c78a8", "#6f9fd4"),
    ("at", "#72b7b2", "#8fd3ce"),
    ("mm", "#b9a44c", "#d6c46f"),
    ("st", "#9aa3ad", "#6b737d"),
    ("sv", "#b48ad0", "#9a6cc0"),
    ("wk", "#e3b23c", "#c79a2b"),
    ("over", "#d62728", "#ff5c5c"),
];

/// Hue, saturation of the passes' colors; chunks differ in lightness.
const PASSES: [(OpKind, &str, f64, f64); 3] = [
    (OpKind::Forward, "f", 212.0, 0.62),
    (OpKind::BackwardInput, "i", 28.0, 0.85),
    (OpKind::WeightGrad, "w", 130.0, 0.38),
];

/// The class of a pass over a chunk.
pub(super) fn pass_class(kind: OpKind, chunk: usize) -> String {
    let letter = PASSES.iter().find(|p| p.0 == kind).map_or("i", |p| p.1);
    format!("{letter}{chunk}")
}

/// The style sheet.
pub(super) fn sheet(chunks: usize) -> String {
    let mut out = String::from(
        "<style>\ntext{fill:#1b1f24}.h{font-size:15px;font-weight:600}.t{fill:#444c56}.n{font-size:8px;fill:#fff;text-anchor:middle}.r{text-anchor:end}.a{text-anchor:middle;fill:#444c56}.grid{stroke:#d0d7de;stroke-width:.5}.limit{stroke:#d62728;stroke-width:1;stroke-dasharray:5 3;fill:none}.lane{stroke:#d0d7de;stroke-width:.5}\n",
    );
    // Writing to a string cannot fail.
    for (class, light, _) in FILLS {
        let _ = write!(out, ".{class}{{fill:{light}}}");
    }
    for (_, letter, hue, saturation) in PASSES {
        for chunk in 0..chunks {
            let lightness = 0.40 + 0.28 * chunk as f64 / (chunks.max(2) - 1) as f64;
            let _ = write!(out, ".{letter}{chunk}{{fill:{}}}", hex(hue, saturation, lightness));
        }
    }
    out += "\n@media(prefers-color-scheme:dark){text{fill:#e6e9ed}.t,.a{fill:#aab2bc}.n{fill:#fff}.grid,.lane{stroke:#3d444d}.limit{stroke:#ff5c5c}";
    for (class, _, dark) in FILLS {
        let _ = write!(out, ".{class}{{fill:{dark}}}");
    }
    out + "}\n</style>\n"
}

/// What the colors mean; only what the step has. Returns where it ends.
pub(super) fn legend(out: &mut String, trace: &StepTrace, top: f64) -> f64 {
    let chunks = chunks(trace);
    let mut items: Vec<(Vec<String>, String)> = Vec::new();
    let of_chunks = if chunks > 1 { format!(" (chunks 0 to {})", chunks - 1) } else { String::new() };
    for (kind, name) in [
        (OpKind::Forward, "forward"),
        (OpKind::BackwardInput, "input gradient"),
        (OpKind::WeightGrad, "weight gradient"),
    ] {
        items.push(((0..chunks).map(|c| pass_class(kind, c)).collect(), format!("{name}{of_chunks}")));
    }
    let mut add = |class: &str, name: &str| items.push((vec![class.into()], name.into()));
    EXPOSED.iter().filter(|(_, _, of)| is_shown(trace, *of)).for_each(|(class, name, _)| add(class, name));
    if trace.ranks.len() == 1 {
        KERNELS.iter().for_each(|(class, name, _)| add(class, name));
    }
    if trace.dp_end > trace.passes_end {
        add("dp", "exposed DP communication");
    }
    add("op", "optimizer");
    add("lane", if trace.ranks.len() > 1 { "bubble" } else { "idle" });
    add("st", "weights, gradients, optimizer state");
    add("sv", "saved tensors");
    add("wk", "workspace");
    let (mut x, mut y) = (16.0, top);
    for (classes, name) in items {
        let box_width = if classes.len() > 1 { 6.0 } else { 12.0 };
        let width = box_width * classes.len() as f64 + 5.0 + 6.2 * name.len() as f64 + 14.0;
        if x + width > WIDTH {
            (x, y) = (16.0, y + 17.0);
        }
        for (i, class) in classes.iter().enumerate() {
            block(out, class, [x + box_width * i as f64, y, box_width, 11.0]);
        }
        text(out, "t", x + box_width * classes.len() as f64 + 5.0, y + 9.5, &name);
        x += width;
    }
    y + 17.0
}

/// Whether passes have a visible part of something.
pub(super) fn is_shown(trace: &StepTrace, of: fn(&Seconds) -> f64) -> bool {
    let mut ops = trace.ranks.iter().flat_map(|r| r.ops.iter().take(64));
    ops.any(|op| op.parts.iter().any(|(_, s)| of(s) > 1e-3 * s.total()))
}

/// A color of hue (degrees), saturation and lightness.
fn hex(hue: f64, saturation: f64, lightness: f64) -> String {
    let a = saturation * lightness.min(1.0 - lightness);
    let channel = |n: f64| {
        let k = (n + hue / 30.0) % 12.0;
        let value = lightness - a * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0);
        (value * 255.0).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", channel(0.0), channel(8.0), channel(4.0))
}
