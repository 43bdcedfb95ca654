//! Streams and events of the driver.

use super::{Card, check};
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUresult};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// A CUDA stream.
pub(crate) struct Queue {
    card: Arc<Card>,
    raw: sys::CUstream,
    /// Is its work captured instead of run?
    capturing: AtomicBool,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Queue {
    /// A queue that does not wait for the default stream.
    pub(crate) fn new(card: &Arc<Card>) -> Result<Queue> {
        card.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a place for the handle; the context is current.
        check("new stream", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Queue { card: card.clone(), raw, capturing: AtomicBool::new(false) })
    }

    pub(crate) fn card(&self) -> &Card {
        &self.card
    }

    pub(super) fn shared_card(&self) -> &Arc<Card> {
        &self.card
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
        self.card.enter()?;
        // SAFETY: a live stream.
        check("wait for the card", unsafe { sys::cuStreamSynchronize(self.raw) })?;
        self.card.faults()
    }

    /// Waits until everything queued is done, whatever came of it.
    pub(crate) fn drain(&self) {
        if self.card.enter().is_ok() {
            // SAFETY: a live stream.
            let _ = unsafe { sys::cuStreamSynchronize(self.raw) };
        }
    }

    /// Work queued from now on happens after `moment`.
    pub(crate) fn wait(&self, moment: &Moment) -> Result<()> {
        self.outside_capture("wait for an event")?;
        self.card.enter()?;
        // SAFETY: live handles.
        check("wait for an event", unsafe { sys::cuStreamWaitEvent(self.raw, moment.raw, 0) })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.card.enter().is_ok() {
            // SAFETY: made in `new`; the driver lets queued work end before it goes.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A CUDA event: a point in a queue's work.
pub(crate) struct Moment {
    raw: sys::CUevent,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Moment {}
// SAFETY: as above.
unsafe impl Sync for Moment {}

impl Moment {
    /// The point after everything queued so far.
    pub(crate) fn record(queue: &Queue) -> Result<Moment> {
        queue.outside_capture("record an event")?;
        queue.card.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for the handle; live handles after that.
        unsafe {
            check("new event", sys::cuEventCreate(&mut raw, 0))?;
            let moment = Moment { raw };
            check("record an event", sys::cuEventRecord(raw, queue.raw))?;
            Ok(moment)
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
    pub(crate) fn since(&self, earlier: &Moment) -> Result<Duration> {
        self.wait()?;
        let mut ms = 0f32;
        // SAFETY: live events and a place for a number.
        check("time between events", unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.raw, self.raw) })?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        // SAFETY: made in `record`; the driver keeps what is still needed.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}
