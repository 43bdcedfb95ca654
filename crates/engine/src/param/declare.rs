//! Declarations of a model's parameters and MoE layers.

use super::{ParamId, ParamSpec, Part, UnitId, UpdateGroup};
use crate::lora::LoraPolicy;
use crate::moe::{MoeLayerId, MoeLayerSpec, MoeTraining};
use crate::quant::{LinearQuant, Policy};
use crate::{GroupRank, LossOptions, Rank, Shard};
use ferrotron_tensor::{Result, shape_error};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Collects declarations while a model is built.
pub struct Declarations {
    specs: Vec<ParamSpec>,
    names: HashSet<String>,
    place: GroupRank,
    experts: ExpertParallelRank,
    policy: Policy,
    lora: LoraPolicy,
    moe_layers: Vec<MoeLayerSpec>,
    moe_training: Arc<MoeTraining>,
    loss: LossOptions,
    /// The unit of what is declared next.
    unit: UnitId,
}

/// This rank in the expert-parallel and expert tensor-parallel groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertParallelRank {
    /// Expert-parallel rank: experts are split over these.
    pub ep: GroupRank,
    /// Expert tensor-parallel rank: each expert is sharded over these.
    pub etp: GroupRank,
}

impl ExpertParallelRank {
    /// All experts, unsharded.
    pub const SINGLE: ExpertParallelRank =
        ExpertParallelRank { ep: GroupRank::SINGLE, etp: GroupRank::SINGLE };

    /// The range of `count` experts on this rank.
    pub fn own(&self, count: usize) -> Range<usize> {
        let each = count / self.ep.size;
        self.ep.rank * each..(self.ep.rank + 1) * each
    }
}

impl Default for Declarations {
    fn default() -> Declarations {
        Declarations::at(GroupRank::SINGLE)
    }
}

impl Declarations {
    /// For a rank of a tensor-parallel group.
    pub fn at(place: GroupRank) -> Declarations {
        Declarations {
            specs: Vec::new(),
            names: HashSet::new(),
            place,
            experts: ExpertParallelRank::SINGLE,
            policy: Policy::default(),
            lora: LoraPolicy::default(),
            moe_layers: Vec::new(),
            moe_training: Arc::default(),
            loss: LossOptions::default(),
            unit: UnitId::default(),
        }
    }

    /// For a rank with its groups.
    pub fn of(rank: &Rank) -> Declarations {
        let etp = GroupRank { rank: rank.etp.rank(), size: rank.etp.size() };
        Declarations::on(rank.place(), ExpertParallelRank { ep: rank.expert_parallel_rank(), etp })
    }

    /// For given tensor-parallel and expert-parallel ranks, without a device.
    pub fn on(tp: GroupRank, experts: ExpertParallelRank) -> Declarations {
        Declarations { experts, ..Declarations::at(tp) }
    }

    /// Quantizes GEMMs as the policy says.
    pub fn with_policy(self, policy: Policy) -> Declarations {
        Declarations { policy, ..self }
    }

    /// Gives linears adapters as the policy says.
    pub fn with_lora(self, lora: LoraPolicy) -> Declarations {
        Declarations { lora, ..self }
    }

    /// Which linears have adapters.
    pub(crate) fn lora(&self) -> &LoraPolicy {
        &self.lora
    }

    /// Computes the loss with these options.
    pub fn with_loss(self, loss: LossOptions) -> Declarations {
        Declarations { loss, ..self }
    }

    /// Options of the loss.
    pub(crate) fn loss(&self) -> LossOptions {
        self.loss
    }

    /// Trains MoE layers with these options.
    pub fn with_moe_training(self, moe_training: &Arc<MoeTraining>) -> Declarations {
        Declarations { moe_training: moe_training.clone(), ..self }
    }

    /// Training options of MoE layers.
    pub(crate) fn moe_training(&self) -> &Arc<MoeTraining> {
        &self.moe_training
    }

    /// Quantization of a linear with these outputs (logical name, features) by the policy; recorded with its weight.
    pub(crate) fn quantize_linear(
        &mut self,
        weight: ParamId,
        outputs: &[(String, usize)],
    ) -> Option<LinearQuant> {
        let names: Vec<&str> = outputs.iter().map(|(name, _)| name.as_str()).collect();
        let quant = self.policy.of(&names);
        self.specs[weight.0].quant = quant;
        quant
    }

    /// Quantization of the experts' linears with these outputs, the same for all experts: one grouped GEMM covers
    /// them. Each expert has one matrix, stacked from as many logical tensors as there are outputs.
    pub(crate) fn quantize_experts(&mut self, weight: ParamId, outputs: &[String]) -> Option<LinearQuant> {
        let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
        let (spec, quant) = (&mut self.specs[weight.0], self.policy.of(&names));
        spec.quant = quant;
        spec.matrices = spec.parts.len() / outputs.len().max(1);
        quant
    }

    /// Parameters that stack one matrix for each of `count` experts.
    pub(crate) fn stack_matrices(&mut self, ids: &[ParamId], count: usize) {
        ids.iter().for_each(|id| self.specs[id.0].matrices = count);
    }

