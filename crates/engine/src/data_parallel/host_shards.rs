//! Shards in host memory: weights and gradients of models that do not fit on the device.
//!
//! Three streams: `C` computes, `D` copies to the host, `H` copies to the device. Copies of `D` wait for `C`, which has then
//! written what is copied, and `C` waits for them before it frees that; [`InFlight`](ferrotron_comm::InFlight) does both. The
//! other edges are [`HostEdge`]. The host never waits.

use crate::Rank;
use ferrotron_tensor::trace::OFFLOAD;
use ferrotron_tensor::{Category, DType, Event, Result, Stream, Tensor};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(test)]
#[path = "host_shards_tests.rs"]
mod tests;

/// Which shards are in host memory (`offload.weights`, `offload.gradients`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostShards {
    /// Those of weights.
    pub weights: bool,
    /// Those of gradients.
    pub gradients: bool,
}

impl HostShards {
    /// Whether any are.
    pub fn any(self) -> bool {
        self.weights || self.gradients
    }
}

/// An edge of the order between streams, for copies to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostEdge {
    /// C no longer uses the device memory before H copies to it.
    Vacated,
    /// D has copied a shard to the host before H reads it there.
    Stored,
    /// H has copied a shard to the device before C reads it there.
    Loaded,
}

/// The streams between shards in host memory and the device.
pub(crate) struct HostLink {
    /// D.
    pub(super) to_host: Stream,
    /// H.
    from_host: Stream,
    /// End of the last copies of updated weights to the host.
    stored: Mutex<Option<Event>>,
    /// Tests leave one edge out, which the race checker must find.
    #[cfg(test)]
    pub(super) without: Mutex<Option<HostEdge>>,
}

impl HostLink {
    pub(crate) fn new(rank: &Rank) -> Result<HostLink> {
        let stream = |name| rank.device().stream(name).map(|s| s.with_rank(rank.compute.rank()));
        let [to_host, from_host] = [stream(OFFLOAD[0])?, stream(OFFLOAD[1])?];
        Ok(HostLink {
            to_host,
            from_host,
            stored: Mutex::default(),
            #[cfg(test)]
            without: Mutex::default(),
        })
    }

    fn stored(&self) -> MutexGuard<'_, Option<Event>> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a stream wait for an event.
    pub(super) fn order(&self, edge: HostEdge, stream: &Stream, event: &Event) -> Result<()> {
        #[cfg(test)]
        if *self.without.lock().unwrap_or_else(PoisonError::into_inner) == Some(edge) {
            return Ok(());
        }
        let _ = edge;
        stream.wait(event)
    }

    /// H, after the work given to C so far and after `written`.
    pub(super) fn fetch_after(&self, rank: &Rank, written: Option<&Event>) -> Result<&Stream> {
        self.order(HostEdge::Vacated, &self.from_host, &rank.compute.record()?)?;
        written.map_or(Ok(()), |event| self.order(HostEdge::Stored, &self.from_host, event))?;
        Ok(&self.from_host)
    }

    /// H, after the work given to C so far and after the last update of the weights.
    pub(super) fn fetch_weights(&self, rank: &Rank) -> Result<&Stream> {
        self.fetch_after(rank, self.stored().as_ref())
    }

    /// Updated weights are on the host at `done`, which is after all earlier copies of weights to the host.
    pub(crate) fn weights_stored(&self, done: Event) {
        *self.stored() = Some(done);
    }

    /// Makes a stream wait for updated weights on their way to the host.
    pub(super) fn wait_weights(&self, stream: &Stream) -> Result<()> {
        self.stored().as_ref().map_or(Ok(()), |done| stream.wait(done))
    }
}

/// Zeroed memory of a shard of weights.
pub(crate) fn zeroed_shard(rank: &Rank, len: usize, dtype: DType, on_host: bool) -> Result<Tensor> {
    if !on_host {
        return rank.compute.zeros(&[len], dtype, Category::Parameters);
    }
    let memory = Tensor::host(&rank.compute, &[len], dtype)?;
    rank.compute.zero(&memory)?;
    Ok(memory)
}

/// Runs collectives on memory in place: where it is on the host, on a copy on the device, since collectives take device
/// memory.
pub(super) fn on_device(s: &Stream, memory: &Tensor, work: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
    if !memory.is_on_host() {
        return work(memory);
    }
    let copy = to_device(s, memory)?;
    work(&copy)?;
    s.copy(&copy, memory)
}

/// Memory on the device: a copy, where it is on the host.
pub(super) fn to_device(s: &Stream, memory: &Tensor) -> Result<Tensor> {
    if !memory.is_on_host() {
        return Ok(memory.clone());
    }
    let copy = Tensor::empty(s, memory.shape(), memory.dtype(), Category::Communication)?;
    s.copy(memory, &copy)?;
    Ok(copy)
}
