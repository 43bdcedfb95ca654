//! Progress of a run: a bar on a terminal, a line every few seconds elsewhere, the events themselves with `--json`.

use crate::args::Global;
use crate::format;
use crate::output;
use crate::signal::PrintLine;
use ferrotron_core::events::{Ending, Event, Operand, Precision, Restart, Step};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Interval between progress lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(10);

/// Shows the events of a run.
pub struct Progress {
    view: View,
    total: u64,
    pace: Option<f64>,
    /// The last step shown.
    last: Option<Step>,
}

enum View {
    Json,
    Bar(ProgressBar),
    /// A line for every logged step if `every_step`, otherwise now and then.
    Lines {
        every_step: bool,
        last: Option<Instant>,
    },
}

impl Progress {
    /// A run of `total` steps that resumes after step `done`. Where there is no terminal, every logged step is a line if
    /// `every_step`: the recipe says how often to log.
    pub fn new(global: &Global, total: u64, done: u64, every_step: bool) -> Progress {
        let view = if global.json {
            View::Json
        } else if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {wide_msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("━╸ "));
            bar.set_position(done);
            View::Bar(bar)
        } else {
            View::Lines { every_step, last: None }
        };
        Progress { view, total, pace: None, last: None }
    }

    /// Shows the bar: what was to be said before it has been said.
    pub fn start(&self) {
        if let View::Bar(bar) = &self.view {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Shows one event. Errors of the terminal do not stop the run.
    pub fn event(&mut self, event: &Event) {
        if let Event::Step(step) = event {
            self.measure(step);
            self.last = Some(step.clone());
        }
        let (total, pace) = (self.total, self.pace);
        match &mut self.view {
            View::Json => {
                let _ = serde_json::to_string(event).map(|line| output::print(&format!("{line}\n")));
            }
            View::Bar(bar) => match event {
                Event::Step(step) => {
                    bar.set_position(step.step);
                    bar.set_message(describe(step, total, pace));
                }
                other => note(other).into_iter().for_each(|n| bar.println(n)),
            },
            View::Lines { every_step, last } => {
                let line = match event {
                    Event::Step(s) => {
                        let due = *every_step || last.is_none_or(|t| t.elapsed() >= EVERY) || s.step == total;
                        due.then(|| {
                            *last = Some(Instant::now());
                            format!("step {}/{total}  {}", s.step, describe(s, total, pace))
                        })
                    }
                    other => note(other),
                };
                line.into_iter().for_each(output::note);
            }
        }
    }

    /// Shows lines beside the progress, from any thread; nothing with `--json`.
    pub fn say(&self) -> PrintLine {
        match &self.view {
            View::Json => Box::new(|_| {}),
            View::Bar(bar) => {
                let bar = bar.clone();
                Box::new(move |line| bar.println(line))
            }
            View::Lines { .. } => Box::new(|line| output::note(line)),
        }
    }

    /// Shows a warning, on standard error even with `--json`.
    pub fn warning(&self, what: &str) {
        tracing::warn!(shown = true, "{what}");
        match &self.view {
            View::Bar(bar) => bar.println(format!("warning: {what}")),
            _ => output::note(format_args!("warning: {what}")),
        }
    }

    /// Ends the progress bar where the run has ended; what follows begins on a line of its own.
    pub fn finish(&self) {
        if let View::Bar(bar) = &self.view
            && !bar.is_hidden()
        {
            let last = self.last.as_ref().map(|s| describe(s, self.total, None));
            bar.abandon_with_message(last.unwrap_or_default());
            output::note("");
        }
    }

    /// Updates the exponential moving average of seconds per step that the remaining time is estimated from.
    fn measure(&mut self, step: &Step) {
        if step.seconds > 0.0 && step.seconds.is_finite() {
            self.pace = Some(self.pace.map_or(step.seconds, |p| 0.9 * p + 0.1 * step.seconds));
        }
    }
}

/// Progress of a conversion or similar job: a bar on a terminal, lines elsewhere, nothing with `--json`.
pub struct JobProgress {
    what: &'static str,
    bar: Option<ProgressBar>,
    quiet: bool,
    last: Cell<Instant>,
}

impl JobProgress {
    /// A job that `what` describes ("converting").
    pub fn new(global: &Global, what: &'static str) -> JobProgress {
        let bar = (!global.json && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{bar:24} {percent} %  {msg}, {eta} left")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("━╸ "));
            bar.set_message(what);
            bar
        });
        JobProgress { what, bar, quiet: global.json, last: Cell::new(Instant::now()) }
    }

    /// Shows that `done` of `total` units are done.
    pub fn set(&self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        } else if !self.quiet && self.last.get().elapsed() >= EVERY {
            self.last.set(Instant::now());
            let share = done as f64 / total.max(1) as f64 * 1e2;
            let _ = writeln!(std::io::stderr(), "{}: {share:.0} %", self.what);
        }
    }
}

