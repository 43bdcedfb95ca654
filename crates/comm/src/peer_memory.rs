//! Bytes that processes of a job keep for each other in host memory, so that what one holds survives its end.
//!
//! Every process serves what it keeps on a connection of its own: bulk data of snapshots neither waits for collectives nor
//! delays them. A process that asks must know the server's token, which ranks exchange over their authenticated control
//! connections.

use crate::hmac_sha256::equal;
use crate::rendezvous::accept::HANDSHAKE_TIMEOUT;
use crate::rendezvous::random;
use crate::rendezvous::torch_store::Limited;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Snapshots that are kept of a rank, in its own memory and in its partner's: the newest complete one, and the one that is
/// being copied. Two: a restart may need the older one while the newest is incomplete on some rank.
pub const SNAPSHOTS_KEPT: usize = 2;
/// Bytes of one read or write.
const CHUNK: usize = 4 << 20;
/// Time without progress after which a connection is given up.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Pause while no connection can be accepted.
const PAUSE: Duration = Duration::from_millis(20);
/// Bytes of a query: token, what is asked, owner, step, number of bytes.
const HEAD: usize = 32 + 1 + 8 + 8 + 8;

/// What connections that have not shown the token may take.
#[derive(Clone, Copy)]
struct Limits {
    /// Their number. More wait in the listener's queue.
    pending: usize,
    /// Time for the query, in total.
    head: Duration,
}

const LIMITS: Limits = Limits { pending: 256, head: HANDSHAKE_TIMEOUT };

/// What is kept: the state of `owner` after `step` steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PeerKey {
    /// The rank.
    pub owner: usize,
    /// The step.
    pub step: u64,
}

/// Where a process serves what it keeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerAddress {
    address: SocketAddr,
    token: [u8; 32],
}

/// What this process keeps for others.
#[derive(Clone)]
pub struct PeerMemory {
    kept: Arc<Mutex<BTreeMap<PeerKey, Arc<Vec<u8>>>>>,
    address: PeerAddress,
}

const PUT: u8 = 1;
const GET: u8 = 2;

impl PeerMemory {
    /// Serves at `host`, the address by which other processes reach this one; at all addresses where that is unspecified.
    pub fn serve(host: IpAddr) -> Result<PeerMemory> {
        PeerMemory::serve_within(host, LIMITS)
    }

    fn serve_within(host: IpAddr, limits: Limits) -> Result<PeerMemory> {
        let failed = |e: std::io::Error| Error::Launch(format!("cannot serve snapshots at {host}: {e}"));
        let listener = TcpListener::bind((host, 0)).map_err(failed)?;
        let address = PeerAddress { address: listener.local_addr().map_err(failed)?, token: random()? };
        let memory = PeerMemory { kept: Arc::default(), address };
        let server = memory.clone();
        let accept = move || server.accept(&listener, limits);
        std::thread::Builder::new().name("snapshots of peers".into()).spawn(accept).map_err(failed)?;
        Ok(memory)
    }

