//! What stands between the second norm of a layer and its residual: an MLP, or a mixture of experts.

use ferrotron_engine::moe::{Moe, MoeSaved};
use ferrotron_engine::{Measured, Mlp, MlpSaved, Pass, Saved, SavedTensor, WeightGrad};
use ferrotron_tensor::{Result, Tensor};

/// The feed-forward block of a layer.
pub enum Ffn {
    /// One MLP for all tokens.
    Dense(Mlp),
    /// Some of many for each.
    Mixture(Box<Moe>),
}

/// What backward needs.
pub enum FfnSaved {
    /// Of an MLP.
    Dense(Box<MlpSaved>),
    /// Of a mixture.
    Mixture(Box<MoeSaved>),
}

impl Saved for FfnSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        match self {
            FfnSaved::Dense(s) => s.tensors(f),
            FfnSaved::Mixture(s) => s.tensors(f),
        }
    }
}

impl FfnSaved {
    /// Drops the block's input, which the caller can make again. A mixture keeps it.
    pub fn forget_input(&mut self) {
        if let FfnSaved::Dense(s) = self {
            s.forget_input();
        }
    }

    /// Was the input dropped, so that it must be put back?
    pub fn lacks_input(&self) -> bool {
        matches!(self, FfnSaved::Dense(_))
    }

    /// Puts the input back.
    pub fn remember_input(&mut self, x: &Tensor) {
        if let FfnSaved::Dense(s) = self {
            s.remember_input(x);
        }
    }
}

impl Ffn {
    /// Does it need the largest magnitude of its input?
    pub fn measures_input(&self, p: &Pass) -> bool {
        match self {
            Ffn::Dense(m) => m.measures_input(p),
            Ffn::Mixture(m) => m.measures_input(p),
        }
    }

    /// `[rows, hidden] → [rows, hidden]`, in turns.
    pub async fn forward(&self, p: &Pass<'_>, x: impl Into<Measured>) -> Result<(Tensor, FfnSaved)> {
        Ok(match self {
            Ffn::Dense(m) => m.forward(p, x).map(|(y, s)| (y, FfnSaved::Dense(Box::new(s))))?,
            Ffn::Mixture(m) => m.forward(p, x).await.map(|(y, s)| (y, FfnSaved::Mixture(Box::new(s))))?,
        })
    }

    /// Gradient of the input, in turns.
    pub async fn backward(&self, p: &Pass<'_>, saved: FfnSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        match (self, saved) {
            (Ffn::Dense(m), FfnSaved::Dense(s)) => m.backward(p, *s, dy),
            (Ffn::Mixture(m), FfnSaved::Mixture(s)) => m.backward(p, *s, dy).await,
            _ => ferrotron_tensor::shape_error("feed-forward", "what was kept is of another kind"),
        }
    }
}
