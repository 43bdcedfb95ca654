//! Grouped products of bytes in plain arithmetic: any sizes and alignments.

use super::plain::{BLANKERS, SIDE, Segments, THREADS};
use crate::cuda::groups::{blocks, line};
use crate::cuda::quant::Matrix;
use crate::cuda::{CudaKernels, Kernel};
use crate::grouped::GroupedSizes;
use crate::{Grouped8, GroupedGrad8};
use ferrotron_tensor::{Launch, Result};

#[repr(C)]
#[derive(Clone, Copy)]
struct Grouped8Args {
    x: Matrix,
    w: Matrix,
    segments: Segments,
    y: u64,
    n: i64,
    ldy: i64,
    wide: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GroupedGrad8Args {
    dy: Matrix,
    x: Matrix,
    segments: Segments,
    dw: u64,
    row: i64,
    matrix: i64,
    accumulate: u32,
    pad: u32,
}

impl CudaKernels {
    /// The launch's arguments are offsets, counts, x and its scales, w and its scales, y.
    pub(super) fn plain_grouped8(
        &self,
        l: &Launch,
        g: &Grouped8,
        z: &GroupedSizes,
        segments: Segments,
    ) -> Result<()> {
        let y = l.address(6)?;
        let args = Grouped8Args {
            x: Matrix::argument(l, g.x, 2)?,
            w: Matrix::argument(l, g.w, 4)?,
            segments,
            y,
            n: z.n as i64,
            ldy: z.y.row as i64,
            wide: (y.is_multiple_of(16) && z.y.row.is_multiple_of(8) && z.n.is_multiple_of(8)).into(),
            pad: 0,
        };
        let tiles = (z.rows / SIDE + z.segments) * z.n.div_ceil(SIDE);
        let kernel = Kernel { source: "grouped_plain8", name: "grouped8_bf16" };
        self.queue(l, kernel, line(blocks(g.name, tiles + BLANKERS, 1)?, THREADS), &args)
    }

    /// The launch's arguments are offsets, counts, dy and its scales, x and its scales, dw.
    pub(super) fn plain_grouped_grad8(
        &self,
        l: &Launch,
        g: &GroupedGrad8,
        z: &GroupedSizes,
        segments: Segments,
    ) -> Result<()> {
        let args = GroupedGrad8Args {
            dy: Matrix::argument(l, g.dy, 2)?,
            x: Matrix::argument(l, g.x, 4)?,
            segments,
            dw: l.address(6)?,
            row: z.w.row as i64,
            matrix: z.w.matrix as i64,
            accumulate: g.dw.1.into(),
            pad: 0,
        };
        let tiles = z.segments * z.n.div_ceil(SIDE) * z.k.div_ceil(SIDE);
        let kernel = Kernel { source: "grouped_plain8", name: "grouped_grad8_f32" };
        self.queue(l, kernel, line(blocks(GroupedGrad8::NAME, tiles, 1)?, THREADS), &args)
    }
}
