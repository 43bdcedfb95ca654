//! NVML, which is loaded at run time, and the health of a GPU as it reports it.

use super::libraries::folders;
use cudarc::driver::sys;
use ferrotron_tensor::Device;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::ManuallyDrop;
use std::path::PathBuf;

const FILE: &str = "libnvidia-ml.so.1";

/// `NVML_CLOCK_SM`.
const CLOCK_SM: c_uint = 1;
/// `NVML_TEMPERATURE_GPU`.
const TEMPERATURE_GPU: c_uint = 0;
/// `NVML_VOLATILE_ECC`: since the driver was loaded.
const VOLATILE_ECC: c_uint = 0;
/// `nvmlEventTypeXidCriticalError`.
const XID: c_ulonglong = 8;
/// Most Xid events read at a time.
const MAX_XIDS: usize = 16;

type Handle = *mut c_void;
type Init = unsafe extern "C" fn() -> c_int;
type ByBusId = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
type GetU32 = unsafe extern "C" fn(Handle, *mut c_uint) -> c_int;
type GetU32Of = unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> c_int;
type GetU64 = unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int;
type GetEcc = unsafe extern "C" fn(Handle, c_uint, c_uint, *mut c_ulonglong) -> c_int;
type CreateSet = unsafe extern "C" fn(*mut Handle) -> c_int;
type Register = unsafe extern "C" fn(Handle, c_ulonglong, Handle) -> c_int;
type WaitSet = unsafe extern "C" fn(Handle, *mut EventData, c_uint) -> c_int;

/// `nvmlEventData_t`.
#[repr(C)]
struct EventData {
    device: Handle,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// NVML's view of one GPU.
pub struct NvmlDevice {
    /// Never unloaded: NVML is not shut down.
    library: ManuallyDrop<Library>,
    handle: Handle,
    bus_id: String,
    /// The set in which Xid events of the GPU arrive, where the driver offers them.
    xids: Option<Handle>,
}

// SAFETY: NVML may be called from any thread; a handle names a GPU, not a thread.
unsafe impl Send for NvmlDevice {}

/// State of a GPU. What its driver does not tell is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuHealth {
    /// SM clock in MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_mhz: Option<u32>,
    /// The highest SM clock of the GPU in MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sm_mhz: Option<u32>,
    /// Power in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// Its limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_w: Option<f64>,
    /// Temperature in degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Why clocks are below their maximum, in words; see [`throttle_reasons`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub throttle: Vec<String>,
    /// Corrected ECC errors since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc_corrected: Option<u64>,
    /// Uncorrected ECC errors since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc_uncorrected: Option<u64>,
    /// Xid errors since the last reading.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub xid: Vec<u64>,
}

/// The words of NVML's bit mask of clock event reasons. An idle GPU and clocks set by an administrator are not among them.
pub fn throttle_reasons(mask: u64) -> Vec<String> {
    const WORDS: [(u64, &str); 6] = [
        (0x04, "power cap"),
        (0x08, "hardware slowdown"),
        (0x10, "sync boost"),
        (0x20, "thermal slowdown (software)"),
        (0x40, "thermal slowdown (hardware)"),
        (0x80, "power brake"),
    ];
    WORDS.iter().filter(|(bit, _)| mask & bit != 0).map(|(_, word)| (*word).into()).collect()
}

impl NvmlDevice {
    /// Opens the GPU of a device. None on the CPU or without NVML.
    pub fn open(device: &Device) -> Option<NvmlDevice> {
        let bus_id = bus_id(device.gpu()?.ordinal)?;
        let library = library()?;
        // SAFETY: the functions' types as in NVML's header.
        let (init, by_bus_id) = unsafe {
            (
                *library.get::<Init>("nvmlInit_v2").ok()?,
                *library.get::<ByBusId>("nvmlDeviceGetHandleByPciBusId_v2").ok()?,
            )
        };
        let text = CString::new(bus_id.as_str()).ok()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: a NUL-terminated string, and a pointer for the handle. NVML is initialized once for each opened device and
        // counts; it is never shut down.
        let found = unsafe { init() == 0 && by_bus_id(text.as_ptr(), &mut handle) == 0 };
        if !found || handle.is_null() {
            return None;
        }
        let mut device = NvmlDevice { library: ManuallyDrop::new(library), handle, bus_id, xids: None };
        device.xids = device.register_xids();
        Some(device)
    }

    /// PCI bus id: several ranks may share a GPU.
    pub fn bus_id(&self) -> &str {
        &self.bus_id
    }

    /// Millijoules since the driver was loaded.
    pub fn millijoules(&self) -> Option<u64> {
        self.u64("nvmlDeviceGetTotalEnergyConsumption")
    }

