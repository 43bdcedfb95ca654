//! Points in time on a device's own clock.

use crate::cuda::{CudaEvent, CudaStream};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A point in a stream's work: the host's clock, or an event of the card that may lie ahead.
#[derive(Clone)]
pub(crate) enum Timestamp {
    Host(Instant),
    Cuda(Arc<CudaEvent>),
}

impl Timestamp {
    /// After everything given to the queue so far; without one it is the host, where all of that is done.
    pub(crate) fn now(cuda: Option<&CudaStream>) -> Result<Timestamp> {
        Ok(match cuda {
            None => Timestamp::Host(Instant::now()),
            Some(cuda) => Timestamp::Cuda(Arc::new(CudaEvent::record(cuda)?)),
        })
    }

    /// Time from `earlier` to this; nothing if that comes later. Waits until both are reached.
    pub(crate) fn since(&self, earlier: &Timestamp) -> Result<Duration> {
        match (self, earlier) {
            (Timestamp::Host(end), Timestamp::Host(start)) => Ok(end.saturating_duration_since(*start)),
            (Timestamp::Cuda(end), Timestamp::Cuda(start)) => end.since(start),
            _ => Err(Error::Unsupported { op: "since", what: "the events are of two devices".into() }),
        }
    }
}
