//! Optimizer state as checkpoints hold it, and its order with the thread that writes one.

use super::StateKind;
use crate::Result;
use ferrotron_engine::Rank;
use ferrotron_kernels::moments::BLOCK;
use ferrotron_kernels::{Kernels, Moment};
use ferrotron_tensor::{Category, DType, Event, Stream, Tensor};
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

#[cfg(test)]
#[path = "saved_tests.rs"]
mod tests;

/// This rank's shard of a bucket of a state. Checkpoints hold plain numbers: what is stored in another way (masters as
/// remainders, packed moments) is converted, any range of it on any stream.
pub(crate) struct SavedBucket {
    pub(super) kind: StateKind,
    pub(super) held: Tensor,
    /// Block scales of a packed moment.
    pub(super) scales: Option<Tensor>,
    /// Weights that remainders complete to masters.
    pub(super) weights: Option<Tensor>,
    /// Dtype in checkpoints.
    pub(super) saved: DType,
}

impl SavedBucket {
    /// Whether checkpoints hold it as it is stored.
    pub(crate) fn as_it_is(&self) -> bool {
        self.held.dtype() == self.saved
    }

    /// Whether it is in host memory.
    pub(crate) fn is_on_host(&self) -> bool {
        self.held.is_on_host()
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.held.numel()
    }

    /// Elements `range` as checkpoints hold them: the state's own memory, or a copy on the device, converted on `s`.
    pub(crate) fn elements(&self, k: &dyn Kernels, s: &Stream, range: Range<usize>) -> Result<Tensor> {
        if self.as_it_is() {
            return Ok(self.held.narrow(0, range.start, range.len())?);
        }
        // Elements that share a scale are unpacked together.
        let start = range.start / BLOCK * BLOCK;
        let whole = start..range.end.next_multiple_of(BLOCK).min(self.len());
        let part = |t: &Tensor| t.narrow(0, whole.start, whole.len());
        let mut out = Tensor::empty(s, &[whole.len()], DType::F32, Category::Workspace)?;
        match (self.kind, &self.weights) {
            (StateKind::Moment(order), _) => {
                let blocks = whole.start / BLOCK..whole.end.div_ceil(BLOCK);
                let scales = self.scales.as_ref().map(|s| s.narrow(0, blocks.start, blocks.len()));
                let scales = scales.transpose()?;
                let moment = Moment { values: &part(&self.held)?, scales: scales.as_ref() };
                k.unpack_moment(s, order, moment, &out)?;
            }
            (_, Some(weights)) => k.join_master(s, &part(weights)?, &part(&self.held)?, &out)?,
            (_, None) => k.copy(s, &part(&self.held)?, &out)?,
        }
        if self.saved != DType::F32 {
            let rounded = Tensor::empty(s, out.shape(), self.saved, Category::Workspace)?;
            k.copy(s, &out, &rounded)?;
            out = rounded;
        }
        Ok(out.narrow(0, range.start - start, range.len())?)
    }
}

/// Reads of state by other threads that the next update waits for.
#[derive(Default)]
pub(super) struct StateReads(Mutex<Vec<Receiver<Event>>>);

/// A read of state in host memory on a stream, until it is dropped.
pub(crate) struct StateRead {
    stream: Stream,
    done: Sender<Event>,
}

impl StateReads {
    pub(super) fn begin(&self, stream: &Stream) -> StateRead {
        let (done, ended) = channel();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
        StateRead { stream: stream.clone(), done }
    }

    /// Blocks until all reads have ended; the compute stream follows them.
    pub(super) fn wait(&self, rank: &Rank) -> Result<()> {
        let reads = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let start = Instant::now();
        for read in &reads {
            // Without an event the device has failed, which it reports elsewhere; the read has ended all the same.
            if let Ok(ended) = read.recv() {
                rank.compute.wait(&ended)?;
            }
        }
        if !reads.is_empty() {
            let seconds = start.elapsed().as_secs_f64();
            tracing::debug!(seconds, "the update waited until state in host memory was saved");
        }
        Ok(())
    }
}

impl Drop for StateRead {
    fn drop(&mut self) {
        if let Ok(ended) = self.stream.record() {
            // Nobody waits any more if the optimizer is gone.
            let _ = self.done.send(ended);
        }
    }
}
