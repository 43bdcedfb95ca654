//! The flight recorder: the last operations of a rank, for stall reports.

use crate::op_descriptor::OpDescriptor;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of operations kept.
const CAPACITY: usize = 32;

/// Status of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpStatus {
    /// Waiting for other ranks to make the call.
    Waiting,
    /// All ranks agreed; data is being moved.
    Running,
    /// Complete, or enqueued on the GPU.
    Done,
    /// Ended with an error.
    Failed,
}

/// One operation of one rank.
#[derive(Clone, Debug)]
pub struct OpRecord {
    /// Kind, label, group, sequence number, dtype and shape.
    pub call: String,
    /// Its status.
    pub status: OpStatus,
    /// Time since the status last changed.
    pub age: Duration,
}

impl fmt::Display for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ago = self.age.as_secs_f64();
        match self.status {
            OpStatus::Waiting => write!(f, "has been waiting in {} for {ago:.1} s", self.call),
            OpStatus::Running => write!(f, "has been moving data in {} for {ago:.1} s", self.call),
            OpStatus::Done => write!(f, "completed {} {ago:.1} s ago", self.call),
            OpStatus::Failed => write!(f, "failed in {} {ago:.1} s ago", self.call),
        }
    }
}

/// The last operations of one rank, written by that rank and readable from any thread.
#[derive(Default)]
pub(crate) struct FlightRecorder {
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    /// Number of operations so far.
    next: u64,
    last: VecDeque<(Arc<OpDescriptor>, OpStatus, Instant)>,
}

impl FlightRecorder {
    /// Records a new operation as waiting and returns its number.
    pub(crate) fn begin(&self, descriptor: Arc<OpDescriptor>) -> u64 {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.last.len() == CAPACITY {
            log.last.pop_front();
        }
        log.last.push_back((descriptor, OpStatus::Waiting, Instant::now()));
        log.next += 1;
        log.next - 1
    }

    /// Updates the status of operation `number`.
    pub(crate) fn set(&self, number: u64, status: OpStatus) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let back = log.next.saturating_sub(number) as usize;
        if let Some(entry) = log.last.len().checked_sub(back).and_then(|at| log.last.get_mut(at)) {
            (entry.1, entry.2) = (status, Instant::now());
        }
    }

    /// The last operations, oldest first.
    pub(crate) fn last_ops(&self) -> Vec<OpRecord> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.last
            .iter()
            .map(|(descriptor, status, at)| OpRecord {
                call: descriptor.to_string(),
                status: *status,
                age: at.elapsed(),
            })
            .collect()
    }
}
