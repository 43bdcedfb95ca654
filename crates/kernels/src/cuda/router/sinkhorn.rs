//! Sinkhorn normalization and quantile balancing.

use super::{BLOCK_THREADS, row_blocks, sized, warps};
use crate::cuda::args::kernel_args;
use crate::cuda::grid::{blocks, line};
use crate::cuda::{CudaKernels, Kernel, typed};
use crate::router::check;
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, write};

/// Largest number of partial sums per column, which one thread block adds up.
const MAX_PARTS: usize = 128;
/// Iterations between convergence checks, and in total.
const BATCH: usize = 16;
const ROUNDS: usize = 10_000;

kernel_args! {
    header "args/router_sinkhorn.cuh", includes [];

    /// Sinkhorn normalization of exp(logits).
    struct SinkhornArgs {
        logits: u64,
        /// f32 `[tokens, experts]`.
        out: u64,
        /// f32 `[tokens]` and f32 `[experts]`: factors of rows and columns.
        d0: u64,
        d1: u64,
        /// f64 `[blocks, experts]`.
        parts: u64,
        /// i32 `[1]`.
        done: u64,
        tokens: i64,
        blocks: i64,
        /// Rows of a warp.
        rows: i64,
        experts: i32,
        pad: u32,
    }

    /// Quantile balancing.
    struct QuantileArgs {
        logits: u64,
        /// f32 `[experts]`.
        beta: u64,
        /// f32 `[tokens]`: the (k+1)-th largest of a row of logits - beta.
        alpha: u64,
        /// f32 `[experts]`, added to.
        estimate: u64,
        tokens: i64,
        experts: i32,
        k: i32,
        /// Rank of the quantile among a column's values.
        place: u32,
        pad: u32,
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("router/sinkhorn", name)
}

impl CudaKernels {
    pub(super) fn launch_sinkhorn(&self, s: &Stream, logits: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "sinkhorn";
        let [tokens, experts] = check::sinkhorn(OP, logits, out)?;
        if tokens == 0 {
            return Ok(());
        }
        let step = sized!(OP, logits.dtype(), experts, "router/sinkhorn", "sinkhorn_rows")?;
        let last = sized!(OP, logits.dtype(), experts, "router/sinkhorn", "sinkhorn_write")?;
        // Rows per warp.
        let rows = 4.max(tokens.div_ceil(MAX_PARTS * warps(experts)));
        let grid = row_blocks(OP, tokens, experts, rows)?;
        let scratch = |n: usize, dtype| Tensor::empty(s, &[n], dtype, Category::Workspace);
        let (d0, d1) = (scratch(tokens, DType::F32)?, scratch(experts, DType::F32)?);
        let parts = scratch(grid.blocks[0] as usize * experts, DType::F64)?;
        let done = scratch(1, DType::I32)?;
        for batch in 0..ROUNDS / BATCH {
            let args = [read(logits), write(out), write(&d0), write(&d1), write(&parts), write(&done)];
            s.launch(OP, &args, |l| {
                let args = SinkhornArgs {
                    logits: l.address(0)?,
                    out: l.address(1)?,
                    d0: l.address(2)?,
                    d1: l.address(3)?,
                    parts: l.address(4)?,
                    done: l.address(5)?,
                    tokens: tokens as i64,
                    blocks: i64::from(grid.blocks[0]),
                    rows: rows as i64,
                    experts: experts as i32,
                    pad: 0,
                };
                if batch == 0 {
                    self.launch_kernel(l, kernel("sinkhorn_begin"), line(1, BLOCK_THREADS), &args)?;
                }
                for _ in 0..BATCH {
                    self.launch_kernel(l, step, grid, &args)?;
                    self.launch_kernel(l, kernel("sinkhorn_columns"), line(1, BLOCK_THREADS), &args)?;
                }
                // The output is written at every check: most inputs converge by the first.
                self.launch_kernel(l, last, row_blocks(OP, tokens, experts, 1)?, &args)
            })?;
            if s.download::<i32>(&done)?.first() == Some(&1) {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn launch_quantiles(
        &self,
        s: &Stream,
        k: usize,
        logits: &Tensor,
        beta: &Tensor,
        estimate: &Tensor,
    ) -> Result<()> {
        const OP: &str = "quantiles";
        let (z, place) = check::quantiles(OP, k, logits, beta, estimate)?;
        if z.tokens == 0 {
            return Ok(());
        }
        let rows = sized!(OP, logits.dtype(), z.experts, "router/sinkhorn", "quantile_rows")?;
        let columns = typed!(OP, logits.dtype(), "router/sinkhorn", "quantile_columns")?;
        let alpha = Tensor::empty(s, &[z.tokens], DType::F32, Category::Workspace)?;
        // Row indices fit in 32 bits, since a grid cannot have more rows.
        let grid = row_blocks(OP, z.tokens, z.experts, 1)?;
        s.launch(OP, &[read(logits), read(beta), write(estimate), write(&alpha)], |l| {
            let args = QuantileArgs {
                logits: l.address(0)?,
                beta: l.address(1)?,
                alpha: l.address(3)?,
                estimate: l.address(2)?,
                tokens: z.tokens as i64,
                experts: z.experts as i32,
                k: k as i32,
                place: place as u32,
                pad: 0,
            };
            self.launch_kernel(l, rows, grid, &args)?;
            self.launch_kernel(l, columns, line(blocks(OP, z.experts, 1)?, BLOCK_THREADS), &args)
        })
    }
}
