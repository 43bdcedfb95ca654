//! Non-linearities whose rows have a weight.

use super::groups::{blocks, line, wide};
use super::rows::{columns, per_access};
use super::{CudaKernels, activation, typed};
use crate::checks::{dtypes, same_contiguous};
use crate::weighted::sizes;
use crate::{Act, WeightedKernels};
use ferrotron_tensor::{DType, Result, Stream, Tensor, read, shape_error, write};

const THREADS: u32 = 256;

#[repr(C)]
#[derive(Clone, Copy)]
struct WeightedArgs {
    x: u64,
    p: u64,
    live: u64,
    dy: u64,
    out: u64,
    dp: u64,
    rows: i64,
    width: i32,
    act: u32,
    wide: u32,
    limit: f32,
    alpha: f32,
    offset: f32,
}

impl WeightedArgs {
    fn new(op: &'static str, act: Act, [rows, f]: [usize; 2]) -> Result<WeightedArgs> {
        let (act, [limit, alpha, offset]) = activation::code(act);
        let width = columns(op, f)?;
        Ok(WeightedArgs {
            x: 0,
            p: 0,
            live: 0,
            dy: 0,
            out: 0,
            dp: 0,
            rows: rows as i64,
            width,
            act,
            wide: 0,
            limit,
            alpha,
            offset,
        })
    }

    /// 16-byte accesses, where the halves of rows are whole chunks and addresses allow them.
    fn align(&mut self, dtype: DType) {
        let whole = (self.width as usize).is_multiple_of(per_access(dtype));
        self.wide = u32::from(whole && wide(&[self.x, self.dy, self.out]));
    }
}

impl WeightedKernels for CudaKernels {
    fn act_weighted(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        p: &Tensor,
        y: &Tensor,
    ) -> Result<()> {
        const OP: &str = "act_weighted";
        let ([rows, f], dtype) = (sizes(OP, (act, gated), x, &[p], y)?, x.dtype());
        dtypes(OP, dtype, &[y])?;
        dtypes(OP, DType::F32, &[p])?;
        let kernel = match gated {
            true => typed!(OP, dtype, "weighted", "weighted_gated")?,
            false => typed!(OP, dtype, "weighted", "weighted_plain")?,
        };
        let chunks = rows.saturating_mul(f.div_ceil(per_access(dtype)));
        // A thread counts chunks in 32 bits, on past the last.
        if i32::try_from(chunks).is_err() {
            return shape_error(OP, format!("{rows} rows of {f} are too many at once; use smaller batches"));
        }
        s.launch(OP, &[read(x), read(p), write(y)], |l| {
            let mut a = WeightedArgs::new(OP, act, [rows, f])?;
            (a.x, a.p, a.out) = (l.address(0)?, l.address(1)?, l.address(2)?);
            a.align(dtype);
            self.queue(l, kernel, line(blocks(OP, chunks, THREADS as usize)?, THREADS), &a)
        })
    }

    fn act_weighted_backward(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        p: &Tensor,
        live: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        dp: &Tensor,
    ) -> Result<()> {
        const OP: &str = "act_weighted_backward";
        let ([rows, f], dtype) = (sizes(OP, (act, gated), x, &[p, live, dp], dy)?, x.dtype());
        same_contiguous(OP, &[x, dx])?;
        dtypes(OP, dtype, &[dy, dx])?;
        dtypes(OP, DType::F32, &[p, dp])?;
        dtypes(OP, DType::I32, &[live])?;
        let kernel = match gated {
            true => typed!(OP, dtype, "weighted", "weighted_gated_backward")?,
            false => typed!(OP, dtype, "weighted", "weighted_plain_backward")?,
        };
        let args = [read(x), read(p), read(live), read(dy), write(dx), write(dp)];
        s.launch(OP, &args, |l| {
            let mut a = WeightedArgs::new(OP, act, [rows, f])?;
            (a.x, a.p, a.live) = (l.address(0)?, l.address(1)?, l.address(2)?);
            (a.dy, a.out, a.dp) = (l.address(3)?, l.address(4)?, l.address(5)?);
            a.align(dtype);
            self.queue(l, kernel, line(blocks(OP, rows, THREADS as usize / 32)?, THREADS), &a)
        })
    }
}
