//! Parameters, gradients and optimizer state of ranks with equal weights, as flat buckets. How a bucket lies over
//! those ranks is a placement; kinds of data parallelism are choices of placements, and one operation goes from any
//! placement to any other.

mod bucket_split;
mod buckets;
mod redistribute;
#[cfg(test)]
mod tests;

pub use bucket_split::BucketSplit;
pub use buckets::{Bucket, BucketPlan, ParamShard, Span, bucket_elements};
pub use redistribute::{FlatBuffer, group_rank};

/// How a bucket lies over the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Every rank has all of it.
    Replicate,
    /// Every rank has a contribution as large as the whole; the value is their sum.
    Partial,
    /// Every rank has one of equal contiguous parts, wherever parameters begin and end.
    Flat,
    /// Every rank has whole parameters: those of a contiguous part that cuts none.
    TensorAtomic,
}

impl Placement {
    /// Is the local memory as large as the bucket?
    pub fn is_full_size(self) -> bool {
        matches!(self, Placement::Replicate | Placement::Partial)
    }
}

/// A kind of data parallelism: where weights, gradients (while micro-batches add up) and optimizer state are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardingStrategy {
    /// Of the weights the model computes with.
    pub param: Placement,
    /// Of gradients between micro-batches. After the last, they are where the optimizer needs them.
    pub grad: Placement,
    /// Of master weights and moments.
    pub optimizer: Placement,
}

/// By `parallel.zero`.
const SCHEMES: [ShardingStrategy; 3] = {
    use Placement::{Flat, Partial, Replicate};
    [
        ShardingStrategy { param: Replicate, grad: Partial, optimizer: Replicate },
        ShardingStrategy { param: Replicate, grad: Partial, optimizer: Flat },
        ShardingStrategy { param: Replicate, grad: Flat, optimizer: Flat },
    ]
};

impl ShardingStrategy {
    /// Nothing is divided.
    pub const REPLICATED: ShardingStrategy = SCHEMES[0];

    /// What `copies` ranks with equal weights divide among them: 0 nothing, 1 optimizer state, 2 gradients too.
    pub fn zero(stage: usize, copies: usize) -> ShardingStrategy {
        let stage = if copies > 1 { stage.min(SCHEMES.len() - 1) } else { 0 };
        SCHEMES[stage]
    }
}
