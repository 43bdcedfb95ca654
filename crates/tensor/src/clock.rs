//! Points in time on a device's own clock.

use crate::cuda::{Moment, Queue};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A point in a stream's work: the host's clock, or an event of the card that may lie ahead.
#[derive(Clone)]
pub(crate) enum At {
    Host(Instant),
    Card(Arc<Moment>),
}

impl At {
    /// After everything given to the queue so far; without one it is the host, where all of that is done.
    pub(crate) fn now(queue: Option<&Queue>) -> Result<At> {
        Ok(match queue {
            None => At::Host(Instant::now()),
            Some(queue) => At::Card(Arc::new(Moment::record(queue)?)),
        })
    }

    /// Time from `earlier` to this; nothing if that comes later. Waits until both are reached.
    pub(crate) fn since(&self, earlier: &At) -> Result<Duration> {
        match (self, earlier) {
            (At::Host(end), At::Host(start)) => Ok(end.saturating_duration_since(*start)),
            (At::Card(end), At::Card(start)) => end.since(start),
            _ => Err(Error::Unsupported { op: "since", what: "the events are of two devices".into() }),
        }
    }
}
