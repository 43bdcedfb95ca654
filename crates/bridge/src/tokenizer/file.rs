//! Reads vocabulary size and special tokens from `tokenizer.json` and the files beside it.

use crate::error::Result;
use crate::json::{parse_object, read_text};
use serde_json::Value;
use std::path::Path;

/// Limit on ids: tables are as long as the largest id.
const MAX_ID: u64 = 1 << 22;
/// Longest token that the tokenizers library supports.
const MAX_TOKEN_BYTES: usize = 65_535;

pub(super) struct Checked {
    pub value: Value,
    pub vocab_size: usize,
    pub specials: Vec<(String, u32)>,
    /// CRC-32C over all pairs of id and token, in the order of ids.
    pub digest: u32,
}

/// Parses the file and checks the ids in it.
pub(super) fn check(text: &str) -> Result<Checked, String> {
    let value: Value = serde_json::from_str(text).map_err(|e| format!("not valid JSON: {e}"))?;
    let vocab = value.get("model").and_then(|m| m.get("vocab"));
    let mut largest = 0;
    let mut tokens_by_id = Vec::new();
    let mut see = |token: &str, id: u64| {
        if id > MAX_ID {
            return Err(format!("token {token:?} has the id {id}, which no vocabulary reaches"));
        }
        if token.len() > MAX_TOKEN_BYTES {
            return Err(format!("the token of id {id} is {} bytes long", token.len()));
        }
        largest = largest.max(id);
        tokens_by_id.push((id, token.to_owned()));
        Ok(())
    };
    match vocab {
        Some(Value::Object(tokens)) => {
            for (token, id) in tokens {
                let id =
                    id.as_u64().ok_or_else(|| format!("token {token:?} has the id {id}, not a number"))?;
                see(token, id)?;
            }
        }
        Some(Value::Array(tokens)) => {
            for (id, entry) in tokens.iter().enumerate() {
                let token = entry.get(0).and_then(Value::as_str);
                see(token.ok_or_else(|| format!("entry {id} of the vocabulary has no text"))?, id as u64)?;
            }
        }
        _ => return Err("`model.vocab` is missing, so there is nothing to tokenize with".into()),
    }
    let mut specials = Vec::new();
    for token in value.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let content = token.get("content").and_then(Value::as_str).unwrap_or_default();
        let id = token.get("id").and_then(Value::as_u64);
        let id = id.ok_or_else(|| format!("added token {content:?} has no id"))?;
        see(content, id)?;
        specials.push((content.to_string(), id as u32));
    }
    if tokens_by_id.is_empty() {
        return Err("its vocabulary is empty".into());
    }
    tokens_by_id.sort_unstable();
    let digest = tokens_by_id.iter().fold(0, |crc, (id, token)| {
        let crc = crc32c::crc32c_append(crc, &id.to_le_bytes());
        crc32c::crc32c_append(
            crc32c::crc32c_append(crc, &(token.len() as u64).to_le_bytes()),
            token.as_bytes(),
        )
    });
    Ok(Checked { vocab_size: largest as usize + 1, specials, digest, value })
}

/// Beginning- and end-of-text tokens.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ends {
    pub bos: Option<u32>,
    pub eos: Vec<u32>,
}

/// Ids from `generation_config.json`, else `config.json`, else those of the special tokens that the tokenizer's files name: `find`
/// gives them by key.
pub(super) fn ends(dir: &Path, find: impl Fn(&str) -> Result<Option<u32>>) -> Result<Ends> {
    let mut ends = Ends::default();
    for name in ["generation_config.json", "config.json"] {
        let path = dir.join(name);
        if !path.exists() {
            continue;
        }
        let map = parse_object(&read_text(&path)?, &path.display().to_string())?;
        if ends.eos.is_empty() {
            ends.eos = map.get("eos_token_id").map(ids).unwrap_or_default();
        }
        if ends.bos.is_none() {
            ends.bos = map.get("bos_token_id").map(ids).unwrap_or_default().first().copied();
        }
    }
    if ends.eos.is_empty() {
        ends.eos.extend(find("eos_token")?);
    }
    if ends.bos.is_none() {
        ends.bos = find("bos_token")?;
    }
    Ok(ends)
}

/// One id or several.
fn ids(v: &Value) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match v {
        Value::Array(list) => list.iter().filter_map(one).collect(),
        other => one(other).into_iter().collect(),
    }
}

/// A token is spelled as a string or as an object with its text.
pub(crate) fn token_text(v: &Value) -> Option<&str> {
    v.as_str().or_else(|| v.get("content").and_then(Value::as_str))
}
