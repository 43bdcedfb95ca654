//! Collectives and sends of one group of threads.

use super::staging::{StagedBuffer, Staging};
use super::thread_group::{Contribution, Contributions, P2pMessage, ThreadGroup};
use super::{SharedJob, reduce};
use crate::ReduceOp;
use crate::backend::{Collective, Completion, Descriptors, GroupBackend, OpError, P2pOp, SplitSizes};
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
    contributions: Option<Contributions>,
}

/// Reductions with fewer elements per rank are computed redundantly by every rank, instead of one part each and a
/// second rendezvous. Either way each element is summed in rank order, so the bits are the same.
const MIN_PER_RANK: usize = 512;

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

    fn rendezvous(&self, contribution: Contribution, deadline: Instant) -> Done<Contributions> {
        let round = {
            let mut state = self.state();
            state.round += 1;
            state.round - 1
        };
        self.group.all_gather(&self.job, self.rank, round, contribution, deadline)
    }

    /// Stages what this rank sends to the others.
    fn pack(&self, s: &Stream, collective: &Collective) -> Done<Option<Arc<StagedBuffer>>> {
        let sent = match collective {
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
        Ok(Some(Arc::new(self.staging.stage_copy(s, t)?)))
    }

    /// Reduces elements `start..start + out.numel()` of all contributions into `out`.
    fn reduce(
        &self,
        s: &Stream,
        contributions: &Contributions,
        start: usize,
        out: &Tensor,
        op: ReduceOp,
    ) -> Done {
        let sources = staged_buffers(contributions)
            .map(|p| p.view_on(s, start, out.numel()))
            .collect::<Done<Vec<Tensor>>>()?;
        reduce::reduce(s, &self.job.kernels, &sources, out, op)?;
        mark_read(s, contributions)
    }

    fn all_reduce(
        &self,
        s: &Stream,
        contributions: &Contributions,
        t: &Tensor,
        op: ReduceOp,
        deadline: Instant,
    ) -> Done {
        let (n, count) = (self.size(), t.numel());
        let t = t.view(&[count])?;
        if count < n * MIN_PER_RANK {
            return self.reduce(s, contributions, 0, &t, op);
        }
        // Every rank reduces its part and shares the result.
        let part = |r: usize| (count * r / n, count * (r + 1) / n);
        let (start, end) = part(self.rank);
        let staged = self
            .staging
            .stage(s, end - start, t.dtype(), |out| self.reduce(s, contributions, start, out, op))?;
        let contributions = self.rendezvous(
            Contribution { staged: Some(Arc::new(staged)), ..Contribution::default() },
            deadline,
        )?;
        for (r, staged) in staged_buffers(&contributions).enumerate() {
            let (start, end) = part(r);
            staged.copy_to(s, 0, &t.narrow(0, start, end - start)?)?;
        }
        mark_read(s, &contributions)
    }

    /// Assembles `all` from parts of `counts` elements (`None`: of equal size). Part r is taken from rank r's staged
    /// buffer at the offset given by `offset_in`; this rank's own part comes from `mine`, unless it is already in place.
    fn gather(
        &self,
        s: &Stream,
        contributions: &Contributions,
        (mine, all): (&Tensor, &Tensor),
        counts: Option<&[usize]>,
        offset_in: impl Fn(&Contribution) -> usize,
    ) -> Done {
        let flat = all.view(&[all.numel()])?;
        let mut at = 0;
        for (r, contribution) in contributions.iter().enumerate() {
            let count = counts.map_or(all.numel() / self.size(), |c| c[r]);
            let place = flat.narrow(0, at, count)?;
            at += count;
            match &contribution.staged {
                _ if count == 0 => {}
                _ if r == self.rank && place.same_memory(mine) => {}
                _ if r == self.rank => s.copy(mine, &place)?,
                Some(staged) => staged.copy_to(s, offset_in(contribution), &place)?,
                None => {
                    return Err(OpError::Backend { what: format!("rank {r} of the group sent no data") });
                }
            }
        }
        mark_read(s, contributions)
    }
}

/// The staged buffers among the contributions.
fn staged_buffers(contributions: &Contributions) -> impl Iterator<Item = &StagedBuffer> {
    contributions.iter().filter_map(|b| b.staged.as_deref())
}

