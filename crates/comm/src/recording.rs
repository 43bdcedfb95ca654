//! Recording every communication call of a rank: of one that runs, or of one whose peers do not exist.
//!
//! A simulated rank has the groups of a whole job and makes its calls alone: each is recorded and returns at once, and what
//! it would receive stays as it is. On a [meta device](ferrotron_tensor::Device::meta) a program runs so at any size of
//! job, one rank after another.

use crate::World;
use crate::backend::{
    Collective, Completion, Descriptors, FailureReport, GroupBackend, JobBackend, OpError, P2pOp,
};
use crate::flight_recorder::{FlightRecorder, OpRecord};
use crate::op_descriptor::OpDescriptor;
use crate::threads::{self, ReduceKernels};
use ferrotron_tensor::Stream;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A group that a rank has created, whether it is a member or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedGroup {
    /// Its number; 0 is the world.
    pub index: u64,
    /// Its name.
    pub name: &'static str,
    /// Its members in order, as ranks of the job.
    pub ranks: Vec<usize>,
}

/// A call on group `group`. A batch of messages is recorded as the sends of each of its groups, then the receives of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordedCall {
    /// A collective.
    Collective {
        /// Number of the group.
        group: u64,
        /// The call.
        call: OpDescriptor,
    },
    /// Messages to other ranks of the group.
    Sends {
        /// Number of the group.
        group: u64,
        /// The messages.
        calls: Vec<OpDescriptor>,
    },
    /// Messages from other ranks of the group, and the end of the sends before.
    Receives {
        /// Number of the group.
        group: u64,
        /// The messages.
        calls: Vec<OpDescriptor>,
    },
}

/// What a rank has called so far. Clones share it.
#[derive(Clone, Default)]
pub struct CallLog {
    state: Arc<Mutex<Recorded>>,
}

#[derive(Default)]
struct Recorded {
    groups: Vec<RecordedGroup>,
    calls: Vec<RecordedCall>,
}

impl CallLog {
    /// The groups created so far.
    pub fn groups(&self) -> Vec<RecordedGroup> {
        self.lock().groups.clone()
    }

    /// Takes the calls made since the last time, in program order.
    pub fn take(&self) -> Vec<RecordedCall> {
        std::mem::take(&mut self.lock().calls)
    }

    fn add(&self, call: RecordedCall) {
        self.lock().calls.push(call);
    }

    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World {
    /// Rank `rank` of a job of `size` whose other ranks do not exist, and the log of its calls.
    pub fn simulated(rank: usize, size: usize) -> (World, CallLog) {
        World::recorded((rank, size), None, Duration::MAX)
    }

    /// [`World::threads`] with a log of every rank's calls.
    pub fn recorded_threads(size: usize, timeout: Duration) -> Vec<(World, CallLog)> {
        let all = threads::backends(size.max(1), ReduceKernels::default());
        let recorded = |(rank, backend)| World::recorded((rank, size.max(1)), Some(backend), timeout);
        all.into_iter().enumerate().map(recorded).collect()
    }

    fn recorded(
        (rank, size): (usize, usize),
        inner: Option<Backends>,
        timeout: Duration,
    ) -> (World, CallLog) {
        let log = CallLog::default();
        let (job, all) = inner.map_or((None, None), |(job, all)| (Some(job), all));
        log.lock().groups.push(RecordedGroup { index: 0, name: "world", ranks: (0..size).collect() });
        let group = RecordedBackend { inner: all, index: 0, size, log: log.clone() };
        let group = (size > 1).then(|| Arc::new(group) as Arc<dyn GroupBackend>);
        let (flight_recorder, failed) = Default::default();
        let job = RecordedJob { inner: job, rank, size, log: log.clone(), flight_recorder, failed };
        (World::assemble(Arc::new(job), group, timeout), log)
    }
}

type Backends = (Arc<dyn JobBackend>, Option<Arc<dyn GroupBackend>>);

/// The job of a recorded rank: another backend's, or none.
struct RecordedJob {
    inner: Option<Arc<dyn JobBackend>>,
    rank: usize,
    size: usize,
    log: CallLog,
    flight_recorder: Arc<FlightRecorder>,
    failed: OnceLock<FailureReport>,
}

impl JobBackend for RecordedJob {
    fn name(&self) -> &'static str {
        self.inner.as_ref().map_or("simulated", |job| job.name())
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn set_timeout(&self, timeout: Duration) {
        self.inner.iter().for_each(|job| job.set_timeout(timeout));
    }

    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError> {
        self.log.lock().groups.push(RecordedGroup { index, name, ranks: ranks.to_vec() });
        let inner = match &self.inner {
            Some(job) => job.group(index, name, ranks, deadline)?,
            None => None,
        };
        let (size, log) = (ranks.len(), self.log.clone());
        let is_member = ranks.contains(&self.rank);
        Ok(is_member.then(|| Arc::new(RecordedBackend { inner, index, size, log }) as Arc<dyn GroupBackend>))
    }

