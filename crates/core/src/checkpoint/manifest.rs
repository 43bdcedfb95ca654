//! `manifest.json`: the contents of a checkpoint.
//!
//! The text is canonical JSON. Its first key holds the CRC-32C of every byte after that key's line, so a flipped byte
//! anywhere in the manifest is detected, and the file is still ordinary JSON for other tools.

use super::canonical;
use super::slice::{Range64, Slice, check_tiling};
use crate::tensorfile::FileDType;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// File name.
pub(super) const FILE: &str = "manifest.json";
/// The version written. Version 1, whose tensors are whole and in one file each, is read too.
pub(super) const VERSION: u64 = 2;
/// Largest manifest written or read: 1 GiB, some seven million parts.
pub(super) const MAX_BYTES: u64 = 1 << 30;

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

/// A logical tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredTensor {
    /// Element type and shape; none in version 1, where they are in the file's header only.
    pub form: Option<(FileDType, Vec<usize>)>,
    /// Where its elements are.
    pub parts: Vec<StoredPart>,
}

/// Some elements of a tensor, in a file under the tensor's name.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredPart {
    pub file: String,
    /// Of its bytes; none in version 1.
    pub crc32c: Option<String>,
    /// Which elements; none for all of them.
    pub slice: Option<Slice>,
}

/// The manifest without its checksum.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Manifest {
    pub step: u64,
    pub state: Value,
    /// File name → size and checksum.
    pub files: BTreeMap<String, Shard>,
    /// By name.
    pub tensors: BTreeMap<String, StoredTensor>,
}

/// The JSON of a version: `T` describes a tensor.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text<T> {
    format: String,
    version: u64,
    step: u64,
    state: Value,
    files: BTreeMap<String, Shard>,
    tensors: BTreeMap<String, T>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorText {
    dtype: String,
    shape: Vec<usize>,
    parts: Vec<PartText>,
}

/// What is left out is all of it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartText {
    file: String,
    crc32c: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    axis: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    range: Option<Range64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    elements: Option<Range64>,
}

/// A CRC-32C as written in the manifest.
pub(super) fn hex(crc: u32) -> String {
    format!("{crc:08x}")
}

impl Manifest {
    /// Renders the file, and parses it again before returning, so that whatever is written can be read.
    pub fn render(&self) -> Result<String, String> {
        self.render_with(true)
    }

    /// [`Manifest::render`] of what one rank has written, which need not be complete tensors.
    pub fn render_index(&self) -> Result<String, String> {
        self.render_with(false)
    }

    fn render_with(&self, complete: bool) -> Result<String, String> {
        let tensors = self.tensors.iter().map(|(name, t)| Ok((name.clone(), TensorText::of(name, t)?)));
        let text = Text {
            format: FORMAT.into(),
            version: VERSION,
            step: self.step,
            state: self.state.clone(),
            files: self.files.clone(),
            tensors: tensors.collect::<Result<_, String>>()?,
        };
        let value = serde_json::to_value(&text).map_err(|e| format!("cannot be written as JSON: {e}"))?;
        let body = canonical::render(&value);
        // "checksum" sorts before every other key, so it can replace the object's opening line.
        let rest = body.strip_prefix("{\n").ok_or("is not an object")?;
        let text = format!("{BEFORE}{}{AFTER}{rest}", hex(crc32c::crc32c(rest.as_bytes())));
        if text.len() as u64 > MAX_BYTES {
            return Err(format!("has {} bytes, more than the {MAX_BYTES} allowed", text.len()));
        }
        match Manifest::parse_with(text.as_bytes(), complete) {
            Ok(back) if back == *self => Ok(text),
            Ok(_) => Err("does not read back as it was given".into()),
            Err(e) => Err(format!("does not read back: it {e}")),
        }
    }

