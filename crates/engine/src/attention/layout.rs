//! How sequences lie in a flat batch.

use ferrotron_kernels::{CapturedSequences, Sequences};
use ferrotron_tensor::{Result, Tensor, shape_error};

/// How sequences lie in a flat batch `[tokens]`: tokens attend within their own sequence only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `count` sequences of equal length `len` (bshd).
    Rows {
        /// Sequences.
        count: usize,
        /// Tokens of each.
        len: usize,
    },
    /// Packed sequences (thd): sequence i is tokens `offsets[i]..offsets[i+1]` (cu_seqlens).
    Packed {
        /// Ascending, from 0 to the number of tokens.
        offsets: Vec<i32>,
    },
}

impl Layout {
    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        match self {
            Layout::Rows { count, len } => count.saturating_mul(*len),
            Layout::Packed { offsets } => offsets.last().map_or(0, |n| usize::try_from(*n).unwrap_or(0)),
        }
    }

    /// Length of each sequence, in order; empty where `len` is 0.
    pub fn lengths(&self) -> Vec<usize> {
        match self {
            Layout::Rows { len: 0, .. } => Vec::new(),
            Layout::Rows { count, len } => vec![*len; *count],
            Layout::Packed { offsets } => {
                offsets.windows(2).map(|w| usize::try_from(w[1] - w[0]).unwrap_or(0)).collect()
            }
        }
    }

    /// Every sequence padded to a multiple of `unit` tokens; `None` on overflow.
    pub(crate) fn padded(&self, unit: usize) -> Option<Layout> {
        match self {
            Layout::Rows { count, len } => {
                let len = len.checked_next_multiple_of(unit)?;
                count.checked_mul(len).map(|_| Layout::Rows { count: *count, len })
            }
            Layout::Packed { .. } => {
                let lengths = self.lengths().into_iter().map(|n| n.checked_next_multiple_of(unit));
                let offsets = offsets(lengths.collect::<Option<Vec<usize>>>()?)?;
                Some(Layout::Packed { offsets })
            }
        }
    }

    /// Checks that it describes exactly `tokens` tokens.
    pub fn check(&self, tokens: usize) -> Result<()> {
        let fits = match self {
            Layout::Rows { count, len } => count.checked_mul(*len) == Some(tokens),
            Layout::Packed { offsets } => {
                offsets.first() == Some(&0)
                    && offsets.last().is_some_and(|n| usize::try_from(*n) == Ok(tokens))
                    && offsets.windows(2).all(|w| w[0] <= w[1])
            }
        };
        if fits { Ok(()) } else { shape_error("sequences", format!("{self:?} does not cut {tokens} tokens")) }
    }

    /// The sequences of a pass; those of a captured one are `captured` where they are packed.
    pub(super) fn sequences<'a>(&'a self, captured: Option<&'a CapturedSequences>) -> Sequences<'a> {
        match (self, captured) {
            (Layout::Rows { .. }, _) => Sequences::Batch,
            (Layout::Packed { .. }, Some(sequences)) => Sequences::Captured(sequences),
            (Layout::Packed { offsets }, None) => Sequences::Packed { q: offsets, k: offsets },
        }
    }

    /// `[tokens, heads, d]` in the shape that kernels expect: `[count, len, heads, d]`, or unchanged when packed.
    pub(super) fn shaped(&self, t: &Tensor) -> Result<Tensor> {
        match (self, t.shape()) {
            (Layout::Rows { count, len }, [_, n, d]) => t.view(&[*count, *len, *n, *d]),
            _ => Ok(t.clone()),
        }
    }

    pub(super) fn lse_shape(&self, heads: usize) -> Vec<usize> {
        match self {
            Layout::Rows { count, len } => vec![*count, heads, *len],
            Layout::Packed { .. } => vec![self.tokens(), heads],
        }
    }
}

/// Prefix sums of lengths, from 0 (cu_seqlens); `None` where they exceed i32.
pub(super) fn offsets(lengths: impl IntoIterator<Item = usize>) -> Option<Vec<i32>> {
    let mut all = vec![0i32];
    let mut end = 0;
    for len in lengths {
        end += i64::try_from(len).ok()?;
        all.push(i32::try_from(end).ok()?);
    }
    Some(all)
}
