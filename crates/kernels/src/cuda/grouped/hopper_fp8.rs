//! FP8 grouped GEMM on Hopper.

use super::generic::Segments;
use super::hopper::{GroupedHopperArgs, GroupedOp, KernelVariant, ROWS, all_rows_aligned, wgrad_counters};
use crate::cuda::tensor_map::fp8_tensor_map;
use crate::cuda::{CudaKernels, Kernel};
use crate::grouped_gemm::GroupedSizes;
use crate::{Fp8GroupedGemm, Fp8GroupedWgrad, Fp8Tensor, ScalingMode};
use ferrotron_tensor::{DType, Launch, Result};

/// `GROUPED_HOPPER_FP8(name, op, columns, stages, e5, fast)`, or `.._PAIR`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8KernelVariant {
    pub(super) variant: KernelVariant,
    /// The A operand is E5M2.
    pub(super) e5: bool,
    /// Fast accumulation: sums stay in the tensor core's accumulator; no block scales.
    pub(super) fast: bool,
}

const fn output(
    name: &'static str,
    columns: usize,
    stages: usize,
    pair: bool,
    e5: bool,
    fast: bool,
) -> Fp8KernelVariant {
    let kernel = Kernel::new("grouped/hopper_fp8", name);
    Fp8KernelVariant {
        variant: KernelVariant {
            kernel,
            op: GroupedOp::FpropFp8,
            rows: ROWS,
            columns,
            stages,
            pair,
            pingpong: false,
        },
        e5,
        fast,
    }
}

const fn weight(name: &'static str, columns: usize, stages: usize, pair: bool, e5: bool) -> Fp8KernelVariant {
    let kernel = Kernel::new("grouped/hopper_wgrad_fp8", name);
    Fp8KernelVariant {
        variant: KernelVariant {
            kernel,
            op: GroupedOp::WgradFp8,
            rows: ROWS,
            columns,
            stages,
            pair,
            pingpong: false,
        },
        e5,
        fast: false,
    }
}

pub(super) const FP8_VARIANTS: [Fp8KernelVariant; 16] = [
    output("grouped_hopper_fprop_fast_e4m3", 256, 4, false, false, true),
    output("grouped_hopper_fprop_fast_pair_e4m3", 256, 4, true, false, true),
    output("grouped_hopper_fprop_128_e4m3", 128, 6, false, false, false),
    output("grouped_hopper_fprop_192_e4m3", 192, 5, false, false, false),
    output("grouped_hopper_fprop_pair_e4m3", 192, 5, true, false, false),
    output("grouped_hopper_fprop_fast_e5m2", 256, 4, false, true, true),
    output("grouped_hopper_fprop_fast_pair_e5m2", 256, 4, true, true, true),
    output("grouped_hopper_fprop_128_e5m2", 128, 6, false, true, false),
    output("grouped_hopper_fprop_192_e5m2", 192, 5, false, true, false),
    output("grouped_hopper_fprop_pair_e5m2", 192, 5, true, true, false),
    weight("grouped_hopper_wgrad_128_e4m3", 128, 6, false, false),
    weight("grouped_hopper_wgrad_192_e4m3", 192, 5, false, false),
    weight("grouped_hopper_wgrad_pair_e4m3", 192, 5, true, false),
    weight("grouped_hopper_wgrad_128_e5m2", 128, 6, false, true),
    weight("grouped_hopper_wgrad_192_e5m2", 192, 5, false, true),
    weight("grouped_hopper_wgrad_pair_e5m2", 192, 5, true, true),
];

impl Fp8KernelVariant {
    /// Cost of `width` columns: narrow tiles read more per FLOP, and promotion to f32 takes time.
    fn cost(&self, width: usize) -> usize {
        let each = match (self.variant.columns, self.fast) {
            (_, true) => 256,
            (128, _) => 175,
            _ => 230,
        };
        width.div_ceil(self.variant.columns) * each
    }
}

/// The kernel for `width` columns, whose rows of tiles are likely to come in pairs or not.
fn choose(
    op: GroupedOp,
    width: usize,
    paired: bool,
    e5: bool,
    fast: bool,
) -> Option<&'static Fp8KernelVariant> {
    let fits = |k: &&Fp8KernelVariant| {
        k.variant.op == op && k.e5 == e5 && (fast || !k.fast) && (paired || !k.variant.pair)
    };
    // Among equals the last: a pair.
    FP8_VARIANTS.iter().filter(fits).rev().min_by_key(|k| k.cost(width))
}

/// Whether TMA can read its data, and bulk copies its scales if there are many.
fn readable(b: &Fp8Tensor, scales: bool) -> bool {
    b.data.alignment() >= 16 && (!scales || b.scale_inv.alignment() >= 16)
}

/// From a row of scales to the next.
fn stride(b: &Fp8Tensor) -> i32 {
    b.scale_inv.shape().last().map_or(0, |n| *n as i32)
}

