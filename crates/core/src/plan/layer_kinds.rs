//! Layers of a model that cost the same are costed once.
//!
//! A model has a few kinds of layers (dense or MoE, with or without a sliding window). The description of a model reduced to
//! one layer of each kind, with embedding, output and MTP layers, gives the time and parameters of all of them; a plan of a
//! stage is a sum over its layers' kinds.

use super::hardware::{GemmDtype, Hardware};
use super::layer_time::{LayerTime, layer_time};
use crate::Result;
use crate::model::description::{Lifetime, ModelDescription, StepShape};
use crate::model::{ModelConfig, Stage};
use ferrotron_engine::ParamSpec;
use ferrotron_engine::quant::LinearGemm;

/// What a layer of a kind costs on one rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LayerKindCost {
    pub time: LayerTime,
    /// Parameters on the rank: dense and of experts; trained ones.
    pub params: [f64; 2],
    pub trained: [f64; 2],
    /// Weights that are quantized after every step.
    pub quantized: f64,
    /// Bytes saved by one micro-batch, and of what backward recomputes or computes in transit.
    pub saved: f64,
    pub recomputed: f64,
}

/// Costs of all kinds of layers of a model under one layout and micro-batch.
#[derive(Clone, Debug)]
pub(super) struct LayerKinds {
    /// The kind of every decoder layer.
    of_layer: Vec<usize>,
    kinds: Vec<LayerKindCost>,
    embedding: LayerKindCost,
    output: LayerKindCost,
    mtp: LayerKindCost,
}

impl LayerKinds {
    /// Costs of the layers of `shape`'s model; its stages do not matter.
    pub(super) fn of(hw: &Hardware, shape: &StepShape, dtype: GemmDtype) -> Result<LayerKinds> {
        LayerKinds::of_params(hw, shape, dtype, &LayerKinds::params(shape)?)
    }

    /// The parameters of one layer of each kind, which depend on tp, ep and etp alone.
    pub(super) fn params(shape: &StepShape) -> Result<Vec<ParamSpec>> {
        ModelDescription::params(&one_of_each_kind(shape).0)
    }

    /// Parameters of the whole model on one rank of its tp, ep and etp, without times.
    pub(super) fn parameters(shape: &StepShape) -> Result<LayerKindCost> {
        let (reduced, of_layer) = one_of_each_kind(shape);
        let mut out = LayerKinds::empty(reduced.model.layers, of_layer);
        out.add_params(&ModelDescription::params(&reduced)?);
        let m = &shape.model;
        Ok(out.stage(&Stage { embedding: true, layers: 0..m.layers, mtp: 0..m.mtp_depth(), loss: true }))
    }

    fn empty(layers: usize, of_layer: Vec<usize>) -> LayerKinds {
        let none = LayerKindCost::default();
        LayerKinds { of_layer, kinds: vec![none; layers], embedding: none, output: none, mtp: none }
    }

    /// The same costs, with parameters declared before.
    pub(super) fn of_params(
        hw: &Hardware,
        shape: &StepShape,
        dtype: GemmDtype,
        params: &[ParamSpec],
    ) -> Result<LayerKinds> {
        let (shape, of_layer) = one_of_each_kind(shape);
        let layers = shape.model.layers;
        let (described, _) = ModelDescription::layers_of(&shape, params)?;
        let mut out = LayerKinds::empty(layers, of_layer);
        for layer in &described {
            let time = layer_time(hw, &shape, layer, dtype);
            let slot = out.slot(&layer.name);
            slot.time += time;
            let quantized = layer.gemms.iter().filter(|g| g.fp8 && g.gemm == LinearGemm::Wgrad);
            slot.quantized += quantized.map(|g| (g.m * g.n * g.experts.max(1)) as f64).sum::<f64>();
            slot.saved += layer.saved_bytes(Lifetime::Stored) as f64;
            slot.recomputed = slot.recomputed.max(layer.saved_bytes(Lifetime::Recomputed) as f64);
        }
        out.add_params(params);
        Ok(out)
    }