    fn fail(&self, failure: FailureReport) {
        match &self.inner {
            Some(job) => job.fail(failure),
            None => _ = self.failed.set(failure),
        }
    }

    fn failure(&self) -> Option<FailureReport> {
        self.inner.as_ref().map_or_else(|| self.failed.get().cloned(), |job| job.failure())
    }

    fn flight_recorder(&self) -> &Arc<FlightRecorder> {
        self.inner.as_ref().map_or(&self.flight_recorder, |job| job.flight_recorder())
    }

    fn last_ops(&self, rank: usize) -> Option<Vec<OpRecord>> {
        self.inner.as_ref().and_then(|job| job.last_ops(rank))
    }
}

/// A group of a recorded rank: another backend's, or none.
struct RecordedBackend {
    inner: Option<Arc<dyn GroupBackend>>,
    index: u64,
    size: usize,
    log: CallLog,
}

impl GroupBackend for RecordedBackend {
    fn exchange_descriptors(
        &self,
        s: Option<&Stream>,
        descriptor: &OpDescriptor,
        collective: &Collective,
        deadline: Instant,
    ) -> Result<Descriptors, OpError> {
        self.log.add(RecordedCall::Collective { group: self.index, call: descriptor.clone() });
        match &self.inner {
            Some(group) => group.exchange_descriptors(s, descriptor, collective, deadline),
            None => Ok(Descriptors::Deferred),
        }
    }

    fn run(&self, s: &Stream, collective: &Collective, deadline: Instant) -> Result<Completion, OpError> {
        self.inner.as_ref().map_or(Ok(Completion::Done), |group| group.run(s, collective, deadline))
    }

    fn post_sends(&self, s: &Stream, sends: &[P2pOp], deadline: Instant) -> Result<(), OpError> {
        let calls = sends.iter().map(|op| op.descriptor.clone()).collect();
        self.log.add(RecordedCall::Sends { group: self.index, calls });
        self.inner.as_ref().map_or(Ok(()), |group| group.post_sends(s, sends, deadline))
    }

    fn complete_receives(
        &self,
        s: &Stream,
        sends: &[P2pOp],
        receives: &[P2pOp],
        deadline: Instant,
    ) -> Result<Completion, OpError> {
        let calls = receives.iter().map(|op| op.descriptor.clone()).collect();
        self.log.add(RecordedCall::Receives { group: self.index, calls });
        let inner = self.inner.as_ref();
        inner.map_or(Ok(Completion::Done), |group| group.complete_receives(s, sends, receives, deadline))
    }

    /// Every rank has what this one has.
    fn all_gather_bytes(&self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, OpError> {
        match &self.inner {
            Some(group) => group.all_gather_bytes(mine, deadline),
            None => Ok(vec![mine.to_vec(); self.size]),
        }
    }
}
