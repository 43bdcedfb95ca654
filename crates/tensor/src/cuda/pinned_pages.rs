//! Pages of the system, pinned for the GPU. The driver's own allocation clears them on one thread, at about 2 GB/s; large blocks
//! are therefore mapped here, cleared by many threads, and registered with the driver.
//! `unsafe` covers the system calls and the driver's.

use super::check;
use crate::Result;
use cudarc::driver::sys;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr::null_mut;

/// From this size on threads are worth it.
const LARGE: usize = 64 << 20;
const PAGE: usize = 4096;
const MAX_THREADS: usize = 16;

/// How a block was allocated, and so how it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PinnedBy {
    /// `cuMemHostAlloc`
    Driver,
    /// Pages of the system that were registered.
    Registration,
}

/// Allocates pinned memory. The context is current.
pub(super) fn allocate(bytes: usize) -> Result<(usize, PinnedBy)> {
    if bytes >= LARGE
        && let Some(at) = map(bytes)
    {
        clear(at, bytes);
        // SAFETY: whole pages that were mapped above; under unified addressing the device uses the same address.
        let status = unsafe { sys::cuMemHostRegister_v2(at as _, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        if check("pinned memory", status).is_ok() {
            return Ok((at, PinnedBy::Registration));
        }
        unmap(at, bytes);
    }
    let mut host = null_mut();
    // SAFETY: the out-pointer is a local; the context is current. The driver returns mapped pages of the system, whose bytes
    // have values.
    check("pinned memory", unsafe { sys::cuMemHostAlloc(&mut host, bytes.max(1), 0) })?;
    Ok((host as usize, PinnedBy::Driver))
}

/// Frees what [`allocate`] returned, after all work of the GPU. The context is current.
pub(super) fn free(at: usize, bytes: usize, by: PinnedBy) {
    match by {
        // SAFETY: allocated by the driver and not freed since.
        PinnedBy::Driver => _ = unsafe { sys::cuMemFreeHost(at as _) },
        PinnedBy::Registration => {
            // SAFETY: registered in `allocate`. What stays registered stays mapped. Freeing the driver's own memory waits for
            // the GPU; that unregistering does is not documented.
            let status = unsafe {
                _ = sys::cuCtxSynchronize();
                sys::cuMemHostUnregister(at as _)
            };
            if check("pinned memory", status).is_ok() {
                unmap(at, bytes);
            }
        }
    }
}

/// Maps pages, large ones where the system has them; none if it refuses.
fn map(bytes: usize) -> Option<usize> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the system's choice.
    let at = unsafe { mmap_anonymous(null_mut(), bytes, access, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: advice about the pages just mapped.
    let _ = unsafe { madvise(at, bytes, Advice::LinuxHugepage) };
    Some(at as usize)
}

fn unmap(at: usize, bytes: usize) {
    // SAFETY: a whole mapping of `map` that nobody uses.
    let _ = unsafe { munmap(at as _, bytes) };
}

/// Touches every page, each thread a run of them: the system clears a page when it is first written.
fn clear(at: usize, bytes: usize) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let each = bytes.div_ceil(threads).next_multiple_of(PAGE);
    std::thread::scope(|scope| {
        for first in (0..bytes).step_by(each) {
            let touch = move || {
                for page in (first..bytes.min(first + each)).step_by(PAGE) {
                    // SAFETY: inside the mapping, of which every page belongs to one thread.
                    unsafe { ((at + page) as *mut u8).write_volatile(0) };
                }
            };
            // Without a thread the pages are cleared when they are pinned, by one.
            if std::thread::Builder::new().spawn_scoped(scope, touch).is_err() {
                break;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_page_is_there_and_zero() {
        let bytes = LARGE + 3 * PAGE;
        let at = map(bytes).unwrap();
        clear(at, bytes);
        // SAFETY: mapped above, and not yet unmapped.
        let all = unsafe { std::slice::from_raw_parts(at as *const u8, bytes) };
        assert!(all.iter().all(|b| *b == 0));
        unmap(at, bytes);
    }

    /// The test above where no thread can be started, as at a limit of processes: no address space holds such a stack.
    #[test]
    fn pages_are_there_without_threads() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args([
            "--exact",
            "cuda::pinned_pages::tests::every_page_is_there_and_zero",
            "--test-threads=1",
        ]);
        let out = alone.env("RUST_MIN_STACK", (1u64 << 60).to_string()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains("1 passed"), "{said}");
    }
}
