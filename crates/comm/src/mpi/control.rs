//! [`ControlTransport`] over MPI, on its own communicator, so that control messages are never mixed up with tensors.
//! Whoever waits drives the progress of messages; the background thread does so while the rank computes.

use super::ffi::{Handle, Mpi};
use crate::control::{ControlTransport, Mailbox, Topic};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(super) struct MpiControl {
    mpi: &'static Mpi,
    comm: Comm,
    rank: usize,
    size: usize,
    pending: Mutex<Pending>,
    arrived: Mutex<Mailbox>,
    /// The first rank that sent more than may wait.
    broken: Mutex<Option<(usize, String)>>,
    frames: AtomicU64,
}

/// A communicator handle, usable from all threads (MPI_THREAD_MULTIPLE).
#[derive(Clone, Copy)]
pub(super) struct Comm(pub(super) Handle);
// SAFETY: MPI was started with MPI_THREAD_MULTIPLE; a communicator is an opaque handle.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// Pending messages. Their memory belongs to MPI until the request completes and is never freed before.
#[derive(Default)]
struct Pending {
    outgoing: Vec<(Vec<u8>, Vec<Handle>)>,
    /// By sender, so that messages are delivered in the order sent.
    incoming: Vec<VecDeque<(Vec<u8>, Option<Handle>)>>,
    /// A transport error, returned to the next sender.
    error: Option<String>,
}
// SAFETY: requests are opaque handles that any thread may test; the lock admits one at a time.
unsafe impl Send for Pending {}

impl MpiControl {
    pub(super) fn new(mpi: &'static Mpi, comm: Comm, rank: usize, size: usize) -> MpiControl {
        let incoming = (0..size).map(|_| VecDeque::new()).collect();
        let pending = Mutex::new(Pending { incoming, ..Pending::default() });
        let (arrived, broken, frames) = Default::default();
        MpiControl { mpi, comm, rank, size, pending, arrived, broken, frames }
    }

    fn arrived(&self) -> MutexGuard<'_, Mailbox> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends `bytes` on another communicator without waiting, in messages of `piece` bytes, and keeps them until
    /// sent.
    pub(super) fn send_data(
        &self,
        comm: Comm,
        to: usize,
        tag: i32,
        bytes: Vec<u8>,
        piece: usize,
    ) -> Result<()> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut requests = Vec::new();
        let mut sent = Ok(());
        for part in bytes.chunks(piece) {
            // SAFETY: the bytes stay unmoved on the heap until the request completes.
            match unsafe { self.mpi.send(comm.0, part, to, tag) } {
                Ok(request) => requests.push(request),
                Err(error) => sent = Err(error),
            }
        }
        pending.outgoing.push((bytes, requests));
        sent
    }

    /// Makes progress on pending messages.
    fn make_progress(&self) {
        // Another thread is making progress already.
        let Ok(mut pending) = self.pending.try_lock() else { return };
        if let Err(error) = self.progress_pending(&mut pending) {
            pending.error.get_or_insert(error.to_string());
        }
    }

    fn progress_pending(&self, pending: &mut Pending) -> Result<()> {
        while let Some((from, bytes, request)) = self.mpi.next(self.comm.0)? {
            match pending.incoming.get_mut(from) {
                Some(queue) => queue.push_back((bytes, Some(request))),
                // Cannot happen; the request would still write to this memory, so keep it.
                None => std::mem::forget(bytes),
            }
        }
        for (from, queue) in pending.incoming.iter_mut().enumerate() {
            while let Some((_, request)) = queue.front_mut() {
                if let Some(r) = request {
                    // SAFETY: a live request from `next`.
                    if !unsafe { self.mpi.is_complete(r)? } {
                        break;
                    }
                    *request = None;
                }
                if let Some((bytes, _)) = queue.pop_front() {
                    self.deliver(from, bytes);
                }
            }
        }
        let mut i = 0;
        while i < pending.outgoing.len() {
            let requests = &mut pending.outgoing[i].1;
            while let Some(last) = requests.last_mut() {
                // SAFETY: a live request from `send`.
                if !unsafe { self.mpi.is_complete(last)? } {
                    break;
                }
                requests.pop();
            }
            match requests.is_empty() {
                true => drop(pending.outgoing.swap_remove(i)),
                false => i += 1,
            }
        }
        Ok(())
    }

    /// Delivers a message: payload, then the topic in the last 8 bytes.
    fn deliver(&self, from: usize, mut bytes: Vec<u8>) {
        if let Some(head) = bytes.last_chunk::<8>() {
            let topic = Topic(u64::from_le_bytes(*head));
            bytes.truncate(bytes.len() - 8);
            if let Err(what) = self.arrived().put(from, topic, bytes) {
                self.broken.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((from, what));
            }
        }
    }
}

impl ControlTransport for MpiControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn send(&self, to: usize, topic: Topic, mut bytes: Vec<u8>) -> Result<()> {
        if to == self.rank {
            let put = self.arrived().put(to, topic, bytes);
            return put.map_err(|what| Error::Backend { call: "MPI control message".into(), what });
        }
        // The topic goes last, so that the payload need not be moved.
        bytes.extend(topic.0.to_le_bytes());
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(what) = &pending.error {
            return Err(Error::Backend { call: "MPI control message".into(), what: what.clone() });
        }
        // SAFETY: the bytes stay unmoved on the heap until the request completes.
        let request = unsafe { self.mpi.send(self.comm.0, &bytes, to, 0)? };
        pending.outgoing.push((bytes, vec![request]));
        self.frames.fetch_add(1, Relaxed);
        Ok(())
    }

    fn try_receive(&self, from: usize, topic: Topic) -> Option<Vec<u8>> {
        if let Some(bytes) = self.arrived().take(from, topic) {
            return Some(bytes);
        }
        self.make_progress();
        self.arrived().take(from, topic)
    }

    fn back_off(&self, idle: u32) {
        back_off(idle);
    }

    fn has_exited(&self, _: usize) -> bool {
        // Open MPI ends the whole job when a process dies, without telling the others first.
        false
    }

    fn broken(&self) -> Option<(usize, Option<String>)> {
        let broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone();
        broken.map(|(rank, what)| (rank, Some(what)))
    }

    fn frames(&self) -> u64 {
        self.frames.load(Relaxed)
    }

    fn close(&self) {
        // The receiver has said goodbye after everything still pending, so it has been received; complete the
        // requests.
        for idle in 0..1000 {
            self.make_progress();
            if self.pending.lock().unwrap_or_else(PoisonError::into_inner).outgoing.is_empty() {
                return self.mpi.finalize();
            }
            back_off(idle);
        }
        self.mpi.abort();
    }

    fn abort(&self) {
        self.mpi.abort();
    }
}

impl Drop for MpiControl {
    fn drop(&mut self) {
        let pending = std::mem::take(self.pending.get_mut().unwrap_or_else(PoisonError::into_inner));
        // In a failed job MPI may still access memory of incomplete requests.
        std::mem::forget(pending);
    }
}

/// Backs off: yields the core first, then sleeps for up to a millisecond.
pub(super) fn back_off(idle: u32) {
    match idle {
        0..32 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(u64::from((idle - 31) * 10).min(1000))),
    }
}
