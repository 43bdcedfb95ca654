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
    amax: u64,
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
            amax: 0,
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

impl CudaKernels {
    /// [`WeightedKernels::act_weighted`], and the largest magnitude of `y` where it is asked for.
    pub(super) fn weighted(
        &self,
        s: &Stream,
        (act, gated): (Act, bool),
        [x, p, y]: [&Tensor; 3],
        amax: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "act_weighted";
        let ([rows, f], dtype) = (sizes(OP, (act, gated), x, &[p], y)?, x.dtype());
        dtypes(OP, dtype, &[y])?;
        dtypes(OP, DType::F32, &[p])?;
        let kernel = match (gated, amax.is_some()) {
            (true, false) => typed!(OP, dtype, "weighted", "weighted_gated")?,
            (false, false) => typed!(OP, dtype, "weighted", "weighted_plain")?,
            (true, true) => typed!(OP, dtype, "weighted", "weighted_gated_amax")?,
            (false, true) => typed!(OP, dtype, "weighted", "weighted_plain_amax")?,
        };
        let chunks = rows.saturating_mul(f.div_ceil(per_access(dtype)));
        // A thread counts chunks in 32 bits, on past the last.
        if i32::try_from(chunks).is_err() {
            return shape_error(OP, format!("{rows} rows of {f} are too many at once; use smaller batches"));
        }
        let mut args = vec![read(x), read(p), write(y)];
        args.extend(amax.map(write));
        s.launch(OP, &args, |l| {
            let mut a = WeightedArgs::new(OP, act, [rows, f])?;
            (a.x, a.p, a.out) = (l.address(0)?, l.address(1)?, l.address(2)?);
            a.amax = amax.map_or(Ok(0), |_| l.address(3))?;
            a.align(dtype);
            self.queue(l, kernel, line(blocks(OP, chunks, THREADS as usize)?, THREADS), &a)
        })
    }

    /// [`WeightedKernels::act_weighted_backward`], and the largest magnitude of `dx` where it is asked for.
    pub(super) fn weighted_slope(
        &self,
        s: &Stream,
        (act, gated): (Act, bool),
        [x, p, live, dy]: [&Tensor; 4],
        [dx, dp]: [&Tensor; 2],
        amax: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "act_weighted_backward";
        let ([rows, f], dtype) = (sizes(OP, (act, gated), x, &[p, live, dp], dy)?, x.dtype());
        same_contiguous(OP, &[x, dx])?;
        dtypes(OP, dtype, &[dy, dx])?;
        dtypes(OP, DType::F32, &[p, dp])?;
        dtypes(OP, DType::I32, &[live])?;
        let kernel = match (gated, amax.is_some()) {
            (true, false) => typed!(OP, dtype, "weighted", "weighted_gated_backward")?,
            (false, false) => typed!(OP, dtype, "weighted", "weighted_plain_backward")?,
            (true, true) => typed!(OP, dtype, "weighted", "weighted_gated_backward_amax")?,
            (false, true) => typed!(OP, dtype, "weighted", "weighted_plain_backward_amax")?,
        };
        let mut args = vec![read(x), read(p), read(live), read(dy), write(dx), write(dp)];
        args.extend(amax.map(write));
        s.launch(OP, &args, |l| {
            let mut a = WeightedArgs::new(OP, act, [rows, f])?;
            (a.x, a.p, a.live) = (l.address(0)?, l.address(1)?, l.address(2)?);
            (a.dy, a.out, a.dp) = (l.address(3)?, l.address(4)?, l.address(5)?);
            a.amax = amax.map_or(Ok(0), |_| l.address(6))?;
            a.align(dtype);
            self.queue(l, kernel, line(blocks(OP, rows, THREADS as usize / 32)?, THREADS), &a)
        })
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
        self.weighted(s, (act, gated), [x, p, y], None)
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
        self.weighted_slope(s, (act, gated), [x, p, live, dy], [dx, dp], None)
    }
}
