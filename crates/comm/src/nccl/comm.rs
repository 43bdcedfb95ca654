//! NCCL communicators: creation, errors and shutdown.
//!
//! The communicator of all ranks is non-blocking, so that waiting for a missing rank can time out, and is used for
//! nothing but splitting off the groups: every call on a non-blocking communicator starts a thread in NCCL. The groups'
//! communicators are blocking: a call enqueues and returns.
//!
//! `ncclCommGetAsyncError` completes the last call of a non-blocking communicator, so only one thread may use the
//! parent at a time. `ncclCommSplit` returns success although it is still in progress, on members and others alike.

use super::ffi::{Comm, Config, IN_PROGRESS, NO_COLOR, Nccl, SUCCESS, UniqueId};
use crate::backend::OpError;
use crate::process::Process;
use ferrotron_tensor::Stream;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Time limit for finalising a communicator before it is left to the end of the process.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an abort waits for a thread that is inside NCCL.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy)]
struct Raw(Comm);
// SAFETY: any thread may use a communicator, one at a time; the locks below see to that.
unsafe impl Send for Raw {}

/// The communicator of all ranks, from which groups are split off.
pub(super) struct ParentComm {
    nccl: &'static Nccl,
    raw: Mutex<Raw>,
    process: Arc<Process>,
}

impl ParentComm {
    /// Creates the communicator of all ranks that know `id`, on the device of `s`. Collective.
    pub(super) fn new(
        nccl: &'static Nccl,
        process: &Arc<Process>,
        s: &Stream,
        id: UniqueId,
        deadline: Instant,
    ) -> Result<ParentComm, OpError> {
        const CALL: &str = "ncclCommInitRankConfig";
        let (size, rank) = (process.control().size() as c_int, process.control().rank() as c_int);
        let mut raw = std::ptr::null_mut();
        let mut code = SUCCESS;
        s.launch("nccl", &[], |l| {
            l.cuda_stream()?;
            let mut config = Config::new(false);
            // SAFETY: the context is current inside a launch; the pointers are to locals.
            code = unsafe { (nccl.init)(&mut raw, size, id, rank, &mut config) };
            Ok(())
        })?;
        if code != SUCCESS && code != IN_PROGRESS {
            return Err(nccl.error(CALL, code).into());
        }
        let parent = ParentComm { nccl, raw: Mutex::new(Raw(raw)), process: process.clone() };
        parent.wait_ready(parent.lock().0, CALL, deadline)?;
        Ok(parent)
    }

    fn lock(&self) -> MutexGuard<'_, Raw> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Splits off a communicator of some ranks. Collective over all ranks; members pass their rank in the new group as
    /// `place`.
    pub(super) fn split(
        &self,
        s: &Stream,
        place: Option<usize>,
        deadline: Instant,
    ) -> Result<Option<Arc<NcclComm>>, OpError> {
        const CALL: &str = "ncclCommSplit";
        let parent = self.lock();
        let color = if place.is_some() { 0 } else { NO_COLOR };
        // Leaked: NCCL may write to it until the split completes, which may be never.
        let child: *mut Comm = Box::leak(Box::new(std::ptr::null_mut()));
        let mut code = SUCCESS;
        s.launch("nccl", &[], |l| {
            l.cuda_stream()?;
            let mut config = Config::new(true);
            let key = place.unwrap_or(0) as c_int;
            // SAFETY: as in `new`; `child` is never freed, and the lock keeps other threads from the parent.
            code = unsafe { (self.nccl.split)(parent.0, color, key, child, &mut config) };
            Ok(())
        })?;
        if code != SUCCESS && code != IN_PROGRESS {
            return Err(self.nccl.error(CALL, code).into());
        }
        self.wait_ready(parent.0, CALL, deadline)?;
        // SAFETY: never freed; volatile, because a thread of NCCL wrote it.
        let child = unsafe { std::ptr::read_volatile(child) };
        match (place, child.is_null()) {
            (None, _) => Ok(None),
            (Some(_), true) => {
                Err(OpError::Backend { what: format!("{CALL} succeeded without a communicator") })
            }
            (Some(_), false) => Ok(Some(Arc::new(NcclComm {
                nccl: self.nccl,
                raw: Mutex::new(Some(Raw(child))),
                process: self.process.clone(),
            }))),
        }
    }

