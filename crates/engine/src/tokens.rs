//! Which tokens of a batch a context-parallel rank holds.
//!
//! Every sequence is padded at its end to a multiple of 2c tokens and cut into 2c chunks; rank r holds chunks r and
//! 2c−1−r of each sequence (zigzag). An early chunk attends to few keys and a late one to many; paired, all ranks have
//! equal work. Padding rows past the last sequence make the row count divisible by tp, and that of micro-batches whose length
//! varies one of few.

use crate::GroupRank;
use crate::attention::Layout;
use ferrotron_tensor::{Result, shape_error};

/// Least multiple of the rows of a tensor-parallel rank where their number varies: FP8 GEMMs take no smaller one.
const ROW_MULTIPLE: usize = 16;
/// Numbers of rows between one power of two and the next, so that padding is at most 1/16 of the rows.
const ROW_COUNTS_PER_OCTAVE: usize = 16;

/// The tokens that one context-parallel rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    layout: Layout,
    /// The token of each row; `None` for padding.
    rows: Vec<Option<usize>>,
    whole: usize,
}

impl Tokens {
    /// Splits a batch of sequences over the ranks of `cp`, with rows padded to a multiple of `tp`. With cp = tp = 1, row i
    /// is token i.
    pub fn new(layout: &Layout, cp: GroupRank, tp: usize) -> Result<Tokens> {
        let whole = layout.tokens();
        layout.check(whole)?;
        if cp.rank >= cp.size || tp == 0 {
            return shape_error("tokens", format!("no rank {} of {} with tp {tp}", cp.rank, cp.size));
        }
        let padded = if cp.size == 1 { Some(layout.clone()) } else { layout.padded(2 * cp.size) };
        let Some(padded) = padded else {
            return shape_error(
                "tokens",
                format!("{whole} tokens are too many to pad; use a smaller micro-batch"),
            );
        };
        let mut rows = Vec::with_capacity((padded.tokens() / cp.size).next_multiple_of(tp));
        let mut start = 0;
        for len in layout.lengths() {
            let token = |i: usize| (i < len).then_some(start + i);
            if cp.size == 1 {
                rows.extend((0..len).map(token));
            } else {
                let chunk = len.div_ceil(2 * cp.size);
                for c in [cp.rank, 2 * cp.size - 1 - cp.rank] {
                    rows.extend((c * chunk..(c + 1) * chunk).map(token));
                }
            }
            start += len;
        }
        rows.resize(rows.len().next_multiple_of(tp), None);
        Ok(Tokens { layout: padded, rows, whole })
    }

    /// The same with padding rows at the end, for micro-batches whose length varies from one to the next: GEMM algorithms are
    /// chosen for each number of rows, so there must not be many. Of N rows there are then the next multiple of 1/16 of the power
    /// of two below N, and a multiple of 16·tp.
    pub fn with_few_row_counts(self, tp: usize) -> Tokens {
        let octave = self.rows.len().checked_ilog2().map_or(1, |bits| 1usize << bits);
        let rows = self.rows.len().next_multiple_of((octave / ROW_COUNTS_PER_OCTAVE).max(1));
        self.padded_to(rows.next_multiple_of(ROW_MULTIPLE * tp.max(1)))
    }

    /// The same with padding rows at the end, so many rows in all.
    pub(crate) fn padded_to(mut self, rows: usize) -> Tokens {
        self.rows.resize(rows.max(self.rows.len()), None);
        self
    }

    /// Layout of the full, padded sequences, as attention takes it.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// For each row of this rank its token of the batch, `None` for padding. Every token is a row of exactly one rank.
    pub fn rows(&self) -> &[Option<usize>] {
        &self.rows
    }

    /// Selects this rank's rows of a per-token array (ids, positions, labels, weights); padding rows get `pad`.
    pub fn take<T: Copy>(&self, all: &[T], pad: T) -> Result<Vec<T>> {
        if all.len() != self.whole {
            return shape_error("tokens", format!("{} values for {} tokens", all.len(), self.whole));
        }
        Ok(self.rows.iter().map(|row| row.map_or(pad, |i| all[i])).collect())
    }

    /// Scatters this rank's rows `[rows, width]` into `all [tokens, width]`; padding is dropped.
    pub fn put<T: Copy>(&self, local: &[T], width: usize, all: &mut [T]) -> Result<()> {
        if local.len() != self.rows.len() * width || all.len() != self.whole * width {
            let what = format!("{} and {} values for {} rows", local.len(), all.len(), self.rows.len());
            return shape_error("tokens", format!("{what} of {} tokens, {width} wide", self.whole));
        }
        for (row, token) in self.rows.iter().enumerate() {
            if let Some(token) = token {
                all[token * width..][..width].copy_from_slice(&local[row * width..][..width]);
            }
        }
        Ok(())
    }
}
