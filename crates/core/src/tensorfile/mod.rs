//! Safetensors files: read by byte range ([`TensorFile`]), written as a stream ([`TensorFileWriter`]).
//!
//! A file is an 8-byte little-endian header length, a JSON header (name → dtype, shape, data offsets; string
//! metadata under `__metadata__`), then the tensors' little-endian bytes back to back. Opening checks the whole
//! header against the file's size before anything is believed: offsets tile the data exactly, sizes follow from
//! dtype and shape, names are unique. Tensor bytes carry no checksum in this format; checkpoints add one.

mod dtype;
mod header;
mod reader;
#[cfg(test)]
pub(crate) mod tests;
mod writer;

pub use dtype::FileDType;
pub use reader::TensorFile;
pub use writer::{TensorDecl, TensorFileWriter, Written};

/// Longest header accepted, the limit of the official readers: 100 MB.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, unique in the file.
    pub name: String,
    /// Its element type as the file names it.
    pub dtype: FileDType,
    /// Its shape, outermost axis first; `[]` is one element.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub begin: u64,
    /// One past the last byte, counted from the start of the file.
    pub end: u64,
}

impl TensorInfo {
    /// Bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        self.end - self.begin
    }
}
