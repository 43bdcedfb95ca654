//! What latent attention leaves for its backward pass.

use super::super::core_attention::CoreAttentionSaved;
use super::norm_linear::NormLinearSaved;
use crate::{LinearSaved, Saved, SavedTensor};
use ferrotron_tensor::Tensor;

/// What backward needs.
pub struct MlaSaved {
    pub(super) out_proj: LinearSaved,
    /// The heads' outputs, which the projection and the scores' backward both need.
    pub(super) heads: SavedTensor,
    pub(super) scores: CoreAttentionSaved<Operands>,
    pub(super) latent: LatentSaved,
}

/// What q, k and v are made of: keys as such would be wider.
pub(super) struct Operands {
    /// `[tokens, n·(nope + rope)]`, with positions.
    pub(super) q: SavedTensor,
    /// `[tokens, n·(nope + v)]`
    pub(super) kv: SavedTensor,
    /// `[tokens, rope]`, with positions.
    pub(super) k_rope: SavedTensor,
}

/// Of the maps around latent rows. Both norms were given parts of one buffer.
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
        self.out_proj.tensors(f);
        f(&mut self.heads);
        self.scores.tensors(f);
        self.latent.tensors(f);
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
    /// Drops the block's input, which the caller can make again.
    pub fn drop_input(&mut self) {
        self.latent.down.drop_input();
        if let QuerySaved::Direct(q) = &mut self.latent.q {
            q.drop_input();
        }
    }

    /// Puts the input back.
    pub fn restore_input(&mut self, x: &Tensor) {
        self.latent.down.restore_input(x);
        if let QuerySaved::Direct(q) = &mut self.latent.q {
            q.restore_input(x);
        }
    }
}