    /// Quantization of the LM head. A tied embedding table is never FP8-resident: lookups need it in the compute
    /// dtype.
    pub(crate) fn quantize_lm_head(&mut self, weight: ParamId, table: bool) -> Option<LinearQuant> {
        let quant =
            self.policy.of(&["head"]).map(|e| LinearQuant { fp8_resident: e.fp8_resident && !table, ..e });
        self.specs[weight.0].quant = quant;
        quant
    }

    /// Whether forward attention of a module is in FP8.
    pub(crate) fn quantizes_attention(&self, name: &str) -> bool {
        self.policy.quantizes_attention(name)
    }

    /// This rank in its tensor-parallel group.
    pub fn place(&self) -> GroupRank {
        self.place
    }

    /// This rank in the expert groups.
    pub fn experts(&self) -> ExpertParallelRank {
        self.experts
    }

    /// Declares a parameter stacked from `parts`, which agree in all axes but the first.
    pub fn declare(&mut self, parts: Vec<Part>) -> Result<ParamId> {
        self.declare_at(self.place, false, parts)
    }

    /// Declares a parameter of this rank's experts.
    pub fn declare_experts(&mut self, parts: Vec<Part>) -> Result<ParamId> {
        self.declare_at(self.experts.etp, true, parts)
    }

    fn declare_at(&mut self, place: GroupRank, experts: bool, parts: Vec<Part>) -> Result<ParamId> {
        let Some(mut shape) = parts.first().map(|p| p.shape.clone()).filter(|s| !s.is_empty()) else {
            return shape_error("declare", "a parameter needs a logical tensor with at least one axis");
        };
        if parts.iter().any(|p| p.shape.len() != shape.len() || p.shape[1..] != shape[1..]) {
            return shape_error("declare", format!("logical tensors do not stack: {parts:?}"));
        }
        let shards: Vec<Shard> = parts.iter().map(|p| p.cut(place)).collect();
        let local: Vec<Vec<usize>> = parts.iter().zip(&shards).map(|(p, c)| c.shape(&p.shape)).collect();
        if local.iter().any(|s| s[1..] != local[0][1..]) {
            return shape_error("declare", format!("shards do not stack: {parts:?}"));
        }
        shape.clone_from(&local[0]);
        shape[0] = local.iter().map(|s| s[0]).sum();
        if let Some(twice) = parts.iter().find(|p| !self.names.insert(p.name.clone())) {
            return shape_error("declare", format!("'{}' is declared twice", twice.name));
        }
        let most = GroupRank { rank: 0, ..place };
        let widest = parts.iter().map(|p| p.cut(most).shape(&p.shape).iter().product::<usize>()).sum();
        self.specs.push(ParamSpec {
            parts,
            shards,
            shape,
            uses: 1,
            widest,
            mirror: false,
            tied_across_stages: false,
            quant: None,
            experts,
            matrices: 1,
            group: UpdateGroup::default(),
            unit: self.unit,
        });
        Ok(ParamId(self.specs.len() - 1))
    }

    /// Begins a unit: what is declared next belongs to it.
    pub fn begin_unit(&mut self) -> UnitId {
        self.unit = UnitId(self.specs.iter().map(|s| s.unit.0 + 1).max().unwrap_or(0));
        self.unit
    }

    /// What is declared next belongs to a unit that was begun before.
    pub fn resume_unit(&mut self, unit: UnitId) {
        self.unit = unit;
    }

    /// A declared parameter.
    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
    }

    /// Declares an MoE layer, which has state besides its parameters.
    pub fn moe_layer(&mut self, spec: MoeLayerSpec) -> MoeLayerId {
        self.moe_layers.push(spec);
        MoeLayerId(self.moe_layers.len() - 1)
    }

    /// The declared MoE layers, in order.
    pub fn moe_layers(&self) -> &[MoeLayerSpec] {
        &self.moe_layers
    }

    /// Counts one more module that uses a declared parameter.
    pub fn share(&mut self, id: ParamId) {
        self.specs[id.0].uses += 1;
    }

    /// Sets the number of modules that use a declared parameter.
    pub fn set_uses(&mut self, id: ParamId, uses: u32) {
        self.specs[id.0].uses = uses;
    }

    /// The parameters declared after the first `from`.
    pub fn since(&self, from: usize) -> impl Iterator<Item = ParamId> + use<> {
        (from..self.specs.len()).map(ParamId)
    }

    /// Number of parameters declared so far.
    pub fn count(&self) -> usize {
        self.specs.len()
    }

    /// Marks a parameter that the first and the last pipeline stage both hold; `mirror` on the stage with the copy.
    pub fn mark_tied_across_stages(&mut self, id: ParamId, mirror: bool) {
        self.specs[id.0].tied_across_stages = true;
        self.specs[id.0].mirror = mirror;
    }

    /// The declared parameters, in order.
    pub fn finish(self) -> Vec<ParamSpec> {
        self.specs
    }
}
