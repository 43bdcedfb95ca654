//! Samples cut from a token stream in memory.

use super::batch::checked_id;
use super::{Batches, Row};
use crate::{Error, Result};

/// One output of SplitMix64 at a counter: a hash that places samples.
pub(crate) fn splitmix(seed: u64, counter: u64) -> u64 {
    let mut z = seed.wrapping_add(counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A token stream and how samples are placed on it.
#[derive(Clone, Debug)]
pub struct Stream {
    tokens: Vec<i32>,
    seq: usize,
    /// `Some`: sample n starts at an offset hashed from (seed, n). `None`: samples are consecutive.
    seed: Option<u64>,
}

impl Stream {
    /// Consecutive samples, starting over at the end. `tokens` needs at least `seq` + 1 tokens.
    pub fn sequential(tokens: Vec<i32>, seq: usize) -> Result<Self> {
        Self::new(tokens, seq, None)
    }

    /// Samples at random offsets.
    pub fn random(tokens: Vec<i32>, seq: usize, seed: u64) -> Result<Self> {
        Self::new(tokens, seq, Some(seed))
    }

    /// Checks that all ids are below `vocab`.
    pub fn with_vocab(self, vocab: u32) -> Result<Self> {
        for (i, &t) in self.tokens.iter().enumerate() {
            checked_id(i64::from(t), vocab, &|| format!("token stream, place {i}"))?;
        }
        Ok(self)
    }

    fn new(tokens: Vec<i32>, seq: usize, seed: Option<u64>) -> Result<Self> {
        if seq == 0 || tokens.len() <= seq {
            return Err(Error::Invalid(format!(
                "a stream of {} tokens is too short for samples of {seq}; give more data or a shorter sequence",
                tokens.len()
            )));
        }
        Ok(Self { tokens, seq, seed })
    }
}

impl Batches for Stream {
    fn seq(&self) -> usize {
        self.seq
    }

    fn samples(&self) -> u64 {
        ((self.tokens.len() - 1) / self.seq) as u64
    }

    fn resets(&self) -> bool {
        false
    }

    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let start = match self.seed {
            Some(seed) => (splitmix(seed, n) % (self.tokens.len() - self.seq) as u64) as usize,
            None => (n % self.samples()) as usize * self.seq,
        };
        row.tokens.extend_from_slice(&self.tokens[start..start + self.seq]);
        row.labels.extend_from_slice(&self.tokens[start + 1..start + 1 + self.seq]);
        row.positions.extend(0..self.seq as i32);
        row.starts.push(0);
        Ok(())
    }
}
