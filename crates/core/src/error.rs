//! What can go wrong in recipes, data, models, checkpoints and training.

use std::path::{Path, PathBuf};

/// Errors of this crate. Each names the thing and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A recipe, a `--set`, or a combination of keys that cannot work.
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
        /// What was probably meant.
        hint: Option<String>,
    },
    /// A request that cannot be carried out as given.
    #[error("{0}")]
    Invalid(String),
    /// The operating system refused; the source says which act and why.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file exists but its contents are not what they must be.
    #[error("{}: {what}", path.display())]
    Damaged {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it, and where.
        what: String,
    },
    /// Something asked for is not there.
    #[error("{}: {what}", path.display())]
    Missing {
        /// The file or folder looked in.
        path: PathBuf,
        /// What was asked for.
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
    /// Training left the numbers.
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
    /// A pipeline schedule that would not work; found before it runs.
    #[error("pipeline rank {rank}, step {step} ({operation}): {what}")]
    Schedule {
        /// The pipeline rank.
        rank: usize,
        /// GroupRank in the rank's list, from 0.
        step: usize,
        /// What stands there.
        operation: String,
        /// What is wrong with it.
        what: String,
    },
    /// A step does not fit in memory.
    #[error("{table}\n{advice}")]
    OutOfMemory {
        /// What was asked for, and the table by category. (Not the source of the error: it is shown here.)
        table: ferrotron_tensor::Error,
        /// What to change.
        advice: String,
    },
    /// From the tensors below.
    #[error(transparent)]
    Tensor(#[from] ferrotron_tensor::Error),
}

impl From<ferrotron_comm::Error> for Error {
    fn from(e: ferrotron_comm::Error) -> Error {
        Error::Tensor(e.into())
    }
}

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Wraps an operating-system error with the path it is about; made for `map_err(Error::io(path))`.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        move |source| Error::Io { path: path.as_ref().to_path_buf(), source }
    }

    /// An [`Error::Io`] whose sentence says what was being done (`"write"`, `"rename to …"`), with the way out
    /// for the two causes users can do something about.
    pub fn io_doing(path: &Path, doing: &str, source: std::io::Error) -> Error {
        use std::io::ErrorKind as K;
        let hint = match source.kind() {
            K::StorageFull | K::QuotaExceeded => "; free some space there or choose another folder",
            K::PermissionDenied | K::ReadOnlyFilesystem => "; check the permissions or choose another folder",
            _ => "",
        };
        let source = std::io::Error::new(source.kind(), format!("cannot {doing}: {source}{hint}"));
        Error::Io { path: path.to_path_buf(), source }
    }

    /// A defect in a file's content.
    pub fn damaged(path: impl AsRef<Path>, what: impl Into<String>) -> Error {
        Error::Damaged { path: path.as_ref().to_path_buf(), what: what.into() }
    }

    /// The same error with more advice at the end of its sentence.
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

    /// What was probably meant, where that is known.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Error::Config { hint, .. } => hint.as_deref(),
            _ => None,
        }
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
