//! Scoring many sequences in batches of tokens, over data-parallel ranks.

use crate::error::Result;
use ferrotron_core::model::{Model, Sequence};
use ferrotron_kernels::IGNORE;
use std::ops::Range;

/// The loss of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SequenceLoss {
    /// `Σ −ln p` over scored tokens.
    pub sum: f64,
    /// How many they are.
    pub tokens: u64,
}

/// Losses of all sequences, in passes of up to `batch_tokens` tokens, or one longer sequence. Data-parallel ranks take
/// passes in turn; every rank returns all losses. `progress` gets the sequences that are done.
pub fn score(
    model: &Model,
    sequences: &[Sequence],
    batch_tokens: usize,
    progress: &dyn Fn(usize),
) -> Result<Vec<SequenceLoss>> {
    let rank = &model.rank;
    let (mine, replicas) = (rank.dp.rank(), rank.dp.size());
    let mut sums = vec![0f64; sequences.len()];
    // Ranks that share experts pass through the layers together: one without work passes a token.
    let idle = [Sequence { tokens: vec![0], labels: vec![IGNORE] }];
    for round in batches(sequences, batch_tokens).chunks(replicas.max(1)) {
        match round.get(mine) {
            Some(range) => {
                let losses = model.token_losses(&sequences[range.clone()])?;
                for (sum, losses) in sums[range.clone()].iter_mut().zip(losses) {
                    *sum = losses.into_iter().map(f64::from).sum();
                }
            }
            None if model.decoder.config().moe.is_some() => {
                model.token_losses(&idle)?;
            }
            None => {}
        }
        progress(round.last().map_or(0, |r| r.end));
    }
    if replicas > 1 {
        let bytes: Vec<u8> = sums.iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = rank.dp.all_gather_bytes(&bytes, "losses").map_err(ferrotron_core::Error::from)?;
        // A sequence is scored on one rank and 0 on the others.
        sums.fill(0.0);
        for part in &all {
            for (sum, bytes) in sums.iter_mut().zip(part.as_chunks::<8>().0) {
                *sum += f64::from_le_bytes(*bytes);
            }
        }
    }
    let scored = |s: &Sequence| s.labels.iter().filter(|l| **l != IGNORE).count() as u64;
    Ok(sequences.iter().zip(sums).map(|(s, sum)| SequenceLoss { sum, tokens: scored(s) }).collect())
}

/// Consecutive sequences of up to `batch_tokens` tokens together.
fn batches(sequences: &[Sequence], batch_tokens: usize) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    let mut held = 0;
    for (i, s) in sequences.iter().enumerate() {
        match out.last_mut() {
            Some(last) if held + s.tokens.len() <= batch_tokens => {
                last.end = i + 1;
                held += s.tokens.len();
            }
            _ => {
                out.push(i..i + 1);
                held = s.tokens.len();
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_all_sequences_in_order() {
        let sequences: Vec<Sequence> =
            [3, 4, 1, 9, 2].map(|n| Sequence { tokens: vec![0; n], labels: vec![0; n] }).to_vec();
        assert_eq!(batches(&sequences, 8), [0..3, 3..4, 4..5]);
        assert_eq!(batches(&sequences, 1).len(), 5);
        assert!(batches(&[], 8).is_empty());
    }
}
