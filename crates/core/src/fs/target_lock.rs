//! One writer per output, and the removal of what killed writers left.

use super::{FileLock, parent, remove, sync_folder};
use crate::{Error, Result};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Keeps other writers from a file or folder as long as it lives, by a locked file `.NAME.lock` beside it. The system
/// releases the lock of a killed process.
#[derive(Debug)]
pub struct TargetLock {
    target: PathBuf,
    name: OsString,
    /// None on file systems without locks.
    lock: Option<(PathBuf, FileLock)>,
}

impl TargetLock {
    /// Locks the output `target`, whose folder is created if necessary, and waits up to `timeout` for another writer
    /// to end. If `target` is a link, the output is what it points to.
    pub fn acquire(target: &Path, timeout: Duration) -> Result<TargetLock> {
        let is_link = target.symlink_metadata().is_ok_and(|m| m.is_symlink());
        let target = match is_link {
            true => target.canonicalize().map_err(|e| Error::io_doing(target, "follow the link", e))?,
            false => target.to_path_buf(),
        };
        let Some(name) = target.file_name().map(OsStr::to_owned) else {
            return Err(Error::Invalid(format!("{}: is not the name of an output", target.display())));
        };
        let dir = parent(&target);
        fs::create_dir_all(dir).map_err(|e| Error::io_doing(dir, "create the folder", e))?;
        let path = beside(&target, &name, ".lock");
        let started = Instant::now();
        let lock = loop {
            match FileLock::take(&path) {
                Ok(lock) if lock.is_of(&path) => break Some((path, lock)),
                Ok(lock) if lock.file.is_none() => break None,
                // The last holder has deleted the file: its lock excludes nobody any more.
                Ok(_) => {}
                Err(Error::Locked { .. }) if started.elapsed() < timeout => {}
                Err(Error::Locked { holder, .. }) => return Err(Error::Locked { path: target, holder }),
                Err(e) => return Err(e),
            }
        };
        Ok(TargetLock { target, name, lock })
    }

    /// The output.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where the output is written until it is complete: `.NAME.partial-PID`, on the same file system.
    pub fn partial(&self) -> PathBuf {
        beside(&self.target, &self.name, &format!(".partial-{}", std::process::id()))
    }

    /// Where an old output is while a new one takes its place, if the file system cannot exchange them.
    pub fn replaced(&self) -> PathBuf {
        beside(&self.target, &self.name, ".replaced")
    }

    /// Restores an output that a killed writer had moved aside, and removes what else such writers left.
    pub fn recover(&self) -> Result<()> {
        // Without a lock the writers may be alive.
        if self.lock.is_none() {
            return Ok(());
        }
        let replaced = self.replaced();
        if super::exists(&replaced) {
            match super::exists(&self.target) {
                true => remove(&replaced)?,
                false => super::rename(&replaced, &self.target)?,
            }
        }
        let dir = parent(&self.target);
        let list = |e| Error::io_doing(dir, "list the folder", e);
        for entry in fs::read_dir(dir).map_err(list)? {
            let entry = entry.map_err(list)?;
            if self.is_partial(&entry.file_name()) {
                remove(&entry.path())?;
            }
        }
        sync_folder(dir)
    }

    /// True for the names of [`TargetLock::partial`], of any process.
    fn is_partial(&self, name: &OsStr) -> bool {
        let rest = name.as_encoded_bytes().strip_prefix(b".");
        let rest = rest.and_then(|n| n.strip_prefix(self.name.as_encoded_bytes()));
        let id = rest.and_then(|n| n.strip_prefix(b".partial-")).unwrap_or_default();
        !id.is_empty() && id.iter().all(|c| c.is_ascii_digit() || *c == b'-')
    }
}

impl Drop for TargetLock {
    fn drop(&mut self) {
        if let Some((path, _held)) = &self.lock {
            // Deleted while it is locked. If this fails, an unlocked file stays, which harms nobody.
            drop(fs::remove_file(path));
        }
    }
}

fn beside(target: &Path, name: &OsStr, ending: &str) -> PathBuf {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(ending);
    target.with_file_name(hidden)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn one_writer_at_a_time_and_no_litter() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("sub/out");
        let held = TargetLock::acquire(&target, NOW).unwrap();
        let e = TargetLock::acquire(&target, NOW).unwrap_err().to_string();
        assert!(e.contains("is writing here"), "{e}");
        drop(held);
        assert_eq!(fs::read_dir(dir.path().join("sub")).unwrap().count(), 0);
        // Many threads: never two at once, though each deletes the file.
        let inside = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    for _ in 0..50 {
                        let held = TargetLock::acquire(&target, Duration::from_secs(60)).unwrap();
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        drop(held);
                    }
                });
            }
        });
    }

    #[test]
    fn leftovers_of_the_same_output_are_removed_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (own, others) =
            ([".out.partial-7", ".out.partial-12-0"], [".out.partial-x", ".out2.partial-7", "out.partial-7"]);
        for name in own.iter().chain(&others) {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("x"), "").unwrap();
        }
        fs::create_dir(at(".out.replaced")).unwrap();
        let lock = TargetLock::acquire(&at("out"), NOW).unwrap();
        lock.recover().unwrap();
        assert!(at("out").is_dir() && !at(".out.replaced").exists(), "the old one is back");
        fs::create_dir(at(".out.replaced")).unwrap();
        lock.recover().unwrap();
        assert!(at("out").is_dir() && !at(".out.replaced").exists(), "the old one has a successor");
        for (names, there) in [(&own[..], false), (&others[..], true)] {
            assert!(names.iter().all(|n| at(n).exists() == there), "{names:?}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_leads_to_the_output() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("disk")).unwrap();
        std::os::unix::fs::symlink("disk", at("link")).unwrap();
        let lock = TargetLock::acquire(&at("link"), NOW).unwrap();
        assert_eq!(lock.target(), at("disk").canonicalize().unwrap());
        assert!(TargetLock::acquire(&at("disk"), NOW).is_err());
        std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
        assert!(TargetLock::acquire(&at("dangling"), NOW).is_err());
    }
}
