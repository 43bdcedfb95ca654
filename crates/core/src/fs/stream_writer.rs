//! Writing a file from start to end, optionally past the page cache.

use std::fs::File;
use std::io::{Result, Write};
use std::path::Path;

/// Direct I/O wants memory, offsets and lengths to be multiples of the device's block size; 4 KiB is a multiple of all
/// common ones.
const ALIGN: usize = 4096;
/// Bytes of one write to the page cache, and of one past it, which the disk takes at once.
const CACHED: usize = 1 << 20;
const DIRECT: usize = 2 << 20;

/// Whether written bytes stay in the system's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageCache {
    /// They do: for files that are read again soon.
    Use,
    /// They do not, where the file system can do without (direct I/O): the copy to the cache is most of the processor time
    /// of a write, and the bytes would displace others. For large files written beside other work.
    Bypass,
}

/// Appends to a file through one aligned buffer.
pub struct StreamWriter {
    file: File,
    direct: bool,
    /// `chunk` aligned bytes from `start` on.
    buffer: Vec<u8>,
    start: usize,
    /// Bytes of one write.
    chunk: usize,
    filled: usize,
    length: u64,
}

impl StreamWriter {
    /// Creates or truncates the file.
    pub fn create(path: &Path, cache: PageCache) -> Result<StreamWriter> {
        let direct = if cache == PageCache::Bypass { open_direct(path)? } else { None };
        let is_direct = direct.is_some();
        let file = direct.map_or_else(|| File::create(path), Ok)?;
        let chunk = if is_direct { DIRECT } else { CACHED };
        let buffer = vec![0; chunk + ALIGN];
        let start = buffer.as_ptr().align_offset(ALIGN).min(ALIGN);
        Ok(StreamWriter { file, direct: is_direct, buffer, start, chunk, filled: 0, length: 0 })
    }

    /// Appends bytes.
    pub fn write_all(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.length += bytes.len() as u64;
        while !bytes.is_empty() {
            let n = bytes.len().min(self.chunk - self.filled);
            let at = self.start + self.filled;
            self.buffer[at..at + n].copy_from_slice(&bytes[..n]);
            self.filled += n;
            bytes = &bytes[n..];
            if self.filled == self.chunk {
                self.write_buffer(self.chunk)?;
            }
        }
        Ok(())
    }

    /// Writes what is left, and waits until the file is on the disk.
    pub fn finish(mut self) -> Result<()> {
        let last = self.filled;
        if self.direct {
            // Whole blocks only; the file is cut to its length afterwards.
            self.write_buffer(last.next_multiple_of(ALIGN))?;
            self.file.set_len(self.length)?;
        } else {
            self.write_buffer(last)?;
        }
        self.file.sync_all()
    }

    fn write_buffer(&mut self, bytes: usize) -> Result<()> {
        let part = &self.buffer[self.start..self.start + bytes];
        let mut written = 0;
        while written < bytes {
            match self.file.write(&part[written..]) {
                // A file system that opens for direct I/O may still refuse the write, and a short one leaves the rest
                // unaligned.
                Err(e) if self.direct && e.kind() == std::io::ErrorKind::InvalidInput => {
                    leave_direct(&self.file)?;
                    self.direct = false;
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
                Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                Ok(n) => written += n,
            }
        }
        self.filled = 0;
        Ok(())
    }
}

/// The file, opened for direct I/O; none where there is no such thing.
fn open_direct(path: &Path) -> Result<Option<File>> {
    #[cfg(target_os = "linux")]
    {
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(true);
        super::set_flags(&mut options, rustix::fs::OFlags::DIRECT);
        match options.open(path) {
            Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => Ok(None),
            opened => opened.map(Some),
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = path;
        Ok(None)
    }
}

/// Goes on with ordinary writes to a file that was opened for direct I/O.
fn leave_direct(file: &File) -> Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
        fcntl_setfl(file, fcntl_getfl(file)? - OFlags::DIRECT)?;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_their_bytes_and_length_with_and_without_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        for cache in [PageCache::Use, PageCache::Bypass] {
            for length in [
                0,
                1,
                ALIGN - 1,
                ALIGN,
                ALIGN + 1,
                CACHED,
                CACHED + 1,
                DIRECT - 1,
                DIRECT,
                DIRECT + 1,
                2 * DIRECT + 12_345,
            ] {
                let bytes: Vec<u8> = (0..length).map(|i| (i * 7 + i / 256) as u8).collect();
                let path = dir.path().join("file");
                let mut out = StreamWriter::create(&path, cache).unwrap();
                // Pieces of odd sizes, over the ends of chunks.
                bytes.chunks(1_000_003).for_each(|piece| out.write_all(piece).unwrap());
                out.finish().unwrap();
                assert!(std::fs::read(&path).unwrap() == bytes, "{cache:?}, {length} bytes");
            }
        }
    }

    #[test]
    fn a_refused_direct_write_goes_on_without() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut out = StreamWriter::create(&path, PageCache::Bypass).unwrap();
        // Unaligned memory: the disk refuses it, or the file system (in memory) takes anything.
        out.start += 8;
        out.buffer.resize(DIRECT + 2 * ALIGN, 0);
        let bytes = vec![7; 2 * DIRECT + 5];
        out.write_all(&bytes).unwrap();
        out.finish().unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
    }
}
