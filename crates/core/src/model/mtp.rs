//! Multi-token prediction layers; [`super::mtp_config`] has the maths.

use super::chunk::embedding_config;
use super::config::{ModelConfig, Positions};
use super::declare::ModelDeclaration;
use super::decoder::{Input, MtpInput};
use super::description::Block;
use super::layer::{Layer, LayerSaved, checkpointed_blocks, norm_of};
use super::mtp_config::MtpConfig;
use ferrotron_engine::{
    Checkpointed, Declarations, Embedding, EmbeddingSaved, HiddenStates, Linear, LinearSaved, LmHead,
    LmHeadSaved, NormLayer, NormSaved, Saved, SavedTensor, StepContext, UnitId, WeightGrad,
    run_to_completion,
};
use ferrotron_tensor::{DType, Result, Tensor, shape_error};

/// Dropout site after the embedding of an MTP layer, under the layer number after its own.
const AFTER_EMBEDDING: u32 = 0;

/// All MTP layers, on the last pipeline stage.
pub(super) struct MtpBlock {
    embedding: Embedding,
    /// One layer for each depth, or one for all.
    layers: Vec<MtpLayer>,
    depth: usize,
    hidden: usize,
    /// Decoder layers of the model.
    decoder_layers: u32,
    detach: bool,
}

pub(super) struct MtpLayer {
    enorm: NormLayer,
    hnorm: NormLayer,
    eh: Linear,
    layer: Layer,
    norm: NormLayer,
    /// Its unit of sharded weights.
    unit: UnitId,
}

/// Backward pass through the MTP layers.
pub(super) struct MtpBackward<'a> {
    pub(super) p: &'a StepContext<'a>,
    pub(super) input: &'a Input,
    pub(super) head: &'a LmHead,
    /// Receives each weight gradient as soon as its operands are known.
    pub(super) put: &'a mut dyn FnMut(WeightGrad) -> Result<()>,
}

/// What one MTP layer saves for backward.
struct MtpLayerSaved {
    depth: usize,
    head: Option<LmHeadSaved>,
    norm: NormSaved,
    layer: Checkpointed<LayerSaved>,
    eh: LinearSaved,
    hnorm: NormSaved,
    enorm: NormSaved,
    embedding: EmbeddingSaved,
}

impl Saved for MtpLayerSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.head.tensors(f);
        self.norm.tensors(f);
        self.layer.tensors(f);
        self.eh.tensors(f);
        self.hnorm.tensors(f);
        self.enorm.tensors(f);
        self.embedding.tensors(f);
    }
}

/// What all MTP layers save for backward.
pub(super) struct MtpBlockSaved {
    depths: Vec<MtpLayerSaved>,
    /// f32 `[D]`: `Σ weight·loss` of each depth.
    pub(super) losses: Tensor,
}

impl Saved for MtpBlockSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.depths.iter_mut().rev().for_each(|d| d.tensors(f));
    }
}

impl MtpBlockSaved {
    /// Calls `f` with every saved tensor and the block it belongs to.
    pub(super) fn blocks(&mut self, f: &mut dyn FnMut(Block, &mut SavedTensor)) {
        for saved in &mut self.depths {
            saved.head.tensors(&mut |t| f(Block::Output, t));
            checkpointed_blocks(&mut saved.layer, f);
            saved.eh.tensors(&mut |t| f(Block::Mlp, t));
            let mut norms = |t: &mut SavedTensor| f(Block::Norm, t);
            saved.norm.tensors(&mut norms);
            saved.hnorm.tensors(&mut norms);
            saved.enorm.tensors(&mut norms);
            saved.embedding.tensors(&mut |t| f(Block::Embedding, t));
        }
    }
}

impl MtpBlock {
    /// Declares the layers as `mtp.<d>.*`. `embedding` is the model's where this chunk has it; elsewhere its tables are
    /// declared a second time, or shared with a tied `head`.
    pub(super) fn declare(
        model: &mut ModelDeclaration,
        mtp: MtpConfig,
        embedding: Option<&Embedding>,
        head: &LmHead,
    ) -> Result<MtpBlock> {
        let (c, training) = (model.config, model.mtp);
        let depth = mtp.layers as u32;
        // Gradients that embedding and LM head get from MTP.
        let uses = if training.detach { 0 } else { depth };
        let d = &mut model.params;
        let add = |d: &mut Declarations, id, more| d.set_uses(id, d.spec(id).uses + more);
        add(d, head.weight(), uses);
        d.begin_unit();
        let embedding = match embedding {
            Some(e) => {
                e.tables().for_each(|id| add(d, id, uses));
                e.share()
            }
            None => declare_mirror(d, c, head, uses)?,
        };
        let first = d.count();
        let layers = (0..mtp.modules()).map(|i| MtpLayer::declare(model, i)).collect::<Result<Vec<_>>>()?;
        if mtp.shared_layer {
            let d = &mut model.params;
            d.since(first).for_each(|id| d.set_uses(id, depth));
        }
        let (depth, hidden, decoder_layers) = (mtp.layers, c.hidden, c.layers as u32);
        Ok(MtpBlock { embedding, layers, depth, hidden, decoder_layers, detach: training.detach })
    }

