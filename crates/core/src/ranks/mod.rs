//! Running the ranks of a layout: as threads of this process, or as one process of a launched job.

mod generations;
mod launch;

pub use ferrotron_comm::{LaunchEnv, Launcher, ReduceKernels};
pub use generations::{Faults, GenerationStart, StepCount};
pub use launch::Launch;

use crate::grid::{Grid, RankLayout};
use crate::model::description::Group;
use crate::{Error, Result};
use ferrotron_comm::{Communicator, World};
use ferrotron_engine::Rank;
use ferrotron_kernels::{Kernels, NewChoices};
use std::sync::Arc;
use std::time::Duration;

/// Default time a rank waits for another before the run fails with an error that names it.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// Creates a rank's process groups. Every rank of the world calls it.
pub fn join(rank: Rank, world: &World, grid: &Grid) -> Result<Rank> {
    // Algorithms round differently: ranks never choose on their own. Before the first group, so that no rank has begun.
    if world.size() > 1 {
        rank.kernels.use_gemm_choices(&[], NewChoices::Proposed);
    }
    // Creating a group is collective: every rank creates every group in the same order, whether it is a member or
    // not.
    let mine = |group: Group| -> Result<Communicator> {
        let mut found = Communicator::solo();
        for ranks in grid.groups(group.axes())? {
            if let Some(own) = world.group(group.name(), &ranks)? {
                found = own;
            }
        }
        Ok(found)
    };
    let dp = mine(Group::Dp)?;
    let dp_cp_group = mine(Group::DpCp)?;
    let cp = mine(Group::Cp)?;
    let tp = mine(Group::Tp)?;
    // Reuses an existing group that has the same members on every rank.
    let or = |group: Group| -> Result<Communicator> {
        let members = grid.groups(group.axes())?;
        for other in group.may_share() {
            let shared = match other {
                Group::Tp => &tp,
                Group::Cp => &cp,
                Group::DpCp => &dp_cp_group,
                _ => continue, // ExpertDp: its instances are smaller than it is.
            };
            if grid.groups(other.axes())? == members {
                return Ok(shared.clone());
            }
        }
        mine(group)
    };
    let expert_dp_group = or(Group::ExpertDp)?;
    // HSDP splits the data-parallel groups into instances, each with all shards.
    let (shard_groups, shard_replica_groups) = match grid.layout().instances {
        1 => ([dp_cp_group.clone(), expert_dp_group.clone()], [Communicator::solo(), Communicator::solo()]),
        _ => (
            [or(Group::Fsdp)?, or(Group::ExpertFsdp)?],
            [mine(Group::FsdpReplicas)?, mine(Group::ExpertFsdpReplicas)?],
        ),
    };
    Ok(Rank {
        world: world.clone(),
        control: mine(Group::Control)?,
        shard_groups,
        shard_replica_groups,
        pp: mine(Group::Pp)?,
        pp_backward_group: mine(Group::PpBackward)?,
        embedding_group: mine(Group::Embedding)?,
        tp_cp_group: or(Group::TpCp)?,
        tp_dp_cp_group: or(Group::TpDpCp)?,
        etp_ep_group: or(Group::EtpEp)?,
        etp: or(Group::Etp)?,
        expert_dp_group,
        dp,
        dp_cp_group,
        cp,
        tp,
        compute: rank.compute.with_rank(world.rank()),
        comm_stream: rank.comm_stream.with_rank(world.rank()),
        dispatch_stream: rank.dispatch_stream.with_rank(world.rank()),
        ..rank
    })
}

/// Most ranks that one process runs as threads.
const MAX_THREADS: usize = 256;

/// Runs `work` on every rank of a layout, one thread each, and returns their results. `make` creates each rank's
/// device. If ranks fail, the error is that of the first rank that failed for a reason of its own.
pub fn on_threads<T: Send>(
    layout: &RankLayout,
    make: impl Fn() -> Result<Rank> + Sync,
    work: impl Fn(Rank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    on_threads_with(layout, DEFAULT_TIMEOUT, ReduceKernels::default(), make, work)
}

/// [`on_threads`] with all ranks on the device of `rank`, each with its own streams: several ranks on one GPU.
pub fn on_one_device<T: Send>(
    layout: &RankLayout,
    timeout: Duration,
    rank: &Rank,
    work: impl Fn(Rank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let make = || Ok(Rank::alone(rank.device(), rank.kernels.clone(), rank.seed)?);
    on_threads_with(layout, timeout, reduce_kernels(&rank.kernels), make, work)
}

/// Reduction kernels of communication on GPUs.
fn reduce_kernels(kernels: &Arc<dyn Kernels>) -> ReduceKernels {
    let (add, max) = (kernels.clone(), kernels.clone());
    ReduceKernels {
        add: Some(Arc::new(move |s, acc, x| add.add_assign(s, acc, x))),
        max: Some(Arc::new(move |s, acc, x| max.max_assign(s, acc, x))),
    }
}

/// [`on_threads`] with a given timeout and given reduction kernels.
pub fn on_threads_with<T: Send>(
    layout: &RankLayout,
    timeout: Duration,
    reduce_kernels: ReduceKernels,
    make: impl Fn() -> Result<Rank> + Sync,
    work: impl Fn(Rank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let grid = Grid::of(layout.clone())?;
    let run = |world: World| as_member(&world, &grid, &make, &work);
    if grid.world() == 1 {
        return Ok(vec![run(World::solo())?]);
    }
    if grid.world() > MAX_THREADS {
        let (n, what) = (grid.world(), "are too many threads for one process; use at most");
        return Err(Error::Invalid(format!("{n} ranks {what} {MAX_THREADS}")));
    }
    let worlds = World::threads_with_kernels(grid.world(), timeout, reduce_kernels);
    let done: Vec<Result<T>> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = worlds.into_iter().map(|w| scope.spawn(move || run(w))).collect();
        let end = |(i, t): (usize, std::thread::ScopedJoinHandle<Result<T>>)| {
            t.join().unwrap_or_else(|_| Err(Error::Invalid(format!("rank {i} panicked"))))
        };
        threads.into_iter().enumerate().map(end).collect()
    });
    let (mut out, mut failures) = (Vec::new(), Vec::new());
    for result in done {
        match result {
            Ok(x) => out.push(x),
            Err(e) => failures.push(e),
        }
    }
    // Errors received from other ranks come last.
    failures.sort_by_key(is_remote);
    match failures.into_iter().next() {
        Some(e) => Err(e),
        None => Ok(out),
    }
}

/// True for an error received from another rank, or between ranks.
fn is_remote(e: &Error) -> bool {
    matches!(e, Error::Tensor(ferrotron_tensor::Error::Communication(_)))
}

/// True if all ranks end their work together, and none has failed.
fn is_agreed(e: &Error) -> bool {
    matches!(e, Error::ChangeRanks)
}

/// True for an error of the GPU or its driver, which another process on another GPU may not have.
fn is_of_device(e: &Error) -> bool {
    matches!(e, Error::Tensor(ferrotron_tensor::Error::Cuda { .. }))
}

/// Runs one rank's work in its world. If it fails for a reason of its own, it aborts the other ranks at once.
fn as_member<T>(
    world: &World,
    grid: &Grid,
    make: impl FnOnce() -> Result<Rank>,
    work: impl FnOnce(Rank) -> Result<T>,
) -> Result<T> {
    let done = make().and_then(|rank| join(rank, world, grid)).and_then(work);
    done.inspect_err(|e| {
        if !is_remote(e) && !is_agreed(e) {
            world.abort(&e.to_string(), !is_of_device(e));
        }
    })
}
