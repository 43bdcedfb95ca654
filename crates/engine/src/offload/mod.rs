//! Offloading of saved activations to host memory between forward and backward.
//!
//! Three streams: `C` computes, `D` copies to the host, `H` copies back. The saved tensors of a layer of a micro-batch move as
//! one [`OffloadedLayer`]: [`Offloader::offload`] after the layer's forward, [`OffloadedLayer::release`] frees the device
//! memory before a later layer's forward, [`OffloadedLayer::reload`] starts the way back before an earlier-run backward, and
//! [`OffloadedLayer::take`] hands the tensors to the layer's backward. When which layer moves is an [`OffloadPlan`].
//!
//! Order between the streams is made by these edges alone (x is one allocation); the host never waits:
//!
//! | edge | from | to |
//! |---|---|---|
//! | [`Edge::Produced`] | last write of x on C | copy of x on D |
//! | [`Edge::Copied`] | copy of x on D | reuse of its device memory on C |
//! | [`Edge::Vacated`] | earlier users on C of the memory that x returns to | copy back on H |
//! | [`Edge::Loaded`] | copy back on H | first read in backward on C, and release of x even if it is never read |
//!
//! The rest follows, since every copy waits for C first: x is on the host before it is copied back (C has waited for the copy
//! at the release), and it is back before its host memory is reused (C has waited for it when it frees that memory).

mod activations;
mod plan;
mod profile;
#[cfg(test)]
mod tests;

pub use activations::{ActivationOffload, OffloadChoice, OffloadReport};
pub use plan::{AllocationSet, ChunkProfile, Expected, LayerMoves, LayerProfile, Link, OffloadPlan};
pub use profile::PassRecorder;

use crate::{Module, OffloadClass, Rank, Saved};
use ferrotron_tensor::trace::OFFLOAD;
use ferrotron_tensor::{Category, DType, Error, Event, Result, Stream, Tensor};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An edge of the order between streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// x is written before it is copied to the host.
    Produced,
    /// x is copied to the host before its device memory is reused.
    Copied,
    /// Device memory is free before x is copied back to it.
    Vacated,
    /// x is back before backward reads it or frees it.
    Loaded,
}

/// Copies saved activations to host memory and back, for one rank.
#[derive(Clone)]
pub struct Offloader {
    compute: Stream,
    to_host: Stream,
    from_host: Stream,
    /// Smaller tensors stay.
    min_bytes: usize,
    /// What host memory has no space for stays on the device; otherwise it is an error.
    optional: bool,
    /// Something has stayed for that reason.
    host_is_full: Arc<AtomicBool>,
    /// Host memory of the CUDA graph that is captured.
    slots: HostSlots,
    /// Tests leave one edge out, which the race checker must find.
    #[cfg(test)]
    without: Option<Edge>,
}

impl Offloader {
    /// Streams for a rank. Tensors of less than `min_bytes` stay on the device.
    pub fn new(rank: &Rank, min_bytes: usize) -> Result<Offloader> {
        let stream = |name| rank.device().stream(name).map(|s| s.with_rank(rank.compute.rank()));
        Ok(Offloader {
            compute: rank.compute.clone(),
            to_host: stream(OFFLOAD[0])?,
            from_host: stream(OFFLOAD[1])?,
            min_bytes,
            optional: false,
            host_is_full: Arc::default(),
            slots: HostSlots::default(),
            #[cfg(test)]
            without: None,
        })
    }

    /// Host memory for a layer's allocation. A CUDA graph copies to the same addresses at every replay, so what a capture uses
    /// is never returned to the pool, which would hand it to other work.
    fn host_memory(&self, device: &Tensor) -> Result<Tensor> {
        let found = self.to_host.is_capturing().then(|| self.slots.take(device.bytes())).flatten();
        found.map_or_else(|| Tensor::host(&self.to_host, device.shape(), DType::U8), Ok)
    }

    /// Makes `stream` wait for `event`.
    fn order(&self, edge: Edge, stream: &Stream, event: &Event) -> Result<()> {
        #[cfg(test)]
        if self.without == Some(edge) {
            return Ok(());
        }
        let _ = edge;
        stream.wait(event)
    }

