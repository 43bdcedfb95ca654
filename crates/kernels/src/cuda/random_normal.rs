//! Normal values on a card.

use super::grid::{blocks, line};
use super::{CudaKernels, Kernel};
use crate::elementwise::check_normal;
use crate::philox::RandomStream;
use crate::router::check;
use crate::{NormalFill, RngKey};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

/// As in normal.cu.
const THREADS: usize = 256;

#[repr(C)]
#[derive(Clone, Copy)]
struct NormalArgs {
    out: u64,
    first: u64,
    stride: u64,
    rows: i64,
    width: i64,
    groups: i64,
    std: f64,
    key: [u32; 2],
    lane: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NormalRowsArgs {
    out: u64,
    numbers: u64,
    rows: i64,
    width: i64,
    groups: i64,
    key: [u32; 2],
    lane: [u32; 2],
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
                key: stream.key,
                lane: stream.lane,
            };
            let grid = line(blocks(OP, rows * groups, THREADS)?, THREADS as u32);
            self.launch_kernel(l, Kernel { source: "random_normal", name: "normal_f32" }, grid, &args)
        })
    }

    /// See [`crate::RouterKernels::fill_normal_logits`].
    pub(super) fn launch_normal_rows(
        &self,
        s: &Stream,
        key: RngKey,
        numbers: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        const OP: &str = "fill_normal_logits";
        let [rows, width] = check::normal(OP, numbers, out)?;
        let (groups, RandomStream { key, lane }) = (groups(width), RandomStream::routing(key));
        s.launch(OP, &[read(numbers), write(out)], |l| {
            let args = NormalRowsArgs {
                out: l.address(1)?,
                numbers: l.address(0)?,
                rows: rows as i64,
                width: width as i64,
                groups: groups as i64,
                key,
                lane,
            };
            let grid = line(blocks(OP, rows * groups, THREADS)?, THREADS as u32);
            self.launch_kernel(l, Kernel { source: "random_normal", name: "normal_rows_f32" }, grid, &args)
        })
    }
}
