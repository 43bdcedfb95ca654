//! Non-linearities of the MLP.

use crate::checks::same_contiguous;
use ferrotron_tensor::{Result, Stream, Tensor, shape_error};

/// A non-linearity.
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
    /// `min(x, limit)·σ(alpha·min(x, limit))`, gated form only, where the linear half enters as
    /// `clamp(u, ±limit) + offset`. No gradient where clamped.
    ClampedSilu {
        /// Bound of both halves.
        limit: f32,
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Added to the linear half.
        offset: f32,
    },
}

/// Width of a gated pair: `wide [rows, 2f]`, `narrow [rows, f]`, both contiguous.
fn gate_width(op: &'static str, wide: &Tensor, narrow: &Tensor) -> Result<usize> {
    match (wide.shape(), narrow.shape()) {
        ([r, w], [r2, f]) if r == r2 && *w == 2 * f && wide.is_contiguous() && narrow.is_contiguous() => {
            Ok(*f)
        }
        (a, b) => {
            shape_error(op, format!("gated input {a:?} and output {b:?} must be [rows, 2f] and [rows, f]"))
        }
    }
}

/// The gate's width, or 0 without one; shapes checked.
pub(crate) fn width(op: &'static str, act: Act, gated: bool, x: &Tensor, y: &Tensor) -> Result<usize> {
    match (gated, act) {
        (true, _) => gate_width(op, x, y),
        (false, Act::ClampedSilu { .. }) => shape_error(op, "the clamped SiLU exists with a gate only"),
        (false, _) => same_contiguous(op, &[x, y]).map(|()| 0),
    }
}

/// Element-wise non-linearities, plain and gated.
pub trait ActivationKernels {
    /// `y = act(x)`, any equal shapes; or, gated, `y = act(x[.., :f])·x[.., f:]` with `x [rows, 2f]`, `y [rows, f]`.
    fn act_forward(&self, s: &Stream, act: Act, gated: bool, x: &Tensor, y: &Tensor) -> Result<()>;

    /// `dx` from the input `x` of the forward pass and `dy`.
    fn act_backward(
        &self,
        s: &Stream,
        act: Act,
        gated: bool,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<()>;
}
