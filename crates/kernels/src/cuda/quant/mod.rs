//! FP8 and FP4 on CUDA: quantization by our own kernels, GEMMs by cuBLASLt.

pub(super) mod amax;
pub(super) mod emulate;
mod fp8_gemm;
pub(super) mod generic;
pub(super) mod microscale;
mod microscaled_gemm;
#[cfg(test)]
mod microscaled_tests;
pub(super) mod quantize;
pub(super) mod stack;
#[cfg(test)]
mod tests;

use super::CudaKernels;
use crate::{DelayedUpdate, EmulatedFormat, Fp8Tensor, QuantKernels, Quantize, QuantizeStack};
use ferrotron_tensor::{Result, Stream, Tensor};
pub(super) use generic::Fp8Matrix;

/// Kernel instance for f32, bf16 or f16: `input!(OP, dtype, "quant/amax", "amax")`.
macro_rules! input {
    ($op:expr, $dtype:expr, $source:literal, $name:literal) => {
        match $dtype {
            ferrotron_tensor::DType::F16 => Ok($crate::cuda::Kernel::new($source, concat!($name, "_f16"))),
            other => $crate::cuda::typed!($op, other, $source, $name),
        }
    };
}
use input;

impl QuantKernels for CudaKernels {
    fn amax(&self, s: &Stream, x: &Tensor, amax: &Tensor) -> Result<()> {
        self.launch_amax(s, x, amax)
    }

    fn quantize(&self, s: &Stream, q: &Quantize) -> Result<()> {
        self.launch_quantize(s, q)
    }

    fn dequantize(&self, s: &Stream, q: &Fp8Tensor, out: &Tensor) -> Result<()> {
        self.launch_dequantize(s, q, out)
    }

    fn fp8_transpose(&self, s: &Stream, q: &Fp8Tensor, out: &Fp8Tensor) -> Result<()> {
        self.launch_transpose(s, q, out)
    }

    fn delayed_update(&self, s: &Stream, d: &DelayedUpdate) -> Result<()> {
        self.launch_delayed_update(s, d)
    }

    fn emulate(&self, s: &Stream, how: EmulatedFormat, x: &Tensor, out: &Tensor) -> Result<()> {
        self.launch_emulate(s, how, x, out)
    }

    fn amax_stack(&self, s: &Stream, x: &Tensor, amax: &Tensor) -> Result<()> {
        self.launch_amax_stack(s, x, amax)
    }

    fn quantize_stack(&self, s: &Stream, q: &QuantizeStack) -> Result<()> {
        self.launch_quantize_stack(s, q, false)
    }

    fn amax_quantize_stack(&self, s: &Stream, q: &QuantizeStack) -> Result<()> {
        self.launch_amax_quantize_stack(s, q)
    }

    fn transpose_stack(&self, s: &Stream, count: usize, rows: &Fp8Tensor, cols: &Fp8Tensor) -> Result<()> {
        self.launch_transpose_stack(s, count, rows, cols)
    }
}
