//! What the backward of the experts needs of their forward.

use crate::quant::SavedOperand;
use crate::{Module, Saved, SavedTensor};
use ferrotron_kernels::RowMap;

/// What backward needs.
pub struct ExpertsSaved {
    pub(super) a: Option<SavedOperand>,
    /// amax of `a`, where backward recomputes and quantizes it.
    pub(super) amax: Option<SavedTensor>,
    pub(super) h: SavedTensor,
    pub(super) x: SavedOperand,
    /// Whether `x` is sorted by expert already.
    pub(super) sorted: bool,
    pub(super) probs: SavedTensor,
    pub(super) map: RowMap,
    /// What adapters of the up and down projections have computed from their inputs, `[N, Σr]`.
    pub(super) adapters: [Option<SavedTensor>; 2],
    /// With DoRA, their outputs before they are scaled.
    pub(super) unscaled: [Option<SavedTensor>; 2],
}

impl Saved for ExpertsSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.a.tensors(&mut |t| f(Module::ExpertFc2, t));
        self.amax.tensors(&mut |t| f(Module::MoeAct, t));
        f(Module::MoeAct, &mut self.h);
        self.x.tensors(&mut |t| f(Module::ExpertFc1, t));
        f(Module::ExpertFc1, &mut self.probs);
        let [up, down] = &mut self.adapters;
        up.tensors(&mut |t| f(Module::ExpertFc1, t));
        down.tensors(&mut |t| f(Module::ExpertFc2, t));
        let [up, down] = &mut self.unscaled;
        up.tensors(&mut |t| f(Module::ExpertFc1, t));
        down.tensors(&mut |t| f(Module::ExpertFc2, t));
    }
}
