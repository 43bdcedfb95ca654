//! A run of consecutive parts of a decoder: what one pipeline stage holds. Without a pipeline there is one chunk with
//! everything.

use super::config::{ModelConfig, Positions};
use super::decoder::Input;
use super::layer::{Layer, LayerSaved, norm_of};
use super::mtp::MtpTraining;
use super::predictions::{Predictions, PredictionsSaved};
use crate::pipeline::Stage;
use ferrotron_engine::attention::{KvCache, RopeTable};
use ferrotron_engine::{
    Declarations, Embedding, EmbeddingSaved, Head, HeadSaved, Hidden, Keep, NormLayer, NormSaved, ParamId,
    Pass, Saved, SavedTensor, Targets, WeightGrad, at_once,
};
use ferrotron_tensor::{Result, Tensor, shape_error};

/// Place of the dropout after the embedding; layers count from 0, so it has the layer number past them.
const AFTER_EMBEDDING: u32 = 0;

/// Embedding (on the first stage), layers, final norm and head (on the last).
pub struct Chunk {
    embedding: Option<Embedding>,
    layers: Vec<Layer>,
    end: Option<(NormLayer, Head)>,
    /// Predictions of further tokens, on the last stage.
    predictions: Option<Predictions>,
    /// Layers of the whole model.
    depth: u32,
}

/// What comes out at the end of the model.
#[derive(Clone, Copy)]
pub enum Goal<'a> {
    /// Logits `[tokens, V]`.
    Logits,
    /// Loss of each token f32 `[tokens]`, without weights.
    Loss(&'a Targets),
    /// The same; and backward will follow.
    Train(&'a Targets),
}

/// What backward needs of a chunk.
pub struct ChunkSaved {
    predictions: Option<PredictionsSaved>,
    end: Option<(HeadSaved, NormSaved)>,
    layers: Vec<Keep<LayerSaved>>,
    embedding: Option<EmbeddingSaved>,
}

impl Saved for ChunkSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.predictions.tensors(f);
        if let Some((head, norm)) = &mut self.end {
            head.tensors(f);
            norm.tensors(f);
        }
        self.layers.tensors(f);
        self.embedding.tensors(f);
    }
}

impl ChunkSaved {
    /// f32 `[D]`: `Σ weight·loss` of the predictions of further tokens, where they are here.
    pub fn prediction_losses(&self) -> Option<&Tensor> {
        self.predictions.as_ref().map(|p| &p.losses)
    }
}

impl Chunk {
    /// Declares what `stage` holds. `rope` gives the table of a layer; `tokens` is the token table where a chunk before
    /// this one on the same rank has declared it; `mtp` says how predictions of further tokens are trained.
    pub(super) fn declare(
        d: &mut Declarations,
        c: &ModelConfig,
        stage: &Stage,
        rope: &mut dyn FnMut(usize) -> Result<Option<RopeTable>>,
        tokens: &mut Option<ParamId>,
        apart: bool,
        mtp: MtpTraining,
    ) -> Result<Chunk> {
        let learned = (c.positions == Positions::Learned).then_some(c.max_positions);
        let embedding = if stage.embedding {
            let e = Embedding::declare(d, "embed", c.vocab, c.hidden, learned, c.embed_scale, c.init_std)?;
            // The last stage has it too: as its output matrix, or to look further tokens up.
            if c.tied && apart {
                d.mark_tied(e.tokens, false);
            }
            if c.mtp.is_some() && apart {
                e.tables().for_each(|id| d.mark_tied(id, false));
            }
            *tokens = Some(e.tokens);
            Some(e)
        } else {
            None
        };
        let mut layers = Vec::with_capacity(stage.layers.len());
        for i in stage.layers.clone() {
            layers.push(Layer::declare(d, c, i, rope(i)?)?);
        }
        let end = if stage.loss {
            let norm = NormLayer::declare(d, "final_norm", c.hidden, norm_of(c))?;
            let head = match *tokens {
                shared @ Some(_) if c.tied => {
                    Head::declare(d, "head", c.vocab, c.hidden, shared, c.final_softcap, c.init_std)?
                }
                _ => {
                    // The table of the first stage once more, where this rank does not hold that stage.
                    let (name, mirror) = if c.tied { ("embed.tokens", true) } else { ("head.weight", false) };
                    Head::declare_as(d, name, c.vocab, c.hidden, c.final_softcap, c.init_std, mirror)?
                }
            };
            Some((norm, head))
        } else {
            None
        };
        let predictions = match (&end, c.mtp) {
            (Some((_, head)), Some(m)) => {
                Some(Predictions::declare(d, c, (m, mtp), rope, embedding.as_ref(), head)?)
            }
            _ => None,
        };
        Ok(Chunk { embedding, layers, end, predictions, depth: c.layers as u32 })
    }

