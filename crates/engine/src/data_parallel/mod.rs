//! Data parallelism: parameters, gradients and optimizer state in flat buckets, and how they are sharded over the
//! data-parallel ranks (ZeRO).
//!
//! | file | what |
//! |---|---|
//! | `buckets.rs`, `bucket_split.rs` | which parameters share a bucket; buckets of which some parameters are FP8-resident |
//! | `placement.rs`, `redistribute.rs` | how a bucket is distributed over ranks, and the collective between two placements |
//! | `grad_buffer.rs`, `grad_reduce.rs` | f32 gradient accumulation, and its reduction overlapped with backward |
//! | `param_gather.rs` | all-gather of updated weights, overlapped with the next forward |
//! | `host_shards.rs`, `grad_host.rs` | shards of weights and gradients in host memory |
//! | `units.rs`, `unit_slots.rs` | sharded weights (ZeRO-3): units of them, gathered while passes use them |

mod bucket_split;
mod buckets;
mod grad_buffer;
mod grad_host;
mod grad_reduce;
mod host_shards;
mod param_gather;
mod placement;
mod redistribute;
#[cfg(test)]
mod tests;
mod unit_slots;
mod units;

pub use bucket_split::BucketSplit;
pub use buckets::{Bucket, BucketLimit, BucketPlan, ParamShard, Span, bucket_elements};
pub use grad_buffer::GradBuffer;
pub use host_shards::HostShards;
pub(crate) use host_shards::{HostLink, zeroed_shard};
pub use param_gather::MasterShards;
pub(crate) use param_gather::PendingGathers;
pub use placement::{Placement, ShardingStrategy};
pub use redistribute::{FlatBuffer, gather_from_optimizer, group_rank};
pub use unit_slots::{EnteredUnit, UnitSlots};
pub use units::UnitGuard;
pub(crate) use units::{ShardedUnits, UnitLayout};
