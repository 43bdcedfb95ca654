//! CPU kernels: arithmetic on slices, and `launch`, which implements the kernel traits on tensors.

pub mod activation;
mod amx;
pub mod attention;
pub mod attention_merge;
mod context;
pub mod cross_entropy;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod grad_norm;
pub mod grouped_bias;
mod isa;
mod launch;
pub mod lion;
pub mod loss_reduction;
pub mod math;
pub mod mla;
pub mod muon;
pub mod norm;
pub mod norm_backward;
pub mod optimizer;
pub mod optimizer_chunks;
pub mod optimizer_packed;
pub mod permutation;
pub mod quant;
pub mod random;
pub mod reduce;
pub mod rope;
pub mod router;
pub mod rows;
pub mod vocab;
pub mod weighted_activation;

pub use context::CpuContext;
pub use isa::Isa;
pub(crate) use isa::multiversion;
pub use launch::CpuKernels;
