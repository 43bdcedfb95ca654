//! Tile tables of packed sequences.

use super::lru_cache::LruCache;
use super::problem::{AttentionArgs, AttentionProblem};
use crate::cpu::attention::Span;
use crate::cuda::args::kernel_args;
use ferrotron_tensor::{Category, Launch, Result, Stream, Tensor};
use std::cmp::Reverse;

kernel_args! {
    header "args/tile_table.cuh", includes [];

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
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) enum Side {
    Query,
    Key,
}

/// Uploaded tables. A table belongs to the stream it was uploaded on, as its memory does: other streams have their
/// own.
pub(in crate::cuda) type TileTables = LruCache<(Stream, Vec<Span>), TableKey, TileTable>;

/// What a table of given sequences depends on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct TableKey {
    rows: usize,
    hopper: Option<usize>,
    side: Side,
    left: i32,
    right: i32,
    bottom: i32,
}

/// Two tables in one tensor: first entry and number of entries, of the portable kernels and of the Hopper kernels.
#[derive(Clone)]
pub(in crate::cuda) struct TileTable {
    pub(super) table: Tensor,
    portable: [usize; 2],
    hopper: [usize; 2],
}

impl TileItem {
    /// Its fields in memory order.
    fn words(self) -> [i32; ITEM] {
        let TileItem { q_start, q_len, k_start, k_len, first, row, pad: [x, y] } = self;
        [q_start, q_len, k_start, k_len, first, row, x, y]
    }
}

impl AttentionProblem {
    /// Tables of packed sequences in tiles of so many rows, longest work first; also for the Hopper kernels' tile size
    /// where they may run. `None` where kernels compute their tiles.
    pub(super) fn items(
        &self,
        tables: &TileTables,
        s: &Stream,
        rows: usize,
        hopper: Option<usize>,
        side: Side,
    ) -> Result<Option<TileTable>> {
        if !self.packed {
            return Ok(None);
        }
        let AttentionArgs { left, right, bottom, .. } = self.args;
        let name = TableKey { rows, hopper, side, left, right, bottom };
        let is_it = |(stream, spans): &(Stream, Vec<Span>)| stream.same_as(s) && *spans == self.spans;
        let layout = || (s.clone(), self.spans.clone());
        tables.get(is_it, layout, name, || self.upload(s, rows, hopper, side)).map(Some)
    }

    fn upload(&self, s: &Stream, rows: usize, hopper: Option<usize>, side: Side) -> Result<TileTable> {
        let mut table = self.tiles_of(rows, side);
        let portable = [0, table.len() / ITEM];
        let mut other = portable;
        if let Some(h) = hopper.filter(|h| *h != rows) {
            let more = self.tiles_of(h, side);
            other = [portable[1], more.len() / ITEM];
            table.extend(more);
        }
        let table = s.upload(&table, &[table.len()], Category::Workspace)?;
        Ok(TileTable { table, portable, hopper: other })
    }

    fn tiles_of(&self, rows: usize, side: Side) -> Vec<i32> {
        let (left, right) = (i64::from(self.args.left), i64::from(self.args.right));
        let mut tiles = Vec::new();
        for (number, span) in self.spans.iter().enumerate() {
            // Row at which the sequence starts in scratch space, where every sequence starts on a tile of 128.
            let row = (span.q_start / 128 + number) * 128;
            let (q_len, k_len) = (span.q_len as i64, span.k_len as i64);
            let off = if self.args.bottom == 1 { k_len - q_len } else { 0 };
            let len = if side == Side::Query { span.q_len } else { span.k_len };
            for first in (0..len).step_by(rows) {
                let (from, to) = (first as i64, (len.min(first + rows) - 1) as i64);
                let seen = match side {
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
        tiles.iter().flat_map(words).collect()
    }

    /// Sets the table in the kernels' arguments; returns its number of tiles.
    pub(super) fn table(
        &self,
        l: &Launch,
        items: Option<(usize, &TileTable)>,
        hopper: bool,
        args: &mut AttentionArgs,
    ) -> Result<usize> {
        let Some((i, items)) = items else { return Ok(0) };
        let [first, count] = if hopper { items.hopper } else { items.portable };
        if count > 0 {
            args.items = l.address(i)? + (first * ITEM * 4) as u64;
        }
        Ok(count)
    }
}
