//! Writing a file as a stream.

use super::{FileDType, MAX_HEADER_BYTES, TensorInfo, header};
use crate::error::{Error, Result};
use crate::fs::{PageCache, StreamWriter};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDecl {
    /// Its name, unique in the file.
    pub name: String,
    /// Its element type.
    pub dtype: FileDType,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl TensorDecl {
    /// Size in bytes; of a tensor that can be written, it can be counted.
    pub fn bytes(&self) -> u64 {
        self.dtype.tensor_bytes(&self.shape).unwrap_or(u64::MAX)
    }
}

/// Size and checksum of a finished file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Size of the file in bytes.
    pub bytes: u64,
    /// CRC-32C of all its bytes.
    pub crc32c: u32,
}

/// Bytes written and summed at a time.
const PIECE: usize = 256 << 10;

/// Streams a safetensors file: the header from the declarations, then each tensor's bytes in file order, whole or in
/// pieces, through one small buffer. The file is complete only after [`TensorFileWriter::finish`]; to replace a file
/// atomically, write to another name and rename.
pub struct TensorFileWriter {
    path: PathBuf,
    out: StreamWriter,
    tensors: Vec<TensorInfo>,
    /// Index of the tensor being written, and its bytes written so far.
    current: usize,
    filled: u64,
    /// CRC-32C of each tensor's bytes written so far.
    sums: Vec<u32>,
    written: Written,
}

impl TensorFileWriter {
    /// Starts a file with the layout of the official writer: by element type (largest alignment first), then by name.
    /// Metadata keys are written sorted; empty metadata is left out.
    pub fn create(
        path: &Path,
        tensors: &[TensorDecl],
        metadata: &BTreeMap<String, String>,
    ) -> Result<TensorFileWriter> {
        TensorFileWriter::start(path, &in_official_order(tensors), metadata, PageCache::Use)
    }

    /// [`TensorFileWriter::create`] without metadata, for a large file that is written while the processor has other work:
    /// past the page cache.
    pub fn create_direct(path: &Path, tensors: &[TensorDecl]) -> Result<TensorFileWriter> {
        TensorFileWriter::start(path, &in_official_order(tensors), &BTreeMap::new(), PageCache::Bypass)
    }

    /// Starts a file with the tensors in the given order.
    pub fn create_in_order(
        path: &Path,
        tensors: &[TensorDecl],
        metadata: &BTreeMap<String, String>,
    ) -> Result<TensorFileWriter> {
        TensorFileWriter::start(path, &tensors.iter().collect::<Vec<_>>(), metadata, PageCache::Use)
    }

    fn start(
        path: &Path,
        order: &[&TensorDecl],
        metadata: &BTreeMap<String, String>,
        cache: PageCache,
    ) -> Result<TensorFileWriter> {
        let refuse = |what: String| Error::Invalid(format!("{}: {what}", path.display()));
        let mut seen = HashSet::new();
        let mut sized = Vec::with_capacity(order.len());
        let mut total = 0u64;
        for t in order {
            if t.name == header::METADATA {
                return Err(refuse(format!("a tensor cannot be called {:?}", t.name)));
            }
            if !seen.insert(t.name.as_str()) {
                return Err(refuse(format!("tensor {:?} is declared twice", t.name)));
            }
            let bytes =
                t.dtype.tensor_bytes(&t.shape).map_err(|e| refuse(format!("tensor {:?}: {e}", t.name)))?;
            total = total
                .checked_add(bytes)
                .ok_or_else(|| refuse("the tensors have more bytes than can be counted".into()))?;
            sized.push((t.name.as_str(), t.dtype, t.shape.as_slice(), bytes));
        }
        let head =
            header::render(&sized, metadata).map_err(|e| refuse(format!("cannot write the header: {e}")))?;
        let data_start = head.len() as u64;
        if data_start - 8 > MAX_HEADER_BYTES {
            return Err(refuse(format!(
                "a header of {data_start} bytes is over the format's limit; use several files"
            )));
        }
        let mut at = data_start;
        let tensors = order
            .iter()
            .zip(&sized)
            .map(|(t, &(.., bytes))| {
                let begin = at;
                at += bytes;
                TensorInfo { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone(), begin, end: at }
            })
            .collect();
        let out = StreamWriter::create(path, cache).map_err(|e| Error::io_doing(path, "create", e))?;
        let mut writer = TensorFileWriter {
            path: path.to_path_buf(),
            out,
            sums: vec![0; sized.len()],
            tensors,
            current: 0,
            filled: 0,
            written: Written { bytes: 0, crc32c: crc32c::crc32c(&head) },
        };
        writer.put(&head)?;
        writer.skip_full();
        Ok(writer)
    }

    /// The tensors in the order in which their bytes must be written.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor whose bytes come next; `None` when all are written.
    pub fn next_tensor(&self) -> Option<&TensorInfo> {
        self.tensors.get(self.current)
    }

    /// Appends bytes to tensor `name`, which must be [`TensorFileWriter::next_tensor`]. Empty tensors take no bytes
    /// and may be skipped.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let refuse = |what: String| Err(Error::Invalid(format!("{}: {what}", self.path.display())));
        let Some(info) = self.tensors.get(self.current) else {
            return refuse(format!("tensor {name:?} was written after the last one was full"));
        };
        if info.name != name {
            return refuse(format!("tensor {name:?} was written where {:?} comes next", info.name));
        }
        let left = info.bytes() - self.filled;
        if bytes.len() as u64 > left {
            return refuse(format!("tensor {name:?} was given {} bytes, but {left} are left", bytes.len()));
        }
        // In pieces that stay in a core's cache between the two.
        for piece in bytes.chunks(PIECE) {
            self.put(piece)?;
            self.sums[self.current] = crc32c::crc32c_append(self.sums[self.current], piece);
        }
        self.filled += bytes.len() as u64;
        self.skip_full();
        Ok(())
    }

    /// Flushes and syncs the file to disk. Fails if a tensor is incomplete.
    pub fn finish(self) -> Result<Written> {
        self.finish_with_checksums().map(|(written, _)| written)
    }

    /// [`TensorFileWriter::finish`], and the CRC-32C of each tensor in file order.
    pub fn finish_with_checksums(self) -> Result<(Written, Vec<u32>)> {
        if let Some(info) = self.tensors.get(self.current) {
            return Err(Error::Invalid(format!(
                "{}: tensor {:?} was given {} of its {} bytes",
                self.path.display(),
                info.name,
                self.filled,
                info.bytes()
            )));
        }
        self.out.finish().map_err(|e| Error::io_doing(&self.path, "write to disk", e))?;
        Ok((self.written, self.sums))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| Error::io_doing(&self.path, "write", e))?;
        self.written.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Goes on to the next tensor that is not full. The file's checksum follows from those of the tensors, so that every
    /// byte is summed once.
    fn skip_full(&mut self) {
        while self.tensors.get(self.current).is_some_and(|t| self.filled == t.bytes()) {
            let (file, tensor) = (self.written.crc32c, self.sums[self.current]);
            self.written.crc32c = crc32c::crc32c_combine(file, tensor, self.filled as usize);
            self.current += 1;
            self.filled = 0;
        }
    }
}

/// By element type, the largest alignment first, then by name.
fn in_official_order(tensors: &[TensorDecl]) -> Vec<&TensorDecl> {
    let mut order: Vec<&TensorDecl> = tensors.iter().collect();
    order.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    order
}
