//! Timestamps on a device's clock.

use crate::cuda::{CudaEvent, CudaStream};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A point in a stream's work: a host time, or a CUDA event that may not have been reached yet.
#[derive(Clone)]
pub(crate) enum Timestamp {
    Host(Instant),
    Cuda(Arc<CudaEvent>),
}

impl Timestamp {
    /// The point after all work given to `cuda` so far. Without a CUDA stream this is the host's clock, because host
    /// work completes at once.
    pub(crate) fn now(cuda: Option<&CudaStream>) -> Result<Timestamp> {
        Ok(match cuda {
            None => Timestamp::Host(Instant::now()),
            Some(cuda) => Timestamp::Cuda(Arc::new(CudaEvent::record(cuda)?)),
        })
    }

    /// True if the device has reached it. Does not block.
    pub(crate) fn is_reached(&self) -> bool {
        match self {
            Timestamp::Host(_) => true,
            Timestamp::Cuda(event) => event.is_reached(),
        }
    }

    /// Time from `earlier` to `self`, zero if `earlier` is later. Blocks until both are reached.
    pub(crate) fn since(&self, earlier: &Timestamp) -> Result<Duration> {
        match (self, earlier) {
            (Timestamp::Host(end), Timestamp::Host(start)) => Ok(end.saturating_duration_since(*start)),
            (Timestamp::Cuda(end), Timestamp::Cuda(start)) => end.since(start),
            _ => {
                Err(Error::Unsupported { op: "since", what: "the events belong to different devices".into() })
            }
        }
    }
}
