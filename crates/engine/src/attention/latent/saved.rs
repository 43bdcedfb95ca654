//! What latent attention leaves for its backward pass.

use super::super::scores::Seen;
use super::normed::NormedSaved;
use crate::{LinearSaved, Saved, SavedTensor};
use ferrotron_tensor::Tensor;

/// What backward needs.
pub struct LatentSaved {
    pub(super) out_proj: LinearSaved,
    /// The heads' outputs, which the projection and the scores' backward both need.
    pub(super) heads: SavedTensor,
    pub(super) scores: Seen<Operands>,
    pub(super) narrow: Narrow,
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

/// Of the maps around narrow rows. Both norms were given parts of one buffer.
pub(super) struct Narrow {
    pub(super) q: QuerySaved,
    pub(super) kv: NormedSaved,
    pub(super) down: LinearSaved,
}

#[expect(clippy::large_enum_variant, reason = "handles of a few words, once a layer")]
pub(super) enum QuerySaved {
    Narrow(NormedSaved),
    Stream(LinearSaved),
}

impl Saved for LatentSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.out_proj.tensors(f);
        f(&mut self.heads);
        self.scores.tensors(f);
        self.narrow.tensors(f);
    }
}

impl Saved for Operands {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        [&mut self.q, &mut self.kv, &mut self.k_rope].into_iter().for_each(f);
    }
}

impl Saved for Narrow {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.kv.tensors(f);
        match &mut self.q {
            QuerySaved::Narrow(saved) => saved.tensors(f),
            QuerySaved::Stream(saved) => saved.tensors(f),
        }
        self.down.tensors(f);
    }
}

impl LatentSaved {
    /// Drops the block's input, which the caller can make again.
    pub fn forget_input(&mut self) {
        self.narrow.down.forget();
        if let QuerySaved::Stream(q) = &mut self.narrow.q {
            q.forget();
        }
    }

    /// Puts the input back.
    pub fn remember_input(&mut self, x: &Tensor) {
        self.narrow.down.remember(x);
        if let QuerySaved::Stream(q) = &mut self.narrow.q {
            q.remember(x);
        }
    }
}
