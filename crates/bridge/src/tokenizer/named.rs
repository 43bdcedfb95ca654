//! Tokens that `tokenizer_config.json` and `special_tokens_map.json` name. Those that `tokenizer.json` does not list among its added
//! tokens are added to it, as transformers does: a text that spells them has them, and generation can stop at them.

use super::file::{Checked, token_text};
use crate::error::Result;
use crate::json::{parse_object, read_text};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Keys of single special tokens.
pub(crate) const SPECIAL: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Keys of lists of them, the second also of an object by name.
pub(crate) const MORE_SPECIAL: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];
/// Added tokens by their ids.
const DECODER: &str = "added_tokens_decoder";

/// The special tokens that the files of a folder name, by key.
pub(crate) fn special_tokens(dir: &Path) -> Result<Map<String, Value>> {
    Ok(NamedTokens::of(dir)?.special)
}

/// What the files of a folder name.
#[derive(Default)]
pub(super) struct NamedTokens {
    /// Special tokens by key.
    special: Map<String, Value>,
    /// Entries of `added_tokens_decoder` in the order of their ids.
    added: Vec<Value>,
}

impl NamedTokens {
    /// Reads the files of a folder. `special_tokens_map.json` counts where `tokenizer_config.json` lists no added tokens.
    pub(super) fn of(dir: &Path) -> Result<NamedTokens> {
        let read = |name: &str| match dir.join(name) {
            path if path.exists() => parse_object(&read_text(&path)?, &path.display().to_string()),
            _ => Ok(Map::new()),
        };
        let mut special = read("tokenizer_config.json")?;
        let mut added: Vec<(u64, Value)> = Vec::new();
        match special.remove(DECODER) {
            Some(Value::Object(decoder)) => {
                let entries = decoder.into_iter().map(|(id, token)| (id.parse().unwrap_or(u64::MAX), token));
                added.extend(entries);
                added.sort_by_key(|(id, _)| *id);
            }
            _ => special.extend(read("special_tokens_map.json")?),
        }
        special.retain(|key, _| SPECIAL.contains(&key.as_str()) || MORE_SPECIAL.contains(&key.as_str()));
        Ok(NamedTokens { special, added: added.into_iter().map(|(_, token)| token).collect() })
    }

    /// The text of a special token.
    pub(super) fn special(&self, key: &str) -> Option<&str> {
        self.special.get(key).and_then(token_text)
    }

    /// The text of a `tokenizer.json` with the tokens that it lacks; none if it lacks none. A special token that is neither in the
    /// vocabulary nor in `added_tokens_decoder` has no id that a model was trained with, and is left out.
    pub(super) fn added_to(&self, checked: &Checked) -> Option<String> {
        let vocabulary = &checked.value["model"]["vocab"];
        let size = vocabulary.as_object().map_or_else(|| vocabulary.as_array().map_or(0, Vec::len), Map::len);
        let in_vocabulary = |text: &str| match vocabulary {
            Value::Array(entries) => {
                entries.iter().position(|e| e.get(0).and_then(Value::as_str) == Some(text))
            }
            other => other.get(text).and_then(Value::as_u64).map(|id| id as usize),
        };
        let mut tokens: Vec<(String, usize)> =
            checked.specials.iter().map(|(text, id)| (text.clone(), *id as usize)).collect();
        let mut more = Vec::new();
        let more_special = MORE_SPECIAL.iter().filter_map(|key| self.special.get(*key)).flat_map(tokens_in);
        let specials = SPECIAL.iter().filter_map(|key| self.special.get(*key)).chain(more_special);
        let added = self.added.iter().map(|token| (token, true));
        for (token, is_listed) in added.chain(specials.map(|token| (token, false))) {
            let Some(text) = token_text(token).filter(|text| !text.is_empty()) else { continue };
            if tokens.iter().any(|(known, _)| known == text) {
                continue;
            }
            // A new token has the next id, whatever the file says.
            let next = || tokens.iter().map(|(_, id)| id + 1).max().unwrap_or(0).max(size);
            let Some(id) = in_vocabulary(text).or_else(|| is_listed.then(next)) else { continue };
            let flag =
                |name: &str, default: bool| token.get(name).and_then(Value::as_bool).unwrap_or(default);
            let special = flag("special", !is_listed);
            tokens.push((text.into(), id));
            more.push(json!({
                "id": id,
                "content": text,
                "single_word": flag("single_word", false),
                "lstrip": flag("lstrip", false),
                "rstrip": flag("rstrip", false),
                "normalized": flag("normalized", !special),
                "special": special,
            }));
        }
        if more.is_empty() {
            return None;
        }
        let mut value = checked.value.clone();
        match value.get_mut("added_tokens").and_then(Value::as_array_mut) {
            Some(list) => list.extend(more),
            None => value["added_tokens"] = Value::Array(more),
        }
        Some(value.to_string())
    }
}

/// The tokens of a list, or of an object by name.
fn tokens_in(list: &Value) -> Vec<&Value> {
    match list {
        Value::Array(list) => list.iter().collect(),
        Value::Object(named) => named.values().collect(),
        _ => Vec::new(),
    }
}
