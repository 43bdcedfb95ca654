//! Asynchronous saving by all ranks of a job.
//!
//! A save has two phases, each a thread per rank. First every rank writes its parts; when all have succeeded, rank 0
//! writes the manifest and renames the folder. Between the phases the ranks exchange results, on the threads that train:
//! a collective on another thread would race with those of a step.

use super::write::{self, Sink, Writer, WrittenParts};
use super::{PartDecl, Snapshot, folder};
use crate::error::{Error, Result};
use crate::fs;
use ferrotron_comm::Communicator;
use ferrotron_tensor::{Device, HostBuffer};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// The lock file in a folder of checkpoints.
const LOCK: &str = ".lock";
/// Space for headers, the manifest and the file system's own records, beyond the tensors' bytes.
const SPARE_BYTES: u64 = 1 << 20;

/// Writes checkpoints on background threads while training continues. Dropping it waits for this rank's write in
/// progress; [`Saver::finish`] also returns its result.
pub struct Saver {
    dir: PathBuf,
    keep: Option<usize>,
    shard_bytes: u64,
    /// All ranks that save together.
    group: Communicator,
    running: Option<Running>,
    /// Memory of the last save, for the next one.
    spare: Option<HostBuffer>,
    /// Held by rank 0.
    lock: Option<fs::FileLock>,
}

/// Parts of tensors to be written.
pub struct Staged {
    /// The parts.
    pub parts: Vec<PartDecl>,
    /// Bytes of the parts without a reader, back to back; copies into it may still be in progress.
    pub buffer: HostBuffer,
    /// For each part: what reads it where it is, when it is written. Dropped after the last part is written, or when that
    /// fails.
    pub readers: Vec<Option<Box<dyn PartReader>>>,
}

/// Reads a part on the thread that writes it.
pub trait PartReader: Send {
    /// Gives all bytes to `sink`, in order.
    fn read(&self, sink: &mut Sink) -> Result<()>;
}

/// The checkpoint being written.
struct Running {
    step: u64,
    temporary: PathBuf,
    phase: Phase,
}

enum Phase {
    /// [`Saver::begin`] has returned.
    Begun,
    /// Every rank writes its parts.
    Writing(Value, JoinHandle<(Result<()>, HostBuffer)>),
    /// This rank could not write; the others do not know yet.
    Failed(Error),
    /// Rank 0 completes the checkpoint; nothing to do on other ranks.
    Committing(Result<Option<JoinHandle<Result<()>>>>),
}

/// What a rank says when a save begins.
#[derive(Serialize, Deserialize)]
struct Beginning {
    /// Bytes that it will write.
    bytes: u64,
    /// Free bytes that it sees in the folder.
    free: Option<u64>,
    /// Rank 0: name of the temporary folder.
    folder: Option<String>,
    error: Option<String>,
}

impl Saver {
    /// Opens a folder of checkpoints, creating it if necessary: removes what a crash left partly written, and locks
    /// out a second process. `keep` is the number of checkpoints kept after each save, at least 1; `None` keeps all.
    /// Call it before [`super::latest`].
    pub fn new(dir: &Path, keep: Option<usize>) -> Result<Saver> {
        Saver::on(dir, keep, &Communicator::solo())
    }

