//! The NCCL backend: ranks are processes with one GPU each. NCCL is opened at run time.
//!
//! NCCL moves the data, enqueued on the caller's stream; the host waits for nobody. Calls are compared by digests, and
//! every operation is watched by its events ([`crate::monitor`]), over MPI or TCP, depending on the launcher. With the
//! race checker on, op descriptors are compared before each call. Sums are NCCL's: the same bits in every run on the same machines, but added in the
//! order of its rings and trees instead of rank order, with bf16 rounded at every step.
//!
//! A group has one communicator. NCCL runs its operations one after another in the order of the calls, whatever their streams,
//! so what must not wait for long operations uses another group. Buffers are not registered (`ncclCommRegister`): for NVLink
//! SHARP that takes memory of `ncclMemAlloc`, which the memory pool is not made of.
//!
//! A send waits on the stream, not on the host, for its receiver: two ranks that send to each other at the same time
//! must do so in one `send_recv`.

mod backend;
mod comm;
mod ffi;
#[cfg(test)]
mod tests;

use crate::backend::{FailureReport, GroupBackend, OpError};
use crate::control::{ControlTransport, Topic};
use crate::flight_recorder::GRAPHS;
use crate::host_cost::LibraryClock;
use crate::launch_env::{LaunchEnv, Launcher};
use crate::membership::Generation;
use crate::process::{AfterFailure, Process};
use crate::process_backend::ProcessBackend;
use crate::process_group::ProcessGroup;
use crate::tcp_control::TcpControl;
use crate::{Error, ReduceKernels, Result, World};
use backend::NcclGroupBackend;
use comm::{NcclComm, ParentComm};
use ferrotron_tensor::{Device, Stream};
use ffi::{Nccl, UniqueId};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Poll interval for asynchronous NCCL errors.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

struct NcclJobBackend {
    nccl: &'static Nccl,
    process: Arc<Process>,
    parent: ParentComm,
    kernels: ReduceKernels,
    /// Selects the device of new groups.
    stream: Stream,
    comms: Arc<PolledComms>,
    /// Time inside NCCL, of all groups.
    clock: Arc<LibraryClock>,
}

/// Communicators polled by the background thread, which ends when nobody else holds this list.
type PolledComms = Mutex<Vec<Weak<NcclComm>>>;

impl World {
    /// The job described by the environment (see [`LaunchEnv::detect`]) over NCCL, one process per GPU; a job of one
    /// if it describes none. `device` is this process's GPU. A rank that waits longer than `timeout` for another
    /// fails with an error that names it, and the whole job ends. `kernels` compute what NCCL cannot: maxima that keep
    /// NaN.
    pub fn nccl(device: &Device, timeout: Duration, kernels: ReduceKernels) -> Result<World> {
        let control = open_control(LaunchEnv::detect()?, timeout)?;
        let process = Arc::new(Process::new(control, timeout, AfterFailure::Exit)?);
        let job_backend = NcclJobBackend::join(device, process, timeout, kernels)?;
        World::start(Arc::new(job_backend), timeout)
    }

    /// [`World::nccl`] for one generation of a job that restarts.
    pub fn nccl_generation(
        device: &Device,
        generation: &Generation,
        timeout: Duration,
        kernels: ReduceKernels,
    ) -> Result<World> {
        let job_backend = NcclJobBackend::join(device, generation.process(timeout)?, timeout, kernels)?;
        World::start(Arc::new(job_backend), timeout)
    }
}

/// Version of the NCCL library that would be used, or why there is none.
pub fn nccl_version() -> Result<String> {
    Nccl::open()?.version().map(ffi::dotted)
}

/// Opens the control transport between the ranks of a job.
fn open_control(job: Option<LaunchEnv>, timeout: Duration) -> Result<Arc<dyn ControlTransport>> {
    match job {
        None => Ok(Arc::new(TcpControl::solo()?)),
        Some(LaunchEnv { launcher: Launcher::OpenMpi, .. }) => crate::mpi::open_control(),
        Some(job) => Ok(Arc::new(TcpControl::connect(&job, timeout)?)),
    }
}