impl Drop for JobProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn describe(s: &Step, total: u64, pace: Option<f64>) -> String {
    let mut parts = vec![format!("loss {}", format::loss(s.loss))];
    if s.tokens_per_s > 0.0 {
        parts.push(format!("{} tokens/s", format::thousands(s.tokens_per_s as u64)));
    }
    // Terminals of 80 columns cut off what follows.
    if let Some(pace) = pace.filter(|_| s.step < total) {
        parts.push(format!("{} left", format::seconds(pace * (total - s.step) as f64)));
    }
    if s.tflops > 0.0 {
        parts.push(format::tflops(s.tflops));
    }
    if let Some(x) = s.more.get("imbalance").and_then(|x| x.as_f64()) {
        parts.push(format!("imbalance {x:.2}"));
    }
    if s.memory > 0 {
        parts.push(ferrotron_tensor::format_bytes(s.memory as usize));
    }
    parts.join("  ")
}

/// What an event other than a step says in a line; nothing for those that views show in another way.
pub fn note(event: &Event) -> Option<String> {
    match event {
        Event::Eval(e) => {
            let each: Vec<String> =
                e.members.iter().map(|(name, loss)| format!("{name} {}", format::loss(*loss))).collect();
            let each = if each.is_empty() { String::new() } else { format!("  ({})", each.join(", ")) };
            Some(format!("step {}  validation loss {}{each}", e.step, format::loss(e.loss)))
        }
        Event::Precision(p) => worst(p),
        Event::Checkpoint(c) => {
            let (size, time) = (ferrotron_tensor::format_bytes(c.bytes as usize), format::seconds(c.seconds));
            let best = if c.best { ", the best so far" } else { "" };
            Some(format!("step {}  saved {} ({size}, {time}{best})", c.step, c.path))
        }
        Event::Rerun(e) => Some(format!("step {}  {e}", e.step)),
        Event::Fault(e) => Some(format!("step {}  {e}", e.step)),
        Event::Offload(o) => Some(format!("step {}  {o}", o.step)),
        Event::Straggler(s) => Some(format!("step {}  {s}", s.step)),
        Event::MemoryGrowth(m) => Some(format!("step {}  {m}", m.step)),
        Event::SaveFailed(e) => {
            Some(format!("step {}  the checkpoint could not be saved: {}", e.step, e.reason))
        }
        Event::Resume(r) => {
            let changes = r.changes.iter().map(|c| format!("changed since step {}: {c}", r.step));
            let lines: Vec<String> = changes.chain(r.notes.iter().cloned()).collect();
            (!lines.is_empty()).then(|| lines.join("\n"))
        }
        Event::Restart(r) => Some(restart_line(r)),
        Event::RunEnd(e) if e.ending == Ending::Interrupted => {
            Some(format!("interrupted after step {}; the same command resumes", e.step))
        }
        Event::RunStart(_) | Event::Step(_) | Event::Sections(_) | Event::Sample(_) | Event::RunEnd(_) => {
            None
        }
    }
}