    /// The stream that computes.
    fn compute(&self) -> &Stream {
        &self.compute
    }

    /// The allocations of a layer that `wanted` selects and that can be offloaded, in the order in which forward wrote them.
    /// An allocation that several tensors share counts once; one of which less than half is saved stays, and so do small ones.
    fn candidates(&self, saved: &mut impl Saved, wanted: &dyn Fn(Module) -> bool) -> Vec<Tensor> {
        let mut allocations: Vec<(Tensor, usize)> = Vec::new();
        let mut kept = Vec::new();
        saved.modules(&mut |module, t| {
            let id = t.allocation_id();
            if t.class != OffloadClass::Activation || !wanted(module) || t.is_on_host() {
                // Another module keeps it on the device anyway.
                kept.push(id);
            } else if let Some((_, used)) = allocations.iter_mut().find(|(a, _)| a.allocation_id() == id) {
                *used += t.bytes();
            } else {
                allocations.push(((**t).clone(), t.bytes()));
            }
        });
        let moves = |(t, used): &(Tensor, usize)| {
            t.allocation_bytes() >= self.min_bytes.max(1)
                && used * 2 >= t.allocation_bytes()
                && !kept.contains(&t.allocation_id())
        };
        allocations.retain(moves);
        // The visitor's order is that of backward's first reads; forward wrote them in the opposite order.
        allocations.into_iter().rev().map(|(tensor, _)| tensor).collect()
    }

    /// Starts to copy allocations of a layer: those in `set` of what `wanted` selects, as far as host memory has space for them,
    /// where they may stay.
    pub fn offload(
        &self,
        saved: &mut impl Saved,
        wanted: &dyn Fn(Module) -> bool,
        set: AllocationSet,
    ) -> Result<OffloadedLayer> {
        let (moved, phase) = (Vec::new(), Phase::Copying);
        let mut layer = OffloadedLayer { offloader: self.clone(), moved, begin: [None, None], phase };
        let mut allocations = self.candidates(saved, wanted);
        let mut place = 0..;
        allocations.retain(|_| place.next().is_some_and(|i| set.contains(i)));
        if allocations.is_empty() {
            return Ok(layer);
        }
        self.order(Edge::Produced, &self.to_host, &self.compute.record()?)?;
        layer.begin[0] = Some(self.to_host.record()?);
        for tensor in &allocations {
            let device = tensor.allocation()?;
            let host = match self.host_memory(&device) {
                Err(Error::HostMemory { .. }) if self.optional => {
                    self.host_is_full.store(true, Relaxed);
                    break;
                }
                host => host?,
            };
            self.to_host.copy(&device, &host)?;
            let copied = self.to_host.record()?;
            layer.moved.push(Moved { id: device.allocation_id(), host, copied, loaded: None });
        }
        Ok(layer)
    }
}

/// The host memory of a CUDA graph, which lives as long as that: each block serves one layer of a micro-batch, and then others
/// of the same size.
#[derive(Clone, Default)]
pub struct HostSlots(Arc<Mutex<Vec<Tensor>>>);

impl HostSlots {
    fn lock(&self) -> MutexGuard<'_, Vec<Tensor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A free block of so many bytes.
    fn take(&self, bytes: usize) -> Option<Tensor> {
        let mut free = self.lock();
        let found = free.iter().position(|t| t.bytes() == bytes)?;
        Some(free.swap_remove(found))
    }
}

/// One allocation that has a copy on the host.
struct Moved {
    /// Id of its memory on the device.
    id: u64,
    host: Tensor,
    copied: Event,
    loaded: Option<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// On the device, and on its way to the host.
    Copying,
    /// On the host only.
    Host,
    /// On its way back.
    Loading,
    /// On the device; the host memory is free.
    Device,
}

/// The offloaded activations of one layer of one micro-batch. Dropping it before [`OffloadedLayer::take`] is safe: the streams
/// wait as they must.
pub struct OffloadedLayer {
    offloader: Offloader,
    moved: Vec<Moved>,
    /// Begin of the copies to the host, and of those back.
    begin: [Option<Event>; 2],
    phase: Phase,
}

