//! [`ControlTransport`] over TCP: rank 0 listens, every other rank keeps one connection to it, and it forwards
//! messages. Carries host data only (NCCL's unique id, op descriptors, metadata), never tensors.
//!
//! A connection is that of a rank which has proven the job's secret ([`crate::rendezvous`]). It still speaks for that
//! rank only, and what it may send is bounded: see [`frames`] and [`crate::control::Mailbox`].

pub(crate) mod frames;
mod outgoing;
#[cfg(test)]
mod tests;

use crate::control::{ControlTransport, Mailbox, Topic};
use crate::launch_env::LaunchEnv;
use crate::{Error, Result, rendezvous};
use frames::{EXITED, End, Frame, MAX_PAYLOAD};
use outgoing::Outgoing;
use std::collections::{BTreeSet, HashMap};
use std::io::BufReader;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time to write what is queued, and on rank 0 for the others to leave, before the connections are closed.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// One rank's connections.
pub(crate) struct TcpControl {
    rank: usize,
    size: usize,
    connections: Arc<Connections>,
}

struct Connections {
    here: usize,
    size: usize,
    /// Connections by rank: all of them on rank 0, only the one to rank 0 elsewhere.
    out: HashMap<usize, Outgoing>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    /// Frames queued to other ranks.
    frames: AtomicU64,
}

#[derive(Default)]
struct Inbox {
    boxes: Mailbox,
    exited: BTreeSet<usize>,
    /// The first breach of the protocol.
    broken: Option<(usize, String)>,
}

impl TcpControl {
    /// Connects the ranks of `job`. Fails after `timeout`.
    pub(crate) fn connect(job: &LaunchEnv, timeout: Duration) -> Result<TcpControl> {
        let connected = rendezvous::meet(job, Instant::now() + timeout)?;
        TcpControl::over(job.rank, job.size, connected)
    }

    /// The transport of a job of one rank.
    pub(crate) fn solo() -> Result<TcpControl> {
        TcpControl::over(0, 1, HashMap::new())
    }

    /// The transport of a rank over the connections it has.
    pub(crate) fn over(rank: usize, size: usize, connected: HashMap<usize, TcpStream>) -> Result<TcpControl> {
        let failed = |e: std::io::Error| Error::Launch(format!("a connection between ranks: {e}"));
        let (mut out, mut readers) = (HashMap::new(), Vec::new());
        for (peer, stream) in connected {
            prepare(&stream).map_err(failed)?;
            readers.push((peer, stream.try_clone().map_err(failed)?));
            out.insert(peer, Outgoing::new(stream));
        }
        let (inbox, arrived, frames) = Default::default();
        let connections = Arc::new(Connections { here: rank, size, out, inbox, arrived, frames });
        for (peer, stream) in readers {
            let reading = connections.clone();
            let spawn = |name: &str| std::thread::Builder::new().name(format!("{name} rank {peer}"));
            spawn("tcp from").spawn(move || reading.read(peer, stream)).map_err(failed)?;
            let writing = connections.clone();
            let write = move || writing.out.get(&peer).into_iter().for_each(Outgoing::write);
            spawn("tcp to").spawn(write).map_err(failed)?;
        }
        Ok(TcpControl { rank, size, connections })
    }
}

/// Sets up a connection for the time after the handshake: unlimited, but noticing within [`outgoing::DEAD_HOST`] a host
/// that has died. A stopped process is no such host: its kernel answers.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    // For data that is on its way when the host dies; keepalive is silent then.
    outgoing::notice_dead_host(stream, true)
}

impl ControlTransport for TcpControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn send(&self, to: usize, topic: Topic, payload: Vec<u8>) -> Result<()> {
        if payload.len() > MAX_PAYLOAD || to >= self.size {
            let what = format!("a message of {} bytes to rank {to} cannot be sent", payload.len());
            return Err(Error::Backend { call: "TCP".into(), what });
        }
        self.connections.forward(Frame { from: self.rank, to, topic, payload });
        Ok(())
    }

    fn try_receive(&self, from: usize, topic: Topic) -> Option<Vec<u8>> {
        self.connections.inbox().boxes.take(from, topic)
    }

    fn back_off(&self, idle: u32) {
        let inbox = self.connections.inbox();
        // The first waits are short, because a message may have arrived between the check and the wait.
        let wait = Duration::from_micros(200 << idle.min(6));
        drop(self.connections.arrived.wait_timeout(inbox, wait));
    }

    fn has_exited(&self, rank: usize) -> bool {
        self.connections.inbox().exited.contains(&rank)
    }

    fn broken(&self) -> Option<(usize, Option<String>)> {
        let inbox = self.connections.inbox();
        // Without rank 0 nothing reaches anybody.
        let lost = (self.rank != 0 && inbox.exited.contains(&0)).then_some((0, None));
        inbox.broken.clone().map(|(rank, what)| (rank, Some(what))).or(lost)
    }

    fn relay(&self) -> Option<usize> {
        (self.rank != 0).then_some(0)
    }

    fn frames(&self) -> u64 {
        self.connections.frames.load(Relaxed)
    }

    fn close(&self) {}

    fn abort(&self) {
        self.connections.out.values().for_each(Outgoing::close);
    }
}

impl Drop for TcpControl {
    fn drop(&mut self) {
        let deadline = Instant::now() + LAST_WORDS;
        // Other ranks may still talk through rank 0, so it closes last, within a time limit.
        if self.rank == 0 {
            let mut inbox = self.connections.inbox();
            while inbox.exited.len() + 1 < self.size && Instant::now() < deadline {
                let wait = Duration::from_millis(50);
                inbox = self
                    .connections
                    .arrived
                    .wait_timeout(inbox, wait)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
        self.connections.out.values().for_each(|out| out.finish(deadline));
    }
}

impl Connections {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers a frame here, or queues it to its next hop.
    fn forward(&self, frame: Frame) {
        let from = frame.from;
        let done = if frame.to == self.here {
            let mut inbox = self.inbox();
            match frame.topic {
                EXITED => {
                    inbox.exited.insert(from);
                    Ok(())
                }
                topic => inbox.boxes.put(from, topic, frame.payload),
            }
        } else {
            // Only rank 0 is connected to everyone.
            match self.out.get(&frame.to).or_else(|| self.out.get(&0)) {
                Some(next) => {
                    self.frames.fetch_add(1, Relaxed);
                    next.push(&frame)
                }
                None => Ok(()),
            }
        };
        if let Err(what) = done {
            self.break_off(from, what);
        }
        self.arrived.notify_all();
    }

    /// Records that `rank` broke the protocol, and reads no more from it.
    fn break_off(&self, rank: usize, what: String) {
        self.inbox().broken.get_or_insert((rank, what));
        if let Some(out) = self.out.get(&rank) {
            out.close();
        }
        self.arrived.notify_all();
    }

    /// Reads frames from `peer` until the connection closes.
    fn read(&self, peer: usize, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        let end = End { here: self.here, peer, size: self.size };
        while let Ok(frame) = Frame::read(&mut stream, end) {
            self.out.get(&peer).into_iter().for_each(Outgoing::heard);
            match frame {
                Ok(frame) => self.forward(frame),
                Err(what) => {
                    self.break_off(peer, what);
                    break;
                }
            }
        }
        if let Some(out) = self.out.get(&peer) {
            out.close();
        }
        self.inbox().exited.insert(peer);
        self.arrived.notify_all();
        if self.here == 0 {
            for to in self.out.keys().filter(|r| **r != peer) {
                self.forward(Frame { from: peer, to: *to, topic: EXITED, payload: Vec::new() });
            }
        }
    }
}
