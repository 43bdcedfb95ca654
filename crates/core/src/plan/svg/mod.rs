//! One step of a plan as an SVG picture: pipeline lanes over time, and the memory of every pipeline rank under them.
//!
//! The picture needs no script and no other file. Colours follow a viewer's dark mode where it says so; blocks have their times as
//! tooltips. A step with more passes than a picture can show loses the middle of its steady state, and of many pipeline ranks
//! the first and last are drawn; both are said in the picture.

mod lanes;
mod memory;
mod style;
mod time_scale;

use super::step_trace::StepTrace;
use std::fmt::Write;
use time_scale::TimeScale;

/// Width of the picture, and the part of it that lanes take, in pixels.
const WIDTH: f64 = 1400.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 1384.0;
/// Pipeline ranks that are drawn, at most: the first and last halves of them.
const MOST_RANKS: usize = 16;

/// Draws a step: `title` and `subtitle` are the lines above it, `limit` the bytes of device memory.
pub fn draw_step(trace: &StepTrace, title: &str, subtitle: &str, limit: usize) -> String {
    let ranks = drawn_ranks(trace.ranks.len());
    let scale = TimeScale::of(trace, ranks.len());
    let mut body = String::new();
    let mut y = 24.0;
    text(&mut body, "h", 16.0, y, title);
    y += 20.0;
    text(&mut body, "t", 16.0, y, subtitle);
    y += 16.0;
    y = style::legend(&mut body, trace, y);
    y = lanes::draw(&mut body, trace, &ranks, &scale, y + 8.0);
    y = memory::draw(&mut body, trace, &ranks, &scale, limit as f64, y + 22.0);
    for note in notes(trace, &ranks, &scale) {
        y += 16.0;
        text(&mut body, "t", LEFT, y, &note);
    }
    let height = y + 14.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" width=\"{WIDTH}\" height=\"{height:.0}\" font-family=\"system-ui,sans-serif\" font-size=\"11\">\n<title>{}</title>\n",
        escaped(title)
    );
    out += &style::sheet(chunks(trace));
    let _ = writeln!(out, "<rect class=\"bg\" width=\"{WIDTH}\" height=\"{height:.0}\"/>");
    out += &body;
    out += "</svg>\n";
    out
}

/// What the picture leaves out.
fn notes(trace: &StepTrace, ranks: &[usize], scale: &TimeScale) -> Vec<String> {
    let mut out = Vec::new();
    if style::EXPOSED.iter().any(|(_, _, of)| style::is_shown(trace, *of)) {
        out.push("exposed communication is as high as its share of a pass".into());
    }
    if let Some((from, to)) = scale.cut() {
        out.push(format!(
            "{} of the steady state, from {} to {}, are not drawn",
            scale.format(to - from),
            scale.format(from),
            scale.format(to)
        ));
    }
    let all = trace.ranks.len();
    if ranks.len() < all {
        let half = ranks.len() / 2;
        out.push(format!("pipeline ranks {half} to {} of {all} are not drawn", all - half - 1));
    }
    out
}

fn drawn_ranks(all: usize) -> Vec<usize> {
    match all > MOST_RANKS {
        true => (0..MOST_RANKS / 2).chain(all - MOST_RANKS / 2..all).collect(),
        false => (0..all).collect(),
    }
}

/// Chunks of a rank.
fn chunks(trace: &StepTrace) -> usize {
    trace.ranks.iter().flat_map(|r| &r.ops).map(|o| o.op.chunk + 1).max().unwrap_or(1)
}

// Writing to a string cannot fail.
fn text(out: &mut String, class: &str, x: f64, y: f64, content: &str) {
    let _ = writeln!(out, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(content));
}

/// A rectangle as a path, which is shorter.
fn block(out: &mut String, class: &str, [x, y, width, height]: [f64; 4]) {
    let _ = write!(out, "<path class=\"{class}\" d=\"M{x:.1} {y:.1}h{width:.1}v{height:.1}h-{width:.1}z\"/>");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
