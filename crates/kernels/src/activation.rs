//! Activations of the MLP, plain and gated, and the weighted form that MoE experts use.
//!
//! A gated activation reads `x [rows, 2f]`, whose first half goes through the activation and whose second half is the
//! linear gate (SwiGLU, GeGLU). Arithmetic is in f32; the result is rounded once.

use crate::checks::{contiguous, same_contiguous};
use crate::{ElementwiseKernels, QuantKernels};
use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    /// `½x(1 + tanh(√(2/π)(x + 0.044715x³)))`
    GeluTanh,
    /// `½x(1 + erf(x/√2))`
    GeluErf,
    /// `x·σ(x)`
    Silu,
    /// `max(x, 0)²`
    SquaredRelu,
    /// GPT-OSS's clamped SwiGLU, gated only: `min(x, limit)·σ(alpha·min(x, limit))·(clamp(u, ±limit) + offset)`.
    /// The gradient is zero where a value is clamped.
    ClampedSilu {
        /// Bound of both halves.
        limit: f32,
        /// Factor inside the sigmoid.
        alpha: f32,
        /// Added to the linear half.
        offset: f32,
    },
}

/// `y = act(x)` for equal shapes; gated: `y = act(x[:, :f])·x[:, f:]` with `x [rows, 2f]`, `y [rows, f]`.
#[derive(Clone, Copy)]
pub struct ActForward<'a> {
    /// The activation function.
    pub act: Act,
    /// Whether the second half of `x` is a linear gate.
    pub gated: bool,
    /// Input, contiguous.
    pub x: &'a Tensor,
    /// Output, contiguous.
    pub y: &'a Tensor,
}

/// Gradient of [`ActForward`]: `dx` from the input `x` of the forward pass and `dy`.
#[derive(Clone, Copy)]
pub struct ActBackward<'a> {
    /// The activation function.
    pub act: Act,
    /// Whether the second half of `x` is a linear gate.
    pub gated: bool,
    /// Input of the forward pass.
    pub x: &'a Tensor,
    /// Gradient of the output.
    pub dy: &'a Tensor,
    /// Gradient of the input, of the shape of `x`.
    pub dx: &'a Tensor,
}

/// An activation times a routing probability per row: `y[r] = probs[r]·act(x[r, :f])·x[r, f:]` (not gated:
/// `probs[r]·act(x[r])`). A row with probability 0 is zero whatever `x` holds.
#[derive(Clone, Copy)]
pub struct WeightedAct<'a> {
    /// The activation function.
    pub act: Act,
    /// Whether the second half of `x` is a linear gate.
    pub gated: bool,
    /// `[N, 2f]`, or `[N, f]` where it is not gated.
    pub x: &'a Tensor,
    /// f32 `[N]`
    pub probs: &'a Tensor,
    /// `[N, f]`
    pub y: &'a Tensor,
}

/// Gradient of [`WeightedAct`]: `dx`, and `dprobs[r] = Σ_c act(x[r, c])·x[r, f + c]·dy[r, c]`.
#[derive(Clone, Copy)]
pub struct WeightedActBackward<'a> {
    /// The activation function.
    pub act: Act,
    /// Whether the second half of `x` is a linear gate.
    pub gated: bool,
    /// Input of the forward pass, `[N, 2f]` or `[N, f]`.
    pub x: &'a Tensor,
    /// f32 `[N]`
    pub probs: &'a Tensor,
    /// i32 `[N]`: [`RowMap::source`](crate::RowMap::source). Rows with a negative source are padding: their `dx` and
    /// `dprobs` are zero whatever `x` and `dy` hold.
    pub source: &'a Tensor,
    /// `[N, f]`
    pub dy: &'a Tensor,
    /// Gradient of the input, of the shape of `x`.
    pub dx: &'a Tensor,
    /// f32 `[N]`
    pub dprobs: &'a Tensor,
}

/// Activation kernels.
///
/// The `_amax` variants also take the largest magnitude of their result, as it is stored, while they write it: where
/// the result is quantized next, this saves a pass over memory. `amax` is f32 `[1]` and becomes the larger of itself
/// and that magnitude. Their results are bit for bit those of the plain kernels.
pub trait ActivationKernels: ElementwiseKernels + QuantKernels {
    /// See [`ActForward`].
    fn act_forward(&self, s: &Stream, a: &ActForward) -> Result<()>;

    /// [`ActivationKernels::act_forward`] and the amax of `y`.
    fn act_forward_amax(&self, s: &Stream, a: &ActForward, amax: &Tensor) -> Result<()> {
        self.act_forward(s, a)?;
        self.amax(s, &as_matrix(a.y)?, amax)
    }

    /// See [`ActBackward`].
    fn act_backward(&self, s: &Stream, a: &ActBackward) -> Result<()>;

    /// [`ActivationKernels::act_backward`] and the amax of `dx`.
    fn act_backward_amax(&self, s: &Stream, a: &ActBackward, amax: &Tensor) -> Result<()> {
        self.act_backward(s, a)?;
        self.amax(s, &as_matrix(a.dx)?, amax)
    }

