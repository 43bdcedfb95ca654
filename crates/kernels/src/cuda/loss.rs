//! Fused cross-entropy, over the whole vocabulary or one tensor-parallel shard of it.

use super::args::kernel_args;
use super::row_grid::{blocks, columns, vec_width};
use super::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::cpu::{rows::Rows, vocab::Shard};
use crate::{CrossEntropy, CrossEntropyKernels, VocabParallelCrossEntropy, VocabParallelLogits};
use ferrotron_tensor::{DType, Result, Stream, Tensor, read, write};

kernel_args! {
    header "args/loss.cuh", includes [];

    /// Cross-entropy of rows of logits, and its gradient in place.
    struct LossArgs {
        logits: u64,
        /// i32 `[rows]`.
        labels: u64,
        /// f32 `[rows]`: what each row's gradient is multiplied by.
        weights: u64,
        /// f32 `[rows]`.
        loss: u64,
        fault: u64,
        stride: i64,
        /// Columns of a row, padding included.
        width: i32,
        /// Columns that are ids.
        vocab: i32,
        /// Label smoothing: probability spread over the vocabulary, and what one column gets of it.
        spread: f32,
        off: f32,
        rows: i64,
        /// Chunks of 16 bytes of a row that each thread holds in shared memory.
        slots: i32,
        pad: u32,
    }

    /// The same for one tensor-parallel rank's columns of the vocabulary.
    struct VocabParallelArgs {
        logits: u64,
        labels: u64,
        weights: u64,
        loss: u64,
        fault: u64,
        /// f32 `[rows, 4]` of this rank, written, or `[ranks, rows, 4]` of all, read: max, Σ exp(x − max), the label's logit where
        /// this rank holds it, Σ x.
        stats: u64,
        stride: i64,
        rows: i64,
        /// Columns of this rank, padding included; those that are ids; the id of the first.
        width: i32,
        present: i32,
        first: i32,
        /// Ids of all ranks, and ranks.
        vocab: i32,
        ranks: i32,
        spread: f32,
        off: f32,
        pad: u32,
    }
}

impl VocabParallelArgs {
    /// All but addresses and what concerns all ranks together.
    fn new(op: &'static str, rows: &Rows, shard: &Shard) -> Result<VocabParallelArgs> {
        Ok(VocabParallelArgs {
            logits: 0,
            labels: 0,
            weights: 0,
            loss: 0,
            fault: 0,
            stats: 0,
            stride: rows.outer_stride as i64,
            rows: rows.count() as i64,
            width: columns(op, rows.width)?,
            present: columns(op, shard.len)?,
            first: columns(op, shard.start)?,
            vocab: columns(op, shard.total)?,
            ranks: 0,
            spread: 0.0,
            off: 0.0,
            pad: 0,
        })
    }
}

/// One block to a row: four chunks to a thread at once, up to 512 threads. Depends on the width alone, because the
/// order of sums does.
fn block_per_row(op: &'static str, rows: &Rows, dtype: DType) -> Result<LaunchConfig> {
    let chunks = rows.width.div_ceil(vec_width(dtype));
    let threads = (chunks.div_ceil(4).next_multiple_of(32)).clamp(32, 512) as u32;
    Ok(LaunchConfig { blocks: [blocks(op, rows.count())?, 1, 1], threads, shared: 0 })
}

/// Static shared memory of the kernels, at most, and what the GPU reserves for a block.
const STATIC_SHARED: usize = 512;
const RESERVED_SHARED: usize = 1024;
/// Chunks of a row that a thread holds, at most.
const SLOTS: usize = 16;
/// Chunks of a thread up to which two blocks of 512 threads share a multiprocessor; a Hopper one has shared memory for them all.
const SLOTS_OF_TWO: usize = 13;

/// The launch that overwrites rows by gradients, and the chunks of a row that a thread holds in shared memory: of rows that a
/// block's threads do not read at once, with persistent blocks that fill a multiprocessor. The threads of a block depend on the
/// width alone, as in [`block_per_row`], but are twice as many for the longest rows: with and without gradient, a loss of equal
/// logits may there differ in its last bits.
fn holding_rows(
    op: &'static str,
    rows: &Rows,
    dtype: DType,
    [shared_memory, multiprocessors]: [usize; 2],
) -> Result<(LaunchConfig, i32)> {
    let mut grid = block_per_row(op, rows, dtype)?;
    // Rows that start within a chunk have one more.
    let chunks = rows.width.div_ceil(vec_width(dtype)) + 1;
    if chunks <= 4 * 512 {
        return Ok((grid, 0));
    }
    let each = if chunks <= SLOTS_OF_TWO * 512 { 2 } else { 1 };
    let threads = 1024 / each;
    let room = (shared_memory + RESERVED_SHARED) / each - RESERVED_SHARED - STATIC_SHARED;
    let slots = chunks.div_ceil(threads).min(room / (threads * 16)).min(SLOTS);
    grid.threads = threads as u32;
    grid.shared = (slots * threads * 16) as u32;
    grid.blocks[0] = grid.blocks[0].min((multiprocessors * each) as u32);
    Ok((grid, slots as i32))
}

