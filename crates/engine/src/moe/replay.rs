//! RoutingTrace of a step that are kept, or given in place of the router's.

use super::state::{MoeLayerId, MoeState};
use crate::StepContext;
use ferrotron_tensor::{DType, Result, Tensor, shape_error};
use std::collections::HashMap;
use std::sync::PoisonError;

/// Which mixture, and which of its uses where a layer is used repeatedly.
pub type LayerUse = (usize, u32);

/// The choices of one micro-batch in one mixture, before any were dropped.
pub struct RoutingTrace {
    /// The mixture, by its place in [`MoeState::specs`].
    pub of: LayerUse,
    /// i32 `[rows]`: number of each row's token in the step.
    pub rows: Tensor,
    /// i32 `[rows, k]`: experts; -1 in rows that are no tokens.
    pub index: Tensor,
}

/// What is given to a step, and what is kept of it.
#[derive(Default)]
pub(crate) struct Replay {
    replayed: HashMap<LayerUse, Tensor>,
    recorded: Option<Vec<RoutingTrace>>,
}

impl MoeState {
    /// The training passes from here on take these choices, i32 `[tokens of the step, k]` of each mixture, wherever there are any.
    pub fn replay_routing(&self, tables: impl IntoIterator<Item = (LayerUse, Tensor)>) {
        self.replay().replayed = tables.into_iter().collect();
    }

    /// The choices of training passes are kept from here on.
    pub fn record_routing(&self) {
        self.replay().recorded = Some(Vec::new());
    }

    /// What was kept since it was asked for last, in the order of passes.
    pub fn take_routing(&self) -> Vec<RoutingTrace> {
        self.replay().recorded.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Fills `index` with the choices that are given for the rows of this pass. Nothing is given? `false`.
    pub(super) fn replayed_routing(&self, p: &StepContext, id: MoeLayerId, index: &Tensor) -> Result<bool> {
        let given = self.replay().replayed.get(&(id.0, p.repeat)).filter(|_| p.train).cloned();
        let Some(table) = given else { return Ok(false) };
        let Some(moe) = p.moe else { return shape_error("choices", "they are for the tokens of a step") };
        if table.shape()[1..] != index.shape()[1..] {
            let what = format!("{:?} are given where each token has {}", table.shape(), index.shape()[1]);
            return shape_error("choices", what);
        }
        // Numbers of four bytes, whatever they mean.
        let bits = |t: &Tensor| t.view_dtype(DType::F32);
        p.rank.kernels.gather_rows(&p.rank.compute, &bits(&table)?, moe.rows, 1, &bits(index)?)?;
        Ok(true)
    }

    /// Keeps the choices of a pass, if somebody wants them.
    pub(super) fn record(&self, p: &StepContext, id: MoeLayerId, index: &Tensor) {
        if let (Some(kept), Some(moe)) = (&mut self.replay().recorded, p.moe) {
            let of = (id.0, p.repeat);
            kept.push(RoutingTrace { of, rows: moe.rows.clone(), index: index.clone() });
        }
    }

    fn replay(&self) -> std::sync::MutexGuard<'_, Replay> {
        self.replay.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
