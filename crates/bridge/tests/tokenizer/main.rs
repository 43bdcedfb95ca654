//! Tokenizers built in the tests, against a naive reference encoder.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod inconsistent;
mod named;
#[path = "../support/mod.rs"]
mod support;

use ferrotron_bridge::{Error, Tokenizer};
use serde_json::{Value, json};
use std::collections::HashMap;
use support::SeededRng;

/// GPT-2's byte → character table.
fn alphabet() -> Vec<char> {
    let visible: Vec<u32> = (33..=126).chain(161..=172).chain(174..=255).collect();
    let mut next = 256;
    (0..256)
        .map(|b| {
            let c = if visible.contains(&b) {
                b
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(c).unwrap()
        })
        .collect()
}

const MERGES: &[(&str, &str)] = &[
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("a", "n"),
    ("Ġ", "a"),
    ("e", "r"),
    ("l", "l"),
    ("o", "w"),
    ("h", "e"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "Ġ"),
    ("ĠĠ", "ĠĠ"),
    ("Ã", "©"),
    ("Ġ", "w"),
    ("Ġw", "or"),
    ("o", "r"),
    ("l", "d"),
    ("Ġwor", "ld"),
    ("1", "2"),
    ("12", "3"),
    ("ð", "Ł"),
    ("Ċ", "Ċ"),
];

fn vocab() -> HashMap<String, u32> {
    let mut vocab: HashMap<String, u32> =
        alphabet().iter().enumerate().map(|(i, c)| (c.to_string(), i as u32)).collect();
    for (a, b) in MERGES {
        let next = vocab.len() as u32;
        vocab.entry(format!("{a}{b}")).or_insert(next);
    }
    vocab
}

/// A byte-level BPE file with two special tokens, in the older spelling of the format.
fn file(use_regex: bool) -> Value {
    let vocab = vocab();
    let n = vocab.len() as u32;
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": null,
        "added_tokens": [special(n, "<|begin|>"), special(n + 1, "<|end|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [n], "tokens": ["<|begin|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": MERGES.iter().map(|(a, b)| format!("{a} {b}")).collect::<Vec<_>>()},
    })
}

/// Naive BPE: merges the pair of the lowest rank, leftmost first, until none is left.
fn slow_bpe(text: &str) -> Vec<u32> {
    let (alphabet, vocab) = (alphabet(), vocab());
    let mut pieces: Vec<String> = text.bytes().map(|b| alphabet[usize::from(b)].to_string()).collect();
    loop {
        let rank = |w: &[String]| MERGES.iter().position(|(a, b)| *a == w[0] && *b == w[1]);
        let best = pieces.windows(2).enumerate().filter_map(|(i, w)| rank(w).map(|r| (r, i))).min();
        let Some((_, i)) = best else { break };
        let right = pieces.remove(i + 1);
        pieces[i].push_str(&right);
    }
    pieces.iter().map(|p| vocab[p]).collect()
}

const SAMPLES: &[&str] = &[
    "",
    "hello world",
    "the then other",
    "  four    spaces",
    "naïve café é",
    "🦀 crab 🦀🦀",
    "line\n\nline\r\n",
    "123 1234 12",
    "don't they'll",
    "\u{0}\u{1}",
    "日本語",
    "a",
    " ",
];

fn load(v: &Value) -> Tokenizer {
    Tokenizer::from_json(&v.to_string(), "tokenizer.json").unwrap_or_else(|e| panic!("{e}"))
}

fn random_text(dice: &mut SeededRng) -> String {
    let n = dice.below(40);
    (0..n)
        .map(|_| match dice.below(5) {
            0 => char::from_u32(dice.below(0x11_0000) as u32).unwrap_or('x'),
            1 => [' ', '\n', '1', '2', 'é', '\''][dice.below(6)],
            _ => ['t', 'h', 'e', 'l', 'o', ' ', 'w', 'r', 'd', 'a', 'n', 'i'][dice.below(12)],
        })
        .collect()
}

#[test]
fn encodes_as_the_definition_says() {
    let t = load(&file(false));
    let mut dice = SeededRng(3);
    let random: Vec<String> = (0..500).map(|_| random_text(&mut dice)).collect();
    for text in SAMPLES.iter().copied().chain(random.iter().map(String::as_str)) {
        let ids = t.encode(text).unwrap();
        assert_eq!(ids, slow_bpe(text), "{text:?}");
        assert_eq!(t.decode(&ids).unwrap(), text);
    }
}

#[test]
fn words_are_cut_before_merging() {
    let t = load(&file(true));
    // GPT-2's pattern: a space belongs to the word after it, digits and letters part ways.
    let pieces = ["hello", " world", " the", " 123", "the", "'ll", "\n\n"];
    let ids: Vec<u32> = pieces.iter().flat_map(|p| slow_bpe(p)).collect();
    assert_eq!(t.encode("hello world the 123the'll\n\n").unwrap(), ids);
    for text in SAMPLES {
        assert_eq!(t.decode(&t.encode(text).unwrap()).unwrap(), *text);
    }
}

#[test]
fn special_tokens_frame_and_hide() {
    let t = load(&file(true));
    let n = vocab().len() as u32;
    assert_eq!(t.vocab_size(), n as usize + 2);
    assert_eq!(t.special("<|end|>"), Some(n + 1));
    assert_eq!(t.special("<|none|>"), None);
    // Framed, and not cut to the three tokens the file asks for.
    let mut framed = vec![n];
    framed.extend(t.encode("hello world the 123").unwrap());
    assert!(framed.len() > 4);
    assert_eq!(t.encode_framed("hello world the 123").unwrap(), framed);
    let ids = t.encode("hello<|end|> world").unwrap();
    assert!(ids.contains(&(n + 1)));
    assert_eq!(t.decode(&ids).unwrap(), "hello world");
    assert_eq!(t.decode_with_specials(&ids).unwrap(), "hello<|end|> world");
    // Padded vocabularies can produce ids that no token has.
    assert_eq!(t.decode(&[vocab()["hello"], 1_000_000, n + 2]).unwrap(), "hello");
}

#[test]
fn streams_give_whole_characters_and_the_same_text() {
    let mut dice = SeededRng(4);
    for t in [load(&file(false)), load(&file(true)), Tokenizer::bytes()] {
        for _ in 0..300 {
            let text = random_text(&mut dice);
            let mut stream = t.stream();
            let mut got = String::new();
            for id in t.encode(&text).unwrap() {
                let piece = stream.push(id).unwrap();
                assert!(!piece.contains('\u{fffd}') || text.contains('\u{fffd}'), "{text:?}: {piece:?}");
                got.push_str(&piece);
            }
            got.push_str(&stream.finish().unwrap());
            assert_eq!(got, text);
        }
        // A character cut off at the end, and bytes that are none.
        let crab = t.encode("🦀").unwrap();
        let mut stream = t.stream();
        assert_eq!(stream.push(crab[0]).unwrap(), "");
        assert_eq!(stream.finish().unwrap(), "\u{fffd}");
        let mut stream = t.stream();
        // The id of a byte is the byte in all three.
        let junk = 0x80;
        let mut text = String::new();
        for _ in 0..10 {
            text += &stream.push(junk).unwrap();
        }
        for id in t.encode("ok").unwrap() {
            text += &stream.push(id).unwrap();
        }
        assert!(text.ends_with("ok") && text.starts_with('\u{fffd}'), "{text:?}");
    }
}

/// Ids may end one character and begin the next.
#[test]
fn streams_of_ids_that_cross_characters() {
    let mut file = file(false);
    (file["added_tokens"], file["post_processor"]) = (json!([]), Value::Null);
    let text = "一丁丂七丄🦀🦀";
    let bytes = text.as_bytes();
    let alphabet = alphabet();
    for cut in [2, 3, 5, 7] {
        let pieces: Vec<String> = std::iter::once(&bytes[..2])
            .chain(bytes[2..].chunks(cut))
            .map(|piece| piece.iter().map(|b| alphabet[usize::from(*b)]).collect())
            .collect();
        let vocab = file["model"]["vocab"].as_object_mut().unwrap();
        let ids: Vec<u32> = pieces
            .iter()
            .map(|piece| {
                let next = 1000 + vocab.len() as u32;
                vocab.entry(piece.clone()).or_insert(json!(next)).as_u64().unwrap() as u32
            })
            .collect();
        let t = load(&file);
        let mut stream = t.stream();
        let mut got: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        got += &stream.finish().unwrap();
        assert_eq!(got, text, "{cut}");
    }
}

/// Added tokens that are looked for in normalized text, after a pre-tokenizer that the library turns into a normalizer.
#[test]
fn added_tokens_beside_metaspace() {
    let added = json!({"id": 4, "content": "<x>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": true,
                       "special": false});
    let file = |scheme: &str, normalizer: Value| {
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [added], "normalizer": normalizer,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false},
            "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "vocab": {"▁": 0, "a": 1, "b": 2, "▁a": 3}, "merges": ["▁ a"]}})
    };
    // As tokenizers 0.23 has it: ▁ before every part with "always", before the first alone with "first".
    assert_eq!(load(&file("always", Value::Null)).encode("a<x>b").unwrap(), [3, 4, 0, 2]);
    assert_eq!(load(&file("first", Value::Null)).encode("<x> a").unwrap(), [4, 3]);
    let e = Tokenizer::from_json(&file("first", json!({"type": "NFC"})).to_string(), "t")
        .unwrap_err()
        .to_string();
    assert!(e.contains("<x>") && e.contains("normalized"), "{e}");
}

