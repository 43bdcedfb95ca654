//! The flight recorder: the last operations of a rank, for stall reports.

use crate::backend::Completion;
use crate::op_descriptor::{Detail, OpDescriptor};
use ferrotron_tensor::Event;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of complete operations kept.
const CAPACITY: usize = 64;
/// Number of operations kept in all: a host seldom runs further ahead of its GPU.
const MAX_OPS: usize = 1 << 14;
/// Number of incomplete operations in a [`Snapshot`].
const MAX_INCOMPLETE: usize = 64;

/// Status of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpStatus {
    /// The host waits for other ranks to make the call, or for the backend to accept it.
    Waiting,
    /// Enqueued on a stream that has not reached it.
    Enqueued,
    /// All ranks agreed and data is being moved, or the stream has reached it.
    Running,
    /// Complete.
    Done,
    /// Ended with an error.
    Failed,
}

impl OpStatus {
    pub(crate) const ALL: [OpStatus; 5] =
        [OpStatus::Waiting, OpStatus::Enqueued, OpStatus::Running, OpStatus::Done, OpStatus::Failed];

    fn is_incomplete(self) -> bool {
        matches!(self, OpStatus::Waiting | OpStatus::Enqueued | OpStatus::Running)
    }
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
            OpStatus::Enqueued => {
                write!(f, "has not reached {} on its GPU, enqueued {ago:.1} s ago", self.call)
            }
            OpStatus::Running => write!(f, "has been moving data in {} for {ago:.1} s", self.call),
            OpStatus::Done => write!(f, "completed {} {ago:.1} s ago", self.call),
            OpStatus::Failed => write!(f, "failed in {} {ago:.1} s ago", self.call),
        }
    }
}

/// A sequence of calls that ranks must make in the same order: the collectives of a group, or the messages from one
/// rank of a group to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Channel {
    /// Number of the group.
    pub(crate) group: u64,
    /// Sender and receiver of messages, ranks of the group; `None` for collectives.
    pub(crate) route: Option<(u64, u64)>,
}

/// Number of the group of all ranks under which replays of CUDA graphs are recorded.
pub(crate) const GRAPHS: u64 = u64::MAX;

impl Channel {
    pub(crate) fn of(group: u64, descriptor: &OpDescriptor) -> Channel {
        let route = match descriptor.detail {
            Detail::Route(from, to) => Some((from, to)),
            _ => None,
        };
        Channel { group, route }
    }
}

/// An operation as seen by [`crate::diagnosis`].
#[derive(Clone, Debug)]
pub(crate) struct OpState {
    pub(crate) channel: Channel,
    pub(crate) descriptor: Arc<OpDescriptor>,
    pub(crate) status: OpStatus,
    /// Time since the status last changed.
    pub(crate) age: Duration,
}

impl OpState {
    pub(crate) fn record(&self) -> OpRecord {
        OpRecord { call: self.descriptor.to_string(), status: self.status, age: self.age }
    }
}

/// What a rank has done: its last operations, oldest first, and the number of calls on every channel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) ops: Vec<OpState>,
    pub(crate) issued: HashMap<Channel, u64>,
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
    last: VecDeque<Entry>,
    issued: HashMap<Channel, u64>,
    /// When an operation last completed.
    progress: Option<Instant>,
}

struct Entry {
    op: OpState,
    /// Time of the last change of status.
    at: Instant,
    /// Events before and after it on its stream.
    events: Option<(Event, Event)>,
}

impl Entry {
    fn set(&mut self, status: OpStatus) {
        (self.op.status, self.at) = (status, Instant::now());
    }

    fn state(&self) -> OpState {
        OpState { age: self.at.elapsed(), ..self.op.clone() }
    }
}

impl FlightRecorder {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a new operation of group `group` as waiting and returns its number.
    pub(crate) fn begin(&self, group: u64, descriptor: Arc<OpDescriptor>) -> u64 {
        let mut log = self.log();
        let complete = log.last.front().is_some_and(|e| !e.op.status.is_incomplete());
        if log.last.len() >= MAX_OPS || log.last.len() >= CAPACITY && complete {
            log.last.pop_front();
        }
        let channel = Channel::of(group, &descriptor);
        *log.issued.entry(channel).or_default() += 1;
        let op = OpState { channel, descriptor, status: OpStatus::Waiting, age: Duration::ZERO };
        log.last.push_back(Entry { op, at: Instant::now(), events: None });
        log.next += 1;
        log.next - 1
    }

    /// Updates the status of operation `number`.
    pub(crate) fn set(&self, number: u64, status: OpStatus) {
        let mut log = self.log();
        if status == OpStatus::Done {
            log.progress = Some(Instant::now());
        }
        if let Some(entry) = log.entry(number) {
            entry.set(status);
            entry.events = None;
        }
    }

