//! Refuses tokenizers whose parts contradict each other. The tokenizers library takes names, lengths and indices of a
//! file as they are: on a merge whose result is no token it panics, and for an unknown token without a text it reads
//! beyond a table.

use super::charsmap::CharsMap;
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Checks the merges of a BPE model, in either spelling: `"a b"` or `["a", "b"]`. `model` is as the file has it, so that
/// a merge is named as its author wrote it.
pub(super) fn check_merges(model: &Value) -> Result<(), String> {
    let is_bpe = model.get("type").and_then(Value::as_str).is_none_or(|kind| kind == "BPE");
    let (Some(vocab), Some(merges)) =
        (model.get("vocab").and_then(Value::as_object), model.get("merges").and_then(Value::as_array))
    else {
        return Ok(());
    };
    if !is_bpe {
        return Ok(());
    }
    let tokens: HashSet<&str> = vocab.keys().map(String::as_str).collect();
    let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or_default();
    let mut result = String::new();
    for (i, merge) in merges.iter().enumerate() {
        if merge.as_str().is_some_and(|text| text.starts_with("#version")) {
            continue;
        }
        let wrong = |what: String| format!("merge {i}, {merge}, {what}");
        let Some((left, right)) = sides(merge) else {
            return Err(wrong("is not a pair of tokens".into()));
        };
        for side in [left, right] {
            if side.is_empty() {
                return Err(wrong("has an empty side".into()));
            }
            if !tokens.contains(side) {
                return Err(wrong(format!("joins {side:?}, which is not in the vocabulary")));
            }
        }
        // Without the prefix that marks the inside of a word.
        let Some(rest) = right.strip_prefix(prefix).filter(|rest| !rest.is_empty()) else {
            return Err(wrong(format!("has a right side that does not continue {prefix:?}")));
        };
        result.clear();
        result.extend([left, rest]);
        if !tokens.contains(result.as_str()) {
            return Err(wrong(format!("makes {result:?}, which is not in the vocabulary")));
        }
    }
    Ok(())
}

fn sides(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(text) => text.split_once(' ').filter(|(_, right)| !right.contains(' ')),
        Value::Array(pair) => match pair.as_slice() {
            [left, right] => Some((left.as_str()?, right.as_str()?)),
            _ => None,
        },
        _ => None,
    }
}

/// The library turns a `Metaspace` pre-tokenizer into a normalizer, whose `▁` it then puts before added tokens that are looked for in
/// normalized text, and not after them. Without another normalizer that text is the text itself, so they can be looked for there.
pub(super) fn settle_added_tokens(tokenizer: &mut Value) -> Result<(), String> {
    fn prepends(step: &Value) -> bool {
        let inner = step["pretokenizers"].as_array().into_iter().flatten();
        let scheme = step["prepend_scheme"].as_str();
        let never = scheme == Some("never") || step["add_prefix_space"] == false;
        (step["type"] == "Metaspace" && !never) || inner.into_iter().any(prepends)
    }
    if !prepends(&tokenizer["pre_tokenizer"]) {
        return Ok(());
    }
    let plain = tokenizer["normalizer"].is_null();
    let tokens = tokenizer.get_mut("added_tokens").and_then(Value::as_array_mut);
    for token in tokens.into_iter().flatten() {
        if token["normalized"] != true {
            continue;
        }
        if !plain {
            return Err(format!(
                "added token {} is looked for in normalized text (`normalized`), which the tokenizers library does wrongly after a \
                 Metaspace pre-tokenizer; set `normalized` to false if the normalizer leaves it as it is",
                token["content"]
            ));
        }
        token["normalized"] = Value::Bool(false);
    }
    Ok(())
}

/// Checks a `tokenizer.json` in its canonical form.
pub(super) fn check(tokenizer: &Value) -> Result<(), String> {
    check_model(tokenizer.get("model").unwrap_or(&Value::Null))?;
    for token in tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let content = token.get("content").and_then(Value::as_str).unwrap_or_default();
        let single_word = token.get("single_word").and_then(Value::as_bool).unwrap_or_default();
        // After a match inside a word the library goes on one byte later, in the middle of such a character.
        if single_word && !content.starts_with(|c: char| c.is_ascii()) && !content.is_empty() {
            return Err(format!(
                "added token {content:?} is a `single_word` that does not begin with an ASCII character, which the \
                 tokenizers library cannot search for"
            ));
        }
    }
    for slot in ["normalizer", "decoder"] {
        check_step(tokenizer.get(slot).unwrap_or(&Value::Null))?;
    }
    Ok(())
}

fn check_model(model: &Value) -> Result<(), String> {
    let Some(vocab) = model.get("vocab").and_then(Value::as_object) else { return Ok(()) };
    if vocab.keys().all(String::is_empty) {
        return Err("its vocabulary is empty".into());
    }
    let mut by_id = HashMap::with_capacity(vocab.len());
    for (token, id) in vocab {
        if let Some(other) = by_id.insert(id.as_u64(), token) {
            return Err(format!("tokens {other:?} and {token:?} both have the id {id}"));
        }
    }
    if model.get("type").and_then(Value::as_str) != Some("BPE") {
        return Ok(());
    }
    let text = |key: &str| model.get(key).and_then(Value::as_str);
    if model.get("byte_level").and_then(Value::as_bool) == Some(true) {
        return match text("continuing_subword_prefix") {
            None | Some("") => Ok(()),
            Some(prefix) => Err(format!("it is byte-level BPE with the prefix {prefix:?} inside words")),
        };
    }
    match text("unk_token") {
        Some(unknown) if unknown.is_empty() || !vocab.contains_key(unknown) => {
            Err(format!("its unknown token {unknown:?} is not in the vocabulary"))
        }
        _ => Ok(()),
    }
}

/// Checks a normalizer or a decoder.
fn check_step(step: &Value) -> Result<(), String> {
    for members in ["normalizers", "decoders"].iter().filter_map(|key| step.get(*key)?.as_array()) {
        members.iter().try_for_each(check_step)?;
    }
    let text = |key: &str| step.get(key).and_then(Value::as_str);
    match text("type") {
        Some("Precompiled") => match text("precompiled_charsmap") {
            Some(base64) => CharsMap::parse(base64)?.check(),
            None => Ok(()),
        },
        // The decoder has `stop`; the normalizer of this name does not. It subtracts from the length of a token.
        Some("Strip") if step.get("stop").and_then(Value::as_u64).is_some_and(|n| n > 0) => {
            Err("its decoder strips the end of tokens (`stop`), which the tokenizers library cannot do to short ones".into())
        }
        _ => Ok(()),
    }
}
