//! Backward pass of LayerNorm and RMSNorm.

use super::{RowGroups, VECTORIZED, VECTORIZED_GAIN, optional, threads_for_any_width};
use crate::cuda::args::kernel_args;
use crate::cuda::row_grid::{blocks, columns, rows_aligned16};
use crate::cuda::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::{Norm, NormBackward};
use ferrotron_tensor::{DType, Result, Stream, read, write};

/// Chunks of a row that a thread has at most, and threads of a block.
const MAX_CHUNKS: usize = 3;
const THREADS: usize = 512;
/// Blocks at most, each with a partial sum: a full wave on 132 SMs. The same on every GPU, because the order of sums
/// depends on it, and on the number of teams, of which blocks with 99 KiB of shared memory may have fewer.
const PARTS: usize = 132;

kernel_args! {
    header "args/norm_backward.cuh", includes [];

    /// Backward pass of LayerNorm and RMSNorm.
    struct NormBackwardArgs {
        x: u64,
        gamma: u64,
        /// f32 `[rows]` from the forward pass; `mean` is 0 for RMSNorm.
        mean: u64,
        rstd: u64,
        dy: u64,
        /// Added to dx where it is not 0.
        residual: u64,
        dx: u64,
        /// f32 `[groups, width]`: partial sums of dγ and dβ.
        gamma_parts: u64,
        beta_parts: u64,
        /// Strides of groups of `inner` rows, and of rows in a group.
        x_outer: i64,
        x_inner: i64,
        dy_outer: i64,
        dy_inner: i64,
        dx_outer: i64,
        dx_inner: i64,
        rows: i64,
        inner: i64,
        width: i32,
        /// Threads of a team, which has a row.
        lanes: u32,
        /// `Flag` of norm/common.cuh.
        flags: u32,
        /// 1 where gamma is stored minus one, else 0.
        one: f32,
    }
}

/// Partial sums of the gain's gradient: blocks that share the rows equally.
pub(super) fn groups(dtype: DType, rows: usize, width: usize) -> usize {
    let teams = RowGroups::of(dtype, width, MAX_CHUNKS, THREADS).map_or(1, |t| t.count);
    let all = rows.div_ceil(teams);
    all.div_ceil(all.div_ceil(PARTS).max(1))
}

/// The kernel for a number of chunks, and its prefetch stages.
fn kernel_for_chunks(op: &'static str, dtype: DType, layer: bool, chunks: usize) -> Result<(Kernel, usize)> {
    Ok(match (chunks, layer) {
        (1, false) => (typed!(op, dtype, "norm/backward", "rms_backward_1")?, 4),
        (1, true) => (typed!(op, dtype, "norm/backward", "layer_backward_1")?, 4),
        (2, false) => (typed!(op, dtype, "norm/backward", "rms_backward_2")?, 3),
        (2, true) => (typed!(op, dtype, "norm/backward", "layer_backward_2")?, 3),
        (_, false) => (typed!(op, dtype, "norm/backward", "rms_backward_3")?, 2),
        (_, true) => (typed!(op, dtype, "norm/backward", "layer_backward_3")?, 2),
    })
}

/// For rows of any width: the kernel for `dx`, and the one for the partial sums.
fn any_width(op: &'static str, dtype: DType, layer: bool) -> Result<[Kernel; 2]> {
    Ok(if layer {
        [
            typed!(op, dtype, "norm/backward", "layer_backward_long")?,
            typed!(op, dtype, "norm/backward", "layer_backward_parts")?,
        ]
    } else {
        [
            typed!(op, dtype, "norm/backward", "rms_backward_long")?,
            typed!(op, dtype, "norm/backward", "rms_backward_parts")?,
        ]
    })
}

impl CudaKernels {
    pub(super) fn launch_backward(&self, s: &Stream, norm: Norm, n: &NormBackward) -> Result<()> {
        const OP: &str = "norm_backward";
        let dtype = n.x.dtype();
        let [x_rows, dy_rows, dx_rows] = n.check(OP, norm, |rows, width| groups(dtype, rows, width))?;
        let rows = x_rows.count();
        let width = columns(OP, x_rows.width)?;
        let [general, general_parts] = any_width(OP, dtype, norm.subtract_mean)?;
        if x_rows.elements() == 0 {
            return Ok(());
        }
        let mut args = vec![read(n.x), read(n.gamma), read(n.rstd), read(n.dy), write(n.dx), write(n.dgamma)];
        let mut add = |arg| {
            args.push(arg);
            args.len() - 1
        };
        let mean = n.mean.map(|t| add(read(t)));
        let dbeta = n.dbeta.map(|t| add(write(t)));
        let residual = n.residual.map(|t| add(read(t)));
        let groups = blocks(OP, groups(dtype, rows, x_rows.width))?;
        s.launch(OP, &args, |l| {
            let mut a = NormBackwardArgs {
                x: l.address(0)?,
                gamma: l.address(1)?,
                mean: optional(l, mean)?,
                rstd: l.address(2)?,
                dy: l.address(3)?,
                residual: optional(l, residual)?,
                dx: l.address(4)?,
                gamma_parts: l.address(5)?,
                beta_parts: optional(l, dbeta)?,
                x_outer: x_rows.outer_stride as i64,
                x_inner: x_rows.inner_stride as i64,
                dy_outer: dy_rows.outer_stride as i64,
                dy_inner: dy_rows.inner_stride as i64,
                dx_outer: dx_rows.outer_stride as i64,
                dx_inner: dx_rows.inner_stride as i64,
                rows: rows as i64,
                inner: x_rows.inner as i64,
                width,
                lanes: 0,
                flags: 0,
                one: if norm.zero_centred { 1.0 } else { 0.0 },
            };
            if rows_aligned16(
                dtype,
                &[(a.x, x_rows), (a.dy, dy_rows), (a.dx, dx_rows), (a.residual, dx_rows)],
            ) {
                a.flags |= VECTORIZED;
            }
            if a.gamma.is_multiple_of(16) {
                a.flags |= VECTORIZED_GAIN;
            }
            let aligned = a.flags & (VECTORIZED | VECTORIZED_GAIN) == VECTORIZED | VECTORIZED_GAIN;
            let mut fitting = None;
            if let Some(teams) = RowGroups::of(dtype, x_rows.width, MAX_CHUNKS, THREADS).filter(|_| aligned) {
                let (kernel, stages) = kernel_for_chunks(OP, dtype, norm.subtract_mean, teams.chunks)?;
                let teams = teams.within(self.modules.shared_memory(), stages, 3);
                fitting = teams.map(|teams| (teams, kernel, stages));
            }
            let Some((teams, kernel, stages)) = fitting else {
                let threads = threads_for_any_width(dtype, x_rows.width);
                self.launch_kernel(
                    l,
                    general,
                    LaunchConfig { blocks: [blocks(OP, rows)?, 1, 1], threads, shared: 0 },
                    &a,
                )?;
                let across = blocks(OP, x_rows.width.div_ceil(256))?;
                let grid = LaunchConfig { blocks: [across, groups, 1], threads: 256, shared: 0 };
                return self.launch_kernel(l, general_parts, grid, &a);
            };
            a.lanes = teams.lanes as u32;
            let shared = teams.ring(stages, 3) as u32;
            let grid = LaunchConfig { blocks: [groups, 1, 1], threads: teams.threads() as u32, shared };
            self.launch_kernel(l, kernel, grid, &a)
        })
    }
}