impl OffloadedLayer {
    /// Begin and end of its copies to the host.
    fn copied(&self) -> Option<[Event; 2]> {
        Some([self.begin[0].clone()?, self.moved.last()?.copied.clone()])
    }

    /// Begin and end of its copies back, once they have been started.
    fn loaded(&self) -> Option<[Event; 2]> {
        Some([self.begin[1].clone()?, self.moved.first()?.loaded.clone()?])
    }

    /// Bytes that move.
    pub fn bytes(&self) -> usize {
        self.moved.iter().map(|m| m.host.bytes()).sum()
    }

    /// Frees the device memory: `saved` refers to the host from now on. The compute stream waits for the copies.
    pub fn release(&mut self, saved: &mut impl Saved) -> Result<()> {
        if self.phase != Phase::Copying {
            return Ok(());
        }
        if let Some(last) = self.moved.last() {
            self.offloader.order(Edge::Copied, &self.offloader.compute, &last.copied)?;
        }
        let to: HashMap<u64, &Tensor> = self.moved.iter().map(|m| (m.id, &m.host)).collect();
        replace(saved, &to)?;
        self.phase = Phase::Host;
        Ok(())
    }

    /// Starts to copy everything back to new device memory.
    pub fn reload(&mut self, saved: &mut impl Saved) -> Result<()> {
        if self.phase != Phase::Host {
            return Ok(());
        }
        let o = &self.offloader;
        // In the order in which backward reads.
        let mut memory = Vec::with_capacity(self.moved.len());
        for m in self.moved.iter().rev() {
            memory.push(Tensor::empty(&o.compute, m.host.shape(), DType::U8, Category::Activations)?);
        }
        o.order(Edge::Vacated, &o.from_host, &o.compute.record()?)?;
        self.begin[1] = Some(o.from_host.record()?);
        for (m, device) in self.moved.iter_mut().rev().zip(&memory) {
            o.from_host.copy(&m.host, device)?;
            m.loaded = Some(o.from_host.record()?);
        }
        let to: HashMap<u64, &Tensor> = self
            .moved
            .iter()
            .rev()
            .zip(&memory)
            .map(|(m, device)| (m.host.allocation_id(), device))
            .collect();
        replace(saved, &to)?;
        self.phase = Phase::Loading;
        Ok(())
    }

    /// Makes `saved` ready for backward on the compute stream, wherever it is.
    pub fn take(mut self, saved: &mut impl Saved) -> Result<()> {
        self.reload(saved)?;
        self.settle()
    }

    /// Makes all streams wait for the copies in progress and frees the host memory.
    fn settle(&mut self) -> Result<()> {
        let o = &self.offloader;
        match (std::mem::replace(&mut self.phase, Phase::Device), self.moved.last(), self.moved.first()) {
            // Everything stayed on the device: it may be freed after the copies.
            (Phase::Copying, Some(last), _) => o.order(Edge::Copied, &o.compute, &last.copied)?,
            // The first one in forward comes back last.
            (Phase::Loading, _, Some(Moved { loaded: Some(loaded), .. })) => {
                o.order(Edge::Loaded, &o.compute, loaded)?;
            }
            _ => {}
        }
        let free = self.moved.drain(..).map(|m| m.host);
        if o.to_host.is_capturing() {
            o.slots.lock().extend(free);
        }
        Ok(())
    }
}

impl Drop for OffloadedLayer {
    fn drop(&mut self) {
        // After an error the step is not continued, and that error is the one to report.
        let _ = self.settle();
    }
}

/// Replaces the memory of saved tensors, by the id of their allocation.
fn replace(saved: &mut impl Saved, to: &HashMap<u64, &Tensor>) -> Result<()> {
    let mut result = Ok(());
    saved.tensors(&mut |t| {
        if let Some(memory) = to.get(&t.allocation_id()) {
            match t.view_in(memory) {
                Ok(view) => t.replace(view),
                Err(e) => result = Err(e),
            }
        }
    });
    result
}