/// A restart in one line.
fn restart_line(r: &Restart) -> String {
    let ranks: Vec<String> = r.replaced.iter().map(usize::to_string).collect();
    let replaced = match ranks.len() {
        0 => String::new(),
        1 => format!("; another process is rank {}", ranks[0]),
        _ => format!("; other processes are ranks {}", ranks.join(", ")),
    };
    let again = if r.steps_lost > 0 { format!(", {} steps again", r.steps_lost) } else { String::new() };
    format!(
        "restart {}: {}{replaced}; from {} after step {}{again}",
        r.generation.saturating_sub(1),
        r.reason,
        r.from,
        r.step
    )
}

/// The worst saturation, underflow and error among the FP8 operands.
fn worst(p: &Precision) -> Option<String> {
    let most = |what: &str, of: &dyn Fn(&Operand) -> f64| {
        let found = p.operands.iter().max_by(|a, b| of(a).total_cmp(&of(b)))?;
        Some(format!("{what} {:.3} % ({} {})", of(found), found.module, found.role))
    };
    let parts = [
        most("saturation", &|o| o.saturation)?,
        most("underflow", &|o| o.underflow)?,
        most("error", &|o| 1e2 * o.error)?,
    ];
    Some(format!("step {}  worst FP8 operands: {}", p.step, parts.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_core::events::{Checkpoint, RunEnd};

    #[test]
    fn a_step_in_words() {
        let s = Step {
            step: 10,
            loss: 2.5,
            tokens_per_s: 18618.4,
            tflops: 0.4321,
            memory: 1 << 30,
            seconds: 0.5,
            ..Step::default()
        };
        let text = describe(&s, 130, Some(0.5));
        assert_eq!(text, "loss 2.5000  18,618 tokens/s  1 min 0 s left  0.432 TFLOP/s  1.0 GiB");
        assert_eq!(
            describe(&Step { step: 130, loss: f64::NAN, ..Step::default() }, 130, Some(0.5)),
            "loss not a number"
        );
        let more = [("imbalance".to_string(), 1.337.into())].into();
        assert_eq!(
            describe(&Step { more, memory: 1024, ..Step::default() }, 0, None),
            "loss 0.0000  imbalance 1.34  1.0 KiB"
        );
        // A step beyond the total must not underflow.
        describe(&Step { step: 140, ..s }, 130, Some(0.5));
    }

    #[test]
    fn notes() {
        let c = Event::Checkpoint(Checkpoint {
            step: 50,
            path: "checkpoints/50".into(),
            bytes: 2048,
            seconds: 0.21,
            best: true,
        });
        let text = "step 50  saved checkpoints/50 (2.0 KiB, 0.2 s, the best so far)";
        assert_eq!(note(&c).as_deref(), Some(text));
        let e = Event::RunEnd(RunEnd { step: 7, ending: Ending::Interrupted, ..RunEnd::default() });
        assert_eq!(note(&e).as_deref(), Some("interrupted after step 7; the same command resumes"));
        assert_eq!(note(&Event::Step(Step::default())), None);
        let operand = |role: &str, [saturation, underflow, error]: [f64; 3]| Operand {
            module: "layers.0.mlp.down".into(),
            role: role.into(),
            saturation,
            underflow,
            error,
            ..Operand::default()
        };
        let operands = vec![operand("input", [0.0, 0.5, 0.02]), operand("gradient", [0.25, 0.0, 0.051])];
        let p = Event::Precision(Precision { step: 3, operands });
        let said = "step 3  worst FP8 operands: saturation 0.250 % (layers.0.mlp.down gradient), underflow 0.500 % \
                    (layers.0.mlp.down input), error 5.100 % (layers.0.mlp.down gradient)";
        assert_eq!(note(&p).as_deref(), Some(said));
        assert_eq!(note(&Event::Precision(Precision::default())), None);
    }
}
