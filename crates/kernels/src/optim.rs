//! Optimizer steps over lists of tensors.

use ferrotron_tensor::{DType, Result, Stream, Tensor, shape_error};

/// Entries of the step-scalar buffer (f32): what changes from step to step is read from device memory, so
/// that a captured step can be replayed.
pub mod scalars {
    /// Learning rate.
    pub const LR: usize = 0;
    /// Weight decay.
    pub const WEIGHT_DECAY: usize = 1;
    /// `1 − β1^t`
    pub const BIAS1: usize = 2;
    /// `1 − β2^t`
    pub const BIAS2: usize = 3;
    /// Factor on gradients from clipping.
    pub const CLIP: usize = 4;
    /// Global gradient norm before clipping.
    pub const GRAD_NORM: usize = 5;
    /// Zero on the first step (SGD starts its momentum from the gradient).
    pub const STEPS_DONE: usize = 6;
    /// Entries in all.
    pub const COUNT: usize = 8;
}

/// Constants of Adam.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// AdamW (decay beside the gradient) or Adam with L2 (decay inside it).
    pub decoupled: bool,
}

/// Constants of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Decay of the momentum.
    pub momentum: f32,
    /// One minus the weight of a new gradient.
    pub dampening: f32,
    /// Look ahead.
    pub nesterov: bool,
}

/// One parameter in an optimizer step. All tensors are contiguous and of equal size.
pub struct Update<'a> {
    /// f32: the parameter the arithmetic is on.
    pub master: &'a Tensor,
    /// bf16 copy to write in the same pass, where the model computes in bf16.
    pub weight: Option<&'a Tensor>,
    /// f32 gradient.
    pub grad: &'a Tensor,
    /// f32 or bf16: first moment (Adam) or momentum (SGD).
    pub first: &'a Tensor,
    /// f32 or bf16: second moment (Adam).
    pub second: Option<&'a Tensor>,
    /// Factor on the learning rate.
    pub lr_mult: f32,
    /// Factor on the weight decay.
    pub wd_mult: f32,
}

/// Optimizers and the norms they need.
pub trait OptimKernels {
    /// One Adam step: `m, v` updated; `p −= lr·(m̂/(√v̂ + ε) + wd·p)` (decoupled).
    fn adam(&self, s: &Stream, adam: Adam, scalars: &Tensor, list: &[Update]) -> Result<()>;

    /// One SGD step with momentum.
    fn sgd(&self, s: &Stream, sgd: Sgd, scalars: &Tensor, list: &[Update]) -> Result<()>;

    /// Writes the joint l2 norm of f32 gradients into `scalars[GRAD_NORM]`, and
    /// `min(1, max_norm/(norm + 1e-6))` into `scalars[CLIP]` (1 where `max_norm` is none).
    fn clip_factor(
        &self,
        s: &Stream,
        grads: &[&Tensor],
        max_norm: Option<f32>,
        scalars: &Tensor,
    ) -> Result<()>;

    /// `square[0] = Σ g²` over f32 gradients; `square` f64 `[1]`. Squares of several ranks add up before
    /// [`OptimKernels::clip_from`].
    fn square_sum(&self, s: &Stream, grads: &[&Tensor], square: &Tensor) -> Result<()>;

    /// The same as [`OptimKernels::clip_factor`], from the sum of squares.
    fn clip_from(&self, s: &Stream, square: &Tensor, max_norm: Option<f32>, scalars: &Tensor) -> Result<()>;
}

/// A sum of squares.
pub(crate) fn check_square(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [1] || t.dtype() != DType::F64 {
        return shape_error(op, format!("a sum of squares is one f64 number, not {t:?}"));
    }
    Ok(())
}

/// The buffer of step scalars.
pub(crate) fn check_scalars(op: &'static str, t: &Tensor) -> Result<()> {
    if t.shape() != [scalars::COUNT] || !t.is_contiguous() {
        return shape_error(
            op,
            format!("the buffer of step scalars is {:?}, not [{}]", t.shape(), scalars::COUNT),
        );
    }
    Ok(())
}
