//! Asynchronous saving.

use super::{Snapshot, folder, write};
use crate::error::{Error, Result};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// Writes checkpoints on a background thread while training continues. Dropping it waits for the write in progress;
/// [`Saver::finish`] also returns its result.
pub struct Saver {
    dir: PathBuf,
    keep: Option<usize>,
    shard_bytes: u64,
    running: Option<JoinHandle<Result<()>>>,
    /// Held as long as the saver lives; the system releases it even after `kill -9`.
    _lock: Option<File>,
}

impl Saver {
    /// Opens a folder of checkpoints, creating it if necessary: removes what a crash left partly written, and locks
    /// out a second process. `keep` is the number of checkpoints kept after each save, at least 1; `None` keeps all.
    /// Call it before [`super::latest`].
    pub fn new(dir: &Path, keep: Option<usize>) -> Result<Saver> {
        if keep == Some(0) {
            return Err(Error::Invalid("keeping 0 checkpoints would keep none; keep at least 1".into()));
        }
        if !dir.is_dir() {
            std::fs::create_dir_all(dir).map_err(|e| Error::io_doing(dir, "create the folder", e))?;
            if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
                folder::sync(parent)?;
            }
        }
        let lock = lock(dir)?;
        folder::clean(dir)?;
        Ok(Saver {
            dir: dir.to_path_buf(),
            keep,
            shard_bytes: write::SHARD_BYTES,
            running: None,
            _lock: lock,
        })
    }

    /// Splits data files at another size than 4 GiB.
    pub fn shard_bytes(mut self, bytes: u64) -> Saver {
        self.shard_bytes = bytes;
        self
    }

    /// Deletes checkpoints beyond `keep` that a crash between a save and its pruning left. Call it once the newest
    /// checkpoint is known to be complete: otherwise the older ones are the fallback.
    pub fn tidy(&self) -> Result<()> {
        match (self.keep, folder::latest(&self.dir)?) {
            (Some(keep), Some(newest)) => folder::prune(&self.dir, keep, &newest),
            _ => Ok(()),
        }
    }

    /// Starts writing `snapshot` and returns. Waits for the previous write if that is still in progress; if that
    /// failed, returns its error and does not write this snapshot.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<()> {
        self.finish()?;
        let (dir, keep, shard_bytes) = (self.dir.clone(), self.keep, self.shard_bytes);
        let work = move || {
            let home = write::write(&dir, &snapshot, shard_bytes)?;
            keep.map_or(Ok(()), |keep| folder::prune(&dir, keep, &home))
        };
        let thread = std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(work)
            .map_err(|e| Error::io_doing(&self.dir, "start the thread that writes checkpoints", e))?;
        self.running = Some(thread);
        Ok(())
    }

    /// Waits until everything saved so far is on disk.
    pub fn finish(&mut self) -> Result<()> {
        let Some(thread) = self.running.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|_| {
            let dir = self.dir.display();
            Err(Error::Invalid(format!("{dir}: the thread that writes checkpoints stopped unexpectedly")))
        })
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // An error cannot be returned from drop; call `finish` to get it.
        drop(self.finish());
    }
}

fn lock(dir: &Path) -> Result<Option<File>> {
    let path = dir.join(".lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| Error::io_doing(&path, "create", e))?;
    let mut taken = file.try_lock();
    // A child process that is just being spawned anywhere in this program briefly holds every open file, including a
    // lock that was just released. Another run holds it for longer.
    for _ in 0..20 {
        if !matches!(taken, Err(TryLockError::WouldBlock)) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(25));
        taken = file.try_lock();
    }
    match taken {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(Error::Invalid(format!(
            "{}: another run is writing checkpoints here; wait for it to end or choose another folder",
            dir.display()
        ))),
        // Some network file systems have no locks; run without one.
        Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => Ok(None),
        Err(TryLockError::Error(e)) => Err(Error::io_doing(&path, "lock", e)),
    }
}
