//! Memory of CUDA graphs.
//!
//! A graph replays on the addresses it was captured with. During a capture, allocations of the captured stream are noted by
//! an arena; they come from the free memory of that stream, so a capture needs hardly any new memory. When the capture ends,
//! the arena is sealed: what the capture used leaves the stream's free memory and stays reserved for the lifetime of the
//! graph. Between two replays its contents are dead, so it is lent to other work on the same stream, whose order separates
//! the two. The graph may be replayed only while nothing is lent; one whose replays must never wait lends nothing.

use crate::free_ranges::FreeRanges;
use crate::pool::{Block, MemoryPool, PoolState, StreamMemory};
use crate::segment::{Segment, SizeKind};
use std::ops::Range;

/// The memory of one capture.
pub(crate) struct Arena {
    pub(crate) id: u64,
    pub(crate) stream: u32,
    /// Blocks that the capture used, which may overlap; empty once sealed.
    used: Vec<Range<usize>>,
    /// Memory of the sealed arena that is not lent, by kind of block.
    free: [FreeRanges; 2],
    /// Blocks currently allocated from this arena.
    in_use: usize,
    /// True during the capture, false once sealed.
    open: bool,
    /// Whether memory is lent between replays.
    lends: bool,
    /// A block allocated before the capture was freed during it. The pool would hand it to other work while the graph
    /// still uses its address.
    freed_outside: bool,
}

impl Arena {
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Notes a block that was allocated for captured work; returns the arena's id.
    pub(crate) fn use_block(&mut self, block: &Range<usize>) -> u64 {
        self.used.push(block.clone());
        self.in_use += 1;
        self.id
    }

    /// Lends a block to work between replays. Small blocks are not lent: small tensors may live across a replay (a loss that
    /// is yet to be read), which would block it, and are cheap to allocate elsewhere.
    pub(crate) fn lend(&mut self, bytes: usize) -> Option<Block> {
        if self.open || !self.lends || SizeKind::of(bytes) == SizeKind::Small {
            return None;
        }
        let range = self.free[SizeKind::Large as usize].take(bytes)?;
        self.in_use += 1;
        Some(Block { range, arena: Some(self.id) })
    }

    /// Frees a block of this arena. During the capture it goes back to the stream's segment, which only captured work uses.
    pub(crate) fn free(&mut self, block: Range<usize>, segment: &mut Segment) {
        self.in_use -= 1;
        if self.open {
            segment.free(block);
        } else {
            self.free[SizeKind::of(block.len()) as usize].insert(block, |at| segment.is_border(at));
        }
    }

    pub(crate) fn note_outside_free(&mut self) {
        self.freed_outside = true;
    }

    /// Ends the capture: all memory it used moves from the stream to the arena.
    fn seal(&mut self, stream: &mut StreamMemory) {
        self.open = false;
        let mut used = std::mem::take(&mut self.used);
        used.sort_unstable_by_key(|r| r.start);
        let mut end = 0;
        for block in used {
            // The part that no earlier block covers.
            let rest = block.start.max(end)..block.end;
            if !rest.is_empty() {
                let kind = SizeKind::of(block.len());
                end = rest.end;
                stream.segment(kind).move_free(rest, &mut self.free[kind as usize]);
            }
        }
    }
}

impl MemoryPool {
    /// Starts an arena for what is allocated on `stream` from now on.
    pub(crate) fn open_arena(&self, id: u64, stream: u32, lends: bool) {
        let (used, free) = (Vec::new(), Default::default());
        let arena = Arena { id, stream, used, free, in_use: 0, open: true, lends, freed_outside: false };
        self.lock().arenas.push(arena);
    }