impl Fp8GroupedGemm<'_> {
    fn scaled(&self) -> bool {
        self.x.scaling != ScalingMode::PerTensor
    }

    /// Whether the Hopper kernels support it, whatever the tile.
    pub(super) fn suits(&self, kernels: &CudaKernels, z: &GroupedSizes) -> bool {
        kernels.has("grouped/hopper_fp8")
            && self.w.data.dtype() == DType::E4M3
            && z.segments * z.rows * z.k > 0
            // Stores of eight elements; block scales are of 64 columns.
            && z.n.is_multiple_of(if self.scaled() { 64 } else { 8 })
            && readable(self.x, false)
            && readable(self.w, false)
            && all_rows_aligned(self.y, &z.y)
    }

    /// The kernel that supports it, if there is one.
    pub(super) fn hopper(
        &self,
        kernels: &CudaKernels,
        z: &GroupedSizes,
    ) -> Option<&'static Fp8KernelVariant> {
        let e5 = self.x.data.dtype() == DType::E5M2;
        let paired = z.rows / z.segments.max(1) >= 6 * ROWS;
        let fast = self.fast && !self.scaled();
        self.suits(kernels, z).then(|| choose(GroupedOp::FpropFp8, z.n, paired, e5, fast)).flatten()
    }
}

impl Fp8GroupedWgrad<'_> {
    fn scaled(&self) -> bool {
        self.x.scaling != ScalingMode::PerTensor
    }

    /// Whether the Hopper kernels support it, whatever the tile.
    pub(super) fn suits(&self, kernels: &CudaKernels, z: &GroupedSizes) -> bool {
        kernels.has("grouped/hopper_wgrad_fp8")
            && self.x.data.dtype() == DType::E4M3
            && z.rows > 0
            && z.k.is_multiple_of(4)
            && readable(self.dy, self.scaled())
            && readable(self.x, self.scaled())
            && all_rows_aligned(self.dw.0, &z.w)
    }

    /// The kernel that supports it, if there is one.
    pub(super) fn hopper(
        &self,
        kernels: &CudaKernels,
        z: &GroupedSizes,
    ) -> Option<&'static Fp8KernelVariant> {
        let tall = z.n.div_ceil(ROWS);
        let (paired, e5) = (tall.is_multiple_of(2) || tall > 8, self.dy.data.dtype() == DType::E5M2);
        self.suits(kernels, z).then(|| choose(GroupedOp::WgradFp8, z.k, paired, e5, false)).flatten()
    }
}

impl CudaKernels {
    /// The launch's arguments are offsets, counts, x and its scales, w and its scales, y.
    pub(super) fn hopper_grouped_fp8(
        &self,
        l: &Launch,
        g: &Fp8GroupedGemm,
        z: &GroupedSizes,
        segments: Segments,
        variant: &Fp8KernelVariant,
    ) -> Result<()> {
        let (variant, width) = (&variant.variant, z.x.row);
        let b_rows = (variant.columns / variant.blocks()) as u32;
        let m = GroupedHopperArgs {
            a: fp8_tensor_map(l.address(2)?, [width, z.rows, 1, 1], [width, 0, 0], ROWS as u32)?,
            b: fp8_tensor_map(l.address(4)?, [width, z.n, z.segments, 1], [width, z.w.matrix, 0], b_rows)?,
            segments,
            out: l.address(6)?,
            a_scale: l.address(3)?,
            b_scale: l.address(5)?,
            row: z.y.row as i64,
            width: z.n as i32,
            length: z.k as i32,
            block_scaled: g.scaled().into(),
            a_stride: stride(g.x),
            b_stride: stride(g.w),
            ..GroupedHopperArgs::default()
        };
        let tiles = (z.rows / (ROWS * variant.blocks()) + z.segments) * z.n.div_ceil(variant.columns);
        variant.launch_kernel(self, l, tiles, &m)
    }

    /// The launch's arguments are offsets, counts, dy and its scales, x and its scales, dw and the counters if
    /// there are any.
    pub(super) fn hopper_grouped_wgrad_fp8(
        &self,
        l: &Launch,
        g: &Fp8GroupedWgrad,
        z: &GroupedSizes,
        segments: Segments,
        variant: &Fp8KernelVariant,
    ) -> Result<()> {
        let (variant, width) = (&variant.variant, z.x.row);
        let b_rows = (variant.columns / variant.blocks()) as u32;
        let m = GroupedHopperArgs {
            a: fp8_tensor_map(l.address(2)?, [width, z.n, 1, 1], [width, 0, 0], ROWS as u32)?,
            b: fp8_tensor_map(l.address(4)?, [width, z.k, 1, 1], [width, 0, 0], b_rows)?,
            segments,
            out: l.address(6)?,
            counters: if wgrad_counters(variant, z).is_some() { l.address(7)? } else { 0 },
            a_scale: l.address(3)?,
            b_scale: l.address(5)?,
            row: z.w.row as i64,
            matrix: z.w.matrix as i64,
            width: z.k as i32,
            height: z.n as i32,
            accumulate: g.dw.1.into(),
            block_scaled: g.scaled().into(),
            a_stride: stride(g.dy),
            b_stride: stride(g.x),
            ..GroupedHopperArgs::default()
        };
        variant.launch_kernel(self, l, variant.wgrad_tiles(z), &m)
    }
}
