//! The modules that predict further tokens; [`super::mtp`] has the maths.

use super::config::{ModelConfig, Positions};
use super::decoder::{Ahead, Input};
use super::layer::{Layer, LayerSaved, norm_of};
use super::mtp::{MtpConfig, MtpTraining};
use ferrotron_engine::attention::RopeTable;
use ferrotron_engine::moe::{OwnLinear, OwnSaved};
use ferrotron_engine::{
    Declarations, Embedding, EmbeddingSaved, Head, HeadSaved, Hidden, Keep, NormLayer, NormSaved, Pass,
    Saved, SavedTensor, WeightGrad, at_once,
};
use ferrotron_tensor::{DType, Result, Tensor, shape_error};

/// Place of the dropout after the embedding of a depth: that of a layer one further on, where a layer has none.
const AFTER_EMBEDDING: u32 = 0;

/// All depths.
pub(super) struct Predictions {
    embedding: Embedding,
    /// One for each depth, or one for all.
    modules: Vec<Module>,
    depth: usize,
    hidden: usize,
    /// Layers of the decoder.
    layers: u32,
    detach: bool,
}

struct Module {
    enorm: NormLayer,
    hnorm: NormLayer,
    eh: OwnLinear,
    layer: Layer,
    norm: NormLayer,
}

/// What backward needs of one depth.
struct DepthSaved {
    head: Option<HeadSaved>,
    norm: NormSaved,
    layer: Keep<LayerSaved>,
    eh: OwnSaved,
    hnorm: NormSaved,
    enorm: NormSaved,
    embedding: EmbeddingSaved,
}

impl Saved for DepthSaved {
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

/// What backward needs of all.
pub(super) struct PredictionsSaved {
    depths: Vec<DepthSaved>,
    /// f32 `[D]`: `Σ weight·loss` of each depth.
    pub(super) losses: Tensor,
}

impl Saved for PredictionsSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.depths.iter_mut().rev().for_each(|d| d.tensors(f));
    }
}

impl Predictions {
    /// Declares the modules as `mtp.<d>.*`. `own` is the model's embedding where this chunk has it; elsewhere its
    /// tables are declared once more, or shared with `head` where that has the same one.
    pub(super) fn declare(
        d: &mut Declarations,
        c: &ModelConfig,
        (mtp, how): (MtpConfig, MtpTraining),
        rope: &mut dyn FnMut(usize) -> Result<Option<RopeTable>>,
        own: Option<&Embedding>,
        head: &Head,
    ) -> Result<Predictions> {
        let depth = mtp.layers as u32;
        // How often each module's gradients reach what the model shares with them.
        let uses = if how.detach { 0 } else { depth };
        let add = |d: &mut Declarations, id, more| d.set_uses(id, d.spec(id).uses + more);
        add(d, head.weight(), uses);
        let embedding = match own {
            Some(e) => {
                e.tables().for_each(|id| add(d, id, uses));
                e.again()
            }
            None => mirror(d, c, head, uses)?,
        };
        let first = d.count();
        let modules = (0..mtp.modules())
            .map(|i| Module::declare(d, c, i, rope(c.layers + i)?))
            .collect::<Result<Vec<_>>>()?;
        if mtp.repeated {
            d.since(first).for_each(|id| d.set_uses(id, depth));
        }
        let (depth, hidden, layers) = (mtp.layers, c.hidden, c.layers as u32);
        Ok(Predictions { embedding, modules, depth, hidden, layers, detach: how.detach })
    }

