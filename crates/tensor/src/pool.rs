//! The caching memory pool of a device.
//!
//! The pool is stream-ordered: a block freed on a stream is reused on that stream only, so work queued there stays
//! ordered without any wait. If another stream used the block, its allocating stream must have waited for that stream
//! before the block is freed; the race checker reports where it did not.
//!
//! Every stream has two segments, for small and for large blocks, in which free neighbours coalesce and blocks are cut from
//! the best fit. Nothing is given back in a step. When the device is out of memory, pieces that are free on any stream are
//! released once that stream is idle, and the allocation is tried again.

use crate::arena::Arena;
use crate::backing::{Backing, MemoryPiece};
use crate::cuda::{CudaContext, CudaStream};
use crate::device::DeviceInner;
use crate::race_checker::Access;
use crate::segment::{ALIGN, Segment, SizeKind};
use crate::{Result, Stream};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A block of device or host memory in use.
#[derive(Debug)]
pub(crate) struct Block {
    /// In the address space of the device.
    pub(crate) range: Range<usize>,
    /// The graph arena the block belongs to, if any.
    pub(crate) arena: Option<u64>,
}

pub(crate) struct MemoryPool {
    backing: Backing,
    state: Mutex<PoolState>,
}

pub(crate) struct PoolState {
    /// By stream id, in a fixed order.
    pub(crate) streams: BTreeMap<u32, StreamMemory>,
    pub(crate) arenas: Vec<Arena>,
    reserved: Reserved,
    limit: usize,
}

/// Bytes of physical memory that a pool holds, in use or free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reserved {
    pub(crate) now: usize,
    pub(crate) peak: usize,
}

/// The memory of one stream.
pub(crate) struct StreamMemory {
    segments: [Segment; 2],
    name: &'static str,
    /// Kept alive, so that its work can be waited for before memory is released.
    cuda: Option<Arc<CudaStream>>,
}

impl StreamMemory {
    pub(crate) fn segment(&mut self, kind: SizeKind) -> &mut Segment {
        &mut self.segments[kind as usize]
    }
}

/// Memory on its way back to the system.
struct Release {
    stream: u32,
    name: &'static str,
    kind: SizeKind,
    cuda: Option<Arc<CudaStream>>,
    pieces: Vec<(usize, MemoryPiece)>,
}

impl Release {
    /// Checks that the stream is ordered after everything that used the memory, so that waiting for it is enough.
    fn check(&self, device: &DeviceInner) -> Result<()> {
        device.check(|checker| {
            let time = checker.tick(self.stream);
            let (stream, stream_name, label) = (self.stream, self.name, "release");
            self.pieces.iter().try_for_each(|(at, piece)| {
                let range = *at..at + piece.bytes;
                let access = Access { stream, stream_name, label, write: true, buffer: 0, time };
                checker.access(range.clone(), access)?;
                checker.forget(range);
                Ok(())
            })
        })
    }
}

impl MemoryPool {
    pub(crate) fn new(context: Option<&Arc<CudaContext>>) -> MemoryPool {
        MemoryPool::over(Backing::new(context))
    }

    /// The pool of a meta device: addresses without memory.
    pub(crate) fn meta() -> MemoryPool {
        MemoryPool::over(Backing::meta())
    }

    fn over(backing: Backing) -> MemoryPool {
        let state = PoolState {
            streams: BTreeMap::new(),
            arenas: Vec::new(),
            reserved: Reserved::default(),
            limit: usize::MAX,
        };
        MemoryPool { backing, state: Mutex::new(state) }
    }

    /// The same source of memory, used by plain allocations only, as with a driver that cannot reserve addresses.
    #[cfg(test)]
    pub(crate) fn plain(&self) -> MemoryPool {
        MemoryPool::over(self.backing.plain())
    }

