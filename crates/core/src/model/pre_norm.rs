//! How a block gets its input from the residual stream: through a norm (pre-norm), or as it is (OLMo-2, whose norms come
//! after the blocks).

use super::config::ModelConfig;
use super::layer::norm_of;
use ferrotron_engine::{
    Declarations, HiddenStates, NormLayer, NormSaved, Recompute, Saved, SavedTensor, StepContext, WeightGrad,
    WithAmax, missing_activation,
};
use ferrotron_tensor::{Result, Tensor};

/// The norm before a block, if the model has one.
pub(super) struct PreNorm(Option<NormLayer>);

/// What backward needs.
#[allow(clippy::large_enum_variant)] // all layers of a model have the same variant
pub(super) enum PreNormSaved {
    /// Input and statistics of the norm.
    Norm(NormSaved),
    /// Without a norm: the block's input, where the block is recomputed. Otherwise the block saves it itself.
    Input(Option<SavedTensor>),
}

impl Saved for PreNormSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        match self {
            PreNormSaved::Norm(saved) => saved.tensors(f),
            PreNormSaved::Input(x) => x.tensors(f),
        }
    }
}

/// By-products wanted of a block's input.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Its amax, where a norm writes it anyway.
    pub(super) amax: bool,
    /// Keep it for recomputation of the block.
    pub(super) kept: bool,
}

impl PreNorm {
    /// Declares `<name>.weight` where the model has norms before its blocks.
    pub(super) fn declare(d: &mut Declarations, name: &str, c: &ModelConfig) -> Result<PreNorm> {
        let norm = c.pre_norms.then(|| NormLayer::declare(d, name, c.hidden, norm_of(c))).transpose()?;
        Ok(PreNorm(norm))
    }

    /// The block's input and the residual stream `x + pending`, both `[tokens, hidden]`.
    pub(super) fn forward(
        &self,
        p: &StepContext,
        x: HiddenStates,
        wanted: Wanted,
    ) -> Result<(WithAmax, Tensor, PreNormSaved)> {
        match &self.0 {
            Some(norm) => {
                let (y, x, saved) = norm.forward_pending(p, x, wanted.amax)?;
                Ok((y, x, PreNormSaved::Norm(saved)))
            }
            None => {
                let x = x.sum(p)?;
                let kept = wanted.kept.then(|| SavedTensor::activation(&x));
                Ok((WithAmax::from(&x), x, PreNormSaved::Input(kept)))
            }
        }
    }

    /// The context of the layer's passes: where no norm writes a block's input, there is none to recompute.
    pub(super) fn context<'a>(&self, p: &'a StepContext<'_>) -> StepContext<'a> {
        let norm = p.recompute.norm && self.0.is_some();
        StepContext { recompute: Recompute { norm, ..p.recompute }, ..*p }
    }

    /// The block's input again.
    pub(super) fn recompute(&self, p: &StepContext, saved: &PreNormSaved, measure: bool) -> Result<WithAmax> {
        match (&self.0, saved) {
            (Some(norm), PreNormSaved::Norm(saved)) => norm.recompute(p, saved, measure),
            (_, PreNormSaved::Input(Some(x))) => Ok(WithAmax::from(&**x)),
            _ => missing_activation("layer", "input of a recomputed block"),
        }
    }

    /// Gradient of the residual stream: that of the block's input through the norm, plus `residual`.
    pub(super) fn backward(
        &self,
        p: &StepContext,
        saved: PreNormSaved,
        dy: &Tensor,
        residual: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        match (&self.0, saved) {
            (Some(norm), PreNormSaved::Norm(saved)) => norm.backward(p, saved, dy, Some(residual)),
            _ => {
                let dx = p.empty(dy.shape())?;
                p.rank.kernels.add(&p.rank.compute, dy, residual, &dx)?;
                Ok((dx, WeightGrad::default()))
            }
        }
    }
}
