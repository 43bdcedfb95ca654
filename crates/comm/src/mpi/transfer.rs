//! Transfers of tensor data: all requests are posted at once, then waited for without holding a core.

use super::control::{Comm, MpiControl};
use super::ffi::{Handle, Mpi};
use crate::backend::OpError;
use crate::control::{ControlTransport, Topic};
use crate::host_group::{Done, Transfer};
use crate::process_group::ProcessGroup;
use ferrotron_tensor::Tensor;
use std::sync::Arc;
use std::time::Instant;

/// MPI counts are 32-bit: longer messages are split into pieces of this many bytes.
const MAX_MESSAGE: usize = 1 << 30;

/// Transfers within one group.
pub(super) struct MpiTransfer {
    pub(super) mpi: &'static Mpi,
    pub(super) control: Arc<MpiControl>,
    /// The MPI communicator of tensor data.
    pub(super) comm: Comm,
    pub(super) group: ProcessGroup,
    /// Tag of collectives; sends use the next one. Messages of one tag between two ranks arrive in the order sent.
    pub(super) tag: i32,
}

impl Transfer for MpiTransfer {
    type Message = ();

    fn group(&self) -> &ProcessGroup {
        &self.group
    }

    fn run(
        &self,
        owners: &[&Tensor],
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
        deadline: Instant,
    ) -> Done {
        Tagged { transfer: self, tag: self.tag, owners }.run(sends, receives, deadline)
    }

    fn gather_descriptors(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>> {
        self.group.gather(Topic::collective(self.group.index), mine, deadline)
    }

    fn all_gather_bytes(&self, mine: &[u8], deadline: Instant) -> Done<Vec<Vec<u8>>> {
        self.group.all_gather_bytes(mine, deadline)
    }

    fn post(&self, to: usize, descriptor: Vec<u8>, bytes: Vec<u8>) -> Done {
        let to = self.group.ranks[to];
        self.control.send(to, Topic::p2p(self.group.index), descriptor)?;
        Ok(self.control.send_data(self.comm, to, self.tag + 1, bytes, MAX_MESSAGE)?)
    }

    fn next_message(&self, from: usize, deadline: Instant) -> Done<(Vec<u8>, ())> {
        let (rank, topic) = (self.group.ranks[from], Topic::p2p(self.group.index));
        let text = self.group.process.wait(
            deadline,
            || Ok(self.control.try_receive(rank, topic)),
            || vec![(from, rank)],
        )?;
        Ok((text, ()))
    }

    fn take_message(
        &self,
        from: usize,
        (): (),
        (owner, to): (&Tensor, &mut [u8]),
        deadline: Instant,
    ) -> Done {
        let owners = [owner];
        Tagged { transfer: self, tag: self.tag + 1, owners: &owners }.run(&[], &mut [(from, to)], deadline)
    }
}

/// A transfer of one tag.
struct Tagged<'a> {
    transfer: &'a MpiTransfer,
    tag: i32,
    /// The tensors that own the memory; leaked if the call fails while MPI still uses them.
    owners: &'a [&'a Tensor],
}

impl Tagged<'_> {
    fn run(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])], deadline: Instant) -> Done {
        let mut pending: Vec<(usize, Handle)> = Vec::with_capacity(sends.len() + receives.len());
        let done = self
            .post_requests(sends, receives, &mut pending)
            .and_then(|()| self.wait_all(&mut pending, deadline));
        if done.is_err() {
            // The job is over, but MPI may still read or write the memory, so it is never reused.
            self.owners.iter().for_each(|t| std::mem::forget((*t).clone()));
        }
        done
    }

    fn post_requests(
        &self,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
        pending: &mut Vec<(usize, Handle)>,
    ) -> Result<(), OpError> {
        let MpiTransfer { mpi, comm, group, .. } = self.transfer;
        let rank = |peer: usize| group.ranks[peer];
        for (from, bytes) in receives.iter_mut() {
            for piece in bytes.chunks_mut(MAX_MESSAGE) {
                let (at, len) = (piece.as_mut_ptr(), piece.len());
                // SAFETY: the memory is borrowed for the whole call, and leaked by `run` if that fails.
                let request = unsafe { mpi.receive(comm.0, at, len, rank(*from), self.tag)? };
                pending.push((*from, request));
            }
        }
        for (to, bytes) in sends {
            for piece in bytes.chunks(MAX_MESSAGE) {
                // SAFETY: as above; the borrow keeps others from writing it.
                let request = unsafe { mpi.send(comm.0, piece, rank(*to), self.tag)? };
                pending.push((*to, request));
            }
        }
        Ok(())
    }

    fn wait_all(&self, pending: &mut Vec<(usize, Handle)>, deadline: Instant) -> Result<(), OpError> {
        let pending = std::cell::RefCell::new(pending);
        self.transfer.group.process.wait(
            deadline,
            || {
                let mut pending = pending.borrow_mut();
                let mut i = 0;
                while i < pending.len() {
                    // SAFETY: live requests; each is removed when complete.
                    match unsafe { self.transfer.mpi.is_complete(&mut pending[i].1)? } {
                        true => drop(pending.swap_remove(i)),
                        false => i += 1,
                    }
                }
                Ok(pending.is_empty().then_some(()))
            },
            || {
                let mut peers: Vec<usize> = pending.borrow().iter().map(|(peer, _)| *peer).collect();
                peers.sort_unstable();
                peers.dedup();
                peers.into_iter().map(|p| (p, self.transfer.group.ranks[p])).collect()
            },
        )
    }
}
