//! The ranks of the job, and the groups created from them.

use crate::backend::{Completion, FailureReport, GroupBackend, JobBackend};
use crate::communicator::{Communicator, CommunicatorInner};
use crate::flight_recorder::GRAPHS;
use crate::host_cost::InsideClock;
use crate::op_descriptor::{OpDescriptor, OpKind};
use crate::payloads::CallHooks;
use crate::threads::{self, ReduceKernels};
use crate::timeout::Timeout;
use crate::volume::VolumeMeter;
use crate::{Error, HostCost, OpRecord, Result, Volume, watchdog};
use ferrotron_tensor::Stream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One rank's membership of the job. Clones share it. Once all clones and all [`Communicator`]s created from them are
/// dropped, the rank has exited, and ranks that wait for it fail.
#[derive(Clone)]
pub struct World {
    job: Job,
    all: Communicator,
    /// Number of groups created so far. Held while one is created.
    groups: Arc<Mutex<u64>>,
}

/// What all groups of one rank share.
#[derive(Clone)]
struct Job {
    backend: Arc<dyn JobBackend>,
    timeout: Timeout,
    meter: Arc<VolumeMeter>,
    /// Number of CUDA graphs launched.
    replays: Arc<AtomicU64>,
    hooks: Arc<CallHooks>,
    /// Time of this rank's host inside calls on groups.
    inside: Arc<InsideClock>,
}

impl World {
    /// A job of one rank.
    pub fn solo() -> World {
        let job_backend = threads::backends(1, ReduceKernels::default()).swap_remove(0);
        World::assemble(job_backend.0, job_backend.1, Duration::ZERO)
    }

    /// A job of `size` ranks as threads of this process, one [`World`] per rank. A rank that waits longer than
    /// `timeout` for another fails with an error that names it. Tensors are on the host.
    pub fn threads(size: usize, timeout: Duration) -> Vec<World> {
        World::threads_with_kernels(size, timeout, ReduceKernels::default())
    }

    /// [`World::threads`] with GPU kernels for reductions; all ranks then share one GPU `Device`.
    pub fn threads_with_kernels(size: usize, timeout: Duration, kernels: ReduceKernels) -> Vec<World> {
        let backends = threads::backends(size.max(1), kernels);
        backends
            .into_iter()
            .map(|(job_backend, backend)| World::assemble(job_backend, backend, timeout))
            .collect()
    }

    /// A job over a given backend: creates the group of all ranks.
    pub(crate) fn start(job_backend: Arc<dyn JobBackend>, timeout: Duration) -> Result<World> {
        let ranks: Vec<usize> = (0..job_backend.size()).collect();
        let backend = match ranks.len() {
            1 => None,
            _ => create_group(&*job_backend, 0, "world", &ranks, timeout)?,
        };
        Ok(World::assemble(job_backend, backend, timeout))
    }

    pub(crate) fn assemble(
        job_backend: Arc<dyn JobBackend>,
        backend: Option<Arc<dyn GroupBackend>>,
        timeout: Duration,
    ) -> World {
        let (rank, size) = (job_backend.rank(), job_backend.size());
        let job = Job {
            backend: job_backend,
            timeout: Timeout::new(timeout),
            meter: Arc::default(),
            replays: Arc::default(),
            hooks: Arc::default(),
            inside: Arc::default(),
        };
        let all = job.member((0, "world"), (0..size).collect(), rank, backend);
        World { job, all, groups: Arc::new(Mutex::new(1)) }
    }

    pub(crate) fn hooks(&self) -> &CallHooks {
        &self.job.hooks
    }

    /// How long this rank waits for others from now on, at most what the job was started with; `None` is that.
    pub fn set_timeout(&self, timeout: Option<Duration>) {
        let timeout = timeout.unwrap_or(Duration::MAX);
        self.job.timeout.set(timeout);
        self.job.backend.set_timeout(timeout);
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.job.backend.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.job.backend.size()
    }

