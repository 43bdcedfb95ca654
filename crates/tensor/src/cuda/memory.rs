//! Copies and zero fills on the device, and the pinned host buffers that copies are staged through.

use super::pinned_pages::{self, PinnedBy};
use super::{CudaContext, CudaEvent, CudaStream, check};
use crate::{Error, Result};
use cudarc::driver::sys;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Allocates a zeroed word mapped on both sides: (host address, device address). It is never freed.
pub(super) fn mapped_word() -> Result<(usize, u64)> {
    let (mut host, mut device) = (std::ptr::null_mut(), 0);
    // SAFETY: out-pointers to locals; the context is current; the word is 4-byte aligned and not shared.
    unsafe {
        check("pinned memory", sys::cuMemHostAlloc(&mut host, 64, sys::CU_MEMHOSTALLOC_DEVICEMAP))?;
        check("pinned memory", sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0))?;
        host.cast::<u32>().write_volatile(0);
    }
    Ok((host as usize, device))
}

/// A pinned buffer and the event after the copy that last used it.
struct Slot {
    host: usize,
    bytes: usize,
    used: Option<CudaEvent>,
}

/// Pinned buffers, reused once their last copy is complete.
#[derive(Default)]
pub(super) struct Staging {
    slots: Mutex<Vec<Slot>>,
}

/// Buffer sizes: small for scalars and token ids, large for weights.
const SMALL: usize = 256 << 10;
const LARGE: usize = 8 << 20;
/// Number of buffers of one size; beyond that a copy waits for the oldest.
const MAX_SLOTS: usize = 8;

impl Staging {
    /// Returns an idle buffer of at least `bytes` (at most [`LARGE`]).
    fn take(&self, bytes: usize) -> Result<Slot> {
        let size = if bytes <= SMALL { SMALL } else { LARGE };
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let idle =
            slots.iter().position(|s| s.bytes == size && s.used.as_ref().is_none_or(CudaEvent::is_reached));
        if let Some(at) = idle {
            return Ok(slots.swap_remove(at));
        }
        let oldest = slots.iter().position(|s| s.bytes == size);
        match oldest {
            Some(at) if slots.iter().filter(|s| s.bytes == size).count() >= MAX_SLOTS => {
                let slot = slots.remove(at);
                drop(slots);
                slot.used.as_ref().map_or(Ok(()), CudaEvent::wait)?;
                Ok(slot)
            }
            _ => {
                let mut host = std::ptr::null_mut();
                // SAFETY: the out-pointer is a local; the context is current. Pinned buffers are never freed.
                check("pinned memory", unsafe { sys::cuMemHostAlloc(&mut host, size, 0) })?;
                Ok(Slot { host: host as usize, bytes: size, used: None })
            }
        }
    }

    fn give(&self, slot: Slot) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
    }
}

/// Pinned host memory of any size, freed on drop.
pub(crate) struct PinnedMemory {
    context: Arc<CudaContext>,
    host: usize,
    bytes: usize,
    by: PinnedBy,
}

impl PinnedMemory {
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<PinnedMemory> {
        context.enter()?;
        let (host, by) = pinned_pages::allocate(bytes)?;
        Ok(PinnedMemory { context: context.clone(), host, bytes, by })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Its address, the same on host and device.
    pub(crate) fn address(&self) -> usize {
        self.host
    }

    /// The memory; the caller has waited for the copies into it.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated in `new` with that length; writes need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.host as *const u8, self.bytes) }
    }

    /// The memory, to be written; the caller has waited for the copies into it.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.host as *mut u8, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            pinned_pages::free(self.host, self.bytes, self.by);
        }
    }
}

/// Host memory that the system may page, freed on drop: managed memory that stays on the host and that the device's kernels
/// and copies reach there.
pub(crate) struct PageableMemory {
    context: Arc<CudaContext>,
    at: u64,
}

impl PageableMemory {
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<PageableMemory> {
        use sys::{CUmem_advise as Advice, CUmemLocation, CUmemLocationType as Place};
        const OP: &str = "pageable memory";
        context.enter()?;
        let (ordinal, mut device, mut shared) = (context.info.ordinal as i32, 0, 0);
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        // SAFETY: out-pointers to locals; the ordinal is that of an open device.
        unsafe {
            check(OP, sys::cuDeviceGet(&mut device, ordinal))?;
            check(OP, sys::cuDeviceGetAttribute(&mut shared, attribute, device))?;
        }
        // Since CUDA 12.2 the driver can be told where memory stays.
        if shared == 0 || context.info.driver < 12020 {
            let what = "this driver cannot share pageable memory with the GPU".into();
            return Err(Error::Cuda { op: OP, what });
        }
        let mut at = 0;
        let attach = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: the out-pointer is a local; the context is current.
        check(OP, unsafe { sys::cuMemAllocManaged(&mut at, bytes.max(1), attach) })?;
        let memory = PageableMemory { context: context.clone(), at };
        let host = CUmemLocation { type_: Place::CU_MEM_LOCATION_TYPE_HOST, id: 0 };
        let gpu = CUmemLocation { type_: Place::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal };
        // SAFETY: all of the allocation above.
        unsafe {
            let stays = Advice::CU_MEM_ADVISE_SET_PREFERRED_LOCATION;
            check(OP, sys::cuMemAdvise_v2(at, bytes.max(1), stays, host))?;
            check(OP, sys::cuMemAdvise_v2(at, bytes.max(1), Advice::CU_MEM_ADVISE_SET_ACCESSED_BY, gpu))?;
        }
        Ok(memory)
    }

