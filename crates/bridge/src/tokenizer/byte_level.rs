//! The byte-level tokenizer as a `tokenizer.json`, so that natively trained models load in transformers.

use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// A `tokenizer.json` whose ids are bytes, for models with a vocabulary of 256.
pub fn byte_tokenizer_json() -> String {
    let vocab: Map<String, Value> = (0..=255u8).map(|b| (printable(b).to_string(), json!(b))).collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    });
    tokenizer.to_string() + "\n"
}

/// The character that stands for a byte in GPT-2's byte-level vocabularies: itself if it is printable, otherwise the
/// next free one from U+0100 on.
fn printable(byte: u8) -> char {
    let visible = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if visible(byte) {
        return char::from(byte);
    }
    let hidden_before = (0..byte).filter(|&b| !visible(b)).count() as u32;
    char::from_u32(256 + hidden_before).unwrap_or('\u{fffd}')
}

/// The byte that each character of such a vocabulary stands for.
pub(super) fn bytes_by_char() -> HashMap<char, u8> {
    (0..=255).map(|byte| (printable(byte), byte)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::*;

    #[test]
    fn the_known_corners_of_the_alphabet() {
        let want = [(b'A', 'A'), (b' ', 'Ġ'), (b'\n', 'Ċ'), (0, 'Ā'), (0xad, '\u{143}'), (0xff, 'ÿ')];
        for (byte, c) in want {
            assert_eq!(printable(byte), c);
            assert_eq!(bytes_by_char()[&c], byte);
        }
    }

    #[test]
    fn the_file_and_the_built_in_agree() {
        let (file, bytes) = (Tokenizer::from_json(&byte_tokenizer_json(), "x").unwrap(), Tokenizer::bytes());
        assert_eq!(file.vocab_size(), 256);
        for text in ["", "Hello, world\n", " \t naïve café 🦀\u{0}", "'s 123"] {
            let ids = bytes.encode(text).unwrap();
            assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
            assert_eq!(file.encode(text).unwrap(), ids);
            assert_eq!(file.decode(&ids).unwrap(), text);
            assert_eq!(bytes.decode(&ids).unwrap(), text);
        }
    }
}
