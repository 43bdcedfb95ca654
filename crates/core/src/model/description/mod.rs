//! One description of a model on one rank: what it holds, saves, multiplies and sends, as plain data.
//!
//! [`crate::cost`] sums over this data: memory, communication volume, FLOPs and the roofline. Nothing is allocated.
//!
//! - Parameters come from running the model's own declarations without a device, so they cannot differ from what is
//!   trained.
//! - The GEMMs, saved input and tensor-parallel collectives of a linear layer follow from its declared weight: shape,
//!   split and FP8 recipe (`layer::LayerBuilder::linear`).
//! - Attention, MLP, MoE, embedding and output list their linear layers and whatever else they save or send.
//!
//! Letters: a micro-batch has N rows on the tensor-parallel group, T = N / tp of them on each rank (sequence
//! parallelism); h hidden, n query heads, g key heads, d head dim, f MLP width, E experts, k experts per token, V
//! vocabulary.

mod attention;
mod feed_forward;
mod layer;
mod moe;
mod output;
mod params;
mod shape;

pub(crate) use params::declare_chunks;
pub use params::{LinearInfo, declare_params, logical_buffers, logical_parts, logical_specs, module_of};
pub use shape::{Group, ParallelRanks, StepShape};

use crate::Result;
use ferrotron_comm::OpKind;
use ferrotron_engine::ParamSpec;
use ferrotron_engine::quant::{LinearGemm, LinearQuant};
use ferrotron_tensor::DType;
use layer::LayerBuilder;
use std::collections::HashMap;

/// A model as one rank holds it, and what one micro-batch makes of it.
#[derive(Clone, Debug)]
pub struct ModelDescription {
    /// The rank's parameters with their placement, in order of declaration.
    pub params: Vec<ParamSpec>,
    /// The rank's layers in the order of forward: embedding, decoder layers, output, MTP layers.
    pub layers: Vec<LayerDescription>,
    /// Activations to the next pipeline stage and gradients to the previous one.
    pub stage_sends: Vec<Collective>,
}

/// One layer in one micro-batch.
#[derive(Clone, Debug)]
pub struct LayerDescription {
    /// `embed`, `layers.3`, `output` or `mtp.0`.
    pub name: String,
    /// Tensors saved for backward, each allocation once.
    pub saved: Vec<SavedTensor>,
    /// GEMMs of its linear layers.
    pub gemms: Vec<Gemm>,
    /// Core attention, where the layer has it.
    pub attention: Option<CoreAttention>,
    /// Collectives, with the bytes this rank sends.
    pub collectives: Vec<Collective>,
}

/// A block of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Block {
    /// Token and position lookup.
    Embedding,
    /// Inputs and statistics of the norms around the blocks: the residual stream.
    Norm,
    /// Projections and core attention.
    Attention,
    /// A dense MLP.
    Mlp,
    /// Router, experts and shared expert.
    Moe,
    /// LM head and loss.
    Output,
}

/// When a saved tensor is freed. Both kinds are consumed by the backward of their layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// Lives from forward to the backward of its layer.
    Stored,
    /// Freed after forward and recomputed: lives only during the backward of its layer.
    Recomputed,
}

/// A tensor saved for backward.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedTensor {
    /// Name inside its layer, such as `attn.qkv`.
    pub name: String,
    /// The part of the layer it belongs to.
    pub block: Block,
    /// Shape on this rank.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// When it is freed.
    pub lifetime: Lifetime,
}

