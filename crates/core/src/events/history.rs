//! What a run's events say, as plain data for views.

use super::columns::StepColumns;
use super::scan::{self, LayerLoad};
use super::{Checkpoint, Ending, Eval, Event, Line, Precision, RunEnd, RunStart, Sections};
use std::collections::VecDeque;

/// Most notes that are kept, newest last.
const MAX_NOTES: usize = 2000;
/// Most checkpoints that are kept, newest last.
const MAX_CHECKPOINTS: usize = 1000;
/// Most steps whose expert loads are kept; beyond, every second of them is dropped and every second of what follows.
const MAX_LOADS: usize = 512;

/// Worst values of the FP8 operands of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fp8Point {
    /// The step.
    pub step: u64,
    /// Largest saturation in percent.
    pub saturation: f64,
    /// Largest underflow in percent.
    pub underflow: f64,
    /// Largest relative quantization error.
    pub error: f64,
}

/// Tokens per expert of every MoE layer in a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertLoads {
    /// The step.
    pub step: u64,
    /// Layer and tokens per expert, in layer order.
    pub layers: Vec<(usize, Vec<f64>)>,
}

/// Whether a run is at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// There is no event yet.
    Empty,
    /// It has not ended, and wrote an event lately.
    Running,
    /// It has not ended, and has been silent for longer than its steps take: killed, or stalled.
    Silent,
    /// It ended.
    Ended(Ending),
}

impl RunState {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            RunState::Empty => "empty",
            RunState::Running => "running",
            RunState::Silent => "silent",
            RunState::Ended(Ending::Finished) => "finished",
            RunState::Ended(Ending::Interrupted) => "interrupted",
            RunState::Ended(Ending::Failed) => "failed",
        }
    }
}

/// What the events of a run say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunHistory {
    /// How it began.
    pub start: Option<RunStart>,
    /// Its steps. Where steps were done again, only the last time counts.
    pub steps: StepColumns,
    /// Evaluations.
    pub evals: Vec<Eval>,
    /// FP8 statistics over time.
    pub fp8: Vec<Fp8Point>,
    /// The last FP8 statistics, by operand.
    pub precision: Option<Precision>,
    /// Expert loads over time, thinned.
    pub loads: Vec<ExpertLoads>,
    /// Of how many logged steps with loads one is kept.
    load_stride: usize,
    /// Steps with loads since the last that was kept.
    load_skipped: usize,
    /// The last section times of ranks.
    pub sections: Option<Sections>,
    /// Checkpoints that were completed, oldest first.
    pub checkpoints: Vec<Checkpoint>,
    /// Everything else that happened: resumes, restarts, faults, stragglers, failed saves, samples, …
    pub notes: VecDeque<Line>,
    /// How it ended; a resumed run has not ended.
    pub end: Option<RunEnd>,
    /// When the last event was written, in seconds since 1970.
    pub last_time: f64,
    /// Events read.
    pub events: u64,
    /// Lines that are no events, or events of kinds that this version does not know.
    pub unreadable: u64,
}

impl RunHistory {
    /// Its state at a time in seconds since 1970.
    pub fn state(&self, now: f64) -> RunState {
        match &self.end {
            Some(end) => RunState::Ended(end.ending),
            None if self.events == 0 => RunState::Empty,
            None => {
                // Evaluations and saves take the time of several steps.
                let step = self.steps.last("seconds").unwrap_or(0.0);
                let silent = now - self.last_time > (20.0 * step).max(120.0);
                if silent { RunState::Silent } else { RunState::Running }
            }
        }
    }

    /// Appends rows of steps; what was logged of those steps before is dropped.
    pub(super) fn append_rows(&mut self, rows: StepColumns) {
        let (Some(first), Some(time)) = (rows.step.first().copied(), rows.time.last().copied()) else {
            return;
        };
        self.events += rows.len() as u64;
        if self.steps.step.last().is_some_and(|last| *last >= first) {
            self.steps.truncate_from(first);
            self.evals.retain(|e| e.step < first);
            self.fp8.retain(|p| p.step < first);
            self.loads.retain(|l| l.step < first);
        }
        self.steps.append(rows);
        (self.last_time, self.end) = (time, None);
    }

    /// Appends the expert loads of a step.
    pub(super) fn append_loads(&mut self, step: u64, mut layers: Vec<LayerLoad>) {
        self.load_skipped += 1;
        if !self.loads.is_empty() && self.load_skipped < self.load_stride.max(1) {
            return;
        }
        layers.sort_by_key(|(layer, _)| *layer);
        self.loads.push(ExpertLoads { step, layers });
        self.load_skipped = 0;
        if self.loads.len() > MAX_LOADS {
            let mut kept = 0;
            self.loads.retain(|_| {
                kept += 1;
                kept % 2 == 1
            });
            self.load_stride = self.load_stride.max(1) * 2;
        }
    }

    /// Appends any event.
    pub(super) fn append(&mut self, line: Line) {
        if let Event::Step(step) = &line.event {
            let mut rows = StepColumns::default();
            rows.push(step, line.time);
            self.append_rows(rows);
            let loads = step.more.iter().filter_map(|(name, value)| {
                let layer = name.strip_prefix(scan::LOAD)?.parse().ok()?;
                let tokens = value.as_array()?.iter().map(|n| n.as_f64().unwrap_or(f64::NAN));
                Some((layer, tokens.collect()))
            });
            let loads: Vec<LayerLoad> = loads.collect();
            if !loads.is_empty() {
                self.append_loads(step.step, loads);
            }
            return;
        }
        self.events += 1;
        self.last_time = line.time;
        // A resumed run drops its end from the log; one that goes on without that has not ended either.
        self.end = None;
        // A run may go on for longer than it was begun, or end sooner.
        if let (Event::Resume(resume), Some(start)) = (&line.event, &mut self.start)
            && let Some(change) = resume.changes.iter().find(|c| c.key == "train.steps")
        {
            start.steps = change.new.parse().unwrap_or(start.steps);
        }
        match line.event {
            Event::RunStart(start) => self.start = Some(start),
            Event::Eval(eval) => self.evals.push(eval),
            Event::Precision(p) => {
                let most =
                    |of: fn(&super::Operand) -> f64| p.operands.iter().map(of).fold(f64::NAN, f64::max);
                self.fp8.push(Fp8Point {
                    step: p.step,
                    saturation: most(|o| o.saturation),
                    underflow: most(|o| o.underflow),
                    error: most(|o| o.error),
                });
                self.precision = Some(p);
            }
            Event::Sections(sections) => self.sections = Some(sections),
            Event::Checkpoint(c) => {
                self.checkpoints.retain(|old| old.path != c.path);
                if self.checkpoints.len() == MAX_CHECKPOINTS {
                    self.checkpoints.remove(0);
                }
                self.checkpoints.push(c);
            }
            Event::RunEnd(end) => self.end = Some(end),
            _ => {
                if self.notes.len() == MAX_NOTES {
                    self.notes.pop_front();
                }
                self.notes.push_back(line);
            }
        }
    }
}
