//! `manifest.json`: the contents of a checkpoint.
//!
//! The text is canonical JSON. Its first key holds the CRC-32C of every byte after that key's line, so a flipped byte
//! anywhere in the manifest is detected, and the file is still ordinary JSON for other tools.

use super::canonical;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// File name.
pub(super) const FILE: &str = "manifest.json";
/// The version written and read by this code.
pub(super) const VERSION: u64 = 1;
/// Largest manifest written or read: 256 MiB.
pub(super) const MAX_BYTES: u64 = 256 << 20;

const FORMAT: &str = "ferrotron checkpoint";
const BEFORE: &str = "{\n  \"checksum\": \"crc32c:";
const AFTER: &str = "\",\n";

/// A data file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shard {
    pub bytes: u64,
    pub crc32c: String,
}

/// The manifest without its checksum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub format: String,
    pub version: u64,
    pub step: u64,
    pub state: Value,
    /// File name → size and checksum.
    pub files: BTreeMap<String, Shard>,
    /// Tensor name → file name.
    pub tensors: BTreeMap<String, String>,
}

/// A CRC-32C as written in the manifest.
pub(super) fn hex(crc: u32) -> String {
    format!("{crc:08x}")
}

impl Manifest {
    pub fn new(
        step: u64,
        state: Value,
        files: BTreeMap<String, Shard>,
        tensors: BTreeMap<String, String>,
    ) -> Manifest {
        Manifest { format: FORMAT.into(), version: VERSION, step, state, files, tensors }
    }

    /// Renders the file, and parses it again before returning, so that whatever is written can be read.
    pub fn render(&self) -> Result<String, String> {
        let value = serde_json::to_value(self).map_err(|e| format!("cannot be written as JSON: {e}"))?;
        let body = canonical::render(&value);
        // "checksum" sorts before every other key, so it can replace the object's opening line.
        let rest = body.strip_prefix("{\n").ok_or("is not an object")?;
        let text = format!("{BEFORE}{}{AFTER}{rest}", hex(crc32c::crc32c(rest.as_bytes())));
        if text.len() as u64 > MAX_BYTES {
            return Err(format!("has {} bytes, more than the {MAX_BYTES} allowed", text.len()));
        }
        match Manifest::parse(text.as_bytes()) {
            Ok(back) if back == *self => Ok(text),
            Ok(_) => Err("does not read back as it was given".into()),
            Err(e) => Err(format!("does not read back: it {e}")),
        }
    }

    /// Checks and parses the file. The error continues a sentence that starts with the file name.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, String> {
        let text = std::str::from_utf8(bytes).map_err(|e| format!("is damaged: {e}"))?;
        let (sum, rest) = text
            .strip_prefix(BEFORE)
            .and_then(|t| t.split_at_checked(8))
            .and_then(|(sum, t)| Some((sum, t.strip_prefix(AFTER)?)))
            .ok_or("is damaged or no checkpoint manifest: it does not begin with its checksum")?;
        let found = hex(crc32c::crc32c(rest.as_bytes()));
        if sum != found {
            return Err(format!("is damaged: its checksum is {sum}, but its text gives {found}"));
        }
        // Check the version first: another version may have other fields.
        let value: Value =
            serde_json::from_str(&format!("{{{rest}")).map_err(|e| format!("is not valid JSON: {e}"))?;
        let version = value.get("version").and_then(Value::as_u64);
        if value.get("format").and_then(Value::as_str) != Some(FORMAT) || version.is_none() {
            return Err("is not the manifest of a checkpoint".into());
        }
        if version != Some(VERSION) {
            return Err(format!(
                "has format version {}, but this program reads version {VERSION}; \
                 use the version of the program that wrote it",
                version.unwrap_or_default()
            ));
        }
        let manifest: Manifest =
            serde_json::from_value(value).map_err(|e| format!("is not a valid manifest: {e}"))?;
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        for name in self.files.keys() {
            // File names must not lead out of the folder.
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            let stem = name.strip_suffix(".safetensors").unwrap_or_default();
            if stem.is_empty() || !stem.chars().all(plain) {
                return Err(format!("names the file {name:?}, which is not the name of a checkpoint file"));
            }
        }
        let used: BTreeSet<&String> = self.tensors.values().collect();
        if let Some(stray) = used.iter().find(|f| !self.files.contains_key(**f)) {
            return Err(format!("has tensors in the file {stray:?}, which it does not list"));
        }
        Ok(())
    }
}
