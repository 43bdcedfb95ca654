//! Parameters declare themselves once: names, shapes, initial values and how they may be sharded. Storage, gradients,
//! optimizer state, checkpoints and conversion follow from the declaration.

mod declare;
mod initial;
mod params;

use crate::lora::{LORA_A, LORA_B, LORA_M};
use crate::quant::LinearQuant;
use crate::{Shard, Split};
pub use declare::{Declarations, ExpertParallelRank};
pub use initial::{draw_initial, initial_values};
pub use params::{ParamLayout, Params, Weight};
use std::ops::Range;

/// Index of a parameter in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// Parameters that passes use together: a layer, the embedding, the LM head. Where weights are sharded (ZeRO-3), they
/// are all-gathered and released together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(pub usize);

/// Initializer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation, drawn by (seed, name, element index).
    Normal(f32),
    /// A constant.
    Constant(f32),
}

/// One logical tensor, as checkpoints and conversions know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Unique name, such as `layers.3.attn.q.weight`.
    pub name: String,
    /// Global shape, without padding.
    pub shape: Vec<usize>,
    /// Initializer.
    pub init: Init,
    /// How tensor-parallel ranks may shard it.
    pub split: Split,
}

/// How the optimizer treats a parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpdateGroup {
    /// Its parameter group; 0 for those that no group selects.
    pub index: usize,
    /// Parameters whose optimizer states are stored differently share no bucket.
    pub storage: usize,
    /// It is not trained: it has no gradient and no moments.
    pub frozen: bool,
    /// Frozen, with values that come from the base model: it has no master weights and is in no checkpoint.
    pub base: bool,
    /// Its update needs all of it: a data-parallel rank holds its optimizer state whole or not at all.
    pub whole: bool,
}

/// What a parameter is, by its name and shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamKind {
    /// Token or position embedding; also the LM head where it is tied to it.
    Embedding,
    /// LM head with weights of its own.
    LmHead,
    /// Weight of a router.
    Router,
    /// Weight of experts.
    Expert,
    /// Any other matrix.
    Matrix,
    /// A or B of a LoRA adapter, or m of DoRA.
    Adapter,
    /// Bias, and attention sinks.
    Bias,
    /// Weight of a norm.
    Norm,
}

/// One parameter in memory: this rank's shards of its logical tensors, stacked along axis 0.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Logical tensors, in order.
    pub parts: Vec<Part>,
    /// This rank's shard of each.
    pub shards: Vec<Shard>,
    /// Local shape.
    pub shape: Vec<usize>,
    /// Modules that use it: its gradient is ready after this many contributions per micro-batch.
    pub uses: u32,
    /// Elements on the rank that holds most; bucket boundaries follow it, so that they are equal on all ranks.
    pub widest: usize,
    /// A second copy of a parameter that another pipeline stage owns, where it is counted and saved.
    pub mirror: bool,
    /// The first and the last pipeline stage both hold it, and its gradient is the sum of both.
    pub tied_across_stages: bool,
    /// Quantization of the GEMMs that use it.
    pub quant: Option<LinearQuant>,
    /// It belongs to experts: it is replicated and sharded over the expert groups.
    pub experts: bool,
    /// Stacked matrices along the first axis, each with scales of its own: the number of local experts, else 1.
    pub matrices: usize,
    /// Its parameter group.
    pub group: UpdateGroup,
    /// The unit it is gathered with where weights are sharded.
    pub unit: UnitId,
}

impl ParamSpec {
    /// Local elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether weight decay applies: to matrices, not to vectors (biases, norm weights).
    pub fn decays(&self) -> bool {
        self.shape.len() > 1
    }

    /// What it is.
    pub fn kind(&self) -> ParamKind {
        let name = self.parts.first().map_or("", |p| p.name.as_str());
        match self.shape.len() {
            0 | 1 if name.ends_with("bias") || name.ends_with(".sink") => ParamKind::Bias,
            0 | 1 if name.ends_with(LORA_M) => ParamKind::Adapter,
            0 | 1 => ParamKind::Norm,
            _ if name.ends_with(LORA_A) || name.ends_with(LORA_B) => ParamKind::Adapter,
            _ if self.experts => ParamKind::Expert,
            _ if name.starts_with("embed.") => ParamKind::Embedding,
            _ if name == "head.weight" => ParamKind::LmHead,
            _ if name.ends_with(".router.weight") => ParamKind::Router,
            _ => ParamKind::Matrix,
        }
    }

    /// Whether it has a row for every token of the vocabulary (or position): an embedding table or the LM head.
    pub fn is_table(&self) -> bool {
        matches!(self.kind(), ParamKind::Embedding | ParamKind::LmHead)
    }

    /// The logical tensors, this rank's shard of each, and its element range in the parameter.
    pub fn held(&self) -> impl Iterator<Item = (&Part, &Shard, Range<usize>)> {
        self.parts.iter().zip(&self.shards).scan(0, |start, (p, cut)| {
            let range = *start..*start + cut.shape(&p.shape).iter().product::<usize>();
            *start = range.end;
            Some((p, cut, range))
        })
    }

    /// Elements `inside` of the parameter as row-major ranges of its logical tensors, in order.
    pub fn runs(&self, inside: &Range<usize>) -> Vec<(&Part, Vec<Range<usize>>)> {
        self.held()
            .map(|(part, cut, r)| {
                let (start, end) = (r.start.max(inside.start), r.end.min(inside.end));
                let share = start.saturating_sub(r.start)..end.saturating_sub(r.start);
                (part, cut.runs_within(&part.shape, share))
            })
            .filter(|(_, runs)| !runs.is_empty())
            .collect()
    }

    /// Shape `[n, k]` of each stacked matrix.
    pub fn matrix(&self) -> [usize; 2] {
        let rows = self.shape.first().copied().unwrap_or(1);
        let each = rows / self.matrices.max(1);
        [each, self.shape.iter().skip(1).product()]
    }

    /// Whether it is FP8-resident: stored in FP8 only.
    pub fn fp8_resident(&self) -> bool {
        self.quant.is_some_and(|e| e.fp8_resident)
    }

    /// Whether every tensor-parallel rank has all of it.
    pub fn replicated(&self) -> bool {
        self.parts.iter().all(|p| p.split == Split::Replicated)
    }
}
