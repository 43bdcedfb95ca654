//! The last words of a run, read from its event log.

use crate::format;
use ferrotron_core::events::{Event, Line};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What a run came to.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Steps made.
    pub steps: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Loss of the first step.
    pub first_loss: Option<f64>,
    /// Loss of the last step.
    pub loss: Option<f64>,
    /// Last loss on validation data.
    pub eval_loss: Option<f64>,
    /// Seconds spent in steps.
    pub seconds: f64,
    /// Median tokens per second of a step.
    pub tokens_per_s: f64,
    /// Highest memory of a step.
    pub memory: u64,
    /// The last sample.
    pub sample: Option<String>,
    /// The run folder.
    pub out: PathBuf,
}

impl Summary {
    /// Reads it off the events of a run.
    pub fn new(lines: &[Line], out: &Path) -> Summary {
        let mut s = Summary { out: out.into(), ..Summary::default() };
        let mut rates = Vec::new();
        for line in lines {
            match &line.event {
                Event::Step(e) => {
                    (s.steps, s.tokens) = (e.step, e.tokens);
                    s.first_loss.get_or_insert(e.loss);
                    s.loss = Some(e.loss);
                    s.seconds += e.seconds;
                    s.memory = s.memory.max(e.memory);
                    rates.push(e.tokens_per_s);
                }
                Event::Eval(e) => s.eval_loss = Some(e.loss),
                Event::Sample(e) => s.sample = Some(format!("{}{}", e.prompt, e.text)),
                Event::RunStart(_) | Event::Checkpoint(_) | Event::RunEnd(_) => {}
            }
        }
        rates.sort_by(f64::total_cmp);
        s.tokens_per_s = rates.get(rates.len() / 2).copied().unwrap_or(0.0);
        s
    }

    /// For people: a few lines.
    pub fn page(&self) -> String {
        let mut out = String::new();
        if let Some(sample) = &self.sample {
            out += &format!("{}\n\n", printable(sample));
        }
        let loss = |x: Option<f64>| x.map_or("none".into(), format::loss);
        out += &format!("{} steps, {} tokens", format::thousands(self.steps), format::count(self.tokens));
        if self.seconds > 0.0 {
            let rate = format::thousands(self.tokens_per_s as u64);
            out += &format!(" in {}, {rate} tokens/s", format::seconds(self.seconds));
        }
        out += &format!("\nloss {} → {}", loss(self.first_loss), loss(self.loss));
        if self.eval_loss.is_some() {
            out += &format!(", validation {}", loss(self.eval_loss));
        }
        out + &format!("\nrun folder {}\n", self.out.display())
    }
}

/// A young model writes anything: control characters must not reach the terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_core::events::{Eval, Sample, Step};

    #[test]
    fn a_run_in_a_few_lines() {
        let step = |step, loss| {
            Event::Step(Step {
                step,
                loss,
                tokens: step * 4096,
                seconds: 0.5,
                tokens_per_s: 8192.0,
                ..Step::default()
            })
        };
        let events = [
            step(1, 5.5),
            step(2, 2.25),
            Event::Eval(Eval { step: 2, loss: 2.5, tokens: 10 }),
            Event::Sample(Sample { step: 2, prompt: "a".into(), text: "b\x1b[31m".into() }),
        ];
        let lines: Vec<Line> = events.into_iter().map(|event| Line { event, time: 0.0 }).collect();
        let text = Summary::new(&lines, Path::new("runs/tiny")).page();
        assert_eq!(
            text,
            "ab\u{fffd}[31m\n\n2 steps, 8.19K tokens in 1.0 s, 8,192 tokens/s\nloss 5.5000 → 2.2500, validation 2.5000\nrun folder runs/tiny\n"
        );
        assert!(Summary::new(&[], Path::new("x")).page().starts_with("0 steps, 0 tokens\nloss none → none"));
    }
}
