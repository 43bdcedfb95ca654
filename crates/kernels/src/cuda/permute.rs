//! Permutation of rows between token order and expert order.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::row_grid::{columns, vec_width};
use super::{CudaKernels, Kernel};
use crate::checks::dtypes;
use crate::permutation::{
    Sizes, check_selections, check_values, gather_sizes, permute_sizes, permute_transposed_sizes,
    unpermute_sizes, weighted_sizes,
};
use crate::{PermutationKernels, RowMap};
use ferrotron_tensor::{DType, Error, Result, Stream, Tensor, read, shape_error, write};

/// As in permute.cu.
const THREADS: u32 = 256;
const IN_FLIGHT: usize = 4;
const SELECTIONS_AT_ONCE: usize = 8;

kernel_args! {
    header "args/permute.cuh", includes [];

    /// Moves rows between token order and expert order, in chunks of 16 bytes.
    #[derive(Default)]
    struct MoveArgs {
        x: u64,
        out: u64,
        /// i32: for each row in expert order the selection (token·k + slot) it comes from, or -1. Or dy, for dot products.
        source: u64,
        /// i32 `[tokens, k]`: for each selection its row in expert order, or -1.
        rows: u64,
        /// f32 `[tokens, k]`, or 0.
        weights: u64,
        /// Elements of a row.
        width: i32,
        /// Chunks of a row, and of all rows.
        per_row: u32,
        chunks: u32,
        /// Selections of a token.
        k: u32,
        /// Rows of x. An index that is not below it, such as -1, means no row.
        from: u32,
        /// Selections of all tokens.
        selections: u32,
        /// Rows of out.
        n: u32,
        vectorized: u32,
        /// Blocks that move rows; those behind them zero rows that come from no selection.
        movers: u32,
        pad: u32,
    }

    /// Permutes rows of FP8 into expert order and transposes them.
    struct TransposeRowsArgs {
        x: u64,
        /// i32 `[n]`: as `MoveArgs::source`.
        source: u64,
        out: u64,
        /// Bytes of a row of x, and of one of the result.
        width: i64,
        pitch: i64,
        /// Rows in expert order, and rows of the result.
        n: i32,
        columns: i32,
        k: u32,
        selections: u32,
        /// Blocks along the columns.
        across: u32,
        vectorized: u32,
        vectorized_out: u32,
        pad: u32,
    }
}

/// Rows and columns of a block of `transpose_rows`.
const TILE: usize = 128;

impl MoveArgs {
    /// For `rows` rows, of out or of tokens, in 16-byte chunks of `dtype`.
    fn new(op: &'static str, z: Sizes, dtype: DType, rows: usize) -> Result<MoveArgs> {
        let per_row = z.width.div_ceil(vec_width(dtype));
        // i32, because a block's chunk numbers run past the last one.
        let chunks = match i32::try_from(rows.saturating_mul(per_row)) {
            Ok(chunks) => chunks as u32,
            Err(_) => {
                return shape_error(
                    op,
                    format!(
                        "{rows} rows of {} are more than 2^31 chunks of 16 bytes; use smaller batches",
                        z.width
                    ),
                );
            }
        };
        Ok(MoveArgs {
            width: columns(op, z.width)?,
            per_row: per_row.max(1) as u32,
            chunks,
            k: z.k as u32,
            selections: (z.tokens * z.k) as u32,
            n: z.rows as u32,
            ..MoveArgs::default()
        })
    }

    /// 16-byte accesses where rows are a multiple of them and addresses are aligned.
    fn align(mut self, dtype: DType, addresses: &[u64]) -> MoveArgs {
        let whole = (self.width as usize).is_multiple_of(vec_width(dtype));
        self.vectorized = u32::from(whole && aligned16(addresses));
        self
    }

    fn blocks(&self, op: &'static str, each: usize) -> Result<u32> {
        blocks(op, self.chunks as usize, each)
    }
}

/// The kernel of a copy without arithmetic, by element size.
macro_rules! sized {
    ($op:expr, $dtype:expr, $name:literal) => {
        match $dtype {
            DType::F32 => Ok(concat!($name, "_4")),
            DType::BF16 => Ok(concat!($name, "_2")),
            DType::E4M3 | DType::E5M2 => Ok(concat!($name, "_1")),
            found => Err(Error::DType { op: $op, found, wanted: DType::F32 }),
        }
        .map(|name| Kernel::new("permute", name))
    };
}

