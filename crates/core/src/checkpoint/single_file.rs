//! A checkpoint outside of a run: one folder of any name, written tensor by tensor.

use super::{folder, manifest, write};
use crate::error::{Error, Result};
use crate::tensorfile::TensorDecl;
use serde_json::Value;
use std::borrow::Cow;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

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
    /// Adds further files to the folder before it appears.
    pub more: &'a dyn Fn(&Path) -> Result<()>,
}

/// Writes the folder `path`, which appears complete or not at all. An existing folder is replaced only with
/// `overwrite`, and only if it is a checkpoint or empty.
pub fn write_single_file(path: &Path, contents: &SingleFile, overwrite: bool) -> Result<()> {
    let invalid = |what: String| Error::Invalid(format!("{}: {what}", path.display()));
    let Some(name) = path.file_name().and_then(OsStr::to_str) else {
        return Err(invalid("is not the name of a new folder".into()));
    };
    if folder::step_of(OsStr::new(name)).is_some_and(|s| s != contents.step) {
        return Err(invalid(format!(
            "is named for another step than {}, which it will hold; choose another name",
            contents.step
        )));
    }
    free(path, overwrite)?;
    let parent = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
        _ => PathBuf::from("."),
    };
    std::fs::create_dir_all(&parent).map_err(|e| Error::io_doing(&parent, "create the folder", e))?;
    let plan = write::plan(contents.tensors, write::SHARD_BYTES)?;
    let source = |name: &str| (contents.source)(name).map(Cow::Owned);
    write::write_atomically(&parent, name, &|temporary| {
        write::fill(temporary, contents.step, contents.state.clone(), &plan, &source)?;
        (contents.more)(temporary)
    })?;
    Ok(())
}

/// Fails if `path` must not be written.
fn free(path: &Path, overwrite: bool) -> Result<()> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    let empty = path.read_dir().is_ok_and(|mut entries| entries.next().is_none());
    let what = if empty || (overwrite && path.join(manifest::FILE).is_file()) {
        return Ok(());
    } else if overwrite {
        "is not a checkpoint, so it is not replaced; choose another name or remove it yourself"
    } else {
        "already exists; choose another name or say --overwrite"
    };
    Err(Error::Invalid(format!("{}: {what}", path.display())))
}
