//! The folder of a run: its lock, what a killed run left in it, and the run that `--fresh` replaces.
//!
//! A replaced run is never deleted before its successor has a checkpoint. It is moved, by renames, into `.replaced`, its
//! checkpoints last; the next start moves it back unless a checkpoint of the new run is there:
//!
//! | a crash leaves | the next start |
//! |---|---|
//! | `.replaced` without `checkpoints` | moves its files back: `checkpoints` is still the old run's |
//! | `.replaced/checkpoints`, and no checkpoint of the new run | moves everything back |
//! | `.replaced/checkpoints`, and a checkpoint of the new run | deletes `.replaced` |

use super::gemm_choices::GemmTable;
use crate::config::{Resolved, STORED_CONFIG};
use crate::{Error, Result, checkpoint, events, fs};
use ferrotron_comm::Communicator;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

/// Folder of checkpoints inside a run folder.
pub const CHECKPOINTS: &str = "checkpoints";
/// The resolved recipe inside a run folder.
pub const CONFIG: &str = STORED_CONFIG;
/// The text of the run's `data.chat_template` inside a run folder: it stays with the run where the file does not.
pub const CHAT_TEMPLATE: &str = "chat-template.jinja";
/// Bytes of that file that are read at most.
const MAX_TEMPLATE: u64 = 64 << 20;
/// The run that `--fresh` replaces, until the new one has a checkpoint.
const REPLACED: &str = ".replaced";
/// The same while it is being deleted.
const DOOMED: &str = ".tmp-replaced";
/// Folder of what each rank logged.
pub const LOGS: &str = "logs";
/// The GEMM algorithms of the run.
const GEMMS: &str = "gemm-algorithms.json";
/// Bytes of that file that are read at most.
const MAX_GEMMS: u64 = 64 << 20;
const LOCK: &str = ".lock";

/// True if a process is writing the run in `dir`.
pub fn is_running(dir: &Path) -> bool {
    fs::FileLock::is_held(&dir.join(LOCK))
}

/// Keeps runs out of the folder `dir` until the lock is dropped.
pub fn lock_run(dir: &Path) -> Result<fs::FileLock> {
    fs::FileLock::take(&dir.join(LOCK))
}

/// Bytes of the lock file that are read at most.
const MAX_LOCK: u64 = 4096;
/// Attempts to see what rank 0 has written, and the pause between them: network file systems show changes of other hosts late.
const ATTEMPTS: usize = 30;
const PAUSE: Duration = Duration::from_millis(500);