    /// Its layers, in order.
    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Does it hold the end of the model?
    pub fn is_last(&self) -> bool {
        self.end.is_some()
    }

    /// Output matrix and loss, on the last stage.
    pub fn head_mut(&mut self) -> Option<&mut Head> {
        self.end.as_mut().map(|(_, head)| head)
    }

    /// From the stage before (`x [rows, hidden]`, nothing on the first stage) to what the next stage gets, or, at the
    /// end of the model, what `goal` says.
    pub fn forward(
        &self,
        p: &Pass,
        input: &Input,
        x: Option<Tensor>,
        goal: Goal,
    ) -> Result<(Tensor, Option<ChunkSaved>)> {
        at_once(self.forward_in_turns(p, input, x, goal))
    }

    /// [`Chunk::forward`] beside another pass: see [`in_turn`](ferrotron_engine::in_turn).
    pub async fn forward_in_turns(
        &self,
        p: &Pass<'_>,
        input: &Input,
        x: Option<Tensor>,
        goal: Goal<'_>,
    ) -> Result<(Tensor, Option<ChunkSaved>)> {
        let train = matches!(goal, Goal::Train(_));
        let (x, layers, embedding) = self.trunk(p, input, x, train).await?;
        let Some((norm, head)) = &self.end else {
            let saved = ChunkSaved { predictions: None, end: None, layers, embedding };
            return Ok((x.sum(p)?, train.then_some(saved)));
        };
        let (y, _, normed) = norm.forward_of(p, x, head.measures_input(p))?;
        let targets = match goal {
            Goal::Logits => return Ok((head.logits(p, &y)?, None)),
            Goal::Loss(t) | Goal::Train(t) => t,
        };
        let (rows, end) = head.loss(p, &y, targets, train)?;
        let predictions = match &self.predictions {
            Some(further) if train => Some(further.forward(p, input, head, &y.values).await?),
            _ => None,
        };
        let end = end.map(|head| (head, normed));
        Ok((rows, train.then_some(ChunkSaved { predictions, end, layers, embedding })))
    }

    /// Logits `[tokens, V]` of each depth of the predictions of further tokens, of a chunk that is the whole model.
    pub fn prediction_logits(&self, p: &Pass, input: &Input) -> Result<Vec<Tensor>> {
        let (Some((norm, head)), Some(further)) = (&self.end, &self.predictions) else {
            return Ok(Vec::new());
        };
        let (x, _, _) = at_once(self.trunk(p, input, None, false))?;
        let (y, _, _) = norm.forward_of(p, x, false)?;
        further.logits(p, input, head, &y.values)
    }

