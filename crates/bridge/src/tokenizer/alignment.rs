//! Which bytes of a text each token stands for.

use super::byte_level::bytes_by_char;
use serde_json::Value;
use std::ops::Range;

/// The bytes of text that each token stands for.
#[derive(Debug)]
pub(super) struct Surfaces {
    by_id: Vec<Box<[u8]>>,
}

impl Surfaces {
    /// The surfaces of a `tokenizer.json`: byte-level vocabularies spell bytes as characters, others a space as `▁` and
    /// single bytes as `<0xNN>`; added tokens stand for themselves.
    pub fn new(file: &Value, vocab_size: usize) -> Surfaces {
        let byte_level = ["decoder", "pre_tokenizer"].iter().any(|part| names_byte_level(&file[part]));
        let bytes = bytes_by_char();
        let mut by_id = vec![Box::default(); vocab_size];
        let mut set = |id: Option<u64>, surface: Vec<u8>| {
            if let Some(slot) = id.and_then(|id| by_id.get_mut(id as usize)) {
                *slot = surface.into();
            }
        };
        let surface = |token: &str| match byte_level {
            true => token.chars().map(|c| bytes.get(&c).copied()).collect::<Option<Vec<u8>>>(),
            false => Some(single_byte(token).map_or_else(|| token.replace('▁', " ").into(), |b| vec![b])),
        };
        match &file["model"]["vocab"] {
            Value::Object(tokens) => {
                tokens.iter().for_each(|(t, id)| set(id.as_u64(), surface(t).unwrap_or_default()));
            }
            Value::Array(tokens) => {
                let text = |entry: &Value| entry.get(0).and_then(Value::as_str).and_then(surface);
                tokens.iter().enumerate().for_each(|(i, e)| set(Some(i as u64), text(e).unwrap_or_default()));
            }
            _ => {}
        }
        for token in file["added_tokens"].as_array().into_iter().flatten() {
            set(token["id"].as_u64(), token["content"].as_str().unwrap_or_default().into());
        }
        Surfaces { by_id }
    }

    /// The bytes of each token in `text`, whose tokens are `ids`. None if they do not spell it, since a normalizer has
    /// changed it.
    pub fn align(&self, text: &str, ids: &[u32]) -> Option<Vec<Range<usize>>> {
        let text = text.as_bytes();
        let mut at = 0;
        let mut out = Vec::with_capacity(ids.len());
        for &id in ids {
            let surface = self.by_id.get(id as usize)?;
            let rest = &text[at..];
            let spaces = rest.iter().take_while(|b| b.is_ascii_whitespace()).count();
            let length = if rest.starts_with(surface) {
                surface.len()
            } else if let Some(word) = surface.strip_prefix(b" ").filter(|word| rest.starts_with(word)) {
                word.len() // a space that the tokenizer has put before a word
            } else if rest[spaces..].starts_with(surface) {
                spaces + surface.len() // space around an added token, which belongs to it
            } else {
                return None;
            };
            out.push(at..at + length);
            at += length;
        }
        text[at..].iter().all(u8::is_ascii_whitespace).then_some(out)
    }
}

/// Is a token of `token` bytes, which may be none, at least partly in one of the ascending spans?
pub(super) fn overlaps(token: &Range<usize>, spans: &[Range<usize>]) -> bool {
    let first = spans.partition_point(|s| s.end <= token.start);
    spans.get(first).is_some_and(|s| s.start < token.end || s.start <= token.start)
}

fn names_byte_level(part: &Value) -> bool {
    let inner = ["decoders", "pretokenizers"].iter().filter_map(|k| part[k].as_array()).flatten();
    part["type"] == "ByteLevel" || inner.into_iter().any(names_byte_level)
}

/// The byte of `<0xNN>`.
fn single_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tokens_lie_where_their_text_is() {
        let byte_level = json!({
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]},
            "model": {"vocab": {"a": 0, "Ġb": 1, "Ã": 2, "©": 3}},
            "added_tokens": [{"id": 4, "content": "<end>"}],
        });
        let s = Surfaces::new(&byte_level, 5);
        assert_eq!(s.align("a bé<end>", &[0, 1, 2, 3, 4]).unwrap(), [0..1, 1..3, 3..4, 4..5, 5..10]);
        assert_eq!(s.align("a \n<end>\n", &[0, 4]).unwrap(), [0..1, 1..8]);
        assert_eq!(s.align("ab", &[0, 0]), None);
        assert_eq!(s.align("aa", &[0]), None);
        let pieces = json!({"model": {"vocab": [["▁a", 0.0], ["▁", 0.0], ["<0xE4>", 0.0], ["b", 0.0]]}});
        let s = Surfaces::new(&pieces, 4);
        assert_eq!(s.align("a a", &[0, 0]).unwrap(), [0..1, 1..3]);
        assert_eq!(s.align("b b", &[1, 3, 1, 3]).unwrap(), [0..0, 0..1, 1..2, 2..3]);
    }

    #[test]
    fn a_token_on_the_border_of_a_span_is_inside() {
        let spans = [2..5, 8..9];
        let inside = [0..2, 1..3, 4..6, 5..8, 8..8, 5..5].map(|t| overlaps(&t, &spans));
        assert_eq!(inside, [false, true, true, false, true, false]);
    }
}