    /// [`Saver::new`] on a rank of a group whose ranks save together. Only rank 0 touches the folder; the others must not
    /// look for checkpoints before it has.
    pub fn on(dir: &Path, keep: Option<usize>, group: &Communicator) -> Result<Saver> {
        if keep == Some(0) {
            return Err(Error::Invalid("keeping 0 checkpoints would keep none; keep at least 1".into()));
        }
        let lock = (group.rank() == 0).then(|| open_folder(dir)).transpose()?;
        Ok(Saver {
            dir: dir.to_path_buf(),
            keep,
            shard_bytes: write::SHARD_BYTES,
            group: group.clone(),
            running: None,
            spare: None,
            lock,
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
    /// that is still in progress; if that failed, returns its error and does not write this snapshot. Collective.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<()> {
        self.finish()?;
        let Snapshot { step, state, items } = snapshot;
        let parts: Vec<PartDecl> = items.iter().map(super::Item::part).collect();
        let wrong = items.iter().zip(&parts).find(|(i, p)| i.bytes.len() as u64 != p.bytes());
        let ready = wrong.map_or(Ok(()), |(item, part)| {
            let (name, given, takes) = (&item.name, item.bytes.len(), part.bytes());
            let what = format!("checkpoint: tensor {name:?} was given {given} bytes and takes {takes}");
            Err(Error::Invalid(what))
        });
        self.begin(step, parts.iter().map(PartDecl::bytes).sum(), ready)??;
        let buffer = items.into_iter().flat_map(|i| i.bytes).collect::<Vec<u8>>().into();
        let readers = parts.iter().map(|_| None).collect();
        self.write(state, Ok(Staged { parts, buffer, readers }));
        Ok(())
    }

    /// Host memory of at least `bytes` for the copy of the next save: that of the last one, if it is large enough.
    pub fn buffer(&mut self, device: &Device, bytes: usize) -> Result<HostBuffer> {
        match self.spare.take().filter(|b| b.len() >= bytes) {
            Some(buffer) => Ok(buffer),
            None => Ok(HostBuffer::new(device, bytes)?),
        }
    }

    /// Agrees on a save in which this rank writes `bytes`, unless it is not `ready`; no other may be in progress. Returns
    /// the bytes of all ranks. The inner error is the same on all ranks, and the save is off: there is no space, or one of
    /// them cannot write. [`Saver::write`] must follow. Collective.
    pub fn begin(&mut self, step: u64, bytes: u64, ready: Result<()>) -> Result<Result<u64>> {
        let (mine, all) = (self.group.rank(), self.group.size());
        let name = match all {
            1 if !fs::exists(&folder::temporary_path(&self.dir, &folder::name(step))) => folder::name(step),
            // A rank of an earlier attempt that still runs must not write into this one's folder, nor do leftovers of one that
            // cannot be deleted belong there.
            _ => format!("{}-{}", folder::name(step), unique()),
        };
        let free = fs::free_bytes(&self.dir);
        let created = ready
            .and_then(|()| self.check_folder())
            .and_then(|()| check_space(&self.dir, bytes, free))
            .and_then(|()| if mine == 0 { folder::temporary(&self.dir, &name).map(drop) } else { Ok(()) });
        let folder = (mine == 0).then_some(name);
        let error = created.as_ref().err().map(Error::to_string);
        let said: Vec<Beginning> = self.exchange(&Beginning { bytes, free, folder, error })?;
        let name = said[0].folder.clone().unwrap_or_default();
        let temporary = folder::temporary_path(&self.dir, &name);
        let total = said.iter().map(|s| s.bytes).sum();
        let agreed = created
            .and_then(|()| first_error(said.iter().map(|s| s.error.as_ref())))
            // The folder is on one file system, so all parts must fit on what rank 0 sees.
            .and_then(|()| check_space(&self.dir, total, said[0].free));
        if let Err(e) = agreed {
            self.remove(&temporary);
            return Ok(Err(e));
        }
        self.running = Some(Running { step, temporary, phase: Phase::Begun });
        Ok(Ok(total))
    }

    /// An error if the folder is not the one that this saver has locked: nothing of a run may be written into that of another.
    fn check_folder(&self) -> Result<()> {
        if !self.lock.as_ref().is_some_and(|lock| lock.is_lost(&self.dir.join(LOCK))) {
            return Ok(());
        }
        let what = "the folder was removed or replaced while the run was using it; move it back, and the next save goes there";
        Err(Error::io_doing(&self.dir, "save", std::io::Error::new(std::io::ErrorKind::NotFound, what)))
    }

    /// Starts to write this rank's parts, with the state of the run on rank 0; or says that they could not be copied.
    pub fn write(&mut self, state: Value, staged: Result<Staged>) {
        let Some(running) = self.running.take() else { return };
        let Running { step, temporary, .. } = running;
        let phase = match staged.and_then(|staged| self.start_writing(step, &temporary, &state, staged)) {
            Ok(thread) => Phase::Writing(state, thread),
            Err(e) => Phase::Failed(e),
        };
        self.running = Some(Running { step, temporary, phase });
    }

    fn start_writing(
        &self,
        step: u64,
        temporary: &Path,
        state: &Value,
        staged: Staged,
    ) -> Result<JoinHandle<(Result<()>, HostBuffer)>> {
        let writer = Writer { rank: self.group.rank(), size: self.group.size() };
        let (temporary, shard_bytes) = (temporary.to_path_buf(), self.shard_bytes);
        // A rank alone needs nobody's word: it completes the checkpoint at once.
        let commit = (writer.size == 1).then(|| (self.dir.clone(), self.keep, state.clone()));
        let work = move || {
            let (written, buffer) = write_staged(&temporary, staged, shard_bytes, writer);
            let done = written.and_then(|written| match commit {
                None => write::write_index(&temporary, step, writer, written),
                Some((dir, keep, state)) => complete(&dir, keep, &temporary, step, state, written),
            });
            tracing::debug!(step, ok = done.is_ok(), "parts of a checkpoint are written");
            (done, buffer)
        };
        self.spawn(work)
    }

    /// Starts a thread that logs as this rank, which may itself be a thread.
    fn spawn<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
        let log = tracing::dispatcher::get_default(tracing::Dispatch::clone);
        std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || tracing::dispatcher::with_default(&log, work))
            .map_err(|e| Error::io_doing(&self.dir, "start the thread that writes checkpoints", e))
    }

