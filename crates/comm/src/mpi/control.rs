//! [`ControlTransport`] over MPI: a communicator of its own, so that small messages never meet tensors. Whoever waits
//! moves the mail; the thread that answers questions does so while the rank computes.

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

/// A communicator's address, which may be used by all threads (MPI_THREAD_MULTIPLE).
#[derive(Clone, Copy)]
pub(super) struct Comm(pub(super) Handle);
// SAFETY: MPI was started for multiple threads; a communicator is an opaque handle to it.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// Messages on their way. The memory belongs to MPI until the request is done, and it is never freed before.
#[derive(Default)]
struct Traffic {
    out: Vec<(Vec<u8>, Vec<Handle>)>,
    /// By sender, so that messages are delivered in the order sent.
    coming: Vec<VecDeque<(Vec<u8>, Option<Handle>)>>,
    /// What went wrong; the next sender hears of it.
    broken: Option<String>,
}
// SAFETY: requests are opaque handles that any thread may test; one does at a time (the lock).
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

    /// Sends `bytes` on another communicator without waiting, in pieces of `piece`; keeps them until they are out.
    pub(super) fn ship(&self, comm: Comm, to: usize, tag: i32, bytes: Vec<u8>, piece: usize) -> Result<()> {
        let mut traffic = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        let mut requests = Vec::new();
        let mut sent = Ok(());
        for part in bytes.chunks(piece) {
            // SAFETY: the bytes are kept, unmoved on the heap, until the request is done.
            match unsafe { self.mpi.send(comm.0, part, to, tag) } {
                Ok(request) => requests.push(request),
                Err(error) => sent = Err(error),
            }
        }
        traffic.out.push((bytes, requests));
        sent
    }

    /// Moves what can be moved.
    fn drive(&self) {
        // One that is driving already is enough.
        let Ok(mut traffic) = self.traffic.try_lock() else { return };
        if let Err(error) = self.drive_traffic(&mut traffic) {
            traffic.broken.get_or_insert(error.to_string());
        }
    }

    fn drive_traffic(&self, traffic: &mut Traffic) -> Result<()> {
        while let Some((from, bytes, request)) = self.mpi.next(self.comm.0)? {
            match traffic.coming.get_mut(from) {
                Some(queue) => queue.push_back((bytes, Some(request))),
                // Never: but its memory must then stay.
                None => std::mem::forget(bytes),
            }
        }
        for (from, queue) in traffic.coming.iter_mut().enumerate() {
            while let Some((_, request)) = queue.front_mut() {
                if let Some(r) = request {
                    // SAFETY: a live request of `next`.
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
                // SAFETY: a live request of `send`.
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

    /// A message is its topic and the rest.
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
        // The topic comes last: no byte has to move for it.
        bytes.extend(topic.0.to_le_bytes());
        let mut traffic = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(what) = &traffic.broken {
            return Err(Error::Backend { call: "a message over MPI".into(), what: what.clone() });
        }
        // SAFETY: the bytes are kept, unmoved on the heap, until the request is done.
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
        // Open MPI ends the whole job when a process dies, and does not tell before.
        false
    }

    fn close(&self) {
        // What is still going out has been received: its receiver has said goodbye after it. Complete it.
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
        // In a job that failed MPI may still look at what was not done.
        std::mem::forget(traffic);
    }
}

/// Gives the core away: others first, then time that grows up to a millisecond.
pub(super) fn pause(idle: u32) {
    match idle {
        0..32 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(u64::from((idle - 31) * 10).min(1000))),
    }
}
