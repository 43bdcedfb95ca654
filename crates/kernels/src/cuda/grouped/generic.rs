//! Grouped GEMM with FMA instructions: any sizes, strides and alignments.

use crate::cuda::args::kernel_args;
use crate::cuda::grid::{blocks, line};
use crate::cuda::{CudaKernels, typed};
use crate::grouped_gemm::GroupedSizes;
use crate::{GroupedGemm, GroupedWgrad};
use ferrotron_tensor::{Launch, Result};

/// As in gemm_tile.cuh.
pub(super) const SIDE: usize = 64;
pub(super) const THREADS: u32 = 256;
/// Blocks that zero rows outside all segments.
pub(super) const ZERO_BLOCKS: usize = 64;

kernel_args! {
    header "args/grouped.cuh", includes [];

    /// Segments of N rows, one for each of E experts: segment e is `counts[e]` rows from `offsets[e]`.
    #[derive(Default)]
    pub(super) struct Segments {
        /// i32 `[E + 1]`.
        pub(super) offsets: u64,
        /// i32 `[E]`.
        pub(super) counts: u64,
        /// E.
        pub(super) count: i32,
        /// N.
        pub(super) rows: i32,
    }

    /// y = x·op(w[e]) + bias[e] of every segment's rows.
    pub(super) struct GroupedArgs {
        segments: Segments,
        x: u64,
        w: u64,
        y: u64,
        /// `[E, n]`, or 0.
        bias: u64,
        n: i64,
        k: i64,
        ldx: i64,
        ldw: i64,
        ldy: i64,
        /// From a matrix of w to the next.
        step: i64,
        /// w is `[k, n]`, not `[n, k]`.
        as_stored: u32,
        vectorized: u32,
    }

    /// dw[e] (+)= dyᵀ·x over every segment's rows.
    pub(super) struct GroupedWgradArgs {
        segments: Segments,
        dy: u64,
        x: u64,
        /// f32 `[E, n, k]`.
        dw: u64,
        n: i64,
        k: i64,
        ldy: i64,
        ldx: i64,
        ldw: i64,
        step: i64,
        accumulate: u32,
        pad: u32,
        /// mma.sync: i32, zeroed: the next tile, then slices of the sum already in dw for each tile.
        pub(super) counters: u64,
    }
}

impl GroupedGemm<'_> {
    /// The launch's arguments are offsets, counts, x, w, y and the bias if there is one.
    pub(super) fn args(&self, l: &Launch, z: &GroupedSizes, segments: Segments) -> Result<GroupedArgs> {
        let (y, size) = (l.address(4)?, self.x.dtype().size());
        let vectorized = y.is_multiple_of(16) && [z.y.row, z.n].iter().all(|n| (n * size).is_multiple_of(16));
        Ok(GroupedArgs {
            segments,
            x: l.address(2)?,
            w: l.address(3)?,
            y,
            bias: if self.bias.is_some() { l.address(5)? } else { 0 },
            n: z.n as i64,
            k: z.k as i64,
            ldx: z.x.row as i64,
            ldw: z.w.row as i64,
            ldy: z.y.row as i64,
            step: z.w.matrix as i64,
            as_stored: self.as_stored.into(),
            vectorized: vectorized.into(),
        })
    }
}

impl GroupedWgrad<'_> {
    /// The launch's arguments are offsets, counts, dy, x, dw.
    pub(super) fn args(&self, l: &Launch, z: &GroupedSizes, segments: Segments) -> Result<GroupedWgradArgs> {
        Ok(GroupedWgradArgs {
            segments,
            dy: l.address(2)?,
            x: l.address(3)?,
            dw: l.address(4)?,
            n: z.n as i64,
            k: z.k as i64,
            ldy: z.y.row as i64,
            ldx: z.x.row as i64,
            ldw: z.w.row as i64,
            step: z.w.matrix as i64,
            accumulate: self.dw.1.into(),
            pad: 0,
            counters: 0,
        })
    }
}

impl CudaKernels {
    /// The launch's arguments are offsets, counts, x, w, y and the bias if there is one.
    pub(super) fn generic_grouped(
        &self,
        l: &Launch,
        g: &GroupedGemm,
        z: &GroupedSizes,
        segments: Segments,
    ) -> Result<()> {
        let kernel = typed!(g.name(), g.x.dtype(), "grouped/generic", "grouped")?;
        let tiles = (z.rows / SIDE + z.segments) * z.n.div_ceil(SIDE);
        let grid = line(blocks(g.name(), tiles + ZERO_BLOCKS, 1)?, THREADS);
        self.launch_kernel(l, kernel, grid, &g.args(l, z, segments)?)
    }

    /// The launch's arguments are offsets, counts, dy, x, dw.
    pub(super) fn generic_grouped_wgrad(
        &self,
        l: &Launch,
        g: &GroupedWgrad,
        z: &GroupedSizes,
        segments: Segments,
    ) -> Result<()> {
        let kernel = typed!(GroupedWgrad::NAME, g.x.dtype(), "grouped/generic", "grouped_wgrad")?;
        let tiles = z.segments * z.n.div_ceil(SIDE) * z.k.div_ceil(SIDE);
        let grid = line(blocks(GroupedWgrad::NAME, tiles, 1)?, THREADS);
        self.launch_kernel(l, kernel, grid, &g.args(l, z, segments)?)
    }
}
