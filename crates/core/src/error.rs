//! Errors of recipes, data, models, checkpoints and training.

use std::path::{Path, PathBuf};

/// Errors of this crate. Each names the thing and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An invalid key, value or combination of keys, of a recipe or of `--set`.
    #[error("{}{what}", place(file, *line, key))]
    Config {
        /// The recipe file, or "--set"; `None` for a built-in default.
        file: Option<String>,
        /// Line in the file, from 1.
        line: Option<usize>,
        /// The key, `train.steps`.
        key: Option<String>,
        /// What is wrong and what to change, in one sentence.
        what: String,
        /// A suggestion, such as a key of similar spelling.
        hint: Option<String>,
    },
    /// An invalid request.
    #[error("{0}")]
    Invalid(String),
    /// An I/O error; the source says which operation failed and why.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file whose contents are invalid.
    #[error("{}: {what}", path.display())]
    Damaged {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it, and where.
        what: String,
    },
    /// A missing file, or a missing part of one.
    #[error("{}: {what}", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
    /// Another process works in a folder.
    #[error("{}: {holder} is writing here; wait for it to end or choose another folder", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
        /// The process, `process 123 on host`.
        holder: String,
    },
    /// Training diverged: loss or gradient norm is not finite.
    #[error(
        "step {step} has loss {loss} and gradient norm {grad_norm}; lower optimizer.lr, lengthen schedule.warmup, or go on from an earlier checkpoint"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its gradient norm.
        grad_norm: f64,
    },
    /// The same result again when the step was run again: data or software, and `fault.on_bad_step` is to stop.
    #[error(
        "step {step} is rejected: {why}; run again it gave the same bits, so the data or the program is the cause, not the hardware; \
         {}",
        saved_as(replay)
    )]
    InvalidResult {
        /// The step.
        step: u64,
        /// What is wrong with it.
        why: String,
        /// Where its batch and the state before it were saved.
        replay: Option<PathBuf>,
    },
    /// Runs of the same steps gave other bits again and again.
    #[error(
        "rank {rank} ({place}) is suspected of a persistent hardware fault: {why}; start the job again without that machine"
    )]
    FaultyHardware {
        /// The rank.
        rank: usize,
        /// Its host and device.
        place: String,
        /// What was found.
        why: String,
    },
    /// An invalid pipeline schedule, found before it runs.
    #[error("pipeline rank {rank}, step {step} ({operation}): {what}")]
    Schedule {
        /// The pipeline rank.
        rank: usize,
        /// Index in the rank's list of operations, from 0.
        step: usize,
        /// The operation.
        operation: String,
        /// What is wrong with it.
        what: String,
    },
    /// A step ran out of device memory.
    #[error("{table}\n{advice}")]
    OutOfMemory {
        /// The failed allocation, and memory by category. (Not the source of the error: it is shown here.)
        table: ferrotron_tensor::Error,
        /// What to change.
        advice: String,
    },
    /// The memory of a machine is too small for a recipe; found before anything is allocated.
    #[error("not enough memory: {advice}")]
    DoesNotFit {
        /// Bytes needed by the ranks of this machine.
        needed: usize,
        /// Bytes it has.
        memory: usize,
        /// Both in words, and what to change.
        advice: String,
    },
    /// The job ends here, and may go on if it, or this process, is started again.
    #[error("{0}; start it again to go on from the newest checkpoint")]
    Restart(String),
    /// Nothing has failed: the processes of the job change places, so that others verify the last steps.
    #[error("processes change ranks to verify steps")]
    ChangeRanks,
    /// This process must not take part in its job any more.
    #[error("{0}")]
    Excluded(String),
    /// An error of tensors, kernels or communication.
    #[error(transparent)]
    Tensor(#[from] ferrotron_tensor::Error),
}

impl From<ferrotron_comm::Error> for Error {
    fn from(e: ferrotron_comm::Error) -> Error {
        Error::Tensor(e.into())
    }
}

/// Advice where the operating system opens no more files.
const TOO_MANY_FILES: &str = "; raise the limit of open files (ulimit -n)";

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Wraps an operating-system error with the path it is about; made for `map_err(Error::io(path))`.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        move |source| Error::Io { path: path.as_ref().to_path_buf(), source }
    }

    /// An [`Error::Io`] that says which operation failed (`"write"`, `"rename to …"`), with advice where space or
    /// permissions are the cause.
    pub fn io_doing(path: &Path, doing: &str, source: std::io::Error) -> Error {
        use rustix::io::Errno;
        use std::io::ErrorKind as K;
        let hint = match source.kind() {
            _ if matches!(Errno::from_io_error(&source), Some(Errno::MFILE | Errno::NFILE)) => TOO_MANY_FILES,
            K::StorageFull | K::QuotaExceeded => "; free some space there or choose another folder",
            K::PermissionDenied | K::ReadOnlyFilesystem => "; check the permissions or choose another folder",
            _ => "",
        };
        let source = std::io::Error::new(source.kind(), format!("cannot {doing}: {source}{hint}"));
        Error::Io { path: path.to_path_buf(), source }
    }

    /// Whether a limit of open files is the cause, here or on the rank whose words it repeats: no file is at fault.
    pub(crate) fn is_too_many_files(&self) -> bool {
        self.to_string().contains(TOO_MANY_FILES)
    }

    /// An [`Error::Damaged`].
    pub fn damaged(path: impl AsRef<Path>, what: impl Into<String>) -> Error {
        Error::Damaged { path: path.as_ref().to_path_buf(), what: what.into() }
    }

    /// The same error with advice appended.
    pub fn with_hint(self, hint: &str) -> Error {
        match self {
            Error::Io { path, source } => {
                Error::Io { path, source: std::io::Error::new(source.kind(), format!("{source}{hint}")) }
            }
            Error::Damaged { path, what } => Error::Damaged { path, what: what + hint },
            Error::Missing { path, what } => Error::Missing { path, what: what + hint },
            other => other,
        }
    }

    /// The exit code by which a launcher knows what to do: 16 to start again on other hardware, 17 not to start again.
    pub fn exit_code(&self) -> Option<u8> {
        match self {
            Error::FaultyHardware { .. } => Some(16),
            Error::InvalidResult { .. } => Some(17),
            _ => None,
        }
    }

    /// A suggestion, if there is one.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Error::Config { hint, .. } => hint.as_deref(),
            _ => None,
        }
    }
}

fn saved_as(replay: &Option<PathBuf>) -> String {
    match replay {
        Some(path) => format!("its batch is in {}; see ferrotron replay", path.display()),
        None => "its batch could not be saved".into(),
    }
}

fn place(file: &Option<String>, line: Option<usize>, key: &Option<String>) -> String {
    let mut out = String::new();
    if let Some(file) = file {
        out += file;
        if let Some(line) = line {
            out += &format!(":{line}");
        }
        out += ": ";
    }
    if let Some(key) = key {
        out += &format!("{key}: ");
    }
    out
}