    /// Waits until the last call on the parent is complete.
    fn wait_ready(&self, raw: Comm, call: &'static str, deadline: Instant) -> Result<(), OpError> {
        let ready = || match async_error(self.nccl, raw) {
            IN_PROGRESS => Ok(None),
            SUCCESS => Ok(Some(())),
            code => Err(self.nccl.error(call, code).into()),
        };
        let others = || (0..self.process.control().size()).map(|r| (r, r)).collect();
        self.process.wait(deadline, ready, others).map_err(|error| match error {
            // NCCL does not say which rank is missing.
            OpError::RanksMissing { failure, ended, .. } => {
                OpError::RanksMissing { missing: vec![], ended, failure }
            }
            other => other,
        })
    }
}

impl Drop for ParentComm {
    fn drop(&mut self) {
        let raw = self.lock().0;
        if !raw.is_null() && self.process.failure().is_some() && self.process.restarts() {
            // SAFETY: live, with no other user left; the groups split off from it have been aborted or are left alone.
            unsafe { (self.nccl.abort)(raw) };
            return;
        }
        // After a failure the process ends anyway, and NCCL may wait for ranks that are gone.
        if raw.is_null() || self.process.failure().is_some() || std::thread::panicking() {
            return;
        }
        // SAFETY: live, with no other user left.
        let mut code = unsafe { (self.nccl.finalize)(raw) };
        let deadline = Instant::now() + FINALIZE_TIMEOUT;
        while (code == IN_PROGRESS || code == SUCCESS) && Instant::now() < deadline {
            code = async_error(self.nccl, raw);
            if code == SUCCESS {
                // SAFETY: finalised; this is the last use.
                unsafe { (self.nccl.destroy)(raw) };
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The state of a communicator: success, in progress, or an asynchronous error.
fn async_error(nccl: &Nccl, raw: Comm) -> c_int {
    let mut code = SUCCESS;
    // SAFETY: a live communicator; its lock is held.
    match unsafe { (nccl.async_error)(raw, &mut code) } {
        SUCCESS => code,
        other => other,
    }
}

/// The communicator of a group.
pub(super) struct NcclComm {
    nccl: &'static Nccl,
    /// `None` once aborted.
    raw: Mutex<Option<Raw>>,
    process: Arc<Process>,
}

impl NcclComm {
    /// Calls NCCL with the communicator; nobody else uses it meanwhile. Fails if it was aborted.
    pub(super) fn call<T>(&self, work: impl FnOnce(Comm) -> Result<T, OpError>) -> Result<T, OpError> {
        self.process.check_alive()?;
        match *self.raw.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(raw) => work(raw.0),
            None => {
                Err(OpError::RanksMissing { missing: vec![], ended: vec![], failure: self.process.failure() })
            }
        }
    }

    /// An error that NCCL met in the background.
    pub(super) fn background_error(&self) -> Option<crate::Error> {
        // Whoever holds the lock gets the error itself.
        let raw = self.raw.try_lock().ok()?;
        match async_error(self.nccl, raw.as_ref()?.0) {
            SUCCESS | IN_PROGRESS => None,
            code => Some(self.nccl.error("asynchronous error", code)),
        }
    }

    /// Ends what is on the GPU's streams, so that hosts waiting for it wake up. Gives up if a thread does not come back
    /// from NCCL; then the monitor ends the process.
    pub(super) fn abort(&self) {
        let deadline = Instant::now() + ABORT_PATIENCE;
        let raw = loop {
            match self.raw.try_lock() {
                Ok(mut raw) => break raw.take(),
                Err(TryLockError::Poisoned(raw)) => break raw.into_inner().take(),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => return,
            }
        };
        if let Some(raw) = raw {
            // SAFETY: taken out, so nobody else can use it.
            unsafe { (self.nccl.abort)(raw.0) };
        }
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        let raw = self.raw.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(raw) = raw.filter(|_| self.process.failure().is_some() && self.process.restarts()) {
            // SAFETY: live, with no other user left.
            unsafe { (self.nccl.abort)(raw.0) };
            return;
        }
        if let Some(raw) = raw.filter(|_| self.process.failure().is_none() && !std::thread::panicking()) {
            // SAFETY: live, with no other user left; destroyed once.
            unsafe {
                (self.nccl.finalize)(raw.0);
                (self.nccl.destroy)(raw.0);
            }
        }
    }
}
