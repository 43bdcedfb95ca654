//! From a few numbers to a schedule that has been checked.

#[cfg(doc)]
use super::op::ScheduleStep;
use super::{
    check::check,
    deadlock::Matching,
    op::{PipelineOp, Schedule, ScheduleShape},
    p2p,
    timeline::{Costs, Timeline},
    zero_bubble,
};
use crate::{Error, Result};

/// Kind of a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScheduleKind {
    /// One forward, one backward in turn; interleaved over chunks if there are several.
    #[default]
    OneForwardOneBackward,
    /// The same order, but weight gradients fill the gaps (ZB-H1). No rank holds more micro-batches than the first one
    /// does under [`ScheduleKind::OneForwardOneBackward`].
    ZeroBubble,
    /// A forward and a backward of different micro-batches in turns, layer by layer ([`ScheduleStep::Pair`]): what one sends to
    /// experts is in flight while the other computes. More forwards come before the first backward.
    Paired,
    /// No backward.
    ForwardOnly,
}

/// How messages are ordered in the lists of operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Group calls that also work when a rank waits for each where it stands in the list.
    #[default]
    Batched,
    /// Every send right after what made it and every receive one operation ahead of its use: the most overlap, for
    /// engines that match messages by tag and never wait for a send. On one communication stream it can deadlock.
    Eager,
}

/// Parameters of a schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelinePlan {
    /// Pipeline ranks P.
    pub pp: usize,
    /// Chunks per rank v.
    pub vp: usize,
    /// Micro-batches M.
    pub micro_batches: usize,
    /// Micro-batches that a chunk takes before the next chunk's turn; `None` for the smallest legal.
    pub group_size: Option<usize>,
    /// Kind of schedule.
    pub kind: ScheduleKind,
    /// How messages are matched.
    pub transport: Transport,
    /// Time of each operation. Only a zero-bubble order depends on it.
    pub costs: Costs,
}

impl PipelinePlan {
    /// A training plan of `pp` ranks with `vp` chunks each.
    pub fn new(pp: usize, vp: usize, micro_batches: usize) -> PipelinePlan {
        PipelinePlan {
            pp,
            vp,
            micro_batches,
            group_size: None,
            kind: ScheduleKind::default(),
            transport: Transport::default(),
            costs: Costs::default(),
        }
    }

    /// Makes the schedule and checks it under what its transport promises.
    pub fn schedule(&self) -> Result<Schedule> {
        let (shape, ops) = self.computations()?;
        let ScheduleShape { pp, vp, micro_batches, .. } = shape;
        // The rules that Megatron Core follows need the group size that it demands.
        let as_peer = self.kind != ScheduleKind::ZeroBubble && (vp == 1 || (pp > 1 && micro_batches >= pp));
        let (ranks, matching) = match self.transport {
            Transport::Eager => (p2p::eager(&shape, &ops), Matching::Tagged),
            Transport::Batched if as_peer && vp == 1 && self.kind != ScheduleKind::Paired => {
                (p2p::plain(self, &shape)?, Matching::Blocking)
            }
            Transport::Batched if as_peer => (p2p::interleaved(self, &shape)?, Matching::Blocking),
            Transport::Batched => (p2p::timed(&shape, &ops, &self.costs)?, Matching::Blocking),
        };
        let schedule = Schedule { shape, ranks };
        check(&schedule, matching)?;
        Ok(schedule)
    }

    /// The order of computations in time, of which `cost` gives the seconds by rank, with messages of `message` seconds between stages.
    /// Transfers are neither planned nor checked.
    pub fn timeline(&self, cost: impl Fn(usize, PipelineOp) -> f64, message: f64) -> Result<Timeline> {
        let (shape, ops) = self.computations()?;
        Timeline::of_ops(shape, &ops, cost, message)
    }

    /// The computations of every rank in their order, without transfers.
    fn computations(&self) -> Result<(ScheduleShape, Vec<Vec<PipelineOp>>)> {
        self.check_sizes()?;
        let mut ops = self.orders()?;
        if self.kind == ScheduleKind::ZeroBubble {
            ops = zero_bubble::split(self, &ops)?;
        }
        let (pp, vp, micro_batches) = (self.pp, self.vp, self.micro_batches);
        let forward_only = self.kind == ScheduleKind::ForwardOnly;
        Ok((ScheduleShape { pp, vp, micro_batches, forward_only }, ops))
    }

    fn check_sizes(&self) -> Result<()> {
        let sizes = [self.pp, self.vp, self.micro_batches];
        if sizes.contains(&0) {
            return Err(Error::Invalid(format!(
                "a pipeline of {} ranks, {} chunks and {} micro-batches does nothing; each must be at least 1",
                self.pp, self.vp, self.micro_batches
            )));
        }
        // Far beyond any run, near enough for memory.
        if sizes.iter().try_fold(4usize, |a, b| a.checked_mul(*b)).is_none_or(|n| n > 1 << 28) {
            return Err(Error::Invalid(format!(
                "a pipeline of {} ranks, {} chunks and {} micro-batches is too long to plan; take fewer micro-batches",
                self.pp, self.vp, self.micro_batches
            )));
        }
        self.costs.check()
    }
}