    fn add_params(&mut self, params: &[ParamSpec]) {
        for p in params {
            let Some(part) = p.parts.first() else { continue };
            let (name, n, kind) = (part.name.clone(), p.numel() as f64, usize::from(p.experts));
            let slot = self.slot(&name);
            slot.params[kind] += n;
            slot.trained[kind] += if is_trained(p) { n } else { 0.0 };
        }
    }

    /// Where the costs of something declared or described as `name` go.
    fn slot(&mut self, name: &str) -> &mut LayerKindCost {
        let number =
            name.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        match number {
            Some(i) if i < self.kinds.len() => &mut self.kinds[i],
            _ if name.starts_with("mtp") => &mut self.mtp,
            _ if name.starts_with("embed") => &mut self.embedding,
            _ => &mut self.output,
        }
    }

    /// What a stage is made of: how many layers of each kind, and whether it has embedding, output and MTP layers.
    pub(super) fn parts(&self, stage: &Stage) -> Vec<usize> {
        let own = self.of_layer.get(stage.layers.clone()).unwrap_or_default();
        let count = |kind: usize| own.iter().filter(|k| **k == kind).count();
        let ends = [stage.embedding, stage.loss, !stage.mtp.is_empty()].map(usize::from);
        (0..self.kinds.len()).map(count).chain(ends).collect()
    }

    /// The sum over the layers of a stage.
    pub(super) fn stage(&self, stage: &Stage) -> LayerKindCost {
        let mut out = LayerKindCost::default();
        let mut add = |k: &LayerKindCost, times: f64| {
            out.time.forward += k.time.forward * times;
            out.time.input += k.time.input * times;
            out.time.weight += k.time.weight * times;
            out.saved += k.saved * times;
            out.recomputed = out.recomputed.max(k.recomputed);
            out.quantized += k.quantized * times;
            for i in 0..2 {
                out.params[i] += k.params[i] * times;
                out.trained[i] += k.trained[i] * times;
            }
        };
        for (kind, cost) in self.kinds.iter().enumerate() {
            let own = self.of_layer.get(stage.layers.clone()).unwrap_or_default();
            match own.iter().filter(|k| **k == kind).count() {
                0 => {}
                n => add(cost, n as f64),
            }
        }
        if stage.embedding {
            add(&self.embedding, 1.0);
        }
        if stage.loss {
            add(&self.output, 1.0);
        }
        if !stage.mtp.is_empty() {
            add(&self.mtp, 1.0);
        }
        out
    }
}

/// The step of a model with one layer of each kind, all on one rank, and the kind of every layer of the whole.
fn one_of_each_kind(shape: &StepShape) -> (StepShape, Vec<usize>) {
    let (model, of_layer) = reduced(&shape.model);
    let (layers, depth) = (model.layers, model.mtp_depth());
    let stage = Stage { embedding: true, layers: 0..layers, mtp: 0..depth, loss: true };
    (StepShape { model, stages: vec![stage], ..shape.clone() }, of_layer)
}

fn is_trained(p: &ParamSpec) -> bool {
    !p.group.frozen
}

/// The model with one layer of each kind, and the kind of every layer of the whole.
fn reduced(model: &ModelConfig) -> (ModelConfig, Vec<usize>) {
    let mut found: Vec<(bool, bool)> = Vec::new();
    let mut first = Vec::new();
    let mut of_layer = Vec::with_capacity(model.layers);
    for i in 0..model.layers {
        let kind = (model.moe_layer(i).is_some(), model.is_local(i));
        let at = found.iter().position(|k| *k == kind).unwrap_or_else(|| {
            found.push(kind);
            first.push(i);
            found.len() - 1
        });
        of_layer.push(at);
    }
    let pick = |list: &[bool]| match list.is_empty() {
        true => Vec::new(),
        false => first.iter().map(|i| list.get(*i).copied().unwrap_or(false)).collect(),
    };
    let mut out = model.clone();
    out.layers = first.len();
    out.local_layers = pick(&model.local_layers);
    out.no_rope_layers = pick(&model.no_rope_layers);
    if let (Some(moe), Some(whole)) = (&mut out.moe, &model.moe) {
        moe.layers = pick(&whole.layers);
    }
    (out, of_layer)
}
