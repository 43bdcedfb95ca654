//! Parts of a checkpoint that are in host memory already, read there by the thread that writes them.
//!
//! What checkpoints hold as it is stored goes to the file from where it is. The rest (remainders, packed moments) is
//! converted on the device in chunks, through one small buffer. So a save takes host memory for what is on the device, and
//! none for what is not.

use super::Trainer;
use crate::Result;
use crate::checkpoint::{PartReader, Sink};
use crate::optimizer::{SavedBucket, StateRead};
use ferrotron_kernels::Kernels;
use ferrotron_tensor::{HostBuffer, Stream};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Elements that are converted at a time.
const CHUNK: usize = 4 << 20;

/// Reads state in host memory on the stream of checkpoints. Updates wait until the last part is dropped.
pub(super) struct HostReader {
    kernels: Arc<dyn Kernels>,
    stream: Stream,
    /// Memory of a converted chunk.
    chunk: Mutex<Option<HostBuffer>>,
    _read: StateRead,
}

/// Elements of a bucket.
struct HostPart {
    reader: Arc<HostReader>,
    bucket: Arc<SavedBucket>,
    elements: Range<usize>,
}

impl HostReader {
    /// The stream has waited for the state.
    pub(super) fn new(t: &Trainer) -> HostReader {
        let (kernels, stream) = (t.rank.kernels.clone(), t.staging.clone());
        HostReader { kernels, _read: t.optimizer.begin_read(&stream), stream, chunk: Mutex::default() }
    }

    /// A part of a bucket in host memory.
    pub(super) fn part(
        self: &Arc<HostReader>,
        bucket: &Arc<SavedBucket>,
        elements: Range<usize>,
    ) -> Box<dyn PartReader> {
        Box::new(HostPart { reader: self.clone(), bucket: bucket.clone(), elements })
    }
}

impl PartReader for HostPart {
    fn read(&self, sink: &mut Sink) -> Result<()> {
        let HostReader { kernels, stream, chunk, .. } = &*self.reader;
        if self.bucket.as_it_is() {
            let state = self.bucket.elements(&**kernels, stream, self.elements.clone())?;
            return stream.read_host(&state, sink)?;
        }
        let mut chunk = chunk.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = match &mut *chunk {
            Some(buffer) => buffer,
            none => none.insert(HostBuffer::new(stream.device(), CHUNK * size_of::<f32>())?),
        };
        for start in self.elements.clone().step_by(CHUNK) {
            let range = start..self.elements.end.min(start + CHUNK);
            let converted = self.bucket.elements(&**kernels, stream, range)?;
            stream.copy_to_host(&converted, buffer, 0)?;
            sink(&buffer.bytes()?[..converted.bytes()])?;
        }
        Ok(())
    }
}
