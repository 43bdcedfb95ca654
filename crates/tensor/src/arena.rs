//! Memory of CUDA graphs.
//!
//! A graph replays on the addresses it was captured with. During a capture, all allocations of the captured stream
//! come from an arena, which starts with the free blocks of that stream, so a capture needs hardly any new memory.
//! When the capture ends, the arena is sealed: its blocks stay reserved for the lifetime of the graph. Between two
//! replays their contents are dead, so they are lent to other work on the same stream, whose order separates the two.
//! The graph may be replayed only while no block is lent; one whose replays must never wait lends nothing.

use crate::buffer::{Block, MemoryPool, SizeClasses};
use std::collections::HashMap;

/// Blocks below this size are not lent. Small tensors may live across a replay (a loss that is yet to be read), which
/// would block it, and are cheap to allocate elsewhere.
const LEND_MIN_BYTES: usize = 1 << 20;

/// The memory of one capture.
pub(crate) struct Arena {
    pub(crate) id: u64,
    pub(crate) stream: u32,
    free: HashMap<usize, Vec<Block>>,
    /// Blocks currently allocated from this arena.
    in_use: usize,
    /// True during the capture, false once sealed.
    open: bool,
    /// Whether blocks are lent between replays.
    lends: bool,
    /// A block allocated before the capture was freed during it. The pool would hand it to other work while the graph
    /// still uses its address.
    freed_outside: bool,
}

impl Arena {
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Allocates a block of size `class` for captured work.
    pub(crate) fn take(&mut self, class: usize, new_block: impl FnOnce() -> Option<Block>) -> Option<Block> {
        let mut block = self.free.get_mut(&class).and_then(Vec::pop).or_else(new_block)?;
        block.arena = Some(self.id);
        self.in_use += 1;
        Some(block)
    }

    /// Lends a block of size `class` to work between replays.
    pub(crate) fn lend(&mut self, class: usize) -> Option<Block> {
        let block = self
            .free
            .get_mut(&class)
            .filter(|_| self.lends && class >= LEND_MIN_BYTES && !self.open)
            .and_then(Vec::pop)?;
        self.in_use += 1;
        Some(block)
    }

    pub(crate) fn free(&mut self, block: Block) {
        self.in_use -= 1;
        self.free.entry(block.bytes).or_default().push(block);
    }

    pub(crate) fn note_outside_free(&mut self) {
        self.freed_outside = true;
    }
}

impl MemoryPool {
    /// Starts an arena: allocations on `stream` come from its free blocks, then from new memory.
    pub(crate) fn open_arena(&self, id: u64, stream: u32, lends: bool) {
        let SizeClasses { free, arenas } = &mut *self.lock();
        let own = free.extract_if(|(s, _), _| *s == stream).map(|((_, class), blocks)| (class, blocks));
        let free = own.collect();
        arenas.push(Arena { id, stream, free, in_use: 0, open: true, lends, freed_outside: false });
    }

    /// Ends the capture: untouched blocks become free again, the others stay reserved. Fails with the reason if
    /// memory allocated in the capture is still in use, or memory allocated before it was freed; the arena is then
    /// dissolved.
    pub(crate) fn seal_arena(&self, id: u64) -> Result<(), &'static str> {
        let mut classes = self.lock();
        let SizeClasses { free, arenas } = &mut *classes;
        let Some(arena) = arenas.iter_mut().find(|a| a.id == id) else {
            return Err("its arena was dissolved");
        };
        let why = match arena {
            Arena { freed_outside: true, .. } => {
                "the captured work frees memory that was allocated before the capture"
            }
            Arena { in_use: 1.., .. } => "the captured work keeps memory that it allocated",
            _ => {
                arena.open = false;
                for (class, blocks) in &mut arena.free {
                    let untouched = blocks.extract_if(.., |b| b.arena.is_none());
                    free.entry((arena.stream, *class)).or_default().extend(untouched);
                }
                return Ok(());
            }
        };
        drop(classes);
        self.dissolve_arena(id);
        Err(why)
    }

    /// True if no block of the arena is in use, so that its graph may be replayed.
    pub(crate) fn is_unused(&self, id: u64) -> bool {
        self.lock().arenas.iter().any(|a| a.id == id && a.in_use == 0)
    }

    /// Returns the memory of a graph that was dropped or never completed to the pool. Blocks still in use follow when
    /// freed.
    pub(crate) fn dissolve_arena(&self, id: u64) {
        let SizeClasses { free, arenas } = &mut *self.lock();
        for arena in arenas.extract_if(.., |a| a.id == id) {
            for (class, mut blocks) in arena.free {
                blocks.iter_mut().for_each(|b| b.arena = None);
                free.entry((arena.stream, class)).or_default().append(&mut blocks);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Category, DType, Device, Stream, Tensor, Threads};

    fn device() -> (Device, Stream) {
        let device = Device::cpu(Threads::new(1).unwrap());
        let s = device.stream("compute").unwrap();
        (device, s)
    }

    fn bytes(s: &Stream, n: usize) -> Tensor {
        Tensor::empty(s, &[n], DType::U8, Category::Activations).unwrap()
    }

    fn at(t: &Tensor) -> u64 {
        t.buffer.block_id()
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
        device.trim();
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
            device.memory()
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
