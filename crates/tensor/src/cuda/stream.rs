//! CUDA streams and events.

use super::host_calls::HostCalls;
use super::memory::PinnedMemory;
use super::{CudaContext, check};
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUresult};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Which stream's kernels start first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    Normal,
    High,
}

/// A CUDA stream.
pub(crate) struct CudaStream {
    context: Arc<CudaContext>,
    raw: sys::CUstream,
    /// True while its work is captured into a graph instead of run.
    capturing: AtomicBool,
    /// Host memory that the graph being captured reads at every launch.
    constants: Mutex<Vec<PinnedMemory>>,
    host_calls: HostCalls,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// Creates a stream that does not synchronize with the default stream.
    pub(crate) fn new(context: &Arc<CudaContext>, priority: Priority) -> Result<CudaStream> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let (mut normal, mut high) = (0, 0);
        // SAFETY: the out-pointers are locals; the context is current.
        unsafe {
            check("stream priorities", sys::cuCtxGetStreamPriorityRange(&mut normal, &mut high))?;
            let number = match priority {
                Priority::Normal => normal,
                Priority::High => high,
            };
            check("create stream", sys::cuStreamCreateWithPriority(&mut raw, flags, number))?;
        }
        Ok(CudaStream {
            context: context.clone(),
            raw,
            capturing: AtomicBool::new(false),
            constants: Mutex::default(),
            host_calls: HostCalls::default(),
        })
    }

    pub(crate) fn context(&self) -> &CudaContext {
        &self.context
    }

    pub(crate) fn shared_context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Host memory that the graph being captured reads at every launch.
    pub(super) fn constants(&self) -> MutexGuard<'_, Vec<PinnedMemory>> {
        self.constants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Host functions in this stream.
    pub(super) fn host_calls(&self) -> &HostCalls {
        &self.host_calls
    }

    pub(super) fn set_capturing(&self, on: bool) {
        self.capturing.store(on, Relaxed);
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing.load(Relaxed)
    }

    /// Refuses operations that a captured graph cannot hold: host copies, host waits, and autotuning by time.
    pub(crate) fn refuse_capture(&self, op: &'static str) -> Result<()> {
        match self.is_capturing() {
            true => Err(Error::Cuda {
                op,
                what: "not allowed while the stream is captured into a CUDA graph".into(),
            }),
            false => Ok(()),
        }
    }

    /// The driver's handle.
    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Blocks until all work is complete, and reports what kernels found wrong.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.refuse_capture("synchronize")?;
        self.context.enter()?;
        // SAFETY: a live stream.
        check("synchronize", unsafe { sys::cuStreamSynchronize(self.raw) })?;
        self.context.faults()
    }

    /// Blocks until all work is complete, ignoring errors.
    pub(crate) fn drain(&self) {
        if self.context.enter().is_ok() {
            // SAFETY: a live stream.
            let _ = unsafe { sys::cuStreamSynchronize(self.raw) };
        }
    }

    /// Blocks until all work is complete. False if that cannot be known: during a capture, or after a failure.
    pub(crate) fn wait_until_idle(&self) -> bool {
        // SAFETY: a live stream.
        !self.is_capturing()
            && self.context.enter().is_ok()
            && unsafe { sys::cuStreamSynchronize(self.raw) } == CUresult::CUDA_SUCCESS
    }

    /// Orders later work of this stream after `event`. Work that is captured waits for captured work only, and other work
    /// cannot wait for that.
    pub(crate) fn wait(&self, event: &CudaEvent) -> Result<()> {
        if self.is_capturing() != event.captured {
            let what = match event.captured {
                true => "it is part of a CUDA graph that another stream is captured into",
                false => "it was recorded before this stream was captured into a CUDA graph",
            };
            return Err(Error::Cuda { op: "wait for event", what: what.into() });
        }
        self.context.enter()?;
        // SAFETY: live handles.
        check("wait for event", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if !self.host_calls.is_empty() {
            // They are released with the stream.
            self.drain();
        }
        if self.context.enter().is_ok() {
            // SAFETY: created in `new`; the driver completes queued work before it releases the stream.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A CUDA event: a point in a stream's work.
pub(crate) struct CudaEvent {
    raw: sys::CUevent,
    /// Recorded while its stream was captured into a graph: the host can neither ask nor wait for it.
    captured: bool,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Records an event after all work given to `cuda` so far.
    pub(crate) fn record(cuda: &CudaStream) -> Result<CudaEvent> {
        cuda.context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the out-pointer is a local; live handles after that.
        unsafe {
            check("create event", sys::cuEventCreate(&mut raw, 0))?;
            let event = CudaEvent { raw, captured: cuda.is_capturing() };
            check("record event", sys::cuEventRecord(raw, cuda.raw))?;
            Ok(event)
        }
    }

    /// True if the event has been reached.
    pub(crate) fn is_reached(&self) -> bool {
        // SAFETY: a live event.
        unsafe { sys::cuEventQuery(self.raw) == CUresult::CUDA_SUCCESS }
    }

    /// Blocks until the event is reached.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: a live event.
        check("synchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Time from `earlier` to `self`. Blocks until both are reached.
    pub(crate) fn since(&self, earlier: &CudaEvent) -> Result<Duration> {
        self.wait()?;
        let mut ms = 0f32;
        // SAFETY: live events; the out-pointer is a local.
        check("elapsed time between events", unsafe {
            sys::cuEventElapsedTime_v2(&mut ms, earlier.raw, self.raw)
        })?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: created in `record`; the driver keeps what pending work still needs.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}
