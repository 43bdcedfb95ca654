//! Rank 0 receives the other ranks. Handshakes run side by side, each bounded in time and bytes, and no more than
//! [`MAX_PENDING`] at once: strangers, silent, slow or loud, cost nothing but their own connections.

use super::handshake::{Answering, Hello, Next, VERSION};
use super::{Secret, random};
use crate::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Time for one handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Handshakes at once. If more come, the oldest is dropped: a true rank needs milliseconds, and tries again.
const MAX_PENDING: usize = 256;
/// Pause when nothing happens.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A connection that has not proven anything yet.
struct Candidate {
    stream: TcpStream,
    answering: Answering,
    since: Instant,
}

impl Candidate {
    fn new(stream: TcpStream, size: usize) -> Result<Candidate> {
        let _ = stream.set_nonblocking(true);
        let _ = stream.set_nodelay(true);
        let answering = Answering::new(Hello::new(0, size, random()?));
        Ok(Candidate { stream, answering, since: Instant::now() })
    }

    /// Reads what has arrived. `None`: not finished. `Some(None)`: a stranger.
    fn advance(&mut self, secret: &Secret) -> Option<Option<Hello>> {
        let mut bytes = [0; super::handshake::HELLO];
        loop {
            let wanted = self.answering.wants().min(bytes.len());
            let next = match self.stream.read(&mut bytes[..wanted]) {
                Ok(0) => return Some(None),
                Ok(n) => self.answering.feed(secret, &bytes[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    return (self.since.elapsed() > HANDSHAKE_TIMEOUT).then_some(None);
                }
                Err(_) => return Some(None),
            };
            match next {
                Next::More => {}
                // A new connection has room for 84 bytes; one that has not is not waited for.
                Next::Send(answer) => match self.stream.write(&answer) {
                    Ok(n) if n == answer.len() => {}
                    _ => return Some(None),
                },
                Next::Proven(hello) => return Some(Some(hello)),
                Next::Stranger => return Some(None),
            }
        }
    }
}

/// Why the ranks need not meet any more; asked again and again while they do.
pub(crate) type Cancelled<'a> = &'a dyn Fn() -> Option<String>;

/// Accepts every other rank, then tells all of them that the job may start, or why it cannot.
pub(crate) fn all_ranks(
    listener: &TcpListener,
    size: usize,
    secret: &Secret,
    deadline: Instant,
    cancelled: Cancelled,
) -> Result<HashMap<usize, TcpStream>> {
    listener.set_nonblocking(true).map_err(|e| Error::Launch(format!("rank 0 cannot listen: {e}")))?;
    let mut joined: HashMap<usize, TcpStream> = HashMap::new();
    let mut refused: Vec<TcpStream> = Vec::new();
    let mut pending: VecDeque<Candidate> = VecDeque::new();
    let error = loop {
        if joined.len() + 1 == size {
            // A rank that has ended meanwhile may have been started again.
            joined.retain(|_, stream| !has_gone(stream));
            if joined.len() + 1 == size {
                break None;
            }
        }
        if Instant::now() >= deadline {
            let missing: Vec<usize> = (1..size).filter(|r| !joined.contains_key(r)).collect();
            let at = listener.local_addr().map_or_else(|_| "rank 0".into(), |a| a.to_string());
            break Some(format!("rank(s) {missing:?} did not connect to {at} in time"));
        }
        if let Some(why) = cancelled() {
            break Some(why);
        }
        let mut idle = true;
        // At most as many as are kept, so that a flood of connections cannot hold this loop.
        for _ in 0..MAX_PENDING {
            match listener.accept() {
                Ok((stream, _)) => pending.push_back(Candidate::new(stream, size)?),
                // Out of descriptors, or a connection that has gone already: what is pending goes on.
                Err(_) => break,
            }
            idle = false;
        }
        while pending.len() > MAX_PENDING {
            pending.pop_front();
        }
        let mut problem = None;
        for mut candidate in std::mem::take(&mut pending) {
            match candidate.advance(secret) {
                None => pending.push_back(candidate),
                Some(None) => idle = false,
                Some(Some(hello)) => {
                    idle = false;
                    match admit(&hello, size, &joined) {
                        Ok(rank) => drop(joined.insert(rank, candidate.stream)),
                        Err(what) => {
                            problem.get_or_insert(what);
                            refused.push(candidate.stream);
                        }
                    }
                }
            }
        }
        if problem.is_some() {
            break problem;
        }
        if idle {
            std::thread::sleep(POLL_INTERVAL);
        }
    };
    let answer = error.as_deref().unwrap_or_default();
    for mut stream in joined.values().chain(&refused) {
        let mut text = (answer.len() as u32).to_le_bytes().to_vec();
        text.extend(answer.as_bytes());
        // A rank that has gone meanwhile is noticed when its connection is used.
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT));
        let _ = stream.write_all(&text);
    }
    match error {
        None => Ok(joined),
        Some(text) => Err(Error::Launch(text)),
    }
}

/// The rank of a process that has proven the secret, or why the job cannot start with it.
fn admit(hello: &Hello, size: usize, joined: &HashMap<usize, TcpStream>) -> Result<usize, String> {
    let (rank, n) = (hello.rank as usize, hello.size as usize);
    if hello.version != VERSION {
        return Err(format!(
            "rank {rank} speaks version {} of the job's protocol, rank 0 version {VERSION}; run the same program on all ranks",
            hello.version
        ));
    }
    if n != size || rank == 0 || rank >= size {
        return Err(format!("a process connected as rank {rank} of {n}, but rank 0 expects {size} ranks"));
    }
    match joined.get(&rank) {
        Some(first) if !has_gone(first) => {
            Err(format!("two processes connected as rank {rank}; give each its own RANK"))
        }
        // The first one has ended, and its launcher has started it again.
        _ => Ok(rank),
    }
}

/// True if the other side has closed this connection, on which it has nothing to say yet.
fn has_gone(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock,
    }
}
