//! Ranks as threads of one process. They meet in shared memory, block without spinning, and never wait inside
//! the compute pool.
//!
//! What a rank sends is copied into a parcel: staging memory that nobody writes again. The others read it from
//! their own streams, after its event; when the last of them is done with it, the memory goes back to its
//! owner's staging stream, which then waits for the events of all readers. So hosts meet once in most
//! operations, a sender never waits for its receivers, tensors on the host and on a card take the same way,
//! and the access checker sees every step of it.

mod engine;
mod meeting;
mod parcel;
pub(crate) mod sums;

use crate::engine::{Engine, Failure, Hub, Trouble};
use crate::recorder::{Note, Recorder};
use engine::ThreadEngine;
use meeting::Meeting;
use parcel::Staging;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

pub use sums::{Add, Arithmetic};

/// What all ranks share.
pub(crate) struct Hall {
    seats: Vec<Seat>,
    groups: Mutex<Vec<Made>>,
    failed: OnceLock<Failure>,
    arithmetic: Arithmetic,
}

struct Seat {
    state: AtomicU8,
    recorder: Arc<Recorder>,
}

/// States of a seat.
const TAKEN: u8 = 0;
const LEFT: u8 = 1;
const PANICKED: u8 = 2;

/// A group that some rank asked for.
struct Made {
    index: u64,
    by: usize,
    name: &'static str,
    meeting: Arc<Meeting>,
}

impl Hall {
    /// Has a rank of the job ended, and by a panic?
    pub(crate) fn ended(&self, rank: usize) -> Option<bool> {
        match self.seats.get(rank).map(|s| s.state.load(Ordering::SeqCst)) {
            Some(LEFT) => Some(false),
            Some(PANICKED) => Some(true),
            _ => None,
        }
    }

    /// The first failure reported.
    pub(crate) fn failed(&self) -> Option<&Failure> {
        self.failed.get()
    }

    fn groups(&self) -> std::sync::MutexGuard<'_, Vec<Made>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everyone who waits looks again.
    fn wake(&self) {
        let meetings: Vec<Arc<Meeting>> = self.groups().iter().map(|g| g.meeting.clone()).collect();
        meetings.iter().for_each(|m| m.wake());
    }
}

/// One rank's end. Dropped when the rank ends, by whatever way.
struct ThreadHub {
    hall: Arc<Hall>,
    rank: usize,
    staging: Arc<Staging>,
}

/// A rank's end of the job and of the group of all ranks.
type Ends = (Arc<dyn Hub>, Option<Arc<dyn Engine>>);

/// The ends of all ranks, and of their common group if they are more than one.
pub(crate) fn hubs(size: usize, arithmetic: Arithmetic) -> Vec<Ends> {
    let seat = || Seat { state: AtomicU8::new(TAKEN), recorder: Arc::default() };
    let all = Arc::new(Meeting::new((0..size).collect()));
    let hall = Arc::new(Hall {
        seats: (0..size).map(|_| seat()).collect(),
        groups: Mutex::new(vec![Made { index: 0, by: 0, name: "world", meeting: all.clone() }]),
        failed: OnceLock::new(),
        arithmetic,
    });
    let end = |rank: usize| {
        let hub = ThreadHub { hall: hall.clone(), rank, staging: Arc::default() };
        let engine = (size > 1).then(|| hub.engine(&all, rank));
        (Arc::new(hub) as Arc<dyn Hub>, engine)
    };
    (0..size).map(end).collect()
}

impl ThreadHub {
    fn engine(&self, meeting: &Arc<Meeting>, rank: usize) -> Arc<dyn Engine> {
        Arc::new(ThreadEngine::new(self.hall.clone(), meeting.clone(), rank, self.staging.clone()))
    }
}

impl Hub for ThreadHub {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.hall.seats.len()
    }

    /// Nobody waits: the first rank makes the group, the others find it.
    fn group(
        &self,
        index: u64,
        name: &'static str,
        ranks: &[usize],
        _deadline: Instant,
    ) -> Result<Option<Arc<dyn Engine>>, Trouble> {
        if let Some(failure) = self.hall.failed() {
            let told = Some(failure.clone());
            return Err(Trouble::Absent { missing: vec![], ended: vec![], told });
        }
        let mut groups = self.hall.groups();
        let meeting = match groups.iter().find(|g| g.index == index) {
            Some(made) if made.name != name || made.meeting.ranks() != ranks => {
                let (by, theirs) = (made.by, made.meeting.ranks());
                return Err(Trouble::Broken {
                    what: format!(
                        "rank {} makes group {index} as {name} of {ranks:?}, rank {by} as {} of {theirs:?}; \
                         all ranks must make the same groups in the same order",
                        self.rank, made.name
                    ),
                });
            }
            Some(made) => made.meeting.clone(),
            None => {
                let meeting = Arc::new(Meeting::new(ranks.to_vec()));
                groups.push(Made { index, by: self.rank, name, meeting: meeting.clone() });
                meeting
            }
        };
        Ok(ranks.iter().position(|r| *r == self.rank).map(|rank| self.engine(&meeting, rank)))
    }

    fn fail(&self, failure: Failure) {
        if self.hall.failed.set(failure).is_ok() {
            self.hall.wake();
        }
    }

    fn failure(&self) -> Option<Failure> {
        self.hall.failed().cloned()
    }

    fn recorder(&self) -> &Arc<Recorder> {
        &self.hall.seats[self.rank].recorder
    }

    fn notes(&self, rank: usize) -> Option<Vec<Note>> {
        self.hall.seats.get(rank).map(|s| s.recorder.notes())
    }
}

impl Drop for ThreadHub {
    fn drop(&mut self) {
        let state = if std::thread::panicking() { PANICKED } else { LEFT };
        self.hall.seats[self.rank].state.store(state, Ordering::SeqCst);
        self.hall.wake();
    }
}
