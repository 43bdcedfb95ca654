//! Embedding lookup, and its gradient by a deterministic sort and segmented sum.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::checks::dtypes;
use crate::embedding::check_rows;
use crate::{EmbeddingBackward, EmbeddingForward, EmbeddingKernels};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, shape_error, write};

/// As in embedding.cu: tokens of one partial sum; digits and tokens of a tile of the sort.
const CHUNK: usize = 64;
const BINS: usize = 256;
const TILE: usize = 2048;
const THREADS: u32 = 256;

kernel_args! {
    header "args/embedding.cuh", includes [];

    /// y = scale·table[ids] (+ y). The table holds rows `first..first + local` of ids `0..vocab`.
    struct EmbeddingForwardArgs {
        /// i32 `[tokens]`.
        ids: u64,
        table: u64,
        y: u64,
        /// The device's fault word.
        fault: u64,
        width: i64,
        vocab: i64,
        first: i64,
        local: i64,
        scale: f32,
        /// Adds to y.
        add: u32,
        vectorized: u32,
        pad: u32,
    }

    /// One pass of the radix sort of tokens by id.
    struct EmbeddingSortArgs {
        /// Ids and tokens before this pass; in the first pass tokens are in order and not stored.
        ids: u64,
        tokens: u64,
        /// After it.
        ids_out: u64,
        tokens_out: u64,
        /// u32 `[tiles, BINS]`: how many of each digit a tile holds.
        counts: u64,
        fault: u64,
        /// Tokens.
        n: i64,
        /// The table holds rows `start..start + local` of ids `0..vocab`.
        vocab: i64,
        start: i64,
        local: i64,
        /// Lowest bit of this pass's digit.
        shift: u32,
        /// The first pass.
        first: u32,
    }

    /// Sums rows of dy by id into the gradient of the table.
    struct EmbeddingSumArgs {
        /// u32 `[n]` sorted: rows of the table, and the tokens they belong to.
        ids: u64,
        tokens: u64,
        /// u32 `[local + 1]`: where the run of each id begins.
        starts: u64,
        /// `[n, width]`.
        dy: u64,
        /// f32 `[local, width]`.
        dtable: u64,
        /// f32 `[2·⌈n/CHUNK⌉, width]`: partial sums of long runs.
        parts: u64,
        n: i64,
        local: i64,
        width: i64,
        scale: f32,
        accumulate: u32,
        vectorized: u32,
        pad: u32,
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("embedding", name)
}

/// One block to each of `rows` rows of `width`, `group` elements to a thread.
fn row_blocks(op: &'static str, rows: usize, width: usize, group: usize) -> Result<LaunchConfig> {
    let threads = width.div_ceil(group).next_multiple_of(32).clamp(32, THREADS as usize) as u32;
    Ok(line(blocks(op, rows, 1)?, threads))
}

impl EmbeddingKernels for CudaKernels {
    fn embedding_forward(&self, s: &Stream, e: &EmbeddingForward) -> Result<()> {
        let &EmbeddingForward { ids, table, first, vocab, scale, add, y } = e;
        const OP: &str = "embedding_forward";
        let [tokens, local, width] = check_rows(OP, ids, table, y)?;
        dtypes(OP, DType::I32, &[ids])?;
        dtypes(OP, table.dtype(), &[y])?;
        let kernel = typed!(OP, y.dtype(), "embedding", "embedding_forward")?;
        s.launch(OP, &[read(ids), read(table), write(y)], |l| {
            let (from, to) = (l.address(1)?, l.address(2)?);
            let group = 16 / y.dtype().size();
            let args = EmbeddingForwardArgs {
                ids: l.address(0)?,
                table: from,
                y: to,
                fault: l.fault()?,
                width: width as i64,
                vocab: vocab as i64,
                first: first.min(vocab) as i64,
                local: local as i64,
                scale,
                add: add.into(),
                vectorized: (width.is_multiple_of(group) && aligned16(&[from, to])).into(),
                pad: 0,
            };
            self.launch_kernel(l, kernel, row_blocks(OP, tokens, width, group)?, &args)
        })
    }

    fn embedding_backward(&self, s: &Stream, e: &EmbeddingBackward) -> Result<()> {
        let &EmbeddingBackward { ids, dy, first, vocab, scale, accumulate, dtable } = e;
        const OP: &str = "embedding_backward";
        let [tokens, local, width] = check_rows(OP, ids, dtable, dy)?;
        dtypes(OP, DType::I32, &[ids])?;
        dtypes(OP, DType::F32, &[dtable])?;
        let sum = typed!(OP, dy.dtype(), "embedding", "embedding_sum")?;
        if tokens.max(local).max(vocab) > i32::MAX as usize {
            return shape_error(
                OP,
                format!("{tokens} tokens of {vocab} ids are more than 32 bits can count"),
            );
        }
        let chunks = tokens.div_ceil(CHUNK);
        let scratch = |shape: &[usize], dtype| Tensor::empty(s, shape, dtype, Category::Workspace);
        // Sorted ids and tokens, double-buffered over the passes.
        let sorted = scratch(&[4 * tokens], DType::I32)?;
        let counts = scratch(&[tokens.div_ceil(TILE) * BINS], DType::I32)?;
        let starts = scratch(&[local + 1], DType::I32)?;
        let parts = scratch(&[2 * chunks, width], DType::F32)?;
        let all = [
            read(ids),
            read(dy),
            write(dtable),
            write(&sorted),
            write(&counts),
            write(&starts),
            write(&parts),
        ];
        s.launch(OP, &all, |l| {
            let [ids, order] =
                self.sort_ids(l, tokens, TableShard { vocab, start: first.min(vocab), local })?;
            let group = 16 / dy.dtype().size();
            let (dy_at, dtable_at, parts) = (l.address(1)?, l.address(2)?, l.address(6)?);
            let args = EmbeddingSumArgs {
                ids,
                tokens: order,
                starts: l.address(5)?,
                dy: dy_at,
                dtable: dtable_at,
                parts,
                n: tokens as i64,
                local: local as i64,
                width: width as i64,
                scale,
                accumulate: accumulate.into(),
                vectorized: (width.is_multiple_of(group) && aligned16(&[dy_at, dtable_at, parts])).into(),
                pad: 0,
            };
            self.launch_kernel(
                l,
                kernel("embedding_starts"),
                line(blocks(OP, local + 1, 256)?, THREADS),
                &args,
            )?;
            if !accumulate {
                self.launch_kernel(
                    l,
                    kernel("embedding_clear"),
                    line(blocks(OP, local, 8)?, THREADS),
                    &args,
                )?;
            }
            self.launch_kernel(l, sum, row_blocks(OP, tokens, width, group)?, &args)?;
            if tokens > CHUNK {
                let columns = blocks(OP, width, THREADS as usize)?;
                let grid = LaunchConfig { blocks: [chunks as u32, columns, 1], threads: THREADS, shared: 0 };
                self.launch_kernel(l, kernel("embedding_join"), grid, &args)?;
            }
            Ok(())
        })
    }
}

/// The table holds rows `start..start + local` of ids `0..vocab`.
struct TableShard {
    vocab: usize,
    start: usize,
    local: usize,
}

impl CudaKernels {
    /// Sorts tokens by id, stably: addresses of the sorted ids, as rows of the table, and of their tokens. Ids outside
    /// this rank's shard come last; ids outside the vocabulary are reported.
    fn sort_ids(&self, l: &Launch, tokens: usize, table: TableShard) -> Result<[u64; 2]> {
        let (given, sorted, counts, fault) = (l.address(0)?, l.address(3)?, l.address(4)?, l.fault()?);
        let part = |i: u64| sorted + i * 4 * tokens as u64;
        let pairs = [[part(0), part(1)], [part(2), part(3)]];
        // `local` itself stands for ids outside the shard.
        let passes = (usize::BITS - table.local.leading_zeros()).div_ceil(8).max(1);
        let mut from = [given, 0];
        for pass in 0..passes {
            let to = pairs[pass as usize % 2];
            let args = EmbeddingSortArgs {
                ids: from[0],
                tokens: from[1],
                ids_out: to[0],
                tokens_out: to[1],
                counts,
                fault,
                n: tokens as i64,
                vocab: table.vocab as i64,
                start: table.start as i64,
                local: table.local as i64,
                shift: 8 * pass,
                first: (pass == 0).into(),
            };
            let grid = line(blocks(l.op(), tokens, TILE)?, THREADS);
            self.launch_kernel(l, kernel("embedding_count"), grid, &args)?;
            self.launch_kernel(l, kernel("embedding_sort"), grid, &args)?;
            from = to;
        }
        Ok(from)
    }
}
