//! The memory of one stream: ranges of addresses, the physical memory behind them, and which of it is free.
//!
//! A segment reserves a large region of addresses once and maps physical memory into it as it grows, so that what it maps
//! today continues what it mapped before: freed neighbours coalesce across all of it. Where addresses cannot be reserved, it
//! grows by plain allocations, inside which ranges are split and coalesced the same way.

use crate::backing::{Backing, MemoryPiece};
use crate::free_ranges::FreeRanges;
use std::collections::BTreeMap;
use std::ops::Range;

/// Sizes and addresses of blocks are multiples of this.
pub(crate) const ALIGN: usize = 512;

/// Blocks from this size on are large. Small ones have a segment of their own: they would leave gaps that large ones do not
/// fit into.
pub(crate) const LARGE: usize = 1 << 20;

/// Which blocks a segment holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SizeKind {
    Small,
    Large,
}

impl SizeKind {
    pub(crate) const ALL: [SizeKind; 2] = [SizeKind::Small, SizeKind::Large];

    /// The kind of a block of `bytes`, which are rounded up to [`ALIGN`].
    pub(crate) fn of(bytes: usize) -> SizeKind {
        if bytes < LARGE { SizeKind::Small } else { SizeKind::Large }
    }
}

/// A segment grows by at least this part of its size, so that it rarely does, up to [`MAX_GROWTH`].
const GROWTH: usize = 32;
const MAX_GROWTH: usize = 256 << 20;
/// A plain allocation has at least this part of the segment's size, because nothing coalesces across its ends.
const PLAIN_GROWTH: usize = 8;
const PLAIN_BYTES: Range<usize> = 32 << 20..1 << 30;

pub(crate) struct Segment {
    backing: Backing,
    kind: SizeKind,
    free: FreeRanges,
    /// Physical memory by address.
    pieces: BTreeMap<usize, MemoryPiece>,
    /// Reserved addresses.
    regions: Vec<Range<usize>>,
    reserved: usize,
}

impl Segment {
    pub(crate) fn new(backing: &Backing, kind: SizeKind) -> Segment {
        Segment {
            backing: backing.clone(),
            kind,
            free: FreeRanges::default(),
            pieces: BTreeMap::new(),
            regions: Vec::new(),
            reserved: 0,
        }
    }

    /// Bytes of physical memory it holds.
    pub(crate) fn reserved(&self) -> usize {
        self.reserved
    }

