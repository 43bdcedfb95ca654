//! How well operands of 8-bit products fit their formats, from all ranks.

use super::fp8_scales::module;
use crate::events::{Operand, Precision};
use crate::model::{ModelConfig, logical_parts};
use crate::{Error, Result};
use ferrotron_engine::quant::Role;
use ferrotron_engine::{Params, Rank, StepState};
use ferrotron_kernels::QuantStats;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// One operand on one rank, as it travels. Floats are bits: JSON has no NaN.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RankOperandStats {
    module: String,
    /// The first logical tensor of its weight.
    first: String,
    role: usize,
    /// Elements, saturated, vanished.
    counts: [u64; 3],
    /// amax and the range of 1/scale.
    singles: [u32; 3],
    /// Squares of errors and of values.
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

/// What was noted since operands are watched, which they no longer are.
pub(super) fn take_operand_stats(params: &Params, state: &StepState) -> Vec<RankOperandStats> {
    let Some(quant) = state.quant() else { return Vec::new() };
    let seen = quant.take_stats().into_iter().map(|o| {
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
    let seen = seen.collect();
    quant.record_stats(false);
    seen
}

/// What all ranks saw, on every rank; nothing if there was nothing to see. Every rank calls it.
pub(super) fn gather(
    rank: &Rank,
    model: &ModelConfig,
    step: u64,
    mine: Vec<RankOperandStats>,
) -> Result<Option<Precision>> {
    let broken = |e: serde_json::Error| Error::Invalid(format!("what ranks say of operands: {e}"));
    let mut all = mine;
    if rank.world.size() > 1 {
        let bytes = serde_json::to_vec(&all).map_err(broken)?;
        let told = rank.world.all().all_gather_bytes(&bytes, "statistics of operands")?;
        all.clear();
        for bytes in told {
            all.extend(serde_json::from_slice::<Vec<RankOperandStats>>(&bytes).map_err(broken)?);
        }
    }
    let order: HashMap<String, usize> =
        logical_parts(model)?.into_iter().enumerate().map(|(i, p)| (p.name, i)).collect();
    // Stable: ranks stay in their order, so that sums are the same every time.
    all.sort_by_key(|s| (order.get(&s.first).copied(), s.role));
    let operands = all.chunk_by(|a, b| (&a.module, a.role) == (&b.module, b.role)).map(operand).collect();
    Ok(Some(Precision { step, operands }).filter(|p: &Precision| !p.operands.is_empty()))
}

/// One operand from what each rank saw of it.
fn operand(ranks: &[RankOperandStats]) -> Operand {
    let mut all = QuantStats::default();
    ranks.iter().for_each(|seen| all.merge(&seen.stats()));
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
