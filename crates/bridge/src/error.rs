//! What can go wrong between Hugging Face folders and us.

use std::path::{Path, PathBuf};

/// Errors of this crate. Each names the file or key and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Tensor files and what lies below them (boxed: it is large).
    #[error(transparent)]
    Core(Box<ferrotron_core::error::Error>),
    /// The operating system refused.
    #[error("{}: cannot {doing}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The act that failed.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A JSON file does not say what it must.
    #[error("{origin}: {what}")]
    Config {
        /// The file.
        origin: String,
        /// The key and what is wrong with it.
        what: String,
    },
    /// A model this version cannot run.
    #[error("{origin}: {what}")]
    Unsupported {
        /// The file.
        origin: String,
        /// What it asks for and what is there instead.
        what: String,
    },
    /// The weights do not fit the configuration. Everything that is wrong, at once.
    #[error("{}: {}", origin, crate::problems::sentence(.problems))]
    Tensors {
        /// The folder.
        origin: String,
        /// One entry per tensor.
        problems: Vec<crate::problems::Problem>,
    },
    /// No Hugging Face family has the switches of this model.
    #[error("{0}")]
    CannotExpress(String),
    /// A tensor that was asked for or handed over is not as it must be.
    #[error("tensor {name:?}: {what}")]
    Tensor {
        /// Its logical name.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// A tokenizer file that cannot be used, or text it cannot work on.
    #[error("{origin}: {what}")]
    Tokenizer {
        /// The file.
        origin: String,
        /// What is wrong, and the way out.
        what: String,
    },
    /// A chat template that cannot be used.
    #[error("chat template: {0}")]
    Chat(String),
    /// Something in the way of writing a folder.
    #[error("{}: {what}", path.display())]
    Output {
        /// The folder.
        path: PathBuf,
        /// What is wrong, and the way out.
        what: String,
    },
}

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<ferrotron_core::error::Error> for Error {
    fn from(e: ferrotron_core::error::Error) -> Error {
        Error::Core(Box::new(e))
    }
}

impl Error {
    pub(crate) fn io(path: &Path, doing: &'static str, source: std::io::Error) -> Error {
        Error::Io { path: path.to_path_buf(), doing, source }
    }

    pub(crate) fn config(origin: &str, what: impl Into<String>) -> Error {
        Error::Config { origin: origin.into(), what: what.into() }
    }

    pub(crate) fn unsupported(origin: &str, what: impl Into<String>) -> Error {
        Error::Unsupported { origin: origin.into(), what: what.into() }
    }

    pub(crate) fn tensor(name: &str, what: impl Into<String>) -> Error {
        Error::Tensor { name: name.into(), what: what.into() }
    }
}