    /// True while a thread of this rank writes.
    pub fn is_busy(&self) -> bool {
        match self.running.as_ref().map(|r| &r.phase) {
            Some(Phase::Writing(_, thread)) => !thread.is_finished(),
            Some(Phase::Committing(Ok(Some(thread)))) => !thread.is_finished(),
            _ => false,
        }
    }

    /// The step and result of a save that has ended, if one has. Collective if `all_idle`, which all ranks must agree on:
    /// no rank [`Saver::is_busy`]. Does not wait for a thread then.
    pub fn poll(&mut self, all_idle: bool) -> Result<Option<(u64, Result<()>)>> {
        if all_idle { self.advance() } else { Ok(None) }
    }

    /// Waits for the save in progress, if there is one; its step and result, the same on all ranks. Collective.
    pub fn wait(&mut self) -> Result<Option<(u64, Result<()>)>> {
        while self.running.is_some() {
            if let Some(ended) = self.advance()? {
                return Ok(Some(ended));
            }
        }
        Ok(None)
    }

    /// Waits until everything saved so far is on disk. Collective.
    pub fn finish(&mut self) -> Result<()> {
        self.wait()?.map_or(Ok(()), |(_, result)| result)
    }

    /// Waits for this rank's thread, exchanges results, and goes on to the next phase; the step and result after the last.
    fn advance(&mut self) -> Result<Option<(u64, Result<()>)>> {
        let Some(Running { step, temporary, phase }) = self.running.take() else { return Ok(None) };
        let (mine, state) = match phase {
            Phase::Begun => (Err(Error::Invalid("the save was begun and nothing was written".into())), None),
            Phase::Failed(e) => (Err(e), None),
            Phase::Writing(state, thread) => {
                let (done, buffer) =
                    thread.join().unwrap_or_else(|_| (Err(stopped(&self.dir)), Vec::new().into()));
                self.spare = Some(buffer);
                (done, Some(state))
            }
            Phase::Committing(thread) => {
                let join = |t: JoinHandle<Result<()>>| t.join().unwrap_or_else(|_| Err(stopped(&self.dir)));
                let done = thread.and_then(|t| t.map_or(Ok(()), join));
                let said: Vec<Option<String>> = self.exchange(&done.as_ref().err().map(Error::to_string))?;
                let done = done.and_then(|()| first_error(said.iter().map(Option::as_ref)));
                return Ok(Some((step, done.inspect_err(|_| self.remove(&temporary)))));
            }
        };
        let said: Vec<Option<String>> = self.exchange(&mine.as_ref().err().map(Error::to_string))?;
        match mine.and_then(|()| first_error(said.iter().map(Option::as_ref))) {
            Ok(()) if said.len() == 1 => Ok(Some((step, Ok(())))),
            Ok(()) => {
                let thread = match (self.group.rank(), state) {
                    (0, Some(state)) => {
                        let (dir, keep, ranks) = (self.dir.clone(), self.keep, said.len());
                        let folder = temporary.clone();
                        let work = move || {
                            let joined = write::join_indices(&folder, step, ranks);
                            joined.and_then(|all| complete(&dir, keep, &folder, step, state, all))
                        };
                        self.spawn(work).map(Some)
                    }
                    _ => Ok(None),
                };
                self.running = Some(Running { step, temporary, phase: Phase::Committing(thread) });
                Ok(None)
            }
            Err(e) => {
                self.remove(&temporary);
                Ok(Some((step, Err(e))))
            }
        }
    }

    /// Rank 0 removes the folder of a save that has failed. What cannot be removed is cleaned up at the next start.
    fn remove(&self, temporary: &Path) {
        if self.group.rank() == 0 && temporary.exists() {
            drop(fs::remove(temporary));
        }
    }

