//! Open MPI's C interface, opened at run time. Its handles are addresses of exported globals while MPICH's are
//! integers, so one set of types cannot serve both; MPICH is refused.

use crate::shared_library::SharedLibrary;
use crate::{Error, Result};
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// A communicator, datatype or request of Open MPI: the address of its object.
pub(super) type Handle = *mut c_void;

const NAME: &str = "Open MPI";
const FILES: [&str; 1] = ["libmpi.so.40"];
/// The library name of MPICH and its derivatives (Intel MPI, Cray MPI, MVAPICH).
const MPICH: &str = "libmpi.so.12";
/// `MPI_THREAD_MULTIPLE`.
const MULTIPLE: c_int = 3;
/// Buffer size for messages; `MPI_MAX_ERROR_STRING` is 256 in Open MPI.
const TEXT: usize = 512;

type Plain = unsafe extern "C" fn() -> c_int;
type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
type AskComm = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type Transfer = unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int;

/// `MPI_Status` of Open MPI.
#[repr(C)]
#[derive(Default)]
struct Status {
    source: c_int,
    tag: c_int,
    error: c_int,
    cancelled: c_int,
    count: usize,
}

/// `MPI_ANY_SOURCE` and `MPI_ANY_TAG`.
const ANY: c_int = -1;

/// The MPI functions used here.
pub(super) struct Mpi {
    init: unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int,
    initialized: Ask,
    finalize: Plain,
    comm_rank: AskComm,
    comm_size: AskComm,
    comm_dup: unsafe extern "C" fn(Handle, *mut Handle) -> c_int,
    set_errhandler: unsafe extern "C" fn(Handle, Handle) -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    library_version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int,
    isend: Transfer,
    irecv: Transfer,
    test: unsafe extern "C" fn(*mut Handle, *mut c_int, *mut c_void) -> c_int,
    improbe: unsafe extern "C" fn(c_int, c_int, Handle, *mut c_int, *mut Handle, *mut Status) -> c_int,
    imrecv: unsafe extern "C" fn(*mut c_void, c_int, Handle, *mut Handle, *mut Handle) -> c_int,
    get_count: unsafe extern "C" fn(*const Status, Handle, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(Handle, c_int) -> c_int,
    world: usize,
    byte: usize,
    errors_return: usize,
}

impl Mpi {
    /// Opens the library once per process.
    pub(super) fn open() -> Result<&'static Mpi> {
        static OPEN: OnceLock<Mpi> = OnceLock::new();
        if let Some(mpi) = OPEN.get() {
            return Ok(mpi);
        }
        let library = SharedLibrary::open(NAME, &FILES, &[]).map_err(|error| {
            match SharedLibrary::open("MPICH", &[MPICH], &[]) {
                Ok(_) => Error::Library { library: NAME, what: format!("only MPICH ({MPICH}) was found, which is not binary compatible; install Open MPI and start the job with its mpirun") },
                Err(_) => error,
            }
        })?;
        // SAFETY: the types are those of the MPI standard, with Open MPI's handles.
        let mpi = unsafe {
            Mpi {
                init: library.function("MPI_Init_thread")?,
                initialized: library.function("MPI_Initialized")?,
                finalize: library.function("MPI_Finalize")?,
                comm_rank: library.function("MPI_Comm_rank")?,
                comm_size: library.function("MPI_Comm_size")?,
                comm_dup: library.function("MPI_Comm_dup")?,
                set_errhandler: library.function("MPI_Comm_set_errhandler")?,
                error_string: library.function("MPI_Error_string")?,
                library_version: library.function("MPI_Get_library_version")?,
                isend: library.function("MPI_Isend")?,
                irecv: library.function("MPI_Irecv")?,
                test: library.function("MPI_Test")?,
                improbe: library.function("MPI_Improbe")?,
                imrecv: library.function("MPI_Imrecv")?,
                get_count: library.function("MPI_Get_count")?,
                abort: library.function("MPI_Abort")?,
                world: library.global("ompi_mpi_comm_world")?,
                byte: library.global("ompi_mpi_byte")?,
                errors_return: library.global("ompi_mpi_errors_return")?,
            }
        };
        Ok(OPEN.get_or_init(|| mpi))
    }

    /// Initializes MPI with MPI_THREAD_MULTIPLE. Fails if it was initialized before in this process.
    pub(super) fn start(&self) -> Result<()> {
        let mut provided = 0;
        // SAFETY: the pointers are to locals; MPI_Init_thread accepts null for "no arguments".
        unsafe {
            let mut before = 0;
            self.check("MPI_Initialized", (self.initialized)(&mut before))?;
            if before != 0 {
                let what = "MPI was already initialized in this process; create one World only".to_string();
                return Err(Error::Library { library: NAME, what });
            }
            let code = (self.init)(std::ptr::null_mut(), std::ptr::null_mut(), MULTIPLE, &mut provided);
            self.check("MPI_Init_thread", code)?;
        }
        if provided != MULTIPLE {
            let what =
                "it does not support MPI_THREAD_MULTIPLE, which the background thread needs".to_string();
            return Err(Error::Library { library: NAME, what });
        }
        Ok(())
    }

