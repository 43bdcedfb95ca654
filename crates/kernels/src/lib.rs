//! Kernels: one trait per concept, implemented by [`cpu::CpuKernels`] and [`cuda::CudaKernels`], and combined in [`Kernels`].
//!
//! Outputs are arguments, so that kernels can write into gradient buckets, caches and slots; the caller allocates.
//! Operations with more than a few arguments take a parameter struct, whose documentation states the maths and the shapes.

mod activation;
mod attention;
mod checks;
pub mod cpu;
mod cross_entropy;
pub mod cuda;
mod digest;
mod dora;
mod elementwise;
mod embedding;
mod gemm;
pub mod grad_scaler;
mod grouped_gemm;
mod load_balancing;
pub mod moments;
mod muon;
mod newton_schulz;
mod norm;
mod normal;
mod optimizer;
mod permutation;
pub mod philox;
pub mod quant;
mod rope;
pub mod rope_tables;
mod router;
mod split_slots;

pub use activation::{Act, ActBackward, ActForward, ActivationKernels, WeightedAct, WeightedActBackward};
pub use attention::{
    AttentionBackward, AttentionForward, AttentionKernels, AttentionParams, MaskAlign, Sequences,
};
pub use cross_entropy::{
    CrossEntropy, CrossEntropyKernels, IGNORE, LabelSmoothing, VocabParallelCrossEntropy, VocabParallelLogits,
};
pub use cuda::CapturedSequences;
pub use digest::{DigestKernels, digest_of_bytes};
pub use dora::{DoraFactor, DoraKernels, DoraUpdate, ScaleColumns, ScaleColumnsBackward};
pub use elementwise::{Dropout, ElementwiseKernels, NormalFill, RngKey, StepKey};
pub use embedding::{EmbeddingBackward, EmbeddingForward, EmbeddingKernels};
pub use gemm::batched::BatchedGemm;
pub use gemm::choices::{GemmChoice, GemmLibrary, NewChoices};
pub use gemm::linear::{LinearAct, LinearActBackward, LinearWgrad};
pub use gemm::{Gemm, GemmKernels, GemmSizes};
pub use grouped_gemm::bias::GroupedBias;
pub use grouped_gemm::fp8::{Fp8GroupedGemm, Fp8GroupedWgrad};
pub use grouped_gemm::{GroupedGemm, GroupedGemmKernels, GroupedWgrad, Segments};
pub use load_balancing::{AuxLoss, AuxLossWeights, LoadBalancingKernels, ZLossBackward};
pub use muon::{
    AdaptiveScale, ApplyUpdate, MomentumUpdate, MuonKernels, MuonMomentum, WeightDecay, normuon_lines,
};
pub use newton_schulz::{
    CoefficientSet, Coefficients, GramSide, NewtonSchulz, ScaleMode, SumOverRanks, newton_schulz,
    newton_schulz_batched, newton_schulz_bytes, newton_schulz_cost, newton_schulz_flops,
};
pub use norm::{Norm, NormBackward, NormForward, NormKernels, ResidualAdd};
pub use optimizer::{
    Adam, Fp8DataOut, Fp8WeightOut, Lion, Moment, MomentOrder, OptimizerKernels, ParamUpdate, Sgd, counter,
    scalars, scaler,
};
pub use permutation::{PermutationKernels, RowMap};
pub use quant::microscaling::{
    BlockAxis, EmulatedFormat, MicroscaledGemm, MicroscaledTensor, MicroscalingKernels,
};
pub use quant::stack::QuantizeStack;
pub use quant::stats::QuantStats;
pub use quant::{
    ALIGN, BLOCK, DelayedScaling, DelayedUpdate, Fp8Gemm, Fp8Tensor, QuantKernels, Quantize, ScaleSource,
    ScalingMode,
};
pub use rope::{Rope, RopeKernels, RopeStyle};
pub use router::{
    CapacityDrop, ExpertSelection, GateBackward, GroupLimit, Jitter, MAX_EXPERTS, MAX_TOPK, Route,
    RouteBackward, RouterKernels, RouterParams, ScoreFunction, capacity,
};
pub use split_slots::{PackSlots, SlotUse, SplitSlotKernels, UnpackSlots};

/// All kernels of a device.
pub trait Kernels:
    GemmKernels
    + GroupedGemmKernels
    + NormKernels
    + ActivationKernels
    + RopeKernels
    + AttentionKernels
    + EmbeddingKernels
    + CrossEntropyKernels
    + OptimizerKernels
    + MuonKernels
    + ElementwiseKernels
    + QuantKernels
    + MicroscalingKernels
    + RouterKernels
    + LoadBalancingKernels
    + PermutationKernels
    + SplitSlotKernels
    + DoraKernels
    + DigestKernels
    + Send
    + Sync
{
}
