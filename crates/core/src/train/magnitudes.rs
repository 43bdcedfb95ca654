//! Initial values of DoRA's m: the norms of the rows of the base model, so that training begins there.

use super::model_state::ModelState;
use crate::Result;
use crate::optimizer::Optimizer;
use ferrotron_engine::lora::{LORA_M, row_norms};
use ferrotron_engine::{ParamId, ParamSpec, Rank};
use std::collections::HashMap;
use std::ops::Range;

/// Sets every m to the norms of the rows of its weight; B is zero. Collective: ranks share rows and shards of weights.
pub(super) fn initialize_magnitudes(rank: &Rank, model: &ModelState, optimizer: &Optimizer) -> Result<()> {
    let (params, specs) = (&model.params, model.params.specs());
    let magnitudes: Vec<(usize, &ParamSpec)> =
        specs.iter().enumerate().filter(|(_, s)| s.parts.iter().any(|p| p.name.ends_with(LORA_M))).collect();
    if magnitudes.is_empty() {
        return Ok(());
    }
    // Rows of each adapted linear in its weight.
    let mut weights: HashMap<&str, (ParamId, Range<usize>)> = HashMap::new();
    for (i, spec) in specs.iter().enumerate().filter(|(_, s)| s.shape.len() == 2) {
        for (part, _, range) in spec.held() {
            if let Some(module) = part.name.strip_suffix(".weight") {
                let width = spec.shape[1].max(1);
                weights.insert(module, (ParamId(i), range.start / width..range.end / width));
            }
        }
    }
    for (i, spec) in magnitudes {
        let mut values = Vec::with_capacity(spec.numel());
        let mut last: Option<(ParamId, Vec<f32>)> = None;
        for part in &spec.parts {
            let module = part.name.strip_suffix(LORA_M).unwrap_or_default();
            let Some((id, rows)) = weights.get(module) else { continue };
            let norms = match last.take().filter(|(known, _)| known == id) {
                Some((_, norms)) => norms,
                None => row_norms(rank, params, *id)?,
            };
            values.extend_from_slice(&norms[rows.clone()]);
            last = Some((*id, norms));
        }
        let own = &optimizer.pieces()[i].param_range;
        if let (Some(masters), Some(own)) = (optimizer.states().first(), values.get(own.clone())) {
            optimizer.put(rank, params, masters, i, own)?;
        }
    }
    optimizer.sync_params(rank, params, &model.step_state)
}
