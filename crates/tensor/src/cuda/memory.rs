//! Memory of a card, and pinned host memory through which bytes travel to and from it.

use super::{CudaContext, CudaEvent, CudaStream, check};
use crate::Result;
use cudarc::driver::sys::{self, CUresult};
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Device memory, or nothing where it does not fit.
pub(crate) fn allocate(context: &CudaContext, bytes: usize) -> Option<u64> {
    context.enter().ok()?;
    let mut address = 0;
    // SAFETY: a place for an address; the context is current.
    let status = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
    (status == CUresult::CUDA_SUCCESS).then_some(address)
}

/// Gives memory back. Waits for the card.
pub(crate) fn free(context: &CudaContext, address: u64) {
    if context.enter().is_ok() {
        // SAFETY: an address from `allocate` that nobody holds any more.
        let _ = unsafe { sys::cuMemFree_v2(address) };
    }
}

/// A zeroed word that both sides see: (host address, device address). Lives as long as the process.
pub(super) fn mapped_word() -> Result<(usize, u64)> {
    let (mut host, mut device) = (std::ptr::null_mut(), 0);
    // SAFETY: places for the addresses; the context is current; the word is 4-byte aligned and ours.
    unsafe {
        check("pinned memory", sys::cuMemHostAlloc(&mut host, 64, sys::CU_MEMHOSTALLOC_DEVICEMAP))?;
        check("pinned memory", sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0))?;
        host.cast::<u32>().write_volatile(0);
    }
    Ok((host as usize, device))
}

/// A piece of pinned memory and the copy that last used it.
struct Slot {
    host: usize,
    bytes: usize,
    used: Option<CudaEvent>,
}

/// Pinned pieces, reused when their last copy is done.
#[derive(Default)]
pub(super) struct Staging {
    slots: Mutex<Vec<Slot>>,
}

/// Scalars and token ids travel in small pieces, weights in large ones.
const SMALL: usize = 256 << 10;
const LARGE: usize = 8 << 20;
/// Pieces of one size before a copy waits for an earlier one.
const MOST: usize = 8;

impl Staging {
    /// A piece of at least `bytes` (at most [`LARGE`]) that no copy uses.
    fn take(&self, bytes: usize) -> Result<Slot> {
        let size = if bytes <= SMALL { SMALL } else { LARGE };
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let idle =
            slots.iter().position(|s| s.bytes == size && s.used.as_ref().is_none_or(CudaEvent::passed));
        if let Some(at) = idle {
            return Ok(slots.swap_remove(at));
        }
        let oldest = slots.iter().position(|s| s.bytes == size);
        match oldest {
            Some(at) if slots.iter().filter(|s| s.bytes == size).count() >= MOST => {
                let slot = slots.remove(at);
                drop(slots);
                slot.used.as_ref().map_or(Ok(()), CudaEvent::wait)?;
                Ok(slot)
            }
            _ => {
                let mut host = std::ptr::null_mut();
                // SAFETY: a place for the address; the context is current. Pieces live as long as the process.
                check("pinned memory", unsafe { sys::cuMemHostAlloc(&mut host, size, 0) })?;
                Ok(Slot { host: host as usize, bytes: size, used: None })
            }
        }
    }

    fn give(&self, slot: Slot) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
    }
}

impl CudaContext {
    /// Queues a copy of `from` to device memory. `from` may change as soon as this returns.
    ///
    /// # Safety
    /// `to` is valid for writes of that length by work on `queue`.
    pub(crate) unsafe fn upload(&self, cuda: &CudaStream, from: &[u8], to: u64) -> Result<()> {
        cuda.outside_capture("copy to the card")?;
        for (i, part) in from.chunks(LARGE).enumerate() {
            let mut slot = self.staging.take(part.len())?;
            // SAFETY: the slot is idle and large enough; the caller vouches for the device side.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), slot.host as *mut u8, part.len());
                let to = to + (i * LARGE) as u64;
                check(
                    "copy to the card",
                    sys::cuMemcpyHtoDAsync_v2(to, slot.host as _, part.len(), cuda.raw()),
                )?;
            }
            slot.used = Some(CudaEvent::record(cuda)?);
            self.staging.give(slot);
        }
        Ok(())
    }

    /// Copies device memory to the host and waits for it.
    ///
    /// # Safety
    /// `from` is valid for reads of that length by work on `queue`.
    pub(crate) unsafe fn download(&self, cuda: &CudaStream, from: u64, to: &mut [u8]) -> Result<()> {
        cuda.outside_capture("copy from the card")?;
        let mut under_way: VecDeque<(Slot, &mut [u8])> = VecDeque::new();
        let finish = |(slot, part): (Slot, &mut [u8])| -> Result<()> {
            slot.used.as_ref().map_or(Ok(()), CudaEvent::wait)?;
            // SAFETY: the copy into the slot is done; the slot is at least as long as the part.
            unsafe { std::ptr::copy_nonoverlapping(slot.host as *const u8, part.as_mut_ptr(), part.len()) };
            self.staging.give(slot);
            Ok(())
        };
        for (i, part) in to.chunks_mut(LARGE).enumerate() {
            if under_way.len() == 3 {
                under_way.pop_front().map_or(Ok(()), finish)?;
            }
            let mut slot = self.staging.take(part.len())?;
            let from = from + (i * LARGE) as u64;
            // SAFETY: the slot is idle and large enough; the caller vouches for the device side.
            let status = unsafe { sys::cuMemcpyDtoHAsync_v2(slot.host as _, from, part.len(), cuda.raw()) };
            check("copy from the card", status)?;
            slot.used = Some(CudaEvent::record(cuda)?);
            under_way.push_back((slot, part));
        }
        under_way.into_iter().try_for_each(finish)?;
        self.faults()
    }

    /// Queues a copy within the card.
    ///
    /// # Safety
    /// `from` and `to` are valid for reads and writes of that length by work on `queue`, and do not overlap.
    pub(crate) unsafe fn copy(&self, cuda: &CudaStream, from: u64, to: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        check("copy on the card", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, cuda.raw()) })
    }

    /// Queues zeros.
    ///
    /// # Safety
    /// `at` is valid for writes of that length by work on `queue`.
    pub(crate) unsafe fn zero(&self, cuda: &CudaStream, at: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        check("zero", unsafe { sys::cuMemsetD8Async(at, 0, bytes, cuda.raw()) })
    }
}
