//! [`ControlTransport`] over TCP: rank 0 listens, every other rank keeps one connection to it, and it forwards
//! messages. Carries host data only (NCCL's unique id, op descriptors, metadata), never tensors.

use crate::control::{ControlTransport, Mailbox, Topic};
use crate::{Error, Result};
use std::collections::{BTreeSet, HashMap};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Start of a handshake; connections without it are closed.
const MAGIC: &[u8; 8] = b"ferro-01";
/// Largest message: the network must not decide how much memory is allocated.
const MAX_MESSAGE_BYTES: usize = 1 << 28;
/// Timeout of a handshake, and of a write to a peer.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Topic on which rank 0 announces that a rank has exited.
const EXITED: Topic = Topic(u64::MAX);

/// One rank's connections.
pub(crate) struct TcpControl {
    rank: usize,
    size: usize,
    connections: Arc<Connections>,
}

struct Connections {
    /// Connections by rank: all of them on rank 0, only the one to rank 0 elsewhere.
    out: HashMap<usize, Mutex<TcpStream>>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

#[derive(Default)]
struct Inbox {
    boxes: Mailbox,
    exited: BTreeSet<usize>,
}

impl TcpControl {
    /// Connects all ranks at `rendezvous` (`host:port`), where rank 0 listens. Fails after `timeout`.
    pub(crate) fn connect(
        rank: usize,
        size: usize,
        rendezvous: &str,
        timeout: Duration,
    ) -> Result<TcpControl> {
        let deadline = Instant::now() + timeout;
        let out = match (rank, size) {
            (_, 1) => HashMap::new(),
            (0, _) => accept_ranks(size, rendezvous, deadline)?,
            _ => HashMap::from([(0, connect_to_rank0(rank, size, rendezvous, deadline)?)]),
        };
        let mut readers = Vec::new();
        for (peer, stream) in &out {
            let _ = stream.set_nodelay(true);
            let copy =
                stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT)));
            readers.push((*peer, copy.and_then(|()| stream.try_clone()).map_err(|e| failed(rendezvous, e))?));
        }
        let out = out.into_iter().map(|(peer, stream)| (peer, Mutex::new(stream))).collect();
        let connections = Arc::new(Connections { out, inbox: Mutex::default(), arrived: Condvar::new() });
        for (peer, stream) in readers {
            let connections = connections.clone();
            let name = format!("tcp from rank {peer}");
            let spawned =
                std::thread::Builder::new().name(name).spawn(move || connections.read(rank, peer, stream));
            spawned.map_err(|e| failed(rendezvous, e))?;
        }
        Ok(TcpControl { rank, size, connections })
    }
}

impl ControlTransport for TcpControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn send(&self, to: usize, topic: Topic, bytes: Vec<u8>) -> Result<()> {
        if bytes.len() > MAX_MESSAGE_BYTES {
            let what = format!("a message of {} bytes exceeds the limit", bytes.len());
            return Err(Error::Backend { call: "TCP".into(), what });
        }
        self.connections.forward(self.rank, self.rank, to, topic, bytes);
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

    fn close(&self) {}

    fn abort(&self) {
        self.connections.close_all();
    }
}

