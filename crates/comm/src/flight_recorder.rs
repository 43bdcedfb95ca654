//! The flight recorder: the last operations of a rank, for the report of a stall.

use crate::op_descriptor::OpDescriptor;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Operations kept of a rank.
const KEPT: usize = 32;

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpStatus {
    /// Waits for other ranks.
    Waiting,
    /// All came and agreed; data moves.
    Running,
    /// Done, or queued on the card.
    Done,
    /// Ended with an error.
    Failed,
}

/// One operation of one rank.
#[derive(Clone, Debug)]
pub struct OpRecord {
    /// OpKind, label, group, sequence number, type and shape.
    pub call: String,
    /// How far it is.
    pub progress: OpStatus,
    /// Time since it was last heard of.
    pub age: Duration,
}

impl fmt::Display for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ago = self.age.as_secs_f64();
        match self.progress {
            OpStatus::Waiting => write!(f, "waits in {} for {ago:.1} s", self.call),
            OpStatus::Running => write!(f, "moves data in {} for {ago:.1} s", self.call),
            OpStatus::Done => write!(f, "did {} {ago:.1} s ago", self.call),
            OpStatus::Failed => write!(f, "failed in {} {ago:.1} s ago", self.call),
        }
    }
}

/// The last operations of one rank, written by it and read by whoever wants to know.
#[derive(Default)]
pub(crate) struct FlightRecorder {
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    /// Operations so far.
    next: u64,
    last: VecDeque<(Arc<OpDescriptor>, OpStatus, Instant)>,
}

impl FlightRecorder {
    /// A new operation begins to wait; its number.
    pub(crate) fn begin(&self, descriptor: Arc<OpDescriptor>) -> u64 {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.last.len() == KEPT {
            log.last.pop_front();
        }
        log.last.push_back((descriptor, OpStatus::Waiting, Instant::now()));
        log.next += 1;
        log.next - 1
    }

    /// Operation `number` went on.
    pub(crate) fn set(&self, number: u64, progress: OpStatus) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let back = log.next.saturating_sub(number) as usize;
        if let Some(entry) = log.last.len().checked_sub(back).and_then(|at| log.last.get_mut(at)) {
            (entry.1, entry.2) = (progress, Instant::now());
        }
    }

    /// The last operations, oldest first.
    pub(crate) fn notes(&self) -> Vec<OpRecord> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.last
            .iter()
            .map(|(descriptor, progress, at)| OpRecord {
                call: descriptor.to_string(),
                progress: *progress,
                age: at.elapsed(),
            })
            .collect()
    }
}
