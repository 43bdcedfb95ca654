//! The kernels: one small trait per family, implemented once per device. Outputs are arguments, so kernels can
//! write into gradient buckets, caches and slots; allocation is the caller's.

mod activation;
mod attention;
mod attention_merge;
mod attention_plan;
mod checks;
pub mod cpu;
mod cross_entropy;
pub mod cuda;
mod elementwise;
mod embedding;
mod fp8_grouped_gemm;
mod fused;
mod gemm;
pub mod grad_scaler;
mod grouped_bias;
mod grouped_gemm;
mod mla;
mod moe;
pub mod moments;
mod norm;
mod normal;
mod optimizer;
mod permutation;
pub mod philox;
pub mod quant;
mod quantize_stack;
mod rope;
pub mod rope_tables;
mod router;
mod weighted_activation;
mod with_amax;

pub use activation::{Act, ActivationKernels};
pub use attention::{
    AttentionBackward, AttentionForward, AttentionKernels, AttentionParams, MaskAlign, Sequences,
};
pub use attention_merge::AttentionMergeKernels;
pub use cross_entropy::{CrossEntropy, CrossEntropyKernels, IGNORE, LabelSmoothing, VocabParallelLogits};
pub use elementwise::{ElementwiseKernels, NormalFill, RngKey};
pub use embedding::EmbeddingKernels;
pub use fp8_grouped_gemm::{Fp8GroupedGemm, Fp8GroupedWgrad};
pub use fused::{FusedKernels, LinearAct, LinearActBackward, LinearWgrad};
pub use gemm::{Gemm, GemmKernels, GemmSizes};
pub use grouped_bias::{GroupedBias, GroupedBiasKernels};
pub use grouped_gemm::{GroupedGemm, GroupedGemmKernels, GroupedWgrad, Segments};
pub use mla::MlaKernels;
pub use moe::MoeKernels;
pub use norm::{Norm, NormBackward, NormForward, NormKernels};
pub use optimizer::{
    Adam, Fp8DataOut, Fp8WeightOut, Moment, MomentOrder, OptimizerKernels, ParamUpdate, Sgd, counter,
    scalars, scaler,
};
pub use permutation::{PermutationKernels, RowMap};
pub use quant::microscaling::{BlockAxis, EmulatedFormat};
pub use quant::stats::QuantStats;
pub use quant::{
    ALIGN, BLOCK, DelayedScaling, Fp8Gemm, Fp8Tensor, QuantKernels, Quantize, ScaleSource, ScalingMode,
};
pub use quantize_stack::{QuantizeStack, QuantizeStackKernels};
pub use rope::{Rope, RopeKernels, RopeStyle};
pub use router::{
    AuxLoss, ExpertChoice, GroupLimit, MAX_EXPERTS, MAX_TOPK, RouterKernels, RouterParams, ScoreFunction,
    capacity,
};
pub use weighted_activation::WeightedActivationKernels;
pub use with_amax::WithAmaxKernels;

/// Every kernel a device has.
pub trait Kernels:
    GemmKernels
    + GroupedGemmKernels
    + NormKernels
    + ActivationKernels
    + RopeKernels
    + AttentionKernels
    + AttentionMergeKernels
    + MlaKernels
    + MoeKernels
    + EmbeddingKernels
    + CrossEntropyKernels
    + OptimizerKernels
    + ElementwiseKernels
    + FusedKernels
    + QuantKernels
    + WithAmaxKernels
    + RouterKernels
    + PermutationKernels
    + WeightedActivationKernels
    + GroupedBiasKernels
    + QuantizeStackKernels
    + Send
    + Sync
{
}
