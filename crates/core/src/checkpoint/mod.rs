//! Checkpoints: layout-independent logical tensors and a JSON state. They are written so that a crash at any time
//! leaves the previous checkpoint complete, and read so that one damaged byte anywhere is an error before any tensor
//! is used.
//!
//! ```text
//! <run>/checkpoints/step-00000120/
//!     manifest.json            format, step, state, files with size and CRC-32C, tensor → file; its own checksum
//!     model.safetensors        tensors named "model/…"
//!     optimizer.safetensors    all others; large sets are split into model-00001-of-00003.safetensors and so on
//! ```
//! A checkpoint holds what it is given and nothing else (no time, host or path), in an order that depends on the
//! names only: equal snapshots give equal bytes. It is written to `.tmp-step-…`, synced, and renamed, so a folder
//! called `step-…` is complete. Tensors keep their full logical shape; a rank reads the bytes it owns with
//! [`Loaded::read_runs`], and ranks share the verification with [`load_parallel`].

mod assemble;
mod canonical;
mod compare;
mod folder;
mod load;
mod manifest;
mod parallel_verify;
mod saver;
mod single_file;
mod slice;
#[cfg(test)]
mod tests;
mod write;

pub use compare::{Comparison, Difference, DifferenceKind, compare};
pub use folder::{latest, list, name as folder_name};
pub use load::{BytesRead, Loaded, VerifyReport, load, load_parallel, verify};
pub use saver::Saver;
pub use single_file::{ListedFiles, SingleFile, check_folder_name, listed_files, write_single_file};
pub use slice::Slice;
pub use write::PartDecl;

use ferrotron_tensor::DType;

/// One logical tensor: an owned copy, because training continues to change the original while it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Logical name, e.g. `model/layers.0.attention.q` or `adam.m/layers.0.attention.q`; unique in a snapshot.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Full logical shape, without padding.
    pub shape: Vec<usize>,
    /// Little-endian elements, row-major.
    pub bytes: Vec<u8>,
}

/// Everything a run needs to continue from a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Number of steps done.
    pub step: u64,
    /// Counters, random state, data position, configuration. Floats are restored bit by bit; JSON has no NaN or
    /// infinity. It must not contain times, hosts or paths: equal runs give equal bytes.
    pub state: serde_json::Value,
    /// The tensors, in any order.
    pub items: Vec<Item>,
}
