//! A model chunk: the consecutive layers that one pipeline stage holds. Without pipeline parallelism the whole model
//! is one chunk.

use super::chunk_units::ChunkUnits;
use super::config::{ModelConfig, Positions};
use super::declare::ModelDeclaration;
use super::decoder::Input;
use super::description::Block;
use super::layer::{Layer, checkpointed_blocks, norm_of};
use super::layer_split::Stage;
use super::mtp::{MtpBackward, MtpBlock, MtpBlockSaved};
use super::saved_layers::SavedLayers;
use ferrotron_engine::attention::KvCache;
use ferrotron_engine::{
    Embedding, EmbeddingConfig, EmbeddingSaved, HiddenStates, LmHead, LmHeadConfig, LmHeadSaved, NormLayer,
    NormSaved, Saved, SavedTensor, StepContext, Targets, UnitGuard, WeightGrad, run_to_completion,
};
use ferrotron_tensor::trace::{ActivityKind, Span};
use ferrotron_tensor::{Result, Tensor, shape_error};

/// Dropout site after the embedding; its layer number is the number of decoder layers.
const AFTER_EMBEDDING: u32 = 0;

/// Embedding (first stage), decoder layers, final norm and LM head (last stage).
pub struct Chunk {
    embedding: Option<Embedding>,
    layers: Vec<Layer>,
    output: Option<(NormLayer, LmHead)>,
    /// MTP layers, on the last stage.
    mtp: Option<MtpBlock>,
    /// Decoder layers of the whole model.
    total_layers: u32,
    units: ChunkUnits,
}

/// The embedding that a model configuration asks for.
pub(super) fn embedding_config(c: &ModelConfig) -> EmbeddingConfig {
    EmbeddingConfig {
        vocab: c.vocab,
        hidden: c.hidden,
        positions: (c.positions == Positions::Learned).then_some(c.max_positions),
        scale: c.embed_scale,
        std: c.init_std,
    }
}

/// What forward returns at the end of the model.
#[derive(Clone, Copy)]
pub enum ForwardMode<'a> {
    /// Logits `[tokens, V]`.
    Logits,
    /// Unweighted loss of each token, f32 `[tokens]`.
    Loss(&'a Targets),
    /// The same, with everything saved for backward.
    Train(&'a Targets),
}

/// What a chunk saves for backward.
pub struct ChunkSaved {
    mtp: Option<MtpBlockSaved>,
    output: Option<(LmHeadSaved, NormSaved)>,
    layers: SavedLayers,
    embedding: Option<EmbeddingSaved>,
}

impl Saved for ChunkSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.mtp.tensors(f);
        if let Some((head, norm)) = &mut self.output {
            head.tensors(f);
            norm.tensors(f);
        }
        self.layers.tensors(f);
        self.embedding.tensors(f);
    }
}

impl ChunkSaved {
    /// Calls `f` with every saved tensor and the block it belongs to. A tensor that two modules share appears twice.
    pub fn blocks(&mut self, f: &mut dyn FnMut(Block, &mut SavedTensor)) {
        if let Some((head, norm)) = &mut self.output {
            head.tensors(&mut |t| f(Block::Output, t));
            norm.tensors(&mut |t| f(Block::Norm, t));
        }
        if let Some(mtp) = &mut self.mtp {
            mtp.blocks(f);
        }
        self.layers.iter_mut().for_each(|layer| checkpointed_blocks(layer, f));
        self.embedding.tensors(&mut |t| f(Block::Embedding, t));
    }

    /// f32 `[D]`: `Σ weight·loss` of each MTP layer, on the last stage.
    pub fn mtp_losses(&self) -> Option<&Tensor> {
        self.mtp.as_ref().map(|p| &p.losses)
    }
}

impl Chunk {
    /// Declares the parameters of `stage`.
    pub(super) fn declare(model: &mut ModelDeclaration, stage: &Stage) -> Result<Chunk> {
        let (c, pipelined) = (model.config, model.pipelined);
        let d = &mut model.params;
        let mut units = ChunkUnits::default();
        let embedding = if stage.embedding {
            units.forward.push(d.begin_unit());
            let e = Embedding::declare(d, "embed", embedding_config(c))?;
            // The last stage has the table too: as a tied LM head, or to embed the tokens that MTP predicts from.
            if c.tied && pipelined {
                d.mark_tied_across_stages(e.tokens, false);
            }
            if c.mtp.is_some() && pipelined {
                e.tables().for_each(|id| d.mark_tied_across_stages(id, false));
            }
            model.token_embedding = Some(e.tokens);
            Some(e)
        } else {
            None
        };
        let mut layers = Vec::with_capacity(stage.layers.len());
        units.first_layer = units.forward.len();
        for i in stage.layers.clone() {
            units.forward.push(model.params.begin_unit());
            let rope = (model.rope)(i)?;
            layers.push(Layer::declare(&mut model.params, c, i, rope)?);
        }
        let output = if stage.loss {
            let d = &mut model.params;
            let shared = model.token_embedding.filter(|_| c.tied).map(|table| d.spec(table).unit);
            // A tied head is in the embedding's unit, and so is the norm before it: both are used together.
            let unit = shared.unwrap_or_else(|| d.begin_unit());
            d.resume_unit(unit);
            units.forward.push(unit);
            let norm = NormLayer::declare(d, "final_norm", c.hidden, norm_of(c))?;
            let config =
                LmHeadConfig { vocab: c.vocab, hidden: c.hidden, softcap: c.final_softcap, std: c.init_std };
            let head = match model.token_embedding {
                Some(table) if c.tied => LmHead::tied(d, table, &config),
                // A tied head on a rank without the first stage holds its own copy of the token table.
                None if c.tied => LmHead::tied_across_stages(d, "embed.tokens", &config)?,
                _ => LmHead::declare(d, "head.weight", &config)?,
            };
            Some((norm, head))
        } else {
            None
        };
        let mtp = match (&output, c.mtp) {
            (Some((_, head)), Some(m)) => Some(MtpBlock::declare(model, m, embedding.as_ref(), head)?),
            _ => None,
        };
        units.backward = units.forward[units.first_layer..].iter().rev().copied().collect();
        units.layers = stage.layers.clone();
        if let Some(block) = &mtp {
            (units.mtp, units.mtp_tables) = block.units(&model.params);
        }
        Ok(Chunk { embedding, layers, output, mtp, total_layers: c.layers as u32, units })
    }

