//! The kernels: one small trait per family, implemented once per device. Outputs are arguments, so kernels can
//! write into gradient buckets, caches and slots; allocation is the caller's.

mod activation;
mod attention;
mod attention_plan;
mod checks;
pub mod cpu;
pub mod cuda;
mod elementwise;
mod embedding;
mod fused;
mod gemm;
pub mod grad_scaler;
mod grouped;
mod grouped8;
mod latent;
mod loss;
mod measured;
mod merge;
mod mix;
pub mod moments;
mod norm;
mod normal;
mod optim;
mod permute;
pub mod philox;
pub mod quant;
mod rope;
pub mod rope_tables;
mod router;
mod row_bias;
mod stack;
mod weighted;

pub use activation::{Act, ActivationKernels};
pub use attention::{Align, AttentionBackward, AttentionForward, AttentionKernels, Scores, Sequences};
pub use elementwise::{DropoutKey, ElementwiseKernels, NormalRuns};
pub use embedding::EmbeddingKernels;
pub use fused::{FusedKernels, LinearAct, LinearActBackward, LinearGrad};
pub use gemm::{Gemm, GemmKernels, GemmSizes};
pub use grouped::{Grouped, GroupedGrad, GroupedKernels, Segments};
pub use grouped8::{Grouped8, GroupedGrad8};
pub use latent::LatentKernels;
pub use loss::{CrossEntropy, IGNORE, LossKernels, ShardLogits, Smoothing};
pub use measured::MeasuredKernels;
pub use merge::MergeKernels;
pub use mix::MixKernels;
pub use norm::{Norm, NormBackward, NormForward, NormKernels};
pub use optim::{
    Adam, Moment, NewBytes, NewWeight, OptimKernels, Order, Sgd, Update, counter, scalars, scaler,
};
pub use permute::{PermuteKernels, RowMap};
pub use quant::micro::{Along, Emulated};
pub use quant::stats::QuantStats;
pub use quant::{ALIGN, BLOCK, Bytes, Delayed, Gemm8, QuantKernels, Quantise, Range, Scaling};
pub use rope::{Rope, RopeKernels, RopeStyle};
pub use router::{
    Balance, Choice, Groups, MAX_CHOICES, MAX_EXPERTS, RouterKernels, Routing, Score, capacity,
};
pub use row_bias::{RowBias, RowBiasKernels};
pub use stack::{QuantiseStack, StackKernels};
pub use weighted::WeightedKernels;

/// Every kernel a device has.
pub trait Kernels:
    GemmKernels
    + GroupedKernels
    + NormKernels
    + ActivationKernels
    + RopeKernels
    + AttentionKernels
    + MergeKernels
    + LatentKernels
    + MixKernels
    + EmbeddingKernels
    + LossKernels
    + OptimKernels
    + ElementwiseKernels
    + FusedKernels
    + QuantKernels
    + MeasuredKernels
    + RouterKernels
    + PermuteKernels
    + WeightedKernels
    + RowBiasKernels
    + StackKernels
    + Send
    + Sync
{
}