    /// Units of sharded weights: of the layer of each depth with its number, and of the embedding tables.
    pub(super) fn units(&self, d: &Declarations) -> (Vec<(UnitId, usize)>, Vec<UnitId>) {
        let layer = |depth: usize| {
            let own = depth.min(self.layers.len() - 1);
            (self.layers[own].unit, own)
        };
        let tables = self.embedding.tables().map(|id| d.spec(id).unit);
        ((0..self.depth).map(layer).collect(), tables.collect())
    }

    /// The layer of a depth, and the context with its number of earlier uses.
    fn at<'a>(&self, p: &StepContext<'a>, depth: usize) -> (&MtpLayer, StepContext<'a>) {
        let own = depth.min(self.layers.len() - 1);
        (&self.layers[own], StepContext { repeat: (depth - own) as u32, ..*p })
    }

    /// The hidden states of depth `depth` from `h [T, hidden]` of the depth before, and what backward needs apart
    /// from the LM head's part.
    async fn layer_forward(
        &self,
        p: &StepContext<'_>,
        input: &Input,
        depth: usize,
        h: &Tensor,
    ) -> Result<(Tensor, MtpLayerSaved)> {
        let (m, inner) = self.at(p, depth);
        let _unit = p.enter_unit(m.unit, &[])?;
        let Some(MtpInput { ids, positions, .. }) = input.mtp.get(depth) else {
            return shape_error("prediction", format!("tokens {} ahead are not given", depth + 1));
        };
        let (e, embedding) = self.embedding.forward(p, ids, positions)?;
        let e = p.dropout(self.decoder_layers + depth as u32 + 1, AFTER_EMBEDDING, e)?;
        let both = p.empty(&[h.shape()[0], 2 * self.hidden])?;
        let enorm = m.enorm.forward_into(p, &e, &both.narrow(1, 0, self.hidden)?)?;
        let hnorm = m.hnorm.forward_into(p, h, &both.narrow(1, self.hidden, self.hidden)?)?;
        let (x, eh) = m.eh.forward(p, &both)?;
        let (y, layer) =
            m.layer.forward(&inner, HiddenStates::of(x), &input.layout, &input.positions).await?;
        let (y, _, norm) = m.norm.forward_pending(p, y, false)?;
        Ok((y.values, MtpLayerSaved { depth, head: None, norm, layer, eh, hnorm, enorm, embedding }))
    }

    /// Losses of all depths from `h [T, hidden]`, the decoder's output after the final norm.
    pub(super) async fn forward(
        &self,
        p: &StepContext<'_>,
        input: &Input,
        head: &LmHead,
        h: &Tensor,
    ) -> Result<MtpBlockSaved> {
        let losses = p.rank.activation(&[self.depth], DType::F32)?;
        let mut depths = Vec::with_capacity(self.depth);
        let mut h = h.clone();
        for depth in 0..self.depth {
            let (y, mut saved) = self.layer_forward(p, input, depth, &h).await?;
            let targets = &input.mtp[depth].targets;
            let (rows, head_saved) = head.loss(p, &y, targets, true)?;
            let loss = losses.narrow(0, depth, 1)?;
            p.rank.kernels.dot(&p.rank.compute, &rows, &targets.weights, &loss)?;
            saved.head = head_saved;
            depths.push(saved);
            h = y;
        }
        Ok(MtpBlockSaved { depths, losses })
    }

    /// Logits `[tokens, V/tp]` of every depth, of this rank's vocabulary shard.
    pub(super) fn logits(
        &self,
        p: &StepContext,
        input: &Input,
        head: &LmHead,
        h: &Tensor,
    ) -> Result<Vec<Tensor>> {
        let mut h = h.clone();
        let mut out = Vec::with_capacity(self.depth);
        for depth in 0..self.depth {
            h = run_to_completion(self.layer_forward(p, input, depth, &h))?.0;
            out.push(head.logits(p, &h)?);
        }
        Ok(out)
    }

    /// Gradient of the decoder's output: `dh` from the main loss plus that of all depths.
    pub(super) async fn backward(
        &self,
        pass: &mut MtpBackward<'_>,
        saved: MtpBlockSaved,
        dh: Tensor,
    ) -> Result<Tensor> {
        let mut depths = saved.depths;
        // Start with the last depth; every earlier one adds the gradient of its own loss.
        let mut dy = self.loss_backward(pass, depths.last_mut())?;
        while let Some(saved) = depths.pop() {
            let depth = depths.len();
            let before = match depth {
                0 if self.detach => None,
                0 => Some(dh.clone()),
                _ => Some(self.loss_backward(pass, depths.last_mut())?),
            };
            dy = self.layer_backward(pass, saved, &dy, before.as_ref()).await?;
        }
        Ok(if self.detach { dh } else { dy })
    }

    /// Gradient of a depth's output from its own loss.
    fn loss_backward(&self, pass: &mut MtpBackward<'_>, saved: Option<&mut MtpLayerSaved>) -> Result<Tensor> {
        let MtpBackward { p, head, put, .. } = pass;
        let Some(head_saved) = saved.and_then(|s| s.head.take()) else {
            return shape_error("prediction", "its loss was not head_saved");
        };
        if self.detach {
            return head.backward_input(p, head_saved);
        }
        let (dy, g) = head.backward(p, head_saved)?;
        put(g)?;
        Ok(dy)
    }

    /// Gradient of the previous depth's output, plus `before` from that depth's own loss.
    async fn layer_backward(
        &self,
        pass: &mut MtpBackward<'_>,
        saved: MtpLayerSaved,
        dy: &Tensor,
        before: Option<&Tensor>,
    ) -> Result<Tensor> {
        let MtpBackward { p, input, put, .. } = pass;
        let depth = saved.depth;
        let (m, inner) = self.at(p, depth);
        let _unit = p.enter_unit(m.unit, &[])?;
        let (dy, g) = m.norm.backward(p, saved.norm, dy, None)?;
        put(g)?;
        let (dx, g) = m.layer.backward(&inner, saved.layer, &input.layout, &input.positions, &dy).await?;
        put(g)?;
        let (both, g) = m.eh.backward(p, saved.eh, &dx)?;
        put(g)?;
        let (dh, g) = m.hnorm.backward(p, saved.hnorm, &both.narrow(1, self.hidden, self.hidden)?, before)?;
        put(g)?;
        let (de, g) = m.enorm.backward(p, saved.enorm, &both.narrow(1, 0, self.hidden)?, None)?;
        put(g)?;
        if !self.detach {
            let de = p.dropout(self.decoder_layers + depth as u32 + 1, AFTER_EMBEDDING, de)?;
            put(self.embedding.backward(p, saved.embedding, &de)?)?;
        }
        Ok(dh)
    }
}

