//! Host memory that a device copies into while it goes on computing.

use crate::cuda::{CudaEvent, PinnedMemory};
use crate::{Device, Error, Result, Stream, Tensor, read, shape_error};

/// Host memory: pinned for a CUDA device, so that [`Stream::copy_to_host`] does not block; plain on the CPU, and where the
/// system refuses pinned memory. It may be handed to another thread, which waits for the copies when it reads.
pub struct HostBuffer {
    memory: Memory,
    /// The last copy into it of each stream, by stream id.
    copies: Vec<(u32, CudaEvent)>,
}

enum Memory {
    Plain(Vec<u8>),
    Pinned(PinnedMemory),
}

impl HostBuffer {
    /// Allocates memory for copies from `device`.
    pub fn new(device: &Device, bytes: usize) -> Result<HostBuffer> {
        let pinned =
            device.inner.host_faults.check_pinned(bytes).and_then(|()| match &device.inner.context {
                None => Ok(Memory::Plain(plain(bytes)?)),
                Some(context) => Ok(Memory::Pinned(PinnedMemory::new(context, bytes)?)),
            });
        let memory = match pinned {
            Ok(memory) => memory,
            Err(e @ Error::HostMemory { .. }) => return Err(e),
            Err(refused) => {
                let memory = plain(bytes)?;
                device.inner.host_pool.warn_pageable(&refused.to_string());
                Memory::Plain(memory)
            }
        };
        Ok(HostBuffer { memory, copies: Vec::new() })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        match &self.memory {
            Memory::Plain(bytes) => bytes.len(),
            Memory::Pinned(memory) => memory.len(),
        }
    }

    /// True if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks until all copies into it are complete.
    pub fn wait(&mut self) -> Result<()> {
        self.copies.iter().try_for_each(|(_, copy)| copy.wait())?;
        self.copies.clear();
        Ok(())
    }

    /// Copies host bytes to `at..`.
    pub fn put(&mut self, at: usize, from: &[u8]) -> Result<()> {
        self.wait()?;
        let len = self.len();
        let bytes = match &mut self.memory {
            Memory::Plain(bytes) => bytes,
            Memory::Pinned(memory) => memory.bytes_mut(),
        };
        match at.checked_add(from.len()).and_then(|end| bytes.get_mut(at..end)) {
            Some(to) => to.copy_from_slice(from),
            None => {
                let what = format!("{} bytes at {at} into a buffer of {len}", from.len());
                return shape_error("copy to host", what);
            }
        }
        Ok(())
    }

    /// Its bytes, after all copies into it are complete.
    pub fn bytes(&mut self) -> Result<&[u8]> {
        self.wait()?;
        Ok(match &self.memory {
            Memory::Plain(bytes) => bytes,
            Memory::Pinned(memory) => memory.bytes(),
        })
    }
}

/// Memory that the system may page.
fn plain(bytes: usize) -> Result<Vec<u8>> {
    let mut memory = Vec::new();
    let why = |e: std::collections::TryReserveError| Error::HostMemory { bytes, why: e.to_string() };
    memory.try_reserve_exact(bytes).map_err(why)?;
    memory.resize(bytes, 0);
    Ok(memory)
}

impl From<Vec<u8>> for HostBuffer {
    fn from(bytes: Vec<u8>) -> HostBuffer {
        HostBuffer { memory: Memory::Plain(bytes), copies: Vec::new() }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // Pinned memory must not be freed under a copy; a device that fails here has reported it elsewhere.
        let _ = self.wait();
    }
}

impl Stream {
    /// Enqueues a copy of a contiguous tensor to bytes `at..` of a buffer. Does not block the host on CUDA; on the CPU the
    /// copy is done when this returns. The tensor must not be overwritten before this stream has copied it.
    pub fn copy_to_host(&self, from: &Tensor, to: &mut HostBuffer, at: usize) -> Result<()> {
        let from = from.as_bytes()?;
        let len = from.numel();
        if at.checked_add(len).is_none_or(|end| end > to.len()) {
            return shape_error("copy to host", format!("{len} bytes at {at} into a buffer of {}", to.len()));
        }
        if len == 0 {
            return Ok(());
        }
        let HostBuffer { memory, copies } = to;
        self.launch("copy to host", &[read(&from)], |l| match (l.cuda, memory) {
            (None, Memory::Plain(bytes)) => {
                bytes[at..at + len].copy_from_slice(l.slice::<u8>(0)?);
                Ok(())
            }
            (Some(cuda), memory) => {
                cuda.refuse_capture("copy to host")?;
                let start = match memory {
                    Memory::Plain(bytes) => bytes.as_mut_ptr() as u64,
                    Memory::Pinned(pinned) => pinned.address() as u64,
                };
                // SAFETY: the argument has that many bytes; the range was checked above. The event recorded here is
                // waited for before the memory is read or freed.
                unsafe {
                    let ends = (l.address(0)?, start + at as u64);
                    cuda.context().copy(cuda, "copy to host", ends, len)?;
                }
                let done = CudaEvent::record(cuda)?;
                match copies.iter_mut().find(|(stream, _)| *stream == self.id()) {
                    Some((_, last)) => *last = done,
                    None => copies.push((self.id(), done)),
                }
                Ok(())
            }
            _ => shape_error("copy to host", "the buffer belongs to another kind of device"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Category, Threads};

    #[test]
    fn a_copy_does_not_follow_its_source() {
        let device = Device::cpu(Threads::new(1).unwrap());
        let s = device.stream("compute").unwrap();
        let t = s.upload(&[1f32, 2.0, 3.0], &[3], Category::Workspace).unwrap();
        let mut buffer = HostBuffer::new(&device, 16).unwrap();
        s.copy_to_host(&t.narrow(0, 1, 2).unwrap(), &mut buffer, 4).unwrap();
        s.zero(&t).unwrap();
        let want: Vec<u8> = [0f32, 2.0, 3.0, 0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(buffer.bytes().unwrap(), want);
        for at in [8, 16, usize::MAX] {
            s.copy_to_host(&t, &mut buffer, at).unwrap_err();
        }
        assert_eq!(HostBuffer::from(vec![7]).bytes().unwrap(), [7]);
    }
}
