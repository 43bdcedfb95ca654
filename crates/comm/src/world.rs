//! All ranks of the job, and the groups made of them.

use crate::communicator::{Communicator, Core};
use crate::engine::{Engine, Failure, Hub};
use crate::notice::{Kind, Notice};
use crate::threads::{self, Arithmetic};
use crate::volume::Meter;
use crate::{Error, Note, Result, Volume, watchdog};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One rank's membership of the job. Clones are the same membership; when the last clone and the last
/// [`Communicator`] made from it are dropped, the rank has left, and others that wait for it give up.
#[derive(Clone)]
pub struct World {
    hub: Arc<dyn Hub>,
    all: Communicator,
    patience: Duration,
    /// Groups made so far. Held while one is made.
    groups: Arc<Mutex<u64>>,
    meter: Arc<Meter>,
}

impl World {
    /// A job of one rank.
    pub fn solo() -> World {
        let hub = threads::hubs(1, Arithmetic::default()).swap_remove(0);
        World::assemble(hub.0, hub.1, Duration::ZERO)
    }

    /// A job of `size` ranks as threads of this process, one for each. A rank that waits longer than
    /// `patience` for another gives up with an error that names it. Tensors are on the host.
    pub fn threads(size: usize, patience: Duration) -> Vec<World> {
        World::threads_with(size, patience, Arithmetic::default())
    }

    /// The same with kernels for sums of tensors on a card, which all ranks then share as one `Device`.
    pub fn threads_with(size: usize, patience: Duration, arithmetic: Arithmetic) -> Vec<World> {
        let hubs = threads::hubs(size.max(1), arithmetic);
        hubs.into_iter().map(|(hub, engine)| World::assemble(hub, engine, patience)).collect()
    }

    /// A job over another engine: makes the group of all ranks.
    pub(crate) fn start(hub: Arc<dyn Hub>, patience: Duration) -> Result<World> {
        let ranks: Vec<usize> = (0..hub.size()).collect();
        let engine = match ranks.len() {
            1 => None,
            _ => make(&*hub, 0, "world", &ranks, patience)?,
        };
        Ok(World::assemble(hub, engine, patience))
    }

    fn assemble(hub: Arc<dyn Hub>, engine: Option<Arc<dyn Engine>>, patience: Duration) -> World {
        let meter = Arc::new(Meter::default());
        let ranks = (0..hub.size()).collect();
        let all = join(&hub, (0, "world"), ranks, hub.rank(), engine, patience, &meter);
        World { hub, all, patience, groups: Arc::new(Mutex::new(1)), meter }
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.hub.rank()
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.hub.size()
    }

    /// The group of all ranks.
    pub fn all(&self) -> Communicator {
        self.all.clone()
    }

    /// The group of `ranks`, in their order; `None` if this rank is not among them. Every rank of the job
    /// calls it with the same lists in the same order.
    pub fn group(&self, name: &'static str, ranks: &[usize]) -> Result<Option<Communicator>> {
        let refuse = |what: String| {
            let error = Error::Group { name: name.to_string(), ranks: ranks.to_vec(), what };
            watchdog::tell(&*self.hub, &error);
            Err(error)
        };
        if let Some(r) = ranks.iter().find(|r| **r >= self.size()) {
            return refuse(format!("there is no rank {r} among {}", self.size()));
        }
        if let Some(r) = ranks.iter().enumerate().find_map(|(i, r)| ranks[..i].contains(r).then_some(r)) {
            return refuse(format!("rank {r} is named twice; name each once"));
        }
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let index = *groups;
        *groups += 1;
        let engine = match ranks.len() {
            0 | 1 => None,
            _ => make(&*self.hub, index, name, ranks, self.patience)?,
        };
        let Some(rank) = ranks.iter().position(|r| *r == self.rank()) else { return Ok(None) };
        Ok(Some(join(&self.hub, (index, name), ranks.to_vec(), rank, engine, self.patience, &self.meter)))
    }

    /// This rank has failed for a reason of its own: the others need not wait for it. Their calls fail with that reason.
    pub fn give_up(&self, reason: &str) {
        if self.size() > 1 {
            self.hub.fail(Failure { rank: self.rank(), stall: false, reason: reason.to_string() });
        }
    }

    /// Calls and bytes sent by this rank on all groups.
    pub fn volume(&self) -> Volume {
        self.meter.read()
    }

    /// The flight recorder: the last operations of every rank, oldest first, as known here; `None` is unknown.
    pub fn recorder(&self) -> Vec<Option<Vec<Note>>> {
        (0..self.size()).map(|r| self.hub.notes(r)).collect()
    }
}

fn make(
    hub: &dyn Hub,
    index: u64,
    name: &'static str,
    ranks: &[usize],
    patience: Duration,
) -> Result<Option<Arc<dyn Engine>>> {
    let start = Instant::now();
    hub.group(index, name, ranks, watchdog::deadline(patience)).map_err(|trouble| {
        let mut call = Notice::new(name, Kind::Barrier, "new group");
        call.sequence = index;
        let everyone: Vec<usize> = (0..hub.size()).collect();
        watchdog::give_up(hub, &everyone, &call, start.elapsed(), trouble)
    })
}

fn join(
    hub: &Arc<dyn Hub>,
    (index, name): (u64, &'static str),
    ranks: Vec<usize>,
    rank: usize,
    engine: Option<Arc<dyn Engine>>,
    patience: Duration,
    world_meter: &Arc<Meter>,
) -> Communicator {
    let core = Core {
        name,
        index,
        rank,
        ranks,
        engine,
        hub: hub.clone(),
        patience,
        counters: Mutex::default(),
        meter: Meter::default(),
        world_meter: world_meter.clone(),
    };
    Communicator { core: Arc::new(core) }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "World(rank {} of {})", self.rank(), self.size())
    }
}
