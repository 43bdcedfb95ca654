//! Merges partial attention results (context parallelism).

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::row_grid::columns;
use super::{CudaKernels, typed};
use crate::attention::merge::check_merge;
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

kernel_args! {
    header "args/attention_merge.cuh", includes [];

    /// Merges attention over more keys into a running result.
    struct MergeArgs {
        /// f32 `[rows, width]` and f32 `[rows]`, updated in place.
        out: u64,
        lse: u64,
        /// What is merged: `[rows, width]` and f32 `[rows]`.
        part: u64,
        part_lse: u64,
        rows: i64,
        width: i32,
        vectorized: u32,
    }
}

/// Rows of a block of 256 threads, eight to a row.
const ROWS: usize = 32;

impl CudaKernels {
    pub(super) fn launch_merge_attention(
        &self,
        s: &Stream,
        out: &Tensor,
        lse: &Tensor,
        part: &Tensor,
        part_lse: &Tensor,
    ) -> Result<()> {
        const OP: &str = "merge_attention";
        let [rows, width] = check_merge(OP, out, lse, part, part_lse)?;
        let kernel = typed!(OP, part.dtype(), "attention_merge", "attention_merge")?;
        let grid = line(blocks(OP, rows, ROWS)?, 256);
        s.launch(OP, &[write(out), write(lse), read(part), read(part_lse)], |l| {
            let args = MergeArgs {
                out: l.address(0)?,
                lse: l.address(1)?,
                part: l.address(2)?,
                part_lse: l.address(3)?,
                rows: rows as i64,
                width: columns(OP, width)?,
                vectorized: (width.is_multiple_of(4) && aligned16(&[l.address(0)?, l.address(2)?])).into(),
            };
            self.launch_kernel(l, kernel, grid, &args)
        })
    }
}