    /// The module of a depth, and the pass as it sees it.
    fn at<'a>(&self, p: &Pass<'a>, depth: usize) -> (&Module, Pass<'a>) {
        let own = depth.min(self.modules.len() - 1);
        (&self.modules[own], Pass { repeat: (depth - own) as u32, ..*p })
    }

    /// What depth `depth` makes of `h [rows, hidden]` of the depth before: its own, and what backward needs besides that
    /// of the head.
    async fn step(
        &self,
        p: &Pass<'_>,
        input: &Input,
        depth: usize,
        h: &Tensor,
    ) -> Result<(Tensor, DepthSaved)> {
        let (m, inner) = self.at(p, depth);
        let Some(Ahead { ids, positions, .. }) = input.ahead.get(depth) else {
            return shape_error("prediction", format!("tokens {} ahead are not given", depth + 1));
        };
        let (e, embedding) = self.embedding.forward(p, ids, positions)?;
        let e = p.dropout(self.layers + depth as u32 + 1, AFTER_EMBEDDING, e)?;
        let both = p.empty(&[h.shape()[0], 2 * self.hidden])?;
        let enorm = m.enorm.forward_into(p, &e, &both.narrow(1, 0, self.hidden)?)?;
        let hnorm = m.hnorm.forward_into(p, h, &both.narrow(1, self.hidden, self.hidden)?)?;
        let (x, eh) = m.eh.forward(p, &both)?;
        let (y, layer) = m.layer.forward(&inner, Hidden::of(x), &input.layout, &input.positions).await?;
        let (y, _, norm) = m.norm.forward_of(p, y, false)?;
        Ok((y.values, DepthSaved { head: None, norm, layer, eh, hnorm, enorm, embedding }))
    }

    /// Losses of all depths, from `h [rows, hidden]`, the decoder's output after its final norm, in turns.
    pub(super) async fn forward(
        &self,
        p: &Pass<'_>,
        input: &Input,
        head: &Head,
        h: &Tensor,
    ) -> Result<PredictionsSaved> {
        let losses = p.rank.activation(&[self.depth], DType::F32)?;
        let mut depths = Vec::with_capacity(self.depth);
        let mut h = h.clone();
        for depth in 0..self.depth {
            let (y, mut saved) = self.step(p, input, depth, &h).await?;
            let targets = &input.ahead[depth].targets;
            let (rows, kept) = head.loss(p, &y, targets, true)?;
            let loss = losses.narrow(0, depth, 1)?;
            p.rank.kernels.dot(&p.rank.compute, &rows, &targets.weights, &loss)?;
            saved.head = kept;
            depths.push(saved);
            h = y;
        }
        Ok(PredictionsSaved { depths, losses })
    }

    /// Logits `[tokens, V]` of every depth, of the columns this rank holds.
    pub(super) fn logits(&self, p: &Pass, input: &Input, head: &Head, h: &Tensor) -> Result<Vec<Tensor>> {
        let mut h = h.clone();
        let mut out = Vec::with_capacity(self.depth);
        for depth in 0..self.depth {
            h = at_once(self.step(p, input, depth, &h))?.0;
            out.push(head.logits(p, &h)?);
        }
        Ok(out)
    }

    /// The gradient of the decoder's output: `dh` of the model's own loss, and that of all depths; in turns.
    pub(super) async fn backward(
        &self,
        p: &Pass<'_>,
        saved: PredictionsSaved,
        input: &Input,
        head: &Head,
        dh: Tensor,
        put: &mut dyn FnMut(WeightGrad) -> Result<()>,
    ) -> Result<Tensor> {
        let mut depths = saved.depths;
        // Of the last depth's output; then of the one before, with what flows back from behind it.
        let mut dy = self.of_loss(p, head, depths.last_mut(), put)?;
        while let Some(saved) = depths.pop() {
            let depth = depths.len();
            let before = match depth {
                0 if self.detach => None,
                0 => Some(dh.clone()),
                _ => Some(self.of_loss(p, head, depths.last_mut(), put)?),
            };
            dy = self.back(p, saved, input, depth, &dy, before.as_ref(), put).await?;
        }
        Ok(if self.detach { dh } else { dy })
    }

    /// Gradient of a depth's output from its own loss.
    fn of_loss(
        &self,
        p: &Pass,
        head: &Head,
        saved: Option<&mut DepthSaved>,
        put: &mut dyn FnMut(WeightGrad) -> Result<()>,
    ) -> Result<Tensor> {
        let Some(kept) = saved.and_then(|s| s.head.take()) else {
            return shape_error("prediction", "its loss was not kept");
        };
        if self.detach {
            return head.backward_input(p, kept);
        }
        let (dy, g) = head.backward(p, kept)?;
        put(g)?;
        Ok(dy)
    }

    /// Gradient of the output of the depth before, plus `before`, which its own loss gives it.
    #[allow(clippy::too_many_arguments)]
    async fn back(
        &self,
        p: &Pass<'_>,
        saved: DepthSaved,
        input: &Input,
        depth: usize,
        dy: &Tensor,
        before: Option<&Tensor>,
        put: &mut dyn FnMut(WeightGrad) -> Result<()>,
    ) -> Result<Tensor> {
        let (m, inner) = self.at(p, depth);
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
            let de = p.dropout(self.layers + depth as u32 + 1, AFTER_EMBEDDING, de)?;
            put(self.embedding.backward(p, saved.embedding, &de)?)?;
        }
        Ok(dh)
    }
}

impl Module {
    fn declare(d: &mut Declarations, c: &ModelConfig, i: usize, rope: Option<RopeTable>) -> Result<Module> {
        let norm = |d: &mut Declarations, kind: &str| {
            NormLayer::declare(d, &format!("mtp.{i}.{kind}"), c.hidden, norm_of(c))
        };
        Ok(Module {
            enorm: norm(d, "enorm")?,
            hnorm: norm(d, "hnorm")?,
            eh: OwnLinear::declare(d, &format!("mtp.{i}.eh"), 2 * c.hidden, c.hidden, c.init_std)?,
            layer: Layer::declare_as(d, c, &format!("mtp.{i}.layer"), c.layers + i, rope)?,
            norm: norm(d, "norm")?,
        })
    }
}

/// The tables of the first stage once more, used `uses` times here.
fn mirror(d: &mut Declarations, c: &ModelConfig, head: &Head, uses: u32) -> Result<Embedding> {
    let learned = (c.positions == Positions::Learned).then_some(c.max_positions);
    let (embedding, new) = match c.tied {
        // The head's copy of the table.
        true => {
            let e = Embedding::over(d, head.weight(), "embed", learned, c.embed_scale, c.init_std)?;
            d.set_uses(e.tokens, d.spec(e.tokens).uses + uses);
            let new = e.tables().skip(1).collect::<Vec<_>>();
            (e, new)
        }
        false => {
            let e = Embedding::declare(d, "embed", c.vocab, c.hidden, learned, c.embed_scale, c.init_std)?;
            let new = e.tables().collect();
            (e, new)
        }
    };
    for id in new {
        d.set_uses(id, uses);
        d.mark_tied(id, true);
    }
    Ok(embedding)
}
