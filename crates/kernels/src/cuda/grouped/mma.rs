//! Grouped GEMM with mma.sync, the tensor-core instruction of every supported GPU: which problems these kernels take, and
//! their launches.

use super::generic::{Segments, ZERO_BLOCKS};
use super::hopper::all_rows_aligned;
use crate::cuda::grid::blocks;
use crate::cuda::{CudaKernels, Kernel, LaunchConfig};
use crate::grouped_gemm::GroupedSizes;
use crate::{GroupedGemm, GroupedWgrad};
use ferrotron_tensor::{DType, Launch, Result};

/// Rows of a tile, and elements of a step along the sum.
const ROWS: usize = 128;
const DEPTH: usize = 32;
/// Rows of a segment that one wgrad tile sums: `SLICE` of mma_wgrad.cu.
const SLICE: usize = 1536;
/// Blocks of wgrad that fit a multiprocessor.
const RESIDENT: usize = 2;

/// `GROUPED_MMA(name, row warps, column warps, stages, ..)` of mma.cu, or `GROUPED_MMA_WGRAD` of mma_wgrad.cu: tiles of so
/// many columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct MmaVariant {
    kernel: Kernel,
    columns: usize,
    stages: usize,
}

const fn variant(source: &'static str, name: &'static str, columns: usize) -> MmaVariant {
    MmaVariant { kernel: Kernel::new(source, name), columns, stages: if columns == 128 { 3 } else { 4 } }
}

/// Narrow tiles first.
pub(super) const FPROP: [MmaVariant; 2] = [
    variant("grouped/mma", "grouped_mma_fprop_128_bf16", 128),
    variant("grouped/mma", "grouped_mma_fprop_256_bf16", 256),
];
pub(super) const DGRAD: [MmaVariant; 2] = [
    variant("grouped/mma", "grouped_mma_dgrad_128_bf16", 128),
    variant("grouped/mma", "grouped_mma_dgrad_256_bf16", 256),
];
/// Wide tiles were slower at every shape.
pub(super) const WGRAD: [MmaVariant; 1] = [variant("grouped/mma_wgrad", "grouped_mma_wgrad_128_bf16", 128)];

impl MmaVariant {
    /// Warps of 64 × 64 elements.
    fn grid(&self, op: &'static str, tiles: usize) -> Result<LaunchConfig> {
        let threads = (ROWS * self.columns / 4096 * 32) as u32;
        Ok(LaunchConfig { blocks: [blocks(op, tiles, 1)?, 1, 1], threads, shared: self.shared() })
    }

    /// Tiles of a wgrad matrix.
    fn wgrad_tiles(&self, z: &GroupedSizes) -> usize {
        z.n.div_ceil(ROWS) * z.k.div_ceil(self.columns)
    }

    /// Counters of wgrad: the next tile; slices done of each tile.
    pub(super) fn wgrad_counters(&self, z: &GroupedSizes) -> usize {
        1 + z.segments * self.wgrad_tiles(z)
    }

    /// `BYTES` of mma.cuh.
    const fn shared(&self) -> u32 {
        (self.stages * (ROWS + self.columns) * DEPTH * 2) as u32
    }
}

/// The kernel for `width` columns and sums of `length`: wide tiles read less per FLOP, but only one block of them fits a
/// multiprocessor, which then waits where sums begin and end.
fn choose(all: &'static [MmaVariant; 2], width: usize, length: usize) -> &'static MmaVariant {
    let [narrow, wide] = all;
    let covered = |v: &MmaVariant| width.next_multiple_of(v.columns);
    if length >= 1024 && covered(wide) * 4 <= covered(narrow) * 5 { wide } else { narrow }
}

impl GroupedGemm<'_> {
    /// The kernel that supports it, if there is one.
    pub(super) fn mma(&self, z: &GroupedSizes) -> Option<&'static MmaVariant> {
        let fits = self.x.dtype() == DType::BF16
            && z.segments * z.rows * z.k > 0
            && z.n.is_multiple_of(8)
            && [z.n, z.k].iter().all(|n| *n < 1 << 30)
            && all_rows_aligned(self.x, &z.x)
            && all_rows_aligned(self.w, &z.w)
            && all_rows_aligned(self.y, &z.y);
        fits.then(|| choose(if self.as_stored { &DGRAD } else { &FPROP }, z.n, z.k))
    }
}

impl GroupedWgrad<'_> {
    /// The kernel that supports it, if there is one.
    pub(super) fn mma(&self, z: &GroupedSizes) -> Option<&'static MmaVariant> {
        let fits = self.x.dtype() == DType::BF16
            && z.k.is_multiple_of(4)
            && [z.n, z.k].iter().all(|n| *n < 1 << 30)
            && all_rows_aligned(self.x, &z.x)
            && all_rows_aligned(self.dy, &z.y)
            && all_rows_aligned(self.dw.0, &z.w);
        fits.then_some(&WGRAD[0])
    }
}

impl CudaKernels {
    /// The launch's arguments are offsets, counts, x, w, y and the bias if there is one.
    pub(super) fn mma_grouped(
        &self,
        l: &Launch,
        g: &GroupedGemm,
        z: &GroupedSizes,
        segments: Segments,
        variant: &MmaVariant,
    ) -> Result<()> {
        let tiles = (z.rows / ROWS + z.segments) * z.n.div_ceil(variant.columns);
        let grid = variant.grid(g.name(), tiles + ZERO_BLOCKS)?;
        self.launch_kernel(l, variant.kernel, grid, &g.args(l, z, segments)?)
    }

    /// The launch's arguments are offsets, counts, dy, x, dw, counters.
    pub(super) fn mma_grouped_wgrad(
        &self,
        l: &Launch,
        g: &GroupedWgrad,
        z: &GroupedSizes,
        segments: Segments,
        variant: &MmaVariant,
    ) -> Result<()> {
        let tiles = (z.rows / SLICE + z.segments) * variant.wgrad_tiles(z);
        let resident = RESIDENT * self.multiprocessors() as usize;
        let grid = variant.grid(GroupedWgrad::NAME, tiles.min(resident))?;
        let mut args = g.args(l, z, segments)?;
        args.counters = l.address(5)?;
        self.launch_kernel(l, variant.kernel, grid, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variants_match_their_sources_and_fit_every_card() {
        for (source, name) in
            [(include_str!("mma.cu"), "GROUPED_MMA"), (include_str!("mma_wgrad.cu"), "GROUPED_MMA_WGRAD")]
        {
            let found = source.lines().filter(|l| l.starts_with(&format!("{name}(grouped_"))).count();
            assert_eq!(found, if name == "GROUPED_MMA" { 4 } else { 1 });
        }
        for v in FPROP.iter().chain(&DGRAD).chain(&WGRAD) {
            let source = if v.kernel.source == "grouped/mma" {
                include_str!("mma.cu")
            } else {
                include_str!("mma_wgrad.cu")
            };
            let start = format!("({}, {}, {}, {}", v.kernel.name, ROWS / 64, v.columns / 64, v.stages);
            assert!(source.contains(&start), "{start}");
            assert!(v.shared() <= 99 << 10, "{}", v.kernel.name);
        }
        assert!(include_str!("mma_wgrad.cu").contains(&format!("constexpr i32 SLICE = {SLICE};")));
    }

    #[test]
    fn wide_tiles_are_chosen_where_they_waste_little() {
        let columns = |width| choose(&FPROP, width, 1024).columns;
        assert_eq!(
            [64, 128, 256, 264, 384, 512, 640, 1032, 1408].map(columns),
            [128, 128, 256, 128, 128, 256, 256, 256, 256]
        );
    }
}