    /// Ends the capture: what it did not use is free as before, the rest stays reserved. Fails with the reason if
    /// memory allocated in the capture is still in use, or memory allocated before it was freed; the arena is then
    /// dissolved.
    pub(crate) fn seal_arena(&self, id: u64) -> Result<(), &'static str> {
        let mut state = self.lock();
        let PoolState { streams, arenas, .. } = &mut *state;
        let Some(arena) = arenas.iter_mut().find(|a| a.id == id) else {
            return Err("its arena was dissolved");
        };
        let why = match arena {
            Arena { freed_outside: true, .. } => {
                "the captured work frees memory that was allocated before the capture"
            }
            Arena { in_use: 1.., .. } => "the captured work keeps memory that it allocated",
            _ => {
                match streams.get_mut(&arena.stream) {
                    Some(stream) => arena.seal(stream),
                    None => arena.open = false,
                }
                return Ok(());
            }
        };
        drop(state);
        self.dissolve_arena(id);
        Err(why)
    }

    /// True if no block of the arena is in use, so that its graph may be replayed.
    pub(crate) fn is_unused(&self, id: u64) -> bool {
        self.lock().arenas.iter().any(|a| a.id == id && a.in_use == 0)
    }

    /// Returns the memory of a graph that was dropped or never completed to its stream. Blocks still in use follow when
    /// freed.
    pub(crate) fn dissolve_arena(&self, id: u64) {
        let PoolState { streams, arenas, .. } = &mut *self.lock();
        for arena in arenas.extract_if(.., |a| a.id == id) {
            let Some(stream) = streams.get_mut(&arena.stream) else { continue };
            for kind in SizeKind::ALL {
                let ranges = arena.free[kind as usize].iter();
                ranges.for_each(|range| stream.segment(kind).free(range));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Category, DType, Device, MemoryReport, Stream, Tensor, Threads};

    fn device() -> (Device, Stream) {
        let device = Device::cpu(Threads::new(1).unwrap());
        let s = device.stream("compute").unwrap();
        (device, s)
    }

    fn bytes(s: &Stream, n: usize) -> Tensor {
        Tensor::empty(s, &[n], DType::U8, Category::Activations).unwrap()
    }

    fn at(t: &Tensor) -> usize {
        t.buffer.address()
    }

    #[test]
    fn a_capture_starts_with_the_streams_free_blocks_and_reserves_those_it_used() {
        let (device, s) = device();
        let pool = &device.inner.pool;
        let (used, unused) = (bytes(&s, 2 << 20), bytes(&s, 3 << 20));
        let ids = [at(&used), at(&unused)];
        drop((used, unused));
        pool.open_arena(7, 0, true);
        let again = bytes(&s, 2 << 20);
        assert_eq!(at(&again), ids[0]);
        drop(again);
        let new = bytes(&s, 5000);
        let reserved = at(&new);
        drop(new);
        pool.seal_arena(7).unwrap();
        assert!(pool.is_unused(7));
        // Untouched blocks are free for anyone, and taking them lends nothing.
        let other = bytes(&s, 3 << 20);
        assert_eq!(at(&other), ids[1]);
        assert!(pool.is_unused(7));
        // Small blocks are never lent. Large ones are, which blocks the replay until they are freed.
        let small = bytes(&s, 5000);
        assert_ne!(at(&small), reserved);
        assert!(pool.is_unused(7));
        let lent = bytes(&s, 2 << 20);
        assert_eq!(at(&lent), ids[0]);
        assert!(!pool.is_unused(7));
        drop(lent);
        assert!(pool.is_unused(7));
        // Another stream never gets a block of the arena.
        let elsewhere = bytes(&device.stream("other").unwrap(), 2 << 20);
        assert_ne!(at(&elsewhere), ids[0]);
        // Trimming does not free reserved blocks.
        device.trim().unwrap();
        let lent = bytes(&s, 2 << 20);
        assert_eq!(at(&lent), ids[0]);
        // The graph may be dropped before a lent block is freed.
        pool.dissolve_arena(7);
        drop(lent);
        assert!(!pool.is_unused(7));
        assert_eq!([at(&bytes(&s, 2 << 20)), at(&bytes(&s, 5000))], [ids[0], reserved]);
    }

    #[test]
    fn reserved_memory_is_never_lent() {
        let (device, s) = device();
        let pool = &device.inner.pool;
        pool.open_arena(7, 0, false);
        let captured = bytes(&s, 2 << 20);
        let id = at(&captured);
        drop(captured);
        pool.seal_arena(7).unwrap();
        let other = bytes(&s, 2 << 20);
        assert!(at(&other) != id && pool.is_unused(7));
    }

    #[test]
    fn memory_accounting_is_the_same_with_and_without_capture() {
        let step = |captured: bool| {
            let (device, s) = device();
            let kept = bytes(&s, 1000);
            for n in 0..3 {
                if captured && n == 1 {
                    device.inner.pool.open_arena(1, 0, true);
                }
                let a = bytes(&s, 3 << 20);
                let b = Tensor::empty(&s, &[70_000], DType::F32, Category::Workspace).unwrap();
                drop(a);
                let c = bytes(&s, 1 << 20);
                drop((b, c));
                if captured && n == 1 {
                    device.inner.pool.seal_arena(1).unwrap();
                }
            }
            drop(kept);
            // Reserved memory may differ: small blocks of a graph are not lent.
            MemoryReport { reserved_now: 0, reserved_peak: 0, ..device.memory() }
        };
        assert_eq!(step(true), step(false));
        assert_eq!(step(true).total_now, 0);
    }

    #[test]
    fn captures_that_cannot_be_replayed_are_refused() {
        let (device, s) = device();
        let pool = &device.inner.pool;
        pool.open_arena(1, 0, true);
        let kept = bytes(&s, 100);
        assert!(pool.seal_arena(1).unwrap_err().contains("keeps memory"));
        // The arena is dissolved: the block that was still in use returns to the pool.
        let id = at(&kept);
        drop(kept);
        let before = bytes(&s, 100);
        assert_eq!(at(&before), id);
        pool.open_arena(2, 0, true);
        drop(before);
        assert!(pool.seal_arena(2).unwrap_err().contains("frees memory"));
        assert!(pool.lock().arenas.is_empty());
        assert!(pool.seal_arena(3).is_err());
    }
}
