//! Verifies a pipeline schedule before it runs.

use std::collections::{HashMap, HashSet};

use super::{
    deadlock::{self, Matching},
    op::{Message, OpKind, Payload, PipelineOp, Schedule, ScheduleShape, ScheduleStep, Transfer},
    p2p::all_messages,
};
use crate::{Error, Result};

/// Resource peaks of a verified schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleReport {
    /// Per rank, the peak number of (micro-batch, chunk) pairs between forward and the end of backward, weight gradient
    /// included.
    pub peak_live: Vec<usize>,
    /// Per rank, the peak number of (micro-batch, chunk) pairs between forward and input gradient: saved activations.
    pub peak_saved: Vec<usize>,
    /// Per rank, the peak number of deferred weight gradients.
    pub peak_weights: Vec<usize>,
    /// Total number of messages.
    pub messages: usize,
}

/// Verifies that every operation runs exactly once and after its inputs, that weight gradients of a chunk accumulate in
/// micro-batch order (so that every layout sums in the same order), that every message is sent and received once, in the
/// same order at both ends, and that no rank deadlocks under `matching`. The error names rank and operation of the first
/// fault.
pub fn check(schedule: &Schedule, matching: Matching) -> Result<ScheduleReport> {
    let shape = &schedule.shape;
    if schedule.ranks.len() != shape.pp {
        return Err(Error::Invalid(format!(
            "a schedule for {} pipeline ranks has {} lists",
            shape.pp,
            schedule.ranks.len()
        )));
    }
    let mut report =
        ScheduleReport { peak_live: vec![], peak_saved: vec![], peak_weights: vec![], messages: 0 };
    for (rank, steps) in schedule.ranks.iter().enumerate() {
        let mut walk = Walk::new(shape, rank);
        for (step, entry) in steps.iter().enumerate() {
            walk.step(entry).map_err(|what| fault(rank, step, entry, what))?;
        }
        let end = |what: String| fault(rank, steps.len(), &"the end of the list", what);
        walk.complete().map_err(end)?;
        report.peak_live.push(walk.peaks[0]);
        report.peak_saved.push(walk.peaks[1]);
        report.peak_weights.push(walk.peaks[2]);
    }
    report.messages = same_order(schedule)?;
    deadlock::run(schedule, matching)?;
    Ok(report)
}

pub(super) fn fault(rank: usize, step: usize, entry: &dyn std::fmt::Display, what: String) -> Error {
    Error::Schedule { rank, step, operation: entry.to_string(), what }
}

/// One rank's list, checked by itself.
struct Walk<'a> {
    shape: &'a ScheduleShape,
    rank: usize,
    done: HashSet<PipelineOp>,
    sent: HashSet<Message>,
    received: HashSet<Message>,
    /// Per chunk, the micro-batch whose weight gradient is next.
    next_weight: Vec<usize>,
    /// Forwards, input gradients and weight gradients so far.
    counts: [usize; 3],
    /// Current counts: live micro-batches, saved activations, deferred weight gradients.
    peaks: [usize; 3],
}

