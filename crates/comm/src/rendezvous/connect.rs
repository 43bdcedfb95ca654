//! The other ranks connect to rank 0, again and again until the deadline: it may start later than they do.

use super::accept::{Cancelled, HANDSHAKE_TIMEOUT};
use super::handshake::{HELLO, Hello, PROOF, answer_proof};
use super::torch_store::Limited;
use super::{RETRY, Secret, random};
use crate::launch_env::LaunchEnv;
use crate::{Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Longest refusal that rank 0 may send.
const MAX_REFUSAL: u32 = 4096;
/// Rank 0 says who is missing when its own time is over, which may begin later than ours.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// Where rank 0 listens, and the job's secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) address: SocketAddr,
    pub(crate) secret: Secret,
}

/// How an attempt ended without a connection.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Try again: perhaps rank 0 has not started yet.
    Again(String),
    /// Rank 0 has refused the job.
    Refused(String),
}

/// Connects to rank 0 at `place`, which is looked up anew for every attempt.
pub(crate) fn to_rank0(
    job: &LaunchEnv,
    mut place: impl FnMut() -> Result<Place>,
    deadline: Instant,
    cancelled: Cancelled,
) -> Result<TcpStream> {
    loop {
        if let Some(why) = cancelled() {
            return Err(Error::Launch(why));
        }
        let attempt = match place() {
            Ok(place) => attempt(job, &place, deadline, cancelled),
            Err(Error::Launch(what)) => Err(Failure::Again(what)),
            Err(other) => Err(Failure::Again(other.to_string())),
        };
        let error = match attempt {
            Ok(stream) => return Ok(stream),
            Err(Failure::Refused(text)) => return Err(Error::Launch(text)),
            Err(Failure::Again(error)) => error,
        };
        if Instant::now() + RETRY >= deadline {
            let (rank, at) = (job.rank, job.rendezvous.as_deref().unwrap_or_default());
            return Err(Error::Launch(format!(
                "rank {rank} cannot reach rank 0 by {at}: {error}; check MASTER_ADDR and MASTER_PORT"
            )));
        }
        std::thread::sleep(RETRY);
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Again(what) | Failure::Refused(what) => f.write_str(what),
        }
    }
}

/// Connects to `place`; both sides prove that they know its secret.
pub(crate) fn prove(job: &LaunchEnv, place: &Place, deadline: Instant) -> Result<TcpStream, Failure> {
    let soon = deadline.min(Instant::now() + HANDSHAKE_TIMEOUT);
    let again = |e: std::io::Error| Failure::Again(format!("{}: {e}", place.address));
    let left = soon.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(&place.address, left).map_err(again)?;
    let nonce = random().map_err(|e| Failure::Again(e.to_string()))?;
    let own = Hello::new(job.rank, job.size, nonce);
    let mut answer = [0; HELLO + PROOF];
    let silent = |e: std::io::Error| {
        Failure::Again(format!("{} answers, but not as rank 0 of this job ({e})", place.address))
    };
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(again)?;
    stream.write_all(&own.encode()).map_err(again)?;
    Limited { stream: &stream, deadline: soon }.read_exact(&mut answer).map_err(silent)?;
    let proof = answer_proof(&place.secret, &own, &answer).ok_or_else(|| {
        Failure::Again(format!(
            "{} belongs to another job: it does not know this job's secret (FERROTRON_JOB_SECRET sets one)",
            place.address
        ))
    })?;
    stream.write_all(&proof).map_err(again)?;
    Ok(stream)
}

fn attempt(
    job: &LaunchEnv,
    place: &Place,
    deadline: Instant,
    cancelled: Cancelled,
) -> Result<TcpStream, Failure> {
    let stream = prove(job, place, deadline)?;
    // Rank 0 answers once all ranks have come.
    while Instant::now() < deadline + ANSWER_GRACE && is_silent(&stream) {
        if let Some(why) = cancelled() {
            return Err(Failure::Refused(why));
        }
    }
    let silent = |e: std::io::Error| {
        Failure::Again(format!("{} answers, but not as rank 0 of this job ({e})", place.address))
    };
    let mut rest = Limited { stream: &stream, deadline: deadline + ANSWER_GRACE };
    let mut len = [0; 4];
    rest.read_exact(&mut len).map_err(silent)?;
    let len = u32::from_le_bytes(len).min(MAX_REFUSAL);
    let mut text = vec![0; len as usize];
    rest.read_exact(&mut text).map_err(silent)?;
    match text.is_empty() {
        true => Ok(stream),
        false => Err(Failure::Refused(String::from_utf8_lossy(&text).into_owned())),
    }
}

/// Waits a moment for bytes of the other side; true if none have come on a connection that is open.
fn is_silent(stream: &TcpStream) -> bool {
    let peeked = stream.set_read_timeout(Some(RETRY)).and_then(|()| stream.peek(&mut [0]));
    peeked.is_err_and(|e| {
        matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
    })
}
