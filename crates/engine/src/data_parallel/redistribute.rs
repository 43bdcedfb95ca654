//! A bucket in memory, and its redistribution between placements.

use super::{Bucket, BucketPlan, Placement, ShardingStrategy};
use crate::{GroupRank, Rank};
use ferrotron_comm::{Communicator, ReduceOp, SplitSizes};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, shape_error};
use std::ops::Range;
use std::sync::Arc;

/// A rank's memory of a bucket under a placement. Clones share memory.
#[derive(Clone)]
pub struct FlatBuffer {
    plan: Arc<BucketPlan>,
    bucket: usize,
    /// For groups that hold the same shards: the shard that is distributed over them, instead of the whole bucket.
    shard: Option<GroupRank>,
    placement: Placement,
    memory: Tensor,
}

/// This rank in a group.
pub fn group_rank(group: &Communicator) -> GroupRank {
    GroupRank { rank: group.rank(), size: group.size() }
}

impl FlatBuffer {
    /// Uninitialised memory for rank `place`.
    pub fn empty(
        plan: &Arc<BucketPlan>,
        bucket: usize,
        placement: Placement,
        place: GroupRank,
        (dtype, category): (DType, Category),
        s: &Stream,
    ) -> Result<FlatBuffer> {
        let placement = plan.buckets()[bucket].placed(placement);
        let len = plan.buckets()[bucket].held(placement, place).len();
        let memory = Tensor::empty(s, &[len], dtype, category)?;
        Ok(FlatBuffer { plan: plan.clone(), bucket, shard: None, placement, memory })
    }

    /// A bucket over given memory: the whole bucket under a full-size placement, else this rank's shard.
    pub fn of(plan: &Arc<BucketPlan>, bucket: usize, placement: Placement, memory: &Tensor) -> FlatBuffer {
        let placement = plan.buckets()[bucket].placed(placement);
        FlatBuffer { plan: plan.clone(), bucket, shard: None, placement, memory: memory.clone() }
    }

    /// A shard of a bucket, that of rank `shard` of a group, over the groups that hold the same shards: all of it under a
    /// full-size placement, else this group's piece.
    pub fn of_shard(
        plan: &Arc<BucketPlan>,
        bucket: usize,
        shard: GroupRank,
        placement: Placement,
        memory: &Tensor,
    ) -> FlatBuffer {
        FlatBuffer { shard: Some(shard), ..FlatBuffer::of(plan, bucket, placement, memory) }
    }

    /// The local memory, flat.
    pub fn memory(&self) -> &Tensor {
        &self.memory
    }

    /// The placement.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// The same memory under another placement: all of it, or rank `place`'s shard of a full-size buffer.
    pub fn view_as(&self, placement: Placement, place: GroupRank) -> Result<FlatBuffer> {
        let placement = self.layout().placed(placement);
        let memory = match (self.placement.is_full_size(), placement.is_full_size()) {
            (true, false) => part(&self.memory, &self.held(placement, place))?,
            _ if self.placement.is_full_size() == placement.is_full_size() => self.memory.clone(),
            _ => {
                return shape_error(
                    "placement",
                    "a shard cannot be viewed as the full bucket; redistribute it",
                );
            }
        };
        Ok(FlatBuffer { placement, memory, ..self.clone() })
    }

    fn layout(&self) -> &Bucket {
        &self.plan.buckets()[self.bucket]
    }

    /// Elements on rank `place` under a placement, of what is distributed.
    fn held(&self, placement: Placement, place: GroupRank) -> Range<usize> {
        let Some(shard) = self.shard else { return self.layout().held(placement, place) };
        let all = self.layout().held(Placement::Flat, shard);
        if placement.is_full_size() {
            return 0..all.len();
        }
        let rank = shard.rank * place.size + place.rank;
        let piece = self.layout().held(placement, GroupRank { rank, size: shard.size * place.size });
        piece.start - all.start..piece.end - all.start
    }

    /// Shard lengths of all ranks.
    fn counts(&self, placement: Placement, size: usize) -> Vec<usize> {
        (0..size).map(|rank| self.held(placement, GroupRank { rank, size }).len()).collect()
    }

