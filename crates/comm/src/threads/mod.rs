//! The thread backend: ranks are threads of one process. They rendezvous in shared memory, block without spinning,
//! and never wait inside the thread pool.
//!
//! What a rank sends is copied into a staged buffer, which is never written again. The other ranks read it from their
//! own streams, after its event. When the last reader drops it, its memory returns to the owner's staging stream,
//! which first waits for the events of all readers. So most operations need a single rendezvous, a sender never waits
//! for its receivers, host and GPU tensors take the same path, and the race checker sees every step.

mod backend;
pub(crate) mod reduce;
mod staging;
mod thread_group;

use crate::backend::{FailureReport, GroupBackend, JobBackend, OpError};
use crate::flight_recorder::{FlightRecorder, OpRecord};
use backend::ThreadGroupBackend;
use staging::Staging;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;
use thread_group::ThreadGroup;

pub use reduce::{ReduceKernel, ReduceKernels};

/// State shared by all ranks.
pub(crate) struct SharedJob {
    slots: Vec<RankSlot>,
    groups: Mutex<Vec<GroupEntry>>,
    failed: OnceLock<FailureReport>,
    kernels: ReduceKernels,
}

struct RankSlot {
    state: AtomicU8,
    recorder: Arc<FlightRecorder>,
}

/// States of a rank slot.
const TAKEN: u8 = 0;
const LEFT: u8 = 1;
const PANICKED: u8 = 2;

/// A group that some rank has created.
struct GroupEntry {
    index: u64,
    by: usize,
    name: &'static str,
    group: Arc<ThreadGroup>,
}

impl SharedJob {
    /// Whether a rank has exited: `Some(true)` by a panic, `Some(false)` normally.
    pub(crate) fn ended(&self, rank: usize) -> Option<bool> {
        match self.slots.get(rank).map(|s| s.state.load(Ordering::SeqCst)) {
            Some(LEFT) => Some(false),
            Some(PANICKED) => Some(true),
            _ => None,
        }
    }

    /// The first failure reported.
    pub(crate) fn failed(&self) -> Option<&FailureReport> {
        self.failed.get()
    }

    fn groups(&self) -> std::sync::MutexGuard<'_, Vec<GroupEntry>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all waiting ranks, so that they check for failures.
    fn wake(&self) {
        let groups: Vec<Arc<ThreadGroup>> = self.groups().iter().map(|g| g.group.clone()).collect();
        groups.iter().for_each(|m| m.wake());
    }
}

/// One rank's handle. Dropped when the rank exits, in whatever way.
struct ThreadJobBackend {
    job: Arc<SharedJob>,
    rank: usize,
    staging: Arc<Staging>,
}

/// A rank's backends: of the job, and of the group of all ranks.
type RankBackends = (Arc<dyn JobBackend>, Option<Arc<dyn GroupBackend>>);

/// Creates the backends of all ranks; there is no group backend for a single rank.
pub(crate) fn backends(size: usize, kernels: ReduceKernels) -> Vec<RankBackends> {
    let slot = || RankSlot { state: AtomicU8::new(TAKEN), recorder: Arc::default() };
    let all = Arc::new(ThreadGroup::new((0..size).collect()));
    let job = Arc::new(SharedJob {
        slots: (0..size).map(|_| slot()).collect(),
        groups: Mutex::new(vec![GroupEntry { index: 0, by: 0, name: "world", group: all.clone() }]),
        failed: OnceLock::new(),
        kernels,
    });
    let end = |rank: usize| {
        let job_backend = ThreadJobBackend { job: job.clone(), rank, staging: Arc::default() };
        let group_backend = (size > 1).then(|| job_backend.group_backend(&all, rank));
        (Arc::new(job_backend) as Arc<dyn JobBackend>, group_backend)
    };
    (0..size).map(end).collect()
}

impl ThreadJobBackend {
    fn group_backend(&self, group: &Arc<ThreadGroup>, rank: usize) -> Arc<dyn GroupBackend> {
        Arc::new(ThreadGroupBackend::new(self.job.clone(), group.clone(), rank, self.staging.clone()))
    }
}

impl JobBackend for ThreadJobBackend {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.job.slots.len()
    }

    /// Does not wait: the first rank creates the group, the others find it.
    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        _deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError> {
        if let Some(failure) = self.job.failed() {
            let failure = Some(failure.clone());
            return Err(OpError::RanksMissing { missing: vec![], ended: vec![], failure });
        }
        let mut groups = self.job.groups();
        let group = match groups.iter().find(|g| g.index == index) {
            Some(entry) if entry.name != name || entry.group.ranks() != ranks => {
                let (by, theirs) = (entry.by, entry.group.ranks());
                return Err(OpError::Backend {
                    what: format!(
                        "rank {} creates group {index} as {name} of {ranks:?}, rank {by} as {} of {theirs:?}; \
                         all ranks must create the same groups in the same order",
                        self.rank, entry.name
                    ),
                });
            }
            Some(entry) => entry.group.clone(),
            None => {
                let group = Arc::new(ThreadGroup::new(ranks.to_vec()));
                groups.push(GroupEntry { index, by: self.rank, name, group: group.clone() });
                group
            }
        };
        Ok(ranks.iter().position(|r| *r == self.rank).map(|rank| self.group_backend(&group, rank)))
    }

    fn fail(&self, failure: FailureReport) {
        if self.job.failed.set(failure).is_ok() {
            self.job.wake();
        }
    }

    fn failure(&self) -> Option<FailureReport> {
        self.job.failed().cloned()
    }

    fn flight_recorder(&self) -> &Arc<FlightRecorder> {
        &self.job.slots[self.rank].recorder
    }

    fn last_ops(&self, rank: usize) -> Option<Vec<OpRecord>> {
        self.job.slots.get(rank).map(|s| s.recorder.last_ops())
    }
}

impl Drop for ThreadJobBackend {
    fn drop(&mut self) {
        let state = if std::thread::panicking() { PANICKED } else { LEFT };
        self.job.slots[self.rank].state.store(state, Ordering::SeqCst);
        self.job.wake();
    }
}
