//! Ranks as processes under MPI, for tensors on the host. Open MPI is opened at run time.
//!
//! MPI only carries messages here: sums are made by us, in the order of ranks, so that they are the same bits
//! as those of ranks as threads; and whoever waits polls and sleeps, so that it can give up. Every rank sends
//! its notice to every other of the group before data moves: exact, and cheap up to some hundred ranks.

mod engine;
mod library;
mod mail;
mod reduce;
mod transfer;

use crate::circle::Circle;
use crate::engine::{Engine, Failure, Hub, Trouble};
use crate::post::Post;
use crate::process::Process;
use crate::recorder::{Note, Recorder};
use crate::{Result, World};
use engine::MpiEngine;
use library::Mpi;
use mail::{Comm, MpiPost};
use std::sync::Arc;
use std::time::{Duration, Instant};

struct MpiHub {
    mpi: &'static Mpi,
    post: Arc<MpiPost>,
    process: Arc<Process>,
    /// Where tensors travel; groups differ by tag.
    data: Comm,
}

impl World {
    /// The job that `mpirun` (or `srun`) started, over Open MPI; once in a process. Tensors are on the host. A
    /// rank that waits longer than `patience` for another gives up with an error that names it, and the whole
    /// job then ends. Dropping the last handle waits for the other ranks to come to their end too.
    pub fn mpi(patience: Duration) -> Result<World> {
        let (mpi, post) = connect()?;
        let data = Comm(mpi.copy_of_world()?);
        let process = Arc::new(Process::new(post.clone(), patience)?);
        World::start(Arc::new(MpiHub { mpi, post, process, data }), patience)
    }
}

/// Starts MPI and the small messages over it.
pub(crate) fn post() -> Result<Arc<dyn Post>> {
    Ok(connect()?.1)
}

fn connect() -> Result<(&'static Mpi, Arc<MpiPost>)> {
    let mpi = Mpi::open()?;
    mpi.start()?;
    let (rank, size) = mpi.place()?;
    let mail = Comm(mpi.copy_of_world()?);
    Ok((mpi, Arc::new(MpiPost::new(mpi, mail, rank, size))))
}

/// Name and version of the MPI that would be used, or why there is none.
pub fn mpi_version() -> Result<String> {
    Mpi::open().map(Mpi::version)
}

impl Hub for MpiHub {
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
    ) -> Result<Option<Arc<dyn Engine>>, Trouble> {
        let Some(circle) = Circle::new(&self.process, index, name, ranks, deadline)? else { return Ok(None) };
        // Open MPI's tags end at 2^31.
        let tag = i32::try_from(index * 2).map_err(|_| Trouble::Broken { what: "too many groups".into() })?;
        let (mpi, post, comm) = (self.mpi, self.post.clone(), self.data);
        Ok(Some(Arc::new(MpiEngine { mpi, post, comm, circle, tag })))
    }

    fn fail(&self, failure: Failure) {
        self.process.fail(failure);
    }

    fn failure(&self) -> Option<Failure> {
        self.process.told()
    }

    fn recorder(&self) -> &Arc<Recorder> {
        self.process.recorder()
    }

    fn notes(&self, rank: usize) -> Option<Vec<Note>> {
        self.process.notes(rank)
    }
}