    /// Embedding and layers.
    async fn trunk(
        &self,
        p: &Pass<'_>,
        input: &Input,
        x: Option<Tensor>,
        train: bool,
    ) -> Result<(Hidden, Vec<Keep<LayerSaved>>, Option<EmbeddingSaved>)> {
        let (x, embedding) = match (&self.embedding, x) {
            (Some(e), None) => {
                let (x, saved) = e.forward(p, &input.ids, &input.positions)?;
                (p.dropout(self.depth, AFTER_EMBEDDING, x)?, Some(saved))
            }
            (None, Some(x)) => (x, None),
            _ => return shape_error("stage", "the first one starts from ids, the others from hidden states"),
        };
        let (mut x, mut layers) = (Hidden::of(x), Vec::with_capacity(self.layers.len()));
        for layer in &self.layers {
            let (y, saved) = layer.forward(p, x, &input.layout, &input.positions).await?;
            layers.extend(train.then_some(saved));
            x = y;
        }
        Ok((x, layers, embedding))
    }

    /// From the gradient of the output (nothing at the end of the model: there the loss starts it) to that of the
    /// input (nothing on the first stage). Weight gradients go to `put` as they become possible, to be run there or
    /// later.
    pub fn backward(
        &self,
        p: &Pass,
        saved: ChunkSaved,
        input: &Input,
        dy: Option<Tensor>,
        put: &mut dyn FnMut(WeightGrad) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        at_once(self.backward_in_turns(p, saved, input, dy, put))
    }

    /// [`Chunk::backward`] beside another pass: see [`in_turn`](ferrotron_engine::in_turn).
    pub async fn backward_in_turns(
        &self,
        p: &Pass<'_>,
        saved: ChunkSaved,
        input: &Input,
        dy: Option<Tensor>,
        put: &mut dyn FnMut(WeightGrad) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let mut dx = match (&self.end, saved.end, dy) {
            (Some((norm, head)), Some((head_saved, norm_saved)), None) => {
                let (mut dx, g) = head.backward(p, head_saved)?;
                put(g)?;
                if let (Some(further), Some(saved)) = (&self.predictions, saved.predictions) {
                    dx = further.backward(p, saved, input, head, dx, put).await?;
                }
                let (dx, g) = norm.backward(p, norm_saved, &dx, None)?;
                put(g)?;
                dx
            }
            (None, None, Some(dy)) => dy,
            _ => return shape_error("stage", "the last one starts from the loss, the others from gradients"),
        };
        for (layer, saved) in self.layers.iter().zip(saved.layers).rev() {
            let (d, g) = layer.backward(p, saved, &input.layout, &input.positions, &dx).await?;
            put(g)?;
            dx = d;
        }
        match (&self.embedding, saved.embedding) {
            (Some(e), Some(saved)) => {
                let dx = p.dropout(self.depth, AFTER_EMBEDDING, dx)?;
                put(e.backward(p, saved, &dx)?)?;
                Ok(None)
            }
            _ => Ok(Some(dx)),
        }
    }

    /// Logits `[batch, V]` of the last of the new tokens of each of `batch` sequences; all of them join the caches.
    /// For a chunk that is the whole model.
    pub(super) fn decode(
        &self,
        p: &Pass,
        input: &Input,
        batch: usize,
        caches: &mut [KvCache],
    ) -> Result<Tensor> {
        let (Some(embedding), Some((norm, head))) = (&self.embedding, &self.end) else {
            return shape_error("decode", "the whole model must be on one rank");
        };
        let (mut x, _) = embedding.forward(p, &input.ids, &input.positions)?;
        for (layer, cache) in self.layers.iter().zip(caches) {
            x = layer.decode(p, &x, cache, &input.layout, &input.positions)?;
        }
        let (tokens, hidden) = (input.layout.tokens(), x.shape()[1]);
        let new = tokens / batch.max(1);
        let x = p.all_rows(&x, "hidden states")?.narrow(0, 0, tokens)?;
        let last = x.view(&[batch, new, hidden])?.select(1, new.saturating_sub(1))?;
        let rows = p.empty(&[batch, hidden])?;
        p.rank.kernels.copy(&p.rank.compute, &last, &rows)?;
        let (y, _) = norm.forward(p, &rows)?;
        head.logits_of(p, &y)
    }
}
