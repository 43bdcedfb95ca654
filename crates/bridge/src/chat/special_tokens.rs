//! The special tokens that templates name, as transformers' `special_tokens_map` passes them.

use crate::error::Result;
use crate::tokenizer::{NamedTokens, Tokenizer, token_text};
use minijinja::value::Value;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::Path;

const BOS: &str = "bos_token";
const EOS: &str = "eos_token";

/// Special tokens by name. None is one that a file says the tokenizer has not: it is undefined, and prints nothing.
#[derive(Debug, Default)]
pub(super) struct SpecialTokens(BTreeMap<String, Option<Value>>);

impl SpecialTokens {
    /// The beginning and end tokens alone.
    pub fn of_ends(bos: &str, eos: &str) -> SpecialTokens {
        let token = |(name, text): (&str, &str)| (name.to_string(), Some(Value::from(text)));
        SpecialTokens([(BOS, bos), (EOS, eos)].map(token).into())
    }

    /// Those that the tokenizer's files name: also the tokens of one model, such as `image_token`.
    pub fn of_folder(dir: &Path) -> Result<SpecialTokens> {
        let found = NamedTokens::of(dir)?;
        let text = |token: &Json| token_text(token).map(Value::from);
        let named = found.named().map(|(name, token)| (name.to_string(), text(token)));
        let lists = found.lists().filter(|(_, list)| !list.is_empty()).map(|(key, list)| {
            let texts: Vec<Value> = list.iter().filter_map(text).collect();
            (key.to_string(), Some(Value::from(texts)))
        });
        Ok(SpecialTokens(named.chain(lists).collect()))
    }

    /// The beginning and end tokens by the tokenizer's ids, where no file says anything about them.
    pub fn add_ends(&mut self, tokenizer: &Tokenizer) {
        for (name, id) in [(BOS, tokenizer.bos()), (EOS, tokenizer.eos().first().copied())] {
            let text = id.filter(|_| !self.0.contains_key(name)).and_then(|id| tokenizer.text_of(id));
            if let Some(text) = text {
                self.0.insert(name.into(), Some(text.into()));
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