/// Fails unless all ranks see the folder `dir` that rank 0 has locked, where each writes its part of checkpoints. Collective.
pub(super) fn require_shared(dir: &Path, ranks: &Communicator) -> Result<()> {
    let lock = || {
        // Opening a folder asks the server of a network file system what is in it.
        drop(std::fs::read_dir(dir));
        fs::read_limited(&dir.join(LOCK), MAX_LOCK).unwrap_or_default()
    };
    let own = if ranks.rank() == 0 { lock() } else { Vec::new() };
    let holder = ranks.all_gather_bytes(&own, "the run folder is locked")?.swap_remove(0);
    for attempt in 1.. {
        let sees = u8::from(fs::is_regular_file(&dir.join(LOCK)) && lock() == holder);
        let all = ranks.all_gather_bytes(&[sees], "all ranks see the run folder")?;
        let Some(blind) = all.iter().position(|sees| sees != &[1]) else { break };
        if attempt == ATTEMPTS {
            let what = format!(
                "{}: rank {blind} does not see the run folder that rank 0 has locked{}; keep it on a file system that all hosts share",
                dir.display(),
                fs::host_name()
            );
            return Err(Error::Invalid(what));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// A run folder that this process has locked.
pub(super) struct RunFolder {
    dir: PathBuf,
    /// A replaced run is in `.replaced`.
    has_replaced: bool,
    /// A run that was being replaced is back.
    pub(super) restored: bool,
    /// What the user should know.
    pub(super) notes: Vec<String>,
    /// Deletes the replaced run.
    deletion: Option<JoinHandle<()>>,
    _lock: fs::FileLock,
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        self.wait_for_deletion();
    }
}

impl RunFolder {
    /// Creates and locks the folder, removes what a killed run left half-written, and moves back a run that was being
    /// replaced, unless the one that replaces it `goes_on`.
    pub(super) fn open(dir: &Path, goes_on: bool) -> Result<RunFolder> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io_doing(dir, "create the run folder", e))?;
        let checkpoints = dir.join(CHECKPOINTS);
        if checkpoints.symlink_metadata().is_ok_and(|m| m.is_symlink()) {
            return Err(Error::Invalid(format!(
                "{}: is a link, and checkpoints would be written and deleted where it points; choose another --out, or put \
                 the whole run folder there",
                checkpoints.display()
            )));
        }
        let lock = lock_run(dir)?;
        let mut folder = RunFolder {
            dir: dir.to_path_buf(),
            has_replaced: false,
            restored: false,
            notes: Vec::new(),
            deletion: None,
            _lock: lock,
        };
        folder.remove_leftovers()?;
        folder.recover_replaced(goes_on)?;
        Ok(folder)
    }

    fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.join(name)
    }

    fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
        let list = |e| Error::io_doing(dir, "list the folder", e);
        let entries = std::fs::read_dir(dir).map_err(list)?;
        entries.map(|e| e.map(|e| e.path())).collect::<std::io::Result<_>>().map_err(list)
    }

    /// Removes temporary files of this program. Nobody else writes here while the lock is held.
    fn remove_leftovers(&self) -> Result<()> {
        for path in Self::entries(&self.dir)? {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            let of = name.strip_prefix('.').and_then(|n| n.strip_suffix(fs::TEMPORARY));
            // Earlier versions wrote the log to events.jsonl.new.
            let old_log = name.strip_suffix(".new") == Some(events::FILE_NAME);
            if of.is_some_and(is_run_file) || old_log || name == DOOMED {
                fs::remove(&path)?;
            }
        }
        Ok(())
    }

    /// Is there anything of a run here?
    fn has_run(&self) -> Result<bool> {
        let begun = checkpoint::latest(&self.at(CHECKPOINTS))?.is_some();
        Ok(begun || [events::FILE_NAME, CONFIG].iter().any(|f| fs::exists(&self.at(f))))
    }

    /// Moves the run in this folder aside; it stays until [`RunFolder::new_run_is_saved`]. `checkpoints` must exist and
    /// nobody may use it.
    pub(super) fn set_aside(&mut self) -> Result<()> {
        if !self.has_run()? {
            return Ok(());
        }
        let replaced = self.at(REPLACED);
        std::fs::create_dir(&replaced).map_err(|e| Error::io_doing(&replaced, "create the folder", e))?;
        fs::sync_folder(&self.dir)?;
        for path in Self::entries(&self.dir)? {
            let Some(name) = path.file_name().filter(|n| n.to_str().is_some_and(is_run_file)) else {
                continue;
            };
            fs::rename(&path, &replaced.join(name))?;
        }
        // Last, so that checkpoints in place are the old run's as long as none are in `.replaced`.
        fs::rename(&self.at(CHECKPOINTS), &replaced.join(CHECKPOINTS))?;
        fs::sync_folder(&replaced)?;
        fs::sync_folder(&self.dir)?;
        self.has_replaced = true;
        let kept = format!("the run that was here is in {} until the first checkpoint", replaced.display());
        self.notes.push(kept);
        Ok(())
    }

    /// Where the replaced run is, as long as it takes up space.
    pub(super) fn replaced(&self) -> Option<PathBuf> {
        self.has_replaced.then(|| self.at(REPLACED))
    }

    /// The new run has a checkpoint, or has ended well without one: the replaced run is deleted, on a thread. It may be
    /// terabytes on a network file system, and the other ranks wait for this one. What is left of it when the process
    /// is killed is removed at the next start.
    pub(super) fn new_run_is_saved(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.has_replaced) {
            return Ok(());
        }
        self.wait_for_deletion();
        let doomed = self.at(DOOMED);
        fs::rename(&self.at(REPLACED), &doomed)?;
        let delete = move || {
            if let Err(e) = fs::remove(&doomed) {
                tracing::warn!("the replaced run: {e}");
            }
        };
        let thread = std::thread::Builder::new().name("delete run".into()).spawn(delete);
        let start = |e| Error::io_doing(&self.dir, "start a thread that deletes the replaced run", e);
        self.deletion = Some(thread.map_err(start)?);
        Ok(())
    }

    fn wait_for_deletion(&mut self) {
        if let Some(thread) = self.deletion.take() {
            // It does not panic, and says itself what failed.
            _ = thread.join();
        }
    }

    fn recover_replaced(&mut self, goes_on: bool) -> Result<()> {
        let (replaced, checkpoints) = (self.at(REPLACED), self.at(CHECKPOINTS));
        if !replaced.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            return Ok(());
        }
        let old = replaced.join(CHECKPOINTS);
        if fs::exists(&old) {
            if checkpoint::latest(&checkpoints)?.is_some() {
                self.has_replaced = true;
                self.new_run_is_saved()?;
                self.wait_for_deletion();
                return Ok(());
            }
            if goes_on {
                self.has_replaced = true;
                return Ok(());
            }
            if fs::exists(&checkpoints) {
                fs::remove(&checkpoints)?;
            }
            fs::rename(&old, &checkpoints)?;
        }
        for path in Self::entries(&replaced)? {
            let Some(name) = path.file_name() else { continue };
            let to = self.at(name);
            // A folder does not replace another.
            if (name == LOGS || name == events::TENSORBOARD) && fs::exists(&to) {
                fs::remove(&to)?;
            }
            fs::rename(&path, &to)?;
        }
        std::fs::remove_dir(&replaced).map_err(|e| Error::io_doing(&replaced, "delete", e))?;
        fs::sync_folder(&self.dir)?;
        self.restored = true;
        let back = "the run that --fresh was replacing is back: the new one had saved no checkpoint";
        self.notes.push(format!("{}: {back}", self.dir.display()));
        Ok(())
    }

    /// The GEMM algorithms of the run that is here. A damaged file is noted and ignored.
    pub(super) fn gemm_table(&mut self) -> Option<GemmTable> {
        let path = self.at(GEMMS);
        if !fs::exists(&path) {
            return None;
        }
        let read = fs::read_limited(&path, MAX_GEMMS).map_err(|e| e.to_string());
        let table = read.and_then(|bytes| {
            GemmTable::from_json(&bytes).map_err(|what| format!("{}: {what}", path.display()))
        });
        table.map_err(|what| self.notes.push(format!("{what}; those of the checkpoint are used"))).ok()
    }

    pub(super) fn write_gemm_table(&self, table: &GemmTable) -> Result<()> {
        fs::write_atomic(&self.at(GEMMS), &table.to_json()?)
    }

    /// Writes the configuration of a run that begins or goes on after `step` steps. One that was there before and differs is
    /// kept as `config-until-STEP.toml`.
    pub(super) fn write_config(&self, resolved: &Resolved, step: u64) -> Result<()> {
        let (path, text) = (self.at(CONFIG), resolved.config.to_toml());
        if step > 0 && fs::is_regular_file(&path) {
            let old = fs::read_regular(&path)?;
            if old == text.as_bytes() {
                return Ok(());
            }
            // If it is there already, nothing was saved under the configuration in between.
            let until = self.at(format!("config-until-{step:08}.toml"));
            if !fs::exists(&until) {
                fs::write_atomic(&until, &old)?;
            }
        }
        fs::write_atomic(&path, text.as_bytes())
    }

    /// Keeps the text of the chat template that `data.chat_template` names. Data that are tokenized already do not need the file:
    /// where it is gone, what was kept of it stays.
    pub(super) fn write_chat_template(&self, named: Option<&str>) -> Result<()> {
        match named.map(Path::new).filter(|path| path.is_file()) {
            Some(path) => fs::write_atomic(&self.at(CHAT_TEMPLATE), &fs::read_limited(path, MAX_TEMPLATE)?),
            None => Ok(()),
        }
    }
}

/// A file that a run writes beside its checkpoints.
fn is_run_file(name: &str) -> bool {
    let segment = name.strip_prefix("config-until-").and_then(|n| n.strip_suffix(".toml"));
    name == events::FILE_NAME
        || name == CONFIG
        || name == CHAT_TEMPLATE
        || name == GEMMS
        || name == LOGS
        || name == events::TENSORBOARD
        || segment.is_some_and(|step| !step.is_empty() && step.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests;