    /// Takes a free block.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        self.free.take(bytes)
    }

    pub(crate) fn free(&mut self, block: Range<usize>) {
        let Segment { free, pieces, regions, .. } = self;
        free.insert(block, |at| is_border(pieces, regions, at));
    }

    /// Moves a free range to `to`, such as the memory of a graph.
    pub(crate) fn move_free(&mut self, range: Range<usize>, to: &mut FreeRanges) {
        if self.free.remove(range.clone()) {
            to.insert(range, |at| self.is_border(at));
        }
    }

    /// True if memory before and after the address must not be joined.
    pub(crate) fn is_border(&self, at: usize) -> bool {
        is_border(&self.pieces, &self.regions, at)
    }

    /// Adds memory so that a block of `bytes` becomes free, but at most `budget` in all. Without enough memory it may add
    /// less, or nothing.
    pub(crate) fn grow(&mut self, bytes: usize, budget: usize) {
        let Some(place) = self.place(bytes).or_else(|| self.new_region(bytes)) else {
            return self.grow_plain(bytes, budget);
        };
        let step = (self.reserved / GROWTH).min(MAX_GROWTH).next_multiple_of(self.granularity());
        let wanted = place.need.next_multiple_of(step.max(self.granularity())).min(place.room);
        let mut got = 0;
        for target in [wanted, place.need] {
            if (got + 1..=budget).contains(&target) {
                for (at, piece) in self.backing.map(place.at + got, target - got) {
                    got += piece.bytes;
                    self.add(at, piece);
                }
            }
        }
    }

    fn grow_plain(&mut self, bytes: usize, budget: usize) {
        let need = bytes.next_multiple_of(self.granularity());
        let wanted = match self.kind {
            SizeKind::Small => need,
            SizeKind::Large => {
                let part = (self.reserved / PLAIN_GROWTH).clamp(PLAIN_BYTES.start, PLAIN_BYTES.end);
                need.max(part.next_multiple_of(self.granularity()))
            }
        };
        for target in [wanted, need] {
            if target <= budget
                && let Some((at, piece)) = self.backing.allocate(target)
            {
                return self.add(at, piece);
            }
        }
    }

    fn add(&mut self, at: usize, piece: MemoryPiece) {
        self.reserved += piece.bytes;
        self.pieces.insert(at, piece);
        self.free(at..at + piece.bytes);
    }

    /// Where in the reserved regions the least new memory makes a free block of `bytes`.
    fn place(&self, bytes: usize) -> Option<Place> {
        let granularity = self.granularity();
        let places = self.gaps().into_iter().filter_map(|gap| {
            let before =
                self.free.ending_at(gap.start).filter(|_| !self.is_border(gap.start)).map_or(0, |r| r.len());
            let after =
                self.free.starting_at(gap.end).filter(|_| !self.is_border(gap.end)).map_or(0, |r| r.len());
            let (at, room) = (gap.start, gap.len());
            let need = bytes.saturating_sub(before).checked_next_multiple_of(granularity)?;
            if need <= room {
                Some(Place { need, at, room })
            } else {
                (before + room + after >= bytes).then_some(Place { need: room, at, room })
            }
        });
        places.min_by_key(|p| (p.need, p.at))
    }

    /// Reserved addresses without memory.
    fn gaps(&self) -> Vec<Range<usize>> {
        let mut gaps = Vec::new();
        for region in &self.regions {
            let mut end = region.start;
            for (at, piece) in self.pieces.range(region.clone()) {
                gaps.push(end..*at);
                end = at + piece.bytes;
            }
            gaps.push(end..region.end);
        }
        gaps.retain(|g| !g.is_empty());
        gaps
    }

    fn new_region(&mut self, bytes: usize) -> Option<Place> {
        let need = bytes.checked_next_multiple_of(self.granularity())?;
        let room = need.max(self.backing.region_bytes(self.kind));
        let at = self.backing.reserve(room)?;
        self.regions.push(at..at + room);
        Some(Place { need, at, room })
    }

    /// Takes physical memory of which every byte is free, the highest addresses first, until `wanted` is reached. Its
    /// addresses stay occupied until [`Segment::end_release`].
    pub(crate) fn begin_release(&mut self, wanted: &mut usize) -> Vec<(usize, MemoryPiece)> {
        let mut released = Vec::new();
        let ranges: Vec<Range<usize>> = self.free.iter().collect();
        for range in ranges.into_iter().rev() {
            let inside = self.pieces.range(range.clone()).rev().filter(|(at, p)| **at + p.bytes <= range.end);
            for (at, piece) in inside {
                if *wanted == 0 {
                    return released;
                }
                *wanted = wanted.saturating_sub(piece.bytes);
                self.free.remove(*at..at + piece.bytes);
                released.push((*at, *piece));
            }
        }
        released
    }

    /// Ends a release: the pieces are gone, or free again if they were kept.
    pub(crate) fn end_release(&mut self, pieces: &[(usize, MemoryPiece)], gone: bool) {
        for (at, piece) in pieces {
            if gone {
                self.pieces.remove(at);
                self.reserved -= piece.bytes;
            } else {
                self.free(*at..at + piece.bytes);
            }
        }
    }

    fn granularity(&self) -> usize {
        self.backing.granularity()
    }

    #[cfg(test)]
    pub(crate) fn free_ranges(&self) -> Vec<Range<usize>> {
        self.free.iter().collect()
    }
}

/// A place to map memory at: `need` bytes make the block, `room` is how much can be mapped.
struct Place {
    need: usize,
    at: usize,
    room: usize,
}

/// Regions and plain allocations begin at borders.
fn is_border(pieces: &BTreeMap<usize, MemoryPiece>, regions: &[Range<usize>], at: usize) -> bool {
    regions.iter().any(|r| r.start == at) || pieces.get(&at).is_some_and(MemoryPiece::is_plain)
}

impl Drop for Segment {
    fn drop(&mut self) {
        for (at, piece) in std::mem::take(&mut self.pieces) {
            self.backing.release(at, piece);
        }
        for region in self.regions.drain(..) {
            self.backing.unreserve(region);
        }
    }
}
