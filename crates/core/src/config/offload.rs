//! Checks of the `[offload]` section.

use super::{OffloadedActivations, Recipe};
use crate::error::Result;
use crate::model::config::ModelConfig;

impl Recipe {
    pub(super) fn check_offload(&self) -> Result<()> {
        let (offload, zero) = (&self.config.offload, self.config.parallel.zero);
        for (key, on) in [("offload.weights", offload.weights), ("offload.gradients", offload.gradients)] {
            if on && zero != 3 {
                return self.refuse(
                    key,
                    format!("moves the shards of ZeRO-3, and parallel.zero is {zero}; set parallel.zero = 3"),
                );
            }
        }
        if offload.host_budget.is_some_and(|bytes| bytes.0 == 0) {
            return self.refuse("offload.host_budget", "must be at least 1 byte; leave it out for no limit");
        }
        self.within("offload.optimizer", offload.optimizer.fraction(), 0.0, 1.0)
    }

    /// Checks that fewer layers are offloaded than the model has.
    pub(super) fn check_offloaded_layers(&self, m: &ModelConfig) -> Result<()> {
        if let OffloadedActivations::Layers(count) = self.config.offload.activations
            && count >= m.layers
        {
            let most = m.layers.saturating_sub(1);
            let what = format!(
                "the last of {} layers stays, because its backward follows at once; at most {most}, or \"auto\"",
                m.layers
            );
            return self.refuse("offload.activations", what);
        }
        Ok(())
    }
}
