//! The kinds of attention under one name, for layers that have either.

use super::{Attention, AttentionSaved, KvCache, LatentAttention, LatentSaved, Layout};
use crate::{Measured, Pass, Saved, SavedTensor, WeightGrad};
use ferrotron_tensor::{Result, Tensor};

/// Attention of a layer.
pub enum SelfAttention {
    /// Keys and values of each head from the residual stream.
    Plain(Box<Attention>),
    /// Keys and values of all heads from one narrow row.
    Latent(Box<LatentAttention>),
}

/// What backward needs.
pub enum SelfAttentionSaved {
    /// See [`AttentionSaved`].
    Plain(Box<AttentionSaved>),
    /// See [`LatentSaved`].
    Latent(Box<LatentSaved>),
}

impl Saved for SelfAttentionSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        match self {
            SelfAttentionSaved::Plain(s) => s.tensors(f),
            SelfAttentionSaved::Latent(s) => s.tensors(f),
        }
    }
}

impl SelfAttentionSaved {
    /// Drops the block's input, which the caller can make again.
    pub fn forget_input(&mut self) {
        match self {
            SelfAttentionSaved::Plain(s) => s.forget_input(),
            SelfAttentionSaved::Latent(s) => s.forget_input(),
        }
    }

    /// Puts the input back.
    pub fn remember_input(&mut self, x: &Tensor) {
        match self {
            SelfAttentionSaved::Plain(s) => s.remember_input(x),
            SelfAttentionSaved::Latent(s) => s.remember_input(x),
        }
    }
}

impl SelfAttention {
    /// Does it need the largest magnitude of its input?
    pub fn measures_input(&self, p: &Pass) -> bool {
        match self {
            SelfAttention::Plain(a) => a.measures_input(p),
            SelfAttention::Latent(a) => a.measures_input(p),
        }
    }

    /// See [`Attention::forward`].
    pub fn forward(
        &self,
        p: &Pass,
        x: impl Into<Measured>,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<(Tensor, SelfAttentionSaved)> {
        Ok(match self {
            SelfAttention::Plain(a) => {
                let (y, saved) = a.forward(p, x, layout, positions)?;
                (y, SelfAttentionSaved::Plain(saved.into()))
            }
            SelfAttention::Latent(a) => {
                let (y, saved) = a.forward(p, x, layout, positions)?;
                (y, SelfAttentionSaved::Latent(saved.into()))
            }
        })
    }

    /// See [`Attention::backward`].
    pub fn backward(
        &self,
        p: &Pass,
        saved: SelfAttentionSaved,
        layout: &Layout,
        positions: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        match (self, saved) {
            (SelfAttention::Plain(a), SelfAttentionSaved::Plain(s)) => {
                a.backward(p, *s, layout, positions, dy)
            }
            (SelfAttention::Latent(a), SelfAttentionSaved::Latent(s)) => {
                a.backward(p, *s, layout, positions, dy)
            }
            _ => ferrotron_tensor::shape_error("attention backward", "what was saved is of another kind"),
        }
    }

    /// An empty cache of this rank's heads for `batch` sequences of up to `capacity` tokens.
    pub fn cache(&self, p: &Pass, batch: usize, capacity: usize) -> Result<KvCache> {
        match self {
            SelfAttention::Plain(a) => a.cache(p, batch, capacity),
            SelfAttention::Latent(a) => a.cache(p, batch, capacity),
        }
    }

    /// See [`Attention::decode`].
    pub fn decode(
        &self,
        p: &Pass,
        x: impl Into<Measured>,
        cache: &mut KvCache,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<Tensor> {
        match self {
            SelfAttention::Plain(a) => a.decode(p, x, cache, layout, positions),
            SelfAttention::Latent(a) => a.decode(p, x, cache, layout, positions),
        }
    }
}
