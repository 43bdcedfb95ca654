//! Arenas: memory of captured work.
//!
//! A graph replays on the addresses it was captured with. While work is captured, all memory of its stream comes from
//! an arena, which begins with the stream's free blocks and so grows by hardly anything. Once sealed, its blocks stay
//! reserved for the graph's life. Between two replays nothing in them is needed: they are lent to other work on the
//! stream, whose order keeps the two apart, and the graph may be replayed only while none is lent.

use crate::buffer::{Block, MemoryPool, SizeClasses};
use std::collections::HashMap;

/// Smaller blocks are not lent: they may be kept over a replay (a loss that is yet to be read), and are soon had anew.
const LEND_MIN_BYTES: usize = 1 << 20;

/// Blocks of one capture.
pub(crate) struct Arena {
    pub(crate) id: u64,
    pub(crate) stream: u32,
    free: HashMap<usize, Vec<Block>>,
    /// Blocks that are not here.
    out: usize,
    /// Still captured, or sealed?
    open: bool,
    /// Memory from outside was given back during the capture: whoever gets it next would find the graph in it.
    lost: bool,
}

impl Arena {
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// A block for work that is captured.
    pub(crate) fn take(&mut self, class: usize, fresh: impl FnOnce() -> Option<Block>) -> Option<Block> {
        let mut block = self.free.get_mut(&class).and_then(Vec::pop).or_else(fresh)?;
        block.arena = Some(self.id);
        self.out += 1;
        Some(block)
    }

    /// A block for other work between replays.
    pub(crate) fn lend(&mut self, class: usize) -> Option<Block> {
        let block =
            self.free.get_mut(&class).filter(|_| class >= LEND_MIN_BYTES && !self.open).and_then(Vec::pop)?;
        self.out += 1;
        Some(block)
    }

    pub(crate) fn give(&mut self, block: Block) {
        self.out -= 1;
        self.free.entry(block.bytes).or_default().push(block);
    }

    pub(crate) fn lost(&mut self) {
        self.lost = true;
    }
}

impl MemoryPool {
    /// From now on the stream's memory comes from a new arena: its free blocks, and new ones.
    pub(crate) fn open_arena(&self, id: u64, stream: u32) {
        let SizeClasses { free, arenas } = &mut *self.lock();
        let own = free.extract_if(|(s, _), _| *s == stream).map(|((_, class), blocks)| (class, blocks));
        arenas.push(Arena { id, stream, free: own.collect(), out: 0, open: true, lost: false });
    }

    /// The capture is over: what it did not touch is free again, the rest is reserved. Refused, with the reason, where
    /// memory of the capture is still in use or memory from before it no longer is; the arena is then dissolved.
    pub(crate) fn seal_arena(&self, id: u64) -> Result<(), &'static str> {
        let mut classes = self.lock();
        let SizeClasses { free, arenas } = &mut *classes;
        let Some(arena) = arenas.iter_mut().find(|a| a.id == id) else { return Err("its arena is gone") };
        let why = match arena {
            Arena { lost: true, .. } => "it gives back memory that it did not take",
            Arena { out: 1.., .. } => "it keeps memory that it took",
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

    /// Is no block lent?
    pub(crate) fn is_whole(&self, id: u64) -> bool {
        self.lock().arenas.iter().any(|a| a.id == id && a.out == 0)
    }

    /// The graph is gone, or was never made: its memory is free like any other. What is still in use follows.
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
    fn a_capture_begins_with_the_streams_free_memory_and_keeps_what_it_touched() {
        let (device, s) = device();
        let pool = &device.inner.pool;
        let (used, unused) = (bytes(&s, 2 << 20), bytes(&s, 3 << 20));
        let ids = [at(&used), at(&unused)];
        drop((used, unused));
        pool.open_arena(7, 0);
        let again = bytes(&s, 2 << 20);
        assert_eq!(at(&again), ids[0]);
        drop(again);
        let new = bytes(&s, 5000);
        let reserved = at(&new);
        drop(new);
        pool.seal_arena(7).unwrap();
        assert!(pool.is_whole(7));
        // What it did not touch is free for anybody, and taking it lends nothing.
        let other = bytes(&s, 3 << 20);
        assert_eq!(at(&other), ids[1]);
        assert!(pool.is_whole(7));
        // Small memory is never lent, large memory is, and blocks the replay until it is back.
        let small = bytes(&s, 5000);
        assert_ne!(at(&small), reserved);
        assert!(pool.is_whole(7));
        let lent = bytes(&s, 2 << 20);
        assert_eq!(at(&lent), ids[0]);
        assert!(!pool.is_whole(7));
        drop(lent);
        assert!(pool.is_whole(7));
        // Another stream never gets any of it.
        let elsewhere = bytes(&device.stream("other").unwrap(), 2 << 20);
        assert_ne!(at(&elsewhere), ids[0]);
        // The system does not get it back while the graph lives.
        device.trim();
        let lent = bytes(&s, 2 << 20);
        assert_eq!(at(&lent), ids[0]);
        // The graph may go first: its memory is then like any other.
        pool.dissolve_arena(7);
        drop(lent);
        assert!(!pool.is_whole(7));
        assert_eq!([at(&bytes(&s, 2 << 20)), at(&bytes(&s, 5000))], [ids[0], reserved]);
    }

    #[test]
    fn accounts_are_those_of_work_that_is_not_captured() {
        let step = |captured: bool| {
            let (device, s) = device();
            let kept = bytes(&s, 1000);
            for n in 0..3 {
                if captured && n == 1 {
                    device.inner.pool.open_arena(1, 0);
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
        pool.open_arena(1, 0);
        let kept = bytes(&s, 100);
        assert!(pool.seal_arena(1).unwrap_err().contains("keeps"));
        // Dissolved: what was kept goes to everybody's free memory.
        let id = at(&kept);
        drop(kept);
        let before = bytes(&s, 100);
        assert_eq!(at(&before), id);
        pool.open_arena(2, 0);
        drop(before);
        assert!(pool.seal_arena(2).unwrap_err().contains("gives back"));
        assert!(pool.lock().arenas.is_empty());
        assert!(pool.seal_arena(3).is_err());
    }
}
