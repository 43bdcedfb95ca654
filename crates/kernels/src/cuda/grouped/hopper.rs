//! Grouped products on Hopper cards: when the kernels built on its own instructions can make them, and how they are
//! launched.

use super::plain::Segments;
use crate::cuda::gemm::even;
use crate::cuda::groups::blocks;
use crate::cuda::tensor_map::{TensorMap, tensor_map};
use crate::cuda::{CudaKernels, Grid, Kernel};
use crate::grouped::{GroupedSizes, Steps};
use crate::{Grouped, GroupedGrad};
use ferrotron_tensor::{DType, Launch, Result, Tensor};

/// Rows of a tile, and length of a step of the sums.
pub(super) const ROWS: usize = 128;
const STEP: usize = 64;
/// What comes before the scales in shared memory, but for results on their way out: `LEAVING_AT` of hopper.cuh.
const LEAVING_AT: usize = 128 + 4 * (3 * 1024 + 64);
/// Rows of a segment that a weight gradient sums in one go: as many for all, so that few are left for the end.
const SLICES: usize = 64;

/// `GroupedMapped` of hopper.cuh.
#[repr(C, align(64))]
#[derive(Clone, Copy, Default)]
pub(super) struct Mapped {
    pub(super) a: TensorMap,
    pub(super) b: TensorMap,
    pub(super) segments: Segments,
    pub(super) out: u64,
    pub(super) bias: u64,
    pub(super) turns: u64,
    pub(super) a_scale: u64,
    pub(super) b_scale: u64,
    pub(super) row: i64,
    pub(super) matrix: i64,
    pub(super) width: i32,
    pub(super) height: i32,
    pub(super) length: i32,
    pub(super) slice: i32,
    pub(super) accumulate: i32,
    pub(super) scaled: i32,
    pub(super) a_stride: i32,
    pub(super) b_stride: i32,
    pub(super) spare: [i32; 4],
}

// The source says the same.
const _: () = assert!(size_of::<Mapped>() == 384);

/// What is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Output,
    Input,
    Weight,
    Output8,
    Weight8,
}

/// `GROUPED_HOPPER(name, what, columns, stages)`, or `.._PAIR`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) kernel: Kernel,
    pub(super) what: What,
    /// Columns of a tile.
    pub(super) columns: usize,
    pub(super) stages: usize,
    /// Blocks in clusters of two, whose tiles lie one below the other.
    pub(super) pair: bool,
}

const fn kind(name: &'static str, what: What, columns: usize, stages: usize, pair: bool) -> Kind {
    let source = if matches!(what, What::Weight) { "grouped_hopper_grad" } else { "grouped_hopper" };
    Kind { kernel: Kernel { source, name }, what, columns, stages, pair }
}

pub(super) const KINDS: [Kind; 12] = [
    kind("grouped_hopper_output_128_bf16", What::Output, 128, 6, false),
    kind("grouped_hopper_output_192_bf16", What::Output, 192, 5, false),
    kind("grouped_hopper_output_256_bf16", What::Output, 256, 4, false),
    kind("grouped_hopper_output_pair_bf16", What::Output, 256, 4, true),
    kind("grouped_hopper_input_128_bf16", What::Input, 128, 6, false),
    kind("grouped_hopper_input_192_bf16", What::Input, 192, 5, false),
    kind("grouped_hopper_input_256_bf16", What::Input, 256, 4, false),
    kind("grouped_hopper_input_pair_bf16", What::Input, 256, 4, true),
    kind("grouped_hopper_weight_128_bf16", What::Weight, 128, 6, false),
    kind("grouped_hopper_weight_192_bf16", What::Weight, 192, 5, false),
    kind("grouped_hopper_weight_256_bf16", What::Weight, 256, 4, false),
    kind("grouped_hopper_weight_pair_bf16", What::Weight, 256, 4, true),
];

impl Kind {
    /// What `width` columns cost, in columns of the widest tiles: narrow ones read more for what they multiply.
    fn cost(&self, width: usize) -> usize {
        let each = match self.columns {
            128 => 160,
            192 => 204,
            _ => 256,
        };
        width.div_ceil(self.columns) * each
    }

    pub(super) fn blocks(&self) -> usize {
        if self.pair { 2 } else { 1 }
    }

    /// `BYTES` of hopper.cuh.
    fn shared(&self) -> u32 {
        let scales = if self.what == What::Weight8 { 4 } else { 0 };
        let leaving = if self.columns == 192 { 1024 } else { 2048 };
        let lines = self.stages * (ROWS + self.columns);
        ((LEAVING_AT + 8 * leaving + lines * scales).next_multiple_of(1024) + lines * STEP * 2) as u32
    }