    /// Duplicates MPI_COMM_WORLD, with errors returned as codes. Collective over all ranks.
    pub(super) fn dup_world(&self) -> Result<Handle> {
        let mut comm = std::ptr::null_mut();
        // SAFETY: MPI is initialized; the handle of the world is its address.
        unsafe {
            self.check("MPI_Comm_dup", (self.comm_dup)(self.world as Handle, &mut comm))?;
            let code = (self.set_errhandler)(comm, self.errors_return as Handle);
            self.check("MPI_Comm_set_errhandler", code)?;
        }
        Ok(comm)
    }

    /// This process's rank, and the number of ranks.
    pub(super) fn rank_and_size(&self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialized; the pointers are to locals.
        unsafe {
            self.check("MPI_Comm_rank", (self.comm_rank)(self.world as Handle, &mut rank))?;
            self.check("MPI_Comm_size", (self.comm_size)(self.world as Handle, &mut size))?;
        }
        Ok((rank.max(0) as usize, size.max(1) as usize))
    }

    /// Starts sending `bytes`.
    ///
    /// # Safety
    /// The memory must stay unchanged until the request completes.
    pub(super) unsafe fn send(&self, comm: Handle, bytes: &[u8], to: usize, tag: c_int) -> Result<Handle> {
        let mut request = std::ptr::null_mut();
        let at = bytes.as_ptr().cast_mut().cast();
        let count = count(bytes.len())?;
        // SAFETY: the caller keeps the memory; MPI only reads it.
        let code =
            unsafe { (self.isend)(at, count, self.byte as Handle, to as c_int, tag, comm, &mut request) };
        self.check("MPI_Isend", code).map(|()| request)
    }

    /// Starts receiving into `len` bytes at `at`.
    ///
    /// # Safety
    /// The memory must stay writable, and untouched by others, until the request completes.
    pub(super) unsafe fn receive(
        &self,
        comm: Handle,
        at: *mut u8,
        len: usize,
        from: usize,
        tag: c_int,
    ) -> Result<Handle> {
        let mut request = std::ptr::null_mut();
        let count = count(len)?;
        // SAFETY: the caller keeps the memory.
        let code = unsafe {
            (self.irecv)(at.cast(), count, self.byte as Handle, from as c_int, tag, comm, &mut request)
        };
        self.check("MPI_Irecv", code).map(|()| request)
    }

    /// Takes the next message that has arrived, if any: its sender, its memory and the request that fills it. The
    /// `Vec` may be moved, but neither freed nor read before the request completes.
    pub(super) fn next(&self, comm: Handle) -> Result<Option<(usize, Vec<u8>, Handle)>> {
        let (mut flag, mut message, mut status) = (0, std::ptr::null_mut(), Status::default());
        let byte = self.byte as Handle;
        // SAFETY: a live communicator and pointers to locals.
        let code = unsafe { (self.improbe)(ANY, ANY, comm, &mut flag, &mut message, &mut status) };
        self.check("MPI_Improbe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        let mut count = 0;
        // SAFETY: the status is that of the probe.
        self.check("MPI_Get_count", unsafe { (self.get_count)(&status, byte, &mut count) })?;
        let mut bytes = vec![0u8; count.max(0) as usize];
        let mut request = std::ptr::null_mut();
        let at = bytes.as_mut_ptr().cast();
        // SAFETY: the message was just probed and is `count` bytes long, as is the memory, which the caller keeps.
        let code = unsafe { (self.imrecv)(at, count, byte, &mut message, &mut request) };
        self.check("MPI_Imrecv", code)?;
        Ok(Some((status.source.max(0) as usize, bytes, request)))
    }

    /// True if the request is complete, which also releases it.
    ///
    /// # Safety
    /// `request` must come from `send`, `receive` or `next` and not be complete yet.
    pub(super) unsafe fn is_complete(&self, request: &mut Handle) -> Result<bool> {
        let mut flag = 0;
        // SAFETY: the caller passes a live request; no status is requested.
        let code = unsafe { (self.test)(request, &mut flag, std::ptr::null_mut()) };
        self.check("MPI_Test", code).map(|()| flag != 0)
    }

    /// Terminates every process of the job.
    pub(super) fn abort(&self) {
        // SAFETY: may be called at any time after initialization.
        unsafe { (self.abort)(self.world as Handle, 1) };
    }

    /// Finalises MPI. Every rank must call it, with no message pending.
    pub(super) fn finalize(&self) {
        // SAFETY: called once, by the owner of the world, with no request pending.
        unsafe { (self.finalize)() };
    }

    /// The first line of the library's name and version.
    pub(super) fn version(&self) -> String {
        let mut text = vec![0u8; 4096];
        let mut len = 0;
        // SAFETY: the buffer is longer than MPI_MAX_LIBRARY_VERSION_STRING.
        unsafe { (self.library_version)(text.as_mut_ptr().cast(), &mut len) };
        text.truncate(len.max(0) as usize);
        String::from_utf8_lossy(&text).lines().next().unwrap_or_default().trim_end_matches(',').to_string()
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut len) = (vec![0u8; TEXT], 0);
        // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING.
        unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &mut len) };
        text.truncate(len.max(0) as usize);
        let what = String::from_utf8_lossy(&text).into_owned();
        Err(Error::Backend { call: format!("{NAME}: {call}"), what })
    }
}

fn count(len: usize) -> Result<c_int> {
    c_int::try_from(len).map_err(|_| {
        let what = format!("a message of {len} bytes exceeds the 32-bit count of MPI");
        Error::Backend { call: NAME.into(), what }
    })
}
