//! Zero-bubble schedule (ZB-H1): weight gradients are deferred into the pipeline bubble.

use std::collections::VecDeque;

use super::{
    op::{OpKind, PipelineOp},
    schedule::{PipelinePlan, ScheduleKind},
    timeline::{Costs, ReadyTimes},
};
use crate::{Error, Result};

struct Rank<'a> {
    /// Forwards and backwards still to come, their order fixed.
    base: &'a [PipelineOp],
    /// Deferred weight gradients.
    pending: VecDeque<PipelineOp>,
    /// (micro-batch, chunk) pairs whose saved activations are still held.
    live: usize,
    free_at: f64,
    done: Vec<PipelineOp>,
}

/// Splits every backward of `orders` into input gradient and weight gradient. Forwards and input gradients keep their
/// order. A weight gradient runs where the rank would idle, at the end, or as soon as one more forward would exceed the
/// activation memory of 1F1B's first rank.
pub(super) fn split(plan: &PipelinePlan, orders: &[Vec<PipelineOp>]) -> Result<Vec<Vec<PipelineOp>>> {
    let plain = PipelinePlan { kind: ScheduleKind::OneForwardOneBackward, ..plan.clone() };
    let first = plain.warmup(0, false)?;
    let most = (first.warmup + 1).min(first.total);
    let costs = &plan.costs;
    let base: Vec<Vec<PipelineOp>> = orders.iter().map(|ops| ops.iter().map(input_only).collect()).collect();
    let mut after = ReadyTimes::new(plan.pp, plan.vp, plan.micro_batches);
    let mut ranks: Vec<Rank> = base
        .iter()
        .map(|base| Rank { base, pending: VecDeque::new(), live: 0, free_at: 0.0, done: Vec::new() })
        .collect();
    loop {
        // Take the earliest next action over all ranks, so that its inputs' times are known.
        let next = ranks
            .iter()
            .enumerate()
            .filter_map(|(r, rank)| rank.next(r, most, costs, &after).map(|(start, op)| (start, r, op)));
        let Some((start, r, op)) = next.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))) else { break };
        let end = start + costs.of(op.kind);
        after.finish(r, op, end);
        ranks[r].act(op, end);
    }
    if let Some(r) = ranks.iter().position(|rank| !rank.base.is_empty()) {
        return Err(Error::Invalid(format!(
            "rank {r} of the pipeline cannot go on; this order has no zero-bubble form"
        )));
    }
    Ok(ranks.into_iter().map(|rank| rank.done).collect())
}

fn input_only(op: &PipelineOp) -> PipelineOp {
    match op.kind {
        OpKind::Backward => PipelineOp { kind: OpKind::BackwardInput, ..*op },
        _ => *op,
    }
}

impl Rank<'_> {
    /// This rank's next action and its start time; `None` while an input is not scheduled yet.
    fn next(&self, rank: usize, most: usize, costs: &Costs, after: &ReadyTimes) -> Option<(f64, PipelineOp)> {
        let weight = self.pending.front().map(|op| (self.free_at, *op));
        let Some(&op) = self.base.first() else { return weight };
        if op.kind == OpKind::Forward && self.live >= most && weight.is_some() {
            return weight;
        }
        match after.ready(rank, op) {
            Some(at) if weight.is_none() || at < self.free_at + costs.weight => {
                Some((at.max(self.free_at), op))
            }
            _ => weight,
        }
    }

    fn act(&mut self, op: PipelineOp, end: f64) {
        self.free_at = end;
        self.done.push(op);
        match op.kind {
            OpKind::WeightGrad => {
                self.pending.pop_front();
                self.live -= 1;
                return;
            }
            OpKind::Forward => self.live += 1,
            OpKind::Backward | OpKind::BackwardInput => {
                self.pending.push_back(PipelineOp { kind: OpKind::WeightGrad, ..op });
            }
        }
        self.base = &self.base[1..];
    }
}
