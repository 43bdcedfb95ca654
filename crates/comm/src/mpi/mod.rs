//! The MPI backend: ranks are processes, tensors are on the host. Open MPI is opened at run time.
//!
//! MPI only transports messages: collectives are those of [`crate::host_group`]. A waiting rank polls and sleeps, so that it can time out. Every rank sends its descriptor to every
//! other rank of the group before data moves, which is exact, and cheap up to some hundreds of ranks.

mod control;
mod ffi;
mod transfer;

use crate::backend::{GroupBackend, OpError};
use crate::control::ControlTransport;
use crate::host_group::HostGroupBackend;
use crate::process::{AfterFailure, Process};
use crate::process_backend::ProcessBackend;
use crate::process_group::ProcessGroup;
use crate::{Result, World};
use control::{Comm, MpiControl};
use ffi::Mpi;
use std::sync::Arc;
use std::time::{Duration, Instant};
use transfer::MpiTransfer;

struct MpiJobBackend {
    mpi: &'static Mpi,
    control: Arc<MpiControl>,
    process: Arc<Process>,
    /// The communicator of tensor data; groups differ by tag.
    data: Comm,
}

impl World {
    /// The job started by `mpirun` or `srun`, over Open MPI; once per process. Tensors are on the host. A rank that
    /// waits longer than `timeout` for another fails with an error that names it, and the whole job ends. Dropping
    /// the last handle waits for the other ranks to finish, too.
    pub fn mpi(timeout: Duration) -> Result<World> {
        let (mpi, control) = connect()?;
        let data = Comm(mpi.dup_world()?);
        let process = Arc::new(Process::new(control.clone(), timeout, AfterFailure::Exit)?);
        World::start(Arc::new(MpiJobBackend { mpi, control, process, data }), timeout)
    }
}

/// Starts MPI and opens its control transport.
pub(crate) fn open_control() -> Result<Arc<dyn ControlTransport>> {
    Ok(connect()?.1)
}

fn connect() -> Result<(&'static Mpi, Arc<MpiControl>)> {
    let mpi = Mpi::open()?;
    mpi.start()?;
    let (rank, size) = mpi.rank_and_size()?;
    let comm = Comm(mpi.dup_world()?);
    Ok((mpi, Arc::new(MpiControl::new(mpi, comm, rank, size))))
}

/// Name and version of the MPI library that would be used, or why there is none.
pub fn mpi_version() -> Result<String> {
    Mpi::open().map(Mpi::version)
}

impl ProcessBackend for MpiJobBackend {
    fn name(&self) -> &'static str {
        "mpi"
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
        let Some(group) = ProcessGroup::new(&self.process, index, name, ranks, deadline)? else {
            return Ok(None);
        };
        // Open MPI's tags end at 2^31.
        let tag =
            i32::try_from(index * 2).map_err(|_| OpError::Backend { what: "too many groups".into() })?;
        let (mpi, control, comm) = (self.mpi, self.control.clone(), self.data);
        Ok(Some(Arc::new(HostGroupBackend::new(MpiTransfer { mpi, control, comm, group, tag }))))
    }
}
