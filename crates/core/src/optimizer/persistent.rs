//! The optimizer state that persists between steps, as it is stored on this rank.

use super::{Optimizer, StateKind};
use crate::Result;
use ferrotron_engine::{Params, Rank};
use ferrotron_tensor::Tensor;

impl Optimizer {
    /// Every tensor that a step reads and the step before wrote, by name (`adam.m/layers.0.mlp.down.weight`), as it is
    /// stored: master weights (remainders with the weights that complete them), moments with their block scales, step
    /// counts, the loss scale. With [`Optimizer::sync_params`] they determine the model's weights.
    pub(crate) fn persistent_tensors(&self, rank: &Rank, params: &Params) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for state in self.states() {
            for (i, (spec, piece)) in params.specs().iter().zip(&self.pieces).enumerate() {
                if !state.covers(piece.bucket) || piece.param_range.is_empty() {
                    continue;
                }
                let name = spec.parts.first().map_or("", |p| p.name.as_str());
                if state.kind() == StateKind::Remainders {
                    let shard = params.optimizer_shard(rank, piece.bucket, &self.scheme)?;
                    let own = shard.narrow(0, piece.local_range.start, piece.local_range.len())?;
                    all.push((format!("weight/{name}"), own));
                }
                let moment = state.moment(i);
                all.push((format!("{}/{name}", state.name()), moment.values.clone()));
                all.extend(moment.scales.map(|s| (format!("{}.scale/{name}", state.name()), s.clone())));
            }
        }
        all.extend(self.lines.named(params.specs()).map(|(_, name, v)| (name, v.clone())));
        all.extend(
            self.clocks.iter().enumerate().map(|(i, c)| (format!("step count {i}"), c.counter.clone())),
        );
        all.extend(self.loss_scale.iter().map(|s| ("loss scale".to_string(), s.state().clone())));
        Ok(all)
    }
}
