//! The attention variants behind one type, so that a decoder layer holds either.

use super::{Attention, AttentionSaved, KvCache, Layout, MlaSaved, MultiLatentAttention};
use crate::{Module, Saved, SavedTensor, StepContext, WeightGrad, WithAmax};
use ferrotron_tensor::{Result, Tensor};

/// The self-attention module of a layer.
pub enum SelfAttention {
    /// Multi-head or grouped-query attention.
    MultiHead(Box<Attention>),
    /// Multi-head latent attention (MLA).
    Mla(Box<MultiLatentAttention>),
}

/// Activations that backward needs.
pub enum SelfAttentionSaved {
    /// See [`AttentionSaved`].
    MultiHead(Box<AttentionSaved>),
    /// See [`MlaSaved`].
    Mla(Box<MlaSaved>),
}

impl Saved for SelfAttentionSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        match self {
            SelfAttentionSaved::MultiHead(s) => s.modules(f),
            SelfAttentionSaved::Mla(s) => s.modules(f),
        }
    }
}

impl SelfAttentionSaved {
    /// Drops the block's input; the caller recomputes it before backward.
    pub fn drop_input(&mut self) {
        match self {
            SelfAttentionSaved::MultiHead(s) => s.drop_input(),
            SelfAttentionSaved::Mla(s) => s.drop_input(),
        }
    }

    /// Restores the recomputed input.
    pub fn restore_input(&mut self, x: &Tensor) {
        match self {
            SelfAttentionSaved::MultiHead(s) => s.restore_input(x),
            SelfAttentionSaved::Mla(s) => s.restore_input(x),
        }
    }
}

impl SelfAttention {
    /// Whether the producer of its input should also compute the input's amax (for FP8 quantization).
    pub fn needs_input_amax(&self, p: &StepContext) -> bool {
        match self {
            SelfAttention::MultiHead(a) => a.needs_input_amax(p),
            SelfAttention::Mla(a) => a.needs_input_amax(p),
        }
    }

    /// See [`Attention::forward`].
    pub fn forward(
        &self,
        p: &StepContext,
        x: impl Into<WithAmax>,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<(Tensor, SelfAttentionSaved)> {
        Ok(match self {
            SelfAttention::MultiHead(a) => {
                let (y, saved) = a.forward(p, x, layout, positions)?;
                (y, SelfAttentionSaved::MultiHead(saved.into()))
            }
            SelfAttention::Mla(a) => {
                let (y, saved) = a.forward(p, x, layout, positions)?;
                (y, SelfAttentionSaved::Mla(saved.into()))
            }
        })
    }

    /// See [`Attention::backward`].
    pub fn backward(
        &self,
        p: &StepContext,
        saved: SelfAttentionSaved,
        layout: &Layout,
        positions: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        match (self, saved) {
            (SelfAttention::MultiHead(a), SelfAttentionSaved::MultiHead(s)) => {
                a.backward(p, *s, layout, positions, dy)
            }
            (SelfAttention::Mla(a), SelfAttentionSaved::Mla(s)) => a.backward(p, *s, layout, positions, dy),
            _ => ferrotron_tensor::shape_error(
                "attention backward",
                "the saved activation belongs to another kind of attention",
            ),
        }
    }

    /// An empty cache of this rank's heads for `batch` sequences of up to `capacity` tokens.
    pub fn cache(&self, p: &StepContext, batch: usize, capacity: usize) -> Result<KvCache> {
        match self {
            SelfAttention::MultiHead(a) => a.cache(p, batch, capacity),
            SelfAttention::Mla(a) => a.cache(p, batch, capacity),
        }
    }

    /// See [`Attention::decode`].
    pub fn decode(
        &self,
        p: &StepContext,
        x: impl Into<WithAmax>,
        cache: &mut KvCache,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<Tensor> {
        match self {
            SelfAttention::MultiHead(a) => a.decode(p, x, cache, layout, positions),
            SelfAttention::Mla(a) => a.decode(p, x, cache, layout, positions),
        }
    }
}
