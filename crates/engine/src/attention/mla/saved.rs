//! Saved activations of multi-head latent attention.

use super::super::core_attention::CoreAttentionSaved;
use super::norm_linear::NormLinearSaved;
use crate::{LinearSaved, Module, Saved, SavedTensor};
use ferrotron_tensor::Tensor;

/// Activations that backward needs.
pub struct MlaSaved {
    pub(super) out_proj: LinearSaved,
    /// Output of core attention: the output projection and core attention's backward both read it.
    pub(super) heads: SavedTensor,
    pub(super) scores: CoreAttentionSaved<Operands>,
    pub(super) latent: LatentSaved,
}

/// What q, k and v are assembled from; the assembled keys would be larger.
pub(super) struct Operands {
    /// q `[tokens, n·(nope + rope)]`, after RoPE.
    pub(super) q: SavedTensor,
    /// k_nope and v, `[tokens, n·(nope + v)]`
    pub(super) kv: SavedTensor,
    /// k_rope `[tokens, rope]`, after RoPE.
    pub(super) k_rope: SavedTensor,
}

/// Saved activations of the projections. Both norms read slices of one buffer.
pub(super) struct LatentSaved {
    pub(super) q: QuerySaved,
    pub(super) kv: NormLinearSaved,
    pub(super) down: LinearSaved,
}

#[expect(clippy::large_enum_variant, reason = "handles of a few words, once a layer")]
pub(super) enum QuerySaved {
    LowRank(NormLinearSaved),
    Direct(LinearSaved),
}

impl Saved for MlaSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.out_proj.tensors(&mut |t| f(Module::AttnProj, t));
        f(Module::CoreAttn, &mut self.heads);
        self.scores.tensors(&mut |t| f(Module::CoreAttn, t));
        self.latent.tensors(&mut |t| f(Module::QkvLinear, t));
    }
}

impl Saved for Operands {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        [&mut self.q, &mut self.kv, &mut self.k_rope].into_iter().for_each(f);
    }
}

impl Saved for LatentSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.kv.tensors(f);
        match &mut self.q {
            QuerySaved::LowRank(saved) => saved.tensors(f),
            QuerySaved::Direct(saved) => saved.tensors(f),
        }
        self.down.tensors(f);
    }
}

impl MlaSaved {
    /// Drops the block's input; the caller recomputes it before backward.
    pub fn drop_input(&mut self) {
        self.latent.down.drop_input();
        if let QuerySaved::Direct(q) = &mut self.latent.q {
            q.drop_input();
        }
    }

    /// Restores the recomputed input.
    pub fn restore_input(&mut self, x: &Tensor) {
        self.latent.down.restore_input(x);
        if let QuerySaved::Direct(q) = &mut self.latent.q {
            q.restore_input(x);
        }
    }
}
