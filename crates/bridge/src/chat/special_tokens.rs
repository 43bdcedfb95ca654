//! The special tokens that templates name, as transformers' `special_tokens_map` passes them.

use crate::error::Result;
use crate::json::{parse_object, read_text};
use crate::tokenizer::{Tokenizer, token_text};
use minijinja::value::Value;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::Path;

const BOS: &str = "bos_token";
const EOS: &str = "eos_token";
/// The names that every tokenizer of transformers knows.
const NAMES: [&str; 7] = [BOS, EOS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Tokens of one model by their names, such as `image_token`.
const OWN: &str = "extra_special_tokens";
/// Tokens without names, a list.
const ADDITIONAL: &str = "additional_special_tokens";

/// Special tokens by name. None is one that a file says the tokenizer has not: it is undefined, and prints nothing.
#[derive(Debug, Default)]
pub(super) struct SpecialTokens(BTreeMap<String, Option<Value>>);

impl SpecialTokens {
    /// The beginning and end tokens alone.
    pub fn of_ends(bos: &str, eos: &str) -> SpecialTokens {
        let token = |(name, text): (&str, &str)| (name.to_string(), Some(Value::from(text)));
        SpecialTokens([(BOS, bos), (EOS, eos)].map(token).into())
    }

    /// Those that `tokenizer_config.json` names, otherwise `special_tokens_map.json`.
    pub fn of_folder(dir: &Path) -> Result<SpecialTokens> {
        let mut tokens = SpecialTokens::default();
        for name in ["tokenizer_config.json", "special_tokens_map.json"] {
            let path = dir.join(name);
            if !path.exists() {
                continue;
            }
            let map = parse_object(&read_text(&path)?, &path.display().to_string())?;
            for name in NAMES {
                match map.get(name) {
                    Some(token) if token.is_null() => tokens.add(name, None),
                    Some(token) => tokens.add_text(name, token),
                    None => {}
                }
            }
            for (name, token) in map.get(OWN).and_then(Json::as_object).into_iter().flatten() {
                tokens.add_text(name, token);
            }
            if let Some(list) = map.get(ADDITIONAL).and_then(Json::as_array).filter(|l| !l.is_empty()) {
                let texts: Vec<Value> = list.iter().filter_map(token_text).map(Value::from).collect();
                tokens.add(ADDITIONAL, Some(Value::from(texts)));
            }
        }
        Ok(tokens)
    }

    fn add_text(&mut self, name: &str, token: &Json) {
        if let Some(text) = token_text(token) {
            self.add(name, Some(text.into()));
        }
    }

    /// A text counts before none, and an earlier one before a later.
    fn add(&mut self, name: &str, token: Option<Value>) {
        let known = self.0.entry(name.into()).or_default();
        *known = known.take().or(token);
    }

    /// The beginning and end tokens by the tokenizer's ids, where no file says anything about them.
    pub fn add_ends(&mut self, tokenizer: &Tokenizer) {
        for (name, id) in [(BOS, tokenizer.bos()), (EOS, tokenizer.eos().first().copied())] {
            let text = id.filter(|_| !self.0.contains_key(name)).and_then(|id| tokenizer.text_of(id));
            if let Some(text) = text {
                self.add(name, Some(text.into()));
            }
        }
    }

    /// Those that are defined.
    pub fn defined(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.0.iter().filter_map(|(name, token)| Some((name, token.as_ref()?)))
    }

    /// True if a template that reads the variable `name` needs a token of which nothing is known.
    pub fn lacks(&self, name: &str) -> bool {
        [BOS, EOS].contains(&name) && !self.0.contains_key(name)
    }
}
