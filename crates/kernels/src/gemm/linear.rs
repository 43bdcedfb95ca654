//! A linear layer's GEMMs fused with the activation around them.

use crate::{Act, ActBackward, ActForward, Gemm};
use ferrotron_tensor::Tensor;

/// Linear layer and activation: `h = x·wᵀ (+ bias)`, `y = act(h)`.
#[derive(Clone, Copy)]
pub struct LinearAct<'a> {
    /// The activation, not gated.
    pub act: Act,
    /// `[rows, k]`
    pub x: &'a Tensor,
    /// `[n, k]`
    pub w: &'a Tensor,
    /// `[n]`
    pub bias: Option<&'a Tensor>,
    /// Input of the activation, `[rows, n]`, contiguous. A fused kernel may round it after applying the activation.
    pub h: &'a Tensor,
    /// `[rows, n]`, contiguous.
    pub y: &'a Tensor,
}

/// Gradient through a linear layer and the activation before it: `dh = (dy·w)·act'(h)`.
#[derive(Clone, Copy)]
pub struct LinearActBackward<'a> {
    /// The activation, not gated.
    pub act: Act,
    /// Gradient of the linear layer's output, `[rows, k]`.
    pub dy: &'a Tensor,
    /// `[k, n]`
    pub w: &'a Tensor,
    /// Input of the activation, `[rows, n]`, contiguous.
    pub h: &'a Tensor,
    /// `[rows, n]`, contiguous.
    pub dh: &'a Tensor,
    /// f32 `[act_partials, n]`: partial column sums of `dh`, see
    /// [`ActivationKernels::act_backward_dbias`](crate::ActivationKernels::act_backward_dbias).
    pub dbias: Option<&'a Tensor>,
}

/// Weight and bias gradient of a linear layer: `dw (+)= dyᵀ·x`, `db (+)= Σ_r dy[r]`.
#[derive(Clone, Copy)]
pub struct LinearWgrad<'a> {
    /// `[rows, n]`
    pub dy: &'a Tensor,
    /// `[rows, k]`
    pub x: &'a Tensor,
    /// f32 `[n, k]`, and whether to accumulate into it.
    pub dw: (&'a Tensor, bool),
    /// f32 `[n]`, and whether to accumulate into it.
    pub db: (&'a Tensor, bool),
}

impl<'a> LinearAct<'a> {
    /// Its GEMM, into `c`.
    pub(crate) fn gemm(&self, c: &'a Tensor) -> Gemm<'a> {
        Gemm { a: self.x, trans_a: false, b: self.w, trans_b: true, bias: self.bias, accumulate: false, c }
    }

    /// Its activation.
    pub(crate) fn activation(&self) -> ActForward<'a> {
        ActForward { act: self.act, gated: false, x: self.h, y: self.y }
    }
}

impl<'a> LinearActBackward<'a> {
    /// Its GEMM, into `c`.
    pub(crate) fn gemm(&self, c: &'a Tensor) -> Gemm<'a> {
        Gemm { a: self.dy, trans_a: false, b: self.w, trans_b: false, bias: None, accumulate: false, c }
    }

    /// Its activation, for the gradient `dy [rows, n]` that the GEMM wrote.
    pub(crate) fn activation(&self, dy: &'a Tensor) -> ActBackward<'a> {
        ActBackward { act: self.act, gated: false, x: self.h, dy, dx: self.dh }
    }
}

impl<'a> LinearWgrad<'a> {
    /// Its GEMM, into `c`.
    pub(crate) fn gemm(&self, c: &'a Tensor) -> Gemm<'a> {
        let accumulate = self.dw.1;
        Gemm { a: self.dy, trans_a: true, b: self.x, trans_b: false, bias: None, accumulate, c }
    }
}
