//! LayerNorm and RMSNorm, optionally with a residual sum and the amax of the output.

use super::{CENTRED, RowGroups, VECTORIZED, VECTORIZED_GAIN, optional, threads_for_any_width};
use crate::cpu::rows::Rows;
use crate::cuda::args::kernel_args;
use crate::cuda::row_grid::{blocks, columns, rows_aligned16};
use crate::cuda::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::{Norm, NormForward};
use ferrotron_tensor::{DType, Result, Stream, Tensor, read, write};

/// Chunks of a row that a thread has at most.
const MAX_CHUNKS: usize = 4;
/// SMs of the GPU that the numbers below were tuned on. They affect no result.
const PROCESSORS: usize = 132;

/// Threads of a block.
fn threads(dtype: DType, width: usize, add: bool) -> usize {
    match (add, width * dtype.size() <= 512) {
        (false, _) => 512,
        (true, true) => 256,
        (true, false) => 128,
    }
}

/// Threads of a block of RMSNorm alone, without a prefetch ring.
const SHORT_THREADS: usize = 256;

/// RowGroups of such a block, if they fill it, with as many chunks as a thread may have. The sums are those of other blocks.
fn short_blocks(teams: RowGroups) -> Option<RowGroups> {
    let fits = teams.chunks == MAX_CHUNKS && SHORT_THREADS.is_multiple_of(teams.lanes);
    fits.then(|| RowGroups { count: SHORT_THREADS / teams.lanes, ..teams })
}

/// Blocks for so many rows: persistent ones with equal shares, or, with a residual sum, short ones.
fn count(teams: RowGroups, rows: usize, add: bool) -> usize {
    let all = rows.div_ceil(teams.count);
    let turns = match (add, teams.lanes > 32, teams.chunks) {
        (true, true, _) => 1,
        (true, false, _) => 2,
        (false, _, 1) => all.div_ceil(3 * PROCESSORS),
        (false, ..) => all.div_ceil(PROCESSORS),
    };
    all.div_ceil(turns.max(1))
}

kernel_args! {
    header "args/norm_forward.cuh", includes [];

    /// LayerNorm and RMSNorm, of x or of x + residual.
    struct NormForwardArgs {
        x: u64,
        residual: u64,
        /// x + residual as stored.
        sum: u64,
        y: u64,
        gamma: u64,
        /// 0 where there is no bias.
        beta: u64,
        /// f32 `[rows]`, saved for the backward pass; `mean` is 0 for RMSNorm.
        mean: u64,
        rstd: u64,
        /// f32 `[1]`, raised to the amax of y.
        amax: u64,
        /// Strides of groups of `inner` rows, and of rows in a group.
        x_outer: i64,
        x_inner: i64,
        y_outer: i64,
        y_inner: i64,
        rows: i64,
        inner: i64,
        width: i32,
        /// Threads of a team, which has a row.
        lanes: u32,
        /// `Flag` of norm/common.cuh.
        flags: u32,
        eps: f32,
        /// 1 where gamma is stored minus one, else 0.
        one: f32,
        pad: u32,
    }
}

/// Arguments of both forward kernels; `fused` are the residual and the sum.
pub(super) struct Forward<'a> {
    pub(super) op: &'static str,
    pub(super) norm: Norm,
    pub(super) n: &'a NormForward<'a>,
    pub(super) x_rows: Rows,
    pub(super) y_rows: Rows,
    pub(super) fused: Option<[&'a Tensor; 2]>,
    /// Raised to the amax of y; bf16 only.
    pub(super) amax: Option<&'a Tensor>,
}

/// The kernel for a number of chunks, and its prefetch stages.
fn kernel_for_chunks(op: &'static str, dtype: DType, add: bool, chunks: usize) -> Result<(Kernel, usize)> {
    Ok(match (chunks, add) {
        (1, false) => (typed!(op, dtype, "norm/forward", "norm_1")?, 4),
        (1, true) => (typed!(op, dtype, "norm/forward", "add_norm_1")?, 4),
        (2, false) => (typed!(op, dtype, "norm/forward", "norm_2")?, 4),
        (2, true) => (typed!(op, dtype, "norm/forward", "add_norm_2")?, 4),
        (3, false) => (typed!(op, dtype, "norm/forward", "norm_3")?, 3),
        (3, true) => (typed!(op, dtype, "norm/forward", "add_norm_3")?, 3),
        (_, false) => (typed!(op, dtype, "norm/forward", "norm_4")?, 3),
        (_, true) => (typed!(op, dtype, "norm/forward", "add_norm_4")?, 3),
    })
}

fn any_width(op: &'static str, dtype: DType, add: bool) -> Result<Kernel> {
    if add {
        typed!(op, dtype, "norm/forward", "add_norm_long")
    } else {
        typed!(op, dtype, "norm/forward", "norm_long")
    }
}

