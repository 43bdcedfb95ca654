//! Safetensors files: read by byte range ([`TensorFile`]), written as a stream ([`TensorFileWriter`]).
//!
//! A file is an 8-byte little-endian header length, a JSON header (name → dtype, shape, data offsets; string metadata
//! under `__metadata__`), then the tensors' little-endian bytes. Opening a file checks the whole header against the
//! file's size before anything is used: offsets tile the data exactly, sizes follow from dtype and shape, names are
//! unique. The format has no checksums; checkpoints add one.

mod dtype;
mod header;
mod reader;
#[cfg(test)]
pub(crate) mod tests;
mod writer;

pub use dtype::{FileDType, to_f32};
pub use reader::TensorFile;
pub use writer::{TensorDecl, TensorFileWriter, Written};

/// Longest header accepted, the limit of the official readers: 100 MB.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, unique in the file.
    pub name: String,
    /// Its element type.
    pub dtype: FileDType,
    /// Its shape, outermost axis first; `[]` is one element.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub begin: u64,
    /// End of its bytes, counted from the start of the file.
    pub end: u64,
}

impl TensorInfo {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.end - self.begin
    }
}
