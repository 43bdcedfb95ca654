//! Tile tables of packed sequences.

use super::hopper_scheduler::Scheduling;
use super::lru_cache::LruCache;
use super::problem::{AttentionArgs, AttentionProblem, UNBOUNDED};
use crate::cpu::attention::Span;
use crate::cuda::args::kernel_args;
use ferrotron_tensor::{Category, Launch, Result, Stream, Tensor};
use std::cmp::Reverse;

kernel_args! {
    header "args/tile_table.cuh", includes [];

    /// How the tiles of all heads are scheduled: the first entry of a table.
    #[derive(Debug, Default, PartialEq, Eq)]
    pub(super) struct TileSchedule align(16) {
        /// Tiles of a (batch, head) pair.
        pub(super) tiles: i32,
        /// Tiles, or blocks, of all heads.
        pub(super) total: i32,
        /// (batch, head) pairs whose tiles are scheduled together, so that what they share stays in the L2 cache.
        pub(super) section: i32,
        /// Tile numbers of a section: its tiles, rounded up to full waves of blocks where there are several sections.
        pub(super) section_tiles: i32,
        pub(super) pad: [i32; 4],
    }

    /// One tile of a packed sequence.
    struct TileItem {
        /// The sequence's first query and key, and how many of each it has.
        q_start: i32,
        q_len: i32,
        k_start: i32,
        k_len: i32,
        /// First row of the tile, counted from the sequence's own first query or key.
        first: i32,
        /// Row at which the sequence starts in scratch space, where every sequence starts on a tile of 128.
        row: i32,
        pad: [i32; 2],
    }
}

/// Words of an entry of the table.
const ITEM: usize = size_of::<TileItem>() / 4;

/// The axis of the scores that a kernel's tiles partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Side {
    Query,
    Key,
}

/// Uploaded tables. A table belongs to the stream it was uploaded on, as its memory does: other streams have their
/// own.
pub(in crate::cuda) type TileTables = LruCache<(Stream, Vec<Span>), TableKey, TileTable>;

/// Which sequences a kernel is for, where another one takes the rest: those whose queries see fewer keys than this on
/// average, or those that see as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VisibleKeys {
    pub(super) limit: usize,
    pub(super) fewer: bool,
}

/// What a table of given sequences depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct TableKey {
    pub(super) side: Side,
    /// Rows of a tile.
    pub(super) rows: usize,
    pub(super) scheduling: Scheduling,
    /// The table is empty for other sequences.
    pub(super) only: Option<VisibleKeys>,
    left: i32,
    right: i32,
    bottom: i32,
}

/// A table in a tensor: its first word, and how many tiles it holds at most.
#[derive(Clone)]
pub(in crate::cuda) struct TileTable {
    pub(super) memory: Tensor,
    pub(super) start: usize,
    pub(super) capacity: usize,
}

/// A table with the argument of a launch that holds it.
pub(super) type TableArg<'a> = Option<(usize, &'a TileTable)>;

impl TileItem {
    /// Its fields in memory order.
    fn words(self) -> [i32; ITEM] {
        let TileItem { q_start, q_len, k_start, k_len, first, row, pad: [x, y] } = self;
        [q_start, q_len, k_start, k_len, first, row, x, y]
    }
}

impl TileSchedule {
    fn words(self) -> [i32; ITEM] {
        let TileSchedule { tiles, total, section, section_tiles, pad: [a, b, c, d] } = self;
        [tiles, total, section, section_tiles, a, b, c, d]
    }
}

/// Keys that a query sees on average, approximately.
pub(super) fn mean_visible_keys(spans: &[Span], left: i32, right: i32) -> usize {
    let (queries, pairs) = spans.iter().fold((0, 0), |(q, p), s| (q + s.q_len, p + s.q_len * s.k_len));
    let keys = pairs / queries.max(1);
    let window = (left as usize).saturating_add(right as usize).saturating_add(1);
    if right == 0 && left == UNBOUNDED { keys / 2 } else { window.min(keys) }
}

impl TableKey {
    /// Words of a table of so many tiles.
    pub(super) fn words(capacity: usize) -> usize {
        (1 + capacity) * ITEM
    }

    /// Tiles of so many sequences with so many tokens in all, at most.
    pub(super) fn capacity(&self, tokens: usize, sequences: usize) -> usize {
        tokens / self.rows.max(1) + sequences
    }

    /// The words of a table: its schedule, then its tiles, longest work first.
    pub(super) fn table(&self, spans: &[Span]) -> Result<Vec<i32>> {
        let is_for = |v: VisibleKeys| (mean_visible_keys(spans, self.left, self.right) < v.limit) == v.fewer;
        if !self.only.is_none_or(is_for) {
            return Ok(TileSchedule::default().words().to_vec());
        }
        let (left, right) = (i64::from(self.left), i64::from(self.right));
        let mut tiles = Vec::new();
        for (number, span) in spans.iter().enumerate() {
            // Row at which the sequence starts in scratch space, where every sequence starts on a tile of 128.
            let row = (span.q_start / 128 + number) * 128;
            let (q_len, k_len) = (span.q_len as i64, span.k_len as i64);
            let off = if self.bottom == 1 { k_len - q_len } else { 0 };
            let len = if self.side == Side::Query { span.q_len } else { span.k_len };
            for first in (0..len).step_by(self.rows) {
                let (from, to) = (first as i64, (len.min(first + self.rows) - 1) as i64);
                let seen = match self.side {
                    Side::Query => (to + off + right).min(k_len - 1) - (from + off - left).max(0),
                    Side::Key => (to - off + left).min(q_len - 1) - (from - off - right).max(0),
                };
                tiles.push((seen, span, first, row));
            }
        }
        tiles.sort_by_key(|(seen, ..)| Reverse(*seen));
        let words = |(_, s, first, row): &(i64, &Span, usize, usize)| {
            let item = TileItem {
                q_start: s.q_start as i32,
                q_len: s.q_len as i32,
                k_start: s.k_start as i32,
                k_len: s.k_len as i32,
                first: *first as i32,
                row: *row as i32,
                pad: [0; 2],
            };
            item.words()
        };
        let schedule = self.scheduling.schedule(tiles.len())?.words();
        Ok(schedule.into_iter().chain(tiles.iter().flat_map(words)).collect())
    }
}

