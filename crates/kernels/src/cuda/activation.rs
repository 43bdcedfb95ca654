//! Activation functions, plain and gated.

use super::args::kernel_args;
use super::row_grid::{blocks, columns, vec_width};
use super::{CudaKernels, Kernel, LaunchConfig, typed};
use crate::activation::{as_matrix, check_act, check_dbias};
use crate::checks::{dtypes, same_contiguous};
use crate::quant::check::one;
use crate::{
    Act, ActBackward, ActForward, ActivationKernels, QuantKernels, WeightedAct, WeightedActBackward,
};
use ferrotron_tensor::{DType, Result, Stream, Tensor, read, shape_error, write};

/// Partial column sums: at least so many rows each, and at most so many of them.
const PART_ROWS: usize = 64;
const MAX_PARTS: usize = 256;

kernel_args! {
    header "args/activation.cuh", includes [];

    /// An activation function over `[rows, width]`, gated or not, and its backward pass.
    struct ActArgs {
        /// Input: `[rows, width]`, gated `[rows, 2·width]`.
        x: u64,
        /// Gradient of the output, `[rows, width]`; backward only.
        dy: u64,
        /// Output, or in the backward pass the gradient of the input.
        out: u64,
        /// f32 `[1]`, raised to the amax of what is written; or f32 `[parts, width]`, partial column sums.
        amax: u64,
        rows: i64,
        width: i64,
        /// `Act` of activation.cuh.
        act: u32,
        /// Rows and addresses are multiples of 16 bytes.
        vectorized: u32,
        /// Parameters of the clamped SiLU.
        limit: f32,
        alpha: f32,
        offset: f32,
        /// Rows whose column sums form one part.
        part_rows: u32,
    }
}

/// An activation as activation.cuh numbers it, and its limit, alpha and offset.
pub(super) fn code(act: Act) -> (u32, [f32; 3]) {
    match act {
        Act::GeluTanh => (0, [0.0; 3]),
        Act::GeluErf => (1, [0.0; 3]),
        Act::Silu => (2, [0.0; 3]),
        Act::ClampedSilu { limit, alpha, offset } => (3, [limit, alpha, offset]),
        Act::SquaredRelu => (4, [0.0; 3]),
    }
}

impl ActArgs {
    /// For outputs of `all` elements in rows of `f`; without a gate (`f` = 0) they are one row.
    fn new(act: Act, all: usize, f: usize) -> ActArgs {
        let (rows, width) = all.checked_div(f).map_or((1, all), |rows| (rows, f));
        let (code, [limit, alpha, offset]) = code(act);
        let (rows, width) = (rows as i64, width as i64);
        ActArgs {
            x: 0,
            dy: 0,
            out: 0,
            amax: 0,
            rows,
            width,
            act: code,
            vectorized: 0,
            limit,
            alpha,
            offset,
            part_rows: 0,
        }
    }

    /// 16-byte accesses where addresses and, if gated, the halves of rows are aligned.
    fn align(&mut self, dtype: DType, gated: bool) {
        let bases = (self.x | self.dy | self.out).is_multiple_of(16);
        self.vectorized =
            u32::from(bases && (!gated || (self.width as usize).is_multiple_of(vec_width(dtype))));
    }

    fn grid(&self, op: &'static str, dtype: DType) -> Result<LaunchConfig> {
        let chunks = self.rows as usize * (self.width as usize).div_ceil(vec_width(dtype));
        // Kernels count chunks in 32 bits; that is 64 GiB of input.
        if u32::try_from(chunks).is_err() {
            return shape_error(
                op,
                format!(
                    "{} rows of {} are more than 2^32 chunks of 16 bytes; use smaller batches",
                    self.rows, self.width
                ),
            );
        }
        Ok(LaunchConfig { blocks: [blocks(op, chunks.div_ceil(256))?, 1, 1], threads: 256, shared: 0 })
    }
}

impl CudaKernels {
    /// `y = act(x)`; with `amax` (bf16 only) also raises the amax of `y`.
    pub(super) fn act(
        &self,
        s: &Stream,
        (act, gated): (Act, bool),
        x: &Tensor,
        y: &Tensor,
        amax: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "act_forward";
        let (f, dtype) = (check_act(OP, act, gated, x, y)?, x.dtype());
        dtypes(OP, dtype, &[y])?;
        let kernel = match (gated, amax) {
            (true, None) => typed!(OP, dtype, "activation", "gated_forward")?,
            (false, None) => typed!(OP, dtype, "activation", "act_forward")?,
            (true, Some(_)) => Kernel::new("activation", "gated_forward_amax"),
            (false, Some(_)) => Kernel::new("activation", "act_forward_amax"),
        };
        let args = [read(x), write(y), write(amax.unwrap_or(y))];
        s.launch(OP, &args[..if amax.is_some() { 3 } else { 2 }], |l| {
            let mut a = ActArgs::new(act, y.numel(), f);
            (a.x, a.out) = (l.address(0)?, l.address(1)?);
            a.align(dtype, gated);
            a.amax = amax.map_or(Ok(0), |_| l.address(2))?;
            self.launch_kernel(l, kernel, a.grid(OP, dtype)?, &a)
        })
    }