    /// Checks and parses the file. The error continues a sentence that starts with the file name.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, String> {
        Manifest::parse_with(bytes, true)
    }

    /// [`Manifest::parse`] of what one rank has written.
    pub fn parse_index(bytes: &[u8]) -> Result<Manifest, String> {
        Manifest::parse_with(bytes, false)
    }

    fn parse_with(bytes: &[u8], complete: bool) -> Result<Manifest, String> {
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
        let invalid = |e: serde_json::Error| format!("is not a valid manifest: {e}");
        let manifest = match version {
            Some(1) => Manifest::from_version_1(serde_json::from_value(value).map_err(invalid)?),
            Some(VERSION) => Manifest::from_text(serde_json::from_value(value).map_err(invalid)?)?,
            other => {
                return Err(format!(
                    "has format version {}, but this program reads versions up to {VERSION}; \
                     use the version of the program that wrote it",
                    other.unwrap_or_default()
                ));
            }
        };
        manifest.check_files()?;
        manifest.check_tensors(complete)?;
        Ok(manifest)
    }

    fn from_version_1(text: Text<String>) -> Manifest {
        let tensor = |file: String| StoredTensor {
            form: None,
            parts: vec![StoredPart { file, crc32c: None, slice: None }],
        };
        let tensors = text.tensors.into_iter().map(|(name, file)| (name, tensor(file))).collect();
        Manifest { step: text.step, state: text.state, files: text.files, tensors }
    }

    fn from_text(text: Text<TensorText>) -> Result<Manifest, String> {
        let tensors = text.tensors.into_iter().map(|(name, t)| {
            let stored = t.parsed().map_err(|e| format!("says of tensor {name:?} what {e}"))?;
            Ok((name, stored))
        });
        let tensors = tensors.collect::<Result<_, String>>()?;
        Ok(Manifest { step: text.step, state: text.state, files: text.files, tensors })
    }

    fn check_files(&self) -> Result<(), String> {
        for name in self.files.keys() {
            // File names must not lead out of the folder.
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            let stem = name.strip_suffix(".safetensors").unwrap_or_default();
            if stem.is_empty() || !stem.chars().all(plain) {
                return Err(format!("names the file {name:?}, which is not the name of a checkpoint file"));
            }
        }
        let used: BTreeSet<&String> = self.tensors.values().flat_map(|t| &t.parts).map(|p| &p.file).collect();
        if let Some(stray) = used.iter().find(|f| !self.files.contains_key(**f)) {
            return Err(format!("has tensors in the file {stray:?}, which it does not list"));
        }
        Ok(())
    }

    /// A file has one part of a tensor, and, if the checkpoint is `complete`, every element of every tensor is in exactly
    /// one part.
    fn check_tensors(&self, complete: bool) -> Result<(), String> {
        for (name, t) in &self.tensors {
            let Some((_, shape)) = &t.form else { continue };
            let whole = Slice::whole(shape);
            let slices: Vec<&Slice> = t.parts.iter().map(|p| p.slice.as_ref().unwrap_or(&whole)).collect();
            let files: BTreeSet<&String> = t.parts.iter().map(|p| &p.file).collect();
            if files.len() < t.parts.len() {
                return Err(format!("lists two parts of tensor {name:?} in one file"));
            }
            let checked = match complete {
                true => check_tiling(shape, &slices),
                false => slices.iter().try_for_each(|s| s.check(shape)),
            };
            checked.map_err(|e| format!("is not complete: the parts of tensor {name:?} {e}"))?;
        }
        Ok(())
    }
}

impl TensorText {
    fn of(name: &str, t: &StoredTensor) -> Result<TensorText, String> {
        let unknown = || format!("would not say what tensor {name:?} is");
        let (dtype, shape) = t.form.clone().ok_or_else(unknown)?;
        let part = |p: &StoredPart| {
            let slice = p.slice.as_ref();
            Ok(PartText {
                file: p.file.clone(),
                crc32c: p.crc32c.clone().ok_or_else(unknown)?,
                axis: slice.map(|s| s.axis),
                range: slice.map(|s| s.range),
                elements: slice.map(|s| s.elements),
            })
        };
        let parts = t.parts.iter().map(part).collect::<Result<_, String>>()?;
        Ok(TensorText { dtype: dtype.name().into(), shape, parts })
    }

    /// The error continues "says of a tensor what".
    fn parsed(self) -> Result<StoredTensor, String> {
        let TensorText { dtype, shape, parts } = self;
        let dtype = FileDType::from_name(&dtype).ok_or_else(|| format!("is no dtype: {dtype:?}"))?;
        dtype.tensor_bytes(&shape).map_err(|e| format!("cannot be: {e}"))?;
        let part = |p: PartText| {
            let slice = match (p.axis, p.range, p.elements) {
                (None, None, None) => None,
                (Some(axis), Some(range), Some(elements)) => Some(Slice { axis, range, elements }),
                _ => return Err("is a slice in part: axis, range and elements go together".to_string()),
            };
            if slice.is_some() && dtype.bits() % 8 != 0 {
                return Err(format!("cannot be: a slice of {dtype}"));
            }
            Ok(StoredPart { file: p.file, crc32c: Some(p.crc32c), slice })
        };
        let parts = parts.into_iter().map(part).collect::<Result<_, String>>()?;
        Ok(StoredTensor { form: Some((dtype, shape)), parts })
    }
}
