//! Messages between the members of a job and its coordinator: JSON in frames of `u32` length, little-endian.

use crate::hmac_sha256::hmac;
use crate::rendezvous::Secret;
use serde::{Deserialize, Serialize};
use std::io::{Error, ErrorKind, Result, Write};
use std::net::SocketAddr;

/// Longest frame.
const MAX_FRAME: usize = 1 << 20;

/// From a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromMember {
    /// Who it is and what it does. Sent when it connects, and when that changes.
    Join(Join),
    /// It is alive.
    Beat,
    /// It has finished its work.
    Bye,
}

/// A member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Join {
    /// A random number that tells processes apart.
    pub(crate) process: u64,
    pub(crate) pid: u32,
    /// What tells its host from others.
    pub(crate) host: String,
    /// The rank that the launcher gave it; spares have numbers from the world size on.
    pub(crate) slot: usize,
    /// Generation and rank it has, or had until its communication failed.
    pub(crate) seat: Option<(u64, usize)>,
    /// It waits for a seat in the next generation, and would accept the other ranks here if it becomes rank 0.
    pub(crate) waiting: Option<SocketAddr>,
    /// Steps done in its generation.
    pub(crate) steps: u64,
    /// Why its generation ended, as far as it knows.
    pub(crate) reason: String,
    /// It left its generation because ranks are to change places, and nothing has failed.
    pub(crate) rotate: bool,
    /// Restarts after failures, and failures by slot, as it heard of them last: what a new coordinator begins with.
    pub(crate) restarts: u64,
    pub(crate) failures: Vec<(usize, u64)>,
}

/// To a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToMember {
    /// The coordinator is alive, as this process.
    Beat { pid: u32, host: String },
    /// Its seat in a generation.
    Assign(Assign),
    /// A rank of the running generation is lost.
    Lost { generation: u64, rank: usize, reason: String },
    /// It is not needed, or must not take part.
    Refuse { reason: String, ended: Ended },
}

/// Why a member is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// The job has finished.
    Finished,
    /// This process was excluded, or replaced by another.
    Excluded,
    /// The job cannot go on without being launched again.
    Failed,
}

/// A seat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Assign {
    /// From 1.
    pub(crate) generation: u64,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Where rank 0 accepts the others; no address means that of the coordinator.
    pub(crate) rank0: SocketAddr,
    /// Random: the secret of this generation's connections follows from it and the job's.
    pub(crate) nonce: [u8; 32],
    /// What ended the last generation.
    pub(crate) reason: String,
    /// Ranks whose process is another than in the last generation.
    pub(crate) replaced: Vec<usize>,
    /// The processes of the last generation have changed places: none has failed.
    pub(crate) rotated: bool,
    pub(crate) restarts: u64,
    pub(crate) failures: Vec<(usize, u64)>,
}

impl Assign {
    /// The secret of this generation: a process of an earlier one does not know it.
    pub(crate) fn secret(&self, job: &Secret) -> Secret {
        Secret(hmac(&job.0, &[&b"generation"[..], &self.generation.to_le_bytes(), &self.nonce].concat()))
    }
}

/// Writes a frame.
pub(crate) fn write(to: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec(message).map_err(Error::other)?;
    let mut frame = (text.len() as u32).to_le_bytes().to_vec();
    frame.extend(text);
    to.write_all(&frame)
}

/// Bytes that have arrived, until they are whole frames.
#[derive(Default)]
pub(crate) struct Frames(Vec<u8>);

impl Frames {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next whole message.
    pub(crate) fn next<T: for<'a> Deserialize<'a>>(&mut self) -> Result<Option<T>> {
        let Some((len, rest)) = self.0.split_first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > MAX_FRAME {
            return Err(Error::new(ErrorKind::InvalidData, format!("a frame of {len} bytes")));
        }
        let Some(text) = rest.get(..len) else { return Ok(None) };
        let message = serde_json::from_slice(text).map_err(|e| Error::new(ErrorKind::InvalidData, e))?;
        self.0.drain(..4 + len);
        Ok(Some(message))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_in_any_pieces_and_rubbish_is_refused() {
        let lost = ToMember::Lost { generation: 3, rank: 1, reason: "ü".into() };
        let mut bytes = Vec::new();
        write(&mut bytes, &lost).unwrap();
        write(&mut bytes, &lost).unwrap();
        let mut frames = Frames::default();
        let mut got = Vec::new();
        for piece in bytes.chunks(7) {
            frames.add(piece);
            got.extend(frames.next::<ToMember>().unwrap());
        }
        got.extend(frames.next::<ToMember>().unwrap());
        assert_eq!(got, [lost.clone(), lost]);
        let mut frames = Frames::default();
        frames.add(&u32::MAX.to_le_bytes());
        assert!(frames.next::<ToMember>().is_err());
        let mut frames = Frames::default();
        frames.add(b"\x02\0\0\0{}");
        assert!(frames.next::<ToMember>().is_err());
    }
}
