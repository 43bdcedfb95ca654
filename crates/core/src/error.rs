//! What can go wrong in models, data, checkpoints and training.

use std::path::{Path, PathBuf};

/// Errors of this crate. Each names the thing and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
    /// A request that cannot be carried out as given.
    #[error("{0}")]
    Invalid(String),
    /// From the tensors below.
    #[error(transparent)]
    Tensor(#[from] ferrotron_tensor::Error),
}

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
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

    /// An [`Error::Damaged`].
    pub fn damaged(path: &Path, what: impl Into<String>) -> Error {
        Error::Damaged { path: path.to_path_buf(), what: what.into() }
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
}
