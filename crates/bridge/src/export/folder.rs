//! A folder that is written in a staging area and renamed into place.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A folder being written beside its target. Dropped before it is published, it is deleted.
pub(super) struct StagedFolder {
    staging: PathBuf,
    target: PathBuf,
    overwrite: bool,
    published: bool,
}

impl StagedFolder {
    /// Creates the staging folder. With `overwrite`, an existing Hugging Face folder is replaced; any other folder
    /// never is.
    pub fn create(target: &Path, overwrite: bool) -> Result<StagedFolder> {
        if let Ok(mut entries) = fs::read_dir(target) {
            if entries.next().is_some() && !(overwrite && target.join("config.json").is_file()) {
                let what = match overwrite {
                    false => "already exists and is not empty; choose another folder or remove it",
                    true => {
                        "is not a Hugging Face folder, so it is not replaced; choose another folder or remove it"
                    }
                };
                return Err(Error::Output { path: target.into(), what: what.into() });
            }
        } else if target.symlink_metadata().is_ok() {
            let what = "already exists and is not a folder; choose another name".into();
            return Err(Error::Output { path: target.into(), what });
        }
        let Some(name) = target.file_name() else {
            return Err(Error::Output {
                path: target.into(),
                what: "is not the name of a new folder".into(),
            });
        };
        let parent = match target.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        fs::create_dir_all(parent).map_err(|e| Error::io(parent, "create", e))?;
        // The leftovers of an earlier process are never written into.
        let mut attempt = 0u32;
        loop {
            let mut partial = std::ffi::OsString::from(".");
            partial.push(name);
            partial.push(format!(".partial-{}-{attempt}", std::process::id()));
            let staging = parent.join(partial);
            match fs::create_dir(&staging) {
                Ok(()) => {
                    return Ok(StagedFolder { staging, target: target.into(), overwrite, published: false });
                }
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && attempt < 1000 => attempt += 1,
                Err(e) => return Err(Error::io(&staging, "create", e)),
            }
        }
    }

    /// The staging folder.
    pub fn dir(&self) -> &Path {
        &self.staging
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.staging.join(name)
    }

    /// Writes and syncs a small file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name);
        File::create(&path)
            .and_then(|mut f| f.write_all(bytes).and_then(|()| f.sync_all()))
            .map_err(|e| Error::io(&path, "write", e))
    }

    /// Renames the folder to its target.
    pub fn publish(mut self) -> Result<()> {
        sync_dir(&self.staging)?;
        // The old folder is moved aside first, and back if the rename fails.
        let aside = self.staging.with_extension("replaced");
        let replaces = self.overwrite && self.target.is_dir();
        if replaces {
            fs::rename(&self.target, &aside).map_err(|e| Error::io(&self.target, "replace", e))?;
        } else if self.target.is_dir() {
            fs::remove_dir(&self.target).map_err(|e| Error::io(&self.target, "replace", e))?;
        }
        fs::rename(&self.staging, &self.target).map_err(|e| {
            if replaces {
                drop(fs::rename(&aside, &self.target));
            }
            Error::io(&self.target, "rename into place", e)
        })?;
        self.published = true;
        if replaces {
            fs::remove_dir_all(&aside).map_err(|e| Error::io(&aside, "remove", e))?;
        }
        match self.target.parent() {
            Some(p) if !p.as_os_str().is_empty() => sync_dir(p),
            _ => sync_dir(Path::new(".")),
        }
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        if !self.published {
            // If this fails, too, the error that led here is the one to report.
            let _ = fs::remove_dir_all(&self.staging);
        }
    }
}

fn sync_dir(dir: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(dir).and_then(|f| f.sync_all()).map_err(|e| Error::io(dir, "sync", e))?;
    }
    Ok(())
}

/// True for files that accompany the weights: tokenizer, generation defaults, licence.
fn is_companion(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "spiece.model",
        "vocab.json",
        "vocab.txt",
    ];
    NAMES.contains(&name) || ["tokenizer", "LICENSE", "NOTICE"].iter().any(|p| name.starts_with(p))
}

/// Copies tokenizer files, generation defaults and licences.
pub(crate) fn copy_companions(from: &Path, into: &Path) -> Result<()> {
    let entries = fs::read_dir(from).map_err(|e| Error::io(from, "list", e))?;
    for entry in entries {
        let entry = entry.map_err(|e| Error::io(from, "list", e))?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|n| is_companion(n)) else { continue };
        let path = entry.path();
        // Symbolic links count: in the Hugging Face cache every file is one.
        if !path.is_file() {
            continue;
        }
        let to = into.join(name);
        fs::copy(&path, &to)
            .and_then(|_| fs::OpenOptions::new().write(true).open(&to)?.sync_all())
            .map_err(|e| Error::io(&path, "copy", e))?;
    }
    Ok(())
}