    /// Where others reach it.
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }

    /// What is kept here, complete.
    pub fn keys(&self) -> Vec<PeerKey> {
        self.kept().keys().copied().collect()
    }

    /// Drops what is kept for others.
    pub fn clear(&self) {
        self.kept().clear();
    }

    fn kept(&self) -> MutexGuard<'_, BTreeMap<PeerKey, Arc<Vec<u8>>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for a newer copy of an owner; the memory of one that is dropped may be used again.
    fn make_room(&self, key: PeerKey) -> Vec<u8> {
        let mut kept = self.kept();
        let of_owner = PeerKey { step: 0, ..key }..=PeerKey { step: u64::MAX, ..key };
        // Steps that are done again replace what was kept of them.
        let later: Vec<PeerKey> = kept.range(key..=*of_owner.end()).map(|(k, _)| *k).collect();
        later.iter().for_each(|k| drop(kept.remove(k)));
        let mut old: Vec<PeerKey> = kept.range(of_owner).map(|(k, _)| *k).collect();
        old.truncate((old.len() + 1).saturating_sub(SNAPSHOTS_KEPT));
        let dropped = old.iter().filter_map(|k| kept.remove(k)).last();
        dropped.and_then(|bytes| Arc::try_unwrap(bytes).ok()).unwrap_or_default()
    }

    /// Serves every connection in a thread of its own, until the process ends.
    fn accept(&self, listener: &TcpListener, limits: Limits) {
        let pending = Arc::new(AtomicUsize::new(0));
        loop {
            let accepted =
                if pending.load(Ordering::Acquire) < limits.pending { listener.accept().ok() } else { None };
            let Some((stream, _)) = accepted else {
                // Too many strangers, which soon are given up, or no descriptors.
                std::thread::sleep(PAUSE);
                continue;
            };
            pending.fetch_add(1, Ordering::AcqRel);
            let (server, unproven) = (self.clone(), pending.clone());
            let serve = move || {
                let head = server.head(&stream, limits.head);
                unproven.fetch_sub(1, Ordering::AcqRel);
                let answered = head.and_then(|head| head.map_or(Ok(()), |head| server.answer(stream, &head)));
                if let Err(e) = answered {
                    tracing::debug!("a snapshot of a peer: {e}");
                }
            };
            // Without a thread the connection closes, and the other side says so.
            if std::thread::Builder::new().name("snapshot of a peer".into()).spawn(serve).is_err() {
                pending.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Reads a query; `None` without the token.
    fn head(&self, stream: &TcpStream, timeout: Duration) -> std::io::Result<Option<[u8; HEAD]>> {
        let mut head = [0; HEAD];
        Limited { stream, deadline: Instant::now() + timeout }.read_exact(&mut head)?;
        let token = head[..32].try_into().unwrap_or([0; 32]);
        Ok(equal(&token, &self.address.token).then_some(head))
    }

    fn answer(&self, mut stream: TcpStream, head: &[u8; HEAD]) -> std::io::Result<()> {
        prepare(&stream)?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let key = PeerKey { owner: word(33) as usize, step: word(41) };
        match head[32] {
            PUT => {
                let mut bytes = self.make_room(key);
                receive(&mut stream, word(49) as usize, &mut bytes)?;
                self.kept().insert(key, Arc::new(bytes));
                stream.write_all(&[1])
            }
            GET => {
                let found = self.kept().get(&key).cloned();
                let len = found.as_ref().map_or(u64::MAX, |b| b.len() as u64);
                stream.write_all(&len.to_le_bytes())?;
                found.map_or(Ok(()), |bytes| stream.write_all(&bytes))
            }
            _ => Ok(()),
        }
    }
}

impl PeerAddress {
    /// The host: what fails together.
    pub fn host(&self) -> IpAddr {
        self.address.ip()
    }

    /// The address, at `host` where it is unspecified.
    pub fn or_at(&self, host: IpAddr) -> PeerAddress {
        let mut to = self.clone();
        if to.address.ip().is_unspecified() {
            to.address.set_ip(host);
        }
        to
    }

    /// An address without a server.
    #[doc(hidden)]
    pub fn for_test(ip: &str) -> PeerAddress {
        let ip = ip.parse().unwrap_or(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));
        PeerAddress { address: SocketAddr::new(ip, 1), token: [0; 32] }
    }

    fn open(&self, what: u8, key: PeerKey, len: usize) -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&self.address, IDLE_TIMEOUT)?;
        prepare(&stream)?;
        let mut head = self.token.to_vec();
        head.push(what);
        for word in [key.owner as u64, key.step, len as u64] {
            head.extend(word.to_le_bytes());
        }
        stream.write_all(&head)?;
        Ok(stream)
    }

    /// Has the process there keep `parts`, back to back. Returns when it has all of it.
    pub fn put(&self, key: PeerKey, parts: &[&[u8]]) -> Result<()> {
        let send = || {
            let mut stream = self.open(PUT, key, parts.iter().map(|p| p.len()).sum())?;
            for part in parts {
                part.chunks(CHUNK).try_for_each(|chunk| stream.write_all(chunk))?;
            }
            stream.read_exact(&mut [0])
        };
        send().map_err(|e| self.failed("keep", key, &e))
    }

    /// What the process there keeps of `key`; `None` if it has no such thing.
    pub fn get(&self, key: PeerKey) -> Result<Option<Vec<u8>>> {
        let fetch = || {
            let mut stream = self.open(GET, key, 0)?;
            let mut len = [0; 8];
            stream.read_exact(&mut len)?;
            match u64::from_le_bytes(len) {
                u64::MAX => Ok(None),
                len => {
                    let mut bytes = Vec::new();
                    receive(&mut stream, len as usize, &mut bytes)?;
                    Ok(Some(bytes))
                }
            }
        };
        fetch().map_err(|e| self.failed("return", key, &e))
    }

    fn failed(&self, what: &str, key: PeerKey, e: &std::io::Error) -> Error {
        let PeerKey { owner, step } = key;
        Error::Launch(format!(
            "{} did not {what} the snapshot of rank {owner}, step {step}: {e}",
            self.address
        ))
    }
}

fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
    stream.set_write_timeout(Some(IDLE_TIMEOUT))
}

/// Receives `len` bytes. Memory is taken as they come, so that a wrong length costs nothing.
fn receive(from: &mut TcpStream, len: usize, bytes: &mut Vec<u8>) -> std::io::Result<()> {
    bytes.truncate(len);
    let mut at = 0;
    while at < len {
        let end = (at + CHUNK).min(len);
        if bytes.len() < end {
            bytes.try_reserve(end - bytes.len()).map_err(std::io::Error::other)?;
            bytes.resize(end, 0);
        }
        from.read_exact(&mut bytes[at..end])?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn copies_of_a_rank_are_kept_and_returned() {
        let memory = PeerMemory::serve(Ipv4Addr::LOCALHOST.into()).unwrap();
        let at = memory.address().clone();
        let key = |owner, step| PeerKey { owner, step };
        let large = vec![7u8; CHUNK + 5];
        at.put(key(1, 10), &[b"head", &large]).unwrap();
        at.put(key(2, 10), &[b"x"]).unwrap();
        let got = at.get(key(1, 10)).unwrap().unwrap();
        assert_eq!((got.len(), &got[..4], got.last()), (large.len() + 4, &b"head"[..], Some(&7)));
        assert_eq!(at.get(key(1, 11)).unwrap(), None);
        // Two copies of an owner are kept, and a step that is done again replaces what came after.
        at.put(key(1, 20), &[b"b"]).unwrap();
        at.put(key(1, 30), &[b"c"]).unwrap();
        assert_eq!(memory.keys(), [key(1, 20), key(1, 30), key(2, 10)]);
        at.put(key(1, 20), &[b"again"]).unwrap();
        assert_eq!(at.get(key(1, 20)).unwrap().unwrap(), b"again");
        assert_eq!(memory.keys(), [key(1, 20), key(2, 10)]);
        // A stranger without the token gets nothing.
        let stranger = PeerAddress { token: [0; 32], ..at };
        assert!(stranger.get(key(2, 10)).is_err() && stranger.put(key(2, 10), &[b"y"]).is_err());
        assert_eq!(memory.address().get(key(2, 10)).unwrap().unwrap(), b"x");
    }

    /// A process that does not know its own address is reached at that of its host.
    #[test]
    fn an_unspecified_address_is_that_of_the_given_host() {
        let memory = PeerMemory::serve(Ipv4Addr::UNSPECIFIED.into()).unwrap();
        let at = memory.address().or_at(Ipv4Addr::LOCALHOST.into());
        assert_eq!(
            (memory.address().host(), at.host()),
            (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into())
        );
        let key = PeerKey { owner: 1, step: 10 };
        at.put(key, &[b"x"]).unwrap();
        assert_eq!(at.get(key).unwrap().unwrap(), b"x");
        assert_eq!(at.or_at(Ipv4Addr::UNSPECIFIED.into()), at);
    }

    /// Strangers that send nothing, or a byte now and then, are given up; who has the token waits for that at most.
    #[test]
    fn strangers_are_few_and_given_up() {
        let limits = Limits { pending: 2, head: Duration::from_millis(300) };
        let memory = PeerMemory::serve_within(Ipv4Addr::LOCALHOST.into(), limits).unwrap();
        let at = memory.address().clone();
        let silent: Vec<_> = (0..4).map(|_| TcpStream::connect(at.address).unwrap()).collect();
        let mut slow = TcpStream::connect(at.address).unwrap();
        at.put(PeerKey { owner: 1, step: 10 }, &[b"x"]).unwrap();
        drop(silent);
        slow.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        // A closed connection reads as ended or reset.
        let is_open = |slow: &mut TcpStream| {
            let read = slow.write_all(&[0]).and_then(|()| slow.read(&mut [0]));
            read.is_err_and(|e| {
                matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
            })
        };
        assert!((1..HEAD).any(|_| !is_open(&mut slow)), "it was given the time for a whole query");
    }
}