    /// Its units of sharded weights.
    pub(crate) fn units(&self) -> &ChunkUnits {
        &self.units
    }

    /// Its decoder layers, in order.
    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Whether it holds the LM head.
    pub fn is_last(&self) -> bool {
        self.output.is_some()
    }

    /// Forward of the chunk: `x [T, hidden]` from the previous stage (none on the first) → the next stage's input, or
    /// on the last stage what `mode` asks for.
    pub fn forward(
        &self,
        p: &StepContext,
        input: &Input,
        x: Option<Tensor>,
        mode: ForwardMode,
    ) -> Result<(Tensor, Option<ChunkSaved>)> {
        run_to_completion(self.forward_in_turns(p, input, x, mode))
    }

    /// [`Chunk::forward`] as a future that yields while MoE tokens are dispatched, for
    /// [`interleave`](ferrotron_engine::interleave).
    pub async fn forward_in_turns(
        &self,
        p: &StepContext<'_>,
        input: &Input,
        x: Option<Tensor>,
        mode: ForwardMode<'_>,
    ) -> Result<(Tensor, Option<ChunkSaved>)> {
        let train = matches!(mode, ForwardMode::Train(_));
        let (x, layers, embedding) = self.decoder_layers(p, input, x, train).await?;
        let Some((norm, head)) = &self.output else {
            let saved = ChunkSaved { mtp: None, output: None, layers, embedding };
            return Ok((x.sum(p)?, train.then_some(saved)));
        };
        let _unit = self.enter_output(p)?;
        let (y, _, normed) = norm.forward_pending(p, x, head.needs_input_amax(p))?;
        let targets = match mode {
            ForwardMode::Logits => return Ok((head.logits(p, &y)?, None)),
            ForwardMode::Loss(t) | ForwardMode::Train(t) => t,
        };
        let (rows, output) = head.loss(p, &y, targets, train)?;
        let mtp = match &self.mtp {
            Some(block) if train => Some(block.forward(p, input, head, &y.values).await?),
            _ => None,
        };
        let output = output.map(|head| (head, normed));
        Ok((rows, train.then_some(ChunkSaved { mtp, output, layers, embedding })))
    }

    /// Logits `[tokens, V]` of every MTP layer, of a chunk that is the whole model.
    pub fn mtp_logits(&self, p: &StepContext, input: &Input) -> Result<Vec<Tensor>> {
        let (Some((norm, head)), Some(block)) = (&self.output, &self.mtp) else {
            return Ok(Vec::new());
        };
        let (x, _, _) = run_to_completion(self.decoder_layers(p, input, None, false))?;
        let _unit = self.enter_output(p)?;
        let (y, _, _) = norm.forward_pending(p, x, false)?;
        block.logits(p, input, head, &y.values)
    }

    /// Gathers the final norm and the LM head, where weights are sharded, and layers for backward ahead.
    fn enter_output(&self, p: &StepContext) -> Result<Option<UnitGuard>> {
        ChunkUnits::enter(p, &self.units.backward, 0)
    }

    /// Names a pass of a layer in traces.
    fn layer_span(&self, p: &StepContext, pass: &'static str, i: usize) -> Result<Span> {
        let layer = self.units.layers.start + i;
        p.rank.compute.span(ActivityKind::Region, pass, format_args!("layer {layer}"))
    }

