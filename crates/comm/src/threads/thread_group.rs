//! Rendezvous of the ranks of one group: rounds in which all take part, and mailboxes between two ranks.

use super::SharedJob;
use super::staging::StagedBuffer;
use crate::backend::OpError;
use crate::op_descriptor::OpDescriptor;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What a rank contributes to a round.
#[derive(Default)]
pub(super) struct Contribution {
    pub(super) descriptor: Option<Arc<OpDescriptor>>,
    pub(super) staged: Option<Arc<StagedBuffer>>,
    pub(super) bytes: Vec<u8>,
}

/// All contributions, in rank order.
pub(super) type Contributions = Arc<Vec<Contribution>>;

/// A message in transit.
pub(super) struct P2pMessage {
    pub(super) descriptor: OpDescriptor,
    /// `None` for an empty tensor.
    pub(super) staged: Option<Arc<StagedBuffer>>,
}

pub(super) struct ThreadGroup {
    ranks: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of the first round in `rounds`. A fast rank is at most one round ahead of a slow one.
    first: u64,
    rounds: VecDeque<Round>,
    mailboxes: HashMap<(usize, usize), VecDeque<P2pMessage>>,
}

struct Round {
    contributions: Vec<Option<Contribution>>,
    complete: Option<Contributions>,
    taken: usize,
}

impl ThreadGroup {
    pub(super) fn new(ranks: Vec<usize>) -> ThreadGroup {
        ThreadGroup { ranks, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Members as ranks of the job.
    pub(super) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all waiting ranks. Taking the lock ensures that no rank is between its check and its sleep.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Contributes to a round and returns all contributions. Each rank counts its own rounds.
    pub(super) fn all_gather(
        &self,
        job: &SharedJob,
        rank: usize,
        round: u64,
        contributions: Contribution,
        deadline: Instant,
    ) -> Result<Contributions, OpError> {
        let n = self.ranks.len();
        let mut state = self.lock();
        let at = |s: &State| (round - s.first) as usize;
        while state.rounds.len() <= at(&state) {
            let contributions = (0..n).map(|_| None).collect();
            state.rounds.push_back(Round { contributions, complete: None, taken: 0 });
        }
        if job.failed().is_some() {
            let arrived = &state.rounds[at(&state)].contributions;
            return Err(
                self.missing_error(job, (0..n).filter(|r| *r != rank && arrived[*r].is_none()).collect())
            );
        }
        let i = at(&state);
        let here = &mut state.rounds[i];
        here.contributions[rank] = Some(contributions);
        if here.contributions.iter().all(Option::is_some) {
            here.complete = Some(Arc::new(here.contributions.iter_mut().filter_map(Option::take).collect()));
            self.changed.notify_all();
        }
        let complete = |s: &mut State| s.rounds[at(s)].complete.clone();
        let missing = |s: &State| {
            let contributions = &s.rounds[at(s)].contributions;
            (0..n).filter(|r| contributions[*r].is_none()).collect()
        };
        let (mut state, all) = self.wait(job, state, deadline, complete, missing)?;
        let i = at(&state);
        state.rounds[i].taken += 1;
        // Rounds complete in order: the last rank to leave a round has left all earlier ones.
        while state.rounds.front().is_some_and(|r| r.taken == n) {
            state.rounds.pop_front();
            state.first += 1;
        }
        Ok(all)
    }

    /// Puts a message into its receiver's mailbox.
    pub(super) fn send(&self, from: usize, to: usize, mailboxes: P2pMessage) {
        self.lock().mailboxes.entry((from, to)).or_default().push_back(mailboxes);
        self.changed.notify_all();
    }

    /// Takes the next message from a rank.
    pub(super) fn receive(
        &self,
        job: &SharedJob,
        from: usize,
        to: usize,
        deadline: Instant,
    ) -> Result<P2pMessage, OpError> {
        let next = |s: &mut State| s.mailboxes.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        self.wait(job, self.lock(), deadline, next, |_| vec![from]).map(|(_, mailboxes)| mailboxes)
    }

    /// Sleeps until `take` succeeds, or until it cannot any more.
    fn wait<'a, T>(
        &self,
        job: &SharedJob,
        mut state: MutexGuard<'a, State>,
        deadline: Instant,
        mut take: impl FnMut(&mut State) -> Option<T>,
        missing: impl Fn(&State) -> Vec<usize>,
    ) -> Result<(MutexGuard<'a, State>, T), OpError> {
        loop {
            // Check for completion first: a complete round counts even if a rank has exited or failed since.
            if let Some(found) = take(&mut state) {
                return Ok((state, found));
            }
            let missing = missing(&state);
            let left = deadline.saturating_duration_since(Instant::now());
            let exited = || missing.iter().any(|r| job.ended(self.ranks[*r]).is_some());
            if left.is_zero() || job.failed().is_some() || exited() {
                return Err(self.missing_error(job, missing));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The error for missing ranks.
    fn missing_error(&self, job: &SharedJob, missing: Vec<usize>) -> OpError {
        let ended = missing.iter().filter_map(|r| Some((*r, job.ended(self.ranks[*r])?))).collect();
        OpError::RanksMissing { missing, ended, failure: job.failed().cloned() }
    }
}
