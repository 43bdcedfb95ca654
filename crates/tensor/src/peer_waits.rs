//! Time that a stream spends waiting for other ranks, measured by events and without synchronizing.
//!
//! Device work of a rank is either its own or communication. A collective ends when the slowest rank has joined it, so its
//! time says nothing about this rank; what is left of a step without it does. Two kinds of spans are communication on a
//! metered stream: a collective enqueued on the stream itself, and the idle time before an event of a stream that carries
//! collectives.

use crate::{Event, Result};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The meter of one stream; off by default.
#[derive(Default)]
pub(crate) struct PeerWaits {
    /// Collectives run on the stream: who waits for its events may wait for other ranks.
    carries_collectives: AtomicBool,
    metered: AtomicBool,
    waits: Mutex<Vec<PeerWait>>,
}

/// A span of a stream's time in communication.
#[derive(Clone)]
pub struct PeerWait {
    begin: Event,
    end: Event,
}

impl PeerWait {
    pub(crate) fn new(begin: Event, end: Event) -> PeerWait {
        PeerWait { begin, end }
    }

    /// Its length: zero if the stream got there after the communication had ended. Blocks until that is known.
    pub fn duration(&self) -> Result<Duration> {
        self.end.since(&self.begin)
    }
}

impl PeerWaits {
    pub(crate) fn carries_collectives(&self) -> bool {
        self.carries_collectives.load(Relaxed)
    }

    pub(crate) fn set_carries_collectives(&self) {
        self.carries_collectives.store(true, Relaxed);
    }

    pub(crate) fn is_metered(&self) -> bool {
        self.metered.load(Relaxed)
    }

    pub(crate) fn set_metered(&self, on: bool) {
        self.metered.store(on, Relaxed);
    }

    pub(crate) fn add(&self, wait: PeerWait) {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner).push(wait);
    }

    pub(crate) fn take(&self) -> Vec<PeerWait> {
        std::mem::take(&mut self.waits.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
