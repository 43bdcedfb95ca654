//! Energy consumed by a GPU, from NVML, which is loaded at run time.

use super::libraries::folders;
use cudarc::driver::sys;
use ferrotron_tensor::Device;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_ulonglong, c_void};
use std::path::PathBuf;

/// NVML.
const FILE: &str = "libnvidia-ml.so.1";

type Handle = *mut c_void;
type Init = unsafe extern "C" fn() -> c_int;
type ByBusId = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
type TotalEnergy = unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int;

/// A GPU's energy counter.
pub struct EnergyCounter {
    handle: Handle,
    total: TotalEnergy,
    bus_id: String,
}

// SAFETY: NVML may be called from any thread; a handle names a GPU, not a thread.
unsafe impl Send for EnergyCounter {}

impl EnergyCounter {
    /// Opens the counter of a device. None on the CPU, without NVML, or where the GPU has no such counter.
    pub fn open(device: &Device) -> Option<EnergyCounter> {
        let bus_id = bus_id(device.gpu()?.ordinal)?;
        let library = library()?;
        // SAFETY: the functions' types as in NVML's header.
        let (init, by_bus_id, total) = unsafe {
            (
                *library.get::<Init>("nvmlInit_v2").ok()?,
                *library.get::<ByBusId>("nvmlDeviceGetHandleByPciBusId_v2").ok()?,
                *library.get::<TotalEnergy>("nvmlDeviceGetTotalEnergyConsumption").ok()?,
            )
        };
        let text = std::ffi::CString::new(bus_id.as_str()).ok()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: a NUL-terminated string, and a pointer for the handle. NVML is initialized, and stays loaded.
        let found = unsafe { init() == 0 && by_bus_id(text.as_ptr(), &mut handle) == 0 };
        std::mem::forget(library);
        let counter = EnergyCounter { handle, total, bus_id };
        (found && !handle.is_null() && counter.millijoules().is_some()).then_some(counter)
    }

    /// PCI bus id: several ranks may share a GPU.
    pub fn bus_id(&self) -> &str {
        &self.bus_id
    }

    /// Millijoules since the driver was loaded.
    pub fn millijoules(&self) -> Option<u64> {
        let mut value = 0;
        // SAFETY: a handle from NVML, and a pointer for the value.
        (unsafe { (self.total)(self.handle, &mut value) } == 0).then_some(value)
    }
}

fn library() -> Option<Library> {
    let places = [PathBuf::from(FILE)].into_iter().chain(folders().into_iter().map(|f| f.join(FILE)));
    // SAFETY: loading NVIDIA's libraries has no harmful side effects.
    places.into_iter().find_map(|path| unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok())
}

/// PCI bus id of a GPU: its name on its host, whatever CUDA_VISIBLE_DEVICES calls it.
pub fn bus_id(ordinal: usize) -> Option<String> {
    let (mut device, mut text) = (0, [0; 32]);
    // SAFETY: a pointer for the device, and a buffer with its length. There is a GPU, so the driver is loaded.
    unsafe {
        let ok = sys::cuDeviceGet(&mut device, ordinal as i32) == sys::CUresult::CUDA_SUCCESS
            && sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 31, device) == sys::CUresult::CUDA_SUCCESS;
        // The last byte of the buffer, which the driver was not offered, is NUL.
        ok.then(|| CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
    }
}