impl<'a> Walk<'a> {
    fn new(shape: &'a ScheduleShape, rank: usize) -> Walk<'a> {
        let next_weight = vec![0; shape.vp];
        let (done, sent, received) = Default::default();
        Walk { shape, rank, done, sent, received, next_weight, counts: [0; 3], peaks: [0; 3] }
    }

    fn step(&mut self, step: &ScheduleStep) -> Result<(), String> {
        match step {
            ScheduleStep::Run(op) => self.run(*op),
            ScheduleStep::Pair(f, b) if (f.kind, b.kind) != (OpKind::Forward, OpKind::Backward) => {
                Err("pairs other passes than a forward and a whole backward".into())
            }
            ScheduleStep::Pair(f, b) if f.micro_batch == b.micro_batch => {
                Err("pairs two passes of one micro-batch, of which one needs the other".into())
            }
            ScheduleStep::Pair(f, b) => self.run(*f).and_then(|()| self.run(*b)),
            ScheduleStep::Exchange(all) => all.iter().try_for_each(|transfer| match transfer {
                Transfer::Send(m) => self.send(m),
                Transfer::Receive(m) => self.receive(m),
            }),
        }
    }

    fn has(&self, kind: OpKind, op: PipelineOp) -> bool {
        self.done.contains(&PipelineOp { kind, ..op })
    }

    fn has_input_gradient(&self, op: PipelineOp) -> bool {
        self.has(OpKind::Backward, op) || self.has(OpKind::BackwardInput, op)
    }

    fn run(&mut self, op: PipelineOp) -> Result<(), String> {
        let shape = self.shape;
        if op.micro_batch >= shape.micro_batches || op.chunk >= shape.vp {
            return Err(format!("there are {} micro-batches and {} chunks", shape.micro_batches, shape.vp));
        }
        let input = matches!(op.kind, OpKind::Backward | OpKind::BackwardInput);
        if self.done.contains(&op) || (input && self.has_input_gradient(op)) {
            return Err("runs a second time".into());
        }
        if op.kind != OpKind::Forward && shape.forward_only {
            return Err("is a backward in a schedule without".into());
        }
        if input && !self.has(OpKind::Forward, op) {
            return Err("runs before its forward".into());
        }
        if op.kind == OpKind::WeightGrad && !self.has(OpKind::BackwardInput, op) {
            return Err("runs before its input gradient".into());
        }
        match shape.input_message(self.rank, op) {
            Some(m) if !self.received.contains(&m) => {
                return Err(format!("runs before the rank receives the {m}"));
            }
            None if !self.neighbour_is_done(op) => {
                return Err("runs before the neighbouring chunk of the same rank".into());
            }
            _ => {}
        }
        if matches!(op.kind, OpKind::Backward | OpKind::WeightGrad) {
            let next = &mut self.next_weight[op.chunk];
            if *next != op.micro_batch {
                return Err(format!(
                    "accumulates its weight gradient out of order; micro-batch {next} is next"
                ));
            }
            *next += 1;
        }
        self.done.insert(op);
        self.count(op.kind);
        Ok(())
    }

    /// With pp = 1 a stage's neighbours are on the same rank.
    fn neighbour_is_done(&self, op: PipelineOp) -> bool {
        let one = self.shape.pp == 1;
        match op.kind {
            OpKind::Forward if one && op.chunk > 0 => {
                self.has(OpKind::Forward, PipelineOp { chunk: op.chunk - 1, ..op })
            }
            OpKind::Backward | OpKind::BackwardInput if one && op.chunk + 1 < self.shape.vp => {
                self.has_input_gradient(PipelineOp { chunk: op.chunk + 1, ..op })
            }
            _ => true,
        }
    }

    fn count(&mut self, kind: OpKind) {
        match kind {
            OpKind::Forward => self.counts[0] += 1,
            OpKind::BackwardInput => self.counts[1] += 1,
            OpKind::WeightGrad => self.counts[2] += 1,
            OpKind::Backward => {
                self.counts[1] += 1;
                self.counts[2] += 1;
            }
        }
        if !self.shape.forward_only {
            let [forward, input, weight] = self.counts;
            for (peak, now) in self.peaks.iter_mut().zip([forward - weight, forward - input, input - weight])
            {
                *peak = (*peak).max(now);
            }
        }
    }

    fn send(&mut self, m: &Message) -> Result<(), String> {
        self.known(m, m.from)?;
        let chunk = m.stage / self.shape.pp;
        let op = PipelineOp { kind: OpKind::Forward, micro_batch: m.micro_batch, chunk };
        let made = match m.payload {
            Payload::Activation => self.has(OpKind::Forward, op),
            Payload::Gradient => self.has_input_gradient(op),
        };
        if !made {
            return Err(format!("sends the {m} before it is made"));
        }
        if self.sent.insert(*m) { Ok(()) } else { Err(format!("sends the {m} a second time")) }
    }

    fn receive(&mut self, m: &Message) -> Result<(), String> {
        self.known(m, m.to)?;
        if self.received.insert(*m) { Ok(()) } else { Err(format!("receives the {m} a second time")) }
    }

    fn known(&self, m: &Message, rank: usize) -> Result<(), String> {
        let real = m.stage < self.shape.stages() && m.micro_batch < self.shape.micro_batches;
        let real = real && !(self.shape.forward_only && m.payload == Payload::Gradient);
        let is = real && self.shape.message(m.payload, m.micro_batch, m.stage) == Some(*m);
        if is && rank == self.rank { Ok(()) } else { Err(format!("the {m} is none that this rank handles")) }
    }

    fn complete(&self) -> Result<(), String> {
        for chunk in 0..self.shape.vp {
            for micro_batch in 0..self.shape.micro_batches {
                let op = |kind| PipelineOp { kind, micro_batch, chunk };
                let missing = if !self.has(OpKind::Forward, op(OpKind::Forward)) {
                    OpKind::Forward
                } else if self.shape.forward_only {
                    continue;
                } else if !self.has_input_gradient(op(OpKind::Forward)) {
                    OpKind::Backward
                } else if self.next_weight[chunk] <= micro_batch {
                    OpKind::WeightGrad
                } else {
                    continue;
                };
                return Err(format!("{} never runs", op(missing)));
            }
        }
        for m in all_messages(self.shape) {
            if m.from == self.rank && !self.sent.contains(&m) {
                return Err(format!("the {m} is never sent"));
            }
            if m.to == self.rank && !self.received.contains(&m) {
                return Err(format!("the {m} is never received"));
            }
        }
        Ok(())
    }
}

/// Checks that messages of one payload type between two ranks are received in the order they are sent; returns their
/// number.
fn same_order(schedule: &Schedule) -> Result<usize> {
    type Ends = [Vec<(usize, Message)>; 2];
    let mut channels: HashMap<(usize, usize, Payload), Ends> = HashMap::new();
    let mut count = 0;
    for steps in &schedule.ranks {
        for (step, entry) in steps.iter().enumerate() {
            let ScheduleStep::Exchange(all) = entry else { continue };
            for transfer in all {
                let m = transfer.message();
                let end = usize::from(matches!(transfer, Transfer::Receive(_)));
                count += 1 - end;
                channels.entry((m.from, m.to, m.payload)).or_default()[end].push((step, m));
            }
        }
    }
    let mut first: Option<(usize, usize, Error)> = None;
    for ((from, to, _), [sent, received]) in channels {
        let Some(((_, s), (step, r))) = sent.iter().zip(&received).find(|((_, s), (_, r))| s != r) else {
            continue;
        };
        if first.as_ref().is_none_or(|(rank, at, _)| (to, *step) < (*rank, *at)) {
            let what = format!("expects the {r} where rank {from} sends the {s}");
            let entry = &schedule.ranks[to][*step];
            first = Some((to, *step, fault(to, *step, entry, what)));
        }
    }
    first.map_or(Ok(count), |(_, _, error)| Err(error))
}
