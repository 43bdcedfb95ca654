//! GEMMs of MXFP8 and NVFP4 operands by cuBLASLt, which multiplies them from compute capability 10.0 on. What the library
//! refuses is emulated.

use super::microscale::{GemmScales, StoredScales};
use crate::cuda::CudaKernels;
use crate::cuda::cublaslt::{Epilogue, Fp8Operands, GemmKey, ScaleMode};
use crate::cuda::gemm::rows_aligned16;
use crate::cuda::gemm_cache::Operands;
use crate::quant::check::matrix;
use crate::quant::microscaling::gemm::emulated_gemm;
use crate::{EmulatedFormat, GemmSizes, MicroscaledGemm, MicroscaledTensor, MicroscalingKernels};
use ferrotron_tensor::{Result, Stream, Tensor, read};

/// Whether tensor cores multiply microscaling formats.
pub(super) fn multiplies_microscaled(capability: (u32, u32)) -> bool {
    capability >= (10, 0)
}

impl MicroscaledGemm<'_> {
    /// The autotuning key.
    pub(super) fn key(&self, [m, n]: [usize; 2], ldc: usize) -> GemmKey {
        let (a, b) = (self.a, self.b);
        // The contraction includes the padding: zeros, or values of the Hadamard transform.
        let d = a.depth();
        let mode = if a.is_fp4() { ScaleMode::Vec16E4m3 } else { ScaleMode::Vec32E8m0 };
        GemmKey {
            sizes: GemmSizes { m, n, k: d, lda: d, ldb: d, ldc },
            trans: [false, true],
            types: [a.data.dtype(), self.c.dtype()],
            epilogue: if self.bias.is_some() { Epilogue::Bias } else { Epilogue::None },
            align: [Some(&a.data), Some(&b.data), Some(self.c), self.bias]
                .map(|t| t.map_or(256, Tensor::alignment)),
            fp8: Some(Fp8Operands { other: b.data.dtype(), scaling: [mode; 2], fast: false }),
            stacks: None,
        }
    }
}

impl CudaKernels {
    pub(super) fn launch_microscaled_gemm(&self, s: &Stream, g: &MicroscaledGemm) -> Result<()> {
        const OP: &str = "microscaled_gemm";
        let [m, n, k] = g.check(OP)?;
        if m * n == 0 {
            return Ok(());
        }
        let view = matrix(OP, g.c)?;
        let ldc = if m > 1 { view.outer_stride } else { n.next_multiple_of(16) };
        let aligned = [&g.a.data, &g.b.data].iter().all(|t| t.alignment() >= 16)
            && rows_aligned16(g.c, ldc)
            && g.bias.is_none_or(|t| rows_aligned16(t, 16));
        // Bias and accumulation are added before rounding; the library can do only one of them.
        if self.takes_microscaled() && k > 0 && aligned && !(g.accumulate && g.bias.is_some()) {
            let amax = match (&g.a.amax, &g.b.amax) {
                (Some(a), Some(b)) => Some([a, b]),
                _ => None,
            };
            let operands = [StoredScales::from(g.a), StoredScales::from(g.b)];
            let GemmScales { scales: [a, b], factors } =
                self.launch_swizzle(s, operands, amax, g.accumulate)?;
            let o = Operands {
                a: &g.a.data,
                b: &g.b.data,
                c: g.c,
                bias: g.bias.map(read),
                aux: None,
                scales: Some([&a, &b]),
                factors: factors.as_ref(),
                accumulate: g.accumulate,
            };
            if self.gemm_cache.gemm(s, g.name, g.key([m, n], ldc), &o, None)? {
                return Ok(());
            }
        }
        emulated_gemm(self, s, g)
    }
}

impl MicroscalingKernels for CudaKernels {
    fn takes_microscaled(&self) -> bool {
        multiplies_microscaled(self.capability)
    }

    fn microscale(&self, s: &Stream, how: EmulatedFormat, x: &Tensor, out: &MicroscaledTensor) -> Result<()> {
        self.launch_microscale(s, how, x, out)
    }

    fn dequantize_microscaled(&self, s: &Stream, q: &MicroscaledTensor, out: &Tensor) -> Result<()> {
        self.launch_dequantize_microscaled(s, q, out)
    }

    fn microscaled_gemm(&self, s: &Stream, g: &MicroscaledGemm) -> Result<()> {
        self.launch_microscaled_gemm(s, g)
    }
}
