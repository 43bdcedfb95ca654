//! Checkpoints: layout-independent logical tensors and a JSON state. They are written so that a crash at any time
//! leaves the previous checkpoint complete, and read so that one damaged byte anywhere is an error before any tensor
//! is used.
//!
//! ```text
//! <run>/checkpoints/step-00000120/
//!     manifest.json                     format, step, state, files with size and CRC-32C, the parts of every tensor
//!                                       with their file, slice and CRC-32C; its own checksum
//!     model-rank-00000.safetensors      parts of tensors named "model/…" that rank 0 wrote
//!     optimizer-rank-00000.safetensors  parts of all others; large sets are split into …-00001-of-00003.safetensors
//!     model-rank-00001.safetensors      and so on; a run of one rank has model.safetensors and optimizer.safetensors
//! ```
//! Every rank writes parts of what it holds ([`share`] says which, where several hold the same), from a copy in host
//! memory, or from host memory itself where it holds them there, and on a thread of its own, while training goes on
//! ([`Saver`]). A tensor's name, type and shape are those of the
//! logical tensor; its parts are slices of it ([`Slice`]), and a reader sees the tensor only: it asks for byte ranges with
//! [`Loaded::read_runs`], whoever wrote them. Ranks share the verification with [`load_parallel`].
//!
//! A checkpoint holds what it is given and nothing else (no time, host or path), in an order that depends on the
//! names only: equal snapshots of equal layouts give equal bytes, and equal snapshots of any layouts compare as equal
//! ([`compare`]). It is written to `.tmp-step-…`, synced, and renamed, so a folder called `step-…` is complete.
//!
//! Version 1 of the format, which earlier versions wrote, has whole tensors only, each in one file; it is read too.

mod assemble;
mod canonical;
mod compare;
mod folder;
mod load;
mod manifest;
mod parallel_verify;
mod saver;
mod share;
mod single_file;
mod slice;
#[cfg(test)]
mod tests;
mod write;

pub use compare::{Comparison, Difference, DifferenceKind, compare};
pub(crate) use folder::step_of;
pub use folder::{BEST, best, latest, list, mark_best, name as folder_name, remove_after};
pub use load::{BytesRead, Loaded, VerifyReport, load, load_parallel, state, verify};
pub use saver::{PartReader, Saver, Staged};
pub use share::share;
pub use single_file::{ListedFiles, SingleFile, check_folder_name, listed_files, write_single_file};
pub use slice::Slice;
pub use write::{PartDecl, Sink};

use crate::tensorfile::TensorDecl;
use ferrotron_tensor::DType;

/// A logical tensor, or a part of one: an owned copy, because training continues to change the original.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Logical name, e.g. `model/layers.0.attention.q` or `adam.m/layers.0.attention.q`; unique in a snapshot.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Full logical shape, without padding.
    pub shape: Vec<usize>,
    /// Which of its elements these are.
    pub slice: Slice,
    /// Little-endian elements, row-major.
    pub bytes: Vec<u8>,
}

impl Item {
    /// All of a tensor.
    pub fn whole(name: &str, dtype: DType, shape: Vec<usize>, bytes: Vec<u8>) -> Item {
        Item { name: name.into(), dtype, slice: Slice::whole(&shape), shape, bytes }
    }

    /// The part that it is.
    pub fn part(&self) -> PartDecl {
        let (name, shape) = (self.name.clone(), self.shape.clone());
        PartDecl { tensor: TensorDecl { name, dtype: self.dtype.into(), shape }, slice: self.slice.clone() }
    }
}

/// What this rank saves of a run: with several ranks, all of them together have what the run needs to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Number of steps done.
    pub step: u64,
    /// Counters, random state, data position, configuration. Floats are restored bit by bit; JSON has no NaN or
    /// infinity. It must not contain times, hosts or paths: equal runs give equal bytes.
    pub state: serde_json::Value,
    /// Tensors and parts of tensors, in any order.
    pub items: Vec<Item>,
}
