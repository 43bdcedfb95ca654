//! Where segments get memory from: GPU memory mapped by the driver, or pages of the host.

use crate::cuda::{CudaContext, CudaSegments};
use crate::host_pages;
use crate::segment::SizeKind;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Physical memory is mapped in pieces of at most this size, which are released one by one.
const PIECE: usize = 32 << 20;

/// Memory is mapped in multiples of this on the host.
const HOST_GRANULARITY: usize = 2 << 20;
/// Addresses reserved at once on the host, for large and for small blocks. They cost nothing, but a process has only 128 TiB.
const HOST_REGION: usize = 16 << 30;
/// Addresses of a meta device that a segment takes at once.
const META_REGION: usize = 1 << 40;

/// A piece of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryPiece {
    pub(crate) bytes: usize,
    /// The driver's handle of memory mapped into a region; `None` for a plain allocation.
    handle: Option<u64>,
}

impl MemoryPiece {
    pub(crate) fn is_plain(&self) -> bool {
        self.handle.is_none()
    }
}

/// The source of a device's memory. All memory of the host is initialized: zero when it is mapped.
#[derive(Clone)]
pub(crate) struct Backing {
    source: Source,
    /// Whether addresses are reserved and mapped piece by piece.
    expandable: bool,
}

#[derive(Clone)]
enum Source {
    Host,
    /// Addresses without memory: the next free one.
    Meta(Arc<AtomicUsize>),
    Cuda(Arc<CudaSegments>),
}

impl Backing {
    pub(crate) fn new(context: Option<&Arc<CudaContext>>) -> Backing {
        match context {
            None => Backing { source: Source::Host, expandable: true },
            Some(context) => {
                let segments = CudaSegments::new(context);
                let expandable = segments.is_expandable();
                Backing { source: Source::Cuda(Arc::new(segments)), expandable }
            }
        }
    }

    /// Addresses that no memory is behind.
    pub(crate) fn meta() -> Backing {
        let next = Arc::new(AtomicUsize::new(META_REGION));
        Backing { source: Source::Meta(next), expandable: true }
    }

    /// The same source with plain allocations only.
    #[cfg(test)]
    pub(crate) fn plain(&self) -> Backing {
        Backing { expandable: false, ..self.clone() }
    }

    pub(crate) fn granularity(&self) -> usize {
        match &self.source {
            Source::Host | Source::Meta(_) => HOST_GRANULARITY,
            Source::Cuda(c) => c.granularity,
        }
    }

    /// Number of addresses a segment reserves at once.
    pub(crate) fn region_bytes(&self, kind: SizeKind) -> usize {
        let large = match &self.source {
            Source::Host => HOST_REGION,
            Source::Meta(_) => META_REGION,
            Source::Cuda(c) => c.memory,
        };
        let bytes = match kind {
            SizeKind::Large => large,
            SizeKind::Small => large / 16,
        };
        bytes.next_multiple_of(self.granularity())
    }

    /// Reserves a region of addresses; `None` if that is not possible.
    pub(crate) fn reserve(&self, bytes: usize) -> Option<usize> {
        match &self.source {
            _ if !self.expandable => None,
            Source::Host => host_pages::reserve(bytes),
            Source::Meta(next) => Some(next.fetch_add(bytes, Relaxed)),
            Source::Cuda(c) => c.reserve(bytes),
        }
    }

    pub(crate) fn unreserve(&self, region: Range<usize>) {
        match &self.source {
            Source::Host => host_pages::unreserve(region),
            Source::Meta(_) => {}
            Source::Cuda(c) => c.unreserve(region),
        }
    }

    /// Maps up to `bytes` at `at`, in a reserved region, in pieces from low to high addresses, until memory runs out.
    pub(crate) fn map(&self, at: usize, bytes: usize) -> Vec<(usize, MemoryPiece)> {
        let parts = (at..at + bytes).step_by(PIECE).map(|start| (start, PIECE.min(at + bytes - start)));
        match &self.source {
            Source::Host if !host_pages::map(at, bytes) => Vec::new(),
            Source::Host => parts.map(|(at, bytes)| (at, MemoryPiece { bytes, handle: Some(0) })).collect(),
            Source::Meta(_) => vec![(at, MemoryPiece { bytes, handle: Some(0) })],
            Source::Cuda(c) => {
                let mapped = parts.map_while(|(at, bytes)| {
                    let handle = Some(c.map(at, bytes)?);
                    Some((at, MemoryPiece { bytes, handle }))
                });
                mapped.collect()
            }
        }
    }

    /// Allocates memory at an address of the allocator's choice.
    pub(crate) fn allocate(&self, bytes: usize) -> Option<(usize, MemoryPiece)> {
        let at = match &self.source {
            Source::Host => host_pages::allocate(bytes)?,
            Source::Meta(next) => next.fetch_add(bytes, Relaxed),
            Source::Cuda(c) => c.allocate(bytes)?,
        };
        Some((at, MemoryPiece { bytes, handle: None }))
    }

    /// Gives a piece back to the system. Work that uses it is complete.
    pub(crate) fn release(&self, at: usize, piece: MemoryPiece) {
        match (&self.source, piece.handle) {
            (Source::Host, Some(_)) => host_pages::unmap(at, piece.bytes),
            (Source::Host, None) => host_pages::free(at, piece.bytes),
            (Source::Meta(_), _) => {}
            (Source::Cuda(c), Some(handle)) => c.unmap(at, piece.bytes, handle),
            (Source::Cuda(c), None) => c.free(at),
        }
    }

    /// Waits for all work of the device.
    pub(crate) fn synchronize(&self) {
        if let Source::Cuda(c) = &self.source {
            c.synchronize();
        }
    }
}
