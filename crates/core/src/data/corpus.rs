//! The corpus embedded in the binary: text of this project, and synthetic text of known entropy.
//!
//! Tokens are bytes, 256 ids. Training rows alternate between the two parts; evaluation reads a synthetic stream that
//! training never sees, whose loss has the lower bound [`super::synthetic::entropy_rate`].

use super::synthetic::synthetic;
use super::{Batches, Interleave, Stream};
use crate::Result;

/// Vocabulary size of a byte-level model.
pub const VOCAB: u32 = 256;

/// Synthetic bytes before they repeat: more than the default run reads.
const TRAINING_BYTES: usize = 1 << 20;
const HELD_OUT_BYTES: usize = 1 << 18;
/// Separates the held-out stream from every training seed used in practice.
const HELD_OUT: u64 = 0x5eed_0000_0000_0000;

/// The text part: documentation and source of this project, frozen. It never changes, so that a run resumes on the
/// same bytes under a later version and losses of the default recipe stay comparable.
pub fn text() -> &'static str {
    include_str!("corpus.txt")
}

fn ids(bytes: &[u8]) -> Vec<i32> {
    bytes.iter().map(|&b| i32::from(b)).collect()
}

/// Training rows of `seq` bytes: even sample numbers are text from random offsets, odd ones are synthetic.
pub fn training(seq: usize, seed: u64) -> Result<Interleave> {
    let text: Box<dyn Batches> = Box::new(Stream::random(ids(text().as_bytes()), seq, seed)?);
    let made: Box<dyn Batches> = Box::new(Stream::sequential(ids(&synthetic(seed, TRAINING_BYTES)), seq)?);
    Interleave::new(vec![text, made])
}

/// Synthetic rows of `seq` bytes that [`training`] never returns for the same seed.
pub fn held_out(seq: usize, seed: u64) -> Result<Stream> {
    Stream::sequential(ids(&synthetic(seed ^ HELD_OUT, HELD_OUT_BYTES)), seq)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::synthetic::log_prob;

    #[test]
    fn rows_alternate_and_repeat() {
        let it = training(64, 5).unwrap();
        let batch = it.batch(10, 4).unwrap();
        assert_eq!(batch, training(64, 5).unwrap().batch(10, 4).unwrap());
        let text = text();
        for (k, row) in batch.tokens.chunks(64).enumerate() {
            let bytes: Vec<u8> = row.iter().map(|&t| t as u8).collect();
            let in_chain = bytes.windows(2).all(|w| log_prob(w[0], w[1]).is_some());
            assert_eq!(in_chain, k % 2 == 1, "row {k}");
            let in_text = text.as_bytes().windows(64).any(|w| w == bytes);
            assert_eq!(in_text, k % 2 == 0, "row {k}");
        }
        assert!(batch.cu_seqlens.is_none());
    }

    #[test]
    fn held_out_rows_are_not_training_rows() {
        let train = synthetic(5, TRAINING_BYTES);
        let row = held_out(256, 5).unwrap().batch(0, 1).unwrap();
        let bytes: Vec<u8> = row.tokens.iter().map(|&t| t as u8).collect();
        assert!(!train.windows(256).any(|w| w == bytes));
    }
}
