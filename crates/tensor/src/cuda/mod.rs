//! The CUDA device: the driver opened at run time, its context, and what the rest of the crate asks of it.
//!
//! Nothing here is linked: the binary starts on machines without a driver, and [`CudaContext::open`] says what was
//! looked for. `unsafe` is the driver's C interface; every call happens with the card's context current.

mod graph;
mod memory;
mod stream;

pub(crate) use graph::GraphExec;
pub(crate) use memory::{allocate, free};
pub(crate) use stream::{CudaEvent, CudaStream};

use crate::{Error, Result};
use cudarc::driver::sys::{self, CUresult};
use memory::Staging;
use std::ffi::CStr;

/// Names under which the driver is looked for, for messages.
pub const DRIVER: &str = "libcuda.so, libcuda.so.1";

/// What a card is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Number of the card, as in `cuda:N`.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor: 9, 0 is Hopper.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// CUDA version the driver can run, as 13000 for 13.0.
    pub driver: u32,
}

/// A card with its context.
pub(crate) struct CudaContext {
    pub(crate) info: GpuInfo,
    context: sys::CUcontext,
    staging: Staging,
    /// A word that kernels write when they meet what only they can see: (host address, device address).
    fault: (usize, u64),
}

// SAFETY: the driver's handles may be used from any thread, with the context made current there.
unsafe impl Send for CudaContext {}
// SAFETY: as above; the staging area has its own lock.
unsafe impl Sync for CudaContext {}

/// Turns a driver status into an error that names the call.
pub(crate) fn check(op: &'static str, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: gives a static string for known codes and leaves the pointer null otherwise.
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

/// Is the driver there and does it start?
fn start() -> Result<u32> {
    // SAFETY: only tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoCuda(format!("no NVIDIA driver was found (looked for {DRIVER})")));
    }
    let mut version = 0;
    // SAFETY: the library is there; the calls take a flag and a place for a number.
    unsafe {
        check("start of the driver", sys::cuInit(0)).map_err(|e| Error::NoCuda(e.to_string()))?;
        check("version of the driver", sys::cuDriverGetVersion(&mut version))?;
    }
    Ok(version.max(0) as u32)
}

/// The cards of this machine. An error says why there are none.
pub fn gpus() -> Result<Vec<GpuInfo>> {
    let driver = start()?;
    let mut count = 0;
    // SAFETY: a place for a number.
    check("count of cards", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    (0..count.max(0) as usize).map(|ordinal| describe(ordinal, driver)).collect()
}

fn describe(ordinal: usize, driver: u32) -> Result<GpuInfo> {
    use sys::CUdevice_attribute as A;
    let (mut device, mut name, mut memory) = (0, [0; 256], 0);
    // SAFETY: places for what is asked, the name's with its length.
    unsafe {
        check("card", sys::cuDeviceGet(&mut device, ordinal as i32))?;
        check("name of the card", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
        check("memory of the card", sys::cuDeviceTotalMem_v2(&mut memory, device))?;
    }
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: a place for a number.
        check("attribute of the card", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok::<_, Error>(value.max(0) as u32)
    };
    let capability = (
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // SAFETY: the driver ended the name with a zero within the array.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(GpuInfo { ordinal, name, capability, multiprocessors, memory, driver })
}

impl CudaContext {
    /// CudaContext `ordinal` with its context.
    pub(crate) fn open(ordinal: usize) -> Result<CudaContext> {
        let all = gpus()?;
        let Some(info) = all.get(ordinal).cloned() else {
            return Err(Error::NoCuda(match all.len() {
                0 => "the NVIDIA driver is there, but it sees no card".into(),
                n => format!("there is no cuda:{ordinal}; this machine has cuda:0 to cuda:{}", n - 1),
            }));
        };
        if info.capability < (8, 0) {
            return Err(Error::NoCuda(format!(
                "{} has compute capability {}.{}, but 8.0 or newer is needed",
                info.name, info.capability.0, info.capability.1
            )));
        }
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: places for handles; the ordinal exists. The primary context lives as long as the process.
        unsafe {
            check("card", sys::cuDeviceGet(&mut device, ordinal as i32))?;
            check("context", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
            check("context", sys::cuCtxSetCurrent(context))?;
        }
        Ok(CudaContext { info, context, staging: Staging::default(), fault: memory::mapped_word()? })
    }

    /// Makes the context current on this thread. Every use of the driver starts with it.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: a context that was retained and never released.
        check("context", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Device address of the fault word.
    pub(crate) fn fault_address(&self) -> u64 {
        self.fault.1
    }

    /// What kernels found wrong since the last look. To be asked after waiting for them.
    pub(crate) fn faults(&self) -> Result<()> {
        let word = self.fault.0 as *mut u32;
        // SAFETY: pinned memory of this card, never freed; kernels only ever store to it.
        let code = unsafe { word.read_volatile() };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { word.write_volatile(0) };
        let what = match code {
            1 => "a token id or position lies outside its table",
            2 => "a label lies outside the vocabulary",
            3 => "the number of an expert or of a segment is not one that exists",
            _ => "a kernel reported a fault it has no name for",
        };
        Err(Error::Fault(what))
    }

    /// Free and total bytes now, as the driver sees them.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: places for numbers.
        check("memory of the card", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }
}
