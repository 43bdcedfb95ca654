//! Asynchronous saving.

use super::{Snapshot, folder, write};
use crate::error::{Error, Result};
use crate::fs;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// The lock file in a folder of checkpoints.
const LOCK: &str = ".lock";
/// Space for headers, the manifest and the file system's own records, beyond the tensors' bytes.
const SPARE_BYTES: u64 = 1 << 20;

/// Writes checkpoints on a background thread while training continues. Dropping it waits for the write in progress;
/// [`Saver::finish`] also returns its result.
pub struct Saver {
    dir: PathBuf,
    keep: Option<usize>,
    shard_bytes: u64,
    /// The step being written, and its thread.
    running: Option<(u64, JoinHandle<Result<()>>)>,
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
            fs::sync_folder(fs::parent(dir))?;
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

    /// Starts writing `snapshot` and returns; an error if it does not fit on the disk. Waits for the previous write if
    /// that is still in progress; if that failed, returns its error and does not write this snapshot.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<()> {
        self.finish()?;
        check_space(&self.dir, &snapshot, fs::free_bytes(&self.dir))?;
        let (dir, keep, shard_bytes) = (self.dir.clone(), self.keep, self.shard_bytes);
        let step = snapshot.step;
        let work = move || {
            let home = write::write(&dir, &snapshot, shard_bytes)?;
            keep.map_or(Ok(()), |keep| folder::prune(&dir, keep, &home))
        };
        let thread = std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(work)
            .map_err(|e| Error::io_doing(&self.dir, "start the thread that writes checkpoints", e))?;
        self.running = Some((step, thread));
        Ok(())
    }

    /// The step and result of the write that has ended since the last call, if one has. Does not wait.
    pub fn poll(&mut self) -> Option<(u64, Result<()>)> {
        self.running.as_ref().filter(|(_, thread)| thread.is_finished())?;
        self.wait()
    }

    /// Waits for the write in progress, if there is one; its step and result.
    pub fn wait(&mut self) -> Option<(u64, Result<()>)> {
        let (step, thread) = self.running.take()?;
        let result = thread.join().unwrap_or_else(|_| {
            let dir = self.dir.display();
            Err(Error::Invalid(format!("{dir}: the thread that writes checkpoints stopped unexpectedly")))
        });
        Some((step, result))
    }

    /// Waits until everything saved so far is on disk.
    pub fn finish(&mut self) -> Result<()> {
        self.wait().map_or(Ok(()), |(_, result)| result)
    }
}

/// An error if the snapshot has more bytes than are free. The old checkpoints stay until the new one is complete.
fn check_space(dir: &Path, snapshot: &Snapshot, free: Option<u64>) -> Result<()> {
    let bytes = snapshot.items.iter().map(|i| i.bytes.len() as u64).sum::<u64>() + SPARE_BYTES;
    let Some(free) = free.filter(|free| *free < bytes) else { return Ok(()) };
    let [bytes, free] = [bytes, free].map(|n| ferrotron_tensor::format_bytes(n as usize));
    let what = format!("the checkpoint takes {bytes} and {free} are free");
    Err(Error::io_doing(dir, "save", std::io::Error::new(std::io::ErrorKind::StorageFull, what)))
}

impl Drop for Saver {
    fn drop(&mut self) {
        // An error cannot be returned from drop; call `finish` to get it.
        drop(self.finish());
    }
}

#[cfg(test)]
mod tests {
    use super::super::Item;
    use super::*;
    use ferrotron_tensor::DType;

    #[test]
    fn a_checkpoint_that_does_not_fit_is_refused_before_it_is_written() {
        let bytes = vec![0; 1 << 10];
        let item = Item { name: "model/a".into(), dtype: DType::U8, shape: vec![bytes.len()], bytes };
        let snapshot = Snapshot { step: 1, state: serde_json::json!({}), items: vec![item] };
        let check = |free| check_space(Path::new("run"), &snapshot, free);
        check(None).unwrap();
        check(Some((1 << 10) + SPARE_BYTES)).unwrap();
        let e = check(Some(SPARE_BYTES)).unwrap_err().to_string();
        assert!(
            e.contains("run: cannot save: the checkpoint takes") && e.contains("1.0 MiB are free"),
            "{e}"
        );
        assert!(e.contains("free some space"), "{e}");
    }
}
