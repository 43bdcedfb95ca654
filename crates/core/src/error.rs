//! What can go wrong in models, data, schedules, checkpoints and training.

use std::path::{Path, PathBuf};

/// Errors of this crate. Each names the thing that was wrong and the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The content of a file is not what its format promises.
    #[error("{}: {what}", file.display())]
    Data {
        /// The file (or the name of an in-memory source).
        file: PathBuf,
        /// What was found and what was expected.
        what: String,
    },
    /// A setting, or a combination of settings, that cannot work.
    #[error("{0}")]
    Config(String),
    /// The operating system refused a file operation.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] ferrotron_tensor::Error),
}

impl Error {
    /// Wraps an operating-system error with the path it is about; made for `map_err(Error::io(path))`.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        move |source| Error::Io { path: path.as_ref().to_path_buf(), source }
    }

    /// A defect in a file's content.
    pub fn data(file: impl AsRef<Path>, what: impl Into<String>) -> Error {
        Error::Data { file: file.as_ref().to_path_buf(), what: what.into() }
    }
}

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;
