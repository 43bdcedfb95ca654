//! Weight gradients moved into the gaps (ZB-H1).

use std::collections::VecDeque;

use super::{
    op::{Kind, Op},
    plan::{Mode, Plan},
    timeline::{After, Costs},
};
use crate::{Error, Result};

struct Rank<'a> {
    /// Forwards and backwards still to come, their order fixed.
    base: &'a [Op],
    /// Weight gradients that can run.
    pending: VecDeque<Op>,
    /// Micro-batches (times chunks) whose saved values are not yet free.
    live: usize,
    free_at: f64,
    done: Vec<Op>,
}

/// Splits every backward of `orders` into input gradient and weight gradient. Forwards and input gradients keep their
/// order. A weight gradient runs where the rank would wait anyway, at the end, or as soon as one more forward would
/// hold more than the first rank's share of plain training.
pub(super) fn split(plan: &Plan, orders: &[Vec<Op>]) -> Result<Vec<Vec<Op>>> {
    let plain = Plan { mode: Mode::Train, ..plan.clone() };
    let first = plain.warmup(0, false)?;
    let most = (first.warmup + 1).min(first.total);
    let costs = &plan.costs;
    let base: Vec<Vec<Op>> = orders.iter().map(|ops| ops.iter().map(input_only).collect()).collect();
    let mut after = After::new(plan.pp, plan.vp, plan.micro_batches);
    let mut ranks: Vec<Rank> = base
        .iter()
        .map(|base| Rank { base, pending: VecDeque::new(), live: 0, free_at: 0.0, done: Vec::new() })
        .collect();
    loop {
        // The earliest next action over all ranks, so that what an action waits for is known when it is chosen.
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

fn input_only(op: &Op) -> Op {
    match op.kind {
        Kind::Backward => Op { kind: Kind::BackwardInput, ..*op },
        _ => *op,
    }
}

impl Rank<'_> {
    /// What this rank does next and when, or `None` while it depends on something that nobody has started.
    fn next(&self, rank: usize, most: usize, costs: &Costs, after: &After) -> Option<(f64, Op)> {
        let weight = self.pending.front().map(|op| (self.free_at, *op));
        let Some(&op) = self.base.first() else { return weight };
        if op.kind == Kind::Forward && self.live >= most && weight.is_some() {
            return weight;
        }
        match after.ready(rank, op) {
            Some(at) if weight.is_none() || at < self.free_at + costs.weight => {
                Some((at.max(self.free_at), op))
            }
            _ => weight,
        }
    }

    fn act(&mut self, op: Op, end: f64) {
        self.free_at = end;
        self.done.push(op);
        match op.kind {
            Kind::WeightGrad => {
                self.pending.pop_front();
                self.live -= 1;
                return;
            }
            Kind::Forward => self.live += 1,
            Kind::Backward | Kind::BackwardInput => {
                self.pending.push_back(Op { kind: Kind::WeightGrad, ..op });
            }
        }
        self.base = &self.base[1..];
    }
}
