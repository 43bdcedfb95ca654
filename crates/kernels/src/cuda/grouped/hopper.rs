//! Grouped GEMM on Hopper: which problems the TMA and WGMMA kernels take, and their launches.

use super::generic::Segments;
use crate::cuda::args::kernel_args;
use crate::cuda::gemm::rows_aligned16;
use crate::cuda::grid::blocks;
use crate::cuda::tensor_map::{TensorMap, tensor_map};
use crate::cuda::{CudaKernels, Kernel, LaunchConfig};
use crate::grouped_gemm::{GroupedSizes, Steps};
use crate::{GroupedGemm, GroupedWgrad};
use ferrotron_tensor::{DType, Launch, Result, Tensor};

/// Rows of a tile, and elements of a step along k.
pub(super) const ROWS: usize = 128;
const STEP: usize = 64;
/// Bytes before the staging buffers in shared memory: `STAGING_AT` of hopper_load.cuh where there is no `QUEUE`.
const STAGING_AT: usize = 128 + 4 * (3 * 1024 + 64);

kernel_args! {
    header "args/grouped_hopper.cuh", includes ["args/grouped.cuh", "args/tensor_map.cuh"];

    /// Arguments of the Hopper grouped GEMMs.
    #[derive(Default)]
    pub(super) struct GroupedHopperArgs align(64) {
        /// x; dy for wgrad.
        pub(super) a: TensorMap,
        /// w; x for wgrad.
        pub(super) b: TensorMap,
        pub(super) segments: Segments,
        /// y in bf16; dw in f32 for wgrad.
        pub(super) out: u64,
        /// bf16 `[E, width]`, or 0.
        pub(super) bias: u64,
        /// wgrad: i32, zeroed: the next tile, then slices of the sum already in dw for each half of each tile. 0 where
        /// no segment can have slices.
        pub(super) counters: u64,
        /// FP8: f32 scales.
        pub(super) a_scale: u64,
        pub(super) b_scale: u64,
        /// Strides of the result: from row to row, from matrix to matrix.
        pub(super) row: i64,
        pub(super) matrix: i64,
        /// Columns of the result.
        pub(super) width: i32,
        /// wgrad: rows of a matrix of the result.
        pub(super) height: i32,
        /// fprop, dgrad: length of the sums.
        pub(super) length: i32,
        pub(super) accumulate: i32,
        /// FP8: scales are of blocks of 128 along the sum; otherwise of a tensor (of b: of each matrix).
        pub(super) block_scaled: i32,
        /// From a row of scales to the next.
        pub(super) a_stride: i32,
        pub(super) b_stride: i32,
        pub(super) pad: [i32; 5],
    }
}

/// The GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupedOp {
    Fprop,
    Dgrad,
    Wgrad,
    FpropFp8,
    WgradFp8,
}

/// `GROUPED_HOPPER(name, op, columns, stages)`, or `.._PAIR`, or `GROUPED_PINGPONG(name, rows, columns, stages)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct KernelVariant {
    pub(super) kernel: Kernel,
    pub(super) op: GroupedOp,
    /// Rows and columns of a tile.
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) stages: usize,
    /// Clusters of two blocks, whose tiles lie one below the other, or side by side where they are taller than wide.
    pub(super) pair: bool,
    /// The consumer warpgroups of a block take turns at tiles.
    pub(super) pingpong: bool,
}

const fn variant(
    name: &'static str,
    op: GroupedOp,
    columns: usize,
    stages: usize,
    pair: bool,
) -> KernelVariant {
    let source = if matches!(op, GroupedOp::Wgrad) { "grouped/hopper_wgrad" } else { "grouped/hopper" };
    let kernel = Kernel::new(source, name);
    KernelVariant { kernel, op, rows: ROWS, columns, stages, pair, pingpong: false }
}