    /// Returns a free block of the stream, or adds memory. If there is not enough, free memory of all streams is released,
    /// first as much as is needed, and the allocation is tried again; not during a capture, because releasing waits.
    pub(crate) fn take(&self, device: &DeviceInner, stream: &Stream, bytes: usize) -> Result<Option<Block>> {
        let Some(bytes) = bytes.max(1).checked_next_multiple_of(ALIGN) else { return Ok(None) };
        if let Some(block) = self.try_take(stream, bytes) {
            return Ok(Some(block));
        }
        for wanted in [bytes.saturating_add(self.backing.granularity()), usize::MAX] {
            if self.lock().is_captured(stream.id()) {
                break;
            }
            self.release(device, wanted)?;
            if let Some(block) = self.try_take(stream, bytes) {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    fn try_take(&self, stream: &Stream, bytes: usize) -> Option<Block> {
        let kind = SizeKind::of(bytes);
        let PoolState { streams, arenas, reserved, limit } = &mut *self.lock();
        let memory = streams.entry(stream.id()).or_insert_with(|| StreamMemory {
            segments: SizeKind::ALL.map(|kind| Segment::new(&self.backing, kind)),
            name: stream.name(),
            cuda: stream.cuda_handle().cloned(),
        });
        let segment = memory.segment(kind);
        let mut grow = |segment: &mut Segment| {
            let before = segment.reserved();
            segment.grow(bytes, limit.saturating_sub(reserved.now));
            reserved.now += segment.reserved() - before;
            reserved.peak = reserved.peak.max(reserved.now);
            segment.take(bytes)
        };
        if let Some(arena) = arenas.iter_mut().find(|a| a.is_open() && a.stream == stream.id()) {
            let range = segment.take(bytes).or_else(|| grow(segment))?;
            return Some(Block { arena: Some(arena.use_block(&range)), range });
        }
        if let Some(range) = segment.take(bytes) {
            return Some(Block { range, arena: None });
        }
        let lent = arenas.iter_mut().filter(|a| a.stream == stream.id()).find_map(|a| a.lend(bytes));
        lent.or_else(|| Some(Block { range: grow(segment)?, arena: None }))
    }

    pub(crate) fn free(&self, stream: u32, block: Block) {
        let PoolState { streams, arenas, .. } = &mut *self.lock();
        let Some(memory) = streams.get_mut(&stream) else { return };
        let segment = memory.segment(SizeKind::of(block.range.len()));
        if let Some(arena) = arenas.iter_mut().find(|a| block.arena == Some(a.id)) {
            return arena.free(block.range, segment);
        }
        arenas.iter_mut().filter(|a| a.is_open() && a.stream == stream).for_each(Arena::note_outside_free);
        segment.free(block.range);
    }

    /// Releases at least `wanted` bytes of free memory to the system, or all there is, except that of arenas and of streams
    /// in a capture. Waits for the streams that it belonged to, without holding the lock: what they wait for may need memory.
    pub(crate) fn release(&self, device: &DeviceInner, mut wanted: usize) -> Result<()> {
        let mut releases = Vec::new();
        {
            let state = &mut *self.lock();
            let PoolState { streams, arenas, .. } = state;
            for (stream, memory) in streams.iter_mut() {
                if arenas.iter().any(|a| a.is_open() && a.stream == *stream) {
                    continue;
                }
                for kind in SizeKind::ALL {
                    let pieces = memory.segment(kind).begin_release(&mut wanted);
                    let (stream, name, cuda) = (*stream, memory.name, memory.cuda.clone());
                    if !pieces.is_empty() {
                        releases.push(Release { stream, name, kind, cuda, pieces });
                    }
                }
            }
        }
        let mut result = Ok(());
        for release in releases {
            let ordered = release.check(device);
            // A stream that cannot be waited for keeps its memory.
            let gone = ordered.is_ok() && release.cuda.as_ref().is_none_or(|cuda| cuda.wait_until_idle());
            if gone {
                release.pieces.iter().for_each(|(at, piece)| self.backing.release(*at, *piece));
            }
            let PoolState { streams, reserved, .. } = &mut *self.lock();
            if let Some(memory) = streams.get_mut(&release.stream) {
                let segment = memory.segment(release.kind);
                let before = segment.reserved();
                segment.end_release(&release.pieces, gone);
                reserved.now -= before - segment.reserved();
            }
            result = result.and(ordered);
        }
        result
    }

    /// Refuses to hold more than `bytes` from now on.
    pub(crate) fn limit(&self, bytes: usize) {
        self.lock().limit = bytes;
    }

    pub(crate) fn reserved(&self) -> Reserved {
        self.lock().reserved
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolState {
    fn is_captured(&self, stream: u32) -> bool {
        self.arenas.iter().any(|a| a.is_open() && a.stream == stream)
    }
}

impl Drop for MemoryPool {
    fn drop(&mut self) {
        // Unmapping memory does not wait for work that uses it.
        self.backing.synchronize();
    }
}
