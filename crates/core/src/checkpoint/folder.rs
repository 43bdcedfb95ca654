//! Checkpoint folders: names, and renames that keep every checkpoint complete if the machine stops.

use crate::error::{Error, Result};
use crate::fs::{exists, remove, rename, sync_folder};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Being written or deleted; removed after a crash.
const TEMPORARY: &str = ".tmp-";
/// A checkpoint moved aside while another of the same step replaces it.
const REPLACED: &str = ".replaced-";

/// The folder name of a step: `step-00000120`.
pub fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a folder name.
pub(crate) fn step_of(name: &OsStr) -> Option<u64> {
    let name = name.to_str()?;
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (self::name(step) == name).then_some(step)
}

/// The checkpoints in `dir`, oldest step first; empty if the folder does not exist.
pub fn list(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found: Vec<(u64, PathBuf)> = entries(dir)?
        .into_iter()
        .filter_map(|p| Some((step_of(p.file_name()?)?, p)))
        .filter(|(_, p)| p.is_dir())
        .collect();
    found.sort();
    Ok(found)
}

/// The newest complete checkpoint in `dir`. Folders are renamed into place when complete, so only names are read.
/// Later damage is detected by [`super::load`] and never silently skipped.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>> {
    Ok(list(dir)?.pop().map(|(_, path)| path))
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = match fs::read_dir(dir) {
        Ok(read) => read,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io_doing(dir, "list the folder", e)),
    };
    read.map(|e| e.map(|e| e.path()))
        .collect::<std::io::Result<_>>()
        .map_err(|e| Error::io_doing(dir, "list the folder", e))
}

/// Removes what a crash left behind: partly written and partly deleted folders. A checkpoint that was moved aside is
/// restored unless its replacement is complete. What cannot be deleted stays: no name of a leftover is that of a checkpoint.
pub(super) fn clean(dir: &Path) -> Result<()> {
    for path in entries(dir)? {
        let Some(name) = path.file_name().and_then(OsStr::to_str) else { continue };
        if name.starts_with(TEMPORARY) {
            discard(&path);
        } else if let Some(step) = name.strip_prefix(REPLACED) {
            let target = dir.join(step);
            if step_of(OsStr::new(step)).is_none() || target.exists() {
                delete(dir, &path)?;
            } else {
                rename(&path, &target)?;
            }
        }
    }
    Ok(())
}

/// Path of a temporary folder for the checkpoint called `name`.
pub(super) fn temporary_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{TEMPORARY}{name}"))
}

/// Creates an empty temporary folder for the checkpoint called `name`.
pub(super) fn temporary(dir: &Path, name: &str) -> Result<PathBuf> {
    let path = temporary_path(dir, name);
    if path.exists() {
        remove(&path)?;
    }
    fs::create_dir(&path).map_err(|e| Error::io_doing(&path, "create the folder", e))?;
    Ok(path)
}

/// Renames a complete temporary folder to the checkpoint `name`, replacing an earlier one.
pub(super) fn commit(dir: &Path, temporary: &Path, name: &str) -> Result<PathBuf> {
    sync_folder(temporary)?;
    let target = dir.join(name);
    let aside = dir.join(format!("{REPLACED}{name}"));
    let replaces = target.exists();
    if replaces {
        rename(&target, &aside)?;
    }
    let done = rename(temporary, &target).and_then(|()| sync_folder(dir));
    if replaces {
        match done {
            // Not only removed: what cannot be would be restored once this step is pruned.
            Ok(()) => {
                if let Err(e) = delete(dir, &aside) {
                    tracing::warn!(shown = true, "the checkpoint of {name} that was replaced stays: {e}");
                }
            }
            // Best effort: the error at hand is more useful, and `clean` restores it later as well.
            Err(_) if !target.exists() => drop(rename(&aside, &target)),
            Err(_) => {}
        }
    }
    done.map(|()| target)
}

/// The link to the checkpoint with the lowest validation loss.
pub const BEST: &str = "best";

/// Makes the link [`BEST`] name the checkpoint of a step; it always names one that is complete.
pub fn mark_best(dir: &Path, step: u64) -> Result<()> {
    let link = temporary_path(dir, BEST);
    if link.symlink_metadata().is_ok() {
        remove(&link)?;
    }
    std::os::unix::fs::symlink(name(step), &link)
        .map_err(|e| Error::io_doing(&link, "create the link", e))?;
    rename(&link, &dir.join(BEST))?;
    sync_folder(dir)
}

/// The step of the checkpoint that the link [`BEST`] names.
pub fn best(dir: &Path) -> Option<u64> {
    step_of(fs::read_link(dir.join(BEST)).ok()?.as_os_str())
}

/// Deletes the checkpoints after `step`, newest first, and returns their steps.
pub fn remove_after(dir: &Path, step: u64) -> Result<Vec<u64>> {
    let mut later: Vec<(u64, PathBuf)> = list(dir)?.into_iter().filter(|(s, _)| *s > step).collect();
    later.reverse();
    later.iter().try_for_each(|(_, path)| delete(dir, path))?;
    Ok(later.into_iter().map(|(step, _)| step).rev().collect())
}

/// Renames first, so that a crash half-way leaves no folder that looks complete. It is an error only if the rename fails.
fn delete(dir: &Path, path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().display();
    let nth = |n: usize| dir.join(format!("{TEMPORARY}delete-{name}-{n}"));
    let mut n = 0;
    // Of an earlier one that cannot be deleted.
    while exists(&nth(n)) {
        n += 1;
    }
    rename(path, &nth(n))?;
    discard(&nth(n));
    Ok(())
}

/// Deletes what is no checkpoint. A network file system keeps the files of a folder that another process reads, and others
/// may belong to another user: training does not depend on it, and [`clean`] tries again at the next start.
fn discard(path: &Path) {
    if let Err(e) = remove(path) {
        tracing::warn!(shown = true, "{e}; it is of no use any more and stays until the next start");
    }
}

/// Deletes the oldest checkpoints so that `keep` remain, never `newest` and never the best. The first error, after an attempt
/// at all of them.
pub(super) fn prune(dir: &Path, keep: usize, newest: &Path) -> Result<()> {
    let all = list(dir)?;
    let best = best(dir);
    let surplus = all.len().saturating_sub(keep.max(1));
    let spared = |(step, path): &(u64, PathBuf)| path == newest || best == Some(*step);
    let doomed = all.into_iter().take(surplus).filter(|c| !spared(c));
    doomed.map(|(_, path)| delete(dir, &path)).fold(Ok(()), Result::and)
}
