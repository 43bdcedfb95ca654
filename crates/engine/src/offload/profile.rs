//! Times of the layers of a chunk, by events on the compute stream, without the time that computation waits for copies.

use super::{ChunkProfile, LayerProfile, OffloadedLayer};
use ferrotron_tensor::{Event, Result, Stream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Passes that were recorded, by the number of the chunk.
pub(super) type RecordedPasses = Arc<Mutex<Vec<(usize, RecordedPass)>>>;

/// Records one pass of a chunk. Computation ends where a hook begins and continues where the hook has let it wait.
pub struct PassRecorder {
    compute: Stream,
    chunk: usize,
    pass: RecordedPass,
    sink: RecordedPasses,
}

/// The events of one pass, in the order of the streams.
#[derive(Default)]
pub(super) struct RecordedPass {
    /// Begin and end of each layer's forward.
    forward: Vec<[Event; 2]>,
    /// Begin and end of each layer's backward, the last layer's first.
    backward: Vec<[Event; 2]>,
    /// Begin of the layer that runs.
    begin: Option<Event>,
    /// Bytes of each allocation of each layer that can be offloaded.
    allocations: Vec<Vec<usize>>,
    /// Begin and end of the copies of each layer, and their bytes: to the host, and back.
    copies: [Vec<([Event; 2], usize)>; 2],
}

/// What a recorded pass took.
pub(super) struct MeasuredPass {
    pub(super) profile: ChunkProfile,
    /// Seconds between layers, in which computation waited for copies.
    pub(super) stall: f64,
    /// Bytes copied to the host and back, and the seconds of those copies.
    pub(super) copied: [(usize, f64); 2],
}

impl PassRecorder {
    pub(super) fn new(compute: &Stream, chunk: usize, sink: &RecordedPasses) -> PassRecorder {
        let (compute, sink) = (compute.clone(), sink.clone());
        PassRecorder { compute, chunk, pass: RecordedPass::default(), sink }
    }

    /// A layer is about to compute.
    pub fn begin(&mut self) -> Result<()> {
        self.pass.begin = Some(self.compute.record()?);
        Ok(())
    }

    /// The forward of a layer has been given to the compute stream.
    pub fn end_forward(&mut self) -> Result<()> {
        let end = self.compute.record()?;
        self.pass.forward.extend(self.pass.begin.take().map(|begin| [begin, end]));
        Ok(())
    }

    /// The backward of a layer has been given to the compute stream.
    pub fn end_backward(&mut self) -> Result<()> {
        let end = self.compute.record()?;
        self.pass.backward.extend(self.pass.begin.take().map(|begin| [begin, end]));
        Ok(())
    }

    /// What the next layer has saved that can be offloaded.
    pub(super) fn saved(&mut self, allocations: Vec<usize>) {
        self.pass.allocations.push(allocations);
    }

    /// The copies of a layer to the host.
    pub(super) fn copied(&mut self, layer: &OffloadedLayer) {
        self.pass.copies[0].extend(layer.copied().map(|events| (events, layer.bytes())));
    }

    /// The copies of a layer back, which have been started.
    pub fn loaded(&mut self, layer: &OffloadedLayer) {
        self.pass.copies[1].extend(layer.loaded().map(|events| (events, layer.bytes())));
    }

    /// The pass is complete. In a pipeline several passes of a chunk begin before the first one ends; that one counts.
    pub fn finish(self) {
        let mut passes = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        if passes.iter().all(|(chunk, _)| *chunk != self.chunk) {
            passes.push((self.chunk, self.pass));
        }
    }
}

fn seconds(events: &[Event; 2]) -> Result<f64> {
    Ok(events[1].since(&events[0])?.as_secs_f64())
}

impl RecordedPass {
    /// Whether the device has run it.
    pub(super) fn is_reached(&self) -> bool {
        self.backward.last().is_some_and(|[_, end]| end.is_reached())
    }

    /// Reads its events, which must have been reached.
    pub(super) fn measure(&self) -> Result<MeasuredPass> {
        let mut layers = Vec::with_capacity(self.forward.len());
        for ((forward, backward), allocations) in
            self.forward.iter().zip(self.backward.iter().rev()).zip(&self.allocations)
        {
            let (forward, backward) = (seconds(forward)?, seconds(backward)?);
            layers.push(LayerProfile { forward, backward, allocations: allocations.clone() });
        }
        let mut waits = Duration::ZERO;
        for list in [&self.forward, &self.backward] {
            for pair in list.windows(2) {
                waits += pair[1][0].since(&pair[0][1])?;
            }
        }
        let output = match (self.forward.last(), self.backward.first()) {
            (Some([_, end]), Some([begin, _])) => begin.since(end)?.as_secs_f64(),
            _ => 0.0,
        };
        let mut copied = [(0, 0.0); 2];
        for (list, copied) in self.copies.iter().zip(&mut copied) {
            for (events, bytes) in list {
                *copied = (copied.0 + bytes, copied.1 + seconds(events)?);
            }
        }
        Ok(MeasuredPass { profile: ChunkProfile { layers, output }, stall: waits.as_secs_f64(), copied })
    }
}
