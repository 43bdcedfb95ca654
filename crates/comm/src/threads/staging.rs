//! Staged buffers: what a rank sends, in memory that is not written again and is freed after all readers are done.

use crate::backend::OpError;
use ferrotron_tensor::trace::STAGING;
use ferrotron_tensor::{Category, DType, DeviceKind, Event, Result, Stream, Tensor, read};
use std::sync::{Mutex, PoisonError};

/// A rank's staging streams, one per stream that communicates. No work runs on them; they own the memory of staged buffers, so
/// that it is reused only after its readers. With one for all, a small value that the host reads would wait for the gathers of
/// weights on another stream.
#[derive(Default)]
pub(super) struct Staging {
    /// By the number of the stream that communicates.
    streams: Mutex<Vec<(u32, Stream)>>,
}

impl Staging {
    fn stream(&self, user: &Stream) -> Result<Stream> {
        let device = user.device();
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let known = streams.iter().find(|(of, s)| *of == user.id() && s.device() == device);
        if let Some((_, s)) = known {
            return Ok(s.clone());
        }
        let stream = device.stream(STAGING)?.with_rank(user.rank());
        streams.push((user.id(), stream.clone()));
        Ok(stream)
    }

    /// Stages a new tensor that `fill` writes on `s`.
    pub(super) fn stage(
        &self,
        s: &Stream,
        count: usize,
        dtype: DType,
        fill: impl FnOnce(&Tensor) -> Result<(), OpError>,
    ) -> Result<StagedBuffer, OpError> {
        let alloc_stream = self.stream(s)?;
        let contents = Tensor::empty(&alloc_stream, &[count], dtype, Category::Communication)?;
        // The memory may have been staged before: wait for its readers, as the allocation stream does.
        s.wait(&alloc_stream.record()?)?;
        fill(&contents)?;
        Ok(StagedBuffer { contents, ready: s.record()?, alloc_stream, readers: Mutex::default() })
    }

    /// Stages a copy of `t`.
    pub(super) fn stage_copy(&self, s: &Stream, t: &Tensor) -> Result<StagedBuffer, OpError> {
        self.stage(s, t.numel(), t.dtype(), |to| Ok(s.copy(t, to)?))
    }
}

/// A flat, immutable staged tensor.
pub(super) struct StagedBuffer {
    contents: Tensor,
    /// The event after its contents were written.
    ready: Event,
    alloc_stream: Stream,
    /// Events after the reads on the same device.
    readers: Mutex<Vec<Event>>,
}

impl StagedBuffer {
    /// True if `s` is on the same device. Ranks on the host may have a `Device` each; those on a GPU must share one.
    fn same_device(&self, s: &Stream) -> Result<bool, OpError> {
        let same = self.alloc_stream.device() == s.device();
        let both_host = [self.alloc_stream.device(), s.device()].iter().all(|d| d.kind() == DeviceKind::Cpu);
        if same || both_host {
            return Ok(same);
        }
        let what = format!(
            "ranks of one process use tensors of {:?} and of {:?}; give all of them streams of the same \
             Device",
            self.alloc_stream.device(),
            s.device()
        );
        Err(OpError::Backend { what })
    }

    /// Copies elements `start..start + to.numel()` into contiguous `to`, on stream `s`.
    pub(super) fn copy_to(&self, s: &Stream, start: usize, to: &Tensor) -> Result<(), OpError> {
        if to.numel() == 0 {
            return Ok(());
        }
        let part = self.contents.narrow(0, start, to.numel())?;
        if self.same_device(s)? {
            s.wait(&self.ready)?;
            return Ok(s.copy(&part, to)?);
        }
        self.alloc_stream.wait(&self.ready)?;
        let (part, to) = (part.as_bytes()?, to.as_bytes()?);
        Ok(self.alloc_stream.launch("copy", &[read(&part)], |l| s.upload_into(&to, l.slice::<u8>(0)?))?)
    }

    /// Elements `start..start + len` for a kernel on stream `s`: a view, or a copy if `s` is on another device.
    pub(super) fn view_on(&self, s: &Stream, start: usize, len: usize) -> Result<Tensor, OpError> {
        if self.same_device(s)? {
            s.wait(&self.ready)?;
            return Ok(self.contents.narrow(0, start, len)?);
        }
        let copy = Tensor::empty(s, &[len], self.contents.dtype(), Category::Communication)?;
        self.copy_to(s, start, &copy)?;
        Ok(copy)
    }

    /// Registers that work on `s` before `done` has read the buffer.
    pub(super) fn mark_read(&self, s: &Stream, done: &Event) {
        // Events order streams of one device; across host devices the read is already complete.
        if self.alloc_stream.device() == s.device() {
            self.readers.lock().unwrap_or_else(PoisonError::into_inner).push(done.clone());
        }
    }
}

impl Drop for StagedBuffer {
    fn drop(&mut self) {
        // The memory returns to the allocation stream after this. A wait fails only if the device is lost.
        let readers = self.readers.get_mut().unwrap_or_else(PoisonError::into_inner);
        for event in readers.iter().chain([&self.ready]) {
            let _ = self.alloc_stream.wait(event);
        }
    }
}
