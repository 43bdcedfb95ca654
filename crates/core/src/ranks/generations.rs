//! A job whose processes may be replaced: its groups are formed anew after a failure, and the work goes on.

use super::{Launch, as_member, is_agreed, is_of_device, reduce_kernels};
use crate::config::FaultSection;
use crate::grid::{Grid, RankLayout};
use crate::train::{Restarted, Snapshots};
use crate::{Error, Result};
use ferrotron_comm::{Generation, LaunchEnv, Left, Membership, PeerMemory, RestartPolicy, Seat, World};
use ferrotron_engine::Rank;
use ferrotron_tensor::DeviceKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a rank's work gets besides its rank.
pub struct GenerationStart<'a> {
    /// The restart that begins this generation; none in the first.
    pub restarted: Option<Restarted>,
    /// Snapshots of this process.
    pub snapshots: Snapshots,
    /// The work counts its steps here.
    pub steps: &'a StepCount,
}

/// How far the work of a generation came.
#[derive(Debug, Default)]
pub struct StepCount {
    /// The last step that was begun, of the whole run.
    begun: AtomicU64,
    /// Steps begun in this generation.
    here: AtomicU64,
}

impl StepCount {
    /// A step of the run, from 1, begins.
    pub fn begin(&self, step: u64) {
        self.begun.fetch_max(step, Ordering::Relaxed);
        self.here.fetch_add(1, Ordering::Relaxed);
    }
}

/// How a job survives faults.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The keys of the recipe.
    pub keys: FaultSection,
    /// World sizes to which the job may shrink, largest first.
    pub shrink: Vec<usize>,
}

impl Faults {
    fn policy(&self, size: usize) -> RestartPolicy {
        let seconds = Duration::from_secs_f64;
        RestartPolicy {
            size,
            restarts: self.keys.restarts,
            rank_failures: self.keys.rank_failures,
            soft: seconds(self.keys.soft_timeout),
            heartbeat: seconds(self.keys.heartbeat_timeout),
            backoff: seconds(self.keys.backoff),
            shrink: self.shrink.clone(),
        }
    }
}

impl Launch {
    /// Runs `work` as this process's rank of `job`, again after every failure that the job survives. `None` if this process
    /// was a spare that the job did not need.
    pub fn run_generations<T>(
        &self,
        job: &LaunchEnv,
        (layout, timeout): (&RankLayout, Duration),
        faults: &Faults,
        make: impl FnOnce() -> Result<Rank>,
        work: impl Fn(Rank, GenerationStart) -> Result<T>,
    ) -> Result<Option<T>> {
        let launched = LaunchEnv::detect()?.unwrap_or_else(|| job.clone());
        let rank = make()?;
        let membership = Membership::join(&launched, faults.policy(job.size))?;
        let (mut snapshots, mut failed, steps) = (None, None::<(Instant, String)>, StepCount::default());
        let mut rotate = false;
        loop {
            // The last one that was begun was not finished.
            let here = steps.here.swap(0, Ordering::Relaxed).saturating_sub(1);
            let begun = steps.begun.swap(0, Ordering::Relaxed).saturating_sub(1);
            let reason = failed.as_ref().map_or(String::new(), |(_, why)| why.clone());
            let left = Left { steps: here, reason, rotate };
            let Some(seat) = membership.take_seat(&left, timeout).map_err(ended)? else {
                return Ok(None);
            };
            self.set_rank(seat.rank);
            let snapshots = match &mut snapshots {
                Some(kept) => kept,
                none => {
                    let peers = PeerMemory::serve(membership.address())?;
                    none.insert(Snapshots::mirrored(peers, membership.coordinator()))
                }
            };
            let restarted = (seat.generation > 1).then(|| {
                let (since, said) = failed.take().unwrap_or_else(|| (Instant::now(), String::new()));
                let reason = if seat.reason.is_empty() { said } else { seat.reason.clone() };
                let (replaced, rotated) = (seat.replaced.clone(), seat.rotated);
                Restarted { generation: seat.generation, reason, replaced, rotated, since, steps: begun }
            });
            let start = GenerationStart { restarted, snapshots: snapshots.clone(), steps: &steps };
            match self.run_generation(
                (&membership, &seat, job),
                (layout, timeout, faults),
                &rank,
                start,
                &work,
            ) {
                Ok(done) => return Ok(Some(done)),
                Err(Ended { error, restarts: false }) => return Err(error),
                Err(Ended { error, .. }) => {
                    rotate = is_agreed(&error);
                    if !rotate {
                        tracing::warn!(shown = true, generation = seat.generation, "left: {error}");
                    }
                    failed = Some((Instant::now(), error.to_string()));
                }
            }
        }
    }

    fn run_generation<T>(
        &self,
        (membership, seat, job): (&Membership, &Seat, &LaunchEnv),
        (layout, timeout, faults): (&RankLayout, Duration, &Faults),
        rank: &Rank,
        start: GenerationStart,
        work: &impl Fn(Rank, GenerationStart) -> Result<T>,
    ) -> Result<T, Ended> {
        let hard = Duration::from_secs_f64(faults.keys.hard_timeout);
        let generation = Generation { membership, seat, job, hard };
        // The largest data-parallel size is that of the recipe; a job that has shrunk has a smaller one.
        let world_size = layout.world().unwrap_or(seat.size);
        let layout = match seat.size == world_size {
            true => layout.clone(),
            false => RankLayout { dp: None, ..layout.clone() },
        };
        let is_final = |error: Error| Ended { error, restarts: false };
        let grid = Grid::new(layout, seat.size).map_err(is_final)?;
        let world = match rank.device().kind() {
            DeviceKind::Cpu => World::one_host_generation(&generation, timeout),
            DeviceKind::Cuda { .. } => {
                World::nccl_generation(rank.device(), &generation, timeout, reduce_kernels(&rank.kernels))
            }
        };
        // Another process may have died before the groups were formed.
        let world = world.map_err(|e| Ended { error: e.into(), restarts: true })?;
        let done = as_member(&world, &grid, || Ok(rank.clone()), |rank| work(rank, start));
        done.map_err(|error| {
            let is_of_device = is_of_device(&error);
            // After the failure of another rank whatever fails here is its consequence.
            let restarts = is_agreed(&error) || (world.may_restart() && !is_of_device);
            let error = match is_of_device {
                true => Error::Restart(format!("{error}; another process may go on in place of this one")),
                false => error,
            };
            Ended { error, restarts }
        })
    }
}

/// Why a generation was left.
struct Ended {
    error: Error,
    /// The job goes on.
    restarts: bool,
}

fn ended(e: ferrotron_comm::Error) -> Error {
    match e {
        ferrotron_comm::Error::Excluded(what) => Error::Excluded(what),
        other => Error::Restart(other.to_string()),
    }
}