    /// Clocks, power, temperature and errors of the GPU now.
    pub fn health(&self) -> GpuHealth {
        let watts = |name| self.u32(name).map(|mw| f64::from(mw) / 1e3);
        let reasons = self
            .u64("nvmlDeviceGetCurrentClocksEventReasons")
            .or_else(|| self.u64("nvmlDeviceGetCurrentClocksThrottleReasons"));
        GpuHealth {
            sm_mhz: self.u32_of("nvmlDeviceGetClockInfo", CLOCK_SM),
            max_sm_mhz: self.u32_of("nvmlDeviceGetMaxClockInfo", CLOCK_SM),
            power_w: watts("nvmlDeviceGetPowerUsage"),
            power_limit_w: watts("nvmlDeviceGetEnforcedPowerLimit"),
            temperature_c: self.u32_of("nvmlDeviceGetTemperature", TEMPERATURE_GPU),
            throttle: reasons.map(throttle_reasons).unwrap_or_default(),
            ecc_corrected: self.ecc(0),
            ecc_uncorrected: self.ecc(1),
            xid: self.take_xids(),
        }
    }

    fn u32(&self, name: &str) -> Option<u32> {
        let mut value = 0;
        // SAFETY: the function's type as in NVML's header, a handle from NVML, and a pointer for the value.
        (unsafe { self.library.get::<GetU32>(name).ok()?(self.handle, &mut value) } == 0).then_some(value)
    }

    fn u32_of(&self, name: &str, which: c_uint) -> Option<u32> {
        let mut value = 0;
        // SAFETY: as above.
        let ok = unsafe { self.library.get::<GetU32Of>(name).ok()?(self.handle, which, &mut value) } == 0;
        ok.then_some(value)
    }

    fn u64(&self, name: &str) -> Option<u64> {
        let mut value = 0;
        // SAFETY: as above.
        (unsafe { self.library.get::<GetU64>(name).ok()?(self.handle, &mut value) } == 0).then_some(value)
    }

    /// ECC errors of a kind: 0 corrected, 1 uncorrected.
    fn ecc(&self, kind: c_uint) -> Option<u64> {
        let mut value = 0;
        // SAFETY: as above.
        let ok = unsafe {
            let get = self.library.get::<GetEcc>("nvmlDeviceGetTotalEccErrors").ok()?;
            get(self.handle, kind, VOLATILE_ECC, &mut value) == 0
        };
        ok.then_some(value)
    }

    fn register_xids(&self) -> Option<Handle> {
        let mut set: Handle = std::ptr::null_mut();
        // SAFETY: the functions' types as in NVML's header; the set lives as long as the process.
        let ok = unsafe {
            let create = self.library.get::<CreateSet>("nvmlEventSetCreate").ok()?;
            let register = self.library.get::<Register>("nvmlDeviceRegisterEvents").ok()?;
            create(&mut set) == 0 && register(self.handle, XID, set) == 0
        };
        (ok && !set.is_null()).then_some(set)
    }

    /// Xid errors that have arrived since the last call. Does not wait.
    fn take_xids(&self) -> Vec<u64> {
        let mut found = Vec::new();
        let Some(set) = self.xids else { return found };
        // SAFETY: the function's type as in NVML's header.
        let Ok(wait) = (unsafe { self.library.get::<WaitSet>("nvmlEventSetWait_v2") }) else { return found };
        while found.len() < MAX_XIDS {
            let mut event = EventData {
                device: std::ptr::null_mut(),
                kind: 0,
                data: 0,
                gpu_instance: 0,
                compute_instance: 0,
            };
            // SAFETY: a set from NVML, and a pointer for the event.
            if unsafe { wait(set, &mut event, 0) } != 0 {
                break;
            }
            found.extend((event.kind & XID != 0).then_some(event.data));
        }
        found
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::test_support::skipped;
    use ferrotron_tensor::{Instrumentation, Threads, gpus};

    #[test]
    fn throttle_reasons_are_words() {
        // Idle (1) and application clocks (2) are no faults.
        assert!(throttle_reasons(0x3).is_empty());
        assert_eq!(throttle_reasons(0x4 | 0x40), ["power cap", "thermal slowdown (hardware)"]);
    }

    #[test]
    fn a_gpu_tells_its_clocks_and_a_cpu_has_no_nvml() {
        assert!(NvmlDevice::open(&Device::cpu(Threads::new(1).unwrap())).is_none());
        if !gpus().is_ok_and(|all| !all.is_empty()) {
            return skipped("no GPU");
        }
        let device = Device::cuda(0, Threads::new(1).unwrap(), Instrumentation::default()).unwrap();
        let Some(nvml) = NvmlDevice::open(&device) else { return skipped("no NVML") };
        let health = nvml.health();
        assert!(health.sm_mhz.is_some_and(|mhz| mhz > 0 && Some(mhz) <= health.max_sm_mhz), "{health:?}");
        assert!(health.power_w.is_some_and(|w| w > 1.0) && health.temperature_c.is_some(), "{health:?}");
        assert!(nvml.millijoules().is_some_and(|mj| mj > 0));
    }
}