impl MtpLayer {
    /// Declares MTP layer `i` as `mtp.<i>.*`.
    pub(super) fn declare(model: &mut ModelDeclaration, i: usize) -> Result<MtpLayer> {
        let c = model.config;
        let rope = (model.rope)(c.layers + i)?;
        let d = &mut model.params;
        let unit = d.begin_unit();
        let norm = |d: &mut Declarations, kind: &str| {
            NormLayer::declare(d, &format!("mtp.{i}.{kind}"), c.hidden, norm_of(c))
        };
        Ok(MtpLayer {
            enorm: norm(d, "enorm")?,
            hnorm: norm(d, "hnorm")?,
            eh: Linear::declare_replicated(d, &format!("mtp.{i}.eh"), 2 * c.hidden, c.hidden, c.init_std)?,
            layer: Layer::declare_as(d, c, &format!("mtp.{i}.layer"), c.layers + i, rope)?,
            norm: norm(d, "norm")?,
            unit,
        })
    }
}

/// Declares the embedding tables of the first stage a second time, used `uses` times here.
fn declare_mirror(d: &mut Declarations, c: &ModelConfig, head: &LmHead, uses: u32) -> Result<Embedding> {
    let learned = (c.positions == Positions::Learned).then_some(c.max_positions);
    let (embedding, new) = match c.tied {
        // A tied LM head already holds the token table.
        true => {
            let e = Embedding::over(d, head.weight(), "embed", learned, c.embed_scale, c.init_std)?;
            d.set_uses(e.tokens, d.spec(e.tokens).uses + uses);
            let new = e.tables().skip(1).collect::<Vec<_>>();
            (e, new)
        }
        false => {
            let e = Embedding::declare(d, "embed", embedding_config(c))?;
            let new = e.tables().collect();
            (e, new)
        }
    };
    for id in new {
        d.set_uses(id, uses);
        d.mark_tied_across_stages(id, true);
    }
    Ok(embedding)
}