impl AttentionProblem<'_> {
    /// The table of packed sequences in tiles of so many rows. `None` where kernels compute their tiles.
    pub(super) fn table(
        &self,
        tables: &TileTables,
        s: &Stream,
        (side, rows): (Side, usize),
        scheduling: Scheduling,
        only: Option<VisibleKeys>,
    ) -> Result<Option<TileTable>> {
        let AttentionArgs { left, right, bottom, .. } = self.args;
        let key = TableKey { side, rows, scheduling, only, left, right, bottom };
        if let Some(captured) = &self.captured {
            return captured.table(key).map(Some);
        }
        if !self.packed {
            return Ok(None);
        }
        let is_it = |(stream, spans): &(Stream, Vec<Span>)| stream.same_as(s) && *spans == self.spans;
        let layout = || (s.clone(), self.spans.clone());
        let upload = || {
            let words = key.table(&self.spans)?;
            let memory = s.upload(&words, &[words.len()], Category::Workspace)?;
            Ok(TileTable { memory, start: 0, capacity: words.len() / ITEM - 1 })
        };
        // A captured graph reads its tables in every replay.
        tables.get(is_it, layout, key, s.is_capturing(), upload).map(Some)
    }

    /// Sets the table in the kernels' arguments; returns how many tiles it holds at most.
    pub(super) fn set_table(&self, l: &Launch, table: TableArg, args: &mut AttentionArgs) -> Result<usize> {
        let Some((i, table)) = table else { return Ok(0) };
        args.items = l.address(i)? + (table.start * 4) as u64;
        Ok(table.capacity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(offsets: &[usize]) -> Vec<Span> {
        let span = |w: &[usize]| Span {
            batch: 0,
            q_start: w[0],
            q_len: w[1] - w[0],
            k_start: w[0],
            k_len: w[1] - w[0],
            lse_base: 0,
        };
        offsets.windows(2).map(span).collect()
    }

    fn key(rows: usize, only: Option<VisibleKeys>) -> TableKey {
        let scheduling = Scheduling::Blocks(3);
        TableKey { side: Side::Query, rows, scheduling, only, left: UNBOUNDED, right: 0, bottom: 0 }
    }

    #[test]
    fn tables_hold_every_row_once_and_never_more_than_their_capacity() {
        for offsets in [&[0, 700][..], &[0, 1, 2, 3, 700], &[0, 128, 256, 700], &[0, 0, 350, 350, 700, 700]] {
            let spans = spans(offsets);
            for rows in [16, 64, 128, 192, 1000] {
                let key = key(rows, None);
                let words = key.table(&spans).unwrap();
                let items: Vec<&[i32]> = words.chunks(ITEM).collect();
                let tiles = items.len() - 1;
                assert!(tiles <= key.capacity(700, spans.len()), "{offsets:?} {rows}");
                assert_eq!(items[0], [tiles as i32, 3 * tiles as i32, 3, 3 * tiles as i32, 0, 0, 0, 0]);
                let mut covered = vec![0; 700];
                for item in &items[1..] {
                    let (start, first) = (item[0] as usize, item[4] as usize);
                    let last = (item[1] as usize).min(first + rows);
                    (start + first..start + last).for_each(|t| covered[t] += 1);
                }
                assert!(covered.iter().all(|n| *n == 1), "{offsets:?} {rows}");
                // Longest work first.
                let seen = items[1..].iter().map(|i| i[1].min(i[4] + rows as i32));
                assert!(seen.is_sorted_by(|a, b| a >= b), "{offsets:?} {rows}");
            }
        }
    }

    #[test]
    fn of_two_kernels_one_gets_the_tiles() {
        // 350 and 175 keys are seen on average.
        for (offsets, few) in [(&[0, 700][..], false), (&[0, 350, 700], true)] {
            for fewer in [false, true] {
                let of = key(128, Some(VisibleKeys { limit: 300, fewer })).table(&spans(offsets)).unwrap();
                let all = key(128, None).table(&spans(offsets)).unwrap();
                assert_eq!(of, if few == fewer { all } else { vec![0; ITEM] }, "{offsets:?} {fewer}");
            }
        }
        // A window counts where it is shorter.
        let windowed = |left| mean_visible_keys(&spans(&[0, 700]), left, 0);
        assert_eq!([windowed(99), windowed(5000), windowed(UNBOUNDED)], [100, 700, 350]);
    }
}
