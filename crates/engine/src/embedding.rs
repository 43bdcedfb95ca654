//! Token and position embeddings.

use crate::quant::GemmOperand;
use crate::{Declarations, Init, ParamId, Part, Saved, SavedTensor, Split, StepContext, WeightGrad};
use ferrotron_comm::InFlight;
use ferrotron_kernels::{EmbeddingBackward, EmbeddingForward};
use ferrotron_tensor::{Result, Tensor};

/// Sizes and initialization of an embedding.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingConfig {
    /// Vocabulary size (V).
    pub vocab: usize,
    /// Hidden size (h).
    pub hidden: usize,
    /// Rows of the learned position table; None for none.
    pub positions: Option<usize>,
    /// Factor of the token embeddings.
    pub scale: f32,
    /// Standard deviation of initial weights.
    pub std: f32,
}

/// Embedding `scale·tokens[id] (+ positions[pos])`, vocabulary-parallel over the tensor-parallel ranks.
pub struct Embedding {
    /// The token table `[V, h]`, which a tied LM head shares.
    pub tokens: ParamId,
    positions: Option<ParamId>,
    scale: f32,
    hidden: usize,
    /// First vocabulary entry of this rank, and the vocabulary size.
    first: usize,
    vocab: usize,
}

/// Token ids and positions.
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
    /// Declares `<name>.tokens` `[V, h]` and, with learned positions, `<name>.positions`.
    pub fn declare(d: &mut Declarations, name: &str, c: EmbeddingConfig) -> Result<Embedding> {
        let EmbeddingConfig { vocab, hidden, positions, scale, std } = c;
        let mut table = |kind: &str, rows, split| {
            d.declare(vec![Part {
                name: format!("{name}.{kind}"),
                shape: vec![rows, hidden],
                init: Init::Normal(std),
                split,
            }])
        };
        let tokens = table("tokens", vocab, Split::Rows { unit: 1 })?;
        let positions = positions.map(|n| table("positions", n, Split::Replicated)).transpose()?;
        let first = d.spec(tokens).shards[0].range.start;
        Ok(Embedding { tokens, positions, scale, hidden, first, vocab })
    }

    /// An embedding over a token table that another module has declared; declares `<name>.positions`.
    pub fn over(
        d: &mut Declarations,
        tokens: ParamId,
        name: &str,
        positions: Option<usize>,
        scale: f32,
        std: f32,
    ) -> Result<Embedding> {
        let whole = d.spec(tokens).parts[0].shape.clone();
        let (vocab, hidden) = (whole[0], whole[1]);
        let first = d.spec(tokens).shards[0].range.start;
        let table = |rows| Part {
            name: format!("{name}.positions"),
            shape: vec![rows, hidden],
            init: Init::Normal(std),
            split: Split::Replicated,
        };
        let positions = positions.map(|rows| d.declare(vec![table(rows)])).transpose()?;
        Ok(Embedding { tokens, positions, scale, hidden, first, vocab })
    }

    /// Another handle on the same tables.
    pub fn share(&self) -> Embedding {
        Embedding { ..*self }
    }

    /// Its parameters.
    pub fn tables(&self) -> impl Iterator<Item = ParamId> + use<> {
        [Some(self.tokens), self.positions].into_iter().flatten()
    }

    /// `ids`, `positions` i32 `[tokens]` → this rank's sequence shard of `[tokens, hidden]`.
    pub fn forward(
        &self,
        p: &StepContext,
        ids: &Tensor,
        positions: &Tensor,
    ) -> Result<(Tensor, EmbeddingSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let y = p.empty(&[ids.numel(), self.hidden])?;
        let table = p.weight(self.tokens)?;
        k.embedding_forward(
            s,
            &EmbeddingForward {
                ids,
                table: &table,
                first: self.first,
                vocab: self.vocab,
                scale: self.scale,
                add: false,
                y: &y,
            },
        )?;
        let y = p.reduce_scatter(&y, "embeddings")?;
        let positions = match self.positions {
            None => None,
            Some(table) => {
                let (table, mine) = (p.weight(table)?, p.local_rows(positions)?);
                k.embedding_forward(
                    s,
                    &EmbeddingForward {
                        ids: &mine,
                        table: &table,
                        first: 0,
                        vocab: table.shape()[0],
                        scale: 1.0,
                        add: true,
                        y: &y,
                    },
                )?;
                Some(SavedTensor::small(&mine))
            }
        };
        Ok((y, EmbeddingSaved { ids: SavedTensor::small(ids), positions }))
    }

    /// Weight gradients; ids have none.
    pub fn backward(&self, p: &StepContext, saved: EmbeddingSaved, dy: &Tensor) -> Result<WeightGrad> {
        let lookup = |param, ids: &Tensor, dy: InFlight<GemmOperand>, first, vocab, scale| {
            let ids = ids.clone();
            WeightGrad::deferred(param, move |rank, grad, accumulate| {
                let (k, dy) = (&rank.kernels, dy.wait(&rank.compute)?);
                k.embedding_backward(
                    &rank.compute,
                    &EmbeddingBackward {
                        ids: &ids,
                        dy: dy.memory(),
                        first,
                        vocab,
                        scale,
                        accumulate,
                        dtable: grad,
                    },
                )
            })
        };
        let grads = match p.is_frozen(self.tokens) {
            true => WeightGrad::default(),
            false => {
                let all = p.begin_all_gather(&GemmOperand::rowwise(dy), "gradient of embeddings")?;
                lookup(self.tokens, &saved.ids, all, self.first, self.vocab, self.scale)
            }
        };
        Ok(match (self.positions, &saved.positions) {
            (Some(table), Some(pos)) => {
                let dy = InFlight::ready(GemmOperand::rowwise(dy));
                // Not of the weight: that would gather a sharded one for its shape.
                let rows = p.params.specs()[table.0].shape[0];
                grads.and(lookup(table, pos, dy, 0, rows, 1.0))
            }
            _ => grads,
        })
    }
}
