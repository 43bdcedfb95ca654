//! Timeline of a schedule with zero-cost messages, and its drawing.

use std::fmt::Write;

use super::op::{OpKind, PipelineOp, Schedule, ScheduleShape};
use crate::{Error, Result};

/// Time of each operation on one chunk, in any unit. A full backward takes `input + weight`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Forward.
    pub forward: f64,
    /// Input gradient.
    pub input: f64,
    /// Weight gradient.
    pub weight: f64,
}

impl Default for Costs {
    /// One unit each, so that a backward takes twice a forward.
    fn default() -> Costs {
        Costs { forward: 1.0, input: 1.0, weight: 1.0 }
    }
}

impl Costs {
    /// Time of one operation.
    pub fn of(&self, kind: OpKind) -> f64 {
        match kind {
            OpKind::Forward => self.forward,
            OpKind::Backward => self.input + self.weight,
            OpKind::BackwardInput => self.input,
            OpKind::WeightGrad => self.weight,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        if [self.forward, self.input, self.weight].iter().all(|c| c.is_finite() && *c > 0.0) {
            return Ok(());
        }
        Err(Error::Invalid(format!("costs of {self:?}: each must be a finite number above 0")))
    }
}

/// End times of forwards and backwards of all stages, as far as known.
pub(super) struct ReadyTimes {
    shape: ScheduleShape,
    forward: Vec<Option<f64>>,
    input: Vec<Option<f64>>,
    /// Time of a message to another stage.
    message: f64,
}

impl ReadyTimes {
    pub(super) fn new(pp: usize, vp: usize, micro_batches: usize) -> ReadyTimes {
        let none = vec![None; pp * vp * micro_batches];
        let shape = ScheduleShape { pp, vp, micro_batches, forward_only: false };
        ReadyTimes { shape, forward: none.clone(), input: none, message: 0.0 }
    }

    fn slot(&self, stage: usize, op: PipelineOp) -> usize {
        stage * self.shape.micro_batches + op.micro_batch
    }

    /// When all inputs of `op` are ready; `None` while one has not been scheduled.
    pub(super) fn ready(&self, rank: usize, op: PipelineOp) -> Option<f64> {
        let stage = self.shape.stage(rank, op.chunk);
        let of = |times: &[Option<f64>], stage| times.get(self.slot(stage, op)).copied().flatten();
        match op.kind {
            OpKind::Forward if stage == 0 => Some(0.0),
            OpKind::Forward => of(&self.forward, stage - 1).map(|t| t + self.message),
            OpKind::WeightGrad => of(&self.input, stage),
            OpKind::Backward | OpKind::BackwardInput => {
                let own = of(&self.forward, stage)?;
                if stage + 1 == self.shape.stages() {
                    Some(own)
                } else {
                    of(&self.input, stage + 1).map(|t| (t + self.message).max(own))
                }
            }
        }
    }

    /// Records the end of an operation. A full backward releases the previous stage at its end, since the weight gradient
    /// runs inside it.
    pub(super) fn finish(&mut self, rank: usize, op: PipelineOp, end: f64) {
        let slot = self.slot(self.shape.stage(rank, op.chunk), op);
        let times = match op.kind {
            OpKind::Forward => &mut self.forward,
            OpKind::Backward | OpKind::BackwardInput => &mut self.input,
            OpKind::WeightGrad => return,
        };
        if let Some(time) = times.get_mut(slot) {
            *time = Some(end);
        }
    }
}

/// An operation in time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimelineSpan {
    /// The operation.
    pub op: PipelineOp,
    /// When it starts.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// A schedule in time, every operation as early as its rank's order and its inputs allow (ASAP).
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Per rank its operations.
    pub ranks: Vec<Vec<TimelineSpan>>,
    shape: ScheduleShape,
    unit: f64,
}

impl Timeline {
    /// The time of a schedule's operations; messages cost nothing.
    pub fn new(schedule: &Schedule, costs: &Costs) -> Result<Timeline> {
        let ops: Vec<Vec<PipelineOp>> =
            (0..schedule.ranks.len()).map(|r| schedule.ops(r).collect()).collect();
        Timeline::of(schedule.shape, &ops, costs)
    }

    pub(super) fn of(shape: ScheduleShape, ops: &[Vec<PipelineOp>], costs: &Costs) -> Result<Timeline> {
        costs.check()?;
        let unit = costs.forward.min(costs.input).min(costs.weight);
        Timeline::place(shape, ops, |_, op| costs.of(op.kind), 0.0, unit)
    }

