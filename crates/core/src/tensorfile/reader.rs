//! Reading a file by byte range.

use super::{MAX_HEADER_BYTES, TensorInfo, header};
use crate::error::{Error, Result};
use crate::fs::open_regular;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A safetensors file opened for reading by byte range. The header is parsed and fully checked; no data is read.
/// Reads are independent of each other, so ranks and threads may share it.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    metadata: BTreeMap<String, String>,
    /// Bytes of length and header, read on opening.
    header_bytes: u64,
    /// Bytes of tensors returned so far.
    delivered: AtomicU64,
}

impl TensorFile {
    /// Opens and checks a file. Allocates memory for the header only, whose length is bounded by the file's size.
    pub fn open(path: &Path) -> Result<TensorFile> {
        let file = open_regular(path)?;
        let about = file.metadata().map_err(|e| Error::io_doing(path, "read its size", e))?;
        TensorFile::parse(path, file, about.len())
    }

    fn parse(path: &Path, file: File, bytes: u64) -> Result<TensorFile> {
        let damaged = |what: String| Error::damaged(path, what);
        if bytes < 8 {
            return Err(damaged(format!("is only {bytes} bytes long, so it is not a safetensors file")));
        }
        let mut length = [0u8; 8];
        read_exact_at(&file, path, &mut length, 0)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES {
            return Err(damaged(format!(
                "claims a header of {length} bytes (at most {MAX_HEADER_BYTES} are allowed); \
                 it is damaged or not a safetensors file"
            )));
        }
        if length > bytes - 8 {
            return Err(damaged(format!(
                "claims a header of {length} bytes, but the whole file has {bytes}; it is cut short or damaged"
            )));
        }
        // Below 100 MB, so it fits in usize.
        let mut text = vec![0u8; length as usize];
        read_exact_at(&file, path, &mut text, 8)?;
        let (tensors, metadata) = header::parse(&text, bytes).map_err(damaged)?;
        let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(TensorFile {
            path: path.to_path_buf(),
            file,
            bytes,
            tensors,
            by_name,
            metadata,
            header_bytes: 8 + length,
            delivered: AtomicU64::new(0),
        })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size in bytes when it was opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The tensors in the order of their data.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).and_then(|&i| self.tensors.get(i))
    }

    /// The strings under `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Bytes of the header and the length before it, which opening has read.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// Bytes of tensors read so far, without those read for checksums.
    pub fn bytes_delivered(&self) -> u64 {
        self.delivered.load(Relaxed)
    }

    /// All bytes of a tensor.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let info = self.want(name)?;
        let bytes = usize::try_from(info.bytes()).map_err(|_| {
            Error::Invalid(format!("{}: tensor {name:?} does not fit in memory", self.path.display()))
        })?;
        self.read_runs(name, std::slice::from_ref(&(0..bytes)))
    }

    /// Byte ranges of a tensor, concatenated; offsets count from the tensor's first byte. Only these bytes are read,
    /// adjacent ranges at once.
    pub fn read_runs(&self, name: &str, runs: &[Range<usize>]) -> Result<Vec<u8>> {
        let info = self.want(name)?;
        let refuse = |what: String| Error::Invalid(format!("{}: {what}", self.path.display()));
        let mut bytes = 0usize;
        for r in runs {
            if r.start > r.end || r.end as u64 > info.bytes() {
                return Err(refuse(format!(
                    "bytes {}..{} of tensor {name:?} were asked for, but it has {}",
                    r.start,
                    r.end,
                    info.bytes()
                )));
            }
            // Ranges may repeat, so their sum is not bounded by the tensor's size.
            bytes = bytes
                .checked_add(r.len())
                .ok_or_else(|| refuse(format!("the ranges of tensor {name:?} do not fit in memory")))?;
        }
        let mut out = Vec::new();
        out.try_reserve_exact(bytes)
            .map_err(|_| refuse(format!("no memory for the {bytes} bytes of tensor {name:?}")))?;
        out.resize(bytes, 0);
        let (mut at, mut i) = (0, 0);
        while i < runs.len() {
            let Range { start, mut end } = runs[i];
            i += 1;
            while runs.get(i).is_some_and(|r| r.start == end) {
                end = runs[i].end;
                i += 1;
            }
            let part = &mut out[at..at + (end - start)];
            at += part.len();
            self.read_data(part, info.begin + start as u64)?;
        }
        Ok(out)
    }

    /// Fills `out` with the tensor's bytes from `start_byte` on, counted from the tensor's first byte.
    pub fn read_range(&self, name: &str, start_byte: u64, out: &mut [u8]) -> Result<()> {
        let info = self.want(name)?;
        if start_byte.checked_add(out.len() as u64).is_none_or(|end| end > info.bytes()) {
            return Err(Error::Invalid(format!(
                "{}: {} bytes from byte {start_byte} of tensor {name:?} were asked for, but it has {}",
                self.path.display(),
                out.len(),
                info.bytes()
            )));
        }
        self.read_data(out, info.begin + start_byte)
    }

    /// CRC-32C of the file's bytes in `range`, which is inside it; reads in bounded memory.
    pub fn crc32c(&self, range: Range<u64>) -> Result<u32> {
        let mut buffer = vec![0u8; range.end.saturating_sub(range.start).min(1 << 22) as usize];
        let (mut at, mut crc) = (range.start, 0);
        while at < range.end {
            let n = (range.end - at).min(buffer.len() as u64);
            let part = &mut buffer[..n as usize];
            read_exact_at(&self.file, &self.path, part, at)?;
            crc = crc32c::crc32c_append(crc, part);
            at += n;
        }
        Ok(crc)
    }

    /// Fills `out` with tensor bytes from offset `at` of the file on.
    pub(crate) fn read_data(&self, out: &mut [u8], at: u64) -> Result<()> {
        self.delivered.fetch_add(out.len() as u64, Relaxed);
        read_exact_at(&self.file, &self.path, out, at)
    }

    fn want(&self, name: &str) -> Result<&TensorInfo> {
        self.get(name).ok_or_else(|| Error::Missing {
            path: self.path.clone(),
            what: format!("has no tensor {name:?}"),
        })
    }
}

/// Positional read without a shared cursor. A file that ends early was truncated after it was opened.
fn read_exact_at(file: &File, path: &Path, out: &mut [u8], at: u64) -> Result<()> {
    #[cfg(unix)]
    let done = std::os::unix::fs::FileExt::read_exact_at(file, out, at);
    #[cfg(not(unix))]
    let done = {
        use std::io::{Read, Seek, SeekFrom};
        let _ = file;
        File::open(path).and_then(|mut f| f.seek(SeekFrom::Start(at)).and_then(|_| f.read_exact(out)))
    };
    done.map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => Error::damaged(path, "was cut short while it was being read"),
        _ => Error::io_doing(path, "read", e),
    })
}
