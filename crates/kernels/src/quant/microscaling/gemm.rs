//! GEMMs of microscaling formats.

use super::{BlockAxis, EmulatedFormat, MicroscaledTensor, over_host};
use crate::quant::QuantKernels;
use crate::quant::check::matrix;
use crate::{Gemm, GemmKernels};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, shape_error};

/// GEMM of MXFP8 or NVFP4 operands: `c = a·bᵀ (+ bias) (+ c)`; `c [m, n]` bf16 or f32, `bias [n]` bf16.
/// Both have one format, and at most one is E5M2.
#[derive(Clone, Copy, Debug)]
pub struct MicroscaledGemm<'a> {
    /// `[m, k]`
    pub a: &'a MicroscaledTensor,
    /// `[n, k]`
    pub b: &'a MicroscaledTensor,
    /// `[n]`
    pub bias: Option<&'a Tensor>,
    /// Accumulate into `c`, which must be f32.
    pub accumulate: bool,
    /// Profile label, such as `gemm (output, fp8)`.
    pub name: &'static str,
    /// `[m, n]`
    pub c: &'a Tensor,
}

impl MicroscaledGemm<'_> {
    /// Checks shapes, types and formats; returns m, n and k.
    pub(crate) fn check(&self, op: &'static str) -> Result<[usize; 3]> {
        let (a, b) = (self.a, self.b);
        a.check(op)?;
        b.check(op)?;
        let [m, n, k] = [a.rows(), b.rows(), a.cols];
        if a.is_fp4() != b.is_fp4() || a.hadamard != b.hadamard {
            return shape_error(op, "operands of different formats; quantize both to the same one");
        }
        if [a, b].iter().all(|x| x.data.dtype() == DType::E5M2) {
            return shape_error(op, "both operands are E5M2, which tensor cores do not multiply");
        }
        let c = matrix(op, self.c)?;
        if b.cols != k || [c.outer, c.width] != [m, n] {
            let what = format!("[{m}, {k}] · [{n}, {}]ᵀ -> {:?}: sizes must agree", b.cols, self.c.shape());
            return shape_error(op, what);
        }
        Ok([m, n, k])
    }
}

/// Microscaling formats as GEMM operands. Where [`MicroscalingKernels::takes_microscaled`] says no, operands are
/// [emulated](QuantKernels::emulate) instead; both ways round alike.
pub trait MicroscalingKernels: GemmKernels + QuantKernels {
    /// Whether GEMMs should be given quantized operands, because tensor cores multiply them.
    fn takes_microscaled(&self) -> bool {
        false
    }

    /// Quantizes `x [r, c]` (f32, bf16 or f16) to codes and scales. The same bits on every device; the default runs on the
    /// host.
    fn microscale(&self, s: &Stream, how: EmulatedFormat, x: &Tensor, out: &MicroscaledTensor) -> Result<()> {
        over_host::microscale(s, how, x, out)
    }

    /// The matrix that was quantized, as [`QuantKernels::emulate`] rounds it: `out` f32, bf16 or f16, contiguous, of the
    /// [shape](MicroscaledTensor::matrix_shape) of that matrix. The default runs on the host.
    fn dequantize_microscaled(&self, s: &Stream, q: &MicroscaledTensor, out: &Tensor) -> Result<()> {
        over_host::dequantize(s, q, out)
    }

    /// See [`MicroscaledGemm`]. The default is the emulation: a bf16 GEMM of the dequantized operands.
    fn microscaled_gemm(&self, s: &Stream, g: &MicroscaledGemm) -> Result<()> {
        emulated_gemm(self, s, g)
    }
}

/// The bf16 GEMM that emulates `g`, with the same bits as if its operands had been emulated.
pub(crate) fn emulated_gemm<K: MicroscalingKernels + ?Sized>(
    k: &K,
    s: &Stream,
    g: &MicroscaledGemm,
) -> Result<()> {
    g.check("microscaled_gemm")?;
    let values = |q: &MicroscaledTensor| -> Result<Tensor> {
        let out = Tensor::empty(s, &q.matrix_shape(), DType::BF16, Category::Workspace)?;
        k.dequantize_microscaled(s, q, &out)?;
        Ok(out)
    };
    let (a, b) = (&values(g.a)?, &values(g.b)?);
    let (trans_a, trans_b) = (g.a.along == BlockAxis::Cols, g.b.along == BlockAxis::Rows);
    let MicroscaledGemm { bias, accumulate, c, .. } = *g;
    k.gemm(s, &Gemm { a, trans_a, b, trans_b, bias, accumulate, c })
}
