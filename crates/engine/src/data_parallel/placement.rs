//! Placements of buckets over the data-parallel ranks, and the ZeRO stages as choices of placements.

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
}

/// ZeRO stages 0 to 3, by `parallel.zero`.
const SCHEMES: [ShardingStrategy; 4] = {
    use Placement::{Flat, Partial, Replicate};
    [
        ShardingStrategy { param: Replicate, grad: Partial, optimizer: Replicate },
        ShardingStrategy { param: Replicate, grad: Partial, optimizer: Flat },
        ShardingStrategy { param: Replicate, grad: Flat, optimizer: Flat },
        ShardingStrategy { param: Flat, grad: Flat, optimizer: Flat },
    ]
};

impl ShardingStrategy {
    /// Plain data parallelism: nothing is sharded.
    pub const REPLICATED: ShardingStrategy = SCHEMES[0];

    /// ZeRO stage over `replicas` data-parallel ranks: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 weights too.
    pub fn zero(stage: usize, replicas: usize) -> ShardingStrategy {
        let stage = if replicas > 1 { stage.min(SCHEMES.len() - 1) } else { 0 };
        SCHEMES[stage]
    }
}