impl CrossEntropyKernels for CudaKernels {
    fn cross_entropy(&self, s: &Stream, c: &CrossEntropy) -> Result<()> {
        const OP: &str = "cross_entropy";
        let rows = c.check(OP)?;
        let dtype = c.logits.dtype();
        let kernel = match c.gradient {
            true => typed!(OP, dtype, "loss", "cross_entropy_gradient")?,
            false => typed!(OP, dtype, "loss", "cross_entropy")?,
        };
        let (grid, slots) = match c.gradient {
            true => {
                holding_rows(OP, &rows, dtype, [self.modules.shared_memory(), self.multiprocessors as usize])?
            }
            false => (block_per_row(OP, &rows, dtype)?, 0),
        };
        let (width, vocab) = (columns(OP, rows.width)?, columns(OP, c.vocab)?);
        let (spread, off) = c.smoothing.target(c.vocab);
        let logits = if c.gradient { write(c.logits) } else { read(c.logits) };
        s.launch(OP, &[logits, read(c.labels), read(c.weights), write(c.loss)], |l| {
            let a = LossArgs {
                logits: l.address(0)?,
                labels: l.address(1)?,
                weights: l.address(2)?,
                loss: l.address(3)?,
                fault: l.fault()?,
                stride: rows.outer_stride as i64,
                width,
                vocab,
                spread,
                off,
                rows: rows.count() as i64,
                slots,
                pad: 0,
            };
            self.launch_kernel(l, kernel, grid, &a)
        })
    }

    fn cross_entropy_stats(&self, s: &Stream, x: &VocabParallelLogits, stats: &Tensor) -> Result<()> {
        const OP: &str = "cross_entropy_stats";
        let (rows, shard) = x.check_stats(OP, stats)?;
        let dtype = x.logits.dtype();
        let kernel = typed!(OP, dtype, "loss", "cross_entropy_stats")?;
        let (grid, a) = (block_per_row(OP, &rows, dtype)?, VocabParallelArgs::new(OP, &rows, &shard)?);
        s.launch(OP, &[read(x.logits), read(x.labels), write(stats)], |l| {
            let a = VocabParallelArgs {
                logits: l.address(0)?,
                labels: l.address(1)?,
                stats: l.address(2)?,
                fault: l.fault()?,
                ..a
            };
            self.launch_kernel(l, kernel, grid, &a)
        })
    }

    fn vocab_parallel_cross_entropy(&self, s: &Stream, c: &VocabParallelCrossEntropy) -> Result<()> {
        let &VocabParallelCrossEntropy { x, stats: all, weights, smoothing, loss, gradient } = c;
        const OP: &str = "vocab_parallel_cross_entropy";
        let (rows, shard, ranks) = x.check_all(OP, all, weights, loss)?;
        let dtype = x.logits.dtype();
        let with_gradient = typed!(OP, dtype, "loss", "vocab_parallel_cross_entropy")?;
        let (kernel, grid) = match gradient {
            true => (with_gradient, block_per_row(OP, &rows, dtype)?),
            false => {
                let blocks = [blocks(OP, rows.count().div_ceil(256))?, 1, 1];
                let kernel = Kernel::new("loss", "vocab_parallel_cross_entropy_loss");
                (kernel, LaunchConfig { blocks, threads: 256, shared: 0 })
            }
        };
        let (spread, off) = smoothing.target(shard.total);
        let a = VocabParallelArgs {
            ranks: columns(OP, ranks)?,
            spread,
            off,
            ..VocabParallelArgs::new(OP, &rows, &shard)?
        };
        let logits = if gradient { write(x.logits) } else { read(x.logits) };
        s.launch(OP, &[logits, read(x.labels), read(all), read(weights), write(loss)], |l| {
            let a = VocabParallelArgs {
                logits: l.address(0)?,
                labels: l.address(1)?,
                stats: l.address(2)?,
                weights: l.address(3)?,
                loss: l.address(4)?,
                fault: l.fault()?,
                ..a
            };
            self.launch_kernel(l, kernel, grid, &a)
        })
    }
}
