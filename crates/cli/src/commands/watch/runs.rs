//! The runs that are watched: those named, and those in folders that are named.

use crate::output::UsageError;
use anyhow::Result;
use ferrotron_core::events::{self, Read, RunHistory, RunReader};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often folders are searched for new runs.
const SEARCH: Duration = Duration::from_secs(2);

/// One run.
pub struct WatchedRun {
    reader: RunReader,
    /// The folder's name, or its path where names are not unique.
    pub name: String,
    /// Rises when its events have changed.
    pub revision: u64,
    /// There is more of its log than has been read.
    reading: bool,
    /// Why its log cannot be read.
    pub error: Option<String>,
}

impl WatchedRun {
    /// What its events say.
    pub fn history(&self) -> &RunHistory {
        &self.reader.history
    }

    /// Its folder.
    pub fn dir(&self) -> &std::path::Path {
        self.reader.dir()
    }

    /// Its state in one word.
    pub fn state(&self) -> &'static str {
        match &self.error {
            Some(_) => "unreadable",
            None if self.reading => "reading",
            None => self.history().state(now()).name(),
        }
    }
}

/// All runs.
pub struct WatchedRuns {
    paths: Vec<PathBuf>,
    /// In the order in which they were named and found.
    pub runs: Vec<WatchedRun>,
    searched: Option<Instant>,
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

impl WatchedRuns {
    /// The runs of these paths: run folders, or folders of runs. They are read by [`WatchedRuns::poll`].
    pub fn new(paths: Vec<PathBuf>) -> Result<WatchedRuns> {
        for path in &paths {
            if !path.exists() {
                let what = format!("there is no run folder {}", path.display());
                let hint = "name the folder of a run, as `train` prints it, or a folder of runs";
                return Err(UsageError::new(what).hint(hint).into());
            }
        }
        Ok(WatchedRuns { paths, runs: Vec::new(), searched: None })
    }

    /// Reads what is new; true if anything is. The first call reads everything.
    pub fn poll(&mut self) -> bool {
        let mut changed = false;
        loop {
            let (new, more) = self.poll_block();
            changed |= new;
            if !more {
                return changed;
            }
        }
    }

    /// [`WatchedRuns::poll`] that reads a block of each run at most: whether anything is new, and whether there is more to read.
    pub fn poll_block(&mut self) -> (bool, bool) {
        let (mut changed, mut any_more) = (self.search(), false);
        for run in &mut self.runs {
            let (new, more, error) = match run.reader.poll_block() {
                Ok((read, more)) => (read != Read::Same, more, None),
                Err(e) => (false, false, Some(e.to_string())),
            };
            any_more |= more;
            if new || more != run.reading || error != run.error {
                (run.revision, run.reading, run.error) = (run.revision + 1, more, error);
                changed = true;
            }
        }
        (changed, any_more)
    }

    /// Looks for new runs now and then.
    fn search(&mut self) -> bool {
        if self.searched.is_some_and(|t| t.elapsed() < SEARCH) {
            return false;
        }
        self.searched = Some(Instant::now());
        let before = self.runs.len();
        for path in &self.paths {
            let mut found = events::runs_in(path);
            if found.is_empty() && path.join("config.toml").is_file() {
                found.push(path.clone()); // it has not logged anything yet
            }
            for dir in found {
                let reader = RunReader::new(&dir);
                if self.runs.iter().all(|run| run.dir() != reader.dir()) {
                    self.runs.push(WatchedRun {
                        name: reader.name(),
                        reader,
                        revision: 0,
                        reading: false,
                        error: None,
                    });
                }
            }
        }
        let new = self.runs.len() > before;
        if new {
            let names: Vec<String> = self.runs.iter().map(|r| r.reader.name()).collect();
            for run in &mut self.runs {
                let own = run.reader.name();
                let unique = names.iter().filter(|n| **n == own).count() == 1;
                run.name = if unique { own } else { run.reader.dir().display().to_string() };
            }
        }
        new
    }
}