/// Tells the owners that this rank has read their staged buffers.
fn mark_read(s: &Stream, contributions: &Contributions) -> Done {
    let done = s.record()?;
    staged_buffers(contributions).for_each(|p| p.mark_read(s, &done));
    Ok(())
}

impl GroupBackend for ThreadGroupBackend {
    fn exchange_descriptors(
        &self,
        s: Option<&Stream>,
        descriptor: &OpDescriptor,
        collective: &Collective,
        deadline: Instant,
    ) -> Done<Descriptors> {
        let staged = s.map_or(Ok(None), |s| self.pack(s, collective))?;
        let bytes =
            if let Collective::AllGatherBytes(mine) = collective { mine.to_vec() } else { Vec::new() };
        let contributions = self.rendezvous(
            Contribution { descriptor: Some(Arc::new(descriptor.clone())), staged, bytes },
            deadline,
        )?;
        let all = contributions.iter().filter_map(|b| b.descriptor.clone()).collect();
        self.state().contributions = Some(contributions);
        Ok(Descriptors::PerRank(all))
    }

    fn run(&self, s: &Stream, collective: &Collective, deadline: Instant) -> Done<Completion> {
        let Some(contributions) = self.state().contributions.take() else {
            return Err(OpError::Backend {
                what: "a collective was run before its descriptors were exchanged".to_string(),
            });
        };
        let done: Done = match collective {
            Collective::Barrier | Collective::AllGatherBytes(_) => Ok(()),
            Collective::AllReduce { t, op } => self.all_reduce(s, &contributions, t, *op, deadline),
            Collective::ReduceScatter { mine, op, .. } => {
                let mine = mine.view(&[mine.numel()])?;
                self.reduce(s, &contributions, self.rank * mine.numel(), &mine, *op)
            }
            Collective::AllGather { mine, all, counts } => {
                self.gather(s, &contributions, (mine, all), *counts, |_| 0)
            }
            Collective::AllToAll { from, to, splits: None } => {
                let part = from.numel() / self.size();
                let mine = from.view(&[from.numel()])?.narrow(0, self.rank * part, part)?;
                self.gather(s, &contributions, (&mine, to), None, |_| self.rank * part)
            }
            Collective::AllToAll { from, to, splits: Some(SplitSizes { sent, received }) } => {
                let start = sent[..self.rank].iter().sum();
                let mine = from.view(&[from.numel()])?.narrow(0, start, sent[self.rank])?;
                self.gather(s, &contributions, (&mine, to), Some(received), |b| {
                    match b.descriptor.as_deref() {
                        Some(OpDescriptor { detail: Detail::Pairs { sent, .. }, .. }) => {
                            sent[..self.rank].iter().sum::<u64>() as usize
                        }
                        _ => 0,
                    }
                })
            }
            Collective::Broadcast { t, root } => {
                for staged in staged_buffers(&contributions).filter(|_| *root != self.rank) {
                    staged.copy_to(s, 0, t)?;
                }
                mark_read(s, &contributions)
            }
        };
        done.map(|()| Completion::Done)
    }

    fn post_sends(&self, s: &Stream, sends: &[P2pOp], _deadline: Instant) -> Done {
        for op in sends {
            let message = P2pMessage { descriptor: op.descriptor.clone(), staged: self.stage(s, op.tensor)? };
            self.group.send(self.rank, op.peer, message);
        }
        Ok(())
    }

    fn complete_receives(
        &self,
        s: &Stream,
        _sends: &[P2pOp],
        receives: &[P2pOp],
        deadline: Instant,
    ) -> Done<Completion> {
        for op in receives {
            let message = self.group.receive(&self.job, op.peer, self.rank, deadline)?;
            if op.descriptor.conflicts_with(self.rank, &message.descriptor, op.peer) {
                return Err(OpError::Mismatch {
                    peer: op.peer,
                    mine: Box::new(op.descriptor.clone()),
                    theirs: Box::new(message.descriptor),
                });
            }
            if let Some(staged) = &message.staged {
                staged.copy_to(s, 0, op.tensor)?;
                staged.mark_read(s, &s.record()?);
            }
        }
        Ok(Completion::Done)
    }

    fn all_gather_bytes(&self, _mine: &[u8], _deadline: Instant) -> Done<Vec<Vec<u8>>> {
        let contributions = self.state().contributions.take();
        Ok(contributions.map_or(Vec::new(), |t| t.iter().map(|b| b.bytes.clone()).collect()))
    }
}
