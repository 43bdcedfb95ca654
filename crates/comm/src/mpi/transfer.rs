//! Transfers of tensor data: all requests are posted at once, then waited for without holding a core.

use super::control::Comm;
use super::ffi::{Handle, Mpi};
use crate::backend::OpError;
use crate::process_group::ProcessGroup;
use ferrotron_tensor::Tensor;
use std::time::Instant;

/// MPI counts are 32-bit: longer messages are split into pieces of this many bytes.
pub(super) const MAX_MESSAGE: usize = 1 << 30;

/// Transfers within one group.
pub(super) struct GroupTransfer<'a> {
    pub(super) mpi: &'static Mpi,
    pub(super) comm: Comm,
    pub(super) group: &'a ProcessGroup,
    /// Messages of one tag between two ranks arrive in the order sent.
    pub(super) tag: i32,
    /// The tensors that own the memory; leaked if the call fails while MPI still uses them.
    pub(super) owners: &'a [&'a Tensor],
}

impl GroupTransfer<'_> {
    /// Sends and receives everything, by rank of the group and never to this rank itself, and returns when all is
    /// complete.
    pub(super) fn run(
        &self,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
        deadline: Instant,
    ) -> Result<(), OpError> {
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
        let rank = |peer: usize| self.group.ranks[peer];
        for (from, bytes) in receives.iter_mut() {
            for piece in bytes.chunks_mut(MAX_MESSAGE) {
                let (at, len) = (piece.as_mut_ptr(), piece.len());
                // SAFETY: the memory is borrowed for the whole call, and leaked by `run` if that fails.
                let request = unsafe { self.mpi.receive(self.comm.0, at, len, rank(*from), self.tag)? };
                pending.push((*from, request));
            }
        }
        for (to, bytes) in sends {
            for piece in bytes.chunks(MAX_MESSAGE) {
                // SAFETY: as above; the borrow keeps others from writing it.
                let request = unsafe { self.mpi.send(self.comm.0, piece, rank(*to), self.tag)? };
                pending.push((*to, request));
            }
        }
        Ok(())
    }

    fn wait_all(&self, pending: &mut Vec<(usize, Handle)>, deadline: Instant) -> Result<(), OpError> {
        let pending = std::cell::RefCell::new(pending);
        self.group.process.wait(
            deadline,
            || {
                let mut pending = pending.borrow_mut();
                let mut i = 0;
                while i < pending.len() {
                    // SAFETY: live requests; each is removed when complete.
                    match unsafe { self.mpi.is_complete(&mut pending[i].1)? } {
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
                peers.into_iter().map(|p| (p, self.group.ranks[p])).collect()
            },
        )
    }
}