    /// `dx = act'(x)·dy`; with `amax` (bf16 only) also raises the amax of `dx`.
    pub(super) fn act_slope(
        &self,
        s: &Stream,
        (act, gated): (Act, bool),
        [x, dy, dx]: [&Tensor; 3],
        amax: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "act_backward";
        let (f, dtype) = (check_act(OP, act, gated, x, dy)?, x.dtype());
        same_contiguous(OP, &[x, dx])?;
        dtypes(OP, dtype, &[dy, dx])?;
        let kernel = match (gated, amax) {
            (true, None) => typed!(OP, dtype, "activation", "gated_backward")?,
            (false, None) => typed!(OP, dtype, "activation", "act_backward")?,
            (true, Some(_)) => Kernel::new("activation", "gated_backward_amax"),
            (false, Some(_)) => Kernel::new("activation", "act_backward_amax"),
        };
        let args = [read(x), read(dy), write(dx), write(amax.unwrap_or(dx))];
        s.launch(OP, &args[..if amax.is_some() { 4 } else { 3 }], |l| {
            let mut a = ActArgs::new(act, dy.numel(), f);
            (a.x, a.dy, a.out) = (l.address(0)?, l.address(1)?, l.address(2)?);
            a.align(dtype, gated);
            a.amax = amax.map_or(Ok(0), |_| l.address(3))?;
            self.launch_kernel(l, kernel, a.grid(OP, dtype)?, &a)
        })
    }
}

/// Rows of a partial column sum, and how many there are. Enough to fill a GPU to the end, and few enough to be small
/// beside the rows.
pub(super) fn parts(rows: usize) -> (usize, usize) {
    let each = rows.div_ceil(MAX_PARTS).max(PART_ROWS);
    (each, rows.div_ceil(each).max(1))
}

impl CudaKernels {
    /// `dx` of an activation without a gate over `x [rows, n]`, and partial column sums of it (the bias gradient).
    pub(super) fn act_slope_columns(
        &self,
        s: &Stream,
        act: Act,
        [x, dy, dx]: [&Tensor; 3],
        sums: &Tensor,
    ) -> Result<()> {
        const OP: &str = "act_backward";
        let dtype = x.dtype();
        check_act(OP, act, false, x, dy)?;
        same_contiguous(OP, &[x, dx])?;
        dtypes(OP, dtype, &[dy, dx])?;
        dtypes(OP, DType::F32, &[sums])?;
        let kernel = typed!(OP, dtype, "activation", "act_backward_dbias")?;
        let [rows, n] = [x.shape()[0], columns(OP, x.shape()[1])? as usize];
        let (each, count) = parts(rows);
        s.launch(OP, &[read(x), read(dy), write(dx), write(sums)], |l| {
            let mut a = ActArgs::new(act, rows * n, n);
            (a.x, a.dy, a.out, a.amax) = (l.address(0)?, l.address(1)?, l.address(2)?, l.address(3)?);
            a.rows = rows as i64;
            a.part_rows = each as u32;
            // Rows are contiguous: either all of them are aligned like the first, or alignment is not used.
            a.align(dtype, true);
            let across = blocks(OP, n.div_ceil(32 * vec_width(dtype)))?;
            let grid = LaunchConfig { blocks: [across, count as u32, 1], threads: 256, shared: 0 };
            self.launch_kernel(l, kernel, grid, &a)
        })
    }
}

impl ActivationKernels for CudaKernels {
    fn act_forward(&self, s: &Stream, a: &ActForward) -> Result<()> {
        self.act(s, (a.act, a.gated), a.x, a.y, None)
    }

    fn act_forward_amax(&self, s: &Stream, a: &ActForward, amax: &Tensor) -> Result<()> {
        one("act_forward", amax)?;
        // Only the bf16 kernels take the amax as they write.
        if a.y.dtype() != DType::BF16 {
            self.act_forward(s, a)?;
            return self.amax(s, &as_matrix(a.y)?, amax);
        }
        self.act(s, (a.act, a.gated), a.x, a.y, Some(amax))
    }

    fn act_backward(&self, s: &Stream, a: &ActBackward) -> Result<()> {
        self.act_slope(s, (a.act, a.gated), [a.x, a.dy, a.dx], None)
    }

    fn act_backward_amax(&self, s: &Stream, a: &ActBackward, amax: &Tensor) -> Result<()> {
        one("act_backward", amax)?;
        if a.dx.dtype() != DType::BF16 {
            self.act_backward(s, a)?;
            return self.amax(s, &as_matrix(a.dx)?, amax);
        }
        self.act_slope(s, (a.act, a.gated), [a.x, a.dy, a.dx], Some(amax))
    }

    fn act_partials(&self, _dtype: DType, rows: usize, _n: usize) -> usize {
        parts(rows).1
    }

    fn act_backward_dbias(&self, s: &Stream, a: &ActBackward, dbias: &Tensor) -> Result<()> {
        check_dbias("act_backward", a, dbias, |rows, _| parts(rows).1)?;
        self.act_slope_columns(s, a.act, [a.x, a.dy, a.dx], dbias)
    }

    fn weighted_act(&self, s: &Stream, a: &WeightedAct) -> Result<()> {
        self.weighted(s, a, None)
    }

    fn weighted_act_amax(&self, s: &Stream, a: &WeightedAct, amax: &Tensor) -> Result<()> {
        one("weighted_act", amax)?;
        self.weighted(s, a, Some(amax))
    }

    fn weighted_act_backward(&self, s: &Stream, a: &WeightedActBackward) -> Result<()> {
        self.weighted_slope(s, a, None)
    }

    fn weighted_act_backward_amax(&self, s: &Stream, a: &WeightedActBackward, amax: &Tensor) -> Result<()> {
        one("weighted_act_backward", amax)?;
        self.weighted_slope(s, a, Some(amax))
    }
}
