//! The handshake by which rank 0 and another rank prove to each other that they know the job's secret.
//!
//! ```text
//! rank r → rank 0   hello_r                            magic, version, rank, size, nonce
//! rank 0 → rank r   hello_0, HMAC(secret, "rank 0" ‖ hello_r ‖ hello_0)
//! rank r → rank 0   HMAC(secret, "rank r" ‖ hello_r ‖ hello_0)
//! ```
//! Both nonces are random, so an old conversation proves nothing. Version, rank and size are part of what is proven:
//! only a process that knows the secret can make them count. After it the connection is trusted as it is: frames are
//! neither encrypted nor signed, so whoever can change packets on the way is not kept out.

use crate::hmac_sha256::{equal, hmac};
use crate::rendezvous::Secret;

/// Version of the handshake and of the frames after it. The layout of a [`Hello`] never changes.
pub(crate) const VERSION: u32 = 2;
const MAGIC: &[u8; 8] = b"ferrotrn";
/// Bytes of a hello, and of a proof.
pub(crate) const HELLO: usize = 52;
pub(crate) const PROOF: usize = 32;

/// Who is calling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) version: u32,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) nonce: [u8; 32],
}

impl Hello {
    pub(crate) fn new(rank: usize, size: usize, nonce: [u8; 32]) -> Hello {
        Hello { version: VERSION, rank: rank as u32, size: size as u32, nonce }
    }

    pub(crate) fn encode(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(MAGIC);
        for (i, word) in [self.version, self.rank, self.size].into_iter().enumerate() {
            bytes[8 + 4 * i..12 + 4 * i].copy_from_slice(&word.to_le_bytes());
        }
        bytes[20..].copy_from_slice(&self.nonce);
        bytes
    }

    /// `None` if it is not a hello of this program.
    pub(crate) fn decode(bytes: &[u8; HELLO]) -> Option<Hello> {
        let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&bytes[20..]);
        let hello = Hello { version: word(8), rank: word(12), size: word(16), nonce };
        (bytes[..8] == MAGIC[..]).then_some(hello)
    }
}

/// The proof of one side.
pub(crate) fn proof(secret: &Secret, side: Side, caller: &Hello, rank0: &Hello) -> [u8; PROOF] {
    let side: &[u8] = match side {
        Side::Rank0 => b"rank 0",
        Side::Caller => b"rank r",
    };
    hmac(&secret.0, &[side, &caller.encode(), &rank0.encode()].concat())
}

/// Whose proof it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Rank0,
    Caller,
}

/// Rank 0's side of one handshake: bytes in, bytes out. Never takes more than [`HELLO`] + [`PROOF`] bytes.
pub(crate) struct Answering {
    own: Hello,
    caller: Option<Hello>,
    received: Vec<u8>,
}

/// What a handshake needs next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// More bytes.
    More,
    /// To send these bytes, then more.
    Send(Vec<u8>),
    /// Nothing: the caller knows the secret.
    Proven(Hello),
    /// To close the connection: not a rank of this job.
    Stranger,
}

impl Answering {
    /// `own` is rank 0's hello, with a nonce of its own for each connection.
    pub(crate) fn new(own: Hello) -> Answering {
        Answering { own, caller: None, received: Vec::with_capacity(HELLO) }
    }

    /// How many bytes it takes now.
    pub(crate) fn wants(&self) -> usize {
        let needed = if self.caller.is_none() { HELLO } else { PROOF };
        needed - self.received.len().min(needed)
    }

