//! What a plan keeps in host memory.

use super::step_time::Workload;
use crate::config::{OffloadedActivations, OffloadedState, Resolved};
use serde::Serialize;

/// Activations and optimizer state in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct HostMemory {
    /// Layers of each chunk of the pipeline whose activations are offloaded, from the first on.
    pub layers: usize,
    /// Fraction of the optimizer state.
    pub optimizer: f64,
}

impl HostMemory {
    /// That of a recipe; what `auto` would choose is not known.
    pub fn of(r: &Resolved) -> HostMemory {
        let layers = match &r.config.offload.activations {
            OffloadedActivations::Layers(count) => *count,
            _ => 0,
        };
        HostMemory { layers, optimizer: r.config.offload.optimizer.fraction() }
    }

    /// What is tried for a model of so many layers: activations of a quarter, half and three quarters of them, optimizer state, and
    /// both.
    pub fn sets(layers: usize) -> Vec<HostMemory> {
        let parts = [0, layers / 4, layers / 2, 3 * layers / 4];
        let all = parts.iter().flat_map(|n| [0.0, 1.0].map(|optimizer| HostMemory { layers: *n, optimizer }));
        all.filter(|set| *set != HostMemory::default()).collect()
    }

    /// Keys of a recipe that ask for it.
    pub fn settings(&self) -> Vec<String> {
        let mut out = Vec::new();
        if self.layers > 0 {
            out.push(format!("offload.activations={}", self.layers));
        }
        if self.optimizer > 0.0 {
            out.push(format!("offload.optimizer={}", self.optimizer));
        }
        out
    }

    /// Part of the saved tensors of a chunk of so many layers that stays on the device. The last layer's backward follows its forward:
    /// it always stays.
    pub(super) fn kept(&self, layers: f64) -> f64 {
        1.0 - (self.layers as f64).min(layers - 1.0).max(0.0) / layers.max(1.0)
    }
}

impl Workload {
    /// The same with other tensors in host memory.
    pub fn with_host_memory(&self, set: HostMemory) -> Workload {
        let mut out = self.clone();
        let offload = &mut out.recipe.config.offload;
        offload.activations = match set.layers {
            0 => OffloadedActivations::Off,
            n => OffloadedActivations::Layers(n),
        };
        offload.optimizer = OffloadedState::Fraction(set.optimizer);
        out
    }
}
