//! Synthetic text of known entropy: a Markov chain over bytes, which gives a model's loss an exact lower bound.
//!
//! The text consists of words of two-letter syllables, separated by `~`: `KATO~SILE~…`. Each byte depends on the
//! previous one only, so the best possible loss given any context is the chain's entropy rate. All probabilities are
//! multiples of ⅛. The letters are upper case and the separator is rare elsewhere, so that a model trained on this
//! and on ordinary text can tell the two apart from the first byte.

use super::token_stream::splitmix;

/// After each byte, its successors and their weights out of eight.
const CHAIN: [(u8, &[(u8, u32)]); 15] = [
    (b'~', &[(b'K', 4), (b'S', 2), (b'T', 1), (b'M', 1)]),
    (b'B', &[(b'O', 4), (b'A', 2), (b'I', 2)]),
    (b'D', &[(b'E', 4), (b'U', 2), (b'A', 2)]),
    (b'K', &[(b'A', 4), (b'O', 2), (b'I', 2)]),
    (b'L', &[(b'I', 4), (b'E', 2), (b'O', 2)]),
    (b'M', &[(b'U', 4), (b'A', 2), (b'E', 2)]),
    (b'N', &[(b'A', 4), (b'I', 2), (b'U', 2)]),
    (b'R', &[(b'E', 4), (b'O', 2), (b'A', 2)]),
    (b'S', &[(b'I', 4), (b'U', 2), (b'E', 2)]),
    (b'T', &[(b'O', 4), (b'E', 2), (b'U', 2)]),
    (b'A', &[(b'~', 4), (b'R', 2), (b'N', 2)]),
    (b'E', &[(b'~', 4), (b'L', 2), (b'D', 2)]),
    (b'I', &[(b'~', 4), (b'N', 2), (b'S', 2)]),
    (b'O', &[(b'~', 4), (b'T', 2), (b'B', 2)]),
    (b'U', &[(b'~', 4), (b'K', 2), (b'M', 2)]),
];

fn followers(byte: u8) -> Option<&'static [(u8, u32)]> {
    CHAIN.iter().find(|(b, _)| *b == byte).map(|(_, f)| *f)
}

/// `bytes` bytes of the chain, starting after a `~`.
pub fn synthetic(seed: u64, bytes: usize) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes);
    let mut last = b'~';
    for n in 0..bytes {
        // The top three bits of the hash: eight equally likely values.
        let mut draw = (splitmix(seed, n as u64) >> 61) as u32;
        for &(next, cases) in followers(last).unwrap_or(&[]) {
            if draw < cases {
                last = next;
                break;
            }
            draw -= cases;
        }
        text.push(last);
    }
    text
}

/// ln P(next | last); `None` for impossible transitions.
pub fn log_prob(last: u8, next: u8) -> Option<f64> {
    let &(_, cases) = followers(last)?.iter().find(|(b, _)| *b == next)?;
    Some((f64::from(cases) / 8.0).ln())
}

/// The entropy rate in nats per byte: Σₛ πₛ·H(s), with π the stationary distribution. There are 2 syllables on
/// average between two `~`, hence 5 bytes including the `~`; a letter carries 1.5 bits and a `~` 1.75, so the rate is
/// (1.75 + 4·1.5)/5 = 1.55 bits.
pub fn entropy_rate() -> f64 {
    let index = |byte| CHAIN.iter().position(|(b, _)| *b == byte).unwrap_or(0);
    // The distance to the stationary distribution halves at every `~`, so this is far beyond convergence in f64.
    let mut pi = [1.0 / CHAIN.len() as f64; CHAIN.len()];
    for _ in 0..1000 {
        let mut next = [0.0; CHAIN.len()];
        for (p, (_, follow)) in pi.iter().zip(CHAIN) {
            for &(b, cases) in follow {
                next[index(b)] += p * f64::from(cases) / 8.0;
            }
        }
        pi = next;
    }
    let entropy = |follow: &[(u8, u32)]| -> f64 {
        follow.iter().map(|&(_, c)| -f64::from(c) / 8.0 * (f64::from(c) / 8.0).ln()).sum()
    };
    pi.iter().zip(CHAIN).map(|(p, (_, follow))| p * entropy(follow)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_is_whole_and_reached() {
        let text = synthetic(3, 10_000);
        for (byte, follow) in CHAIN {
            assert_eq!(follow.iter().map(|f| f.1).sum::<u32>(), 8);
            assert!(follow.iter().all(|f| followers(f.0).is_some()));
            assert!(text.contains(&byte));
        }
    }

    #[test]
    fn rate_is_the_closed_form() {
        assert!((entropy_rate() - 1.55 * std::f64::consts::LN_2).abs() < 1e-12);
    }

    #[test]
    fn rate_is_what_the_true_model_loses() {
        let text = synthetic(7, 1_000_000);
        let loss: f64 = text.windows(2).map(|w| -log_prob(w[0], w[1]).unwrap()).sum();
        let loss = loss / (text.len() - 1) as f64;
        assert!((loss / entropy_rate() - 1.0).abs() < 0.01, "{loss} against {}", entropy_rate());
    }

    #[test]
    fn pairs_occur_as_often_as_they_should() {
        let text = synthetic(11, 1_000_000);
        for (byte, follow) in CHAIN {
            let after: Vec<u8> = text.windows(2).filter(|w| w[0] == byte).map(|w| w[1]).collect();
            for &(next, cases) in follow {
                let share = after.iter().filter(|&&b| b == next).count() as f64 / after.len() as f64;
                assert!((share - f64::from(cases) / 8.0).abs() < 0.01, "{byte} {next} {share}");
            }
        }
    }

    #[test]
    fn seeds_differ_and_repeat() {
        assert_eq!(synthetic(1, 500), synthetic(1, 500));
        assert_ne!(synthetic(1, 500), synthetic(2, 500));
        assert_eq!(synthetic(1, 500)[..100], synthetic(1, 100));
    }
}
