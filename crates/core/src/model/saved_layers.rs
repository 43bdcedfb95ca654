//! What the layers of a chunk save for backward, on the device or offloaded to host memory in between.

use super::layer::LayerSaved;
use ferrotron_engine::offload::{ActivationOffload, OffloadPlan, OffloadedLayer, PassRecorder};
use ferrotron_engine::{Checkpointed, Saved, SavedTensor};
use ferrotron_tensor::Result;
use std::ops::Range;

type Layer = Checkpointed<LayerSaved>;

/// Saved activations of the layers of one micro-batch, in forward order.
#[derive(Default)]
pub(super) struct SavedLayers {
    layers: Vec<(Layer, Option<OffloadedLayer>)>,
    /// Layers of the chunk.
    count: usize,
    plan: OffloadPlan,
    /// Times the pass, in a step that is measured.
    recorder: Option<PassRecorder>,
}

impl SavedLayers {
    /// For the layers `range` of the model, which save, with the moves that are planned for them.
    pub(super) fn new(offload: Option<&ActivationOffload>, range: Range<usize>) -> SavedLayers {
        SavedLayers {
            layers: Vec::with_capacity(range.len()),
            count: range.len(),
            plan: offload.map(|o| o.plan(range.start, range.len())).unwrap_or_default(),
            recorder: offload.and_then(|o| o.recorder(range.start)).filter(|_| !range.is_empty()),
        }
    }

    /// Before the forward of layer `l`, or of the output: frees the device memory of layers whose time has come.
    pub(super) fn before_forward(&mut self, l: usize) -> Result<()> {
        self.recorder.as_mut().map_or(Ok(()), PassRecorder::end_forward)?;
        self.plan.releases(l).try_for_each(|i| match self.layers.get_mut(i) {
            Some((saved, Some(moved))) => moved.release(saved),
            _ => Ok(()),
        })?;
        match &mut self.recorder {
            Some(recorder) if l < self.count => recorder.begin(),
            _ => Ok(()),
        }
    }

    /// After the forward of the next layer: keeps what it saved, and starts to offload it if it is planned to move.
    pub(super) fn push(&mut self, offload: Option<&ActivationOffload>, mut saved: Layer) -> Result<()> {
        if let (Some(offload), Some(recorder)) = (offload, &mut self.recorder) {
            offload.note(&mut saved, recorder);
        }
        let moved = match (offload, self.plan.layer(self.layers.len())) {
            (Some(offload), Some(m)) => {
                Some(offload.start(&mut saved, m.allocations, self.recorder.as_mut())?)
            }
            _ => None,
        };
        self.layers.push((saved, moved));
        Ok(())
    }

    /// Before the backward of layer `l`, or of the output: starts the reloads whose time has come.
    pub(super) fn before_backward(&mut self, l: usize) -> Result<()> {
        self.recorder.as_mut().map_or(Ok(()), PassRecorder::end_backward)?;
        self.plan.reloads(l).try_for_each(|i| match self.layers.get_mut(i) {
            Some((saved, Some(moved))) => moved.reload(saved),
            _ => Ok(()),
        })
    }

    /// What the last layer saved, ready for its backward.
    pub(super) fn pop(&mut self) -> Result<Option<Layer>> {
        let Some((mut saved, moved)) = self.layers.pop() else { return Ok(None) };
        if let Some(mut moved) = moved {
            moved.reload(&mut saved)?;
            if let Some(recorder) = &mut self.recorder {
                recorder.loaded(&moved);
            }
            moved.take(&mut saved)?;
        }
        self.recorder.as_mut().map_or(Ok(()), PassRecorder::begin)?;
        Ok(Some(saved))
    }

    /// After the backward of the first layer.
    pub(super) fn finish(mut self) -> Result<()> {
        let Some(mut recorder) = self.recorder.take() else { return Ok(()) };
        recorder.end_backward()?;
        recorder.finish();
        Ok(())
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
