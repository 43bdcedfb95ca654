//! What the layers of a chunk save for backward, on the device or offloaded to host memory in between.

use super::layer::LayerSaved;
use ferrotron_engine::offload::{ActivationOffload, OffloadPlan, OffloadedLayer};
use ferrotron_engine::{Checkpointed, Saved, SavedTensor};
use ferrotron_tensor::Result;

type Layer = Checkpointed<LayerSaved>;

/// Saved activations of the layers of one micro-batch, in forward order.
#[derive(Default)]
pub(super) struct SavedLayers {
    layers: Vec<(Layer, Option<OffloadedLayer>)>,
    plan: OffloadPlan,
}

impl SavedLayers {
    /// For `count` layers that save, with the moves that are planned for them.
    pub(super) fn new(offload: Option<&ActivationOffload>, count: usize) -> SavedLayers {
        SavedLayers {
            layers: Vec::with_capacity(count),
            plan: offload.map(|o| o.plan(count)).unwrap_or_default(),
        }
    }

    /// Before the forward of layer `l`, or of the output: frees the device memory of layers whose time has come.
    pub(super) fn before_forward(&mut self, l: usize) -> Result<()> {
        self.plan.releases(l).try_for_each(|i| match self.layers.get_mut(i) {
            Some((saved, Some(moved))) => moved.release(saved),
            _ => Ok(()),
        })
    }

    /// After the forward of the next layer: keeps what it saved, and starts to offload it if it is planned to move.
    pub(super) fn push(&mut self, offload: Option<&ActivationOffload>, mut saved: Layer) -> Result<()> {
        let moved = match (offload, self.plan.layer(self.layers.len())) {
            (Some(offload), Some(_)) => Some(offload.start(&mut saved)?),
            _ => None,
        };
        self.layers.push((saved, moved));
        Ok(())
    }

    /// Before the backward of layer `l`, or of the output: starts the reloads whose time has come.
    pub(super) fn before_backward(&mut self, l: usize) -> Result<()> {
        self.plan.reloads(l).try_for_each(|i| match self.layers.get_mut(i) {
            Some((saved, Some(moved))) => moved.reload(saved),
            _ => Ok(()),
        })
    }

    /// What the last layer saved, ready for its backward.
    pub(super) fn pop(&mut self) -> Result<Option<Layer>> {
        let Some((mut saved, moved)) = self.layers.pop() else { return Ok(None) };
        moved.map_or(Ok(()), |moved| moved.take(&mut saved))?;
        Ok(Some(saved))
    }

    /// The layers, in forward order.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Layer> {
        self.layers.iter_mut().map(|(saved, _)| saved)
    }
}

impl Saved for SavedLayers {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.layers.iter_mut().rev().for_each(|(saved, _)| saved.tensors(f));
    }
}
