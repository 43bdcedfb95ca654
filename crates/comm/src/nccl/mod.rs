//! Ranks as processes with one card each, over NCCL, which is opened at run time.
//!
//! Data goes by NCCL, queued on the caller's stream. What the ranks are about to call is compared on the host
//! before, over MPI or TCP: whichever way the job was started. Sums are NCCL's: the same bits in every run on
//! the same machines, but added in the order of its rings and trees, not of ranks, and bf16 is rounded at every
//! step of them.
//!
//! A send waits on the stream for its receiver (not on the host): what two ranks send each other in both
//! directions at once belongs in one `exchange`.

mod comm;
mod engine;
mod library;
#[cfg(test)]
mod tests;

use crate::circle::Circle;
use crate::engine::{Engine, Failure, Hub, Trouble};
use crate::job::{Job, Launcher};
use crate::post::{Post, Topic};
use crate::process::Process;
use crate::recorder::{Note, Recorder};
use crate::tcp::TcpPost;
use crate::{Error, Result, World};
use comm::NcclComm;
use engine::NcclEngine;
use ferrotron_tensor::{Device, Stream};
use library::{IN_PROGRESS, Nccl, SUCCESS, UniqueId};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often the communicators are asked for errors in the background.
const LOOK: Duration = Duration::from_millis(100);

struct NcclHub {
    nccl: &'static Nccl,
    process: Arc<Process>,
    world: Arc<NcclComm>,
    /// Says which card, for new groups.
    stream: Stream,
    comms: Arc<Watched>,
}

/// Communicators that the watching thread looks at. It ends when nobody else holds this.
type Watched = Mutex<Vec<Weak<NcclComm>>>;

impl World {
    /// The job that the environment describes (see [`Job::detect`]), one process for each card, over NCCL;
    /// alone if it describes none. `device` is this process's card. A rank that waits longer than `patience`
    /// for another gives up with an error that names it, and the whole job then ends.
    pub fn nccl(device: &Device, patience: Duration) -> Result<World> {
        let hub = NcclHub::join(device, Job::detect()?, patience)?;
        World::start(Arc::new(hub), patience)
    }
}

/// Version of the NCCL that would be used, or why there is none.
pub fn nccl_version() -> Result<String> {
    Nccl::open()?.version().map(library::dotted)
}

/// Small messages between the ranks of a job.
fn post(job: Option<Job>, patience: Duration) -> Result<Arc<dyn Post>> {
    match job {
        None => Ok(Arc::new(TcpPost::meet(0, 1, "", patience)?)),
        Some(Job { launcher: Launcher::Mpi, .. }) => crate::mpi::post(),
        Some(Job { rank, size: 1, .. }) => Ok(Arc::new(TcpPost::meet(rank, 1, "", patience)?)),
        Some(Job { rank, size, meeting: Some(at), .. }) => {
            Ok(Arc::new(TcpPost::meet(rank, size, &at, patience)?))
        }
        Some(Job { .. }) => {
            let what = "set MASTER_ADDR (and MASTER_PORT) to where rank 0 can be reached, on all ranks";
            Err(Error::Launch(what.to_string()))
        }
    }
}

impl NcclHub {
    fn join(device: &Device, job: Option<Job>, patience: Duration) -> Result<NcclHub> {
        let nccl = Nccl::open()?;
        let stream = device.stream("nccl")?;
        let process = Arc::new(Process::new(post(job, patience)?, patience)?);
        let deadline = Instant::now() + patience;
        let world = meet(nccl, &process, &stream, deadline).map_err(|trouble| {
            let what = match trouble {
                Trouble::Broken { what } => what,
                Trouble::Tensor(error) => return Error::Tensor(error),
                Trouble::Absent { told: Some(told), .. } => {
                    format!("rank {} failed: {}", told.rank, told.reason)
                }
                _ => format!("not all ranks came within {:.1} s", patience.as_secs_f64()),
            };
            process.fail(Failure { rank: process.post().rank(), stall: false, reason: what.clone() });
            Error::Engine { call: "setting up NCCL".into(), what }
        })?;
        let comms = Arc::new(Mutex::new(vec![Arc::downgrade(&world)]));
        watch(&comms, &process)?;
        Ok(NcclHub { nccl, process, world, stream, comms })
    }
}

/// Rank 0 names the job, and all ranks set up the communicator of that name.
fn meet(
    nccl: &'static Nccl,
    process: &Arc<Process>,
    s: &Stream,
    deadline: Instant,
) -> Result<Arc<NcclComm>, Trouble> {
    let (post, topic) = (process.post(), Topic::bytes(0));
    let id = if post.rank() == 0 {
        let id = nccl.unique_id()?;
        (1..post.size()).try_for_each(|to| post.send(to, topic, id.0.to_vec()))?;
        id
    } else {
        let bytes = process.wait(deadline, || Ok(post.take(0, topic)), || vec![(0, 0)])?;
        let what = || "rank 0 sent something else than NCCL's unique id".to_string();
        UniqueId(bytes.try_into().map_err(|_| Trouble::Broken { what: what() })?)
    };
    NcclComm::new(nccl, process, s, id, deadline)
}

/// Errors that NCCL finds in the background become this rank's failure; and when any rank has failed, what is
/// on the card's streams is ended, so that no host waits for it for ever.
fn watch(comms: &Arc<Watched>, process: &Arc<Process>) -> Result<()> {
    let (comms, process) = (Arc::downgrade(comms), Arc::downgrade(process));
    let look = move || {
        while let (Some(comms), Some(process)) = (comms.upgrade(), process.upgrade()) {
            let mut list = comms.lock().unwrap_or_else(PoisonError::into_inner);
            list.retain(|c| c.strong_count() > 0);
            let live: Vec<Arc<NcclComm>> = list.iter().filter_map(Weak::upgrade).collect();
            drop(list);
            let bad = live.iter().find_map(|c| match c.state() {
                SUCCESS | IN_PROGRESS => None,
                code => Some(c.error(code).to_string()),
            });
            if let Some(reason) = bad {
                process.fail(Failure { rank: process.post().rank(), stall: false, reason });
            }
            if process.told().is_some() {
                return live.iter().for_each(|c| c.abort());
            }
            drop((live, comms, process));
            std::thread::sleep(LOOK);
        }
    };
    let spawned = std::thread::Builder::new().name("nccl errors".into()).spawn(look);
    spawned.map(drop).map_err(|e| Error::Launch(format!("no thread to watch NCCL: {e}")))
}

impl Hub for NcclHub {
    fn rank(&self) -> usize {
        self.process.post().rank()
    }

    fn size(&self) -> usize {
        self.process.post().size()
    }

    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        deadline: Instant,
    ) -> Result<Option<Arc<dyn Engine>>, Trouble> {
        let circle = Circle::new(&self.process, index, name, ranks, deadline)?;
        let comm = match index {
            0 => Some(self.world.clone()),
            _ => self.world.split(&self.stream, circle.as_ref().map(|c| c.me), deadline)?,
        };
        let (Some(circle), Some(comm)) = (circle, comm) else { return Ok(None) };
        self.comms.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&comm));
        Ok(Some(Arc::new(NcclEngine { nccl: self.nccl, comm, circle })))
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