#[test]
fn bos_and_eos_come_from_the_files_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, v: Value| std::fs::write(dir.path().join(name), v.to_string()).unwrap();
    let e = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    assert!(e.contains("no tokenizer.json"), "{e}");
    let n = vocab().len() as u32;
    write("tokenizer.json", file(true));
    assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().eos(), [0u32; 0]);
    write("tokenizer_config.json", json!({"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>"}));
    let t = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!((t.bos(), t.eos()), (Some(n), &[n + 1][..]));
    write("config.json", json!({"eos_token_id": 7, "bos_token_id": null}));
    let t = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!((t.bos(), t.eos()), (Some(n), &[7][..]));
    write("generation_config.json", json!({"eos_token_id": [8, 9], "bos_token_id": 1}));
    let t = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!((t.bos(), t.eos()), (Some(1), &[8, 9][..]));
    // Which of them are added is for the post-processor of tokenizer.json alone to say, as in transformers 5.
    let framed = t.encode_framed("hello").unwrap();
    for on in [true, false] {
        let config = json!({"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": on, "add_eos_token": on});
        write("tokenizer_config.json", config);
        assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().encode_framed("hello").unwrap(), framed);
    }
}

/// The pre-tokenization patterns of the supported families.
#[test]
fn patterns_of_the_families_are_known() {
    let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let qwen2 = llama3.replace("{1,3}", "");
    for (pattern, digits) in [(llama3, ["123", "4"].as_slice()), (&qwen2, &["1", "2", "3", "4"])] {
        let mut v = file(true);
        v["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
        let t = load(&v);
        let want: Vec<u32> =
            ["hello", " world"].iter().chain(digits).chain(&["\n\n"]).flat_map(|p| slow_bpe(p)).collect();
        assert_eq!(t.encode("hello world1234\n\n").unwrap(), want, "{pattern}");
    }
    // Gemma: spaces become a character of their own, unknown characters fall back to bytes.
    let mut vocab = serde_json::Map::new();
    for token in ["<pad>", "<bos>", "▁", "h", "i", "▁hi", "hi"] {
        let id = vocab.len();
        vocab.insert(token.into(), json!(id));
    }
    for b in 0..=255u8 {
        let id = vocab.len();
        vocab.insert(format!("<0x{b:02X}>"), json!(id));
    }
    let t = load(&json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": ["h i", "▁ hi"]},
    }));
    assert_eq!(t.encode("hi hi é").unwrap(), [6, 5, 2, 7 + 0xc3, 7 + 0xa9]);
    assert_eq!(t.decode(&[6, 5, 2, 7 + 0xc3, 7 + 0xa9]).unwrap(), "hi hi é");
}

