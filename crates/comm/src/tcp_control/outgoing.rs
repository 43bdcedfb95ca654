//! Frames on their way to one peer: a queue and the thread that writes it, so that no sender waits for a peer that
//! does not read, as a stopped process does.

use super::frames::Frame;
use crate::control::MAX_WAITING;
use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time after which the kernel gives up a connection to a host that answers nothing.
pub(super) const DEAD_HOST: Duration = Duration::from_secs(5);
/// Bytes that always fit into the buffers of a peer that does not read.
const MAX_UNHEARD: usize = 128 << 10;

/// The queue to one peer.
pub(super) struct Outgoing {
    stream: TcpStream,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Bytes written since the peer was heard last.
    unheard: AtomicUsize,
}

/// Lets the kernel give up the connection when data is not acknowledged for [`DEAD_HOST`], or not. It must not while a
/// peer that was stopped may have full buffers: to the kernel that looks the same.
pub(super) fn notice_dead_host(stream: &TcpStream, on: bool) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::net::sockopt::set_tcp_user_timeout(stream, if on { DEAD_HOST.as_millis() as u32 } else { 0 })?;
    #[cfg(not(target_os = "linux"))]
    let _ = (stream, on);
    Ok(())
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<(usize, Vec<u8>)>,
    /// Bytes queued, by the rank they come from.
    waiting: HashMap<usize, usize>,
    /// A frame is being written.
    writing: bool,
    closed: bool,
}

impl Outgoing {
    pub(super) fn new(stream: TcpStream) -> Outgoing {
        Outgoing { stream, queue: Mutex::default(), changed: Condvar::new(), unheard: AtomicUsize::new(0) }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a frame. Fails if too much of its sender is queued already.
    pub(super) fn push(&self, frame: &Frame) -> Result<(), String> {
        let mut queue = self.queue();
        if queue.closed {
            // The peer has exited; whoever waits for it notices.
            return Ok(());
        }
        let bytes = frame.encode();
        let waiting = queue.waiting.entry(frame.from).or_default();
        *waiting += bytes.len();
        if *waiting > MAX_WAITING {
            return Err(format!(
                "more than {} MiB of its messages to rank {} were waiting",
                MAX_WAITING >> 20,
                frame.to
            ));
        }
        queue.frames.push_back((frame.from, bytes));
        self.changed.notify_all();
        Ok(())
    }

    /// The peer has sent something, so it runs, and reads what was written.
    pub(super) fn heard(&self) {
        if self.unheard.swap(0, Ordering::SeqCst) > MAX_UNHEARD {
            let _ = notice_dead_host(&self.stream, true);
        }
    }

    /// Writes frames until the connection or the queue is closed.
    pub(super) fn write(&self) {
        let mut queue = self.queue();
        while !queue.closed {
            let Some((from, bytes)) = queue.frames.pop_front() else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.writing = true;
            drop(queue);
            let before = self.unheard.fetch_add(bytes.len(), Ordering::SeqCst);
            if before <= MAX_UNHEARD && before + bytes.len() > MAX_UNHEARD {
                let _ = notice_dead_host(&self.stream, false);
            }
            let written = (&self.stream).write_all(&bytes);
            queue = self.queue();
            queue.writing = false;
            if let Some(waiting) = queue.waiting.get_mut(&from) {
                *waiting = waiting.saturating_sub(bytes.len());
            }
            if written.is_err() {
                break;
            }
            self.changed.notify_all();
        }
        queue.closed = true;
        queue.frames = VecDeque::new();
        drop(queue);
        // Half a frame may have been sent, so nothing valid can follow on this connection.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.changed.notify_all();
    }

    /// Waits until all frames are written, at most until `deadline`, and closes the connection.
    pub(super) fn finish(&self, deadline: Instant) {
        let mut queue = self.queue();
        while !queue.closed && (queue.writing || !queue.frames.is_empty()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let wait = left.min(Duration::from_millis(50));
            queue = self.changed.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(queue);
        self.close();
    }

    /// Closes the connection at once.
    pub(super) fn close(&self) {
        self.queue().closed = true;
        let _ = self.stream.shutdown(Shutdown::Both);
        self.changed.notify_all();
    }
}
