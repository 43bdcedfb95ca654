//! NCCL's C interface, opened at run time. Result codes are plain integers: an unknown code must not be undefined
//! behaviour.

use crate::shared_library::{SharedLibrary, nvidia_folders};
use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `cudaStream_t`.
pub(super) type CudaStream = *mut c_void;

pub(super) const NAME: &str = "NCCL";
/// Some systems have only the development link, some only the versioned file.
const FILES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The oldest version whose `ncclCommSplit` and non-blocking creation work.
const OLDEST: c_int = 21_803;

/// `ncclSuccess`.
pub(super) const SUCCESS: c_int = 0;
/// `ncclInProgress`: a non-blocking call has not completed yet.
pub(super) const IN_PROGRESS: c_int = 7;
/// `NCCL_SPLIT_NOCOLOR`: takes part in a split without joining the new group.
pub(super) const NO_COLOR: c_int = -1;

/// `ncclUniqueId`: identifies a job while its ranks connect.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` as of 2.18; later versions only append fields and go by `size` and `version`.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Non-blocking calls return at once with `ncclInProgress`, so that waiting for a missing rank can time out.
    pub(super) fn new(blocking: bool) -> Config {
        let default = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST as u32,
            blocking: blocking.into(),
            cga_cluster_size: default,
            min_ctas: default,
            max_ctas: default,
            net_name: std::ptr::null(),
            split_share: default,
        }
    }
}

type Start = unsafe extern "C" fn() -> c_int;
type End = unsafe extern "C" fn(Comm) -> c_int;
type Ask = unsafe extern "C" fn(Comm, *mut c_int) -> c_int;
type Move = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, CudaStream) -> c_int;
type Fold = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
type Peer = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;

/// The NCCL functions used here, as declared in nccl.h.
pub(super) struct Nccl {
    pub(super) get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    pub(super) init: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int,
    pub(super) split: unsafe extern "C" fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> c_int,
    pub(super) finalize: End,
    pub(super) destroy: End,
    pub(super) abort: End,
    pub(super) async_error: Ask,
    pub(super) error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(super) last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    pub(super) group_start: Start,
    pub(super) group_end: Start,
    pub(super) all_reduce: Fold,
    pub(super) reduce_scatter: Fold,
    pub(super) all_gather: Move,
    pub(super) broadcast: Fold,
    pub(super) send: Peer,
    pub(super) receive: Peer,
}

impl Nccl {
    /// Opens the library once per process.
    pub(super) fn open() -> Result<&'static Nccl> {
        static OPEN: OnceLock<Nccl> = OnceLock::new();
        if let Some(nccl) = OPEN.get() {
            return Ok(nccl);
        }
        let l = SharedLibrary::open(NAME, &FILES, &nvidia_folders())?;
        // SAFETY: the types are those of nccl.h; `ncclResult_t` and the other enums are ints in C. `ncclBroadcast`
        // takes (send, receive, count, type, root, comm, stream): the integer arguments of `Fold`.
        let nccl = unsafe {
            Nccl {
                get_version: l.function("ncclGetVersion")?,
                get_unique_id: l.function("ncclGetUniqueId")?,
                init: l.function("ncclCommInitRankConfig")?,
                split: l.function("ncclCommSplit")?,
                finalize: l.function("ncclCommFinalize")?,
                destroy: l.function("ncclCommDestroy")?,
                abort: l.function("ncclCommAbort")?,
                async_error: l.function("ncclCommGetAsyncError")?,
                error_string: l.function("ncclGetErrorString")?,
                last_error: l.function("ncclGetLastError")?,
                group_start: l.function("ncclGroupStart")?,
                group_end: l.function("ncclGroupEnd")?,
                all_reduce: l.function("ncclAllReduce")?,
                reduce_scatter: l.function("ncclReduceScatter")?,
                all_gather: l.function("ncclAllGather")?,
                broadcast: l.function("ncclBroadcast")?,
                send: l.function("ncclSend")?,
                receive: l.function("ncclRecv")?,
            }
        };
        let version = nccl.version()?;
        if version < OLDEST {
            let what = format!("version {} is older than {}", dotted(version), dotted(OLDEST));
            return Err(Error::Library { library: NAME, what });
        }
        Ok(OPEN.get_or_init(|| nccl))
    }

    /// NCCL's version number: 22803 for 2.28.3.
    pub(super) fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (self.get_version)(&mut version) };
        self.check("ncclGetVersion", code).map(|()| version)
    }

    /// Creates the unique id of a job, on one rank.
    pub(super) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is to a local of the declared size.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code).map(|()| id)
    }

    /// Fails unless `code` is success.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        match code {
            SUCCESS => Ok(()),
            code => Err(self.error(call, code)),
        }
    }

    /// NCCL's message for a code, and its last log line.
    pub(super) fn error(&self, call: &'static str, code: c_int) -> Error {
        // SAFETY: both return static or thread-local zero-terminated text, or null; a null communicator is allowed.
        let text = unsafe {
            [(self.error_string)(code), (self.last_error)(std::ptr::null_mut())].map(|t| {
                if t.is_null() { String::new() } else { CStr::from_ptr(t).to_string_lossy().into_owned() }
            })
        };
        let what = match text {
            [what, detail] if detail.trim().is_empty() => what,
            [what, detail] => format!("{what} ({})", detail.trim()),
        };
        Error::Backend { call: format!("{NAME}: {call}"), what }
    }
}

/// 22803 as 2.28.3.
pub(super) fn dotted(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_the_header() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
        assert_eq!(dotted(22_803), "2.28.3");
    }

    /// Prints SKIPPED where there is no NCCL, unless `FERROTRON_NEEDS_NCCL` is set.
    #[test]
    fn every_symbol_is_found_where_nccl_is() {
        match Nccl::open() {
            Ok(nccl) => assert!(nccl.version().is_ok_and(|v| v >= OLDEST)),
            Err(error) => {
                assert!(!error.to_string().contains("has no"), "{error}");
                assert!(std::env::var_os("FERROTRON_NEEDS_NCCL").is_none(), "{error}");
                eprintln!("SKIPPED: {error}");
            }
        }
    }
}
