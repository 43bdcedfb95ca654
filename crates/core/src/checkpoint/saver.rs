//! Asynchronous saving.

use super::{Snapshot, folder, write};
use crate::error::{Error, Result};
use crate::fs;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// The lock file in a folder of checkpoints.
const LOCK: &str = ".lock";

/// Writes checkpoints on a background thread while training continues. Dropping it waits for the write in progress;
/// [`Saver::finish`] also returns its result.
pub struct Saver {
    dir: PathBuf,
    keep: Option<usize>,
    shard_bytes: u64,
    running: Option<JoinHandle<Result<()>>>,
    _lock: fs::FileLock,
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
                fs::sync_folder(parent)?;
            }
        }
        let lock = fs::FileLock::take(&dir.join(LOCK))?;
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
