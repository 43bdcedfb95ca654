//! Memory shared with other processes of this host: a sealed memfd, which has no name in any folder and is gone with
//! the last process that maps it. Peers open it by descriptor through `/proc`, which the kernel allows to processes
//! of the same user.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A shared mapping. Every access is by these methods, which check the bounds.
pub(super) struct Segment {
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping lives as long as the value and may be accessed by any thread; words are atomics, and bytes are
// ordered by them.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A new segment of zeros, and the descriptor by which peers can open it.
    pub(super) fn create(len: usize) -> Result<(Segment, File)> {
        let file = create_file("ferrotron-group", len)?;
        Ok((Segment::map(&file, len)?, file))
    }

    /// The segment of another process.
    pub(super) fn open(pid: u32, descriptor: u32, len: usize) -> Result<Segment> {
        let file = File::options().read(true).write(true).open(format!("/proc/{pid}/fd/{descriptor}"))?;
        // Sealed and of this size: touching it can never fail later.
        let sealed = rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        if !sealed || file.metadata()?.len() != len as u64 {
            return Err(Error::other("it is not the shared memory that was announced"));
        }
        Segment::map(&file, len)
    }

    fn map(file: &File, len: usize) -> Result<Segment> {
        // SAFETY: a new mapping at an address of the kernel's choice, of a file of at least this size.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        Ok(Segment { start: start.cast(), len })
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{offset} + {len} of {}",
            self.len
        );
        // SAFETY: inside the mapping.
        unsafe { self.start.add(offset) }
    }

    /// The word at `offset`, a multiple of 4.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        // SAFETY: mapped and aligned memory, which all processes access as an atomic.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// The counter at `offset`, a multiple of 8.
    pub(super) fn counter(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    /// Copies `bytes` to `offset`. Peers do not access it before a counter says so.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: `at` checks the bounds; `bytes` is memory of this process, outside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(offset, bytes.len()), bytes.len()) }
    }

    /// Copies from `offset`. Peers do not write it before a counter says so.
    pub(super) fn read(&self, offset: usize, to: &mut [u8]) {
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset, to.len()), to.as_mut_ptr(), to.len()) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and no reference into it outlives the value.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
    }
}

/// A file in memory of `len` zeros, whose size cannot change any more. The memory is reserved, so that touching it
/// never fails.
pub(super) fn create_file(name: &str, len: usize) -> Result<File> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    if len > 0 {
        rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, len as u64)?;
    }
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(File::from(fd))
}

/// The number by which peers open a descriptor of this process.
pub(super) fn number(file: &File) -> u32 {
    file.as_raw_fd() as u32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_share_memory() {
        let (a, file) = Segment::create(8192).unwrap();
        let b = Segment::open(std::process::id(), number(&file), 8192).unwrap();
        a.write(8189, b"abc");
        a.word(4).store(7, Ordering::SeqCst);
        a.counter(8).store(1 << 40, Ordering::SeqCst);
        let mut got = [0; 3];
        b.read(8189, &mut got);
        assert_eq!((&got, b.word(4).load(Ordering::SeqCst)), (b"abc", 7));
        assert_eq!(b.counter(8).load(Ordering::SeqCst), 1 << 40);
        // Another size, a closed descriptor, another kind of file.
        assert!(Segment::open(std::process::id(), number(&file), 4096).is_err());
        let gone = number(&file);
        drop(file);
        assert!(Segment::open(std::process::id(), gone, 8192).is_err());
        b.write(0, b"still mapped");
        let other = tempfile::tempfile().unwrap();
        assert!(Segment::open(std::process::id(), number(&other), 0).is_err());
    }

    #[test]
    fn the_size_is_sealed() {
        let file = create_file("test", 4096).unwrap();
        assert!(file.set_len(0).is_err() && file.set_len(1 << 20).is_err());
    }

    #[test]
    #[should_panic(expected = "of 4096")]
    fn bounds_are_checked() {
        Segment::create(4096).unwrap().0.write(4090, &[0; 8]);
    }
}