    /// What moves data between ranks: `threads`, `shared memory`, `mpi` or `nccl`.
    pub fn engine(&self) -> &'static str {
        self.job.backend.name()
    }

    /// The group of all ranks.
    pub fn all(&self) -> Communicator {
        self.all.clone()
    }

    /// Creates the group of `ranks`, in that order; `None` if this rank is not a member. Every rank of the job must
    /// call it with the same lists in the same order.
    pub fn group(&self, name: &'static str, ranks: &[usize]) -> Result<Option<Communicator>> {
        let refuse = |what: String| {
            let error = Error::Group { name: name.to_string(), ranks: ranks.to_vec(), what };
            watchdog::report(&*self.job.backend, &error);
            Err(error)
        };
        if let Some(r) = ranks.iter().find(|r| **r >= self.size()) {
            return refuse(format!("rank {r} does not exist in a job of {}", self.size()));
        }
        if let Some(r) = ranks.iter().enumerate().find_map(|(i, r)| ranks[..i].contains(r).then_some(r)) {
            return refuse(format!("rank {r} is listed twice; list each rank once"));
        }
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let index = *groups;
        *groups += 1;
        let backend = match ranks.len() {
            0 | 1 => None,
            _ => create_group(&*self.job.backend, index, name, ranks, self.job.timeout.get())?,
        };
        let Some(rank) = ranks.iter().position(|r| *r == self.rank()) else { return Ok(None) };
        tracing::debug!(name, ?ranks, "process group");
        Ok(Some(self.job.member((index, name), ranks.to_vec(), rank, backend)))
    }

    /// Reports that this rank has failed for a reason of its own: calls of the other ranks fail with that reason. `is_final`:
    /// the job cannot go on with another process in its place either.
    pub fn abort(&self, reason: &str, is_final: bool) {
        if self.size() > 1 {
            self.job.backend.fail(FailureReport {
                rank: self.rank(),
                stall: false,
                diagnosis: false,
                is_final,
                reason: reason.to_string(),
            });
        }
    }

    /// Fails if a rank of the job has failed. After a failure, work on a GPU ends without a result: call it after
    /// waiting for a stream, before using what was computed.
    pub fn check(&self) -> Result<()> {
        match self.job.backend.failure() {
            None => Ok(()),
            Some(FailureReport { rank: by, reason, .. }) => {
                Err(Error::Abandoned { rank: self.rank(), call: "the step".into(), by, reason })
            }
        }
    }

    /// Whether ranks have lost each other, and a process in place of the one that failed may do better. Not if this rank has
    /// failed for a reason of its own.
    pub fn may_restart(&self) -> bool {
        let between_ranks = |f: &FailureReport| f.rank != self.rank() || f.stall || f.diagnosis;
        self.job.backend.failure().is_some_and(|f| !f.is_final && between_ranks(&f))
    }

    /// True if collectives are enqueued on a stream without waiting for other hosts, so that a CUDA graph can hold them.
    pub fn only_enqueues(&self) -> bool {
        self.job.backend.only_enqueues()
    }

    /// Launches a CUDA graph that holds collectives, so that a stall in it is noticed as in any collective. All ranks
    /// replay the same step at the same time.
    pub fn replay(&self, s: &Stream, launch: impl FnOnce() -> ferrotron_tensor::Result<()>) -> Result<()> {
        if self.size() == 1 {
            return Ok(launch()?);
        }
        self.check()?;
        let mut descriptor = OpDescriptor::new("world", OpKind::Graph, "captured step");
        descriptor.sequence = self.job.replays.fetch_add(1, Ordering::Relaxed);
        let recorder = self.job.backend.flight_recorder();
        let number = recorder.begin(GRAPHS, Arc::new(descriptor));
        let start = s.record()?;
        launch()?;
        recorder.complete(&[number], Completion::Enqueued { start, done: s.record()? });
        Ok(())
    }

    /// Number of calls and bytes sent by this rank on all groups.
    pub fn volume(&self) -> Volume {
        self.job.meter.read()
    }

    /// What communication has cost this rank's host so far.
    pub fn host_cost(&self) -> HostCost {
        let (inside, delayed) = self.job.inside.read();
        HostCost { inside, delayed, ..self.job.backend.host_cost() }
    }

    /// From now on meters how long the calling thread, which makes this rank's calls, waits for a core. Where more ranks than
    /// cores compute, that is noise in their times and none of their work.
    pub fn meter_run_delay(&self) {
        self.job.inside.meter_run_delay();
    }

    /// The flight recorder: the last operations of every rank, oldest first, as far as known to this rank.
    pub fn flight_recorder(&self) -> Vec<Option<Vec<OpRecord>>> {
        (0..self.size()).map(|r| self.job.backend.last_ops(r)).collect()
    }
}

fn create_group(
    job_backend: &dyn JobBackend,
    index: u64,
    name: &'static str,
    ranks: &[usize],
    timeout: Duration,
) -> Result<Option<Arc<dyn GroupBackend>>> {
    let start = Instant::now();
    job_backend.group(index, name, ranks, watchdog::deadline(timeout)).map_err(|error| {
        let mut call = OpDescriptor::new(name, OpKind::Barrier, "new group");
        call.sequence = index;
        let everyone: Vec<usize> = (0..job_backend.size()).collect();
        watchdog::fail_op(job_backend, &everyone, &call, start.elapsed(), error)
    })
}

impl Job {
    /// This rank's membership of a group: rank `rank` of `ranks`.
    fn member(
        &self,
        (index, name): (u64, &'static str),
        ranks: Vec<usize>,
        rank: usize,
        backend: Option<Arc<dyn GroupBackend>>,
    ) -> Communicator {
        let core = CommunicatorInner {
            name,
            index,
            rank,
            ranks,
            backend,
            job_backend: self.backend.clone(),
            timeout: self.timeout.clone(),
            counters: Mutex::default(),
            meter: VolumeMeter::default(),
            world_meter: self.meter.clone(),
            hooks: self.hooks.clone(),
            inside: self.inside.clone(),
        };
        Communicator { core: Arc::new(core) }
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "World(rank {} of {})", self.rank(), self.size())
    }
}
