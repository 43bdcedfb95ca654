//! Ranks as processes under MPI, for tensors on the host. Open MPI is opened at run time.
//!
//! MPI only carries messages here: sums are made by us, in the order of ranks, so that they are the same bits
//! as those of ranks as threads; and whoever waits polls and sleeps, so that it can give up. Every rank sends
//! its notice to every other of the group before data moves: exact, and cheap up to some hundred ranks.

mod backend;
mod control;
mod ffi;
mod reduce;
mod transfer;

use crate::backend::{FailureReport, GroupBackend, JobBackend, OpError};
use crate::control::ControlTransport;
use crate::flight_recorder::{FlightRecorder, OpRecord};
use crate::process::Process;
use crate::process_group::ProcessGroup;
use crate::{Result, World};
use backend::MpiGroupBackend;
use control::{Comm, MpiControl};
use ffi::Mpi;
use std::sync::Arc;
use std::time::{Duration, Instant};

struct MpiJobBackend {
    mpi: &'static Mpi,
    post: Arc<MpiControl>,
    process: Arc<Process>,
    /// Where tensors travel; groups differ by tag.
    data: Comm,
}

impl World {
    /// The job that `mpirun` (or `srun`) started, over Open MPI; once in a process. Tensors are on the host. A
    /// rank that waits longer than `patience` for another gives up with an error that names it, and the whole
    /// job then ends. Dropping the last handle waits for the other ranks to come to their end too.
    pub fn mpi(timeout: Duration) -> Result<World> {
        let (mpi, post) = connect()?;
        let data = Comm(mpi.copy_of_world()?);
        let process = Arc::new(Process::new(post.clone(), timeout)?);
        World::start(Arc::new(MpiJobBackend { mpi, post, process, data }), timeout)
    }
}

/// Starts MPI and the small messages over it.
pub(crate) fn post() -> Result<Arc<dyn ControlTransport>> {
    Ok(connect()?.1)
}

fn connect() -> Result<(&'static Mpi, Arc<MpiControl>)> {
    let mpi = Mpi::open()?;
    mpi.start()?;
    let (rank, size) = mpi.place()?;
    let mail = Comm(mpi.copy_of_world()?);
    Ok((mpi, Arc::new(MpiControl::new(mpi, mail, rank, size))))
}

/// Name and version of the MPI that would be used, or why there is none.
pub fn mpi_version() -> Result<String> {
    Mpi::open().map(Mpi::version)
}

impl JobBackend for MpiJobBackend {
    fn rank(&self) -> usize {
        self.post.rank()
    }

    fn size(&self) -> usize {
        self.post.size()
    }

    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn GroupBackend>>, OpError> {
        let Some(group) = ProcessGroup::new(&self.process, index, name, ranks, deadline)? else {
            return Ok(None);
        };
        // Open MPI's tags end at 2^31.
        let tag =
            i32::try_from(index * 2).map_err(|_| OpError::Backend { what: "too many groups".into() })?;
        let (mpi, post, comm) = (self.mpi, self.post.clone(), self.data);
        Ok(Some(Arc::new(MpiGroupBackend { mpi, post, comm, group, tag })))
    }

    fn fail(&self, failure: FailureReport) {
        self.process.fail(failure);
    }

    fn failure(&self) -> Option<FailureReport> {
        self.process.failure()
    }

    fn recorder(&self) -> &Arc<FlightRecorder> {
        self.process.recorder()
    }

    fn notes(&self, rank: usize) -> Option<Vec<OpRecord>> {
        self.process.notes(rank)
    }
}
