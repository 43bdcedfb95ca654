//! Deadlock check: simulates the ranks' lists against each other, without time, until all complete.

use std::collections::HashMap;

use super::{
    check::fault,
    op::{Message, Payload, Schedule, ScheduleStep, Transfer},
};
use crate::Result;

/// When a rank blocks on messages, strictest first: what passes under one variant passes under every later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matching {
    /// At the grouped send/receive, until all of it completes: both ranks must have reached their calls.
    Blocking,
    /// Grouped calls run in order on a communication stream; an operation waits for its input only.
    Stream,
    /// Messages match by tag and sends never block.
    Tagged,
}

/// Positions of a rank's compute and communication streams. Under [`Matching::Blocking`] only `compute` is used.
#[derive(Clone, Copy, Default)]
struct At {
    compute: usize,
    comm: usize,
}

struct Run<'a> {
    schedule: &'a Schedule,
    matching: Matching,
    at: Vec<At>,
    /// Which ends of a message have been reached: sender, receiver.
    reached: HashMap<Message, [bool; 2]>,
}

/// Fails with the first rank that deadlocks, what it waits for, and where the peer stands.
pub(super) fn run(schedule: &Schedule, matching: Matching) -> Result<()> {
    let at = vec![At::default(); schedule.ranks.len()];
    let mut run = Run { schedule, matching, at, reached: HashMap::new() };
    loop {
        let mut moved = false;
        for rank in 0..schedule.ranks.len() {
            while run.advance(rank) {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    match (0..schedule.ranks.len()).find(|&r| run.waits(r).is_some()) {
        Some(rank) => run.report(rank),
        None => Ok(()),
    }
}

impl Run<'_> {
    fn advance(&mut self, rank: usize) -> bool {
        match self.matching {
            Matching::Blocking => self.advance_compute(rank, true),
            _ => self.advance_comm(rank) | self.advance_compute(rank, false),
        }
    }

    fn advance_compute(&mut self, rank: usize, blocking: bool) -> bool {
        let at = self.at[rank].compute;
        let passes = match self.schedule.ranks[rank].get(at) {
            None => return false,
            Some(step @ (ScheduleStep::Run(_) | ScheduleStep::Pair(..))) => {
                blocking || self.needs(rank, step).all(|m| self.arrived(rank, &m))
            }
            Some(ScheduleStep::Exchange(_)) if !blocking => true,
            Some(ScheduleStep::Exchange(all)) => {
                self.reach(all);
                all.iter().all(|t| self.is_through(&t.message()))
            }
        };
        self.at[rank].compute += usize::from(passes);
        passes
    }

    /// Receives may be posted ahead of computation; a grouped call with a send starts once its tensor is computed.
    fn advance_comm(&mut self, rank: usize) -> bool {
        let At { compute, comm } = self.at[rank];
        let Some(step) = self.schedule.ranks[rank].get(comm) else { return false };
        if let ScheduleStep::Exchange(all) = step {
            if compute < comm && all.iter().any(|t| matches!(t, Transfer::Send(_))) {
                return false;
            }
            self.reach(all);
            if self.matching == Matching::Stream && !all.iter().all(|t| self.is_through(&t.message())) {
                return false;
            }
        }
        self.at[rank].comm += 1;
        true
    }

    fn reach(&mut self, all: &[Transfer]) {
        for transfer in all {
            let end = usize::from(matches!(transfer, Transfer::Receive(_)));
            self.reached.entry(transfer.message()).or_default()[end] = true;
        }
    }

    /// Messages that a step's computation depends on.
    fn needs(&self, rank: usize, step: &ScheduleStep) -> impl Iterator<Item = Message> {
        let shape = self.schedule.shape;
        step.ops().filter_map(move |op| shape.input_message(rank, op))
    }

    fn is_through(&self, m: &Message) -> bool {
        self.reached.get(m) == Some(&[true; 2])
    }

    /// On a stream, a message has arrived once its grouped call completes.
    fn arrived(&self, rank: usize, m: &Message) -> bool {
        let is_it = |t: &Transfer| *t == Transfer::Receive(*m);
        self.is_through(m)
            && (self.matching == Matching::Tagged
                || self.schedule.ranks[rank][..self.at[rank].comm]
                    .iter()
                    .rev()
                    .any(|s| matches!(s, ScheduleStep::Exchange(all) if all.iter().any(is_it))))
    }

    /// The entry at which a rank is stuck.
    fn waits(&self, rank: usize) -> Option<usize> {
        let (At { compute, comm }, len) = (self.at[rank], self.schedule.ranks[rank].len());
        match self.matching {
            Matching::Blocking => (compute < len).then_some(compute),
            _ => (compute < len).then_some(compute).or((comm < len).then_some(comm)),
        }
    }

    fn report(&self, rank: usize) -> Result<()> {
        let Some(step) = self.waits(rank) else { return Ok(()) };
        let entry = &self.schedule.ranks[rank][step];
        let missing = match entry {
            ScheduleStep::Run(_) | ScheduleStep::Pair(..) => {
                self.needs(rank, entry).find(|m| !self.arrived(rank, m))
            }
            ScheduleStep::Exchange(all) => all.iter().map(Transfer::message).find(|m| !self.is_through(m)),
        };
        let Some(m) = missing else {
            return Err(fault(rank, step, entry, "is never reached".into()));
        };
        let other = if m.from == rank { m.to } else { m.from };
        let verb = if m.from == rank { "take" } else { "send" };
        let stands = match self.waits(other) {
            Some(at) => format!("stands at step {at} ({})", self.schedule.ranks[other][at]),
            None => "is at its end".into(),
        };
        let what = match m.payload {
            Payload::Activation => "activation",
            Payload::Gradient => "gradient",
        };
        Err(fault(
            rank,
            step,
            entry,
            format!(
                "waits for ever for rank {other} to {verb} the {what} of micro-batch {}; that rank {stands}",
                m.micro_batch
            ),
        ))
    }
}
