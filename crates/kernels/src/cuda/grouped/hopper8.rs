//! Grouped products of bytes on Hopper cards.

use super::hopper::{Kind, Mapped, ROWS, What, slice, turns, whole};
use super::plain::Segments;
use crate::cuda::tensor_map::byte_map;
use crate::cuda::{CudaKernels, Kernel};
use crate::grouped::GroupedSizes;
use crate::{Bytes, Grouped8, GroupedGrad8, Scaling};
use ferrotron_tensor::{DType, Launch, Result};

/// `GROUPED_HOPPER8(name, what, columns, stages, e5, fast)`, or `.._PAIR`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind8 {
    pub(super) kind: Kind,
    /// The left factor is in E5M2.
    pub(super) e5: bool,
    /// Sums in the matrix unit's narrow registers; no scales of blocks.
    pub(super) fast: bool,
}

const fn output(
    name: &'static str,
    columns: usize,
    stages: usize,
    pair: bool,
    e5: bool,
    fast: bool,
) -> Kind8 {
    let kernel = Kernel { source: "grouped_hopper8", name };
    Kind8 { kind: Kind { kernel, what: What::Output8, columns, stages, pair }, e5, fast }
}

const fn weight(name: &'static str, columns: usize, stages: usize, pair: bool, e5: bool) -> Kind8 {
    let kernel = Kernel { source: "grouped_hopper_grad8", name };
    Kind8 { kind: Kind { kernel, what: What::Weight8, columns, stages, pair }, e5, fast: false }
}

pub(super) const KINDS8: [Kind8; 16] = [
    output("grouped_hopper_output_fast_e4m3", 256, 4, false, false, true),
    output("grouped_hopper_output_fast_pair_e4m3", 256, 4, true, false, true),
    output("grouped_hopper_output_128_e4m3", 128, 6, false, false, false),
    output("grouped_hopper_output_192_e4m3", 192, 5, false, false, false),
    output("grouped_hopper_output_pair_e4m3", 192, 5, true, false, false),
    output("grouped_hopper_output_fast_e5m2", 256, 4, false, true, true),
    output("grouped_hopper_output_fast_pair_e5m2", 256, 4, true, true, true),
    output("grouped_hopper_output_128_e5m2", 128, 6, false, true, false),
    output("grouped_hopper_output_192_e5m2", 192, 5, false, true, false),
    output("grouped_hopper_output_pair_e5m2", 192, 5, true, true, false),
    weight("grouped_hopper_weight_128_e4m3", 128, 6, false, false),
    weight("grouped_hopper_weight_192_e4m3", 192, 5, false, false),
    weight("grouped_hopper_weight_pair_e4m3", 192, 5, true, false),
    weight("grouped_hopper_weight_128_e5m2", 128, 6, false, true),
    weight("grouped_hopper_weight_192_e5m2", 192, 5, false, true),
    weight("grouped_hopper_weight_pair_e5m2", 192, 5, true, true),
];

impl Kind8 {
    /// What `width` columns cost: narrow tiles read more for what they multiply, and sums in f32 take their time.
    fn cost(&self, width: usize) -> usize {
        let each = match (self.kind.columns, self.fast) {
            (_, true) => 256,
            (128, _) => 175,
            _ => 230,
        };
        width.div_ceil(self.kind.columns) * each
    }
}

/// The kernel for `width` columns of the result whose rows of tiles are likely to come in pairs, or not.
fn choose(what: What, width: usize, paired: bool, e5: bool, fast: bool) -> Option<&'static Kind8> {
    let fits =
        |k: &&Kind8| k.kind.what == what && k.e5 == e5 && (fast || !k.fast) && (paired || !k.kind.pair);
    // Of equal ones the last: a pair.
    KINDS8.iter().filter(fits).rev().min_by_key(|k| k.cost(width))
}

/// Can the copy engine reach its bytes, and its scales if there are many?
fn readable(b: &Bytes, scales: bool) -> bool {
    b.data.alignment() >= 16 && (!scales || b.scale_inv.alignment() >= 16)
}

/// From a row of scales to the next.
fn stride(b: &Bytes) -> i32 {
    b.scale_inv.shape().last().map_or(0, |n| *n as i32)
}