impl NcclJobBackend {
    fn join(
        device: &Device,
        process: Arc<Process>,
        timeout: Duration,
        kernels: ReduceKernels,
    ) -> Result<NcclJobBackend> {
        let nccl = Nccl::open()?;
        let stream = device.stream("nccl")?;
        let deadline = Instant::now() + timeout;
        let parent = create_parent(nccl, &process, &stream, deadline).map_err(|error| {
            let what = match error {
                OpError::Backend { what } => what,
                OpError::Tensor(error) => return Error::Tensor(error),
                OpError::RanksMissing { failure: Some(failure), .. } => {
                    format!("rank {} failed: {}", failure.rank, failure.reason)
                }
                _ => format!("not all ranks connected within {:.1} s", timeout.as_secs_f64()),
            };
            process.fail(FailureReport {
                rank: process.control().rank(),
                stall: false,
                diagnosis: false,
                is_final: false,
                reason: what.clone(),
            });
            Error::Backend { call: "setting up NCCL".into(), what }
        })?;
        let everyone: Vec<usize> = (0..process.control().size()).collect();
        process.shared.groups.lock().unwrap_or_else(PoisonError::into_inner).insert(GRAPHS, everyone);
        process.shared.watches_device.store(true, Ordering::Release);
        let comms = Arc::default();
        poll_errors(&comms, &process)?;
        Ok(NcclJobBackend { nccl, process, parent, kernels, stream, comms, clock: Arc::default() })
    }
}

/// Rank 0 creates the unique id and sends it to all; then all create the communicator.
fn create_parent(
    nccl: &'static Nccl,
    process: &Arc<Process>,
    s: &Stream,
    deadline: Instant,
) -> Result<ParentComm, OpError> {
    let (control, topic) = (process.control(), Topic::bytes(0));
    let id = if control.rank() == 0 {
        let id = nccl.unique_id()?;
        (1..control.size()).try_for_each(|to| control.send(to, topic, id.0.to_vec()))?;
        id
    } else {
        let bytes = process.wait(deadline, || Ok(control.try_receive(0, topic)), || vec![(0, 0)])?;
        let what = || "rank 0 sent an invalid NCCL unique id".to_string();
        UniqueId(bytes.try_into().map_err(|_| OpError::Backend { what: what() })?)
    };
    ParentComm::new(nccl, process, s, id, deadline)
}

/// Starts a thread that turns asynchronous NCCL errors into this rank's failure. When any rank has failed, it aborts
/// the communicators, so that no host waits forever for work on its GPU.
fn poll_errors(comms: &Arc<PolledComms>, process: &Arc<Process>) -> Result<()> {
    let (comms, process) = (Arc::downgrade(comms), Arc::downgrade(process));
    let poll = move || {
        while let (Some(comms), Some(process)) = (comms.upgrade(), process.upgrade()) {
            let mut list = comms.lock().unwrap_or_else(PoisonError::into_inner);
            list.retain(|c| c.strong_count() > 0);
            let live: Vec<Arc<NcclComm>> = list.iter().filter_map(Weak::upgrade).collect();
            drop(list);
            if let Some(reason) = live.iter().find_map(|c| c.background_error()).map(|e| e.to_string()) {
                process.fail(FailureReport {
                    rank: process.control().rank(),
                    stall: false,
                    diagnosis: false,
                    is_final: false,
                    reason,
                });
            }
            if process.failure().is_some() {
                // All at once: an abort waits for the GPU, where another communicator's kernel may still wait for its peers.
                return std::thread::scope(|scope| live.iter().for_each(|c| drop(scope.spawn(|| c.abort()))));
            }
            drop((live, comms, process));
            std::thread::sleep(POLL_INTERVAL);
        }
    };
    let spawned = std::thread::Builder::new().name("nccl errors".into()).spawn(poll);
    spawned.map(drop).map_err(|e| Error::Launch(format!("cannot start the NCCL error thread: {e}")))
}

impl ProcessBackend for NcclJobBackend {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn process(&self) -> &Process {
        &self.process
    }

    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError> {
        let group = ProcessGroup::new(&self.process, index, name, ranks, deadline)?;
        let comm = self.parent.split(&self.stream, group.as_ref().map(|c| c.me), deadline)?;
        let (Some(group), Some(comm)) = (group, comm) else { return Ok(None) };
        self.comms.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&comm));
        let (nccl, kernels, clock) = (self.nccl, self.kernels.clone(), self.clock.clone());
        let checked = self.stream.device().is_race_checked();
        Ok(Some(Arc::new(NcclGroupBackend { nccl, comm, group, kernels, checked, clock })))
    }

    fn only_enqueues(&self) -> bool {
        !self.stream.device().is_race_checked()
    }

    fn library_time(&self) -> Duration {
        self.clock.read()
    }
}
