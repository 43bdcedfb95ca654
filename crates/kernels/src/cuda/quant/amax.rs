//! Amax kernels, and the scale update of delayed scaling.

use super::input;
use super::stack::stacked;
use crate::DelayedUpdate;
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{aligned16, blocks, line};
use crate::cuda::{CudaKernels, Kernel, LaunchConfig};
use crate::quant::check::{check_delayed, matrix, one};
use crate::quant::stack::amax_sizes;
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

/// Columns and rows of a thread block, as in amax.cu.
const ACROSS: usize = 256;
const DOWN: usize = 64;
const THREADS: u32 = 256;
/// Tensors of a block of `delayed_update`, and its threads.
const TENSORS: usize = 32;
const DELAYED_THREADS: u32 = 512;

kernel_args! {
    header "args/quant_amax.cuh", includes [];

    /// Amax of a matrix, or of each matrix of a stack.
    struct AmaxArgs {
        x: u64,
        /// f32 `[matrices]`: maximum with its previous value.
        amax: u64,
        rows: i64,
        width: i64,
        stride: i64,
        /// Width of the last row: a contiguous tensor is viewed as rows of a fixed width.
        last: i64,
        /// Stride between matrices of a stack.
        step: i64,
        /// Blocks along the columns.
        across: u32,
        vectorized: u32,
    }

    /// Updates amax histories and scales of delayed scaling.
    struct DelayedArgs {
        /// f32 `[len, n]`: row 0 is this step's amax.
        history: u64,
        /// f32 `[n]`: this step's amax over all ranks.
        reduced: u64,
        /// f32 `[n]`: largest value of each tensor's format.
        largest: u64,
        /// f32 `[n]`.
        scale: u64,
        len: i64,
        /// Tensors.
        n: i64,
        /// 2^-margin.
        factor: f32,
        /// Scales follow the last amax instead of the largest of the history.
        most_recent: u32,
    }
}

impl CudaKernels {
    pub(super) fn launch_amax(&self, s: &Stream, x: &Tensor, amax: &Tensor) -> Result<()> {
        const OP: &str = "amax";
        let view = matrix(OP, x)?;
        one(OP, amax)?;
        let kernel = input!(OP, x.dtype(), "quant/amax", "amax")?;
        let (mut rows, mut width, mut stride) = (view.outer, view.width, view.outer_stride);
        if rows * width == 0 {
            return Ok(());
        }
        let mut last = width;
        if x.is_contiguous() {
            let n = rows * width;
            (rows, width, stride) = (n.div_ceil(ACROSS), ACROSS, ACROSS);
            last = n - (rows - 1) * ACROSS;
        }
        s.launch(OP, &[read(x), write(amax)], |l| {
            let from = l.address(0)?;
            let even = rows <= 1 || (stride * x.dtype().size()).is_multiple_of(16);
            let across = blocks(OP, width, ACROSS)?;
            let args = AmaxArgs {
                x: from,
                amax: l.address(1)?,
                rows: rows as i64,
                width: width as i64,
                stride: stride as i64,
                last: last as i64,
                step: 0,
                across,
                vectorized: (aligned16(&[from]) && even).into(),
            };
            let all = blocks(OP, rows.div_ceil(DOWN) * across as usize, 1)?;
            self.launch_kernel(l, kernel, line(all, THREADS), &args)
        })
    }

    /// Amax of each of `count` contiguous matrices of `n` elements.
    pub(super) fn launch_amax_stack(&self, s: &Stream, x: &Tensor, amax: &Tensor) -> Result<()> {
        const OP: &str = "amax_stack";
        let [count, n, k] = amax_sizes(OP, x, amax)?;
        let kernel = input!(OP, x.dtype(), "quant/amax", "amax")?;
        let n = n * k;
        if count * n == 0 {
            return Ok(());
        }
        let rows = n.div_ceil(ACROSS);
        s.launch(OP, &[read(x), write(amax)], |l| {
            let from = l.address(0)?;
            let even = count == 1 || (n * x.dtype().size()).is_multiple_of(16);
            let args = AmaxArgs {
                x: from,
                amax: l.address(1)?,
                rows: rows as i64,
                width: ACROSS as i64,
                stride: ACROSS as i64,
                last: (n - (rows - 1) * ACROSS) as i64,
                step: n as i64,
                across: 1,
                vectorized: (aligned16(&[from]) && even).into(),
            };
            let all = [blocks(OP, rows, DOWN)?, stacked(OP, count)?, 1];
            self.launch_kernel(l, kernel, LaunchConfig { blocks: all, threads: THREADS, shared: 0 }, &args)
        })
    }

    pub(super) fn launch_delayed_update(&self, s: &Stream, update: &DelayedUpdate) -> Result<()> {
        const OP: &str = "delayed_update";
        let &DelayedUpdate { scaling, history, reduced, largest, scale } = update;
        let [len, n] = check_delayed(OP, history, reduced, largest, scale)?;
        if n == 0 {
            return Ok(());
        }
        let own = reduced.same_memory(&history.select(0, 0)?);
        let args = [write(history), read(largest), write(scale), read(reduced)];
        s.launch(OP, &args[..if own { 3 } else { 4 }], |l| {
            let args = DelayedArgs {
                history: l.address(0)?,
                reduced: l.address(if own { 0 } else { 3 })?,
                largest: l.address(1)?,
                scale: l.address(2)?,
                len: len as i64,
                n: n as i64,
                factor: 2f32.powi(-scaling.margin),
                most_recent: scaling.most_recent.into(),
            };
            let kernel = Kernel::new("quant/amax", "delayed_update");
            self.launch_kernel(l, kernel, line(blocks(OP, n, TENSORS)?, DELAYED_THREADS), &args)
        })
    }
}
