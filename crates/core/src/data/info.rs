//! The tokenizer of a dataset, stored beside its index as `PREFIX.dataset.json`: `.bin/.idx` pairs do not name theirs, and
//! a model trained on the ids of another tokenizer learns nothing without any error.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::IndexedDataset;
use super::indexed::beside;
use crate::{Error, Result};

/// The identity of a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerInfo {
    /// Vocabulary size: one more than the largest id.
    pub vocab: u32,
    /// CRC-32C over all pairs of id and token; `None` for byte-level tokens.
    pub digest: Option<String>,
}

impl TokenizerInfo {
    /// The byte-level tokenizer: each id is a byte.
    pub fn bytes() -> Self {
        Self { vocab: 256, digest: None }
    }

    /// How messages name it.
    pub fn describe(&self) -> String {
        match &self.digest {
            None => "byte-level tokens".into(),
            Some(digest) => format!("a tokenizer of {} ids (digest {digest})", self.vocab),
        }
    }
}

/// What `data build` stores beside an index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetInfo {
    /// Version of this format, 1.
    pub version: u32,
    /// The tokenizer.
    pub tokenizer: TokenizerInfo,
    /// The token at the end of each document.
    pub eod: Option<u32>,
    /// Number of tokens in the pair, which ties this file to it.
    pub tokens: u64,
    /// The largest id in the pair.
    pub largest_id: u32,
    /// Documents are conversations: the mode of each of their sequences says whether its tokens have a loss (1) or not (0).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chat: bool,
}

impl DatasetInfo {
    /// The version written.
    pub const VERSION: u32 = 1;
    /// Larger files are not ours.
    const LONGEST: u64 = 1 << 16;

    /// Its path for a prefix.
    pub fn path(prefix: &Path) -> PathBuf {
        beside(prefix, ".dataset.json")
    }

    /// Reads the file of an open dataset; `None` if another tool wrote the pair and there is none.
    pub fn of(data: &IndexedDataset) -> Result<Option<Self>> {
        let path = Self::path(data.path());
        let about = match std::fs::metadata(&path) {
            Ok(about) => about,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(&path)(e)),
        };
        if !about.is_file() || about.len() > Self::LONGEST {
            return Err(Error::damaged(&path, "is not a description written by `data build`; remove it"));
        }
        let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
        let info: Self = serde_json::from_str(&text).map_err(|e| {
            Error::damaged(&path, format!("is not a description of a dataset ({e}); remove it"))
        })?;
        if info.version != Self::VERSION {
            let what = format!("has version {}; this program knows version {}", info.version, Self::VERSION);
            return Err(Error::damaged(&path, what));
        }
        if info.tokens != data.tokens() {
            let what = format!(
                "describes {} tokens, but the pair holds {}; remove it if another tool wrote the pair",
                info.tokens,
                data.tokens()
            );
            return Err(Error::damaged(&path, what));
        }
        Ok(Some(info))
    }
}
