//! Placements of buckets over the data-parallel ranks, and the ZeRO stages as choices of placements.

use super::HostShards;
use crate::data_parallel::group_rank;
use crate::{GroupRank, Rank};

/// How a bucket is distributed over the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Every rank has the whole bucket.
    Replicate,
    /// Every rank has a partial sum of the whole bucket; the value is the sum over ranks.
    Partial,
    /// Every rank has one of equal contiguous shards, regardless of parameter boundaries.
    Flat,
    /// Every rank has whole parameters, those of a contiguous shard that splits none (for layer-wise optimizers).
    TensorAtomic,
}

impl Placement {
    /// Whether the local memory is as large as the bucket.
    pub fn is_full_size(self) -> bool {
        matches!(self, Placement::Replicate | Placement::Partial)
    }
}

/// Data-parallel sharding: placements of weights, gradients (while micro-batches accumulate) and optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardingStrategy {
    /// Of the model's weights.
    pub param: Placement,
    /// Of gradients between micro-batches. After the last one they are placed like the optimizer state.
    pub grad: Placement,
    /// Of master weights and moments.
    pub optimizer: Placement,
    /// Of a shard's master weights and moments over the groups that hold the same shards of weights (HSDP). Over them weights
    /// are replicated, and gradients are partial until the last micro-batch.
    pub outer_optimizer: Placement,
    /// Which shards are in host memory.
    pub host: HostShards,
}

/// ZeRO stages 0 to 3, by `parallel.zero`, and HFSDP.
const SCHEMES: [ShardingStrategy; 5] = {
    use Placement::{Flat, Partial, Replicate};
    const fn scheme(
        param: Placement,
        grad: Placement,
        optimizer: Placement,
        outer_optimizer: Placement,
    ) -> ShardingStrategy {
        let host = HostShards { weights: false, gradients: false };
        ShardingStrategy { param, grad, optimizer, outer_optimizer, host }
    }
    [
        scheme(Replicate, Partial, Replicate, Replicate),
        scheme(Replicate, Partial, Flat, Replicate),
        scheme(Replicate, Flat, Flat, Replicate),
        scheme(Flat, Flat, Flat, Replicate),
        scheme(Flat, Flat, Flat, Flat),
    ]
};

/// Index of HFSDP.
const HFSDP: usize = 4;

impl ShardingStrategy {
    /// Plain data parallelism: nothing is sharded.
    pub const REPLICATED: ShardingStrategy = SCHEMES[0];

    /// ZeRO stage over `replicas` data-parallel ranks: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 weights too.
    pub fn zero(stage: usize, replicas: usize) -> ShardingStrategy {
        let stage = if replicas > 1 { stage.min(HFSDP - 1) } else { 0 };
        SCHEMES[stage]
    }

    /// HFSDP: weights and gradients are sharded inside groups, optimizer state over all data-parallel ranks.
    pub const fn hybrid() -> ShardingStrategy {
        SCHEMES[HFSDP]
    }

    /// The same with shards in host memory. Weights there are a shard even where one rank holds all of it: units of them are
    /// copied to the device for use.
    pub fn with_host(self, host: HostShards) -> ShardingStrategy {
        let param = if host.weights { Placement::Flat } else { self.param };
        ShardingStrategy { param, host, ..self }
    }

    /// Pieces that a shard of the optimizer state is cut into, with `groups` that hold the same shards.
    pub fn outer_pieces(&self, groups: usize) -> usize {
        if self.outer_optimizer.is_full_size() { 1 } else { groups }
    }

    /// A rank among those that shard optimizer state, given its places inside its group and among the groups. Pieces of a
    /// shard are adjacent.
    pub fn optimizer_place(&self, inner: GroupRank, outer: GroupRank) -> GroupRank {
        let pieces = self.outer_pieces(outer.size);
        GroupRank { rank: inner.rank * pieces + outer.rank % pieces, size: inner.size * pieces }
    }

    /// [`ShardingStrategy::optimizer_place`] of a running rank, for expert or all other parameters.
    pub fn optimizer_place_of(&self, rank: &Rank, experts: bool) -> GroupRank {
        let outer = group_rank(rank.shard_replica_group(experts));
        self.optimizer_place(group_rank(rank.dp_group(experts)), outer)
    }
}
