//! Refuses tokenizers that would make endless work or text of a short input. A `tokenizer.json` came with a model, and
//! the library trusts it.

use super::charsmap::CharsMap;
use serde_json::Value;

/// Most that normalizers, or decoders, may make of a byte. Published tokenizers need 9: spaces become U+2581 after NFKC.
const MAX_GROWTH: u64 = 64;
/// Longest normalized text of one call, in bytes.
const MAX_NORMALIZED: u64 = 512 << 20;
/// Longest token of a Unigram model, in bytes: at every character all tokens that begin there are tried.
const MAX_UNIGRAM_TOKEN: usize = 128;
/// Longest word of a WordPiece model, in characters, whose parts are all tried.
const MAX_WORDPIECE_WORD: u64 = 1000;
/// Longest text that is put before every input.
const MAX_PREFIX: usize = 1024;
/// Longest added token, in bytes: it is normalized, and must not reach the longest token that the library supports.
const MAX_ADDED_TOKEN: usize = 512;

/// How much longer than its input a normalized text may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Growth(u64);

impl Growth {
    /// Fails if a text is too long to be normalized.
    pub fn check(self, text: &str) -> Result<(), String> {
        let most = MAX_NORMALIZED / self.0;
        match text.len() as u64 > most {
            true => {
                Err(format!("cannot tokenize {} bytes at once, at most {most}; split the text", text.len()))
            }
            false => Ok(()),
        }
    }
}

/// Checks a `tokenizer.json` in its canonical form.
pub(super) fn check(tokenizer: &Value) -> Result<Growth, String> {
    check_model(tokenizer.get("model").unwrap_or(&Value::Null))?;
    for token in tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let bytes = token.get("content").and_then(Value::as_str).map_or(0, str::len);
        if bytes > MAX_ADDED_TOKEN {
            return Err(format!("it has an added token of {bytes} bytes, more than {MAX_ADDED_TOKEN}"));
        }
    }
    let slot = |name: &str| tokenizer.get(name).map_or(Ok(1), growth);
    for name in ["normalizer", "decoder"] {
        let growth = slot(name)?;
        if growth > MAX_GROWTH {
            return Err(format!("its {name} makes up to {growth} bytes of one, more than {MAX_GROWTH}"));
        }
    }
    Ok(Growth(slot("normalizer")?))
}

fn check_model(model: &Value) -> Result<(), String> {
    let vocab = model.get("vocab").and_then(Value::as_array).into_iter().flatten();
    let longest = vocab.filter_map(|t| t.get(0)?.as_str()).map(str::len).max().unwrap_or(0);
    if longest > MAX_UNIGRAM_TOKEN {
        return Err(format!("it has a Unigram token of {longest} bytes, more than {MAX_UNIGRAM_TOKEN}"));
    }
    match model.get("max_input_chars_per_word").and_then(Value::as_u64) {
        Some(n) if n > MAX_WORDPIECE_WORD => {
            Err(format!("`max_input_chars_per_word` is {n}, more than {MAX_WORDPIECE_WORD}"))
        }
        _ => Ok(()),
    }
}

/// The most bytes that a normalizer or decoder makes of one.
fn growth(node: &Value) -> Result<u64, String> {
    let text = |key: &str| node.get(key).and_then(Value::as_str).unwrap_or_default();
    Ok(match text("type") {
        "Sequence" => {
            let members = ["normalizers", "decoders"].iter().find_map(|k| node.get(*k)?.as_array());
            let mut all = 1u64;
            for member in members.into_iter().flatten() {
                all = all.saturating_mul(growth(member)?);
            }
            all
        }
        "Replace" => {
            let pattern = node.get("pattern").and_then(|p| p.get("String")).and_then(Value::as_str);
            let content = text("content").len() as u64;
            match pattern.map_or(0, str::len) as u64 {
                // An empty pattern, or an expression that may match nothing, is found at every byte.
                0 => content + 1,
                n => content.div_ceil(n).max(1),
            }
        }
        "Prepend" if text("prepend").len() > MAX_PREFIX => {
            return Err(format!("it puts {} bytes before every text", text("prepend").len()));
        }
        "Precompiled" => match CharsMap::parse(text("precompiled_charsmap"))?.longest() {
            // Rare characters become phrases; common ones do not.
            0..=64 => 3,
            n => n as u64,
        },
        // Composed and compatibility characters.
        "NFC" | "NFD" | "NFKC" | "NFKD" | "BertNormalizer" => 3,
        "MetaspaceNormalizer" => 3,
        "ByteLevel" | "Lowercase" => 2,
        _ => 1,
    })
}