const fn pingpong(name: &'static str, rows: usize, columns: usize) -> KernelVariant {
    let kernel = Kernel::new("grouped/hopper_wgrad", name);
    KernelVariant { kernel, op: GroupedOp::Wgrad, rows, columns, stages: 5, pair: true, pingpong: true }
}

pub(super) const VARIANTS: [KernelVariant; 14] = [
    variant("grouped_hopper_fprop_128_bf16", GroupedOp::Fprop, 128, 6, false),
    variant("grouped_hopper_fprop_192_bf16", GroupedOp::Fprop, 192, 5, false),
    variant("grouped_hopper_fprop_256_bf16", GroupedOp::Fprop, 256, 4, false),
    variant("grouped_hopper_fprop_pair_bf16", GroupedOp::Fprop, 256, 4, true),
    variant("grouped_hopper_dgrad_128_bf16", GroupedOp::Dgrad, 128, 6, false),
    variant("grouped_hopper_dgrad_192_bf16", GroupedOp::Dgrad, 192, 5, false),
    variant("grouped_hopper_dgrad_256_bf16", GroupedOp::Dgrad, 256, 4, false),
    variant("grouped_hopper_dgrad_pair_bf16", GroupedOp::Dgrad, 256, 4, true),
    variant("grouped_hopper_wgrad_128_bf16", GroupedOp::Wgrad, 128, 6, false),
    variant("grouped_hopper_wgrad_192_bf16", GroupedOp::Wgrad, 192, 5, false),
    variant("grouped_hopper_wgrad_256_bf16", GroupedOp::Wgrad, 256, 4, false),
    variant("grouped_hopper_wgrad_pair_bf16", GroupedOp::Wgrad, 256, 4, true),
    pingpong("grouped_hopper_wgrad_128x192_bf16", 128, 192),
    pingpong("grouped_hopper_wgrad_192x128_bf16", 192, 128),
];

impl KernelVariant {
    /// Cost of `width` columns, in columns of the widest tiles: narrow tiles read more per FLOP.
    fn cost(&self, width: usize) -> usize {
        let each = match self.columns {
            128 => 160,
            192 => 204,
            _ => 256,
        };
        width.div_ceil(self.columns) * each
    }

    /// Cost of wgrad of a `[height, width]` matrix, in thousandths of an element's in the widest tiles.
    fn wgrad_cost(&self, [height, width]: [usize; 2]) -> usize {
        let [rows, columns] = self.cluster_tile();
        let each = match (self.columns, self.pingpong) {
            (_, true) => 900,
            (128, _) => 1250,
            (192, _) => 1063,
            _ => 1000,
        };
        height.next_multiple_of(rows) * width.next_multiple_of(columns) * each
    }

    pub(super) fn blocks(&self) -> usize {
        if self.pair { 2 } else { 1 }
    }

    /// Whether the tiles of a pair lie side by side: `BESIDE` of hopper_load.cuh.
    fn beside(&self) -> bool {
        self.rows > self.columns
    }

    /// Rows and columns of the tiles of a block, or of a pair.
    fn cluster_tile(&self) -> [usize; 2] {
        match self.beside() {
            true => [self.rows, self.columns * self.blocks()],
            false => [self.rows * self.blocks(), self.columns],
        }
    }

    /// Tiles of wgrad, at most; those of a pair count once.
    pub(super) fn wgrad_tiles(&self, z: &GroupedSizes) -> usize {
        let [rows, columns] = self.cluster_tile();
        (z.rows / MIN_SLICE + z.segments) * z.n.div_ceil(rows) * z.k.div_ceil(columns)
    }

    /// `BYTES` of hopper_load.cuh.
    fn shared(&self) -> u32 {
        let scales = if self.op == GroupedOp::WgradFp8 { 4 } else { 0 };
        let queue = if self.pingpong { 256 } else { 0 };
        let staging = if self.rows + self.columns == 320 { 1024 } else { 2048 };
        let lines = self.stages * (self.rows + self.columns);
        ((STAGING_AT + queue + 8 * staging + lines * scales).next_multiple_of(1024) + lines * STEP * 2) as u32
    }

