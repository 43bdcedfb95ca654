//! An output folder that is written in a staging folder beside it and takes its place when it is complete.

use crate::error::{Error, Result};
use crate::replaceable::{OutputKind, check_replaceable};
use ferrotron_core::fs::{self, TargetLock};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A folder being written beside its target, which no other process writes meanwhile. Dropped before it is published,
/// it is deleted. A process killed at any time leaves the target as it was or complete; [`StagedFolder::create`]
/// removes the rest.
pub(crate) struct StagedFolder {
    // Fields are dropped in order: the lock is released last.
    staging: PathBuf,
    published: bool,
    kind: OutputKind,
    overwrite: bool,
    lock: TargetLock,
}

impl StagedFolder {
    /// Locks the target, cleans up after killed processes, and creates the staging folder. An existing folder is
    /// replaced only with `overwrite`, and only if all that is in it was written by an earlier conversion of this kind.
    pub fn create(target: &Path, kind: OutputKind, overwrite: bool) -> Result<StagedFolder> {
        let lock = TargetLock::acquire(target, Duration::ZERO)?;
        lock.recover()?;
        check_target(lock.target(), kind, overwrite)?;
        let staging = lock.partial();
        std::fs::create_dir(&staging).map_err(|e| Error::io(&staging, "create", e))?;
        Ok(StagedFolder { staging, published: false, kind, overwrite, lock })
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

    /// Puts the folder in its target's place: exchanged with it in one step, or with two renames where the file
    /// system cannot do that.
    pub fn publish(mut self) -> Result<()> {
        fs::sync_folder(&self.staging)?;
        let target = self.lock.target();
        // It may have changed since: what somebody put there is not deleted.
        let old = match check_target(target, self.kind, self.overwrite)? {
            Existing::Nothing => {
                fs::rename(&self.staging, target)?;
                None
            }
            Existing::Replaceable => Some(swap(&self.staging, target, &self.lock.replaced())?),
        };
        self.published = true;
        fs::sync_folder(fs::parent(target))?;
        match old {
            Some(old) => Ok(fs::remove(&old)?),
            None => Ok(()),
        }
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        if !self.published {
            // If this fails, too, the error that led here is the one to report.
            let _ = std::fs::remove_dir_all(&self.staging);
        }
    }
}

/// Puts `new` in the place of `target` and returns where the old one is.
fn swap(new: &Path, target: &Path, aside: &Path) -> Result<PathBuf> {
    match fs::exchange(new, target) {
        Ok(()) => return Ok(new.into()),
        Err(e) if e.kind() == std::io::ErrorKind::Unsupported => {}
        Err(e) => return Err(Error::io(target, "replace", e)),
    }
    // Killed between the two, the next conversion to this target moves the old one back.
    fs::rename(target, aside)?;
    if let Err(e) = fs::rename(new, target) {
        drop(fs::rename(aside, target));
        return Err(e.into());
    }
    Ok(aside.into())
}

/// What is at the target.
enum Existing {
    /// Nothing, or an empty folder.
    Nothing,
    /// A folder that may be replaced.
    Replaceable,
}

fn check_target(target: &Path, kind: OutputKind, overwrite: bool) -> Result<Existing> {
    let wrong = |what: &str| Err(Error::Output { path: target.into(), what: what.into() });
    let Ok(about) = target.symlink_metadata() else { return Ok(Existing::Nothing) };
    if !about.is_dir() {
        return wrong("already exists and is not a folder; choose another name");
    }
    let mut entries = std::fs::read_dir(target).map_err(|e| Error::io(target, "list", e))?;
    if entries.next().is_none() {
        return Ok(Existing::Nothing);
    }
    if !overwrite {
        return wrong("already exists and is not empty; choose another name or pass --overwrite");
    }
    check_replaceable(target, kind)?;
    Ok(Existing::Replaceable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs as std_fs;

    /// The fallback for file systems that cannot exchange two folders, killed after each of its renames.
    #[test]
    fn two_renames_lose_nothing_either() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let write = |path: &Path, text: &str| {
            std_fs::create_dir(path).unwrap();
            std_fs::write(path.join("x"), text).unwrap();
        };
        for (renames, left) in [(0, "old"), (1, "old"), (2, "new")] {
            let lock = TargetLock::acquire(&target, Duration::ZERO).unwrap();
            let (partial, aside) = (lock.partial(), lock.replaced());
            write(&target, "old");
            write(&partial, "new");
            for (from, to) in [(&target, &aside), (&partial, &target)].into_iter().take(renames) {
                fs::rename(from, to).unwrap();
            }
            lock.recover().unwrap();
            assert_eq!(std_fs::read_to_string(target.join("x")).unwrap(), left);
            drop(lock);
            assert_eq!(std_fs::read_dir(dir.path()).unwrap().count(), 1);
            std_fs::remove_dir_all(&target).unwrap();
        }
    }
}
