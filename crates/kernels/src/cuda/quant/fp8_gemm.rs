//! FP8 GEMM: by cuBLASLt, with the algorithm autotuned for the shape.

use crate::cuda::CudaKernels;
use crate::cuda::cublaslt::{Epilogue, Fp8Operands, GemmKey};
use crate::cuda::gemm::rows_aligned16;
use crate::cuda::gemm_cache::Operands;
use crate::quant::check::matrix;
use crate::{Fp8Gemm, Fp8Tensor, GemmSizes, ScalingMode};
use ferrotron_tensor::{Result, Stream, Tensor, read};

/// Whether cuBLASLt multiplies such operands on this card: FP8 tensor cores came with compute capability 8.9, scales of
/// blocks of 128 are Hopper's alone. It is asked only there, so that a card that stands for an older one does as that would.
fn has_tensor_cores(capability: (u32, u32), scaling: [ScalingMode; 2]) -> bool {
    let per_tensor = scaling.iter().all(|s| *s == ScalingMode::PerTensor);
    if per_tensor { capability >= (8, 9) } else { capability == (9, 0) }
}

/// Whether the library can read it: data, and scales where there are many, aligned to 16 bytes.
fn readable(b: &Fp8Tensor) -> bool {
    b.data.alignment() >= 16 && (b.scaling == ScalingMode::PerTensor || b.scale_inv.alignment() >= 16)
}

impl Fp8Gemm<'_> {
    /// The autotuning key.
    pub(super) fn key(&self, [m, n, k]: [usize; 3], ldc: usize) -> GemmKey {
        let (a, b) = (self.a, self.b);
        // Padding is zeros, and does not change the sum.
        let ld = a.data.shape()[1];
        // The scales of a padded row are those of the row, unless padding adds a block.
        debug_assert_eq!(ld.div_ceil(crate::BLOCK), k.div_ceil(crate::BLOCK));
        GemmKey {
            sizes: GemmSizes { m, n, k: ld, lda: ld, ldb: ld, ldc },
            trans: [false, true],
            types: [a.data.dtype(), self.c.dtype()],
            epilogue: if self.bias.is_some() { Epilogue::Bias } else { Epilogue::None },
            align: [Some(&a.data), Some(&b.data), Some(self.c), self.bias]
                .map(|t| t.map_or(256, Tensor::alignment)),
            fp8: Some(Fp8Operands {
                other: b.data.dtype(),
                scaling: [a.scaling, b.scaling],
                fast: self.fast && a.scaling == ScalingMode::PerTensor,
            }),
            stacks: None,
        }
    }
}

impl CudaKernels {
    pub(crate) fn launch_fp8_gemm(&self, s: &Stream, g: &Fp8Gemm) -> Result<()> {
        const OP: &str = "fp8_gemm";
        let sizes = g.check(OP)?;
        let [m, n, k] = sizes;
        if m * n == 0 {
            return Ok(());
        }
        let view = matrix(OP, g.c)?;
        let ldc = if m > 1 { view.outer_stride } else { n.next_multiple_of(16) };
        let fits = has_tensor_cores(self.capability, [g.a.scaling, g.b.scaling])
            && readable(g.a)
            && readable(g.b)
            && rows_aligned16(g.c, ldc)
            && g.bias.is_none_or(|t| rows_aligned16(t, 16));
        // Bias and accumulation are added before rounding; the library can do only one of them.
        if k > 0 && fits && !(g.accumulate && g.bias.is_some()) {
            let o = Operands {
                a: &g.a.data,
                b: &g.b.data,
                c: g.c,
                bias: g.bias.map(read),
                aux: None,
                scales: Some([&g.a.scale_inv, &g.b.scale_inv]),
                accumulate: g.accumulate,
            };
            if self.gemm_cache.gemm(s, g.name, g.key(sizes, ldc), &o, None)? {
                return Ok(());
            }
        }
        self.launch_generic_fp8_gemm(s, g, ldc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ada_has_fp8_tensor_cores_with_scales_of_tensors() {
        let (tensor, block) =
            ([ScalingMode::PerTensor; 2], [ScalingMode::Block1x128, ScalingMode::Block128x128]);
        for (capability, tensors, blocks) in [
            ((8, 0), false, false),
            ((8, 6), false, false),
            ((8, 9), true, false),
            ((9, 0), true, true),
            ((12, 0), true, false),
        ] {
            assert_eq!(has_tensor_cores(capability, tensor), tensors, "{capability:?}");
            assert_eq!(has_tensor_cores(capability, block), blocks, "{capability:?}");
        }
    }
}