    /// Launches it for at most so many tiles.
    pub(super) fn launch_kernel(
        &self,
        kernels: &CudaKernels,
        l: &Launch,
        tiles: usize,
        m: &GroupedHopperArgs,
    ) -> Result<()> {
        let most = kernels.multiprocessors() as usize / self.blocks();
        // Blocks without a tile may still have rows to zero.
        let count = blocks(self.kernel.name, tiles.clamp(1, most.max(1)) * self.blocks(), 1)?;
        let grid = LaunchConfig { blocks: [count, 1, 1], threads: 384, shared: self.shared() };
        kernels.launch_kernel(l, self.kernel, grid, m)
    }
}

/// The kernel for `width` columns, whose rows of tiles are likely to come in pairs or not.
fn choose(op: GroupedOp, width: usize, paired: bool) -> Option<&'static KernelVariant> {
    let all = VARIANTS.iter().filter(|k| k.op == op && (paired || !k.pair));
    // Among equals the last: a pair.
    all.rev().min_by_key(|k| k.cost(width))
}

/// The kernel for wgrad of `[height, width]` matrices.
fn choose_wgrad(sizes: [usize; 2]) -> Option<&'static KernelVariant> {
    let all = VARIANTS.iter().filter(|k| k.op == GroupedOp::Wgrad);
    // Among equals the last: a pair.
    all.rev().min_by_key(|k| k.wgrad_cost(sizes))
}

/// Whether all rows start on 16-byte boundaries.
pub(super) fn all_rows_aligned(t: &Tensor, steps: &Steps) -> bool {
    rows_aligned16(t, steps.row) && rows_aligned16(t, steps.matrix)
}

impl GroupedGemm<'_> {
    /// The kernel that supports it, if there is one.
    pub(super) fn hopper(&self, kernels: &CudaKernels, z: &GroupedSizes) -> Option<&'static KernelVariant> {
        let fits = self.x.dtype() == DType::BF16
            && kernels.has("grouped/hopper")
            && z.segments * z.rows * z.k > 0
            && z.n.is_multiple_of(8)
            && all_rows_aligned(self.x, &z.x)
            && all_rows_aligned(self.w, &z.w)
            && all_rows_aligned(self.y, &z.y)
            && self.bias.is_none_or(|b| b.alignment() >= 4);
        if !fits {
            return None;
        }
        let op = if self.as_stored { GroupedOp::Dgrad } else { GroupedOp::Fprop };
        // A segment's last tile may have none below it.
        choose(op, z.n, z.rows / z.segments >= 6 * ROWS)
    }
}

impl GroupedWgrad<'_> {
    /// The kernel that supports it, if there is one.
    pub(super) fn hopper(&self, kernels: &CudaKernels, z: &GroupedSizes) -> Option<&'static KernelVariant> {
        let fits = self.x.dtype() == DType::BF16
            && kernels.has("grouped/hopper_wgrad")
            && z.rows > 0
            && z.k.is_multiple_of(4)
            && all_rows_aligned(self.x, &z.x)
            && all_rows_aligned(self.dy, &z.y)
            && all_rows_aligned(self.dw.0, &z.w);
        fits.then(|| choose_wgrad([z.n, z.k])).flatten()
    }
}

/// The shortest slice of a segment that one wgrad tile sums, as in hopper_load.cuh. The device takes longer ones of more rows in
/// segments: their number alone decides, and not the rows behind them, so that sums are the same on every GPU and for tensors
/// with any room.
const MIN_SLICE: usize = 1024;

/// Counters of wgrad (the next tile; slices done of each half of each tile), if any segment may be long enough to be
/// sliced.
pub(super) fn wgrad_counters(variant: &KernelVariant, z: &GroupedSizes) -> Option<usize> {
    let tiles = z.n.div_ceil(variant.rows) * z.k.div_ceil(variant.columns);
    (z.rows > MIN_SLICE).then_some(1 + z.segments * tiles * 2)
}

