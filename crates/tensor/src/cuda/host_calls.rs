//! Host functions in a CUDA stream's order.

use super::{CudaContext, CudaStream, check};
use crate::{Error, Result};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The work of a host function. What it captures is released later, on a thread that may call the driver.
pub(crate) type HostWork = Box<dyn FnMut() -> Result<()> + Send>;

/// Host functions given to a stream; each is kept until it has run.
#[derive(Default)]
pub(super) struct HostCalls(Mutex<Vec<Arc<HostCall>>>);

struct HostCall {
    work: Mutex<HostWork>,
    context: Arc<CudaContext>,
    done: AtomicBool,
}

impl HostCalls {
    /// True if all have run.
    pub(super) fn is_empty(&self) -> bool {
        self.forget_done().is_empty()
    }

    /// Releases what functions that have run captured.
    fn forget_done(&self) -> std::sync::MutexGuard<'_, Vec<Arc<HostCall>>> {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        calls.retain(|call| !call.done.load(Ordering::Acquire));
        calls
    }
}

impl CudaStream {
    /// Enqueues `work` to run on a thread of the driver after all work given to this stream so far; later work of the stream
    /// waits for it. Its error is reported by the next synchronization with the device. `work` must not call the driver.
    pub(crate) fn call_host(&self, work: HostWork) -> Result<()> {
        const OP: &str = "host function";
        self.refuse_capture(OP)?;
        self.context().enter()?;
        let (work, context) = (Mutex::new(work), self.shared_context().clone());
        let call = Arc::new(HostCall { work, context, done: AtomicBool::new(false) });
        let address = Arc::as_ptr(&call) as *mut c_void;
        let mut calls = self.host_calls().forget_done();
        // SAFETY: a live stream; the list keeps what the address points to until it has run.
        check(OP, unsafe { sys::cuLaunchHostFunc(self.raw(), Some(run), address) })?;
        calls.push(call);
        Ok(())
    }
}

/// Runs a [`HostCall`].
unsafe extern "C" fn run(address: *mut c_void) {
    // SAFETY: the address that `call_host` passed; the call is kept until `done`, its last access here.
    let call = unsafe { &*(address as *const HostCall) };
    let mut work = call.work.lock().unwrap_or_else(PoisonError::into_inner);
    let outcome = catch_unwind(AssertUnwindSafe(&mut *work))
        .unwrap_or_else(|_| Err(Error::Cuda { op: "host function", what: "it panicked".into() }));
    drop(work);
    if let Err(e) = outcome {
        call.context.report_host_error(e);
    }
    call.done.store(true, Ordering::Release);
}
