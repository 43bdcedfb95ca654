//! Runs a schedule's lists against each other, without time, to see whether all come to their end.

use std::collections::HashMap;

use super::{
    check::fault,
    op::{Message, Payload, Schedule, ScheduleStep, Transfer},
};
use crate::Result;

/// When a rank waits for its messages. What passes under an earlier one passes under every later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matching {
    /// At the group call, until all of it is through: both ranks must have come to their calls.
    Blocking,
    /// Group calls run one after the other beside the computation, like a communication stream; an operation waits for
    /// its input only.
    Stream,
    /// Messages are found by their tags and a send never waits.
    Tagged,
}

/// Where the two queues of a rank stand. Under [`Matching::Blocking`] there is one, `compute`.
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

/// Fails with the first rank that waits for ever, what it waits for, and where the other end stands.
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

    /// Receives may be posted ahead of the computation; a group call with a send starts once that is made.
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

    /// Messages without which a rank cannot compute what a step says.
    fn needs(&self, rank: usize, step: &ScheduleStep) -> impl Iterator<Item = Message> {
        let shape = self.schedule.shape;
        step.ops().filter_map(move |op| shape.input_message(rank, op))
    }

    fn is_through(&self, m: &Message) -> bool {
        self.reached.get(m) == Some(&[true; 2])
    }

    /// Under a stream a message has arrived once its group call is through.
    fn arrived(&self, rank: usize, m: &Message) -> bool {
        let is_it = |t: &Transfer| *t == Transfer::Receive(*m);
        self.is_through(m)
            && (self.matching == Matching::Tagged
                || self.schedule.ranks[rank][..self.at[rank].comm]
                    .iter()
                    .rev()
                    .any(|s| matches!(s, ScheduleStep::Exchange(all) if all.iter().any(is_it))))
    }

    /// The entry of a rank's list that does not pass.
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
            return Err(fault(rank, step, entry, "never comes to its turn".into()));
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
