//! [`ControlTransport`] over MPI, on its own communicator, so that control messages are never mixed up with tensors.
//! Whoever waits drives the progress of messages; the background thread does so while the rank computes.

use super::ffi::{Handle, Mpi};
use crate::control::{ControlTransport, Mailbox, Topic};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(super) struct MpiControl {
    mpi: &'static Mpi,
    comm: Comm,
    rank: usize,
    size: usize,
    traffic: Mutex<Traffic>,
    arrived: Mutex<Mailbox>,
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
struct Traffic {
    out: Vec<(Vec<u8>, Vec<Handle>)>,
    /// By sender, so that messages are delivered in the order sent.
    coming: Vec<VecDeque<(Vec<u8>, Option<Handle>)>>,
    /// A transport error, returned to the next sender.
    broken: Option<String>,
}
// SAFETY: requests are opaque handles that any thread may test; the lock admits one at a time.
unsafe impl Send for Traffic {}

impl MpiControl {
    pub(super) fn new(mpi: &'static Mpi, comm: Comm, rank: usize, size: usize) -> MpiControl {
        let coming = (0..size).map(|_| VecDeque::new()).collect();
        let traffic = Mutex::new(Traffic { coming, ..Traffic::default() });
        MpiControl { mpi, comm, rank, size, traffic, arrived: Mutex::default() }
    }

    fn arrived(&self) -> MutexGuard<'_, Mailbox> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends `bytes` on another communicator without waiting, in messages of `piece` bytes, and keeps them until
    /// sent.
    pub(super) fn ship(&self, comm: Comm, to: usize, tag: i32, bytes: Vec<u8>, piece: usize) -> Result<()> {
        let mut traffic = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        let mut requests = Vec::new();
        let mut sent = Ok(());
        for part in bytes.chunks(piece) {
            // SAFETY: the bytes stay unmoved on the heap until the request completes.
            match unsafe { self.mpi.send(comm.0, part, to, tag) } {
                Ok(request) => requests.push(request),
                Err(error) => sent = Err(error),
            }
        }
        traffic.out.push((bytes, requests));
        sent
    }

    /// Makes progress on pending messages.
    fn drive(&self) {
        // Another thread is making progress already.
        let Ok(mut traffic) = self.traffic.try_lock() else { return };
        if let Err(error) = self.drive_traffic(&mut traffic) {
            traffic.broken.get_or_insert(error.to_string());
        }
    }

    fn drive_traffic(&self, traffic: &mut Traffic) -> Result<()> {
        while let Some((from, bytes, request)) = self.mpi.next(self.comm.0)? {
            match traffic.coming.get_mut(from) {
                Some(queue) => queue.push_back((bytes, Some(request))),
                // Cannot happen; the request would still write to this memory, so keep it.
                None => std::mem::forget(bytes),
            }
        }
        for (from, queue) in traffic.coming.iter_mut().enumerate() {
            while let Some((_, request)) = queue.front_mut() {
                if let Some(r) = request {
                    // SAFETY: a live request from `next`.
                    if !unsafe { self.mpi.done(r)? } {
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
        while i < traffic.out.len() {
            let requests = &mut traffic.out[i].1;
            while let Some(last) = requests.last_mut() {
                // SAFETY: a live request from `send`.
                if !unsafe { self.mpi.done(last)? } {
                    break;
                }
                requests.pop();
            }
            match requests.is_empty() {
                true => drop(traffic.out.swap_remove(i)),
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
            self.arrived().put(from, topic, bytes);
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
            self.arrived().put(to, topic, bytes);
            return Ok(());
        }
        // The topic goes last, so that the payload need not be moved.
        bytes.extend(topic.0.to_le_bytes());
        let mut traffic = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(what) = &traffic.broken {
            return Err(Error::Backend { call: "a message over MPI".into(), what: what.clone() });
        }
        // SAFETY: the bytes stay unmoved on the heap until the request completes.
        let request = unsafe { self.mpi.send(self.comm.0, &bytes, to, 0)? };
        traffic.out.push((bytes, vec![request]));
        Ok(())
    }

    fn take(&self, from: usize, topic: Topic) -> Option<Vec<u8>> {
        if let Some(bytes) = self.arrived().take(from, topic) {
            return Some(bytes);
        }
        self.drive();
        self.arrived().take(from, topic)
    }

    fn pause(&self, idle: u32) {
        pause(idle);
    }

    fn gone(&self, _: usize) -> bool {
        // Open MPI ends the whole job when a process dies, without telling the others first.
        false
    }

    fn close(&self) {
        // The receiver has said goodbye after everything still pending, so it has been received; complete the
        // requests.
        for idle in 0..1000 {
            self.drive();
            if self.traffic.lock().unwrap_or_else(PoisonError::into_inner).out.is_empty() {
                return self.mpi.finalize();
            }
            pause(idle);
        }
        self.mpi.abort();
    }

    fn abort(&self) {
        self.mpi.abort();
    }
}

impl Drop for MpiControl {
    fn drop(&mut self) {
        let traffic = std::mem::take(self.traffic.get_mut().unwrap_or_else(PoisonError::into_inner));
        // In a failed job MPI may still access memory of incomplete requests.
        std::mem::forget(traffic);
    }
}

/// Backs off: yields the core first, then sleeps for up to a millisecond.
pub(super) fn pause(idle: u32) {
    match idle {
        0..32 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(u64::from((idle - 31) * 10).min(1000))),
    }
}
