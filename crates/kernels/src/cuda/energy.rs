//! Energy that a card has used: a counter of NVML's, a library of the driver, opened at run time.

use super::libraries::folders;
use cudarc::driver::sys;
use ferrotron_tensor::Device;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_ulonglong, c_void};
use std::path::PathBuf;

/// The library.
const FILE: &str = "libnvidia-ml.so.1";

type Handle = *mut c_void;
type Init = unsafe extern "C" fn() -> c_int;
type ByBusId = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
type TotalEnergy = unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int;

/// A card's counter.
pub struct EnergyCounter {
    handle: Handle,
    total: TotalEnergy,
    bus_id: String,
}

// SAFETY: NVML may be called from any thread; a handle is a name of a card, not of a thread.
unsafe impl Send for EnergyCounter {}

impl EnergyCounter {
    /// That of a device. Nothing where it is no card, the library is absent, or the card has no such counter.
    pub fn open(device: &Device) -> Option<EnergyCounter> {
        let bus_id = bus_id(device.gpu()?.ordinal)?;
        let library = library()?;
        // SAFETY: these are the functions' types by NVML's header.
        let (init, by_bus_id, total) = unsafe {
            (
                *library.get::<Init>("nvmlInit_v2").ok()?,
                *library.get::<ByBusId>("nvmlDeviceGetHandleByPciBusId_v2").ok()?,
                *library.get::<TotalEnergy>("nvmlDeviceGetTotalEnergyConsumption").ok()?,
            )
        };
        let text = std::ffi::CString::new(bus_id.as_str()).ok()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: a text that ends with zero, and a place for the handle. The library was started, and stays open.
        let found = unsafe { init() == 0 && by_bus_id(text.as_ptr(), &mut handle) == 0 };
        std::mem::forget(library);
        let counter = EnergyCounter { handle, total, bus_id };
        (found && !handle.is_null() && counter.millijoules().is_some()).then_some(counter)
    }

    /// The card's address on its machine: several ranks may be on one card.
    pub fn bus_id(&self) -> &str {
        &self.bus_id
    }

    /// Since the driver was loaded.
    pub fn millijoules(&self) -> Option<u64> {
        let mut value = 0;
        // SAFETY: a handle that NVML gave, and a place for a number.
        (unsafe { (self.total)(self.handle, &mut value) } == 0).then_some(value)
    }
}

fn library() -> Option<Library> {
    let places = [PathBuf::from(FILE)].into_iter().chain(folders().into_iter().map(|f| f.join(FILE)));
    // SAFETY: NVIDIA's libraries do nothing harmful when loaded.
    places.into_iter().find_map(|path| unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok())
}

fn bus_id(ordinal: usize) -> Option<String> {
    let (mut device, mut text) = (0, [0; 32]);
    // SAFETY: places for what is asked, the text's with its length. There is a card, so the driver is open.
    unsafe {
        let ok = sys::cuDeviceGet(&mut device, ordinal as i32) == sys::CUresult::CUDA_SUCCESS
            && sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 31, device) == sys::CUresult::CUDA_SUCCESS;
        // The array ends with a zero that the driver was not told of.
        ok.then(|| CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
    }
}