    /// The backend has taken operations `numbers` together. [`FlightRecorder::poll`] follows enqueued ones from now on.
    pub(crate) fn complete(&self, numbers: &[u64], completion: Completion) {
        for number in numbers {
            match &completion {
                Completion::Done => self.set(*number, OpStatus::Done),
                Completion::Enqueued { start, done } => {
                    if let Some(entry) = self.log().entry(*number) {
                        entry.set(OpStatus::Enqueued);
                        entry.events = Some((start.clone(), done.clone()));
                    }
                }
            }
        }
    }

    /// Updates the status of enqueued operations by their events.
    pub(crate) fn poll(&self) {
        let mut log = self.log();
        let mut progress = false;
        // Streams complete in order: a few unreached events in a row mean that nothing behind them is complete.
        let mut unreached = 0;
        for entry in log.last.iter_mut().filter(|e| e.events.is_some()) {
            match &entry.events {
                Some((_, done)) if done.is_reached() => {
                    entry.set(OpStatus::Done);
                    entry.events = None;
                    progress = true;
                }
                Some((start, _)) => {
                    unreached += 1;
                    if entry.op.status == OpStatus::Enqueued && start.is_reached() {
                        entry.set(OpStatus::Running);
                    }
                }
                None => {}
            }
            if unreached > 16 {
                break;
            }
        }
        if progress {
            log.progress = Some(Instant::now());
        }
        // What completed late is no longer needed.
        while log.last.len() > CAPACITY && log.last.front().is_some_and(|e| !e.op.status.is_incomplete()) {
            log.last.pop_front();
        }
    }

    /// The oldest incomplete operation, if it has waited longer than `timeout` and nothing else has completed since.
    pub(crate) fn stalled(&self, timeout: Duration) -> Option<OpState> {
        let log = self.log();
        let recent = log.progress.is_some_and(|at| at.elapsed() < timeout);
        let entry = log.last.iter().find(|e| e.op.status.is_incomplete())?;
        (!recent && entry.at.elapsed() >= timeout).then(|| entry.state())
    }

    /// The last operations, oldest first.
    pub(crate) fn last_ops(&self) -> Vec<OpRecord> {
        let ops = self.snapshot().ops;
        ops.iter().map(OpState::record).collect()
    }

    /// The operation that describes best what the rank is doing: the oldest incomplete one, else the last.
    pub(crate) fn current(&self) -> Option<OpRecord> {
        let log = self.log();
        let incomplete = log.last.iter().find(|e| e.op.status.is_incomplete());
        incomplete.or(log.last.back()).map(|e| e.state().record())
    }

    /// Every recent operation and the oldest incomplete ones.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let log = self.log();
        let first = log.last.iter().position(|e| e.op.status.is_incomplete()).unwrap_or(log.last.len());
        let ops = log.last.iter().skip(first.saturating_sub(CAPACITY)).take(CAPACITY + MAX_INCOMPLETE);
        Snapshot { ops: ops.map(Entry::state).collect(), issued: log.issued.clone() }
    }
}

impl Log {
    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let back = self.next.saturating_sub(number) as usize;
        self.last.len().checked_sub(back).and_then(|at| self.last.get_mut(at))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::op_descriptor::OpKind;

    fn call(sequence: u64) -> Arc<OpDescriptor> {
        let mut d = OpDescriptor::new("dp", OpKind::AllReduce, "gradients");
        d.sequence = sequence;
        Arc::new(d)
    }

    #[test]
    fn incomplete_operations_are_kept_and_found() {
        let recorder = FlightRecorder::default();
        let stuck = recorder.begin(3, call(0));
        for i in 1..1000 {
            let number = recorder.begin(3, call(i));
            recorder.set(number, OpStatus::Done);
        }
        assert!(recorder.stalled(Duration::from_secs(60)).is_none());
        let snapshot = recorder.snapshot();
        assert_eq!(snapshot.ops[0].descriptor.sequence, 0);
        assert_eq!(snapshot.issued[&Channel { group: 3, route: None }], 1000);
        assert!(recorder.current().unwrap().call.contains("seq 0"));
        std::thread::sleep(Duration::from_millis(30));
        // It waits, but others completed a moment ago only if the timeout is longer than that moment.
        assert_eq!(recorder.stalled(Duration::from_millis(20)).unwrap().descriptor.sequence, 0);
        recorder.set(stuck, OpStatus::Done);
        assert!(recorder.stalled(Duration::ZERO).is_none());
        recorder.begin(3, call(1000));
        recorder.poll();
        assert!(recorder.snapshot().ops.len() <= CAPACITY + 1);
    }
}
