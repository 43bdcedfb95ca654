//! FP8 GEMM: by cuBLASLt, with the algorithm autotuned for the shape.

use super::microscale::StoredScales;
use super::microscaled_gemm::multiplies_microscaled;
use crate::cuda::CudaKernels;
use crate::cuda::cublaslt::{Epilogue, Fp8Operands, GemmKey, ScaleMode};
use crate::cuda::gemm::rows_aligned16;
use crate::cuda::gemm_cache::Operands;
use crate::quant::check::matrix;
use crate::quant::microscaling::DEPTH;
use crate::{Fp8Gemm, Fp8Tensor, GemmSizes, ScalingMode};
use ferrotron_tensor::{Result, Stream, Tensor, read};

/// Scaling modes with which cuBLASLt multiplies such operands on this card, if any: FP8 tensor cores came with compute
/// capability 8.9; scales of blocks of 128 are Hopper's alone, but where they are powers of two they are MXFP8 scales, which
/// serve 32 values each, to Blackwell. The library is asked only there, so that a card that stands for an older one does as
/// that would.
fn scale_modes(capability: (u32, u32), operands: [&Fp8Tensor; 2]) -> Option<[ScaleMode; 2]> {
    let is_per_tensor = operands.iter().all(|b| b.scaling == ScalingMode::PerTensor);
    let is_mxfp8 = |b: &&Fp8Tensor| b.pow2 && b.data.shape()[1].is_multiple_of(DEPTH);
    match is_per_tensor {
        true if capability < (8, 9) => None,
        false if multiplies_microscaled(capability) => {
            operands.iter().all(is_mxfp8).then_some([ScaleMode::Vec32E8m0; 2])
        }
        false if capability != (9, 0) => None,
        _ => Some(operands.map(|b| b.scaling.into())),
    }
}

/// Whether the library can read it: data, and scales where there are many, aligned to 16 bytes.
fn readable(b: &Fp8Tensor) -> bool {
    b.data.alignment() >= 16 && (b.scaling == ScalingMode::PerTensor || b.scale_inv.alignment() >= 16)
}

impl Fp8Gemm<'_> {
    /// The autotuning key.
    pub(super) fn key(&self, [m, n, k]: [usize; 3], ldc: usize, scaling: [ScaleMode; 2]) -> GemmKey {
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
                scaling,
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
        let modes = scale_modes(self.capability, [g.a, g.b]);
        let fits = readable(g.a)
            && readable(g.b)
            && rows_aligned16(g.c, ldc)
            && g.bias.is_none_or(|t| rows_aligned16(t, 16));
        // Bias and accumulation are added before rounding; the library can do only one of them.
        if let Some(modes) = modes.filter(|_| k > 0 && fits && !(g.accumulate && g.bias.is_some())) {
            let swizzled = match modes {
                [ScaleMode::Vec32E8m0, _] => {
                    let scales = [StoredScales::of_blocks(g.a)?, StoredScales::of_blocks(g.b)?];
                    Some(self.launch_swizzle(s, scales, None, g.accumulate)?.scales)
                }
                _ => None,
            };
            let scales = swizzled.as_ref().map_or([&g.a.scale_inv, &g.b.scale_inv], |both| both.each_ref());
            let o = Operands {
                a: &g.a.data,
                b: &g.b.data,
                c: g.c,
                bias: g.bias.map(read),
                aux: None,
                scales: Some(scales),
                factors: None,
                accumulate: g.accumulate,
            };
            if self.gemm_cache.gemm(s, g.name, g.key(sizes, ldc, modes), &o, None)? {
                return Ok(());
            }
        }
        self.launch_generic_fp8_gemm(s, g, ldc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_tensor::{Category, DType, Device, Threads};

    #[test]
    fn cards_multiply_per_tensor_block_and_power_of_two_block_scales() {
        let s = Device::cpu(Threads::new(1).unwrap()).stream("compute").unwrap();
        let make = |scaling, pow2, k| {
            let b = Fp8Tensor::empty(&s, [16, k], DType::E4M3, scaling, Category::Workspace).unwrap();
            Fp8Tensor { pow2, ..b }
        };
        let tensor = make(ScalingMode::PerTensor, false, 64);
        let block = make(ScalingMode::Block1x128, false, 64);
        let [pow2, odd] = [64, 48].map(|k| make(ScalingMode::Block1x128, true, k));
        let (whole, rows, small) = (ScaleMode::PerTensor, ScaleMode::Block1x128, ScaleMode::Vec32E8m0);
        for (capability, tensors, blocks, powers) in [
            ((8, 0), None, None, None),
            ((8, 6), None, None, None),
            ((8, 9), Some(whole), None, None),
            ((9, 0), Some(whole), Some(rows), Some(rows)),
            ((10, 0), Some(whole), None, Some(small)),
            ((12, 0), Some(whole), None, Some(small)),
        ] {
            let modes = |b| scale_modes(capability, [b; 2]).map(|[mode, _]| mode);
            assert_eq!([&tensor, &block, &pow2].map(modes), [tensors, blocks, powers], "{capability:?}");
            // Rows that end within 32 values have no MXFP8 scales of their own.
            assert_eq!(modes(&odd), powers.filter(|_| capability == (9, 0)), "{capability:?}");
        }
    }
}
