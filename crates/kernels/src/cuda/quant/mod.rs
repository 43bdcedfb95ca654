//! Eight-bit matrices: quantised by our own kernels, multiplied by cuBLASLt.

mod emulate;
mod gemm8;
mod measure;
mod plain;
mod quantise;
mod stack;
#[cfg(test)]
mod tests;

use super::CudaKernels;
use crate::{Bytes, Delayed, Emulated, Gemm8, QuantKernels, Quantise};
use ferrotron_tensor::{Result, Stream, Tensor};
pub(super) use plain::Matrix;

/// The instance of a kernel for f32, bf16 or f16: `input!(OP, dtype, "quant_measure", "amax")`.
macro_rules! input {
    ($op:expr, $dtype:expr, $source:literal, $name:literal) => {
        match $dtype {
            ferrotron_tensor::DType::F16 => {
                Ok($crate::cuda::Kernel { source: $source, name: concat!($name, "_f16") })
            }
            other => $crate::cuda::typed!($op, other, $source, $name),
        }
    };
}
use input;

impl QuantKernels for CudaKernels {
    fn amax(&self, s: &Stream, x: &Tensor, amax: &Tensor) -> Result<()> {
        self.queue_amax(s, x, amax)
    }

    fn quantise(&self, s: &Stream, q: &Quantise) -> Result<()> {
        self.queue_quantise(s, q)
    }

    fn dequantise(&self, s: &Stream, q: &Bytes, out: &Tensor) -> Result<()> {
        self.queue_dequantise(s, q, out)
    }

    fn turn(&self, s: &Stream, q: &Bytes, out: &Bytes) -> Result<()> {
        self.queue_turn(s, q, out)
    }

    fn gemm8(&self, s: &Stream, g: &Gemm8) -> Result<()> {
        self.queue_gemm8(s, g)
    }

    fn delayed_update(
        &self,
        s: &Stream,
        how: Delayed,
        history: &Tensor,
        reduced: &Tensor,
        largest: &Tensor,
        scale: &Tensor,
    ) -> Result<()> {
        self.queue_delayed_update(s, how, history, reduced, largest, scale)
    }

    fn emulate(&self, s: &Stream, how: Emulated, x: &Tensor, out: &Tensor) -> Result<()> {
        self.queue_emulate(s, how, x, out)
    }
}
