//! Activations with rows weighted by routing probabilities.

use super::args::kernel_args;
use super::grid::{aligned16, blocks, line};
use super::row_grid::{columns, vec_width};
use super::{CudaKernels, activation, typed};
use crate::activation::check_weighted;
use crate::checks::{dtypes, same_contiguous};
use crate::{Act, WeightedAct, WeightedActBackward};
use ferrotron_tensor::{DType, Result, Stream, Tensor, read, shape_error, write};

const THREADS: u32 = 256;

kernel_args! {
    header "args/weighted_activation.cuh", includes [];

    /// Activation whose rows are weighted by routing probabilities, and its backward pass.
    struct WeightedArgs {
        /// `[rows, width]`, gated `[rows, 2·width]`.
        x: u64,
        /// f32 `[rows]`.
        p: u64,
        /// i32 `[rows]`: negative for padding rows.
        live: u64,
        dy: u64,
        /// Output, or gradient of x.
        out: u64,
        /// f32 `[rows]`: gradient of p.
        dp: u64,
        /// f32 `[1]`: maximum of its previous value and the amax of the output.
        amax: u64,
        rows: i64,
        width: i32,
        /// `Act` of activation.cuh.
        act: u32,
        vectorized: u32,
        limit: f32,
        alpha: f32,
        offset: f32,
    }
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
            vectorized: 0,
            limit,
            alpha,
            offset,
        })
    }

    /// Uses 16-byte accesses where both halves of a row are multiples of 16 bytes and addresses are aligned.
    fn align(&mut self, dtype: DType) {
        let whole = (self.width as usize).is_multiple_of(vec_width(dtype));
        self.vectorized = u32::from(whole && aligned16(&[self.x, self.dy, self.out]));
    }
}

impl CudaKernels {
    /// [`crate::ActivationKernels::weighted_act`], optionally with the amax of `y`.
    pub(super) fn weighted(
        &self,
        s: &Stream,
        &WeightedAct { act, gated, x, probs: p, y }: &WeightedAct,
        amax: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "weighted_act";
        let ([rows, f], dtype) = (check_weighted(OP, (act, gated), x, &[p], y)?, x.dtype());
        dtypes(OP, dtype, &[y])?;
        dtypes(OP, DType::F32, &[p])?;
        let kernel = match (gated, amax.is_some()) {
            (true, false) => typed!(OP, dtype, "weighted_activation", "weighted_gated")?,
            (false, false) => typed!(OP, dtype, "weighted_activation", "weighted_ungated")?,
            (true, true) => typed!(OP, dtype, "weighted_activation", "weighted_gated_amax")?,
            (false, true) => typed!(OP, dtype, "weighted_activation", "weighted_ungated_amax")?,
        };
        let chunks = rows.saturating_mul(f.div_ceil(vec_width(dtype)));
        // Threads index chunks with 32 bits.
        if i32::try_from(chunks).is_err() {
            return shape_error(
                OP,
                format!("{rows} rows of {f} are more than 2^31 chunks of 16 bytes; use smaller batches"),
            );
        }
        let mut args = vec![read(x), read(p), write(y)];
        args.extend(amax.map(write));
        s.launch(OP, &args, |l| {
            let mut a = WeightedArgs::new(OP, act, [rows, f])?;
            (a.x, a.p, a.out) = (l.address(0)?, l.address(1)?, l.address(2)?);
            a.amax = amax.map_or(Ok(0), |_| l.address(3))?;
            a.align(dtype);
            self.launch_kernel(l, kernel, line(blocks(OP, chunks, THREADS as usize)?, THREADS), &a)
        })
    }

    /// [`crate::ActivationKernels::weighted_act_backward`], optionally with the amax of `dx`.
    pub(super) fn weighted_slope(
        &self,
        s: &Stream,
        a: &WeightedActBackward,
        amax: Option<&Tensor>,
    ) -> Result<()> {
        let &WeightedActBackward { act, gated, x, probs: p, source: live, dy, dx, dprobs: dp } = a;
        const OP: &str = "weighted_act_backward";
        let ([rows, f], dtype) = (check_weighted(OP, (act, gated), x, &[p, live, dp], dy)?, x.dtype());
        same_contiguous(OP, &[x, dx])?;
        dtypes(OP, dtype, &[dy, dx])?;
        dtypes(OP, DType::F32, &[p, dp])?;
        dtypes(OP, DType::I32, &[live])?;
        let kernel = match (gated, amax.is_some()) {
            (true, false) => typed!(OP, dtype, "weighted_activation", "weighted_gated_backward")?,
            (false, false) => typed!(OP, dtype, "weighted_activation", "weighted_ungated_backward")?,
            (true, true) => typed!(OP, dtype, "weighted_activation", "weighted_gated_backward_amax")?,
            (false, true) => typed!(OP, dtype, "weighted_activation", "weighted_ungated_backward_amax")?,
        };
        let mut args = vec![read(x), read(p), read(live), read(dy), write(dx), write(dp)];
        args.extend(amax.map(write));
        s.launch(OP, &args, |l| {
            let mut a = WeightedArgs::new(OP, act, [rows, f])?;
            (a.x, a.p, a.live) = (l.address(0)?, l.address(1)?, l.address(2)?);
            (a.dy, a.out, a.dp) = (l.address(3)?, l.address(4)?, l.address(5)?);
            a.amax = amax.map_or(Ok(0), |_| l.address(6))?;
            a.align(dtype);
            self.launch_kernel(l, kernel, line(blocks(OP, rows, THREADS as usize / 32)?, THREADS), &a)
        })
    }
}