/// The bf16 kernel that also computes the amax, if it is wanted.
fn with_amax(kernel: Kernel, wanted: bool) -> Kernel {
    let name = match kernel.name {
        name if !wanted => name,
        "norm_1_bf16" => "norm_1_amax",
        "norm_2_bf16" => "norm_2_amax",
        "norm_3_bf16" => "norm_3_amax",
        "norm_4_bf16" => "norm_4_amax",
        "norm_long_bf16" => "norm_long_amax",
        "add_norm_1_bf16" => "add_norm_1_amax",
        "add_norm_2_bf16" => "add_norm_2_amax",
        "add_norm_3_bf16" => "add_norm_3_amax",
        "add_norm_4_bf16" => "add_norm_4_amax",
        "add_norm_long_bf16" => "add_norm_long_amax",
        other => other,
    };
    Kernel { name, ..kernel }
}

impl CudaKernels {
    pub(super) fn launch_forward(&self, s: &Stream, f: &Forward) -> Result<()> {
        let Forward { op, norm, n, x_rows, y_rows, fused, amax } = *f;
        let (dtype, rows) = (n.x.dtype(), x_rows.count());
        let width = columns(op, x_rows.width)?;
        let general = with_amax(any_width(op, dtype, fused.is_some())?, amax.is_some());
        if x_rows.elements() == 0 {
            return Ok(());
        }
        let mut args = vec![read(n.x), write(n.y), read(n.gamma), write(n.rstd)];
        let mut add = |arg| {
            args.push(arg);
            args.len() - 1
        };
        let beta = n.beta.map(|t| add(read(t)));
        let mean = n.mean.map(|t| add(write(t)));
        let residual = fused.map(|[t, _]| add(read(t)));
        let sum = fused.map(|[_, t]| add(write(t)));
        let most = amax.map(|t| add(write(t)));
        s.launch(op, &args, |l| {
            let mut a = NormForwardArgs {
                x: l.address(0)?,
                residual: optional(l, residual)?,
                sum: optional(l, sum)?,
                y: l.address(1)?,
                gamma: l.address(2)?,
                beta: optional(l, beta)?,
                mean: optional(l, mean)?,
                rstd: l.address(3)?,
                amax: optional(l, most)?,
                x_outer: x_rows.outer_stride as i64,
                x_inner: x_rows.inner_stride as i64,
                y_outer: y_rows.outer_stride as i64,
                y_inner: y_rows.inner_stride as i64,
                rows: rows as i64,
                inner: x_rows.inner as i64,
                width,
                lanes: 0,
                flags: if norm.subtract_mean { CENTRED } else { 0 },
                eps: norm.eps,
                one: if norm.zero_centred { 1.0 } else { 0.0 },
                pad: 0,
            };
            if rows_aligned16(dtype, &[(a.x, x_rows), (a.y, y_rows), (a.residual, x_rows), (a.sum, x_rows)]) {
                a.flags |= VECTORIZED;
            }
            if (a.gamma | a.beta).is_multiple_of(16) {
                a.flags |= VECTORIZED_GAIN;
            }
            let add = fused.is_some();
            let teams = RowGroups::of(dtype, x_rows.width, MAX_CHUNKS, threads(dtype, x_rows.width, add));
            let aligned = a.flags & (VECTORIZED | VECTORIZED_GAIN) == VECTORIZED | VECTORIZED_GAIN;
            let (tensors, mut fitting) = (if add { 2 } else { 1 }, None);
            let plain = !add && amax.is_none() && n.beta.is_none() && !norm.subtract_mean;
            if let Some(short) = teams.filter(|_| aligned && plain).and_then(short_blocks) {
                let kernel = typed!(op, dtype, "norm/forward", "rms_norm_4")?;
                a.lanes = short.lanes as u32;
                let (threads, all) = (short.threads() as u32, rows.div_ceil(short.count));
                let grid = LaunchConfig { blocks: [blocks(op, all)?, 1, 1], threads, shared: 0 };
                return self.launch_kernel(l, kernel, grid, &a);
            }
            if let Some(teams) = teams.filter(|_| aligned) {
                let (kernel, stages) = kernel_for_chunks(op, dtype, add, teams.chunks)?;
                let teams = teams.within(self.modules.shared_memory(), stages, tensors);
                fitting = teams.map(|teams| (teams, with_amax(kernel, amax.is_some()), stages));
            }
            let Some((teams, kernel, stages)) = fitting else {
                let threads = threads_for_any_width(dtype, x_rows.width);
                let grid = LaunchConfig { blocks: [blocks(op, rows)?, 1, 1], threads, shared: 0 };
                return self.launch_kernel(l, general, grid, &a);
            };
            a.lanes = teams.lanes as u32;
            let grid = LaunchConfig {
                blocks: [blocks(op, count(teams, rows, add))?, 1, 1],
                threads: teams.threads() as u32,
                shared: teams.ring(stages, tensors) as u32,
            };
            self.launch_kernel(l, kernel, grid, &a)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_blocks_keep_the_order_of_sums() {
        let of = |width| RowGroups::of(DType::BF16, width, MAX_CHUNKS, 512);
        assert_eq!(of(4096).and_then(short_blocks), Some(RowGroups { chunks: 4, lanes: 128, count: 2 }));
        assert_eq!(of(1024).and_then(short_blocks), Some(RowGroups { chunks: 4, lanes: 32, count: 8 }));
        // 160 threads do not fill a block, and heads have fewer chunks.
        assert_eq!(of(5120).and_then(short_blocks), None);
        assert_eq!(of(128).and_then(short_blocks), None);
    }
}
