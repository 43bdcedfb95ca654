//! Rotary position embedding.

use super::args::kernel_args;
use super::row_grid::{blocks, columns, rows_aligned16, vec_width};
use super::{CudaKernels, LaunchConfig, typed};
use crate::{Rope, RopeKernels, RopeStyle};
use ferrotron_tensor::{Result, Stream, read, shape_error, write};

const INVERSE: u32 = 1;
const VECTORIZED: u32 = 2;
const VECTORIZED_TABLES: u32 = 4;

/// Heads that a thread rotates with the cosines and sines it has read; as in rope.cu.
const HEADS: usize = 4;
/// Pairs of a head at most that one warp moves from interleaved to halves.
const ACROSS: usize = 128;
/// Pairs of a head at most that a block moves through shared memory, 8 bytes each.
const ACROSS_LONG: usize = 12 << 10;

kernel_args! {
    header "args/rope.cuh", includes [];

    /// Rotary position embedding, in place.
    struct RopeArgs {
        x: u64,
        /// f32 `[places, half]`.
        cos: u64,
        sin: u64,
        /// i32 `[tokens]`.
        positions: u64,
        fault: u64,
        tokens: i64,
        token_stride: i64,
        head_stride: i64,
        /// Rows of the tables.
        places: i32,
        heads: i32,
        /// Pairs of channels of a head.
        half: i32,
        /// Chunks of pairs of a head, and groups of heads of a token.
        chunks: i32,
        groups: i32,
        /// Threads that share a head.
        lanes: u32,
        /// `Flag` of rope.cu.
        flags: u32,
        pad: u32,
    }
}

impl RopeKernels for CudaKernels {
    fn rope(&self, s: &Stream, r: &Rope) -> Result<()> {
        const OP: &str = "rope";
        let (heads, half) = r.check(OP)?;
        let dtype = r.x.dtype();
        // Chunks of pairs of a head, threads of a head, and what halves must be divisible by for vectorized accesses.
        let across = r.style == RopeStyle::PairsToHalves;
        let chunk = if across { 4 } else { vec_width(dtype) };
        let chunks = half.div_ceil(chunk);
        let groups = heads.inner.div_ceil(HEADS);
        let lanes = chunks.next_power_of_two() as u32;
        let (kernel, work, threads, shared) = match r.style {
            RopeStyle::Half => {
                let work = heads.outer * groups * chunks;
                (typed!(OP, dtype, "rope", "rope_halves")?, work.div_ceil(256), 256, 0)
            }
            RopeStyle::Interleaved => {
                let work = heads.outer * groups * chunks;
                (typed!(OP, dtype, "rope", "rope_pairs")?, work.div_ceil(256), 256, 0)
            }
            RopeStyle::PairsToHalves if half <= ACROSS => {
                let per_block = 256 / lanes as usize;
                (typed!(OP, dtype, "rope", "rope_across")?, heads.count().div_ceil(per_block), 256, 0)
            }
            RopeStyle::PairsToHalves if half <= ACROSS_LONG => {
                (typed!(OP, dtype, "rope", "rope_across_long")?, heads.count(), 256, 8 * half as u32)
            }
            RopeStyle::PairsToHalves => {
                return shape_error(OP, format!("{half} pairs in a head are more than {ACROSS_LONG}"));
            }
        };
        if half == 0 || heads.elements() == 0 {
            return Ok(());
        }
        let grid = LaunchConfig { blocks: [blocks(OP, work)?, 1, 1], threads, shared };
        let (places, half_i32) = (columns(OP, r.cos.numel() / half)?, columns(OP, half)?);
        let heads_i32 = columns(OP, heads.inner)?;
        s.launch(OP, &[write(r.x), read(r.cos), read(r.sin), read(r.positions)], |l| {
            let mut a = RopeArgs {
                x: l.address(0)?,
                cos: l.address(1)?,
                sin: l.address(2)?,
                positions: l.address(3)?,
                fault: l.fault()?,
                tokens: heads.outer as i64,
                token_stride: heads.outer_stride as i64,
                head_stride: heads.inner_stride as i64,
                places,
                heads: heads_i32,
                half: half_i32,
                chunks: columns(OP, chunks)?,
                groups: columns(OP, groups)?,
                lanes,
                flags: if r.inverse { INVERSE } else { 0 },
                pad: 0,
            };
            // The second half starts `half` channels on; interleaved pairs have no second half.
            let split = r.style == RopeStyle::Interleaved || half.is_multiple_of(chunk);
            if split && rows_aligned16(dtype, &[(a.x, heads)]) {
                a.flags |= VECTORIZED;
            }
            if (a.cos | a.sin).is_multiple_of(16) && half.is_multiple_of(4) {
                a.flags |= VECTORIZED_TABLES;
            }
            self.launch_kernel(l, kernel, grid, &a)
        })
    }
}
