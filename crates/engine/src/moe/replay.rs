//! Routing record and replay: the selected experts of a step, kept for a trace or given in place of the router's.

use super::state::{MoeLayerId, MoeState};
use crate::StepContext;
use ferrotron_tensor::{DType, Result, Tensor, shape_error};
use std::collections::HashMap;
use std::sync::PoisonError;

/// An MoE layer by its index in [`MoeState::specs`], and which of its uses, where a shared MTP layer runs repeatedly.
pub type LayerUse = (usize, u32);

/// The routing of one micro-batch in one MoE layer, before any token is dropped.
pub struct RoutingTrace {
    /// Layer and use.
    pub of: LayerUse,
    /// i32 `[rows]`: index of each row's token in the step.
    pub rows: Tensor,
    /// i32 `[rows, k]`: selected experts; -1 in padding rows.
    pub index: Tensor,
}

/// Routing to replay in a step, and routing recorded from it.
#[derive(Default)]
pub(crate) struct Replay {
    replayed: HashMap<LayerUse, Tensor>,
    recorded: Option<Vec<RoutingTrace>>,
}

impl MoeState {
    /// From now on training passes take their routing from these tables, i32 `[tokens of the step, k]` per layer use;
    /// layers without a table route as usual.
    pub fn replay_routing(&self, tables: impl IntoIterator<Item = (LayerUse, Tensor)>) {
        self.replay().replayed = tables.into_iter().collect();
    }

    /// From now on the routing of training passes is recorded.
    pub fn record_routing(&self) {
        self.replay().recorded = Some(Vec::new());
    }

    /// Takes what was recorded since the last call, in the order of the passes.
    pub fn take_routing(&self) -> Vec<RoutingTrace> {
        self.replay().recorded.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Writes the replayed routing of this pass' rows into `index`; returns false where there is none.
    pub(super) fn replayed_routing(&self, p: &StepContext, id: MoeLayerId, index: &Tensor) -> Result<bool> {
        let replayed = self.replay().replayed.get(&(id.0, p.repeat)).filter(|_| p.train).cloned();
        let Some(table) = replayed else { return Ok(false) };
        let Some(moe) = p.moe else {
            return shape_error(
                "routing replay",
                "it needs a description of the micro-batch (StepContext::moe)",
            );
        };
        if table.shape()[1..] != index.shape()[1..] {
            let what =
                format!("the trace has {:?}, but tokens have {} experts", table.shape(), index.shape()[1]);
            return shape_error("routing replay", what);
        }
        // A gather of 4-byte values; the dtype does not matter.
        let bits = |t: &Tensor| t.view_dtype(DType::F32);
        p.rank.kernels.gather_rows(&p.rank.compute, &bits(&table)?, moe.rows, 1, &bits(index)?)?;
        Ok(true)
    }

    /// Records the routing of a pass, where recording is on.
    pub(super) fn record(&self, p: &StepContext, id: MoeLayerId, index: &Tensor) {
        if let (Some(recorded), Some(moe)) = (&mut self.replay().recorded, p.moe) {
            let of = (id.0, p.repeat);
            recorded.push(RoutingTrace { of, rows: moe.rows.clone(), index: index.clone() });
        }
    }

    fn replay(&self) -> std::sync::MutexGuard<'_, Replay> {
        self.replay.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
