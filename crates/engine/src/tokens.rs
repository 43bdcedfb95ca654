//! Which tokens of a batch a context-parallel rank holds.
//!
//! Every sequence is padded at its end to a multiple of 2c tokens and cut into 2c chunks; rank r holds chunks r and
//! 2c−1−r, one after the other, of each sequence in turn. An early chunk sees few keys and a late one many: so paired,
//! all ranks have the same work. Rows past the last sequence make the number divide over tensor-parallel ranks.

use crate::GroupRank;
use crate::attention::Layout;
use ferrotron_tensor::{Result, shape_error};

/// The tokens of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    layout: Layout,
    /// The token of each row; none for padding.
    rows: Vec<Option<usize>>,
    whole: usize,
}

impl Tokens {
    /// Of a batch of sequences, over the ranks of `cp`, for `tp` ranks that share every layer. Alone, every token is
    /// its own row.
    pub fn new(layout: &Layout, cp: GroupRank, tp: usize) -> Result<Tokens> {
        let whole = layout.tokens();
        layout.check(whole)?;
        if cp.rank >= cp.size || tp == 0 {
            return shape_error("tokens", format!("no rank {} of {} with tp {tp}", cp.rank, cp.size));
        }
        let padded = if cp.size == 1 { Some(layout.clone()) } else { layout.padded(2 * cp.size) };
        let Some(padded) = padded else {
            return shape_error("tokens", format!("{whole} tokens are too many to pad; use smaller batches"));
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

    /// The whole padded sequences: what attention is told.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The token of the batch that each row of this rank is; none for padding. Every token is a row of one rank.
    pub fn rows(&self) -> &[Option<usize>] {
        &self.rows
    }

    /// This rank's rows of something that the batch has for each token (ids, positions, labels, weights); `pad` for
    /// padding.
    pub fn take<T: Copy>(&self, all: &[T], pad: T) -> Result<Vec<T>> {
        if all.len() != self.whole {
            return shape_error("tokens", format!("{} values for {} tokens", all.len(), self.whole));
        }
        Ok(self.rows.iter().map(|row| row.map_or(pad, |i| all[i])).collect())
    }

    /// Puts this rank's rows `[rows, width]` to their places in `all [tokens, width]`; padding is dropped.
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
