//! Which tokens see each other.

use ferrotron_kernels::Sequences;
use ferrotron_tensor::{Result, Tensor, shape_error};

/// Which tokens of a flat batch `[tokens]` see each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `count` sequences of `len` tokens each.
    Rows {
        /// Sequences.
        count: usize,
        /// Tokens of each.
        len: usize,
    },
    /// Sequence i is tokens `offsets[i]..offsets[i+1]`.
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

    /// Tokens of each sequence, in order; no sequences where all are empty rows.
    pub fn lengths(&self) -> Vec<usize> {
        match self {
            Layout::Rows { len: 0, .. } => Vec::new(),
            Layout::Rows { count, len } => vec![*len; *count],
            Layout::Packed { offsets } => {
                offsets.windows(2).map(|w| usize::try_from(w[1] - w[0]).unwrap_or(0)).collect()
            }
        }
    }

    /// Every sequence lengthened to a multiple of `unit` tokens; none where the tokens can no longer be counted.
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

    pub(super) fn sequences(&self) -> Sequences<'_> {
        match self {
            Layout::Rows { .. } => Sequences::Batch,
            Layout::Packed { offsets } => Sequences::Packed { q: offsets, k: offsets },
        }
    }

    /// `[tokens, heads, d]` as the kernels want it.
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

/// Where each of some runs begins, from 0, and where the last ends; none where that is too far.
pub(super) fn offsets(lengths: impl IntoIterator<Item = usize>) -> Option<Vec<i32>> {
    let mut all = vec![0i32];
    let mut end = 0;
    for len in lengths {
        end += i64::try_from(len).ok()?;
        all.push(i32::try_from(end).ok()?);
    }
    Some(all)
}
