//! GPU memory of segments: addresses reserved once, physical memory mapped into them piece by piece, which does not
//! synchronize; or plain allocations where the driver cannot do that.

use super::{CudaContext, check};
use crate::Result;
use cudarc::driver::sys::{self, CUresult};
use std::ops::Range;
use std::sync::Arc;

/// Multiple of plain allocations.
const PLAIN_GRANULARITY: usize = 2 << 20;

/// With 0 in this environment variable, memory comes from plain allocations. compute-sanitizer needs that: it takes one access
/// across two adjacent mappings, as bulk copies make, for one out of bounds.
const EXPANDABLE_VARIABLE: &str = "FERROTRON_EXPANDABLE_SEGMENTS";

/// Virtual memory management of one GPU.
pub(crate) struct CudaSegments {
    context: Arc<CudaContext>,
    /// Memory is mapped in multiples of this.
    pub(crate) granularity: usize,
    /// Bytes of the GPU, at least.
    pub(crate) memory: usize,
    expandable: bool,
}

impl CudaSegments {
    pub(crate) fn new(context: &Arc<CudaContext>) -> CudaSegments {
        let wanted = std::env::var_os(EXPANDABLE_VARIABLE).is_none_or(|value| value != "0");
        let granularity = granularity(context).ok().flatten().filter(|_| wanted);
        CudaSegments {
            context: context.clone(),
            granularity: granularity.unwrap_or(PLAIN_GRANULARITY),
            memory: context.info.memory,
            expandable: granularity.is_some(),
        }
    }

    /// True if the driver can map memory into reserved addresses.
    pub(crate) fn is_expandable(&self) -> bool {
        self.expandable
    }

    pub(crate) fn reserve(&self, bytes: usize) -> Option<usize> {
        self.context.enter().ok()?;
        let mut at = 0;
        // SAFETY: the out-pointer is a local; the size is a multiple of the granularity.
        let status = unsafe { sys::cuMemAddressReserve(&mut at, bytes, 0, 0, 0) };
        (status == CUresult::CUDA_SUCCESS).then_some(at as usize)
    }

    pub(crate) fn unreserve(&self, region: Range<usize>) {
        if self.context.enter().is_ok() {
            // SAFETY: a whole region of `reserve`, of which nothing is mapped any more.
            let _ = unsafe { sys::cuMemAddressFree(region.start as u64, region.len()) };
        }
    }

    /// Maps new physical memory into a reserved region and returns its handle; `None` if there is not enough.
    pub(crate) fn map(&self, at: usize, bytes: usize) -> Option<u64> {
        self.context.enter().ok()?;
        let (at, mut handle) = (at as u64, 0);
        let place = properties(&self.context);
        let access = sys::CUmemAccessDesc {
            location: place.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: pointers to locals; address and size are multiples of the granularity, inside a region of `reserve`, and
        // nothing is mapped there. On failure every step that was made is undone.
        unsafe {
            if sys::cuMemCreate(&mut handle, bytes, &place, 0) != CUresult::CUDA_SUCCESS {
                return None;
            }
            if sys::cuMemMap(at, bytes, 0, handle, 0) != CUresult::CUDA_SUCCESS {
                let _ = sys::cuMemRelease(handle);
                return None;
            }
            if sys::cuMemSetAccess(at, bytes, &access, 1) != CUresult::CUDA_SUCCESS {
                let _ = sys::cuMemUnmap(at, bytes);
                let _ = sys::cuMemRelease(handle);
                return None;
            }
        }
        Some(handle)
    }

    pub(crate) fn unmap(&self, at: usize, bytes: usize, handle: u64) {
        if self.context.enter().is_ok() {
            // SAFETY: mapped by `map` with that size and handle; no work uses it.
            unsafe {
                let _ = sys::cuMemUnmap(at as u64, bytes);
                let _ = sys::cuMemRelease(handle);
            }
        }
    }

    /// Allocates device memory; `None` if there is not enough.
    pub(crate) fn allocate(&self, bytes: usize) -> Option<usize> {
        self.context.enter().ok()?;
        let mut at = 0;
        // SAFETY: the out-pointer is a local; the context is current.
        let status = unsafe { sys::cuMemAlloc_v2(&mut at, bytes) };
        (status == CUresult::CUDA_SUCCESS).then_some(at as usize)
    }

    /// Frees device memory. Synchronizes the device.
    pub(crate) fn free(&self, at: usize) {
        if self.context.enter().is_ok() {
            // SAFETY: the address comes from `allocate` and has no other user.
            let _ = unsafe { sys::cuMemFree_v2(at as u64) };
        }
    }

    /// Waits for all work of the GPU, ignoring errors.
    pub(crate) fn synchronize(&self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current.
            let _ = unsafe { sys::cuCtxSynchronize() };
        }
    }
}

/// What physical memory is: ordinary memory of the GPU.
fn properties(context: &CudaContext) -> sys::CUmemAllocationProp {
    let location = sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: context.info.ordinal as i32,
    };
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType_enum(0),
        location,
        win32HandleMetaData: std::ptr::null_mut(),
        // SAFETY: plain numbers, for which zero is valid: no compression, no other use.
        allocFlags: unsafe { std::mem::zeroed() },
    }
}

/// The granularity of mapped memory; `None` if the driver or the GPU has no virtual memory management.
fn granularity(context: &CudaContext) -> Result<Option<usize>> {
    context.enter()?;
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    let (mut device, mut supported, mut granularity) = (0, 0, 0);
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: pointers to locals; the ordinal exists.
    unsafe {
        check("device", sys::cuDeviceGet(&mut device, context.info.ordinal as i32))?;
        check("device attribute", sys::cuDeviceGetAttribute(&mut supported, attribute, device))?;
        if supported == 0 {
            return Ok(None);
        }
        let memory = properties(context);
        check("granularity", sys::cuMemGetAllocationGranularity(&mut granularity, &memory, least))?;
    }
    Ok(Some(granularity).filter(|g| *g > 0))
}
