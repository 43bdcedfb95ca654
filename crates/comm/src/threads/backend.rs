//! Collectives and sends of one group of threads.

use super::staging::{StagedBuffer, Staging};
use super::thread_group::{Contribution, Contributions, P2pMessage, ThreadGroup};
use super::{SharedJob, reduce};
use crate::ReduceOp;
use crate::backend::{Collective, Descriptors, GroupBackend, OpError, P2pOp};
use crate::op_descriptor::{Detail, OpDescriptor};
use ferrotron_tensor::{Stream, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub(super) struct ThreadGroupBackend {
    job: Arc<SharedJob>,
    group: Arc<ThreadGroup>,
    rank: usize,
    staging: Arc<Staging>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number of rendezvous rounds so far.
    round: u64,
    /// What all ranks contributed to the descriptor exchange, for `run`.
    table: Option<Contributions>,
}

/// Reductions with fewer elements per rank are computed redundantly by every rank, instead of one part each and a
/// second rendezvous. Either way each element is summed in rank order, so the bits are the same.
const WORTH_SHARING: usize = 512;

type Done<T = ()> = Result<T, OpError>;

impl ThreadGroupBackend {
    pub(super) fn new(
        job: Arc<SharedJob>,
        group: Arc<ThreadGroup>,
        rank: usize,
        staging: Arc<Staging>,
    ) -> Self {
        ThreadGroupBackend { job, group, rank, staging, state: Mutex::default() }
    }

    fn size(&self) -> usize {
        self.group.ranks().len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn swap(&self, brought: Contribution, deadline: Instant) -> Done<Contributions> {
        let round = {
            let mut state = self.state();
            state.round += 1;
            state.round - 1
        };
        self.group.swap(&self.job, self.rank, round, brought, deadline)
    }

    /// Stages what this rank sends to the others.
    fn pack(&self, s: &Stream, job: &Collective) -> Done<Option<Arc<StagedBuffer>>> {
        let sent = match job {
            Collective::AllReduce { t, .. } => t,
            Collective::AllGather { mine, .. } => mine,
            Collective::ReduceScatter { all, .. } => all,
            Collective::AllToAll { from, .. } => from,
            Collective::Broadcast { t, root } if *root == self.rank => t,
            Collective::Broadcast { .. } | Collective::Barrier | Collective::AllGatherBytes(_) => {
                return Ok(None);
            }
        };
        self.stage(s, sent)
    }

    fn stage(&self, s: &Stream, t: &Tensor) -> Done<Option<Arc<StagedBuffer>>> {
        if t.numel() == 0 {
            return Ok(None);
        }
        Ok(Some(Arc::new(self.staging.copy(s, t)?)))
    }

    /// Reduces elements `start..start + out.numel()` of all contributions into `out`.
    fn reduce(&self, s: &Stream, table: &Contributions, start: usize, out: &Tensor, op: ReduceOp) -> Done {
        let sources =
            staged_buffers(table).map(|p| p.open(s, start, out.numel())).collect::<Done<Vec<Tensor>>>()?;
        reduce::reduce(s, &self.job.kernels, &sources, out, op)?;
        read_all(s, table)
    }

    fn all_reduce(
        &self,
        s: &Stream,
        table: &Contributions,
        t: &Tensor,
        op: ReduceOp,
        deadline: Instant,
    ) -> Done {
        let (n, count) = (self.size(), t.numel());
        let t = t.view(&[count])?;
        if count < n * WORTH_SHARING {
            return self.reduce(s, table, 0, &t, op);
        }
        // Every rank reduces its part and shares the result.
        let part = |r: usize| (count * r / n, count * (r + 1) / n);
        let (start, end) = part(self.rank);
        let staged =
            self.staging.pack(s, end - start, t.dtype(), |out| self.reduce(s, table, start, out, op))?;
        let table =
            self.swap(Contribution { staged: Some(Arc::new(staged)), ..Contribution::default() }, deadline)?;
        for (r, staged) in staged_buffers(&table).enumerate() {
            let (start, end) = part(r);
            staged.deliver(s, 0, &t.narrow(0, start, end - start)?)?;
        }
        read_all(s, &table)
    }

    /// Assembles `all` from parts of `counts` elements (`None`: of equal size). Part r is taken from rank r's staged
    /// buffer at the offset given by `begins`; this rank's own part comes from `mine`, unless it is already in place.
    fn gather(
        &self,
        s: &Stream,
        table: &Contributions,
        (mine, all): (&Tensor, &Tensor),
        counts: Option<&[usize]>,
        begins: impl Fn(&Contribution) -> usize,
    ) -> Done {
        let flat = all.view(&[all.numel()])?;
        let mut at = 0;
        for (r, brought) in table.iter().enumerate() {
            let count = counts.map_or(all.numel() / self.size(), |c| c[r]);
            let place = flat.narrow(0, at, count)?;
            at += count;
            match &brought.staged {
                _ if count == 0 => {}
                _ if r == self.rank && place.same_memory(mine) => {}
                _ if r == self.rank => s.copy(mine, &place)?,
                Some(staged) => staged.deliver(s, begins(brought), &place)?,
                None => {
                    return Err(OpError::Backend { what: format!("rank {r} of the group brought nothing") });
                }
            }
        }
        read_all(s, table)
    }
}

/// The staged buffers among the contributions.
fn staged_buffers(table: &Contributions) -> impl Iterator<Item = &StagedBuffer> {
    table.iter().filter_map(|b| b.staged.as_deref())
}

/// Tells the owners that this rank has read their staged buffers.
fn read_all(s: &Stream, table: &Contributions) -> Done {
    let done = s.record()?;
    staged_buffers(table).for_each(|p| p.was_read(s, &done));
    Ok(())
}

impl GroupBackend for ThreadGroupBackend {
    fn meet(
        &self,
        s: Option<&Stream>,
        descriptor: &OpDescriptor,
        job: &Collective,
        deadline: Instant,
    ) -> Done<Descriptors> {
        let staged = s.map_or(Ok(None), |s| self.pack(s, job))?;
        let bytes = if let Collective::AllGatherBytes(mine) = job { mine.to_vec() } else { Vec::new() };
        let table = self
            .swap(Contribution { descriptor: Some(Arc::new(descriptor.clone())), staged, bytes }, deadline)?;
        let all = table.iter().filter_map(|b| b.descriptor.clone()).collect();
        self.state().table = Some(table);
        Ok(Descriptors::PerRank(all))
    }

    fn run(&self, s: &Stream, job: &Collective, deadline: Instant) -> Done {
        let Some(table) = self.state().table.take() else {
            return Err(OpError::Backend { what: "data before a group".to_string() });
        };
        match job {
            Collective::Barrier | Collective::AllGatherBytes(_) => Ok(()),
            Collective::AllReduce { t, op } => self.all_reduce(s, &table, t, *op, deadline),
            Collective::ReduceScatter { mine, op, .. } => {
                let mine = mine.view(&[mine.numel()])?;
                self.reduce(s, &table, self.rank * mine.numel(), &mine, *op)
            }
            Collective::AllGather { mine, all, counts } => {
                self.gather(s, &table, (mine, all), *counts, |_| 0)
            }
            Collective::AllToAll { from, to, counts: None } => {
                let part = from.numel() / self.size();
                let mine = from.view(&[from.numel()])?.narrow(0, self.rank * part, part)?;
                self.gather(s, &table, (&mine, to), None, |_| self.rank * part)
            }
            Collective::AllToAll { from, to, counts: Some((sent, received)) } => {
                let start = sent[..self.rank].iter().sum();
                let mine = from.view(&[from.numel()])?.narrow(0, start, sent[self.rank])?;
                self.gather(s, &table, (&mine, to), Some(received), |b| match b.descriptor.as_deref() {
                    Some(OpDescriptor { detail: Detail::Pairs { sent, .. }, .. }) => {
                        sent[..self.rank].iter().sum::<u64>() as usize
                    }
                    _ => 0,
                })
            }
            Collective::Broadcast { t, root } => {
                for staged in staged_buffers(&table).filter(|_| *root != self.rank) {
                    staged.deliver(s, 0, t)?;
                }
                read_all(s, &table)
            }
        }
    }

    fn post(&self, s: &Stream, sends: &[P2pOp], _deadline: Instant) -> Done {
        for op in sends {
            let mail = P2pMessage { descriptor: op.descriptor.clone(), staged: self.stage(s, op.tensor)? };
            self.group.post(self.rank, op.peer, mail);
        }
        Ok(())
    }

    fn collect(&self, s: &Stream, _sends: &[P2pOp], receives: &[P2pOp], deadline: Instant) -> Done {
        for op in receives {
            let mail = self.group.collect(&self.job, op.peer, self.rank, deadline)?;
            if op.descriptor.conflict(self.rank, &mail.descriptor, op.peer) {
                return Err(OpError::Mismatch {
                    peer: op.peer,
                    mine: Box::new(op.descriptor.clone()),
                    theirs: Box::new(mail.descriptor),
                });
            }
            if let Some(staged) = &mail.staged {
                staged.deliver(s, 0, op.tensor)?;
                staged.was_read(s, &s.record()?);
            }
        }
        Ok(())
    }

    fn bytes(&self, _mine: &[u8], _deadline: Instant) -> Done<Vec<Vec<u8>>> {
        let table = self.state().table.take();
        Ok(table.map_or(Vec::new(), |t| t.iter().map(|b| b.bytes.clone()).collect()))
    }
}
