//! Host memory of segments: regions of addresses whose pages are made accessible piece by piece, and plain allocations.
//! `unsafe` covers the system calls. Pages are zero when they become accessible.

use crate::segment::ALIGN;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use std::alloc::Layout;
use std::ops::Range;
use std::ptr::null_mut;

/// Reserves addresses without memory.
pub(crate) fn reserve(bytes: usize) -> Option<usize> {
    // SAFETY: a new mapping at an address of the system's choice.
    let start = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE) };
    start.ok().map(|p| p as usize)
}

pub(crate) fn unreserve(region: Range<usize>) {
    // SAFETY: a whole region of `reserve`, of which nothing is in use.
    let _ = unsafe { munmap(region.start as _, region.len()) };
}

/// Makes reserved pages accessible; false if the system refuses that much memory. Asks for huge pages: GEMMs walk down columns of
/// large matrices, where every row is on a page of its own.
pub(crate) fn map(at: usize, bytes: usize) -> bool {
    // SAFETY: pages of a region of `reserve` that nobody uses; the advice, which may be refused, changes no contents.
    unsafe {
        let mapped = mprotect(at as _, bytes, MprotectFlags::READ | MprotectFlags::WRITE).is_ok();
        let _ = madvise(at as _, bytes, Advice::LinuxHugepage);
        mapped
    }
}

/// Gives pages back to the system; their addresses stay reserved.
pub(crate) fn unmap(at: usize, bytes: usize) {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: replaces pages of a region of `reserve` that nobody uses.
    let _ = unsafe { mmap_anonymous(at as _, bytes, ProtFlags::empty(), flags) };
}

/// Allocates zeroed memory.
pub(crate) fn allocate(bytes: usize) -> Option<usize> {
    let layout = Layout::from_size_align(bytes, ALIGN).ok().filter(|l| l.size() > 0)?;
    // SAFETY: the size is not zero.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    (!start.is_null()).then_some(start as usize)
}

pub(crate) fn free(at: usize, bytes: usize) {
    if let Ok(layout) = Layout::from_size_align(bytes, ALIGN) {
        // SAFETY: allocated in `allocate` with this layout and not freed since.
        unsafe { std::alloc::dealloc(at as *mut u8, layout) };
    }
}

/// A plain allocation, freed on drop.
pub(crate) struct PlainMemory {
    at: usize,
    bytes: usize,
}

impl PlainMemory {
    pub(crate) fn new(bytes: usize) -> Option<PlainMemory> {
        allocate(bytes).map(|at| PlainMemory { at, bytes })
    }

    pub(crate) fn address(&self) -> usize {
        self.at
    }
}

impl Drop for PlainMemory {
    fn drop(&mut self) {
        free(self.at, self.bytes);
    }
}