    /// What all ranks say, in rank order.
    fn exchange<T: Serialize + for<'a> Deserialize<'a>>(&self, mine: &T) -> Result<Vec<T>> {
        let broken = |e: serde_json::Error| Error::Invalid(format!("what ranks say of a save: {e}"));
        let text = serde_json::to_vec(mine).map_err(broken)?;
        let all = self.group.all_gather_bytes(&text, "ranks save together")?;
        all.iter().map(|text| serde_json::from_slice(text).map_err(broken)).collect()
    }
}

/// Creates, locks and cleans a folder of checkpoints.
fn open_folder(dir: &Path) -> Result<fs::FileLock> {
    if !dir.is_dir() {
        std::fs::create_dir_all(dir).map_err(|e| Error::io_doing(dir, "create the folder", e))?;
        fs::sync_folder(fs::parent(dir))?;
    }
    let lock = fs::FileLock::take(&dir.join(LOCK))?;
    folder::clean(dir)?;
    Ok(lock)
}

/// Writes this rank's parts, those in the buffer after the copies into it; returns the buffer.
fn write_staged(
    folder: &Path,
    staged: Staged,
    shard_bytes: u64,
    writer: Writer,
) -> (Result<WrittenParts>, HostBuffer) {
    let Staged { parts, mut buffer, readers } = staged;
    let mut end = 0;
    let mut ranges = Vec::with_capacity(parts.len());
    for (part, reader) in parts.iter().zip(&readers) {
        let start = end;
        end += if reader.is_none() { part.bytes() as usize } else { 0 };
        ranges.push(start..end);
    }
    let written = buffer.bytes().map_err(Error::from).and_then(|bytes| {
        if end > bytes.len() || readers.len() != parts.len() {
            return Err(Error::Invalid(format!("checkpoint: {end} bytes of parts in {} bytes", bytes.len())));
        }
        write::write_parts(folder, &parts, shard_bytes, writer, &|i, sink| match &readers[i] {
            Some(reader) => reader.read(sink),
            None => sink(&bytes[ranges[i].clone()]),
        })
    });
    (written, buffer)
}

/// Writes the manifest, makes the folder a checkpoint of `dir`, and prunes older ones.
fn complete(
    dir: &Path,
    keep: Option<usize>,
    temporary: &Path,
    step: u64,
    state: Value,
    written: WrittenParts,
) -> Result<()> {
    write::write_manifest(temporary, step, state, written)?;
    let target = folder::commit(dir, temporary, &folder::name(step))?;
    // It is a checkpoint now, whatever becomes of older ones.
    if let Some(Err(e)) = keep.map(|keep| folder::prune(dir, keep, &target)) {
        tracing::warn!(shown = true, "an old checkpoint stays: {e}");
    }
    Ok(())
}

fn stopped(dir: &Path) -> Error {
    let dir = dir.display();
    Error::Invalid(format!("{dir}: the thread that writes checkpoints stopped unexpectedly"))
}

/// The error of the first rank that has one.
fn first_error<'a>(said: impl Iterator<Item = Option<&'a String>>) -> Result<()> {
    match said.enumerate().find_map(|(rank, error)| Some((rank, error?))) {
        Some((rank, error)) => Err(Error::Invalid(format!("rank {rank}: {error}"))),
        None => Ok(()),
    }
}

/// A name that no other attempt has.
fn unique() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}

/// An error if there are more bytes to write than are free. The old checkpoints stay until the new one is complete.
fn check_space(dir: &Path, bytes: u64, free: Option<u64>) -> Result<()> {
    let bytes = bytes + SPARE_BYTES;
    let Some(free) = free.filter(|free| *free < bytes) else { return Ok(()) };
    let [bytes, free] = [bytes, free].map(|n| ferrotron_tensor::format_bytes(n as usize));
    let what = format!("the checkpoint takes {bytes} and {free} are free");
    Err(Error::io_doing(dir, "save", std::io::Error::new(std::io::ErrorKind::StorageFull, what)))
}

impl Drop for Saver {
    fn drop(&mut self) {
        // The other ranks may be gone, and an error cannot be returned from drop; call `finish` to complete a save.
        match self.running.take().map(|r| r.phase) {
            Some(Phase::Writing(_, thread)) => drop(thread.join()),
            Some(Phase::Committing(Ok(Some(thread)))) => drop(thread.join()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_does_not_fit_is_refused_before_it_is_written() {
        let check = |free| check_space(Path::new("run"), 1 << 10, free);
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
