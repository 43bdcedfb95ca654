//! An NCCL communicator: creation, errors and shutdown. Communicators are non-blocking, so that waiting for a missing
//! rank can time out.

use super::ffi::{Comm, Config, IN_PROGRESS, NO_COLOR, Nccl, SUCCESS, UniqueId};
use crate::backend::OpError;
use crate::process::Process;
use ferrotron_tensor::Stream;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time limit for finalising a communicator before it is aborted.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct NcclComm {
    nccl: &'static Nccl,
    raw: Raw,
    pub(super) process: Arc<Process>,
    aborted: AtomicBool,
}

#[derive(Clone, Copy)]
struct Raw(Comm);
// SAFETY: any thread may use a communicator, one call at a time, except that its async error may be read and an abort
// issued at any time; calls on a group are serialised.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl NcclComm {
    /// Creates the communicator of all ranks that know `id`, on the device of `s`. Collective.
    pub(super) fn new(
        nccl: &'static Nccl,
        process: &Arc<Process>,
        s: &Stream,
        id: UniqueId,
        deadline: Instant,
    ) -> Result<Arc<NcclComm>, OpError> {
        let (size, rank) = (process.control().size() as c_int, process.control().rank() as c_int);
        let mut raw = std::ptr::null_mut();
        let mut code = SUCCESS;
        s.launch("nccl", &[], |l| {
            l.cuda_stream()?;
            let mut config = Config::non_blocking();
            // SAFETY: the context is current inside a launch; the pointers are to locals.
            code = unsafe { (nccl.init)(&mut raw, size, id, rank, &mut config) };
            Ok(())
        })?;
        let comm = NcclComm::wrap(nccl, process, raw);
        comm.wait_accepted("ncclCommInitRankConfig", code, deadline)?;
        Ok(Arc::new(comm))
    }

    fn wrap(nccl: &'static Nccl, process: &Arc<Process>, raw: Comm) -> NcclComm {
        NcclComm { nccl, raw: Raw(raw), process: process.clone(), aborted: AtomicBool::new(false) }
    }

    /// Splits off a communicator of some ranks. Collective over this communicator; members pass their rank in the new
    /// group as `place`.
    pub(super) fn split(
        &self,
        s: &Stream,
        place: Option<usize>,
        deadline: Instant,
    ) -> Result<Option<Arc<NcclComm>>, OpError> {
        let color = if place.is_some() { 0 } else { NO_COLOR };
        // Leaked: NCCL may write to it until the split completes, which may be never.
        let raw: *mut Comm = Box::leak(Box::new(std::ptr::null_mut()));
        let mut code = SUCCESS;
        s.launch("nccl", &[], |l| {
            l.cuda_stream()?;
            let mut config = Config::non_blocking();
            let key = place.unwrap_or(0) as c_int;
            // SAFETY: as in `new`; `raw` is never freed.
            code = unsafe { (self.nccl.split)(self.raw.0, color, key, raw, &mut config) };
            Ok(())
        })?;
        self.wait_accepted("ncclCommSplit", code, deadline)?;
        // A member's communicator may appear shortly after the parent is ready; other ranks get none.
        let comm = loop {
            // SAFETY: never freed; volatile, because NCCL's threads write it.
            let comm = unsafe { std::ptr::read_volatile(raw) };
            if !comm.is_null() || place.is_none() || Instant::now() > deadline {
                break comm;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        if comm.is_null() {
            return Ok(None);
        }
        let comm = NcclComm::wrap(self.nccl, &self.process, comm);
        comm.wait_accepted("ncclCommSplit", IN_PROGRESS, deadline)?;
        Ok(Some(Arc::new(comm)))
    }

    /// Waits until NCCL has accepted the call that returned `code`, not until it has run on the GPU.
    pub(super) fn wait_accepted(
        &self,
        call: &'static str,
        code: c_int,
        deadline: Instant,
    ) -> Result<(), OpError> {
        if code == SUCCESS {
            return Ok(());
        }
        if code != IN_PROGRESS {
            return Err(self.nccl.error(call, code).into());
        }
        let others = || (0..self.process.control().size()).map(|r| (r, r)).collect();
        let ready = || match self.state() {
            IN_PROGRESS => Ok(None),
            SUCCESS => Ok(Some(())),
            code => Err(self.nccl.error(call, code).into()),
        };
        self.process.wait(deadline, ready, others).map_err(|error| match error {
            // NCCL does not say which rank is missing.
            OpError::RanksMissing { failure, .. } => {
                OpError::RanksMissing { missing: vec![], ended: vec![], failure }
            }
            other => other,
        })
    }

    /// The communicator's state: success, in progress, or an asynchronous error.
    pub(super) fn state(&self) -> c_int {
        let mut code = SUCCESS;
        if self.aborted.load(Ordering::Acquire) || self.raw.0.is_null() {
            return SUCCESS;
        }
        // SAFETY: a live communicator; may be called at any time.
        match unsafe { (self.nccl.async_error)(self.raw.0, &mut code) } {
            SUCCESS => code,
            other => other,
        }
    }

    /// The error for an asynchronous error code.
    pub(super) fn error(&self, code: c_int) -> crate::Error {
        self.nccl.error("asynchronous error", code)
    }

    /// The handle for a call.
    pub(super) fn raw(&self) -> Result<Comm, OpError> {
        match self.aborted.load(Ordering::Acquire) {
            true => {
                Err(OpError::RanksMissing { missing: vec![], ended: vec![], failure: self.process.failure() })
            }
            false => Ok(self.raw.0),
        }
    }

    /// Aborts what is on the GPU's streams, so that hosts waiting for it wake up.
    pub(super) fn abort(&self) {
        if !self.raw.0.is_null() && !self.aborted.swap(true, Ordering::AcqRel) {
            // SAFETY: live until here, and never used again.
            unsafe { (self.nccl.abort)(self.raw.0) };
        }
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        if self.raw.0.is_null() || self.aborted.load(Ordering::Acquire) {
            return;
        }
        if self.process.failure().is_none() && !std::thread::panicking() {
            // SAFETY: live, with no other user left.
            let mut code = unsafe { (self.nccl.finalize)(self.raw.0) };
            let deadline = Instant::now() + FINALIZE_TIMEOUT;
            while code == IN_PROGRESS && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
                code = self.state();
            }
            if code == SUCCESS {
                // SAFETY: finalised; this is the last use.
                unsafe { (self.nccl.destroy)(self.raw.0) };
                return;
            }
        }
        self.abort();
    }
}
