//! Buffers own a block of memory while it is in use.

use crate::device::DeviceInner;
use crate::host_memory::HostBlock;
use crate::pool::Block;
use crate::{Category, Error, Result, Stream};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// An allocation with a category and the stream that it was allocated on. Its block returns to the pool on drop.
pub(crate) struct Buffer {
    pub(crate) device: Arc<DeviceInner>,
    /// `None` once freed.
    block: Option<Block>,
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
    pub(crate) fn new(stream: &Stream, bytes: usize, category: Category) -> Result<Buffer> {
        let device = &stream.device().inner;
        let block = device.pool.take(device, stream, bytes)?.ok_or_else(|| {
            let report = Box::new(device.memory());
            Error::OutOfMemory { bytes, category: category.name(), report }
        })?;
        device.account.take(category, bytes);
        Ok(Buffer::over(stream, (bytes, category), (Some(block), None)))
    }

    /// Host memory; see [`crate::Tensor::host`].
    pub(crate) fn on_host(stream: &Stream, bytes: usize) -> Result<Buffer> {
        let device = &stream.device().inner;
        let host = device.host_pool.take(device, stream.id(), bytes)?;
        Ok(Buffer::over(stream, (bytes, Category::Workspace), (None, Some(host))))
    }

    fn over(
        stream: &Stream,
        (bytes, category): (usize, Category),
        (block, host): (Option<Block>, Option<HostBlock>),
    ) -> Buffer {
        let device = stream.device().inner.clone();
        let (id, stream) = (device.next_id(), stream.id());
        Buffer { device, block, host, bytes, id, category, stream, borrow: AtomicI32::new(0) }
    }

    pub(crate) fn is_on_host(&self) -> bool {
        self.host.is_some()
    }

    pub(crate) fn address(&self) -> usize {
        let host = self.host.as_ref().map_or(0, HostBlock::address);
        self.block.as_ref().map_or(host, |b| b.range.start)
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
