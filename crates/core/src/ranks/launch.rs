//! Ranks as processes, started by a launcher.

use super::as_member;
use crate::grid::{Grid, RankLayout};
use crate::{Error, Result};
use ferrotron_comm::{LaunchEnv, Launcher, World};
use ferrotron_engine::Rank;
use ferrotron_tensor::DeviceKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// This process's membership of a job. The job is joined once, by the first work that needs other ranks, and left on
/// drop; report an error of this rank before that.
#[derive(Debug, Default)]
pub struct Launch {
    joined: Mutex<Option<Joined>>,
    /// Processes beyond the ranks of the job, which replace ranks that fail.
    spares: AtomicUsize,
    /// The rank of this process in a job that restarts, plus 1; 0 until it has one.
    seat: AtomicUsize,
}

#[derive(Debug)]
struct Joined {
    world: World,
    kind: DeviceKind,
}

impl Launch {
    /// This process's rank in a job; `None` if it was started alone or the job has one process. Spares are not counted; the
    /// rank of one is not below the size.
    pub fn job(&self) -> Result<Option<LaunchEnv>> {
        let Some(mut job) = LaunchEnv::detect()?.filter(|job| job.size > 1) else { return Ok(None) };
        let spares = self.spares.load(Ordering::Relaxed);
        if spares >= job.size {
            let what = format!(
                "--spares {spares}: only {} processes were started; start one for each rank too",
                job.size
            );
            return Err(Error::Invalid(what));
        }
        job.size -= spares;
        Ok(Some(job))
    }

    /// True for the process that prints results and writes files: rank 0.
    pub fn leads(&self) -> bool {
        match self.seat.load(Ordering::Relaxed) {
            0 => LaunchEnv::detect().ok().flatten().is_none_or(|job| job.rank == 0),
            seat => seat == 1,
        }
    }

    /// So many of the processes that were started are spares.
    pub fn set_spares(&self, spares: usize) {
        self.spares.store(spares, Ordering::Relaxed);
    }

    /// This process has a rank in a generation of its job.
    pub(super) fn set_rank(&self, rank: usize) {
        self.seat.store(rank + 1, Ordering::Relaxed);
    }

    /// Runs `work` as this process's rank of `job`, on the device of the rank created by `make`. Fails, naming the
    /// nearest valid layout, if the layout does not match the number of processes.
    pub fn run<T>(
        &self,
        job: &LaunchEnv,
        layout: &RankLayout,
        timeout: Duration,
        make: impl FnOnce() -> Result<Rank>,
        work: impl FnOnce(Rank) -> Result<T>,
    ) -> Result<T> {
        let grid = Grid::new(layout.clone(), job.size)?;
        let rank = make()?;
        let world = self.world(job, &rank, timeout)?;
        as_member(&world, &grid, || Ok(rank), work)
    }

    /// The job's world, joined with the device of `rank`.
    pub fn world(&self, job: &LaunchEnv, rank: &Rank, timeout: Duration) -> Result<World> {
        let kind = rank.device().kind();
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(j) = &*joined {
            if j.kind != kind {
                let what = "the processes of a job must all use CPUs or all use GPUs; choose one --device";
                return Err(Error::Invalid(what.into()));
            }
            return Ok(j.world.clone());
        }
        if job.launcher == Launcher::Mpich {
            return Err(Error::Invalid(NO_MPICH.into()));
        }
        let world = match kind {
            DeviceKind::Cpu => on_host(job, timeout)?,
            DeviceKind::Cuda { .. } => {
                World::nccl(rank.device(), timeout, super::reduce_kernels(&rank.kernels))?
            }
        };
        *joined = Some(Joined { world: world.clone(), kind });
        Ok(world)
    }
}

/// Handles of MPICH are integers, those of Open MPI addresses: one binary serves only one of them.
const NO_MPICH: &str = "PMI_RANK is set as by MPICH's mpiexec (or that of Intel MPI), which is not supported; start \
    the processes with Open MPI's mpirun, srun, torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT";

/// Joins over MPI where the launcher provides it, otherwise as one of the processes of this host.
fn on_host(job: &LaunchEnv, timeout: Duration) -> Result<World> {
    let by_mpi = match job.launcher {
        Launcher::OpenMpi => true,
        // Clusters set PMI for every step, also where no MPI is installed.
        Launcher::SlurmMpi => ferrotron_comm::mpi_version().is_ok() || !job.one_host,
        _ => false,
    };
    if !by_mpi {
        return Ok(World::one_host(job, timeout)?);
    }
    let world = World::mpi(timeout)?;
    if (world.rank(), world.size()) == (job.rank, job.size) {
        return Ok(world);
    }
    Err(Error::Invalid(format!(
        "{} says rank {} of {}, MPI says rank {} of {}; on the CPU start the processes with mpirun (or srun --mpi)",
        job.launcher.name(),
        job.rank,
        job.size,
        world.rank(),
        world.size()
    )))
}
