//! How well quantized operands fit their formats: saturation, underflow and error, from all ranks.

use super::fp8_scales::module;
use super::model_state::ModelState;
use crate::events::{Operand, Precision};
use crate::model::{ModelConfig, logical_parts};
use crate::{Error, Result};
use ferrotron_engine::quant::Role;
use ferrotron_engine::{Params, Rank, StepState};
use ferrotron_kernels::QuantStats;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// The hook that collects operand statistics every `precision.stats_every` steps.
pub(super) struct OperandStats {
    /// Steps between collections; 0: never.
    every: u64,
    /// Statistics of the last ended step that collected them.
    last: Option<Precision>,
}

impl OperandStats {
    pub(super) fn new(every: u64) -> OperandStats {
        OperandStats { every, last: None }
    }

    /// Starts to record if `step` is one to collect; true if so.
    pub(super) fn begin(&self, step: u64, state: &StepState) -> bool {
        let due = self.every > 0 && step.is_multiple_of(self.every);
        if let Some(quant) = state.quant().filter(|_| due) {
            quant.record_stats(true);
        }
        due
    }

    /// Stops to record and returns what this rank recorded.
    pub(super) fn collect(&self, model: &ModelState) -> Vec<RankOperandStats> {
        take_operand_stats(&model.params, &model.step_state)
    }

    /// Merges what all ranks recorded in `step`. Every rank calls it.
    pub(super) fn gather(
        &mut self,
        rank: &Rank,
        model: &ModelConfig,
        step: u64,
        mine: Vec<RankOperandStats>,
    ) -> Result<()> {
        self.last = gather(rank, model, step, mine)?;
        Ok(())
    }

    pub(super) fn take(&mut self) -> Option<Precision> {
        self.last.take()
    }
}

/// Statistics of one operand on one rank, as they are sent. Floats are bit patterns, because JSON has no NaN.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RankOperandStats {
    module: String,
    /// First logical tensor of the weight, which gives the order of modules.
    first: String,
    role: usize,
    /// Elements, and those that saturated and underflowed.
    counts: [u64; 3],
    /// amax and the range of 1/scale.
    singles: [u32; 3],
    /// Sums of squared errors and of squared values.
    squares: [u64; 2],
}

impl RankOperandStats {
    fn stats(&self) -> QuantStats {
        let [elements, saturated, vanished] = self.counts;
        let [amax, low, high] = self.singles.map(f32::from_bits);
        let [error, size] = self.squares.map(f64::from_bits);
        QuantStats { elements, saturated, vanished, amax, scale_inv: (low, high), error, size }
    }
}

fn take_operand_stats(params: &Params, state: &StepState) -> Vec<RankOperandStats> {
    let Some(quant) = state.quant() else { return Vec::new() };
    let stats = quant.take_stats().into_iter().map(|o| {
        let (spec, s) = (&params.specs()[o.slot.param.0], o.stats);
        RankOperandStats {
            module: module(spec),
            first: spec.parts.first().map(|p| p.name.clone()).unwrap_or_default(),
            role: Role::ALL.iter().position(|r| *r == o.slot.role).unwrap_or(0),
            counts: [s.elements, s.saturated, s.vanished],
            singles: [s.amax, s.scale_inv.0, s.scale_inv.1].map(f32::to_bits),
            squares: [s.error, s.size].map(f64::to_bits),
        }
    });
    let stats = stats.collect();
    quant.record_stats(false);
    stats
}

fn gather(
    rank: &Rank,
    model: &ModelConfig,
    step: u64,
    mine: Vec<RankOperandStats>,
) -> Result<Option<Precision>> {
    let broken = |e: serde_json::Error| Error::Invalid(format!("operand statistics of other ranks: {e}"));
    let mut all = mine;
    if rank.world.size() > 1 {
        let bytes = serde_json::to_vec(&all).map_err(broken)?;
        let gathered = rank.world.all().all_gather_bytes(&bytes, "operand statistics")?;
        all.clear();
        for bytes in gathered {
            all.extend(serde_json::from_slice::<Vec<RankOperandStats>>(&bytes).map_err(broken)?);
        }
    }
    let order: HashMap<String, usize> =
        logical_parts(model)?.into_iter().enumerate().map(|(i, p)| (p.name, i)).collect();
    // A stable sort keeps ranks in order, so that sums are deterministic.
    all.sort_by_key(|s| (order.get(&s.first).copied(), s.role));
    let operands = all.chunk_by(|a, b| (&a.module, a.role) == (&b.module, b.role)).map(operand).collect();
    Ok(Some(Precision { step, operands }).filter(|p: &Precision| !p.operands.is_empty()))
}

/// Merges one operand over ranks.
fn operand(ranks: &[RankOperandStats]) -> Operand {
    let mut all = QuantStats::default();
    ranks.iter().for_each(|stats| all.merge(&stats.stats()));
    let role = match ranks.first().map_or(Role::Input, |s| Role::ALL[s.role.min(2)]) {
        Role::Input => "input",
        Role::Weight => "weight",
        Role::Gradient => "gradient",
    };
    let scale = [all.scale_inv.1, all.scale_inv.0].map(|inverse| 1.0 / f64::from(inverse));
    Operand {
        module: ranks.first().map(|s| s.module.clone()).unwrap_or_default(),
        role: role.into(),
        saturation: all.saturation(),
        underflow: all.underflow(),
        amax: f64::from(all.amax),
        scale: Some(scale).filter(|s| s.iter().all(|x| x.is_finite())),
        error: all.relative_error(),
    }
}
