//! Weighted bias of each expert's rows (grouped bias), and its gradient.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::row_grid::{columns, vec_width};
use super::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::GroupedBias;
use crate::grouped_gemm::bias::{gradient_sizes, sizes};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, shape_error, write};

const THREADS: u32 = 256;
const WARPS: usize = THREADS as usize / 32;

/// Partial sums of the bias gradient: at least so many rows each, at most so many of them. As in row_bias.cu, which takes
/// longer ones of more rows in segments, whatever rows there are behind them.
const PART_ROWS: usize = 64;
const MAX_PARTS: usize = 512;

kernel_args! {
    header "args/row_bias.cuh", includes [];

    /// Weighted bias of each segment's rows, and its gradient.
    struct GroupedBiasArgs {
        /// i32 `[experts + 1]` and i32 `[experts]`: segments, ascending.
        offsets: u64,
        counts: u64,
        /// `[experts, width]`.
        bias: u64,
        /// f32 `[rows]`, or 0: all are 1.
        weights: u64,
        /// y, or dy: `[rows, width]`.
        y: u64,
        /// f32 `[rows]`, added to.
        dweights: u64,
        /// f32 `[experts, width]`.
        dbias: u64,
        /// f32 `[parts + experts, width]`: partial sums.
        parts: u64,
        rows: i64,
        width: i32,
        experts: u32,
        vectorized: u32,
        accumulate: u32,
    }
}

impl GroupedBiasArgs {
    /// For a launch whose first arguments are the segments, the bias and the rows; `weights` is the argument with the weights.
    fn new(
        op: &'static str,
        l: &Launch,
        dtype: DType,
        [rows, n, experts]: [usize; 3],
        weights: Option<usize>,
    ) -> Result<GroupedBiasArgs> {
        let (bias, y) = (l.address(2)?, l.address(3)?);
        let whole = n.is_multiple_of(vec_width(dtype));
        Ok(GroupedBiasArgs {
            offsets: l.address(0)?,
            counts: l.address(1)?,
            bias,
            weights: weights.map_or(Ok(0), |at| l.address(at))?,
            y,
            dweights: 0,
            dbias: 0,
            parts: 0,
            rows: rows as i64,
            width: columns(op, n)?,
            experts: experts as u32,
            vectorized: u32::from(whole && aligned16(&[bias, y])),
            accumulate: 0,
        })
    }
}

/// A two-dimensional grid; CUDA limits the second axis to 65535.
fn plane(op: &'static str, x: usize, y: usize) -> Result<LaunchConfig> {
    if y > 65535 {
        return shape_error(op, format!("{y} blocks along y exceed a CUDA grid; rows are too long"));
    }
    Ok(LaunchConfig { blocks: [blocks(op, x, 1)?, y as u32, 1], threads: THREADS, shared: 0 })
}

impl CudaKernels {
    pub(super) fn launch_grouped_bias(&self, s: &Stream, b: &GroupedBias, y: &Tensor) -> Result<()> {
        const OP: &str = "grouped_bias";
        let z = sizes(OP, b, y)?;
        let kernel = typed!(OP, y.dtype(), "row_bias", "row_bias_add")?;
        let args = [read(b.segments.offsets), read(b.segments.counts), read(b.bias), write(y)];
        let args: Vec<_> = args.into_iter().chain(b.weights.map(read)).collect();
        s.launch(OP, &args, |l| {
            let a = GroupedBiasArgs::new(OP, l, y.dtype(), z, b.weights.map(|_| 4))?;
            self.launch_kernel(l, kernel, line(blocks(OP, z[0], WARPS)?, THREADS), &a)
        })
    }

    pub(super) fn launch_grouped_bias_backward(
        &self,
        s: &Stream,
        b: &GroupedBias,
        dy: &Tensor,
        (dbias, accumulate): (&Tensor, bool),
        dweights: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "grouped_bias_backward";
        let z = gradient_sizes(OP, b, dy, dbias, dweights)?;
        let ([rows, n, experts], dtype) = (z, dy.dtype());
        let sums = typed!(OP, dtype, "row_bias", "row_bias_parts")?;
        let products = typed!(OP, dtype, "row_bias", "row_bias_weights")?;
        let count = rows.div_ceil(PART_ROWS).min(MAX_PARTS);
        let parts = Tensor::empty(s, &[count + experts, n], DType::F32, Category::Workspace)?;
        let mut args = vec![
            read(b.segments.offsets),
            read(b.segments.counts),
            read(b.bias),
            read(dy),
            write(dbias),
            write(&parts),
        ];
        args.extend(dweights.map(write));
        args.extend(b.weights.map(read));
        let last = args.len() - 1;
        s.launch(OP, &args, |l| {
            let mut a = GroupedBiasArgs::new(OP, l, dtype, z, b.weights.map(|_| last))?;
            (a.dbias, a.parts) = (l.address(4)?, l.address(5)?);
            a.accumulate = accumulate.into();
            self.launch_kernel(l, sums, plane(OP, count, n.div_ceil(32 * vec_width(dtype)))?, &a)?;
            let join = Kernel::new("row_bias", "row_bias_join");
            self.launch_kernel(l, join, plane(OP, experts, n.div_ceil(THREADS as usize))?, &a)?;
            if dweights.is_some() {
                a.dweights = l.address(6)?;
                self.launch_kernel(l, products, line(blocks(OP, rows, WARPS)?, THREADS), &a)?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_sums_no_more_parts_than_the_host_has_memory_for() {
        for (name, value) in [("PART_ROWS", PART_ROWS), ("MAX_PARTS", MAX_PARTS)] {
            assert!(include_str!("row_bias.cu").contains(&format!("constexpr i64 {name} = {value};")));
        }
    }
}