impl Drop for TcpControl {
    fn drop(&mut self) {
        // Other ranks may still talk through rank 0, so it closes last, within a time limit.
        if self.rank == 0 {
            let deadline = Instant::now() + Duration::from_secs(5);
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
        self.connections.close_all();
    }
}

impl Connections {
    fn close_all(&self) {
        for stream in self.out.values() {
            let _ = stream.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers a message here, or forwards it. If that fails, the message is dropped and its next hop marked as
    /// exited.
    fn forward(&self, here: usize, from: usize, to: usize, topic: Topic, bytes: Vec<u8>) {
        if to == here {
            let mut inbox = self.inbox();
            if topic == EXITED {
                inbox.exited.insert(from);
            } else {
                inbox.boxes.put(from, topic, bytes);
            }
            return self.arrived.notify_all();
        }
        // Only rank 0 is connected to everyone.
        let Some((next, stream)) =
            self.out.get(&to).map(|s| (to, s)).or_else(|| Some((0, self.out.get(&0)?)))
        else {
            return;
        };
        let mut frame = Vec::with_capacity(20 + bytes.len());
        frame.extend([from as u32, to as u32, bytes.len() as u32].iter().flat_map(|x| x.to_le_bytes()));
        frame.extend(topic.0.to_le_bytes());
        frame.extend(&bytes);
        let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
        if stream.write_all(&frame).is_err() {
            // Half a frame may have been sent, so nothing valid can follow on this connection.
            let _ = stream.shutdown(Shutdown::Both);
            drop(stream);
            self.inbox().exited.insert(next);
            self.arrived.notify_all();
        }
    }

    /// Reads messages from `peer` until the connection closes.
    fn read(&self, here: usize, peer: usize, mut stream: TcpStream) {
        let mut head = [0u8; 20];
        while stream.read_exact(&mut head).is_ok() {
            let word =
                |i: usize| u32::from_le_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]) as usize;
            let (from, to, len) = (word(0), word(4), word(8));
            let topic = Topic(word(12) as u64 | (word(16) as u64) << 32);
            let mut bytes = vec![0; len.min(MAX_MESSAGE_BYTES)];
            if len > MAX_MESSAGE_BYTES || stream.read_exact(&mut bytes).is_err() {
                break;
            }
            self.forward(here, from, to, topic, bytes);
        }
        self.inbox().exited.insert(peer);
        self.arrived.notify_all();
        if here == 0 {
            self.out
                .keys()
                .filter(|r| **r != peer)
                .for_each(|r| self.forward(0, peer, *r, EXITED, Vec::new()));
        }
    }
}

fn failed(rendezvous: &str, error: std::io::Error) -> Error {
    Error::Launch(format!("TCP at {rendezvous}: {error}"))
}

/// Rank 0: accepts every other rank's handshake, then answers all of them.
fn accept_ranks(size: usize, rendezvous: &str, deadline: Instant) -> Result<HashMap<usize, TcpStream>> {
    let address = resolve(rendezvous)?;
    // Listen on all addresses, since any of them may be the one the others use, unless the address is loopback.
    let any: std::net::IpAddr = match address.is_ipv4() {
        true => std::net::Ipv4Addr::UNSPECIFIED.into(),
        false => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let host = if address.ip().is_loopback() { address.ip() } else { any };
    let listener = TcpListener::bind((host, address.port())).map_err(|e| {
        let port = address.port();
        Error::Launch(format!(
            "rank 0 cannot listen on port {port}: {e}; set another MASTER_PORT on all ranks"
        ))
    })?;
    listener.set_nonblocking(true).map_err(|e| failed(rendezvous, e))?;
    let mut connected: HashMap<usize, TcpStream> = HashMap::new();
    let error = loop {
        if connected.len() + 1 == size {
            break None;
        }
        match listener.accept() {
            Ok((stream, _)) => match read_handshake(&stream) {
                Some((rank, n)) if n != size || rank == 0 || rank >= size => {
                    connected.entry(usize::MAX).or_insert(stream);
                    break Some(format!(
                        "a process connected as rank {rank} of {n}, but rank 0 expects {size} ranks"
                    ));
                }
                Some((rank, _)) if connected.contains_key(&rank) => {
                    connected.insert(usize::MAX, stream);
                    break Some(format!("two processes connected as rank {rank}; give each its own RANK"));
                }
                Some((rank, _)) => drop(connected.insert(rank, stream)),
                None => {}
            },
            Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                let missing: Vec<usize> = (1..size).filter(|r| !connected.contains_key(r)).collect();
                break Some(format!("rank(s) {missing:?} did not connect to {rendezvous} in time"));
            }
            Err(e) => break Some(format!("rank 0 cannot accept connections at {rendezvous}: {e}")),
        }
    };
    let answer = error.as_deref().unwrap_or_default();
    for stream in connected.values_mut() {
        let mut text = (answer.len() as u32).to_le_bytes().to_vec();
        text.extend(answer.as_bytes());
        let _ = stream.write_all(&text);
    }
    match error {
        None => Ok(connected),
        Some(text) => Err(Error::Launch(text)),
    }
}

/// The (rank, size) of a handshake; `None` if it is not one of ours.
fn read_handshake(mut stream: &TcpStream) -> Option<(usize, usize)> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)).ok()?;
    let mut text = [0u8; 16];
    stream.read_exact(&mut text).ok()?;
    let word = |i: usize| u32::from_le_bytes([text[i], text[i + 1], text[i + 2], text[i + 3]]) as usize;
    (text[..8] == MAGIC[..]).then(|| (word(8), word(12)))
}

/// Other ranks: connect to rank 0, retrying until the deadline, send the handshake and wait for the answer.
fn connect_to_rank0(rank: usize, size: usize, rendezvous: &str, deadline: Instant) -> Result<TcpStream> {
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    loop {
        let error = match resolve(rendezvous).map(|a| TcpStream::connect_timeout(&a, left())) {
            Ok(Ok(mut stream)) => {
                let mut handshake = MAGIC.to_vec();
                handshake.extend([rank as u32, size as u32].iter().flat_map(|x| x.to_le_bytes()));
                let (mut len, mut text) = ([0u8; 4], Vec::new());
                // Rank 0 answers when all ranks have come or its own deadline has passed, at most a little later than
                // ours.
                let answer = stream
                    .set_read_timeout(Some(left() + HANDSHAKE_TIMEOUT))
                    .and_then(|()| stream.write_all(&handshake))
                    .and_then(|()| stream.read_exact(&mut len))
                    .and_then(|()| {
                        text.resize((u32::from_le_bytes(len) as usize).min(4096), 0);
                        stream.read_exact(&mut text)
                    });
                match answer {
                    Ok(()) if text.is_empty() => return Ok(stream),
                    Ok(()) => return Err(Error::Launch(String::from_utf8_lossy(&text).into_owned())),
                    Err(e) => format!("the address answers, but not as rank 0 of this job ({e})"),
                }
            }
            Ok(Err(e)) => e.to_string(),
            Err(e) => e.to_string(),
        };
        if Instant::now() >= deadline {
            let text = format!(
                "rank {rank} cannot reach rank 0 at {rendezvous}: {error}; check MASTER_ADDR and MASTER_PORT"
            );
            return Err(Error::Launch(text));
        }
        std::thread::sleep(left().min(Duration::from_millis(100)));
    }
}

fn resolve(rendezvous: &str) -> Result<std::net::SocketAddr> {
    let found = rendezvous.to_socket_addrs().map_err(|e| failed(rendezvous, e))?.next();
    found.ok_or_else(|| Error::Launch(format!("'{rendezvous}' does not resolve to an address")))
}

#[cfg(test)]
mod tests;
