//! What backward of a linear needs of its forward.

use crate::error::missing_activation;
use crate::quant::SavedOperand;
use crate::{Saved, SavedTensor};
use ferrotron_tensor::{Result, Tensor};

/// The saved input of a linear: as it is, quantized for wgrad, or dropped where the caller can recompute it.
pub struct LinearSaved {
    pub(crate) x: Option<SavedTensor>,
    /// The input quantized as the operand of wgrad, instead of `x`.
    pub(crate) quantized: Option<SavedOperand>,
    /// amax of the input, all-reduced, where backward quantizes it. It survives [`LinearSaved::drop_input`], so that a
    /// recomputed input is quantized identically.
    pub(crate) amax: Option<SavedTensor>,
    /// What an adapter has computed from the input, `[tokens, Σr]`.
    pub(crate) adapter: Option<SavedTensor>,
    /// With DoRA, the output before it is scaled, `[tokens, out]`.
    pub(crate) unscaled: Option<SavedTensor>,
    /// Backward reads no input: the weight is frozen, without an adapter.
    pub(crate) input_unused: bool,
}

impl LinearSaved {
    /// Saves the input as it is.
    pub(crate) fn of(x: &Tensor) -> LinearSaved {
        LinearSaved { x: Some(SavedTensor::activation(x)), ..LinearSaved::empty() }
    }

    /// Saves the quantized input.
    pub(crate) fn of_quantized(operand: SavedOperand) -> LinearSaved {
        LinearSaved { quantized: Some(operand), ..LinearSaved::empty() }
    }

    pub(super) fn empty() -> LinearSaved {
        let (x, quantized, amax, adapter, unscaled) = Default::default();
        LinearSaved { x, quantized, amax, adapter, unscaled, input_unused: false }
    }

    /// Drops the input; the caller recomputes it before backward.
    pub(crate) fn drop_input(&mut self) {
        (self.x, self.quantized) = (None, None);
    }

    /// Restores a recomputed input.
    pub(crate) fn restore_input(&mut self, x: &Tensor) {
        (self.x, self.quantized) = ((!self.input_unused).then(|| SavedTensor::activation(x)), None);
    }

    /// Whether the input was dropped, and backward needs it.
    pub(crate) fn is_input_dropped(&self) -> bool {
        self.x.is_none() && self.quantized.is_none() && !self.input_unused
    }

    /// The unquantized input; an error where it was dropped and not restored.
    pub(crate) fn input(self) -> Result<SavedTensor> {
        self.x.map_or_else(|| missing_activation("linear", "input"), Ok)
    }
}

impl Saved for LinearSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.unscaled.tensors(f);
        self.x.tensors(f);
        self.quantized.tensors(f);
        self.amax.tensors(f);
        self.adapter.tensors(f);
    }
}
