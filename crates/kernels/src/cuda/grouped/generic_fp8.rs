//! Grouped GEMM of FP8 operands with FMA instructions: any sizes and alignments.

use super::generic::{SIDE, Segments, THREADS, ZERO_BLOCKS};
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{blocks, line};
use crate::cuda::quant::Fp8Matrix;
use crate::cuda::{CudaKernels, Kernel};
use crate::grouped_gemm::GroupedSizes;
use crate::{Fp8GroupedGemm, Fp8GroupedWgrad};
use ferrotron_tensor::{Launch, Result};

kernel_args! {
    header "args/grouped_fp8.cuh", includes ["args/grouped.cuh", "args/quant_generic.cuh"];

    /// y = x·w[e]ᵀ of every segment's rows, FP8 operands.
    struct GroupedFp8Args {
        x: Fp8Matrix,
        w: Fp8Matrix,
        segments: Segments,
        /// bf16 `[N, n]`.
        y: u64,
        n: i64,
        ldy: i64,
        vectorized: u32,
        pad: u32,
    }

    /// dw[e] (+)= dy·xᵀ over every segment's columns, of transposed FP8 operands.
    struct GroupedWgradFp8Args {
        dy: Fp8Matrix,
        x: Fp8Matrix,
        segments: Segments,
        /// f32 `[E, n, k]`, with the strides of rows and of matrices.
        dw: u64,
        row: i64,
        matrix: i64,
        accumulate: u32,
        pad: u32,
    }
}

impl CudaKernels {
    /// The launch's arguments are offsets, counts, x and its scales, w and its scales, y.
    pub(super) fn generic_grouped_fp8(
        &self,
        l: &Launch,
        g: &Fp8GroupedGemm,
        z: &GroupedSizes,
        segments: Segments,
    ) -> Result<()> {
        let y = l.address(6)?;
        let args = GroupedFp8Args {
            x: Fp8Matrix::argument(l, g.x, 2)?,
            w: Fp8Matrix::argument(l, g.w, 4)?,
            segments,
            y,
            n: z.n as i64,
            ldy: z.y.row as i64,
            vectorized: (y.is_multiple_of(16) && z.y.row.is_multiple_of(8) && z.n.is_multiple_of(8)).into(),
            pad: 0,
        };
        let tiles = (z.rows / SIDE + z.segments) * z.n.div_ceil(SIDE);
        let kernel = Kernel::new("grouped/generic_fp8", "grouped_fp8_bf16");
        self.launch_kernel(l, kernel, line(blocks(g.name, tiles + ZERO_BLOCKS, 1)?, THREADS), &args)
    }

    /// The launch's arguments are offsets, counts, dy and its scales, x and its scales, dw.
    pub(super) fn generic_grouped_wgrad_fp8(
        &self,
        l: &Launch,
        g: &Fp8GroupedWgrad,
        z: &GroupedSizes,
        segments: Segments,
    ) -> Result<()> {
        let args = GroupedWgradFp8Args {
            dy: Fp8Matrix::argument(l, g.dy, 2)?,
            x: Fp8Matrix::argument(l, g.x, 4)?,
            segments,
            dw: l.address(6)?,
            row: z.w.row as i64,
            matrix: z.w.matrix as i64,
            accumulate: g.dw.1.into(),
            pad: 0,
        };
        let tiles = z.segments * z.n.div_ceil(SIDE) * z.k.div_ceil(SIDE);
        let kernel = Kernel::new("grouped/generic_fp8", "grouped_wgrad_fp8_f32");
        self.launch_kernel(l, kernel, line(blocks(Fp8GroupedWgrad::NAME, tiles, 1)?, THREADS), &args)
    }
}