    /// Rows of partial sums that [`ActivationKernels::act_backward_dbias`] writes for `[rows, n]`.
    fn act_partials(&self, _dtype: DType, _rows: usize, _n: usize) -> usize {
        1
    }

    /// [`ActivationKernels::act_backward`] of a plain activation of `x [rows, n]`, and partial column sums of `dx` as it
    /// is stored: `dbias` f32 `[act_partials, n]`, whose rows add up to the bias gradient.
    fn act_backward_dbias(&self, s: &Stream, a: &ActBackward, dbias: &Tensor) -> Result<()> {
        let [_, n] = check_dbias("act_backward", a, dbias, |_, _| 1)?;
        self.act_backward(s, a)?;
        self.column_sum(s, a.dx, false, &dbias.view(&[n])?)
    }

    /// See [`WeightedAct`].
    fn weighted_act(&self, s: &Stream, a: &WeightedAct) -> Result<()>;

    /// [`ActivationKernels::weighted_act`] and the amax of `y`.
    fn weighted_act_amax(&self, s: &Stream, a: &WeightedAct, amax: &Tensor) -> Result<()> {
        self.weighted_act(s, a)?;
        self.amax(s, a.y, amax)
    }

    /// See [`WeightedActBackward`].
    fn weighted_act_backward(&self, s: &Stream, a: &WeightedActBackward) -> Result<()>;

    /// [`ActivationKernels::weighted_act_backward`] and the amax of `dx`.
    fn weighted_act_backward_amax(&self, s: &Stream, a: &WeightedActBackward, amax: &Tensor) -> Result<()> {
        self.weighted_act_backward(s, a)?;
        self.amax(s, a.dx, amax)
    }
}

/// A contiguous tensor as a matrix of its last axis.
pub(crate) fn as_matrix(t: &Tensor) -> Result<Tensor> {
    let width = t.shape().last().copied().unwrap_or(1);
    t.view(&[t.numel().checked_div(width).unwrap_or(0), width])
}

fn check_gate(op: &'static str, act: Act, gated: bool) -> Result<()> {
    if !gated && matches!(act, Act::ClampedSilu { .. }) {
        return shape_error(op, "the clamped SiLU exists in its gated form only");
    }
    Ok(())
}

/// Checks an activation's input `x` and output (or its gradient) `y`; returns the gate's width `f`, 0 where it is not
/// gated.
pub(crate) fn check_act(op: &'static str, act: Act, gated: bool, x: &Tensor, y: &Tensor) -> Result<usize> {
    check_gate(op, act, gated)?;
    if !gated {
        return same_contiguous(op, &[x, y]).map(|()| 0);
    }
    match (x.shape(), y.shape()) {
        ([r, w], [r2, f]) if r == r2 && *w == 2 * f && x.is_contiguous() && y.is_contiguous() => Ok(*f),
        (a, b) => {
            shape_error(op, format!("gated input {a:?} and output {b:?} must be [rows, 2f] and [rows, f]"))
        }
    }
}

/// Checks a weighted activation: `x [N, 2f]` (not gated: `[N, f]`), one value per row in each of `per_row`, and
/// `y [N, f]`. Returns N and f.
pub(crate) fn check_weighted(
    op: &'static str,
    (act, gated): (Act, bool),
    x: &Tensor,
    per_row: &[&Tensor],
    y: &Tensor,
) -> Result<[usize; 2]> {
    check_gate(op, act, gated)?;
    contiguous(op, &[x, y])?;
    contiguous(op, per_row)?;
    match (x.shape(), y.shape()) {
        ([rows, w], [r, f])
            if rows == r
                && *w == if gated { 2 * f } else { *f }
                && per_row.iter().all(|v| v.shape() == [*rows]) =>
        {
            Ok([*rows, *f])
        }
        (x, y) => {
            let per_row: Vec<_> = per_row.iter().map(|v| v.shape()).collect();
            let width = if gated { "2f" } else { "f" };
            shape_error(op, format!("{x:?}, {y:?}, {per_row:?} must be [N, {width}], [N, f], [N]"))
        }
    }
}

/// Checks that `dbias` holds `[partials(rows, n), n]` for `x [rows, n]`; returns rows and n.
pub(crate) fn check_dbias(
    op: &'static str,
    a: &ActBackward,
    dbias: &Tensor,
    partials: impl FnOnce(usize, usize) -> usize,
) -> Result<[usize; 2]> {
    if a.gated {
        return shape_error(op, "a gated activation has no fused bias gradient");
    }
    match a.x.shape() {
        [rows, n] if dbias.shape() == [partials(*rows, *n), *n] && dbias.is_contiguous() => Ok([*rows, *n]),
        shape => shape_error(
            op,
            format!("x {shape:?} needs partial bias gradients [act_partials, n], not {:?}", dbias.shape()),
        ),
    }
}