/// The kernel for a dtype and that of its partner, which is the same or f32.
macro_rules! mixed {
    ($op:expr, $dtype:expr, $partner:expr, $name:literal) => {
        match ($dtype, $partner) {
            (DType::F32, _) => Ok(concat!($name, "_f32")),
            (DType::BF16, DType::BF16) => Ok(concat!($name, "_bf16")),
            (DType::BF16, _) => Ok(concat!($name, "_mixed")),
            (found, _) => Err(Error::DType { op: $op, found, wanted: DType::F32 }),
        }
        .map(|name| Kernel::new("permute", name))
    };
}

impl PermutationKernels for CudaKernels {
    fn sort_by_expert(
        &self,
        s: &Stream,
        index: &Tensor,
        first: usize,
        align: usize,
        map: &RowMap,
    ) -> Result<()> {
        self.sort_selections(s, index, first, align, map)
    }

    fn gather_rows(&self, s: &Stream, x: &Tensor, source: &Tensor, k: usize, out: &Tensor) -> Result<()> {
        const OP: &str = "gather_rows";
        let (z, dtype) = (gather_sizes(OP, x, source, k, out)?, x.dtype());
        dtypes(OP, dtype, &[out])?;
        let kernel = sized!(OP, dtype, "gather_rows")?;
        s.launch(OP, &[read(x), read(source), write(out)], |l| {
            let (x, source, out) = (l.address(0)?, l.address(1)?, l.address(2)?);
            let a = MoveArgs { x, source, out, ..MoveArgs::new(OP, z, dtype, z.rows)? };
            let a = a.align(dtype, &[x, out]);
            self.launch_kernel(l, kernel, line(a.blocks(OP, IN_FLIGHT * THREADS as usize)?, THREADS), &a)
        })
    }

