//! The CUDA device: driver, context, streams, memory and graphs.
//!
//! The driver is opened at run time, so the binary starts on machines without one; [`CudaContext::open`] then reports
//! what was looked for. `unsafe` covers the driver's C interface; every call is made with the context current on its
//! thread.

mod gpu_info;
mod graph;
mod host_calls;
mod memory;
mod pinned_pages;
mod segment;
mod stream;

pub use gpu_info::{AS_VARIABLE, GpuInfo};
pub(crate) use graph::GraphExec;
pub(crate) use memory::{PageableMemory, PinnedMemory};
pub(crate) use segment::CudaSegments;
pub(crate) use stream::{CudaEvent, CudaStream, Priority};

use crate::{Error, Result};
use cudarc::driver::sys::{self, CUresult};
use memory::Staging;
use std::ffi::CStr;
use std::sync::{Mutex, PoisonError};

/// File names under which the driver is looked for, for messages.
pub const DRIVER: &str = "libcuda.so, libcuda.so.1";

/// A GPU with its primary context.
pub(crate) struct CudaContext {
    pub(crate) info: GpuInfo,
    context: sys::CUcontext,
    staging: Staging,
    /// A mapped word in which kernels report invalid input: (host address, device address).
    fault: (usize, u64),
    /// The first error of a host function.
    host_error: Mutex<Option<Error>>,
}

// SAFETY: driver handles may be used from any thread once the context is current there.
unsafe impl Send for CudaContext {}
// SAFETY: as above; the staging buffers have their own lock.
unsafe impl Sync for CudaContext {}

/// Turns a driver status into an error that names the call.
pub(crate) fn check(op: &'static str, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: sets a static string for known codes and leaves the pointer null otherwise.
    let what = unsafe {
        let _ = sys::cuGetErrorString(status, &mut text);
        if text.is_null() {
            "unknown error".into()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    };
    Err(Error::Cuda { op, what: format!("{what} ({status:?})") })
}

/// Initializes the driver and returns its CUDA version.
fn init_driver() -> Result<u32> {
    // SAFETY: only tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoCuda(format!("no NVIDIA driver was found (looked for {DRIVER})")));
    }
    let mut version = 0;
    // SAFETY: the library is loaded; the out-pointer is a local.
    unsafe {
        check("cuInit", sys::cuInit(0)).map_err(|e| Error::NoCuda(e.to_string()))?;
        check("driver version", sys::cuDriverGetVersion(&mut version))?;
    }
    Ok(version.max(0) as u32)
}

/// Lists the GPUs of this machine. The error says why there are none.
pub fn gpus() -> Result<Vec<GpuInfo>> {
    let driver = init_driver()?;
    let mut count = 0;
    // SAFETY: the out-pointer is a local.
    check("device count", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    (0..count.max(0) as usize).map(|ordinal| describe(ordinal, driver)).collect()
}

fn describe(ordinal: usize, driver: u32) -> Result<GpuInfo> {
    use sys::CUdevice_attribute as A;
    let (mut device, mut name, mut memory) = (0, [0; 256], 0);
    // SAFETY: out-pointers to locals; the name is passed with its length.
    unsafe {
        check("device", sys::cuDeviceGet(&mut device, ordinal as i32))?;
        check("device name", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
        check("device memory", sys::cuDeviceTotalMem_v2(&mut memory, device))?;
    }
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: the out-pointer is a local.
        check("device attribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok::<_, Error>(value.max(0) as u32)
    };
    let capability = (
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let shared_memory = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    // SAFETY: the driver ended the name with a zero inside the array.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let native = capability;
    let info = GpuInfo { ordinal, name, capability, native, multiprocessors, shared_memory, memory, driver };
    info.standing_for(std::env::var(AS_VARIABLE).ok().as_deref())
}

impl CudaContext {
    /// Opens GPU `ordinal` and retains its primary context.
    pub(crate) fn open(ordinal: usize) -> Result<CudaContext> {
        let all = gpus()?;
        let Some(info) = all.get(ordinal).cloned() else {
            return Err(Error::NoCuda(match all.len() {
                0 => "the NVIDIA driver finds no GPU".into(),
                n => format!("there is no cuda:{ordinal}; this machine has cuda:0 to cuda:{}", n - 1),
            }));
        };
        info.check_usable()?;
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: out-pointers to locals; the ordinal exists. The primary context is never released.
        unsafe {
            check("device", sys::cuDeviceGet(&mut device, ordinal as i32))?;
            check("context", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
            check("context", sys::cuCtxSetCurrent(context))?;
        }
        let (staging, fault) = (Staging::default(), memory::mapped_word()?);
        Ok(CudaContext { info, context, staging, fault, host_error: Mutex::default() })
    }

    /// Makes the context current on this thread, which every driver call needs.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: a context that was retained and never released.
        check("context", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Device address of the fault word.
    pub(crate) fn fault_address(&self) -> u64 {
        self.fault.1
    }

    /// Keeps the error of a host function for [`CudaContext::faults`].
    fn report_host_error(&self, error: Error) {
        self.host_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// Reports and clears what kernels and host functions found wrong since the last call. Only complete after synchronizing
    /// with them.
    pub(crate) fn faults(&self) -> Result<()> {
        if let Some(error) = self.host_error.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        let word = self.fault.0 as *mut u32;
        // SAFETY: mapped memory of this device, never freed; kernels only store to it.
        let code = unsafe { word.read_volatile() };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { word.write_volatile(0) };
        let what = match code {
            1 => "a token id or position is outside the embedding table",
            2 => "a label is outside the vocabulary",
            3 => "an expert or segment index is out of range",
            _ => "a kernel reported an unknown fault code",
        };
        Err(Error::Fault(what))
    }

    /// Free and total device memory in bytes, as reported by the driver.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: out-pointers to locals.
        check("device memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }
}
