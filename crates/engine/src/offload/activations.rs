//! Which activations of a model are offloaded.

use super::{OffloadPlan, OffloadedLayer, Offloader};
use crate::{Module, Rank, Saved};
use ferrotron_tensor::Result;

/// What to offload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadChoice {
    /// All activations of the first layers of each model chunk.
    Layers(usize),
    /// The activations of these modules, in all layers but the last of each chunk.
    Modules(Vec<Module>),
}

/// The offloading of a rank's activations.
pub struct ActivationOffload {
    offloader: Offloader,
    choice: OffloadChoice,
}

impl ActivationOffload {
    /// Offloads tensors of at least `min_bytes`.
    pub fn new(rank: &Rank, choice: OffloadChoice, min_bytes: usize) -> Result<ActivationOffload> {
        Ok(ActivationOffload { offloader: Offloader::new(rank, min_bytes)?, choice })
    }

    /// The moves of a chunk of `layers` layers.
    pub fn plan(&self, layers: usize) -> OffloadPlan {
        match &self.choice {
            OffloadChoice::Layers(count) => OffloadPlan::first(*count, layers),
            OffloadChoice::Modules(_) => OffloadPlan::streamed(layers),
        }
    }

    /// Starts to offload what a layer has saved.
    pub fn start(&self, saved: &mut impl Saved) -> Result<OffloadedLayer> {
        self.offloader.offload(saved, &|module| match &self.choice {
            OffloadChoice::Layers(_) => true,
            OffloadChoice::Modules(list) => list.contains(&module),
        })
    }
}
