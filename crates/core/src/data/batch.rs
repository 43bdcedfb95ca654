//! Batches of token sequences, and the trait of their sources.

use crate::{Error, Result};

/// The label of positions without loss.
pub const IGNORE: i32 = -100;

/// Samples, flattened one after another: `tokens` is the sum of their lengths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Input ids `[tokens]`.
    pub tokens: Vec<i32>,
    /// The id that follows each input, [`IGNORE`] for positions without loss `[tokens]`.
    pub labels: Vec<i32>,
    /// Position of each token within its document or row `[tokens]`.
    pub positions: Vec<i32>,
    /// Offsets of sequences over the flattened batch, between which there is no attention: 0, every document and row
    /// start, and `tokens`. `None` if each row is one sequence.
    pub cu_seqlens: Option<Vec<i32>>,
    /// True for positions that only pad a row `[tokens]`; `None` if there are none.
    pub padding: Option<Vec<bool>>,
    /// The number of tokens differs from batch to batch.
    pub varies: bool,
}

impl Batch {
    /// The same batch as padding only: no position has a loss or goes to an expert.
    pub fn as_padding(mut self) -> Batch {
        self.labels.fill(IGNORE);
        self.padding = Some(vec![true; self.tokens.len()]);
        self
    }
}

/// One sample. Sources append to it; its buffers are reused from row to row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Input ids `[seq]`.
    pub tokens: Vec<i32>,
    /// Labels `[seq]`.
    pub labels: Vec<i32>,
    /// Positions `[seq]`.
    pub positions: Vec<i32>,
    /// Where sequences start inside the row, ascending, beginning with 0.
    pub starts: Vec<usize>,
    /// Number of trailing positions that only pad the row: they have no label and go to no expert.
    pub padding: usize,
}

impl Row {
    /// Empties the row and keeps its buffers.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.labels.clear();
        self.positions.clear();
        self.starts.clear();
        self.padding = 0;
    }
}

/// A member of a validation blend.
pub struct Member<'a> {
    /// Its name: the prefix of its pair.
    pub name: &'a str,
    /// Its weight in the mean; all weights sum to 1.
    pub weight: f64,
    /// Its samples.
    pub data: &'a dyn Batches,
}

/// A source of samples. A sample depends on its number only, so a run resumed after n samples, under any layout, sees
/// exactly what an uninterrupted run would have seen.
pub trait Batches: Send + Sync {
    /// Tokens per sample; of the longest, where their lengths vary.
    fn seq(&self) -> usize;

    /// The length of sample `n` where samples are not padded to equal lengths; `None` where all have [`Batches::seq`] tokens.
    fn length(&self, n: u64) -> Result<Option<usize>> {
        let _ = n;
        Ok(None)
    }

    /// Tokens of samples `first .. first + count`.
    fn tokens(&self, first: u64, count: u64) -> Result<u64> {
        let seq = self.seq() as u64;
        if count == 0 || self.length(first)?.is_none() {
            return Ok(count.saturating_mul(seq));
        }
        (0..count)
            .try_fold(0, |sum, k| Ok(sum + self.length(first.wrapping_add(k))?.map_or(seq, |n| n as u64)))
    }

    /// Number of samples in one epoch, at least 1. Any sample number may be requested; finite sources start over.
    fn samples(&self) -> u64;

    /// True if sequences may start inside a row.
    fn resets(&self) -> bool;

    /// The members of a validation blend, which are evaluated one by one; empty for an undivided source.
    fn members(&self) -> Vec<Member<'_>> {
        Vec::new()
    }

    /// Writes sample `n` into the empty row.
    fn row(&self, n: u64, row: &mut Row) -> Result<()>;

    /// Samples `first .. first + count`.
    fn batch(&self, first: u64, count: usize) -> Result<Batch> {
        let total = self.tokens(first, count as u64)?;
        let Some(total) = i32::try_from(total).ok().and_then(|t| usize::try_from(t).ok()) else {
            return Err(Error::Invalid(format!(
                "a batch of {count} samples of up to {} tokens is too big; use smaller micro-batches",
                self.seq()
            )));
        };
        let mut batch = Batch {
            tokens: Vec::with_capacity(total),
            labels: Vec::with_capacity(total),
            positions: Vec::with_capacity(total),
            varies: self.length(first)?.is_some(),
            ..Batch::default()
        };
        let mut cu = Vec::new();
        let mut row = Row::default();
        for k in 0..count {
            row.clear();
            self.row(first.wrapping_add(k as u64), &mut row)?;
            let (start, length) = (batch.tokens.len(), row.tokens.len());
            debug_assert!(row.starts.first() == Some(&0));
            batch.tokens.extend_from_slice(&row.tokens);
            batch.labels.extend_from_slice(&row.labels);
            batch.positions.extend_from_slice(&row.positions);
            if row.padding > 0 || batch.padding.is_some() {
                let is_padding = batch.padding.get_or_insert_with(|| vec![false; start]);
                is_padding.resize(start + length - row.padding.min(length), false);
                is_padding.resize(start + length, true);
            }
            cu.extend(row.starts.iter().map(|s| (start + s) as i32));
        }
        if batch.tokens.len() != total {
            let what = format!(
                "samples {first} to {} have {} tokens and should have {total}; this is a bug, please report it with the recipe",
                first.wrapping_add(count as u64),
                batch.tokens.len()
            );
            return Err(Error::Invalid(what));
        }
        if self.resets() {
            cu.push(total as i32);
            batch.cu_seqlens = Some(cu);
        }
        Ok(batch)
    }
}

impl<T: Batches + ?Sized> Batches for Box<T> {
    fn seq(&self) -> usize {
        (**self).seq()
    }
    fn length(&self, n: u64) -> Result<Option<usize>> {
        (**self).length(n)
    }
    fn samples(&self) -> u64 {
        (**self).samples()
    }
    fn resets(&self) -> bool {
        (**self).resets()
    }
    fn members(&self) -> Vec<Member<'_>> {
        (**self).members()
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        (**self).row(n, row)
    }
}

/// Checks that a token id is inside the vocabulary.
pub(crate) fn checked_id(token: i64, vocab: u32, source: &dyn Fn() -> String) -> Result<i32> {
    if (0..i64::from(vocab)).contains(&token)
        && let Ok(id) = i32::try_from(token)
    {
        return Ok(id);
    }
    let what = format!(
        "{}: token {token} is outside the vocabulary of {vocab}; the data was made with another tokenizer",
        source()
    );
    Err(Error::Invalid(what))
}
