//! TensorBoard event files, written from the events of a run.
//!
//! The files are a view of `events.jsonl`: a writer begins with a new file that holds the metrics of every event in the log,
//! and removes the files of earlier writers. So a resumed run has no step twice, and one that asks for TensorBoard later has
//! its beginning. A TensorBoard that follows the folder reads files in the order of their names, drops at the start of a
//! session what it has of later steps, and goes on with the new file.

mod encode;

use super::{Event, FILE_NAME, Line, Metrics};
use crate::{Error, Result, fs};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The folder of event files inside a run folder.
pub const TENSORBOARD: &str = "tensorboard";
/// What TensorBoard looks for in the name of a file.
const PREFIX: &str = "events.out.tfevents.";
const SUFFIX: &str = ".ferrotron";
/// The history being written.
const UNFINISHED: &str = ".history.tmp";
/// Bytes collected before a write.
const CHUNK: usize = 1 << 20;

/// Writes event files.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
    /// Bytes of whole records in the file.
    len: u64,
    encoder: Encoder,
}

/// Turns lines of a log into records.
#[derive(Debug, Default)]
struct Encoder {
    /// The newest training step.
    step: u64,
}

impl TensorBoard {
    /// Writes the metrics in the log of the run folder `run` to a new event file in `dir`, removes older files of this
    /// program there, and leaves the new one open for [`TensorBoard::write`].
    pub fn create(run: &Path, dir: &Path) -> Result<TensorBoard> {
        if dir.symlink_metadata().is_ok_and(|m| m.is_symlink()) {
            let what = "is a link, and event files would be written and deleted where it points; remove it";
            return Err(Error::Invalid(format!("{}: {what}", dir.display())));
        }
        std::fs::create_dir_all(dir).map_err(|e| Error::io_doing(dir, "create the folder", e))?;
        let log = fs::read_regular(&run.join(FILE_NAME))?;
        let unfinished = dir.join(UNFINISHED);
        if fs::exists(&unfinished) {
            fs::remove(&unfinished)?;
        }
        let mut file = fs::create_new(&unfinished)?;
        let (len, encoder) = write_history(&mut file, &log).map_err(|e| {
            // The first error is the one to report; the next start removes the file as well.
            drop(fs::remove(&unfinished));
            Error::io_doing(&unfinished, "write", e)
        })?;
        let older = own_files(dir)?;
        let path = dir.join(format!("{PREFIX}{:010}{SUFFIX}", next_time(&older)));
        fs::rename(&unfinished, &path)?;
        for (_, old) in older {
            fs::remove(&old)?;
        }
        let file = fs::open_append(&path)?;
        Ok(TensorBoard { path, file, len, encoder })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the metrics of an event. If they cannot be written whole, the file stays as it was.
    pub fn write(&mut self, line: &Line) -> Result<()> {
        let mut out = Vec::new();
        self.encoder.line(&mut out, line);
        self.file.write_all(&out).map_err(|e| {
            // On a full disk part of a record may be there; nothing after it could be read.
            drop(self.file.set_len(self.len));
            Error::io_doing(&self.path, "write", e)
        })?;
        self.len += out.len() as u64;
        Ok(())
    }
}

impl Encoder {
    fn line(&mut self, out: &mut Vec<u8>, line: &Line) {
        let (time, step) = (line.time, line.event.step());
        if let Event::Step(_) = line.event {
            // Steps are done again after a rollback or a restart.
            if step <= self.step {
                encode::record(out, &encode::session_start(time, step));
            }
            self.step = step;
        }
        let metrics = Metrics::of(&line.event);
        if metrics != Metrics::default() {
            encode::record(out, &encode::summary(time, step, &metrics));
        }
    }
}

/// Writes the metrics in the text of a log; what is damaged is left out.
fn write_history(file: &mut File, log: &[u8]) -> std::io::Result<(u64, Encoder)> {
    let (mut encoder, mut out, mut len) = (Encoder::default(), Vec::new(), 0);
    let mut lines = log
        .split_inclusive(|b| *b == b'\n')
        .filter_map(|l| serde_json::from_slice::<Line>(l).ok())
        .peekable();
    let begin = lines.peek().map_or(0.0, |line| line.time);
    encode::record(&mut out, &encode::file_version(begin));
    encode::record(&mut out, &encode::session_start(begin, 0));
    for line in lines {
        encoder.line(&mut out, &line);
        if out.len() >= CHUNK {
            file.write_all(&out)?;
            len += out.len() as u64;
            out.clear();
        }
    }
    file.write_all(&out)?;
    Ok((len + out.len() as u64, encoder))
}

/// Event files of this program, with the times in their names.
fn own_files(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let list = |e| Error::io_doing(dir, "list the folder", e);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(list)? {
        let path = entry.map_err(list)?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let time =
            name.strip_prefix(PREFIX).and_then(|n| n.strip_suffix(SUFFIX)).and_then(|n| n.parse().ok());
        files.extend(time.map(|time| (time, path)));
    }
    Ok(files)
}

/// The time in the name of a new file, which must come after those of `older`.
fn next_time(older: &[(u64, PathBuf)]) -> u64 {
    let newest = older.iter().map(|(time, _)| time.saturating_add(1)).max();
    (super::now() as u64).max(newest.unwrap_or(0))
}
