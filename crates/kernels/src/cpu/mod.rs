//! The CPU home of every kernel.

pub mod activation;
mod amx;
pub mod attention;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod grad_norm;
mod isa;
pub mod latent;
mod launch;
pub mod loss;
pub mod loss_reduction;
pub mod math;
pub mod merge;
pub mod norm;
pub mod norm_backward;
pub mod optim;
pub mod optim_list;
pub mod optim_packed;
pub mod permute;
pub mod quant;
pub mod random;
pub mod reduce;
pub mod rope;
pub mod router;
pub mod row_bias;
pub mod rows;
pub mod vocab;
pub mod weighted;

pub use isa::Isa;
pub(crate) use isa::multiversion;
pub use launch::CpuKernels;