    /// The time of ordered operations, of which `cost` gives the seconds by rank, with messages of `message` seconds between
    /// stages.
    pub(super) fn of_ops(
        shape: ScheduleShape,
        ops: &[Vec<PipelineOp>],
        cost: impl Fn(usize, PipelineOp) -> f64,
        message: f64,
    ) -> Result<Timeline> {
        let all = ops.iter().enumerate().flat_map(|(rank, ops)| ops.iter().map(move |op| (rank, *op)));
        let unit = all.map(|(rank, op)| cost(rank, op)).fold(f64::INFINITY, f64::min);
        Timeline::place(shape, ops, cost, message, unit)
    }

    fn place(
        shape: ScheduleShape,
        ops: &[Vec<PipelineOp>],
        cost: impl Fn(usize, PipelineOp) -> f64,
        message: f64,
        unit: f64,
    ) -> Result<Timeline> {
        let mut after = ReadyTimes::new(shape.pp, shape.vp, shape.micro_batches);
        after.message = message;
        let mut ranks: Vec<Vec<TimelineSpan>> = vec![Vec::new(); ops.len()];
        loop {
            let before: usize = ranks.iter().map(Vec::len).sum();
            for (rank, spans) in ranks.iter_mut().enumerate() {
                while let Some(&op) = ops[rank].get(spans.len())
                    && let Some(ready) = after.ready(rank, op)
                {
                    let start = spans.last().map_or(ready, |s: &TimelineSpan| s.end.max(ready));
                    let end = start + cost(rank, op);
                    spans.push(TimelineSpan { op, start, end });
                    after.finish(rank, op, end);
                }
            }
            if ranks.iter().map(Vec::len).sum::<usize>() == before {
                break;
            }
        }
        if let Some(rank) = (0..ops.len()).find(|&r| ranks[r].len() < ops[r].len()) {
            let (step, op) = (ranks[rank].len(), ops[rank][ranks[rank].len()]);
            let what = "waits forever for its input from another stage".into();
            return Err(Error::Schedule { rank, step, operation: op.to_string(), what });
        }
        Ok(Timeline { ranks, shape, unit })
    }

    /// Makespan: the time until the last rank is done.
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().filter_map(|spans| spans.last()).map(|s| s.end).fold(0.0, f64::max)
    }

    /// Busy time, summed over ranks.
    pub fn work(&self) -> f64 {
        self.ranks.iter().flatten().map(|s| s.end - s.start).sum()
    }

    /// Bubble fraction: idle time over total time of all ranks.
    pub fn bubble(&self) -> f64 {
        let all = self.makespan() * self.ranks.len() as f64;
        if all > 0.0 { 1.0 - self.work() / all } else { 0.0 }
    }

    /// Idle over busy time: (P−1)/(v·M) for 1F1B and interleaved schedules with M ≥ P.
    pub fn bubble_to_work(&self) -> f64 {
        let work = self.work();
        if work > 0.0 { self.makespan() * self.ranks.len() as f64 / work - 1.0 } else { 0.0 }
    }

    /// One line per rank. An operation is a letter, the micro-batch and, with several chunks, the chunk as a lower-case
    /// letter, extended with `-` for its duration; dots are idle time. Lines stop at `width` columns.
    pub fn draw(&self, width: usize) -> String {
        let label = |op: PipelineOp| {
            let chunk = match (self.shape.vp, op.chunk) {
                (1, _) => String::new(),
                (2..=26, c) => char::from(b'a' + c as u8).to_string(),
                (_, c) => format!(".{c}"),
            };
            format!("{}{}{chunk}", op.kind.letter(), op.micro_batch)
        };
        let cell = 1 + self.ranks.iter().flatten().map(|s| label(s.op).len()).max().unwrap_or(1);
        let column = |time: f64| (time / self.unit * cell as f64).round() as usize;
        let ScheduleShape { pp, vp, micro_batches, .. } = self.shape;
        let mut out = format!(
            "P={pp} v={vp} M={micro_batches}: time {}, bubble {:.1} % of it ({:.1} % of the work)\n",
            self.makespan(),
            100.0 * self.bubble(),
            100.0 * self.bubble_to_work()
        );
        let end = column(self.makespan()).min(width);
        for (rank, spans) in self.ranks.iter().enumerate() {
            let mut line = vec![b'.'; end];
            for span in spans.iter().take_while(|s| column(s.start) < end) {
                let (from, to) = (column(span.start), column(span.end));
                let text = label(span.op);
                for (k, slot) in line.iter_mut().enumerate().take(to).skip(from) {
                    *slot = match text.as_bytes().get(k - from) {
                        _ if k + 1 == to => b' ',
                        Some(c) => *c,
                        None => b'-',
                    };
                }
            }
            let more = if column(self.makespan()) > end { "…" } else { "" };
            // Writing to a string cannot fail.
            let _ = writeln!(out, "rank {rank:>2} |{}{more}", String::from_utf8_lossy(&line));
        }
        out
    }
}
