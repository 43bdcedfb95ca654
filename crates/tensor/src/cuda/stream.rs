//! Streams and events of the driver.

use super::{CudaContext, check};
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUresult};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// A CUDA stream.
pub(crate) struct CudaStream {
    context: Arc<CudaContext>,
    raw: sys::CUstream,
    /// Is its work captured instead of run?
    capturing: AtomicBool,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// A queue that does not wait for the default stream.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<CudaStream> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a place for the handle; the context is current.
        check("new stream", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(CudaStream { context: context.clone(), raw, capturing: AtomicBool::new(false) })
    }

    pub(crate) fn context(&self) -> &CudaContext {
        &self.context
    }

    pub(super) fn shared_context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(super) fn set_capturing(&self, on: bool) {
        self.capturing.store(on, Relaxed);
    }

    /// Refuses what a captured step cannot hold: host memory, waiting, other streams, and choices by time.
    pub(super) fn outside_capture(&self, op: &'static str) -> Result<()> {
        match self.capturing.load(Relaxed) {
            true => Err(Error::Cuda { op, what: "not possible in work that is captured".into() }),
            false => Ok(()),
        }
    }

    /// The driver's handle.
    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until everything queued is done, and says what kernels found wrong.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.outside_capture("wait for the card")?;
        self.context.enter()?;
        // SAFETY: a live stream.
        check("wait for the card", unsafe { sys::cuStreamSynchronize(self.raw) })?;
        self.context.faults()
    }

    /// Waits until everything queued is done, whatever came of it.
    pub(crate) fn drain(&self) {
        if self.context.enter().is_ok() {
            // SAFETY: a live stream.
            let _ = unsafe { sys::cuStreamSynchronize(self.raw) };
        }
    }

    /// Work queued from now on happens after `moment`.
    pub(crate) fn wait(&self, event: &CudaEvent) -> Result<()> {
        self.outside_capture("wait for an event")?;
        self.context.enter()?;
        // SAFETY: live handles.
        check("wait for an event", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `new`; the driver lets queued work end before it goes.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A CUDA event: a point in a queue's work.
pub(crate) struct CudaEvent {
    raw: sys::CUevent,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// The point after everything queued so far.
    pub(crate) fn record(cuda: &CudaStream) -> Result<CudaEvent> {
        cuda.outside_capture("record an event")?;
        cuda.context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for the handle; live handles after that.
        unsafe {
            check("new event", sys::cuEventCreate(&mut raw, 0))?;
            let event = CudaEvent { raw };
            check("record an event", sys::cuEventRecord(raw, cuda.raw))?;
            Ok(event)
        }
    }

    /// Has it been reached?
    pub(crate) fn passed(&self) -> bool {
        // SAFETY: a live event.
        unsafe { sys::cuEventQuery(self.raw) == CUresult::CUDA_SUCCESS }
    }

    /// Blocks until it is reached.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: a live event.
        check("wait for the card", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Time from `earlier` to this, both reached.
    pub(crate) fn since(&self, earlier: &CudaEvent) -> Result<Duration> {
        self.wait()?;
        let mut ms = 0f32;
        // SAFETY: live events and a place for a number.
        check("time between events", unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.raw, self.raw) })?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: made in `record`; the driver keeps what is still needed.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}
