//! The calls of one rank on one group of threads.

use super::meeting::{Brought, Mail, Meeting, Table};
use super::parcel::{Parcel, Staging};
use super::{Hall, sums};
use crate::Reduce;
use crate::engine::{Engine, Job, Letter, Met, Trouble};
use crate::notice::{Detail, Notice};
use ferrotron_tensor::{Stream, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub(super) struct ThreadEngine {
    hall: Arc<Hall>,
    meeting: Arc<Meeting>,
    rank: usize,
    staging: Arc<Staging>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Rounds of the meeting so far.
    round: u64,
    /// What `meet` brought for `run`.
    table: Option<Table>,
}

/// Reductions of fewer elements for each rank are done whole by every rank, instead of a part by each and
/// another meeting. Either way each element is summed in the order of ranks: the bits are the same.
const WORTH_SHARING: usize = 512;

type Done<T = ()> = Result<T, Trouble>;

impl ThreadEngine {
    pub(super) fn new(hall: Arc<Hall>, meeting: Arc<Meeting>, rank: usize, staging: Arc<Staging>) -> Self {
        ThreadEngine { hall, meeting, rank, staging, state: Mutex::default() }
    }

    fn size(&self) -> usize {
        self.meeting.ranks().len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn swap(&self, brought: Brought, deadline: Instant) -> Done<Table> {
        let round = {
            let mut state = self.state();
            state.round += 1;
            state.round - 1
        };
        self.meeting.swap(&self.hall, self.rank, round, brought, deadline)
    }

    /// What this rank gives to the others, staged.
    fn pack(&self, s: &Stream, job: &Job) -> Done<Option<Arc<Parcel>>> {
        let sent = match job {
            Job::AllReduce { t, .. } => t,
            Job::AllGather { mine, .. } => mine,
            Job::ReduceScatter { all, .. } => all,
            Job::AllToAll { from, .. } => from,
            Job::Broadcast { t, root } if *root == self.rank => t,
            Job::Broadcast { .. } | Job::Barrier | Job::Bytes(_) => return Ok(None),
        };
        self.stage(s, sent)
    }

    fn stage(&self, s: &Stream, t: &Tensor) -> Done<Option<Arc<Parcel>>> {
        if t.numel() == 0 {
            return Ok(None);
        }
        Ok(Some(Arc::new(self.staging.copy(s, t)?)))
    }

    /// Elements `start..start + len` of what all brought, reduced into `out`.
    fn reduce(&self, s: &Stream, table: &Table, start: usize, out: &Tensor, op: Reduce) -> Done {
        let sources = parcels(table).map(|p| p.open(s, start, out.numel())).collect::<Done<Vec<Tensor>>>()?;
        sums::reduce(s, &self.hall.arithmetic, &sources, out, op)?;
        read_all(s, table)
    }

    fn all_reduce(&self, s: &Stream, table: &Table, t: &Tensor, op: Reduce, deadline: Instant) -> Done {
        let (n, count) = (self.size(), t.numel());
        let t = t.view(&[count])?;
        if count < n * WORTH_SHARING {
            return self.reduce(s, table, 0, &t, op);
        }
        // Every rank reduces its part and gives it to the others.
        let part = |r: usize| (count * r / n, count * (r + 1) / n);
        let (start, end) = part(self.rank);
        let parcel =
            self.staging.pack(s, end - start, t.dtype(), |out| self.reduce(s, table, start, out, op))?;
        let table = self.swap(Brought { parcel: Some(Arc::new(parcel)), ..Brought::default() }, deadline)?;
        for (r, parcel) in parcels(&table).enumerate() {
            let (start, end) = part(r);
            parcel.deliver(s, 0, &t.narrow(0, start, end - start)?)?;
        }
        read_all(s, &table)
    }

    /// `all` from parts of `counts` elements (None: equally many), part r from rank r's parcel, where it
    /// begins as `begins` says. This rank's own part comes from `mine`, unless it is there already.
    fn gather(
        &self,
        s: &Stream,
        table: &Table,
        (mine, all): (&Tensor, &Tensor),
        counts: Option<&[usize]>,
        begins: impl Fn(&Brought) -> usize,
    ) -> Done {
        let flat = all.view(&[all.numel()])?;
        let mut at = 0;
        for (r, brought) in table.iter().enumerate() {
            let count = counts.map_or(all.numel() / self.size(), |c| c[r]);
            let place = flat.narrow(0, at, count)?;
            at += count;
            match &brought.parcel {
                _ if count == 0 => {}
                _ if r == self.rank && place.same_memory(mine) => {}
                _ if r == self.rank => s.copy(mine, &place)?,
                Some(parcel) => parcel.deliver(s, begins(brought), &place)?,
                None => {
                    return Err(Trouble::Broken { what: format!("rank {r} of the group brought nothing") });
                }
            }
        }
        read_all(s, table)
    }
}

/// Who brought something.
fn parcels(table: &Table) -> impl Iterator<Item = &Parcel> {
    table.iter().filter_map(|b| b.parcel.as_deref())
}

/// Tells the owners that this rank has read their parcels.
fn read_all(s: &Stream, table: &Table) -> Done {
    let done = s.record()?;
    parcels(table).for_each(|p| p.was_read(s, &done));
    Ok(())
}

impl Engine for ThreadEngine {
    fn meet(&self, s: Option<&Stream>, notice: &Notice, job: &Job, deadline: Instant) -> Done<Met> {
        let parcel = s.map_or(Ok(None), |s| self.pack(s, job))?;
        let bytes = if let Job::Bytes(mine) = job { mine.to_vec() } else { Vec::new() };
        let table = self.swap(Brought { notice: Some(Arc::new(notice.clone())), parcel, bytes }, deadline)?;
        let all = table.iter().filter_map(|b| b.notice.clone()).collect();
        self.state().table = Some(table);
        Ok(Met::All(all))
    }

    fn run(&self, s: &Stream, job: &Job, deadline: Instant) -> Done {
        let Some(table) = self.state().table.take() else {
            return Err(Trouble::Broken { what: "data before a meeting".to_string() });
        };
        match job {
            Job::Barrier | Job::Bytes(_) => Ok(()),
            Job::AllReduce { t, op } => self.all_reduce(s, &table, t, *op, deadline),
            Job::ReduceScatter { mine, op, .. } => {
                let mine = mine.view(&[mine.numel()])?;
                self.reduce(s, &table, self.rank * mine.numel(), &mine, *op)
            }
            Job::AllGather { mine, all, counts } => self.gather(s, &table, (mine, all), *counts, |_| 0),
            Job::AllToAll { from, to, counts: None } => {
                let part = from.numel() / self.size();
                let mine = from.view(&[from.numel()])?.narrow(0, self.rank * part, part)?;
                self.gather(s, &table, (&mine, to), None, |_| self.rank * part)
            }
            Job::AllToAll { from, to, counts: Some((sent, received)) } => {
                let start = sent[..self.rank].iter().sum();
                let mine = from.view(&[from.numel()])?.narrow(0, start, sent[self.rank])?;
                self.gather(s, &table, (&mine, to), Some(received), |b| match b.notice.as_deref() {
                    Some(Notice { detail: Detail::Pairs { sent, .. }, .. }) => {
                        sent[..self.rank].iter().sum::<u64>() as usize
                    }
                    _ => 0,
                })
            }
            Job::Broadcast { t, root } => {
                for parcel in parcels(&table).filter(|_| *root != self.rank) {
                    parcel.deliver(s, 0, t)?;
                }
                read_all(s, &table)
            }
        }
    }

    fn post(&self, s: &Stream, sends: &[Letter], _deadline: Instant) -> Done {
        for letter in sends {
            let mail = Mail { notice: letter.notice.clone(), parcel: self.stage(s, letter.tensor)? };
            self.meeting.post(self.rank, letter.peer, mail);
        }
        Ok(())
    }

    fn collect(&self, s: &Stream, _sends: &[Letter], receives: &[Letter], deadline: Instant) -> Done {
        for letter in receives {
            let mail = self.meeting.collect(&self.hall, letter.peer, self.rank, deadline)?;
            if letter.notice.conflict(self.rank, &mail.notice, letter.peer) {
                return Err(Trouble::Differs {
                    peer: letter.peer,
                    mine: Box::new(letter.notice.clone()),
                    theirs: Box::new(mail.notice),
                });
            }
            if let Some(parcel) = &mail.parcel {
                parcel.deliver(s, 0, letter.tensor)?;
                parcel.was_read(s, &s.record()?);
            }
        }
        Ok(())
    }

    fn bytes(&self, _mine: &[u8], _deadline: Instant) -> Done<Vec<Vec<u8>>> {
        let table = self.state().table.take();
        Ok(table.map_or(Vec::new(), |t| t.iter().map(|b| b.bytes.clone()).collect()))
    }
}
