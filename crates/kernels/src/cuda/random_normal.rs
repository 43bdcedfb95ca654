//! Normal random values.

use super::args::kernel_args;
use super::grid::{blocks, line};
use super::philox::{PhiloxStream, StepStream};
use super::{CudaKernels, Kernel};
use crate::elementwise::check_normal;
use crate::philox::DOMAIN_ROUTING;
use crate::router::check;
use crate::{NormalFill, StepKey};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

/// As in random_normal.cu.
const THREADS: usize = 256;

kernel_args! {
    header "args/random_normal.cuh", includes ["args/philox.cuh"];

    /// out[r, c] = std·z, z being normal value first + r·stride + c of the stream.
    struct NormalArgs {
        out: u64,
        first: u64,
        stride: u64,
        rows: i64,
        width: i64,
        /// Blocks of four words that a row can touch.
        groups: i64,
        std: f64,
        stream: PhiloxStream,
    }

    /// out[r, c] = normal value numbers[r]·width + c of the stream.
    struct NormalRowsArgs {
        out: u64,
        /// i32 `[rows]`.
        numbers: u64,
        rows: i64,
        width: i64,
        groups: i64,
        stream: StepStream,
    }
}

/// Blocks of four words that a row can touch: it may begin with the last value of a block.
fn groups(width: usize) -> usize {
    if width == 0 { 0 } else { (width + 3).div_ceil(4) }
}

impl CudaKernels {
    /// See [`crate::ElementwiseKernels::normal`].
    pub(super) fn launch_normal(&self, s: &Stream, runs: NormalFill, out: &Tensor) -> Result<()> {
        const OP: &str = "normal";
        let [rows, width] = check_normal(out)?;
        let groups = groups(width);
        s.launch(OP, &[write(out)], |l| {
            let NormalFill { stream, first, stride, std } = runs;
            let args = NormalArgs {
                out: l.address(0)?,
                first,
                stride,
                rows: rows as i64,
                width: width as i64,
                groups: groups as i64,
                std,
                stream: stream.into(),
            };
            let grid = line(blocks(OP, rows * groups, THREADS)?, THREADS as u32);
            self.launch_kernel(l, Kernel::new("random_normal", "normal_f32"), grid, &args)
        })
    }

    /// See [`crate::RouterKernels::fill_normal_logits`].
    pub(super) fn launch_normal_rows(
        &self,
        s: &Stream,
        key: StepKey,
        numbers: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "fill_normal_logits";
        let [rows, width] = check::normal(OP, numbers, out)?;
        key.check(OP)?;
        let groups = groups(width);
        let args: Vec<_> = [read(numbers), write(out)].into_iter().chain(key.step.map(read)).collect();
        s.launch(OP, &args, |l| {
            let args = NormalRowsArgs {
                out: l.address(1)?,
                numbers: l.address(0)?,
                rows: rows as i64,
                width: width as i64,
                groups: groups as i64,
                stream: StepStream::new(l, key, 2, DOMAIN_ROUTING)?,
            };
            let grid = line(blocks(OP, rows * groups, THREADS)?, THREADS as u32);
            self.launch_kernel(l, Kernel::new("random_normal", "normal_rows_f32"), grid, &args)
        })
    }
}
