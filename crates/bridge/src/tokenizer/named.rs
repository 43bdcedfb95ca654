//! Tokens that `tokenizer_config.json` and `special_tokens_map.json` name. Those that `tokenizer.json` does not list among its added
//! tokens are added to it, and of the others they say how they are found, as in transformers: a text that spells them has them, and
//! generation can stop at them.

use super::file::{Checked, token_text};
use crate::error::Result;
use crate::json::{parse_object, read_text};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;

/// Keys of single special tokens.
const SPECIAL: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// How the keys of single tokens of one model end, such as `image_token`.
const OWN: &str = "_token";
/// Objects of such tokens by name, of which later ones count.
const NAMED: [&str; 2] = ["model_specific_special_tokens", "extra_special_tokens"];
/// Lists of special tokens.
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];
/// Added tokens by their ids.
const DECODER: &str = "added_tokens_decoder";
/// What an added token says about how it is found.
const FLAGS: [&str; 5] = ["single_word", "lstrip", "rstrip", "normalized", "special"];

/// What the files of a folder name.
#[derive(Default)]
pub(crate) struct NamedTokens {
    /// Special tokens by key.
    special: Map<String, Value>,
    /// Entries of `added_tokens_decoder` in the order of their ids.
    added: Vec<Value>,
}

impl NamedTokens {
    /// Reads the files of a folder. `special_tokens_map.json` counts where `tokenizer_config.json` lists no added tokens.
    pub fn of(dir: &Path) -> Result<NamedTokens> {
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
        Ok(NamedTokens { special, added: added.into_iter().map(|(_, token)| token).collect() })
    }

    /// The text of a special token.
    pub fn special(&self, key: &str) -> Option<&str> {
        self.special.get(key).and_then(token_text)
    }

    /// Special tokens by name, a later one of a name in place of an earlier one. The usual ones may be null.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Value)> {
        let is_own = |key: &str, token: &Value| key.ends_with(OWN) && token_text(token).is_some();
        let keys = self
            .special
            .iter()
            .filter(move |(key, token)| SPECIAL.contains(&key.as_str()) || is_own(key, token));
        let objects = NAMED.iter().filter_map(|key| self.special.get(*key)?.as_object());
        keys.chain(objects.flatten()).map(|(name, token)| (name.as_str(), token))
    }

    /// Special tokens in lists, by the key of the list.
    pub fn lists(&self) -> impl Iterator<Item = (&'static str, &Vec<Value>)> {
        LISTS.iter().filter_map(|key| Some((*key, self.special.get(*key)?.as_array()?)))
    }

    /// The text of a `tokenizer.json` with these tokens; none if nothing changes in it. `added_tokens_decoder` says how a token is found
    /// also where the file says otherwise, and a token with a name is special. A special token that is neither in the
    /// vocabulary nor in `added_tokens_decoder` has no id that a model was trained with, and is left out.
    pub(super) fn added_to(&self, checked: &Checked) -> Option<String> {
        let before = checked.value.get("added_tokens").and_then(Value::as_array);
        let mut tokens = before.cloned().unwrap_or_default();
        let vocabulary = Vocabulary::of(&checked.value["model"]["vocab"]);
        let (mut at, mut next) = (HashMap::new(), vocabulary.size);
        for (place, (text, id)) in checked.specials.iter().enumerate() {
            at.entry(text.clone()).or_insert(place);
            next = next.max(*id as usize + 1);
        }
        let named = self.named().map(|(_, token)| (token, Role::Named));
        let lists = self.lists().flat_map(|(_, list)| list).map(|token| (token, Role::Listed));
        let added = self.added.iter().map(|token| (token, Role::Added));
        for (token, role) in added.chain(named).chain(lists) {
            let Some(text) = token_text(token).filter(|text| !text.is_empty()) else { continue };
            if let Some(known) = at.get(text).and_then(|place| tokens.get_mut(*place)) {
                match role {
                    Role::Added => set(known, flags(token, role)),
                    Role::Named => set(known, [("special", true)]),
                    Role::Listed => {}
                }
                continue;
            }
            // A new token has the next id, whatever the file says.
            let new = || (role == Role::Added).then_some(next);
            let Some(id) = vocabulary.id(text).or_else(new) else { continue };
            next = next.max(id + 1);
            at.insert(text.into(), tokens.len());
            let mut token_of_file = json!({"id": id, "content": text});
            set(&mut token_of_file, flags(token, role));
            tokens.push(token_of_file);
        }
        if before.map_or(tokens.is_empty(), |before| *before == tokens) {
            return None;
        }
        let mut value = checked.value.clone();
        value["added_tokens"] = Value::Array(tokens);
        Some(value.to_string())
    }
}

/// Where a token is named.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// In `added_tokens_decoder`.
    Added,
    /// As a special token of a name.
    Named,
    /// In a list of special tokens.
    Listed,
}

/// How a token is found, with the defaults of transformers.
fn flags(token: &Value, role: Role) -> [(&'static str, bool); 5] {
    let given = |name: &str| token.get(name).and_then(Value::as_bool);
    let special = role == Role::Named || given("special").unwrap_or(role == Role::Listed);
    FLAGS.map(|name| match name {
        "special" => (name, special),
        "normalized" => (name, given(name).unwrap_or(!special)),
        _ => (name, given(name).unwrap_or(false)),
    })
}

fn set(token: &mut Value, flags: impl IntoIterator<Item = (&'static str, bool)>) {
    if let Some(token) = token.as_object_mut() {
        token.extend(flags.into_iter().map(|(name, value)| (name.to_string(), value.into())));
    }
}

/// A vocabulary: an object of ids by text, or a list of texts with their scores.
struct Vocabulary<'a> {
    size: usize,
    object: Option<&'a Map<String, Value>>,
    /// Ids of a list, the first of a text.
    list: HashMap<&'a str, usize>,
}

impl<'a> Vocabulary<'a> {
    fn of(value: &'a Value) -> Vocabulary<'a> {
        let (object, list) = (value.as_object(), value.as_array());
        let size = object.map_or(0, Map::len) + list.map_or(0, Vec::len);
        let entries = list.map(Vec::as_slice).unwrap_or_default().iter().enumerate().rev();
        let list = entries.filter_map(|(id, e)| Some((e.get(0)?.as_str()?, id))).collect();
        Vocabulary { size, object, list }
    }

    fn id(&self, text: &str) -> Option<usize> {
        let of_object = self.object.and_then(|ids| ids.get(text)?.as_u64());
        of_object.map(|id| id as usize).or_else(|| self.list.get(text).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::super::file::check;
    use super::*;

    /// Files of a folder may be as long as 64 MiB. If time grew with the square of what they list, this would take hours.
    #[test]
    fn many_tokens_are_added() {
        let count = 200_000;
        let text = |i: usize| format!("<token {i:09}>");
        let vocabulary: Vec<Value> = (0..count).map(|i| json!([text(i), 0.0])).collect();
        let file = json!({"model": {"type": "Unigram", "vocab": vocabulary}, "added_tokens": []});
        let checked = check(&file.to_string()).unwrap();
        let token = |i: usize| json!({"content": text(i), "special": true});
        let special = json!({"extra_special_tokens": (0..count).map(token).collect::<Vec<_>>()});
        let Value::Object(special) = special else { unreachable!() };
        let named = NamedTokens { special, added: (count..2 * count).map(token).collect() };
        let value: Value = serde_json::from_str(&named.added_to(&checked).unwrap()).unwrap();
        assert_eq!(value["added_tokens"].as_array().unwrap().len(), 2 * count);
        assert_eq!(value["added_tokens"][0]["id"], count);
    }
}
