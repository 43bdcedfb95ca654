use super::rows::{blocks, columns, per_access};
use super::{CudaKernels, Grid, typed};
use crate::{CrossEntropy, LossKernels};
use ferrotron_tensor::{Result, Stream, read, write};

#[repr(C)]
#[derive(Clone, Copy)]
struct LossArgs {
    logits: u64,
    labels: u64,
    weights: u64,
    loss: u64,
    fault: u64,
    stride: i64,
    width: i32,
    vocab: i32,
    spread: f32,
    off: f32,
}

impl LossKernels for CudaKernels {
    fn cross_entropy(&self, s: &Stream, c: &CrossEntropy) -> Result<()> {
        const OP: &str = "cross_entropy";
        let rows = c.check(OP)?;
        let dtype = c.logits.dtype();
        let kernel = match c.gradient {
            true => typed!(OP, dtype, "loss", "cross_entropy_gradient")?,
            false => typed!(OP, dtype, "loss", "cross_entropy")?,
        };
        // Four chunks to a thread at once, up to 512 threads: from the width alone, as the order of sums is.
        let chunks = rows.width.div_ceil(per_access(dtype));
        let threads = (chunks.div_ceil(4).next_multiple_of(32)).clamp(32, 512) as u32;
        let grid = Grid { blocks: [blocks(OP, rows.count())?, 1, 1], threads, shared: 0 };
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
            };
            self.queue(l, kernel, grid, &a)
        })
    }
}