#[test]
fn damaged_files_are_errors() {
    for (text, want) in [
        ("", "not valid JSON"),
        ("[]", "`model.vocab` is missing"),
        ("{}", "`model.vocab` is missing"),
        (r#"{"model": {"vocab": {}}}"#, "vocabulary is empty"),
        (r#"{"model": {"vocab": {"a": -1}}}"#, "has the id -1"),
        (r#"{"model": {"vocab": {"a": 4294967295}}}"#, "which no vocabulary reaches"),
    ] {
        let e = Tokenizer::from_json(text, "tokenizer.json").unwrap_err();
        assert!(matches!(e, Error::Tokenizer { .. }));
        assert!(e.to_string().contains(want), "{text}: {e}");
    }
    let mut dice = SeededRng(5);
    let mut refused = 0;
    for use_regex in [false, true] {
        let good = file(use_regex).to_string().into_bytes();
        for _ in 0..1500 {
            let Ok(bad) = String::from_utf8(dice.corrupt(&good)) else { continue };
            match Tokenizer::from_json(&bad, "tokenizer.json") {
                Ok(t) => {
                    for text in SAMPLES {
                        if let Ok(ids) = t.encode_framed(text) {
                            t.decode(&ids).ok();
                        }
                    }
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 500, "{refused}");
}

#[test]
fn ranks_can_share_one() {
    fn shareable<T: Send + Sync>() {}
    shareable::<Tokenizer>();
    shareable::<ferrotron_bridge::HfCheckpoint>();
    shareable::<ferrotron_bridge::ChatTemplate>();
}

/// A tokenizer with these parts, of a model that knows "a" and "b".
fn bomb(more: serde_json::Value) -> serde_json::Value {
    let mut all = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"a": 0, "b": 1}, "merges": []},
    });
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    all
}

#[test]
fn tokenizers_that_explode_are_refused() {
    use serde_json::json;
    let replace = |n: usize| json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(n)});
    let sequence = |parts: Vec<serde_json::Value>| json!({"type": "Sequence", "normalizers": parts});
    let open = |more: serde_json::Value| Tokenizer::from_json(&bomb(more).to_string(), "bomb");
    let nested = sequence(vec![replace(9), sequence(vec![replace(9), replace(9)])]);
    // One megabyte of a single NUL-terminated replacement after a trie of no bytes.
    let map = "AAAA".to_string() + &"YWFh".repeat(1 << 18);
    let unigram: Vec<_> = (1..3000usize).map(|n| json!(["a".repeat(n), -1.0])).collect();
    for (more, why) in [
        (json!({"normalizer": sequence(vec![replace(100); 4])}), "normalizer makes up to 100000000"),
        (json!({"normalizer": nested}), "normalizer"),
        (json!({"normalizer": replace(1000)}), "normalizer"),
        (
            json!({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a".repeat(100)}}),
            "",
        ),
        (json!({"normalizer": {"type": "Prepend", "prepend": "a".repeat(1 << 20)}}), "before every text"),
        (json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": map}}), ""),
        (json!({"decoder": {"type": "Sequence", "decoders": vec![replace(100); 4]}}), "decoder makes up to"),
        (
            json!({"model": {"type": "Unigram", "unk_id": 0, "vocab": unigram, "byte_fallback": false}}),
            "Unigram token",
        ),
        (
            json!({"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 1_000_000_000u64, "vocab": {"a": 0}}}),
            "max_input_chars_per_word",
        ),
    ] {
        let e = open(more).unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    }
    // What published tokenizers do is allowed, and a text that is too long for it is refused.
    let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let tokenizer = open(json!({"normalizer": sequence(vec![json!({"type": "NFKC"}), space])})).unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap(), [0, 1]);
    let e = tokenizer.encode(&"a".repeat(60 << 20)).unwrap_err().to_string();
    assert!(e.contains("split the text"), "{e}");
}

/// Work that grows with the square of a text would take hours here.
#[test]
fn one_long_word_is_tokenized_in_time() {
    use serde_json::json;
    let text = "a".repeat(1 << 16);
    let unigram: Vec<_> = (1..=128usize).map(|n| json!(["a".repeat(n), -(n as f64)])).collect();
    let vocab: serde_json::Map<_, _> = (0..16).map(|n| ("a".repeat(1 << n), json!(n))).collect();
    let merges: Vec<String> = (0..15).map(|n| format!("{0} {0}", "a".repeat(1 << n))).collect();
    let mut bpe = bomb(json!({}))["model"].clone();
    bpe["vocab"] = vocab.into();
    bpe["merges"] = json!(merges);
    for model in [bpe, json!({"type": "Unigram", "unk_id": 0, "vocab": unigram, "byte_fallback": false})] {
        let tokenizer = Tokenizer::from_json(&bomb(json!({"model": model})).to_string(), "long").unwrap();
        let begin = std::time::Instant::now();
        assert!(!tokenizer.encode(&text).unwrap().is_empty());
        assert!(begin.elapsed().as_secs() < 20, "{:?}", begin.elapsed());
    }
}
