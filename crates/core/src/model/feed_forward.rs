//! The feed-forward block of a layer: a dense MLP or an MoE block.

use super::description::Block;
use ferrotron_engine::moe::{Moe, MoeSaved, SavedRouting};
use ferrotron_engine::{Mlp, MlpSaved, Module, Saved, SavedTensor, StepContext, WeightGrad, WithAmax};
use ferrotron_tensor::{Result, Tensor};

/// The feed-forward block of a layer.
pub enum FeedForward {
    /// One MLP for all tokens.
    Dense(Mlp),
    /// Top-k of E experts per token.
    Moe(Box<Moe>),
}

/// What backward needs.
pub enum FeedForwardSaved {
    /// Saved by a dense MLP.
    Dense(Box<MlpSaved>),
    /// Saved by an MoE block.
    Moe(Box<MoeSaved>),
}

impl Saved for FeedForwardSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        match self {
            FeedForwardSaved::Dense(s) => s.modules(f),
            FeedForwardSaved::Moe(s) => s.modules(f),
        }
    }

    fn routing(&self) -> Option<&SavedRouting> {
        match self {
            FeedForwardSaved::Dense(_) => None,
            FeedForwardSaved::Moe(s) => s.routing(),
        }
    }
}

impl FeedForwardSaved {
    /// The kind of block that saved it.
    pub(super) fn block(&self) -> Block {
        match self {
            FeedForwardSaved::Dense(_) => Block::Mlp,
            FeedForwardSaved::Moe(_) => Block::Moe,
        }
    }

    /// Frees the block's input, which the caller can recompute. An MoE block keeps it for its router.
    pub fn drop_input(&mut self) {
        if let FeedForwardSaved::Dense(s) = self {
            s.drop_input();
        }
    }

    /// Was the input freed, so that backward needs it restored?
    pub fn needs_input(&self) -> bool {
        matches!(self, FeedForwardSaved::Dense(_))
    }

    /// Restores the recomputed input.
    pub fn restore_input(&mut self, x: &Tensor) {
        if let FeedForwardSaved::Dense(s) = self {
            s.restore_input(x);
        }
    }
}

impl FeedForward {
    /// Whether it needs the amax of its input.
    pub fn needs_input_amax(&self, p: &StepContext) -> bool {
        match self {
            FeedForward::Dense(m) => m.needs_input_amax(p),
            FeedForward::Moe(m) => m.needs_input_amax(p),
        }
    }

    /// `[T, hidden] → [T, hidden]`; yields while MoE tokens are dispatched.
    pub async fn forward(
        &self,
        p: &StepContext<'_>,
        x: impl Into<WithAmax>,
    ) -> Result<(Tensor, FeedForwardSaved)> {
        Ok(match self {
            FeedForward::Dense(m) => {
                m.forward(p, x).map(|(y, s)| (y, FeedForwardSaved::Dense(Box::new(s))))?
            }
            FeedForward::Moe(m) => {
                m.forward(p, x).await.map(|(y, s)| (y, FeedForwardSaved::Moe(Box::new(s))))?
            }
        })
    }

    /// What [`FeedForward::forward`] has saved, once more; yields while MoE tokens are dispatched.
    pub async fn recompute(&self, p: &StepContext<'_>, x: impl Into<WithAmax>) -> Result<FeedForwardSaved> {
        Ok(match self {
            FeedForward::Dense(m) => FeedForwardSaved::Dense(Box::new(m.recompute(p, x)?)),
            FeedForward::Moe(m) => FeedForwardSaved::Moe(Box::new(m.forward(p, x).await?.1)),
        })
    }

    /// Gradient of the input; yields while MoE gradients are dispatched.
    pub async fn backward(
        &self,
        p: &StepContext<'_>,
        saved: FeedForwardSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        match (self, saved) {
            (FeedForward::Dense(m), FeedForwardSaved::Dense(s)) => m.backward(p, *s, dy),
            (FeedForward::Moe(m), FeedForwardSaved::Moe(s)) => m.backward(p, *s, dy).await,
            _ => ferrotron_tensor::shape_error(
                "feed-forward",
                "the saved activation belongs to another kind of layer",
            ),
        }
    }
}