    /// Embedding and decoder layers.
    async fn decoder_layers(
        &self,
        p: &StepContext<'_>,
        input: &Input,
        x: Option<Tensor>,
        train: bool,
    ) -> Result<(HiddenStates, SavedLayers, Option<EmbeddingSaved>)> {
        let (x, embedding) = match (&self.embedding, x) {
            (Some(e), None) => {
                let _unit = ChunkUnits::enter(p, &self.units.forward, 0)?;
                let (x, saved) = e.forward(p, &input.ids, &input.positions)?;
                (p.dropout(self.total_layers, AFTER_EMBEDDING, x)?, Some(saved))
            }
            (None, Some(x)) => (x, None),
            _ => return shape_error("stage", "the first one starts from ids, the others from hidden states"),
        };
        let offload = p.offload.filter(|_| train);
        let (mut x, mut layers) = (HiddenStates::of(x), SavedLayers::new(offload, self.units.layers.clone()));
        for (i, layer) in self.layers.iter().enumerate() {
            layers.before_forward(i)?;
            let _unit = ChunkUnits::enter(p, &self.units.forward, self.units.layer(i))?;
            let _span = self.layer_span(p, "forward", i)?;
            let (y, saved) = layer.forward(p, x, &input.layout, &input.positions).await?;
            if train {
                layers.push(offload, saved)?;
            }
            x = y;
        }
        layers.before_forward(self.layers.len())?;
        Ok((x, layers, embedding))
    }

    /// Backward of the chunk: gradient of the output (none on the last stage, where the loss begins) → gradient of
    /// the input (none on the first). `put` receives each weight gradient as soon as its operands exist, to run it
    /// now or later.
    pub fn backward(
        &self,
        p: &StepContext,
        saved: ChunkSaved,
        input: &Input,
        dy: Option<Tensor>,
        put: &mut dyn FnMut(WeightGrad) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        run_to_completion(self.backward_in_turns(p, saved, input, dy, put))
    }

    /// [`Chunk::backward`] as a future that yields while MoE gradients are dispatched.
    pub async fn backward_in_turns(
        &self,
        p: &StepContext<'_>,
        saved: ChunkSaved,
        input: &Input,
        dy: Option<Tensor>,
        put: &mut dyn FnMut(WeightGrad) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let mut layers = saved.layers;
        layers.before_backward(self.layers.len())?;
        let mut dx = match (&self.output, saved.output, dy) {
            (Some((norm, head)), Some((head_saved, norm_saved)), None) => {
                let _unit = self.enter_output(p)?;
                let (mut dx, g) = head.backward(p, head_saved)?;
                put(g)?;
                if let (Some(block), Some(saved)) = (&self.mtp, saved.mtp) {
                    let mut pass = MtpBackward { p, input, head, put };
                    dx = block.backward(&mut pass, saved, dx).await?;
                }
                let (dx, g) = norm.backward(p, norm_saved, &dx, None)?;
                put(g)?;
                dx
            }
            (None, None, Some(dy)) => dy,
            _ => return shape_error("stage", "the last one starts from the loss, the others from gradients"),
        };
        for (i, layer) in self.layers.iter().enumerate().rev() {
            layers.before_backward(i)?;
            let Some(saved) = layers.pop()? else {
                return shape_error("stage", "a layer has saved nothing for its backward pass");
            };
            let _unit = ChunkUnits::enter(p, &self.units.backward, self.units.layer_backward(i))?;
            let _span = self.layer_span(p, "backward", i)?;
            let (d, g) = layer.backward(p, saved, &input.layout, &input.positions, &dx).await?;
            put(g)?;
            dx = d;
        }
        layers.finish()?;
        match (&self.embedding, saved.embedding) {
            (Some(e), Some(saved)) => {
                let dx = p.dropout(self.total_layers, AFTER_EMBEDDING, dx)?;
                put(e.backward(p, saved, &dx)?)?;
                Ok(None)
            }
            _ => Ok(Some(dx)),
        }
    }

    /// Logits `[batch, V]` of the last new token of each of `batch` sequences, for a chunk that is the whole model.
    /// All new tokens are appended to the caches.
    pub(super) fn decode(
        &self,
        p: &StepContext,
        input: &Input,
        batch: usize,
        caches: &mut [KvCache],
    ) -> Result<Tensor> {
        let (Some(embedding), Some((norm, head))) = (&self.embedding, &self.output) else {
            return shape_error("decode", "the whole model must be on one rank");
        };
        let (mut x, _) = {
            let _unit = ChunkUnits::enter(p, &self.units.forward, 0)?;
            embedding.forward(p, &input.ids, &input.positions)?
        };
        for (i, (layer, cache)) in self.layers.iter().zip(caches).enumerate() {
            let _unit = ChunkUnits::enter(p, &self.units.forward, self.units.layer(i))?;
            x = layer.decode(p, &x, cache, &input.layout, &input.positions)?;
        }
        let (tokens, hidden) = (input.layout.tokens(), x.shape()[1]);
        let new = tokens / batch.max(1);
        let x = p.all_gather(&x, "hidden states")?.narrow(0, 0, tokens)?;
        let last = x.view(&[batch, new, hidden])?.select(1, new.saturating_sub(1))?;
        let rows = p.empty(&[batch, hidden])?;
        p.rank.kernels.copy(&p.rank.compute, &last, &rows)?;
        let _unit = self.enter_output(p)?;
        let (y, _) = norm.forward(p, &rows)?;
        head.logits_of(p, &y)
    }
}
