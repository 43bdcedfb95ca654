//! What can go wrong in the core.

use std::path::PathBuf;

/// Errors of configuration, data, checkpoints and training. Each names the thing and the way out.
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
    /// The operating system refused a file operation.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The content of a file is not what its format promises.
    #[error("{}: {what}", file.display())]
    Data {
        /// The file.
        file: PathBuf,
        /// What was found and what was expected.
        what: String,
    },
}

/// Result of core operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
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
