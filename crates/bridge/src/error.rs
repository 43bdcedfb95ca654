//! Errors of reading and writing Hugging Face folders.

use std::path::{Path, PathBuf};

/// Errors of this crate. Each names the file or key and, if there is one, the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of core, such as a corrupt tensor file (boxed: it is large).
    #[error(transparent)]
    Core(Box<ferrotron_core::error::Error>),
    /// A JSON file with a missing or wrong value.
    #[error("{origin}: {what}")]
    Config {
        /// The file.
        origin: String,
        /// The key and what is wrong with it.
        what: String,
    },
    /// A model that this version does not support.
    #[error("{origin}: {what}")]
    Unsupported {
        /// The file.
        origin: String,
        /// The unsupported feature and the supported alternatives.
        what: String,
    },
    /// Weights that do not match the configuration, with every problem listed.
    #[error("{}: {}", origin, crate::problems::sentence(.problems))]
    Tensors {
        /// The folder.
        origin: String,
        /// One entry per tensor.
        problems: Vec<crate::problems::Problem>,
    },
    /// A model that no Hugging Face family can express.
    #[error("{0}")]
    CannotExpress(String),
    /// A missing or malformed tensor.
    #[error("tensor {name:?}: {what}")]
    Tensor {
        /// Its logical name.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// Weights that are not numbers.
    #[error(
        "tensor {name:?}: {count} of its {total} {dtype} values are NaN or infinite; the model is broken (did its training diverge?)"
    )]
    NonFinite {
        /// Its logical name.
        name: String,
        /// NaN and infinite values.
        count: u64,
        /// All values.
        total: u64,
        /// The dtype they were read as.
        dtype: ferrotron_tensor::DType,
    },
    /// An unusable tokenizer file, or text that it cannot process.
    #[error("{origin}: {what}")]
    Tokenizer {
        /// The file.
        origin: String,
        /// The problem and its remedy.
        what: String,
    },
    /// An unusable chat template.
    #[error("chat template: {0}")]
    Chat(String),
    /// An output path that cannot be written.
    #[error("{}: {what}", path.display())]
    Output {
        /// The folder.
        path: PathBuf,
        /// The problem and its remedy.
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
    /// An I/O error, with advice where space or permissions are the cause.
    pub(crate) fn io(path: &Path, doing: &'static str, source: std::io::Error) -> Error {
        ferrotron_core::Error::io_doing(path, doing, source).into()
    }

    /// A data file that cannot be used.
    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> Error {
        ferrotron_core::Error::damaged(path, what).into()
    }

    pub(crate) fn config(origin: &str, what: impl Into<String>) -> Error {
        Error::Config { origin: origin.into(), what: what.into() }
    }

    /// A file or folder that does not exist, as the user names it.
    pub(crate) fn absent(path: &Path, what: &str) -> Error {
        let (file, what) = (Some(path.display().to_string()), what.into());
        ferrotron_core::Error::Config { file, line: None, key: None, what, hint: None }.into()
    }

    /// A key of a recipe whose value cannot be used.
    pub(crate) fn key(key: &str, what: impl Into<String>) -> Error {
        let (key, what) = (Some(key.into()), what.into());
        ferrotron_core::Error::Config { file: None, line: None, key, what, hint: None }.into()
    }

    pub(crate) fn unsupported(origin: &str, what: impl Into<String>) -> Error {
        Error::Unsupported { origin: origin.into(), what: what.into() }
    }

    pub(crate) fn tensor(name: &str, what: impl Into<String>) -> Error {
        Error::Tensor { name: name.into(), what: what.into() }
    }
}
