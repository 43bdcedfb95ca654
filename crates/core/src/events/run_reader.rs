//! Follows the log of a run while it grows: the reader of every view.
//!
//! A line counts once its newline is there. A log that is replaced, as a resumed run does, or shortened is read anew; steps that
//! appear again replace what was logged of them (see [`RunHistory::steps`]).

use super::columns::StepColumns;
use super::history::RunHistory;
use super::scan::{self, LayerLoad};
use super::{FILE_NAME, Line};
use crate::error::{Error, Result};
use crate::fs;
use std::fs::{File, Metadata};
use std::io::{Read as _, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes that are read and parsed at a time.
const BLOCK: u64 = 8 << 20;
/// Blocks above this size are parsed by several threads.
const PARALLEL: usize = 1 << 20;
/// Longest line; a longer one is damaged.
const MAX_LINE: usize = 32 << 20;
/// Most folders that are looked at for runs.
const MAX_RUNS: usize = 1000;

/// What reading has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// Nothing new.
    Same,
    /// Further events.
    More,
    /// The log is another one, and was read from its beginning.
    Anew,
}

/// Follows one run.
#[derive(Debug)]
pub struct RunReader {
    dir: PathBuf,
    /// What the events read so far say.
    pub history: RunHistory,
    file: Option<(File, Identity)>,
    /// Bytes read.
    offset: u64,
    /// A last line without its newline.
    rest: Vec<u8>,
}

/// Tells a file from the one that replaces it.
type Identity = (u64, u64);

#[cfg(unix)]
fn identity(m: &Metadata) -> Identity {
    use std::os::unix::fs::MetadataExt;
    (m.dev(), m.ino())
}

#[cfg(not(unix))]
fn identity(m: &Metadata) -> Identity {
    let created = m.created().ok().and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
    (0, created.map_or(0, |d| d.as_nanos() as u64))
}

impl RunReader {
    /// The run in a folder. Nothing is read yet, and the log need not be there.
    pub fn new(dir: &Path) -> RunReader {
        let dir = if dir.file_name().is_some_and(|n| n == FILE_NAME) { parent(dir) } else { dir };
        RunReader { dir: dir.into(), history: RunHistory::default(), file: None, offset: 0, rest: Vec::new() }
    }

    /// Opens a run and reads all its events.
    pub fn open(dir: &Path) -> Result<RunReader> {
        let mut reader = RunReader::new(dir);
        fs::open_regular(&reader.dir.join(FILE_NAME))?;
        reader.poll()?;
        Ok(reader)
    }