    /// Takes at most [`Answering::wants`] bytes.
    pub(crate) fn feed(&mut self, secret: &Secret, bytes: &[u8]) -> Next {
        self.received.extend(&bytes[..bytes.len().min(self.wants())]);
        if self.wants() > 0 {
            return Next::More;
        }
        let received = std::mem::take(&mut self.received);
        match self.caller {
            None => {
                let hello = received.first_chunk::<HELLO>().and_then(Hello::decode);
                let Some(caller) = hello else { return Next::Stranger };
                self.caller = Some(caller);
                let proof = proof(secret, Side::Rank0, &caller, &self.own);
                Next::Send([&self.own.encode()[..], &proof].concat())
            }
            Some(caller) => {
                let want = proof(secret, Side::Caller, &caller, &self.own);
                match received.first_chunk::<PROOF>() {
                    Some(given) if equal(given, &want) => Next::Proven(caller),
                    _ => Next::Stranger,
                }
            }
        }
    }
}

/// The caller's proof, if rank 0's answer (hello and proof) shows that it knows the secret.
pub(crate) fn answer_proof(
    secret: &Secret,
    caller: &Hello,
    answer: &[u8; HELLO + PROOF],
) -> Option<[u8; PROOF]> {
    let rank0 = answer.first_chunk::<HELLO>().and_then(Hello::decode)?;
    let given = answer.last_chunk::<PROOF>()?;
    let known = equal(given, &proof(secret, Side::Rank0, caller, &rank0));
    known.then(|| proof(secret, Side::Caller, caller, &rank0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    const KEY: Secret = Secret([3; 32]);

    fn answer(answering: &mut Answering, hello: &Hello) -> [u8; HELLO + PROOF] {
        let Next::Send(bytes) = answering.feed(&KEY, &hello.encode()) else { panic!("no answer") };
        bytes.try_into().unwrap()
    }

    #[test]
    fn both_sides_prove_the_secret() {
        let caller = Hello::new(1, 2, [1; 32]);
        assert_eq!(Hello::decode(&caller.encode()), Some(caller));
        let mut answering = Answering::new(Hello::new(0, 2, [2; 32]));
        let said = answer(&mut answering, &caller);
        assert!(answer_proof(&Secret([4; 32]), &caller, &said).is_none(), "rank 0 has another secret");
        let proof = answer_proof(&KEY, &caller, &said).unwrap();
        assert_eq!(answering.wants(), PROOF);
        // In any pieces.
        assert_eq!(answering.feed(&KEY, &proof[..5]), Next::More);
        assert_eq!(answering.feed(&KEY, &proof[5..]), Next::Proven(caller));
    }

    #[test]
    fn strangers_prove_nothing() {
        let caller = Hello::new(1, 2, [1; 32]);
        let fresh = |nonce: u8| Answering::new(Hello::new(0, 2, [nonce; 32]));
        // Another secret, rank 0's own proof sent back, an old conversation, another rank than proven, other bytes.
        let mut answering = fresh(2);
        let said = answer(&mut answering, &caller);
        let replayed = answer_proof(&KEY, &caller, &said).unwrap();
        assert_eq!(answering.feed(&KEY, &said[HELLO..]), Next::Stranger);
        let mut answering = fresh(5);
        answer(&mut answering, &caller);
        assert_eq!(answering.feed(&KEY, &replayed), Next::Stranger);
        let mut answering = fresh(2);
        answer(&mut answering, &Hello { rank: 3, ..caller });
        assert_eq!(answering.feed(&KEY, &replayed), Next::Stranger);
        let mut answering = fresh(2);
        answer(&mut answering, &Hello { size: 9, ..caller });
        assert_eq!(answering.feed(&KEY, &replayed), Next::Stranger);
        let mut answering = fresh(2);
        answer(&mut answering, &Hello { version: 1, ..caller });
        assert_eq!(answering.feed(&KEY, &replayed), Next::Stranger);
        assert_eq!(fresh(2).feed(&KEY, &[b'G'; HELLO]), Next::Stranger);
        // Much at once is cut to what is wanted.
        let mut answering = fresh(2);
        assert_eq!(answering.feed(&KEY, &[0; 1 << 16]), Next::Stranger);
        assert!(answering.received.len() <= HELLO);
    }
}