    fn moe_permute(&self, s: &Stream, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<()> {
        const OP: &str = "moe_permute";
        let (z, dtype) = (permute_sizes(OP, x, map, out)?, x.dtype());
        let kernel = sized!(OP, dtype, "moe_permute")?;
        s.launch(OP, &[read(x), read(&map.source), read(&map.rows), write(out)], |l| {
            let (x, source, rows, out) = (l.address(0)?, l.address(1)?, l.address(2)?, l.address(3)?);
            let a = MoveArgs { x, source, rows, out, ..MoveArgs::new(OP, z, dtype, z.tokens)? };
            let mut a = a.align(dtype, &[x, out]);
            a.movers = a.blocks(OP, THREADS as usize)?;
            let clearers = blocks(OP, z.rows, THREADS as usize)?;
            let all = blocks(OP, a.movers as usize + clearers as usize, 1)?;
            self.launch_kernel(l, kernel, line(all, THREADS), &a)
        })
    }

    fn moe_permute_transposed(&self, s: &Stream, x: &Tensor, map: &RowMap, out: &Tensor) -> Result<()> {
        const OP: &str = "moe_permute_transposed";
        let z = permute_transposed_sizes(OP, x, map, out)?;
        let columns = out.shape()[0];
        s.launch(OP, &[read(x), read(&map.source), write(out)], |l| {
            let (from, to) = (l.address(0)?, l.address(2)?);
            let across = blocks(OP, columns, TILE)?;
            let a = TransposeRowsArgs {
                x: from,
                source: l.address(1)?,
                out: to,
                width: z.width as i64,
                pitch: out.shape()[1] as i64,
                n: z.rows as i32,
                columns: super::row_grid::columns(OP, columns)?,
                k: z.k as u32,
                selections: (z.tokens * z.k) as u32,
                across: across.max(1),
                vectorized: (from.is_multiple_of(8) && z.width.is_multiple_of(8)).into(),
                vectorized_out: aligned16(&[to]).into(),
                pad: 0,
            };
            let all = blocks(OP, z.rows.div_ceil(TILE) * across as usize, 1)?;
            let kernel = Kernel::new("permute_transposed", "transpose_rows");
            self.launch_kernel(l, kernel, line(all, THREADS), &a)
        })
    }

    fn moe_unpermute_backward(
        &self,
        s: &Stream,
        x: &Tensor,
        source: &Tensor,
        weights: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "moe_unpermute_backward";
        let (z, dtype) = (weighted_sizes(OP, x, source, weights, out)?, out.dtype());
        let kernel = mixed!(OP, dtype, x.dtype(), "moe_unpermute_backward")?;
        s.launch(OP, &[read(x), read(source), read(weights), write(out)], |l| {
            let (x, source, weights, out) = (l.address(0)?, l.address(1)?, l.address(2)?, l.address(3)?);
            let a = MoveArgs { x, source, weights, out, ..MoveArgs::new(OP, z, dtype, z.rows)? };
            let a = a.align(dtype, &[x, out]);
            self.launch_kernel(l, kernel, line(a.blocks(OP, THREADS as usize)?, THREADS), &a)
        })
    }

    fn moe_unpermute(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        weights: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "moe_unpermute";
        let (z, dtype) = (unpermute_sizes(OP, x, rows, out)?, x.dtype());
        weights.map_or(Ok(()), |w| check_selections(OP, z, w))?;
        let kernel = mixed!(OP, dtype, out.dtype(), "moe_unpermute")?;
        let args = [read(x), read(rows), write(out), read(weights.unwrap_or(rows))];
        s.launch(OP, &args, |l| {
            let (x, rows, out) = (l.address(0)?, l.address(1)?, l.address(2)?);
            let weights = weights.map_or(Ok(0), |_| l.address(3))?;
            let a = MoveArgs { x, rows, weights, out, ..MoveArgs::new(OP, z, dtype, z.tokens)? };
            let a = MoveArgs { from: z.rows as u32, ..a.align(dtype, &[x, out]) };
            self.launch_kernel(l, kernel, line(a.blocks(OP, THREADS as usize)?, THREADS), &a)
        })
    }

    fn moe_unpermute_dprobs(
        &self,
        s: &Stream,
        x: &Tensor,
        rows: &Tensor,
        dy: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "moe_unpermute_dprobs";
        let (z, dtype) = (unpermute_sizes(OP, x, rows, dy)?, x.dtype());
        check_selections(OP, z, out)?;
        let kernel = mixed!(OP, dtype, dy.dtype(), "moe_unpermute_dprobs")?;
        s.launch(OP, &[read(x), read(rows), read(dy), write(out)], |l| {
            let (x, rows, dy, out) = (l.address(0)?, l.address(1)?, l.address(2)?, l.address(3)?);
            let a = MoveArgs { x, rows, source: dy, out, ..MoveArgs::new(OP, z, dtype, 0)? };
            let chunks = (z.tokens * z.k.div_ceil(SELECTIONS_AT_ONCE)) as u32;
            let a = MoveArgs { from: z.rows as u32, chunks, ..a.align(dtype, &[x, dy]) };
            self.launch_kernel(l, kernel, line(a.blocks(OP, THREADS as usize / 32)?, THREADS), &a)
        })
    }

    fn gather_values(&self, s: &Stream, x: &Tensor, source: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "gather_values";
        check_values(OP, x, source, out)?;
        s.launch(OP, &[read(x), read(source), write(out)], |l| {
            let (from, n) = (x.numel() as u32, out.numel());
            let a = MoveArgs {
                x: l.address(0)?,
                source: l.address(1)?,
                out: l.address(2)?,
                from,
                n: n as u32,
                ..MoveArgs::default()
            };
            let kernel = Kernel::new("permute", "gather_values");
            self.launch_kernel(l, kernel, line(blocks(OP, n, THREADS as usize)?, THREADS), &a)
        })
    }

    fn chunk_map(
        &self,
        s: &Stream,
        sizes: &Tensor,
        order: &Tensor,
        source: &Tensor,
        back: &Tensor,
    ) -> Result<()> {
        self.map_chunks(s, [sizes, order], [source, back])
    }

    fn pad_routing_map(&self, s: &Stream, align: usize, map: &Tensor) -> Result<()> {
        self.fill_map(s, align, map)
    }
}
