//! Ranks as threads: they meet in shared memory, block without spinning, and sum in the order of ranks, so
//! that results do not depend on who comes first.

use crate::{Error, Result};
use ferrotron_tensor::{Stream, Tensor};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One rank's membership of a group.
#[derive(Clone)]
pub struct Group {
    meeting: Arc<Meeting>,
    rank: usize,
    patience: Duration,
}

struct Meeting {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    sequence: u64,
    /// What each rank brought to the current collective.
    brought: Vec<Option<(String, Vec<f32>)>>,
    /// The result of the collective that `brought` last completed, and who has yet to take it.
    result: Arc<Vec<Vec<f32>>>,
    leaving: usize,
    failed: bool,
}

impl Group {
    /// A group of one.
    pub fn solo() -> Group {
        Group::threads(1, Duration::ZERO).swap_remove(0)
    }

    /// Memberships of `size` ranks, one for each thread. A rank that waits longer than `patience` for another
    /// gives up with an error that names it.
    pub fn threads(size: usize, patience: Duration) -> Vec<Group> {
        let state = State {
            sequence: 0,
            brought: (0..size.max(1)).map(|_| None).collect(),
            result: Arc::default(),
            leaving: 0,
            failed: false,
        };
        let meeting =
            Arc::new(Meeting { size: size.max(1), state: Mutex::new(state), changed: Condvar::new() });
        (0..size.max(1)).map(|rank| Group { meeting: meeting.clone(), rank, patience }).collect()
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.meeting.size
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self, label: &str) -> Result<()> {
        self.exchange(format!("barrier '{label}'"), Vec::new()).map(drop)
    }

    /// Replaces f32 `t` on every rank by the sum over ranks, added in the order of ranks.
    pub fn all_reduce(&self, stream: &Stream, t: &Tensor, label: &str) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        let mine = stream.download::<f32>(t)?;
        let all = self.exchange(format!("all-reduce '{label}' of {:?}", t.shape()), mine)?;
        let mut sum = vec![0f32; t.numel()];
        for rank in all.iter() {
            sum.iter_mut().zip(rank).for_each(|(s, x)| *s += x);
        }
        Ok(stream.write_to(t, &sum)?)
    }

    /// Replaces f32 `t` on every rank by that of `root`.
    pub fn broadcast(&self, stream: &Stream, t: &Tensor, root: usize, label: &str) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        let mine = if self.rank == root { stream.download::<f32>(t)? } else { Vec::new() };
        let all = self.exchange(format!("broadcast '{label}' of {:?} from {root}", t.shape()), mine)?;
        match all.get(root) {
            Some(values) => Ok(stream.write_to(t, values)?),
            None => Ok(()),
        }
    }

    /// Gives every rank what all ranks brought, in the order of ranks.
    fn exchange(&self, call: String, mine: Vec<f32>) -> Result<Arc<Vec<Vec<f32>>>> {
        let deadline = Instant::now() + self.patience;
        // A fast rank may come back before the slow ones have taken the last result.
        let mut s = self.wait(deadline, &call, |s| s.leaving == 0)?;
        let sequence = s.sequence;
        let met = s.brought.iter().enumerate().find_map(|(r, b)| b.as_ref().map(|b| (r, b.0.clone())));
        if let Some((other, other_call)) = met.filter(|(_, c)| *c != call) {
            s.failed = true;
            self.meeting.changed.notify_all();
            return Err(Error::Mismatch { sequence, rank: self.rank, call, other, other_call });
        }
        s.brought[self.rank] = Some((call.clone(), mine));
        if s.brought.iter().all(Option::is_some) {
            let all = s.brought.iter_mut().filter_map(Option::take).map(|b| b.1).collect();
            (s.result, s.leaving, s.sequence) = (Arc::new(all), self.size(), sequence + 1);
            self.meeting.changed.notify_all();
        } else {
            drop(s);
            s = self.wait(deadline, &call, |s| s.sequence > sequence)?;
        }
        s.leaving -= 1;
        if s.leaving == 0 {
            self.meeting.changed.notify_all();
        }
        Ok(s.result.clone())
    }

    fn wait(
        &self,
        deadline: Instant,
        call: &str,
        done: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>> {
        let mut s = self.meeting.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if done(&s) {
                return Ok(s);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || s.failed {
                s.failed = true;
                self.meeting.changed.notify_all();
                let missing = (0..self.size()).filter(|r| s.brought[*r].is_none()).collect();
                let seconds = self.patience.as_secs();
                let (sequence, rank, call) = (s.sequence, self.rank, call.to_string());
                return Err(Error::Stall { sequence, rank, call, seconds, missing });
            }
            s = self.meeting.changed.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
