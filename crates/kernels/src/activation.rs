//! Non-linearities of the MLP.

use ferrotron_tensor::{Result, Stream, Tensor};

/// A non-linearity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    /// `½x(1 + tanh(√(2/π)(x + 0.044715x³)))`
    GeluTanh,
    /// `½x(1 + erf(x/√2))`
    GeluErf,
    /// `x·σ(x)`
    Silu,
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
