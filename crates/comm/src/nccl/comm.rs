//! One communicator of NCCL: set-up, errors and end. Communicators are non-blocking, so that a rank that never
//! comes can be given up on.

use super::ffi::{Comm, Config, IN_PROGRESS, NO_COLOR, Nccl, SUCCESS, UniqueId};
use crate::backend::OpError;
use crate::process::Process;
use ferrotron_tensor::Stream;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the end of a communicator may take before it is cut off.
const FAREWELL: Duration = Duration::from_secs(5);

pub(super) struct NcclComm {
    nccl: &'static Nccl,
    raw: Raw,
    pub(super) process: Arc<Process>,
    aborted: AtomicBool,
}

#[derive(Clone, Copy)]
struct Raw(Comm);
// SAFETY: NCCL allows any thread to use a communicator, one call at a time, except that errors may be asked
// for and an abort given at any time; calls on a group come one at a time.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl NcclComm {
    /// The communicator of `size` ranks that know `id`; `s` says which card. Every rank calls it.
    pub(super) fn new(
        nccl: &'static Nccl,
        process: &Arc<Process>,
        s: &Stream,
        id: UniqueId,
        deadline: Instant,
    ) -> Result<Arc<NcclComm>, OpError> {
        let (size, rank) = (process.post().size() as c_int, process.post().rank() as c_int);
        let mut raw = std::ptr::null_mut();
        let mut code = SUCCESS;
        s.launch("nccl", &[], |l| {
            l.cuda_stream()?;
            let mut config = Config::non_blocking();
            // SAFETY: the card's context is current (inside a launch); the pointers are to locals.
            code = unsafe { (nccl.init)(&mut raw, size, id, rank, &mut config) };
            Ok(())
        })?;
        let comm = NcclComm::wrap(nccl, process, raw);
        comm.settle("ncclCommInitRankConfig", code, deadline)?;
        Ok(Arc::new(comm))
    }

    fn wrap(nccl: &'static Nccl, process: &Arc<Process>, raw: Comm) -> NcclComm {
        NcclComm { nccl, raw: Raw(raw), process: process.clone(), aborted: AtomicBool::new(false) }
    }

    /// A communicator of some of the ranks; every rank of this one calls it, members with their `place`.
    pub(super) fn split(
        &self,
        s: &Stream,
        place: Option<usize>,
        deadline: Instant,
    ) -> Result<Option<Arc<NcclComm>>, OpError> {
        let color = if place.is_some() { 0 } else { NO_COLOR };
        // Leaked: NCCL may write there until the split has settled, which it may never do.
        let raw: *mut Comm = Box::leak(Box::new(std::ptr::null_mut()));
        let mut code = SUCCESS;
        s.launch("nccl", &[], |l| {
            l.cuda_stream()?;
            let mut config = Config::non_blocking();
            let key = place.unwrap_or(0) as c_int;
            // SAFETY: as in `new`; `raw` lives for ever.
            code = unsafe { (self.nccl.split)(self.raw.0, color, key, raw, &mut config) };
            Ok(())
        })?;
        self.settle("ncclCommSplit", code, deadline)?;
        // A member's communicator may appear a moment after the parent has settled; nobody else gets one.
        let made = loop {
            // SAFETY: it lives for ever; volatile, because NCCL's threads write it.
            let made = unsafe { std::ptr::read_volatile(raw) };
            if !made.is_null() || place.is_none() || Instant::now() > deadline {
                break made;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        if made.is_null() {
            return Ok(None);
        }
        let comm = NcclComm::wrap(self.nccl, &self.process, made);
        comm.settle("ncclCommSplit", IN_PROGRESS, deadline)?;
        Ok(Some(Arc::new(comm)))
    }

    /// Waits until the call that returned `code` has been taken up (not until it is done on the card).
    pub(super) fn settle(&self, call: &'static str, code: c_int, deadline: Instant) -> Result<(), OpError> {
        if code == SUCCESS {
            return Ok(());
        }
        if code != IN_PROGRESS {
            return Err(self.nccl.error(call, code).into());
        }
        let others = || (0..self.process.post().size()).map(|r| (r, r)).collect();
        let ready = || match self.state() {
            IN_PROGRESS => Ok(None),
            SUCCESS => Ok(Some(())),
            code => Err(self.nccl.error(call, code).into()),
        };
        self.process.wait(deadline, ready, others).map_err(|error| match error {
            // NCCL does not say who is missing.
            OpError::RanksMissing { failure, .. } => {
                OpError::RanksMissing { missing: vec![], ended: vec![], failure }
            }
            other => other,
        })
    }

    /// The communicator's own account: success, in progress, or what went wrong in the background.
    pub(super) fn state(&self) -> c_int {
        let mut code = SUCCESS;
        if self.aborted.load(Ordering::Acquire) || self.raw.0.is_null() {
            return SUCCESS;
        }
        // SAFETY: a live communicator; may be asked at any time.
        match unsafe { (self.nccl.async_error)(self.raw.0, &mut code) } {
            SUCCESS => code,
            other => other,
        }
    }

    /// What is wrong, in words.
    pub(super) fn error(&self, code: c_int) -> crate::Error {
        self.nccl.error("in the background", code)
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

    /// RankBackends what is on the card's streams, so that hosts that wait for it wake up.
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
            // SAFETY: live, and not used by anybody else any more.
            let mut code = unsafe { (self.nccl.finalize)(self.raw.0) };
            let deadline = Instant::now() + FAREWELL;
            while code == IN_PROGRESS && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
                code = self.state();
            }
            if code == SUCCESS {
                // SAFETY: finalised; the last use.
                unsafe { (self.nccl.destroy)(self.raw.0) };
                return;
            }
        }
        self.abort();
    }
}
