//! The log file: its writer, and a reader of the whole file.
//!
//! The writer appends whole lines. After an interruption [`EventLog::resume`] drops what lies beyond the resumed
//! step, so that the log of an interrupted and resumed run reads like that of one run.

use super::{Event, FILE_NAME, Line};
use crate::error::{Error, Result};
use crate::fs;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The writer. Each event is one line, written at once.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines in the file.
    len: u64,
    /// Numbers of damaged lines that were dropped when the log was resumed, from 1.
    damaged: Vec<usize>,
}

impl EventLog {
    /// Starts a new log, replacing an old one. `path` is the log or the run folder it lies in.
    pub fn create(path: &Path) -> Result<EventLog> {
        let path = &in_folder(path);
        fs::write_atomic(path, b"")?;
        EventLog::append(path, 0, Vec::new())
    }

    /// Continues a log at the state after `step` steps: what was logged of later steps is dropped, and so is the
    /// end of the interrupted run, a half-written last line and damaged lines, which [`EventLog::damaged`] lists.
    /// Nothing else is touched; the start stays the only start. A missing log begins empty, and so does one resumed at
    /// step 0.
    pub fn resume(path: &Path, step: u64) -> Result<EventLog> {
        let path = &in_folder(path);
        if step == 0 || !fs::exists(path) {
            return EventLog::create(path);
        }
        let old = fs::read_regular(path)?;
        let (mut kept, mut damaged) = (Vec::with_capacity(old.len()), Vec::new());
        for (i, line) in old.split_inclusive(|b| *b == b'\n').enumerate() {
            let keep = match serde_json::from_slice::<Line>(line) {
                Ok(line) => line.event.step() <= step && !matches!(line.event, Event::RunEnd(_)),
                Err(_) => {
                    damaged.extend((!is_torn(line)).then_some(i + 1));
                    false
                }
            };
            if keep {
                kept.extend_from_slice(line);
                if !line.ends_with(b"\n") {
                    kept.push(b'\n');
                }
            }
        }
        if kept != old || !fs::is_regular_file(path) {
            // A new file in its place: an interruption here leaves the old log or the new one.
            fs::write_atomic(path, &kept)?;
        }
        EventLog::append(path, kept.len() as u64, damaged)
    }

    fn append(path: &Path, len: u64, damaged: Vec<usize>) -> Result<EventLog> {
        Ok(EventLog { path: path.into(), file: fs::open_append(path)?, len, damaged })
    }

    /// Numbers of the damaged lines that [`EventLog::resume`] dropped, from 1.
    pub fn damaged(&self) -> &[usize] {
        &self.damaged
    }

    /// Appends an event, stamped with the time. If it cannot be written whole, the log stays as it was.
    pub fn write(&mut self, event: &Event) -> Result<()> {
        self.write_line(&Line::now(event.clone()))
    }

    /// [`EventLog::write`] with a time of its own.
    pub fn write_line(&mut self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_vec(line).map_err(|e| io(&self.path, e.into()))?;
        text.push(b'\n');
        self.file.write_all(&text).map_err(|e| {
            // On a full disk part of the line may be there; it must not become part of the next.
            drop(self.file.set_len(self.len));
            Error::io_doing(&self.path, "write", e)
        })?;
        self.len += text.len() as u64;
        Ok(())
    }

    /// Syncs the log to disk; a checkpoint does this before it counts as complete.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| io(&self.path, source))
    }
}

/// A line without its end: the writer was stopped there. A blank line is no damage either.
fn is_torn(line: &[u8]) -> bool {
    !line.ends_with(b"\n") || line.trim_ascii().is_empty()
}

/// Reads a log, given itself or its run folder. A half-written last line is left out; any other damage is an error that
/// names the line.
pub fn read(path: &Path) -> Result<Vec<Line>> {
    let path = &in_folder(path);
    parse(path, &fs::read_regular(path)?)
}

/// Reads the text of a log; `path` is what errors call it.
pub fn parse(path: &Path, text: &[u8]) -> Result<Vec<Line>> {
    let mut out = Vec::new();
    for (i, line) in text.split_inclusive(|b| *b == b'\n').enumerate() {
        match serde_json::from_slice(line) {
            Ok(line) => out.push(line),
            Err(_) if is_torn(line) => {}
            Err(e) => {
                let what = format!("line {} is not an event ({e}); remove it to read the rest", i + 1);
                return Err(Error::damaged(path, what));
            }
        }
    }
    Ok(out)
}

fn in_folder(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(FILE_NAME) } else { path.into() }
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { path: path.into(), source }
}