    /// Its address, the same on host and device.
    pub(crate) fn address(&self) -> usize {
        self.at as usize
    }
}

impl Drop for PageableMemory {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated in `new`; freeing waits for the device.
            let _ = unsafe { sys::cuMemFree_v2(self.at) };
        }
    }
}

impl CudaContext {
    /// Enqueues a copy of `from` to device memory. `from` may be overwritten as soon as this returns.
    ///
    /// # Safety
    /// `to` is valid for writes of that length by work on `cuda`.
    pub(crate) unsafe fn upload(&self, cuda: &CudaStream, from: &[u8], to: u64) -> Result<()> {
        cuda.refuse_capture("copy host to device")?;
        for (i, part) in from.chunks(LARGE).enumerate() {
            let mut slot = self.staging.take(part.len())?;
            // SAFETY: the slot is idle and large enough; the caller guarantees the device side.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), slot.host as *mut u8, part.len());
                let to = to + (i * LARGE) as u64;
                check(
                    "copy host to device",
                    sys::cuMemcpyHtoDAsync_v2(to, slot.host as _, part.len(), cuda.raw()),
                )?;
            }
            slot.used = Some(CudaEvent::record(cuda)?);
            self.staging.give(slot);
        }
        Ok(())
    }

    /// [`CudaContext::upload`] of values that never change: a graph being captured keeps them and copies them at every
    /// launch.
    ///
    /// # Safety
    /// `to` is valid for writes of that length by work on `cuda`.
    pub(crate) unsafe fn upload_constant(
        self: &Arc<Self>,
        cuda: &CudaStream,
        from: &[u8],
        to: u64,
    ) -> Result<()> {
        if !cuda.is_capturing() || from.is_empty() {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.upload(cuda, from, to) };
        }
        let mut host = PinnedMemory::new(self, from.len())?;
        host.bytes_mut().copy_from_slice(from);
        // SAFETY: the caller guarantees the device side; the graph keeps the host side.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, host.host as _, from.len(), cuda.raw()) };
        check("copy host to device", status)?;
        cuda.constants().push(host);
        Ok(())
    }

    /// Copies device memory to the host and blocks until it is there.
    ///
    /// # Safety
    /// `from` is valid for reads of that length by work on `cuda`.
    pub(crate) unsafe fn download(&self, cuda: &CudaStream, from: u64, to: &mut [u8]) -> Result<()> {
        cuda.refuse_capture("copy device to host")?;
        let mut in_flight: VecDeque<(Slot, &mut [u8])> = VecDeque::new();
        let finish = |(slot, part): (Slot, &mut [u8])| -> Result<()> {
            slot.used.as_ref().map_or(Ok(()), CudaEvent::wait)?;
            // SAFETY: the copy into the slot is complete, and the slot is at least as long as the part.
            unsafe { std::ptr::copy_nonoverlapping(slot.host as *const u8, part.as_mut_ptr(), part.len()) };
            self.staging.give(slot);
            Ok(())
        };
        for (i, part) in to.chunks_mut(LARGE).enumerate() {
            if in_flight.len() == 3 {
                in_flight.pop_front().map_or(Ok(()), finish)?;
            }
            let mut slot = self.staging.take(part.len())?;
            let from = from + (i * LARGE) as u64;
            // SAFETY: the slot is idle and large enough; the caller guarantees the device side.
            let status = unsafe { sys::cuMemcpyDtoHAsync_v2(slot.host as _, from, part.len(), cuda.raw()) };
            check("copy device to host", status)?;
            slot.used = Some(CudaEvent::record(cuda)?);
            in_flight.push_back((slot, part));
        }
        in_flight.into_iter().try_for_each(finish)?;
        self.faults()
    }

    /// Enqueues a copy within the device, or to or from host memory; with memory that is not pinned, the host may wait for it.
    ///
    /// # Safety
    /// `from` and `to` are valid for reads and writes of that length by work on `cuda`, and do not overlap.
    pub(crate) unsafe fn copy(
        &self,
        cuda: &CudaStream,
        op: &'static str,
        (from, to): (u64, u64),
        bytes: usize,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        check(op, unsafe { sys::cuMemcpyAsync(to, from, bytes, cuda.raw()) })
    }

    /// Enqueues a memset to zero.
    ///
    /// # Safety
    /// `at` is valid for writes of that length by work on `cuda`.
    pub(crate) unsafe fn zero(&self, cuda: &CudaStream, at: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        check("zero", unsafe { sys::cuMemsetD8Async(at, 0, bytes, cuda.raw()) })
    }
}