    /// Queues it for at most so many tiles.
    pub(super) fn queue(&self, kernels: &CudaKernels, l: &Launch, tiles: usize, m: &Mapped) -> Result<()> {
        let most = kernels.multiprocessors() as usize / self.blocks();
        // Blocks that have no tile may still have rows to blank.
        let count = blocks(self.kernel.name, tiles.clamp(1, most.max(1)) * self.blocks(), 1)?;
        let grid = Grid { blocks: [count, 1, 1], threads: 384, shared: self.shared() };
        kernels.queue(l, self.kernel, grid, m)
    }
}

/// The kernel for `width` columns of the result whose rows of tiles are likely to come in pairs, or not.
fn choose(what: What, width: usize, paired: bool) -> Option<&'static Kind> {
    let all = KINDS.iter().filter(|k| k.what == what && (paired || !k.pair));
    // Of equal ones the last: a pair.
    all.rev().min_by_key(|k| k.cost(width))
}

/// Do all rows start on 16 bytes?
pub(super) fn whole(t: &Tensor, steps: &Steps) -> bool {
    even(t, steps.row) && even(t, steps.matrix)
}

impl Grouped<'_> {
    /// The kernel that can make it, if one can.
    pub(super) fn hopper(&self, kernels: &CudaKernels, z: &GroupedSizes) -> Option<&'static Kind> {
        let fits = self.x.dtype() == DType::BF16
            && kernels.has("grouped_hopper")
            && z.segments * z.rows * z.k > 0
            && z.n.is_multiple_of(8)
            && whole(self.x, &z.x)
            && whole(self.w, &z.w)
            && whole(self.y, &z.y)
            && self.bias.is_none_or(|b| b.alignment() >= 4);
        if !fits {
            return None;
        }
        let what = if self.as_stored { What::Input } else { What::Output };
        // A segment's last tile may have no other below it.
        choose(what, z.n, z.rows / z.segments >= 6 * ROWS)
    }
}

impl GroupedGrad<'_> {
    /// The kernel that can make it, if one can.
    pub(super) fn hopper(&self, kernels: &CudaKernels, z: &GroupedSizes) -> Option<&'static Kind> {
        let fits = self.x.dtype() == DType::BF16
            && kernels.has("grouped_hopper_grad")
            && z.rows > 0
            && z.k.is_multiple_of(4)
            && whole(self.x, &z.x)
            && whole(self.dy, &z.y)
            && whole(self.dw.0, &z.w);
        let tall = z.n.div_ceil(ROWS);
        fits.then(|| choose(What::Weight, z.k, tall.is_multiple_of(2) || tall > 8)).flatten()
    }
}

/// Rows that a weight gradient sums in one go: known from the sizes alone, so that sums are the same on every card.
pub(super) fn slice(z: &GroupedSizes) -> usize {
    (z.rows / SLICES).clamp(1024, 8192).next_multiple_of(2 * STEP)
}

/// How many turns the tiles of a weight gradient count, if any segment may be long enough to be cut.
pub(super) fn turns(kind: &Kind, z: &GroupedSizes) -> Option<usize> {
    let tiles = z.n.div_ceil(ROWS) * z.k.div_ceil(kind.columns);
    (z.rows > slice(z)).then_some(z.segments * tiles * 2)
}

impl CudaKernels {
    /// The launch's arguments are offsets, counts, x, w, y and the bias if there is one.
    pub(super) fn hopper_grouped(
        &self,
        l: &Launch,
        g: &Grouped,
        z: &GroupedSizes,
        segments: Segments,
        kind: &Kind,
    ) -> Result<()> {
        let (stored, rows) = match kind.what {
            What::Output => ([z.k, z.n], kind.columns / kind.blocks()),
            _ => ([z.n, z.k], STEP),
        };
        let m = Mapped {
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
            ..Mapped::default()
        };
        let tiles = (z.rows / (ROWS * kind.blocks()) + z.segments) * z.n.div_ceil(kind.columns);
        kind.queue(self, l, tiles, &m)
    }

    /// The launch's arguments are offsets, counts, dy, x, dw and the turns if there are any.
    pub(super) fn hopper_grouped_grad(
        &self,
        l: &Launch,
        g: &GroupedGrad,
        z: &GroupedSizes,
        segments: Segments,
        kind: &Kind,
    ) -> Result<()> {
        let slice = slice(z);
        let m = Mapped {
            a: tensor_map(l.address(2)?, [z.n, z.rows, 1, 1], [z.y.row, 0, 0], STEP as u32)?,
            b: tensor_map(l.address(3)?, [z.k, z.rows, 1, 1], [z.x.row, 0, 0], STEP as u32)?,
            segments,
            out: l.address(4)?,
            turns: if turns(kind, z).is_some() { l.address(5)? } else { 0 },
            row: z.w.row as i64,
            matrix: z.w.matrix as i64,
            width: z.k as i32,
            height: z.n as i32,
            slice: slice as i32,
            accumulate: g.dw.1.into(),
            ..Mapped::default()
        };
        let down = z.n.div_ceil(ROWS * kind.blocks());
        let tiles = (z.rows / slice + z.segments) * down * z.k.div_ceil(kind.columns);
        kind.queue(self, l, tiles, &m)
    }
}