impl SavedTensor {
    /// Size in memory.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// `C [m, n] = A [m, k] · B [k, n]`, `count` times (once per local expert).
#[derive(Clone, Debug, PartialEq)]
pub struct Gemm {
    /// Module names of the weight, such as `layers.0.attn.q`.
    pub names: Vec<String>,
    /// The part of the layer it belongs to.
    pub block: Block,
    /// Forward, input gradient or weight gradient.
    pub gemm: LinearGemm,
    /// Rows of the result; of a grouped GEMM, of all experts together.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// The contracted axis.
    pub k: usize,
    /// Experts of a grouped GEMM, whose weights differ; 1 otherwise.
    pub experts: usize,
    /// Both operands are FP8.
    pub fp8: bool,
    /// Its block is recomputed, so it runs a second time.
    pub recomputed: bool,
}

impl Gemm {
    /// `2·m·n·k`
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// Scores and values of one layer: `softmax(q·kᵀ)·v` over the visible pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CoreAttention {
    /// Query heads of this rank.
    pub heads: usize,
    /// Channels of a query and key.
    pub head_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// Sliding window, if the layer has one.
    pub window: Option<usize>,
    /// q, k and v are quantized to FP8 in forward.
    pub fp8: bool,
}

/// Bytes this rank sends in one collective, by the formulas of ring algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// The process group.
    pub group: Group,
    /// The operation.
    pub kind: OpKind,
    /// Bytes sent by this rank.
    pub bytes: u64,
    /// When it runs.
    pub pass: Pass,
}

/// When something runs in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Forward once more, because backward recomputes.
    Recompute,
    /// Backward.
    Backward,
}

impl ModelDescription {
    /// Describes the rank's share of the model in a step of that shape.
    pub fn new(shape: &StepShape) -> Result<ModelDescription> {
        let params = ModelDescription::params(shape)?;
        let (layers, stage_sends) = ModelDescription::layers_of(shape, &params)?;
        Ok(ModelDescription { params, layers, stage_sends })
    }

    /// Layers and messages between stages of a rank that holds `params`, which neither micro-batch nor recomputation changes.
    pub(crate) fn layers_of(
        shape: &StepShape,
        params: &[ParamSpec],
    ) -> Result<(Vec<LayerDescription>, Vec<Collective>)> {
        let by_name: HashMap<&str, &ParamSpec> =
            params.iter().flat_map(|s| s.parts.first().map(|p| (p.name.as_str(), s))).collect();
        let (mut layers, mut stage_sends) = (Vec::new(), Vec::new());
        let rows = shape.rows()?;
        let new = |name: String| LayerBuilder::new(shape, &by_name, rows, name);
        let m = &shape.model;
        for stage in &shape.stages {
            if stage.embedding {
                layers.push(new("embed".into()).embedding("embed"));
            }
            for i in stage.layers.clone() {
                layers.push(new(format!("layers.{i}")).decoder_layer(&format!("layers.{i}"), i));
            }
            if stage.loss {
                layers.push(new("output".into()).output());
                layers.extend(stage.mtp.clone().map(|d| new(format!("mtp.{d}")).mtp_layer(d)));
            }
            let bytes = (rows.local * m.hidden * shape.dtype.size()) as u64;
            let send = |group, pass| Collective { group, kind: OpKind::SendRecv, bytes, pass };
            if !stage.loss {
                stage_sends.push(send(Group::Pp, Pass::Forward));
            }
            if !stage.embedding {
                stage_sends.push(send(Group::PpBackward, Pass::Backward));
            }
        }
        Ok((layers, stage_sends))
    }

    /// The parameters alone.
    pub fn params(shape: &StepShape) -> Result<Vec<ParamSpec>> {
        Ok(declare_params(&shape.model, &shape.ranks, &shape.stages, &shape.options)?)
    }

    /// The FP8 recipe of a module's weight.
    pub fn quant(&self, module: &str) -> Option<LinearQuant> {
        let is = |name: &str| name == module || name.strip_suffix(".weight") == Some(module);
        self.params.iter().find(|p| p.parts.first().is_some_and(|part| is(&part.name)))?.quant
    }

    /// Every collective of a micro-batch.
    pub fn collectives(&self) -> impl Iterator<Item = &Collective> {
        self.layers.iter().flat_map(|l| &l.collectives).chain(&self.stage_sends)
    }

    /// Every GEMM of a micro-batch.
    pub fn gemms(&self) -> impl Iterator<Item = &Gemm> {
        self.layers.iter().flat_map(|l| &l.gemms)
    }
}

impl LayerDescription {
    /// Bytes of its saved tensors with that lifetime.
    pub fn saved_bytes(&self, lifetime: Lifetime) -> usize {
        self.saved.iter().filter(|t| t.lifetime == lifetime).map(SavedTensor::bytes).sum()
    }
}
