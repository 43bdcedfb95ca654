//! Column sums and dot products.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::checks::{dtypes, same_contiguous};
use crate::elementwise::{check_columns, check_one};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, read, write};

/// As in reduce.cu.
const THREADS: u32 = 256;
/// Elements of one partial dot product.
const DOT_PART: usize = 16 * THREADS as usize;
/// Partial column sums: at least so many rows each, at most so many of them, so that they are small beside the input.
const PART_ROWS: usize = 64;
const MAX_PARTS: usize = 128;
/// Up to so many rows of f32, mostly partial sums themselves, are summed in one pass.
const FEW: usize = 1024;

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("reduce", name)
}

kernel_args! {
    header "args/reduce.cuh", includes [];

    /// Column sums of `[rows, n]`.
    pub(super) struct ColumnArgs {
        pub(super) x: u64,
        /// f32: `[parts, n]`, or `[n]`.
        pub(super) out: u64,
        pub(super) rows: i64,
        pub(super) n: i64,
        pub(super) stride: i64,
        /// Rows of a part.
        pub(super) part_rows: i64,
        pub(super) accumulate: u32,
        pub(super) vectorized: u32,
    }

    /// A dot product of f32 in f64.
    struct DotArgs {
        a: u64,
        b: u64,
        out: u64,
        n: i64,
        vectorized: u32,
        pad: u32,
    }
}

impl CudaKernels {
    pub(super) fn launch_column_sum(
        &self,
        s: &Stream,
        x: &Tensor,
        accumulate: bool,
        sums: &Tensor,
    ) -> Result<()> {
        const OP: &str = "column_sum";
        let [rows, n, stride] = check_columns(x, sums)?;
        dtypes(OP, DType::F32, &[sums])?;
        let first = typed!(OP, x.dtype(), "reduce", "column_parts")?;
        let few = x.dtype() == DType::F32 && rows <= FEW;
        let part_rows = PART_ROWS.max(rows.div_ceil(MAX_PARTS));
        let parts = if few { 0 } else { rows.div_ceil(part_rows) };
        let scratch = Tensor::empty(s, &[parts * n], DType::F32, Category::Workspace)?;
        s.launch(OP, &[read(x), write(sums), write(&scratch)], |l| {
            let (from, middle) = (l.address(0)?, l.address(2)?);
            let size = x.dtype().size();
            let mut args = ColumnArgs {
                x: from,
                out: middle,
                rows: rows as i64,
                n: n as i64,
                stride: stride as i64,
                part_rows: part_rows as i64,
                accumulate: 0,
                vectorized: (aligned16(&[from]) && (rows <= 1 || (stride * size).is_multiple_of(16))).into(),
            };
            if !few {
                let across = blocks(OP, n, 32 * (16 / size))?;
                let grid = LaunchConfig { blocks: [across, parts as u32, 1], threads: THREADS, shared: 0 };
                self.launch_kernel(l, first, grid, &args)?;
                (args.x, args.rows, args.stride) = (middle, parts as i64, n as i64);
            }
            (args.out, args.accumulate) = (l.address(1)?, accumulate.into());
            self.launch_kernel(l, kernel("column_total"), line(blocks(OP, n, 32)?, 1024), &args)
        })
    }

    pub(super) fn launch_dot(&self, s: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        const OP: &str = "dot";
        same_contiguous(OP, &[a, b])?;
        check_one(out)?;
        dtypes(OP, DType::F32, &[a, b, out])?;
        let parts = blocks(OP, a.numel(), DOT_PART)?;
        let scratch = Tensor::empty(s, &[parts as usize], DType::F64, Category::Workspace)?;
        s.launch(OP, &[read(a), read(b), write(out), write(&scratch)], |l| {
            let (a_at, b_at, middle) = (l.address(0)?, l.address(1)?, l.address(3)?);
            let (n, vectorized) = (a.numel() as i64, aligned16(&[a_at, b_at]).into());
            let args = DotArgs { a: a_at, b: b_at, out: middle, n, vectorized, pad: 0 };
            self.launch_kernel(l, kernel("dot_parts"), line(parts, THREADS), &args)?;
            let args = DotArgs { a: middle, b: 0, out: l.address(2)?, n: parts.into(), ..args };
            self.launch_kernel(l, kernel("dot_total"), line(1, 1024), &args)
        })
    }
}