impl Grouped8<'_> {
    fn scaled(&self) -> bool {
        self.x.scaling != Scaling::Tensor
    }

    /// Does a kernel that adds up in this way suit it, whatever its tiles?
    pub(super) fn suits(&self, kernels: &CudaKernels, z: &GroupedSizes) -> bool {
        kernels.has("grouped_hopper8")
            && self.w.data.dtype() == DType::E4M3
            && z.segments * z.rows * z.k > 0
            // Stores of eight numbers; 64 columns have one scale.
            && z.n.is_multiple_of(if self.scaled() { 64 } else { 8 })
            && readable(self.x, false)
            && readable(self.w, false)
            && whole(self.y, &z.y)
    }

    /// The kernel that can make it, if one can.
    pub(super) fn hopper(&self, kernels: &CudaKernels, z: &GroupedSizes) -> Option<&'static Kind8> {
        let e5 = self.x.data.dtype() == DType::E5M2;
        let paired = z.rows / z.segments.max(1) >= 6 * ROWS;
        let fast = self.fast && !self.scaled();
        self.suits(kernels, z).then(|| choose(What::Output8, z.n, paired, e5, fast)).flatten()
    }
}

impl GroupedGrad8<'_> {
    fn scaled(&self) -> bool {
        self.x.scaling != Scaling::Tensor
    }

    /// Does a kernel suit it, whatever its tiles?
    pub(super) fn suits(&self, kernels: &CudaKernels, z: &GroupedSizes) -> bool {
        kernels.has("grouped_hopper_grad8")
            && self.x.data.dtype() == DType::E4M3
            && z.rows > 0
            && z.k.is_multiple_of(4)
            && readable(self.dy, self.scaled())
            && readable(self.x, self.scaled())
            && whole(self.dw.0, &z.w)
    }

    /// The kernel that can make it, if one can.
    pub(super) fn hopper(&self, kernels: &CudaKernels, z: &GroupedSizes) -> Option<&'static Kind8> {
        let tall = z.n.div_ceil(ROWS);
        let (paired, e5) = (tall.is_multiple_of(2) || tall > 8, self.dy.data.dtype() == DType::E5M2);
        self.suits(kernels, z).then(|| choose(What::Weight8, z.k, paired, e5, false)).flatten()
    }
}

impl CudaKernels {
    /// The launch's arguments are offsets, counts, x and its scales, w and its scales, y.
    pub(super) fn hopper_grouped8(
        &self,
        l: &Launch,
        g: &Grouped8,
        z: &GroupedSizes,
        segments: Segments,
        kind: &Kind8,
    ) -> Result<()> {
        let (kind, width) = (&kind.kind, z.x.row);
        let b_rows = (kind.columns / kind.blocks()) as u32;
        let m = Mapped {
            a: byte_map(l.address(2)?, [width, z.rows, 1, 1], [width, 0, 0], ROWS as u32)?,
            b: byte_map(l.address(4)?, [width, z.n, z.segments, 1], [width, z.w.matrix, 0], b_rows)?,
            segments,
            out: l.address(6)?,
            a_scale: l.address(3)?,
            b_scale: l.address(5)?,
            row: z.y.row as i64,
            width: z.n as i32,
            length: z.k as i32,
            scaled: g.scaled().into(),
            a_stride: stride(g.x),
            b_stride: stride(g.w),
            ..Mapped::default()
        };
        let tiles = (z.rows / (ROWS * kind.blocks()) + z.segments) * z.n.div_ceil(kind.columns);
        kind.queue(self, l, tiles, &m)
    }

    /// The launch's arguments are offsets, counts, dy and its scales, x and its scales, dw and the turns if there are any.
    pub(super) fn hopper_grouped_grad8(
        &self,
        l: &Launch,
        g: &GroupedGrad8,
        z: &GroupedSizes,
        segments: Segments,
        kind: &Kind8,
    ) -> Result<()> {
        let (kind, width, slice) = (&kind.kind, z.x.row, slice(z));
        let b_rows = (kind.columns / kind.blocks()) as u32;
        let m = Mapped {
            a: byte_map(l.address(2)?, [width, z.n, 1, 1], [width, 0, 0], ROWS as u32)?,
            b: byte_map(l.address(4)?, [width, z.k, 1, 1], [width, 0, 0], b_rows)?,
            segments,
            out: l.address(6)?,
            turns: if turns(kind, z).is_some() { l.address(7)? } else { 0 },
            a_scale: l.address(3)?,
            b_scale: l.address(5)?,
            row: z.w.row as i64,
            matrix: z.w.matrix as i64,
            width: z.k as i32,
            height: z.n as i32,
            slice: slice as i32,
            accumulate: g.dw.1.into(),
            scaled: g.scaled().into(),
            a_stride: stride(g.dy),
            b_stride: stride(g.x),
            ..Mapped::default()
        };
        let down = z.n.div_ceil(ROWS * kind.blocks());
        let tiles = (z.rows / slice + z.segments) * down * z.k.div_ceil(kind.columns);
        kind.queue(self, l, tiles, &m)
    }
}
