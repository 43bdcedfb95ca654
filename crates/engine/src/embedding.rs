//! Token and position embeddings.

use crate::{Declarations, Init, ParamId, Part, Pass, Saved, SavedTensor, Split, WeightGrad};
use ferrotron_tensor::{Result, Tensor};

/// `scale·tokens[id] (+ positions[pos])`
pub struct Embedding {
    /// The token table `[V, h]`, which a tied head shares.
    pub tokens: ParamId,
    positions: Option<ParamId>,
    scale: f32,
    hidden: usize,
}

/// Indices.
pub struct EmbeddingSaved {
    ids: SavedTensor,
    positions: Option<SavedTensor>,
}

impl Saved for EmbeddingSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.ids);
        self.positions.tensors(f);
    }
}

impl Embedding {
    /// Declares `<name>.tokens` and, with `positions` rows of them, `<name>.positions`.
    pub fn declare(
        d: &mut Declarations,
        name: &str,
        vocab: usize,
        hidden: usize,
        positions: Option<usize>,
        scale: f32,
        std: f32,
    ) -> Result<Embedding> {
        let mut table = |kind: &str, rows, split| {
            d.declare(vec![Part {
                name: format!("{name}.{kind}"),
                shape: vec![rows, hidden],
                init: Init::Normal(std),
                split,
            }])
        };
        let tokens = table("tokens", vocab, Split::Rows)?;
        let positions = positions.map(|n| table("positions", n, Split::Replicated)).transpose()?;
        Ok(Embedding { tokens, positions, scale, hidden })
    }

    /// `ids`, `positions` i32 `[tokens]` → `[tokens, hidden]`
    pub fn forward(&self, p: &Pass, ids: &Tensor, positions: &Tensor) -> Result<(Tensor, EmbeddingSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let y = p.empty(&[ids.numel(), self.hidden])?;
        let table = p.params.get(self.tokens);
        k.embedding_forward(s, ids, table, 0, table.shape()[0], self.scale, false, &y)?;
        if let Some(table) = self.positions {
            let table = p.params.get(table);
            k.embedding_forward(s, positions, table, 0, table.shape()[0], 1.0, true, &y)?;
        }
        let positions = self.positions.map(|_| SavedTensor::small(positions));
        Ok((y, EmbeddingSaved { ids: SavedTensor::small(ids), positions }))
    }

    /// Only weights have gradients here.
    pub fn backward(&self, saved: EmbeddingSaved, dy: &Tensor) -> WeightGrad {
        let lookup = |param, ids: &Tensor, scale| {
            let (ids, dy) = (ids.clone(), dy.clone());
            WeightGrad::other(param, move |rank, grad, accumulate| {
                let (s, vocab) = (&rank.compute, grad.shape()[0]);
                rank.kernels.embedding_backward(s, &ids, &dy, 0, vocab, scale, accumulate, grad)
            })
        };
        let grads = lookup(self.tokens, &saved.ids, self.scale);
        match (self.positions, &saved.positions) {
            (Some(table), Some(pos)) => grads.and(lookup(table, pos, 1.0)),
            _ => grads,
        }
    }
}
