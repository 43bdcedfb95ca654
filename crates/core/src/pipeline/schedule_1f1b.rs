//! In which order each rank computes: one forward, one backward, plain and interleaved.

use super::{
    op::{OpKind, PipelineOp},
    schedule::{PipelinePlan, ScheduleKind},
};
use crate::{Error, Result};

/// How a rank's forward passes fall into warm-up and steady state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Warmup {
    /// Forward passes in all: M·v.
    pub total: usize,
    /// Those before the first backward.
    pub warmup: usize,
    /// Those that alternate with a backward.
    pub remaining: usize,
    /// No steady state: every forward comes before the first backward.
    pub all_in_warmup: bool,
}

impl PipelinePlan {
    /// Consecutive micro-batches that a chunk takes before the next chunk's turn (N), checked: P ≤ N ≤ M, and a last,
    /// smaller group has at least P. If none was given, the smallest that is legal; with fewer micro-batches than
    /// ranks, where none is, all of them.
    pub fn group(&self) -> Result<usize> {
        let (p, m) = (self.pp, self.micro_batches);
        let legal = |n: usize| p <= n && n <= m && (m % n == 0 || m % n >= p);
        let smallest = || (p..=m).find(|n| legal(*n)).unwrap_or(m);
        match self.group_size {
            _ if self.vp == 1 => Ok(m),
            None => Ok(smallest()),
            Some(n) if legal(n) => Ok(n),
            Some(n) if m < p => Err(Error::Invalid(format!(
                "groups of {n} micro-batches do not fit {m} micro-batches on {p} pipeline ranks; \
                 take {p} or more micro-batches, or leave the group size out"
            ))),
            Some(n) => Err(Error::Invalid(format!(
                "groups of {n} micro-batches do not cut {m} micro-batches into groups of at least {p}, \
                 one per pipeline rank; take {}",
                smallest()
            ))),
        }
    }

    /// Warm-up of a rank. With `overlap` (a forward and a backward in turns, each beside the other's rows on their way to
    /// experts) one forward more comes first, so that the two are of different micro-batches; and as many as in an
    /// interleaved order where a rank has one chunk: neighbours then work on one pair each at the same time, where one
    /// would otherwise wait for what the other's pair makes.
    pub fn warmup(&self, rank: usize, overlap: bool) -> Result<Warmup> {
        let total = self.micro_batches * self.vp;
        let after = self.pp - 1 - rank.min(self.pp - 1);
        let warmup = match (self.vp, self.kind) {
            (1, ScheduleKind::Paired) => 2 * after + 1,
            (1, _) => after,
            (_, ScheduleKind::ForwardOnly) => total,
            (v, _) => 2 * after + (v - 1) * self.group()? + usize::from(overlap),
        };
        let warmup = warmup.min(total);
        Ok(Warmup { total, warmup, remaining: total - warmup, all_in_warmup: warmup == total })
    }

    /// Per rank its forwards and whole backwards.
    pub(super) fn orders(&self) -> Result<Vec<Vec<PipelineOp>>> {
        let table = interleaved_table(self.micro_batches, self.vp, self.group()?);
        (0..self.pp).map(|rank| self.order(rank, &table)).collect()
    }

    fn order(&self, rank: usize, table: &[(usize, usize)]) -> Result<Vec<PipelineOp>> {
        let forward = table.iter().map(|&(micro_batch, chunk)| PipelineOp {
            kind: OpKind::Forward,
            micro_batch,
            chunk,
        });
        if self.kind == ScheduleKind::ForwardOnly {
            return Ok(forward.collect());
        }
        let mut backward = self.backwards(table);
        let warmup = self.warmup(rank, self.kind == ScheduleKind::Paired)?.warmup;
        let mut ops = Vec::with_capacity(2 * table.len());
        for (k, op) in forward.enumerate() {
            ops.push(op);
            if k >= warmup {
                ops.extend(backward.next());
            }
        }
        ops.extend(backward);
        Ok(ops)
    }

    /// The k-th backward is of the k-th forward's micro-batch, chunks in reverse.
    pub(super) fn backwards(&self, table: &[(usize, usize)]) -> impl Iterator<Item = PipelineOp> {
        let last = self.vp - 1;
        table.iter().map(move |&(micro_batch, chunk)| PipelineOp {
            kind: OpKind::Backward,
            micro_batch,
            chunk: last - chunk,
        })
    }
}

/// (micro-batch, chunk) of each forward pass: groups of `group` micro-batches; in a group chunk after chunk; in a chunk
/// micro-batch after micro-batch.
pub fn interleaved_table(micro_batches: usize, chunks: usize, group: usize) -> Vec<(usize, usize)> {
    let mut table = Vec::new();
    for first in (0..micro_batches).step_by(group.max(1)) {
        for chunk in 0..chunks {
            table.extend((first..micro_batches.min(first + group)).map(|m| (m, chunk)));
        }
    }
    table
}