    /// The run folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The name of the run: that of its folder.
    pub fn name(&self) -> String {
        let full = || self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone());
        let named =
            self.dir.file_name().map(ToOwned::to_owned).or_else(|| full().file_name().map(Into::into));
        named.map_or_else(|| "run".into(), |n| n.to_string_lossy().into_owned())
    }

    /// Reads what has been appended since the last call. A log that is not there (any more) is empty.
    pub fn poll(&mut self) -> Result<Read> {
        let mut read = Read::Same;
        loop {
            let (got, more) = self.poll_block()?;
            if got == Read::Anew || read == Read::Same {
                read = got;
            }
            if !more {
                return Ok(read);
            }
        }
    }

    /// [`RunReader::poll`] that reads a block of the log at most, and says whether there is more: for views that show what they have
    /// of a long log while it is read.
    pub fn poll_block(&mut self) -> Result<(Read, bool)> {
        let path = self.dir.join(FILE_NAME);
        let found = match std::fs::metadata(&path) {
            Ok(m) if m.is_file() => Some(m),
            _ => None,
        };
        let kept = self.offset - self.rest.len() as u64;
        let mut read = Read::Same;
        if self
            .file
            .as_ref()
            .is_some_and(|(_, id)| found.as_ref().is_none_or(|m| identity(m) != *id || m.len() < kept))
        {
            *self = RunReader::new(&self.dir);
            read = Read::Anew;
        }
        let Some(found) = found else { return Ok((read, false)) };
        if self.file.is_none() {
            let file = fs::open_regular(&path)?;
            let id = identity(&file.metadata().map_err(Error::io(&path))?);
            self.file = Some((file, id));
        }
        if found.len() < self.offset {
            // Only the half-written last line was taken back, after a failed write.
            self.offset -= self.rest.len() as u64;
            self.rest.clear();
        }
        let Some((file, _)) = self.file.as_mut().filter(|_| self.offset < found.len()) else {
            return Ok((read, false));
        };
        let mut block = std::mem::take(&mut self.rest);
        let before = block.len();
        let seek = file.seek(SeekFrom::Start(self.offset));
        let got = seek.and_then(|_| file.take(BLOCK).read_to_end(&mut block)).map_err(Error::io(&path))?;
        if got == 0 {
            self.rest = block;
            return Ok((read, false));
        }
        self.offset += got as u64;
        let end = block[before..].iter().rposition(|b| *b == b'\n').map_or(0, |i| before + i + 1);
        self.rest = block.split_off(end);
        if self.rest.len() > MAX_LINE {
            self.history.unreadable += 1;
            self.rest.clear();
        }
        if end > 0 {
            parse(&block, &mut self.history);
            read = if read == Read::Same { Read::More } else { read };
        }
        Ok((read, self.offset < found.len()))
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Events in the order of the log.
enum ParsedEvents {
    Rows(StepColumns),
    Loads(u64, Vec<LayerLoad>),
    Event(Box<Line>),
    Unreadable,
}

/// Adds whole lines to a history.
fn parse(text: &[u8], history: &mut RunHistory) {
    let threads = match text.len() {
        0..=PARALLEL => 1,
        _ => std::thread::available_parallelism().map_or(1, usize::from).min(8),
    };
    // Parts end with a line.
    let mut parts = Vec::new();
    let mut from = 0;
    for i in 1..=threads {
        let at = (text.len() * i / threads).max(from);
        let to = text[at..].iter().position(|b| *b == b'\n').map_or(text.len(), |n| at + n + 1);
        parts.push(&text[from..to]);
        from = to;
    }
    let pieces: Vec<ParsedEvents> = if threads == 1 {
        parse_part(text)
    } else {
        std::thread::scope(|s| {
            let all: Vec<_> = parts.iter().map(|part| (*part, s.spawn(|| parse_part(part)))).collect();
            // A thread that ended badly has done nothing that cannot be done here.
            all.into_iter().flat_map(|(part, t)| t.join().unwrap_or_else(|_| parse_part(part))).collect()
        })
    };
    for piece in pieces {
        match piece {
            ParsedEvents::Rows(rows) => history.append_rows(rows),
            ParsedEvents::Loads(step, layers) => history.append_loads(step, layers),
            ParsedEvents::Event(line) => history.append(*line),
            ParsedEvents::Unreadable => history.unreadable += 1,
        }
    }
}

fn parse_part(text: &[u8]) -> Vec<ParsedEvents> {
    let (mut out, mut rows, mut loads) = (Vec::new(), StepColumns::default(), Vec::new());
    let flush = |rows: &mut StepColumns, out: &mut Vec<ParsedEvents>| {
        if !rows.is_empty() {
            out.push(ParsedEvents::Rows(std::mem::take(rows)));
        }
    };
    for line in text.split(|b| *b == b'\n') {
        if scan::step_line(line, &mut rows, &mut loads) {
            if let [.., before, last] = rows.step[..]
                && last <= before
            {
                // Steps again: the row begins a piece of its own.
                let row = rows.split_last();
                flush(&mut rows, &mut out);
                rows = row;
            }
            if !loads.is_empty() {
                let step = rows.step.last().copied().unwrap_or(0);
                flush(&mut rows, &mut out);
                out.push(ParsedEvents::Loads(step, std::mem::take(&mut loads)));
            }
        } else if !line.trim_ascii().is_empty() {
            flush(&mut rows, &mut out);
            out.push(match serde_json::from_slice(line) {
                Ok(line) => ParsedEvents::Event(Box::new(line)),
                Err(_) => ParsedEvents::Unreadable,
            });
        }
    }
    flush(&mut rows, &mut out);
    out
}

/// True if a folder has a log of events.
pub fn is_run(dir: &Path) -> bool {
    dir.join(FILE_NAME).is_file()
}

/// The run in `path`, or the runs in the folders directly in it, by name.
pub fn runs_in(path: &Path) -> Vec<PathBuf> {
    if is_run(path) {
        return vec![path.into()];
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|e| e.path());
    let mut runs: Vec<PathBuf> = entries.filter(|p| is_run(p)).take(MAX_RUNS).collect();
    runs.sort();
    runs
}
