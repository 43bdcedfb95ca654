//! Memory blocks, the caching pool they come from, and buffers that own them while in use.
//!
//! The pool is stream-ordered: a block freed on a stream is reused on that stream only, so work queued there stays
//! ordered without any wait. If another stream used the block, its allocating stream must have waited for that stream
//! before the block is freed; the race checker reports where it did not.

use crate::arena::Arena;
use crate::cuda::{self, CudaContext};
use crate::device::DeviceInner;
use crate::host_memory::HostBlock;
use crate::{Category, Error, Result};
use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of host blocks: a cache line, which is also an AVX-512 register and an AMX tile row.
const ALIGN: usize = 64;

/// A block of device or host memory. Host memory is always initialised: a new block is zeroed.
pub(crate) struct Block {
    /// Start address, in the address space of the device.
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    /// Identifies the memory across reuse; the race checker keeps its history by this id.
    pub(crate) id: u64,
    /// The graph arena the block belongs to, if any.
    pub(crate) arena: Option<u64>,
    /// The GPU it is on; `None` for the host.
    context: Option<Arc<CudaContext>>,
}

impl Block {
    pub(crate) fn new(context: Option<&Arc<CudaContext>>, bytes: usize, id: u64) -> Option<Block> {
        let address = match context {
            Some(context) => cuda::allocate(context, bytes)? as usize,
            None => {
                let layout = Layout::from_size_align(bytes, ALIGN).ok()?;
                // SAFETY: size classes are at least `ALIGN` bytes.
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
            // SAFETY: allocated in `new` with this layout and not freed since.
            (None, Ok(layout)) => unsafe { std::alloc::dealloc(self.address as *mut u8, layout) },
            // Unreachable: the layout was valid in `new`.
            (None, Err(_)) => {}
        }
    }
}

/// Caching allocator: free blocks by stream and size, and the arenas of CUDA graphs.
#[derive(Default)]
pub(crate) struct MemoryPool {
    classes: Mutex<SizeClasses>,
}

#[derive(Default)]
pub(crate) struct SizeClasses {
    /// By stream id and size class.
    pub(crate) free: HashMap<(u32, usize), Vec<Block>>,
    pub(crate) arenas: Vec<Arena>,
}

impl MemoryPool {
    /// Returns a free block of the stream, or allocates one. If the device is out of memory, all cached free blocks
    /// are released and the allocation is tried again; not during a capture, because releasing memory synchronizes
    /// the device.
    pub(crate) fn take(&self, device: &DeviceInner, stream: u32, bytes: usize) -> Option<Block> {
        let class = size_class(bytes);
        let new_block = || Block::new(device.context.as_ref(), class, device.next_id());
        let reused = {
            let SizeClasses { free, arenas } = &mut *self.lock();
            if let Some(arena) = arenas.iter_mut().find(|a| a.is_open() && a.stream == stream) {
                return arena.take(class, new_block);
            }
            let own = free.get_mut(&(stream, class)).and_then(Vec::pop);
            own.or_else(|| arenas.iter_mut().filter(|a| a.stream == stream).find_map(|a| a.lend(class)))
        };
        reused.or_else(new_block).or_else(|| {
            self.trim();
            new_block()
        })
    }

    fn free(&self, stream: u32, mut block: Block) {
        let SizeClasses { free, arenas } = &mut *self.lock();
        if let Some(arena) = arenas.iter_mut().find(|a| block.arena == Some(a.id)) {
            return arena.free(block);
        }
        arenas.iter_mut().filter(|a| a.is_open() && a.stream == stream).for_each(Arena::note_outside_free);
        block.arena = None;
        free.entry((stream, block.bytes)).or_default().push(block);
    }

    /// Releases all free blocks to the system, except those of arenas.
    pub(crate) fn trim(&self) {
        let blocks = std::mem::take(&mut self.lock().free);
        drop(blocks);
    }

    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, SizeClasses> {
        self.classes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rounds up to a multiple of an eighth of the next power of two, capped at 2 MiB: at most a quarter is wasted, and
/// sizes repeat often enough to be reused.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(ALIGN);
    let step = (bytes.next_power_of_two() / 8).clamp(ALIGN, 2 << 20);
    bytes.div_ceil(step) * step
}

/// An allocation with a category and a home stream. Its block returns to the pool on drop.
pub(crate) struct Buffer {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) block: Option<Block>,
    /// Instead of `block`: host memory.
    host: Option<HostBlock>,
    pub(crate) bytes: usize,
    pub(crate) id: u64,
    category: Category,
    stream: u32,
    /// Number of launches reading the buffer, or -1 while one writes it. Two host threads never use a buffer at the
    /// same time if one of them writes.
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
            let report = Box::new(device.memory());
            Error::OutOfMemory { bytes, category: category.name(), report }
        })?;
        device.account.take(category, bytes);
        Ok(Buffer::over(device, stream, (bytes, category), (Some(block), None)))
    }

    /// Host memory; see [`crate::Tensor::host`].
    pub(crate) fn on_host(device: &Arc<DeviceInner>, stream: u32, bytes: usize) -> Result<Buffer> {
        let host = device.host_pool.take(device, stream, bytes)?;
        Ok(Buffer::over(device, stream, (bytes, Category::Workspace), (None, Some(host))))
    }

    fn over(
        device: &Arc<DeviceInner>,
        stream: u32,
        (bytes, category): (usize, Category),
        (block, host): (Option<Block>, Option<HostBlock>),
    ) -> Buffer {
        let (device, id) = (device.clone(), device.next_id());
        Buffer { device, block, host, bytes, id, category, stream, borrow: AtomicI32::new(0) }
    }

    pub(crate) fn is_on_host(&self) -> bool {
        self.host.is_some()
    }

    pub(crate) fn address(&self) -> usize {
        let host = self.host.as_ref().map_or(0, HostBlock::address);
        self.block.as_ref().map_or(host, |b| b.address)
    }

    pub(crate) fn block_id(&self) -> u64 {
        let host = self.host.as_ref().map_or(0, |b| b.id);
        self.block.as_ref().map_or(host, |b| b.id)
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
        if let Some(block) = self.block.take() {
            self.device.account.give(self.category, self.bytes);
            self.device.pool.free(self.stream, block);
        }
        if let Some(block) = self.host.take() {
            self.device.host_pool.free(self.stream, block, self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_hold_the_request_and_waste_under_a_quarter() {
        for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, 3_000_001]) {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(ALIGN));
            assert!(class <= ALIGN.max(bytes + bytes / 4 + ALIGN), "{bytes} -> {class}");
            assert_eq!(size_class(class), class);
        }
    }
}
