//! Everything that reads bytes from the network, in one function for the fuzzer.

use crate::rendezvous::handshake::{Answering, HELLO, Hello, Next, PROOF, Side, answer_proof, proof};
use crate::rendezvous::{Secret, decode_place, torch_store};
use crate::tcp_control::frames::{End, Frame, HEADER, MAX_PAYLOAD};
use std::net::{Ipv4Addr, SocketAddr};

/// Reads `bytes` as whatever a peer may send: a handshake on either side, frames on either side, replies of torchrun's
/// store. Panics if a limit is exceeded or a stranger is taken for a rank.
pub fn read_network_input(bytes: &[u8]) {
    let secret = Secret([7; 32]);
    let Some((kind, rest)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => handshake(&secret, rest),
        1 => {
            if let Some(answer) = rest.first_chunk::<{ HELLO + PROOF }>() {
                let known = answer_proof(&secret, &Hello::new(1, 2, [1; 32]), answer);
                assert!(known.is_none(), "a proof without the secret");
            }
        }
        2 => {
            for end in [End { here: 0, peer: 2, size: 4 }, End { here: 3, peer: 0, size: 4 }] {
                let mut from = rest;
                while let Ok(Ok(frame)) = Frame::read(&mut from, end) {
                    assert!(frame.from < 4 && frame.to < 4 && frame.payload.len() <= MAX_PAYLOAD);
                    assert!(if end.here == 0 { frame.from == 2 } else { frame.to == 3 && frame.from != 3 });
                    let again = frame.encode();
                    assert!(rest.windows(again.len().max(HEADER)).any(|w| w == again));
                }
            }
        }
        _ => {
            let mut from = rest;
            let value = torch_store::read_waited(&mut from).and_then(|()| torch_store::read_value(&mut from));
            let store = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
            for value in [value.unwrap_or_default(), rest.to_vec()] {
                let place = decode_place(&value, store);
                assert!(place.is_none_or(|p| !p.address.ip().is_unspecified()));
            }
        }
    }
}

/// Rank 0's side, fed in pieces: the first byte is their length. After the hello a true proof is tried too.
fn handshake(secret: &Secret, bytes: &[u8]) {
    let own = Hello::new(0, 2, [9; 32]);
    let Some((piece, rest)) = bytes.split_first() else { return };
    let mut answering = Answering::new(own);
    for part in rest.chunks(usize::from(*piece).max(1)) {
        assert!(answering.wants() <= HELLO.max(PROOF));
        match answering.feed(secret, part) {
            Next::More => {}
            Next::Stranger => return,
            Next::Proven(hello) => panic_on_forgery(secret, &hello, &own, rest),
            Next::Send(answer) => {
                assert_eq!(answer.len(), HELLO + PROOF);
                let hello = rest.first_chunk::<HELLO>().and_then(Hello::decode);
                let Some(hello) = hello else { return };
                let mut true_rank = Answering::new(own);
                true_rank.feed(secret, &hello.encode());
                let proof = proof(secret, Side::Caller, &hello, &own);
                assert_eq!(true_rank.feed(secret, &proof), Next::Proven(hello));
            }
        }
    }
}

fn panic_on_forgery(secret: &Secret, hello: &Hello, own: &Hello, rest: &[u8]) {
    let proof = proof(secret, Side::Caller, hello, own);
    assert!(rest.windows(PROOF).any(|w| w == proof), "a proof without the secret");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_are_read_without_harm() {
        let hello = Hello::new(1, 2, [3; 32]).encode();
        let frame =
            Frame { from: 2, to: 3, topic: crate::control::Topic(4), payload: vec![1, 2, 3] }.encode();
        let samples: [&[u8]; 4] = [&hello, &[0; 90], &frame, &[0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3]];
        let mut state = 1u64;
        for (kind, sample) in samples.iter().enumerate() {
            for cut in 0..=sample.len() {
                read_network_input(
                    &[&[kind as u8, 7][..usize::from(kind == 0) + 1], &sample[..cut]].concat(),
                );
                // One byte changed.
                let mut other = sample.to_vec();
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if let Some(byte) = other.get_mut(cut) {
                    *byte ^= (state >> 33) as u8;
                }
                read_network_input(&[&[kind as u8][..], &other].concat());
            }
        }
    }
}
