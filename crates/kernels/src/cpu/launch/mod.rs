//! Kernel traits on the CPU: checks tensors, takes their slices, and calls the arithmetic in the sibling modules.

mod activation;
mod attention;
mod cross_entropy;
mod digest;
mod dora;
mod elementwise;
mod embedding;
mod gemm;
mod grouped_bias;
mod grouped_gemm;
mod load_balancing;
mod muon;
mod norm;
mod optimizer;
mod permutation;
mod quant;
mod quantize_stack;
mod rope;
mod router;
mod split_slots;

use super::{CpuContext, Isa};
use crate::checks::{rows_of, same_contiguous};
use ferrotron_tensor::Launch;

/// CPU kernels at one instruction-set level.
#[derive(Clone, Copy, Debug)]
pub struct CpuKernels {
    isa: Isa,
    takes_microscaled: bool,
}

impl CpuKernels {
    /// Kernels at the best level of this machine. Call before compute threads start.
    pub fn detect() -> CpuKernels {
        CpuKernels::with(Isa::detect())
    }

    /// Kernels at `isa`, or at the highest level of this machine if that is lower.
    pub fn with(isa: Isa) -> CpuKernels {
        CpuKernels { isa: isa.min(Isa::detect()), takes_microscaled: false }
    }

    /// The same kernels, which ask for MXFP8 and NVFP4 operands in quantized form and emulate their GEMMs afterwards: with it
    /// the path of GPUs that multiply these formats runs on the CPU, with the bits of the emulation.
    pub fn taking_microscaled(self) -> CpuKernels {
        CpuKernels { takes_microscaled: true, ..self }
    }

    /// The level in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Context of a launch.
    fn context<'a>(&self, l: &Launch<'a>) -> CpuContext<'a> {
        CpuContext { threads: l.threads(), isa: self.isa }
    }
}

impl crate::Kernels for CpuKernels {}

/// Dispatches a tensor's f32, bf16 or f16 element type to a Rust type.
macro_rules! floats {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ferrotron_tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            ferrotron_tensor::DType::BF16 => {
                type $T = ferrotron_tensor::bf16;
                $body
            }
            ferrotron_tensor::DType::F16 => {
                type $T = ferrotron_tensor::f16;
                $body
            }
            found => {
                Err(ferrotron_tensor::Error::DType { op: $op, found, wanted: ferrotron_tensor::DType::F32 })
            }
        }
    };
}
use floats;
