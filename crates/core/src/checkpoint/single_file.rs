//! A checkpoint outside of a run: one folder of any name, written tensor by tensor.

use super::write::{self, PartDecl};
use super::{folder, load, manifest};
use crate::error::{Error, Result};
use crate::tensorfile::TensorDecl;
use serde_json::Value;
use std::path::Path;

/// The contents of such a checkpoint.
pub struct SingleFile<'a> {
    /// Number of steps done.
    pub step: u64,
    /// As in [`super::Snapshot`].
    pub state: Value,
    /// The tensors, in any order.
    pub tensors: &'a [TensorDecl],
    /// Returns the little-endian bytes of a tensor; only one is in memory at a time.
    pub source: &'a dyn Fn(&str) -> Result<Vec<u8>>,
}

/// Writes the data files and the manifest into an existing folder, each synced.
pub fn write_single_file(folder: &Path, contents: &SingleFile) -> Result<()> {
    let parts: Vec<PartDecl> = contents.tensors.iter().cloned().map(PartDecl::whole).collect();
    let source = |i: usize, sink: &mut write::Sink| sink(&(contents.source)(&contents.tensors[i].name)?);
    let written = write::write_parts(folder, &parts, write::SHARD_BYTES, write::Writer::ALONE, &source)?;
    write::write_manifest(folder, contents.step, contents.state.clone(), written)
}

/// Fails if `path` has the name of another step's checkpoint than the one it will hold.
pub fn check_folder_name(path: &Path, step: u64) -> Result<()> {
    match path.file_name().and_then(folder::step_of) {
        Some(named) if named != step => Err(Error::Invalid(format!(
            "{}: is named for another step than {step}, which it will hold; choose another name",
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// What the manifest of a checkpoint lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedFiles {
    /// `manifest.json` and the data files.
    pub files: Vec<String>,
    /// True if there are other tensors than weights: the optimizer state of a run.
    pub training: bool,
}

/// The files of a checkpoint folder according to its manifest, which must be valid; the files are not read.
pub fn listed_files(path: &Path) -> Result<ListedFiles> {
    let (manifest, _) = load::read_manifest(path)?;
    let training = manifest.tensors.keys().any(|name| !name.starts_with("model/"));
    let files = manifest.files.into_keys().chain([manifest::FILE.to_string()]).collect();
    Ok(ListedFiles { files, training })
}
