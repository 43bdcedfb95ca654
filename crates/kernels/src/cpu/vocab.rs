//! Vocabulary shards and checks of token ids.

use super::rows::PIECE;
use ferrotron_tensor::{Result, Threads, shape_error};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Integer type of token ids, positions and labels: i32 or i64.
pub trait Id: Copy + Into<i64> + Send + Sync {}
impl Id for i32 {}
impl Id for i64 {}

/// The shard `start..start + len` of a vocabulary of `total` ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// First id of the shard.
    pub start: usize,
    /// Ids in the shard.
    pub len: usize,
    /// Ids in the whole vocabulary.
    pub total: usize,
}

impl Shard {
    /// The whole vocabulary as one shard.
    pub const fn whole(total: usize) -> Shard {
        Shard { start: 0, len: total, total }
    }

    /// Shard of `places` table rows from id `first`; rows at or beyond `total` are padding.
    pub fn of_places(first: usize, places: usize, total: usize) -> Shard {
        let start = first.min(total);
        Shard { start, len: places.min(total - start), total }
    }

    /// Local row of an id, if the shard holds it.
    #[inline(always)]
    pub fn local(&self, id: i64) -> Option<usize> {
        let at = usize::try_from(id).ok()?.checked_sub(self.start)?;
        (at < self.len).then_some(at)
    }

    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        if self.start.checked_add(self.len).is_some_and(|end| end <= self.total) {
            return Ok(());
        }
        shape_error(op, format!("{self:?} exceeds the vocabulary"))
    }
}

/// Checks that every id is in `0..total` or is `ignore`; the error names the first that is not.
pub fn check_ids<I: Id>(
    threads: &Threads,
    op: &'static str,
    ids: &[I],
    total: usize,
    ignore: Option<i64>,
) -> Result<()> {
    let first = AtomicUsize::new(usize::MAX);
    let bad = |id: &I| {
        let id = (*id).into();
        !(0..total as i64).contains(&id) && Some(id) != ignore
    };
    threads.parallel_ranges(ids.len(), 4 * PIECE, &|range| {
        if let Some(at) = ids[range.clone()].iter().position(bad) {
            first.fetch_min(range.start + at, Ordering::Relaxed);
        }
    });
    match ids.get(first.into_inner()) {
        None => Ok(()),
        Some(id) => {
            let at = ids.iter().position(bad).unwrap_or_default();
            let id: i64 = (*id).into();
            shape_error(
                op,
                format!("id {id} at position {at} is outside 0..{total}; is it from another tokenizer?"),
            )
        }
    }
}
