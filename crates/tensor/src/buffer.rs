//! Memory: blocks of bytes, buffers that borrow them from a pool, and the pool.
//!
//! The pool is ordered by streams: a block freed on a stream is handed out again on that stream only, so that
//! work queued there keeps its order without anybody waiting. Another stream that touched the block must have
//! been waited for before; the checker finds the place where it was not.

use crate::arena::Arena;
use crate::cuda::{self, CudaContext};
use crate::device::DeviceInner;
use crate::{Category, Error, Result};
use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Every block starts on a cache line, which is also the widest vector register and AMX tile row.
const ALIGN: usize = 64;

/// A piece of memory. On the host it is always initialised: fresh from the system it is zero.
pub(crate) struct Block {
    /// Where it starts, in the address space of its device.
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    /// Stays with the memory over reuse: the checker keeps history by it.
    pub(crate) id: u64,
    /// The arena it belongs to.
    pub(crate) arena: Option<u64>,
    /// The card it is on; none is the host.
    context: Option<Arc<CudaContext>>,
}

impl Block {
    pub(crate) fn new(context: Option<&Arc<CudaContext>>, bytes: usize, id: u64) -> Option<Block> {
        let address = match context {
            Some(context) => cuda::allocate(context, bytes)? as usize,
            None => {
                let layout = Layout::from_size_align(bytes, ALIGN).ok()?;
                // SAFETY: size classes are at least one line long.
                let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
                (!ptr.is_null()).then_some(ptr as usize)?
            }
        };
        Some(Block { address, bytes, id, arena: None, context: context.cloned() })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match (&self.context, Layout::from_size_align(self.bytes, ALIGN)) {
            (Some(context), _) => cuda::free(context, self.address as u64),
            // SAFETY: allocated in `new` with this very layout and not freed since.
            (None, Ok(layout)) => unsafe { std::alloc::dealloc(self.address as *mut u8, layout) },
            // The layout was valid when the block was made.
            (None, Err(_)) => {}
        }
    }
}

/// Free blocks, and the arenas of captured work.
#[derive(Default)]
pub(crate) struct MemoryPool {
    classes: Mutex<SizeClasses>,
}

#[derive(Default)]
pub(crate) struct SizeClasses {
    /// By stream and size class.
    pub(crate) free: HashMap<(u32, usize), Vec<Block>>,
    pub(crate) arenas: Vec<Arena>,
}

impl MemoryPool {
    /// A free block of the stream, or new memory. When there is none left, free blocks of other sizes and
    /// streams go back to the system first; not while work is captured, which must not wait for the device.
    pub(crate) fn take(&self, device: &DeviceInner, stream: u32, bytes: usize) -> Option<Block> {
        let class = size_class(bytes);
        let fresh = || Block::new(device.context.as_ref(), class, device.next_id());
        let reused = {
            let SizeClasses { free, arenas } = &mut *self.lock();
            if let Some(arena) = arenas.iter_mut().find(|a| a.is_open() && a.stream == stream) {
                return arena.take(class, fresh);
            }
            let own = free.get_mut(&(stream, class)).and_then(Vec::pop);
            own.or_else(|| arenas.iter_mut().filter(|a| a.stream == stream).find_map(|a| a.lend(class)))
        };
        reused.or_else(fresh).or_else(|| {
            self.trim();
            fresh()
        })
    }

    fn give(&self, stream: u32, mut block: Block) {
        let SizeClasses { free, arenas } = &mut *self.lock();
        if let Some(arena) = arenas.iter_mut().find(|a| block.arena == Some(a.id)) {
            return arena.give(block);
        }
        arenas.iter_mut().filter(|a| a.is_open() && a.stream == stream).for_each(Arena::lost);
        block.arena = None;
        free.entry((stream, block.bytes)).or_default().push(block);
    }

    /// Returns all free blocks to the system, but for those of arenas.
    pub(crate) fn trim(&self) {
        let blocks = std::mem::take(&mut self.lock().free);
        drop(blocks);
    }

    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, SizeClasses> {
        self.classes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rounds up to an eighth of a power of two, but by 2 MiB at most: little waste, and few distinct sizes.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(ALIGN);
    let step = (bytes.next_power_of_two() / 8).clamp(ALIGN, 2 << 20);
    bytes.div_ceil(step) * step
}

/// Memory with an owner, a purpose and a home stream. Returns to the pool when dropped.
pub(crate) struct Buffer {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) block: Option<Block>,
    pub(crate) bytes: usize,
    pub(crate) id: u64,
    category: Category,
    stream: u32,
    /// Readers inside a launch, or -1 for a writer: two threads never share a buffer that one of them writes.
    borrow: AtomicI32,
}

impl Buffer {
    pub(crate) fn new(
        device: &Arc<DeviceInner>,
        stream: u32,
        bytes: usize,
        category: Category,
    ) -> Result<Buffer> {
        let block = device.pool.take(device, stream, bytes).ok_or_else(|| {
            let report = Box::new(device.account.report());
            Error::OutOfMemory { bytes, category: category.name(), report }
        })?;
        device.account.take(category, bytes);
        let id = device.next_id();
        Ok(Buffer {
            device: device.clone(),
            block: Some(block),
            bytes,
            id,
            category,
            stream,
            borrow: AtomicI32::new(0),
        })
    }

    pub(crate) fn address(&self) -> usize {
        self.block.as_ref().map_or(0, |b| b.address)
    }

    pub(crate) fn block_id(&self) -> u64 {
        self.block.as_ref().map_or(0, |b| b.id)
    }

    pub(crate) fn try_borrow(&self, write: bool) -> bool {
        let next = |n: i32| match (write, n) {
            (true, 0) => Some(-1),
            (false, n) if n >= 0 => Some(n + 1),
            _ => None,
        };
        self.borrow.fetch_update(Ordering::Acquire, Ordering::Relaxed, next).is_ok()
    }

    pub(crate) fn release(&self, write: bool) {
        self.borrow.fetch_add(if write { 1 } else { -1 }, Ordering::Release);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.account.give(self.category, self.bytes);
        if let Some(block) = self.block.take() {
            self.device.pool.give(self.stream, block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_cover_and_waste_little() {
        for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, 3_000_001]) {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(ALIGN));
            assert!(class <= ALIGN.max(bytes + bytes / 4 + ALIGN), "{bytes} -> {class}");
            assert_eq!(size_class(class), class);
        }
    }
}
