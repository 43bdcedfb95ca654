//! Frames on a connection: a header of 20 bytes, then the payload. What a frame says is checked before it counts.

use crate::control::Topic;
use std::io::{Read, Result};

/// Bytes of a header.
pub(crate) const HEADER: usize = 20;
/// Longest payload: the network must not decide how much memory is allocated.
pub(crate) const MAX_PAYLOAD: usize = 1 << 28;
/// Topic on which rank 0 announces that a rank has exited.
pub(super) const EXITED: Topic = Topic(u64::MAX);

/// One message between two ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) topic: Topic,
    pub(crate) payload: Vec<u8>,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    /// The rank that reads.
    pub(crate) here: usize,
    /// The rank that it is connected to: 0, or any other on rank 0.
    pub(crate) peer: usize,
    /// Number of ranks.
    pub(crate) size: usize,
}

impl Frame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.payload.len());
        for word in [self.from, self.to, self.payload.len()] {
            bytes.extend((word as u32).to_le_bytes());
        }
        bytes.extend(self.topic.0.to_le_bytes());
        bytes.extend(&self.payload);
        bytes
    }

    /// Reads the next frame. The outer error is the end of the connection, the inner one a breach of the protocol.
    pub(crate) fn read(from: &mut impl Read, end: End) -> Result<std::result::Result<Frame, String>> {
        let mut header = [0; HEADER];
        from.read_exact(&mut header)?;
        let (mut frame, len) = match decode_header(&header, end) {
            Ok(frame) => frame,
            Err(what) => return Ok(Err(what)),
        };
        // Memory grows with what arrives, not with what the header promises.
        from.take(len as u64).read_to_end(&mut frame.payload)?;
        match frame.payload.len() == len {
            true => Ok(Ok(frame)),
            false => Err(std::io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// The frame of a header, still without its payload, and the payload's length.
fn decode_header(header: &[u8; HEADER], end: End) -> std::result::Result<(Frame, usize), String> {
    let word =
        |i: usize| u32::from_le_bytes([header[i], header[i + 1], header[i + 2], header[i + 3]]) as usize;
    let (from, to, len) = (word(0), word(4), word(8));
    let topic = Topic(word(12) as u64 | (word(16) as u64) << 32);
    if from >= end.size || to >= end.size {
        return Err(format!("it sent a frame from rank {from} to rank {to} in a job of {}", end.size));
    }
    if len > MAX_PAYLOAD {
        return Err(format!("it sent a frame of {len} bytes; the limit is {MAX_PAYLOAD}"));
    }
    // Rank 0 forwards what ranks say, but each may speak only for itself, and only rank 0 knows who has exited.
    if end.here == 0 && from != end.peer {
        return Err(format!("it sent a frame as rank {from}"));
    }
    if end.here == 0 && topic == EXITED {
        return Err("it declared that a rank has exited, which only rank 0 may".into());
    }
    if end.here != 0 && (to != end.here || from == end.here) {
        return Err(format!("it sent a frame from rank {from} to rank {to} to rank {}", end.here));
    }
    Ok((Frame { from, to, topic, payload: Vec::new() }, len))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ON_RANK_0: End = End { here: 0, peer: 2, size: 4 };
    const ON_RANK_3: End = End { here: 3, peer: 0, size: 4 };

    fn frame(from: usize, to: usize) -> Frame {
        Frame { from, to, topic: Topic(7 << 40 | 3), payload: b"payload".to_vec() }
    }

    #[test]
    fn frames_travel() {
        let sent = frame(2, 3).encode();
        for end in [ON_RANK_0, ON_RANK_3] {
            let mut bytes = &sent[..];
            assert_eq!(Frame::read(&mut bytes, end).unwrap().unwrap(), frame(2, 3));
            assert!(Frame::read(&mut bytes, end).is_err(), "the end");
        }
        (0..sent.len()).for_each(|cut| assert!(Frame::read(&mut &sent[..cut], ON_RANK_0).is_err()));
    }

    #[test]
    fn what_a_frame_may_not_say() {
        let says = |f: Frame, end| Frame::read(&mut &f.encode()[..], end).unwrap().unwrap_err();
        // A rank that speaks for another.
        assert!(says(frame(1, 3), ON_RANK_0).contains("as rank 1"));
        assert!(says(frame(0, 3), ON_RANK_0).contains("as rank 0"));
        // Ranks that do not exist.
        assert!(says(frame(2, 4), ON_RANK_0).contains("job of 4"));
        assert!(says(frame(9, 3), ON_RANK_3).contains("job of 4"));
        // Not meant for this rank, or as if by itself.
        assert!(says(frame(2, 1), ON_RANK_3).contains("to rank 1"));
        assert!(says(frame(3, 3), ON_RANK_3).contains("from rank 3"));
        assert!(says(Frame { topic: EXITED, ..frame(2, 1) }, ON_RANK_0).contains("only rank 0"));
        // A length beyond the limit is refused before anything is allocated.
        let mut long = frame(2, 3).encode();
        long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Frame::read(&mut &long[..], ON_RANK_0).unwrap().unwrap_err().contains("limit"));
    }

    #[test]
    fn a_promised_length_allocates_nothing() {
        let mut promised = frame(2, 3).encode();
        promised[8..12].copy_from_slice(&(MAX_PAYLOAD as u32).to_le_bytes());
        struct Counting<'a>(&'a [u8], usize);
        impl Read for Counting<'_> {
            fn read(&mut self, to: &mut [u8]) -> Result<usize> {
                self.1 = self.1.max(to.len());
                self.0.read(to)
            }
        }
        let mut from = Counting(&promised, 0);
        assert!(Frame::read(&mut from, ON_RANK_0).is_err());
        assert!(from.1 < 1 << 20, "a buffer of {} bytes", from.1);
    }
}