    /// Redistributes the bucket into the placement and memory of `to`. Collective over `group`. `to` may be memory of
    /// its own or, where it is the same shard, this buffer's. Sums are in rank order where the group's are; alignment
    /// gaps are moved along.
    ///
    /// Flat → Replicate is an all-gather, Partial → Flat a reduce-scatter, Partial → Replicate an all-reduce, and
    /// Replicate → Flat a copy of this rank's shard.
    pub fn redistribute(
        &self,
        rank: &Rank,
        group: &Communicator,
        to: &FlatBuffer,
        s: &Stream,
        label: &'static str,
    ) -> Result<()> {
        use Placement::{Flat, Partial, Replicate, TensorAtomic};
        let me = group_rank(group);
        let (from, out) = (&self.memory, &to.memory);
        for (buffer, placement) in [(from, self.placement), (out, to.placement)] {
            let (len, all) = (self.held(placement, me).len(), self.held(Replicate, me).len());
            if buffer.numel() != len || (placement == Flat && !all.is_multiple_of(me.size)) {
                let what = format!("{buffer:?} is not the {placement:?} shard of {me:?}, {len} elements");
                return shape_error(label, what);
            }
        }
        match (self.placement, to.placement) {
            (Replicate, Replicate) | (Partial, Partial) | (Flat, Flat) | (TensorAtomic, TensorAtomic) => {
                copy(s, from, out)
            }
            (Flat, Replicate) => Ok(group.all_gather(s, from, out, label)?),
            (TensorAtomic, Replicate) => {
                Ok(group.all_gather_v(s, from, out, &self.counts(TensorAtomic, me.size), label)?)
            }
            (Partial, Flat) => Ok(group.reduce_scatter(s, from, out, ReduceOp::Sum, label)?),
            (Partial, Replicate) => {
                copy(s, from, out)?;
                Ok(group.all_reduce(s, out, ReduceOp::Sum, label)?)
            }
            (Partial, TensorAtomic) => self.reduce_to_owners(rank, group, out, s, label),
            (Replicate, Flat | TensorAtomic) => copy(s, &part(from, &self.held(to.placement, me))?, out),
            (Replicate, Partial) => {
                // A sum whose only nonzero term is rank 0's.
                if me.rank == 0 { copy(s, from, out) } else { s.zero(out) }
            }
            (Flat | TensorAtomic, Partial) => {
                let mine = self.held(self.placement, me);
                copy(s, from, &part(out, &mine)?)?;
                s.zero(&part(out, &(0..mine.start))?)?;
                s.zero(&part(out, &(mine.end..out.numel()))?)
            }
            (Flat, TensorAtomic) | (TensorAtomic, Flat) => {
                let parts = |p, rank| self.held(p, GroupRank { rank, size: me.size });
                let common =
                    |a: Range<usize>, b: Range<usize>| a.end.min(b.end).saturating_sub(a.start.max(b.start));
                let counts = |mine, theirs| -> Vec<usize> {
                    (0..me.size).map(|r| common(parts(mine, me.rank), parts(theirs, r))).collect()
                };
                let (sent, received) =
                    (counts(self.placement, to.placement), counts(to.placement, self.placement));
                let splits = SplitSizes { sent: &sent, received: &received };
                Ok(group.all_to_all_v(s, from, out, splits, label)?)
            }
        }
    }

    /// Reduce-scatter with uneven shards: every rank sends each owner its part, owners sum in rank order.
    fn reduce_to_owners(
        &self,
        rank: &Rank,
        group: &Communicator,
        out: &Tensor,
        s: &Stream,
        label: &'static str,
    ) -> Result<()> {
        let (n, mine, dtype) = (group.size(), out.numel(), out.dtype());
        let sent = self.counts(Placement::TensorAtomic, n);
        let all = Tensor::empty(s, &[n * mine], dtype, Category::Communication)?;
        let splits = SplitSizes { sent: &sent, received: &vec![mine; n] };
        group.all_to_all_v(s, &self.memory, &all, splits, label)?;
        if mine == 0 {
            return Ok(());
        }
        // 16-bit types are summed in f32 and rounded once.
        let narrow = dtype != DType::F32;
        let total = if narrow {
            Tensor::empty(s, &[mine], DType::F32, Category::Communication)?
        } else {
            out.clone()
        };
        let wide = Tensor::empty(s, &[if narrow { mine } else { 0 }], DType::F32, Category::Communication)?;
        for r in 0..n {
            let theirs = all.narrow(0, r * mine, mine)?;
            match r {
                0 => rank.kernels.copy(s, &theirs, &total)?,
                _ if narrow => {
                    rank.kernels.copy(s, &theirs, &wide)?;
                    rank.kernels.add_assign(s, &total, &wide)?;
                }
                _ => rank.kernels.add_assign(s, &total, &theirs)?,
            }
        }
        if narrow { rank.kernels.copy(s, &total, out) } else { Ok(()) }
    }
}

/// The whole bucket `bucket` from this rank's shard of it under the optimizer's placement. Collective.
pub fn gather_from_optimizer(
    rank: &Rank,
    (plan, bucket): (&Arc<BucketPlan>, usize),
    scheme: &ShardingStrategy,
    mine: &Tensor,
    label: &'static str,
) -> Result<Tensor> {
    let (experts, s) = (plan.buckets()[bucket].experts, &rank.compute);
    if scheme.optimizer.is_full_size() {
        return Ok(mine.clone());
    }
    let (group, outer) = (rank.dp_group(experts), rank.shard_replica_group(experts));
    let inner = group_rank(group);
    let empty = |len: usize| Tensor::empty(s, &[len], mine.dtype(), Category::Workspace);
    let mut shard = mine.clone();
    if !scheme.outer_optimizer.is_full_size() {
        let all = empty(plan.buckets()[bucket].held(scheme.optimizer, inner).len())?;
        let to = FlatBuffer::of_shard(plan, bucket, inner, Placement::Replicate, &all);
        let own = FlatBuffer::of_shard(plan, bucket, inner, scheme.outer_optimizer, mine);
        own.redistribute(rank, outer, &to, s, label)?;
        shard = all;
    }
    let all = empty(plan.buckets()[bucket].len)?;
    let to = FlatBuffer::of(plan, bucket, Placement::Replicate, &all);
    FlatBuffer::of(plan, bucket, scheme.optimizer, &shard).redistribute(rank, group, &to, s, label)?;
    Ok(all)
}

fn part(t: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    t.narrow(0, range.start, range.len())
}

/// Copies, unless both are the same memory.
fn copy(s: &Stream, from: &Tensor, to: &Tensor) -> Result<()> {
    if from.numel() == 0 || from.same_memory(to) { Ok(()) } else { s.copy(from, to) }
}