impl CudaKernels {
    /// The launch's arguments are offsets, counts, x, w, y and the bias if there is one.
    pub(super) fn hopper_grouped(
        &self,
        l: &Launch,
        g: &GroupedGemm,
        z: &GroupedSizes,
        segments: Segments,
        variant: &KernelVariant,
    ) -> Result<()> {
        let (stored, rows) = match variant.op {
            GroupedOp::Fprop => ([z.k, z.n], variant.columns / variant.blocks()),
            _ => ([z.n, z.k], STEP),
        };
        let m = GroupedHopperArgs {
            a: tensor_map(l.address(2)?, [z.k, z.rows, 1, 1], [z.x.row, 0, 0], ROWS as u32)?,
            b: tensor_map(
                l.address(3)?,
                [stored[0], stored[1], z.segments, 1],
                [z.w.row, z.w.matrix, 0],
                rows as u32,
            )?,
            segments,
            out: l.address(4)?,
            bias: if g.bias.is_some() { l.address(5)? } else { 0 },
            row: z.y.row as i64,
            width: z.n as i32,
            length: z.k as i32,
            ..GroupedHopperArgs::default()
        };
        let tiles = (z.rows / (ROWS * variant.blocks()) + z.segments) * z.n.div_ceil(variant.columns);
        variant.launch_kernel(self, l, tiles, &m)
    }

    /// The launch's arguments are offsets, counts, dy, x, dw and the counters if there are any.
    pub(super) fn hopper_grouped_wgrad(
        &self,
        l: &Launch,
        g: &GroupedWgrad,
        z: &GroupedSizes,
        segments: Segments,
        variant: &KernelVariant,
    ) -> Result<()> {
        // Blocks that take turns each load half of the rows of the operand that a pair shares.
        let half = |shared: bool| if variant.pingpong && shared { STEP / 2 } else { STEP } as u32;
        let m = GroupedHopperArgs {
            a: tensor_map(l.address(2)?, [z.n, z.rows, 1, 1], [z.y.row, 0, 0], half(variant.beside()))?,
            b: tensor_map(l.address(3)?, [z.k, z.rows, 1, 1], [z.x.row, 0, 0], half(!variant.beside()))?,
            segments,
            out: l.address(4)?,
            counters: if wgrad_counters(variant, z).is_some() { l.address(5)? } else { 0 },
            row: z.w.row as i64,
            matrix: z.w.matrix as i64,
            width: z.k as i32,
            height: z.n as i32,
            accumulate: g.dw.1.into(),
            ..GroupedHopperArgs::default()
        };
        variant.launch_kernel(self, l, variant.wgrad_tiles(z), &m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_cuts_no_shorter_slices_than_the_host_has_counters_for() {
        let same = format!("constexpr i32 MIN_SLICE = {MIN_SLICE};");
        assert!(include_str!("hopper_load.cuh").contains(&same));
    }

    #[test]
    fn wgrad_takes_the_tiles_that_cover_a_matrix_with_least_waste() {
        let name = |sizes| choose_wgrad(sizes).map(|v| v.kernel.name);
        let cases = [
            ([1536, 2048], "192x128"),
            ([2048, 768], "128x192"),
            ([14336, 4096], "192x128"),
            ([256, 256], "pair"),
            ([128, 256], "256"),
            ([64, 64], "128"),
        ];
        for (sizes, tiles) in cases {
            assert_eq!(
                name(sizes),
                Some(format!("grouped_hopper_wgrad_{tiles}_bf16")).as_deref(),
                "{sizes:?}"
            );
        }
    }

    #[test]
    fn the_tiles_fit_the_shared_memory_of_a_block() {
        for v in &VARIANTS {
            assert!(v.shared() <= 227 << 10, "{}", v.kernel.name);
        }
    }
}
