//! Files whose parts contradict each other are refused with the reason, before the tokenizers library panics on them.

use ferrotron_bridge::{Error, Tokenizer};
use serde_json::{Value, json};

/// A BPE tokenizer of "a", "b", "ab" with these fields of the model.
fn bpe(more: Value) -> Value {
    let mut model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]});
    extend(&mut model, more);
    super::bomb(json!({"model": model}))
}

fn extend(value: &mut Value, more: Value) {
    value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
}

fn added(content: &str, id: u32) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
           "special": true})
}

fn open(file: &Value) -> Result<Tokenizer, Error> {
    Tokenizer::from_json(&file.to_string(), "hostile/tokenizer.json")
}

#[track_caller]
fn refused(file: &Value, why: &str) {
    let e = open(file).unwrap_err();
    assert!(matches!(e, Error::Tokenizer { .. }));
    let e = e.to_string();
    assert!(e.starts_with("hostile/tokenizer.json: ") && e.contains(why), "{e}\nnot: {why}");
}

#[test]
fn merges_join_tokens_to_tokens() {
    let t = open(&bpe(json!({}))).unwrap();
    assert_eq!(t.encode("abba").unwrap(), [2, 1, 0]);
    // The result of the merge is longer than every token.
    refused(
        &bpe(json!({"vocab": {"a": 0, "b": 1, "c": 2}})),
        r#"merge 0, "a b", makes "ab", which is not in the vocabulary"#,
    );
    let second = |merge: Value| bpe(json!({"merges": [["a", "b"], merge]}));
    refused(&second(json!(["a", "x"])), r#"merge 1, ["a","x"], joins "x", which is not in the vocabulary"#);
    refused(&second(json!("ab a")), r#"merge 1, "ab a", makes "aba", which is not in the vocabulary"#);
    for form in [json!("a"), json!("a b a"), json!(["a"]), json!(["a", 1]), json!(["a", "b", "a"]), json!(7)]
    {
        refused(&second(form), "is not a pair of tokens");
    }
    for form in [json!(" b"), json!(["a", ""]), json!(["", ""])] {
        let mut file = second(form);
        file["model"]["vocab"][""] = json!(3);
        refused(&file, "has an empty side");
    }
}

#[test]
fn merges_inside_a_word_continue_its_prefix() {
    let prefixed = |vocab: Value, merges: Value| {
        bpe(json!({"continuing_subword_prefix": "##", "vocab": vocab, "merges": merges}))
    };
    let t = open(&prefixed(json!({"a": 0, "##b": 1, "ab": 2}), json!([["a", "##b"]]))).unwrap();
    assert_eq!(t.encode("ab").unwrap(), [2]);
    let shorter = prefixed(json!({"a": 0, "b": 1, "ab": 2}), json!([["a", "b"]]));
    refused(&shorter, r###"has a right side that does not continue "##""###);
    refused(&prefixed(json!({"a": 0, "##": 1}), json!([["a", "##"]])), "does not continue");
    // Cut by length, this would end in the middle of a character.
    refused(&prefixed(json!({"a": 0, "éx": 1, "a\u{fffd}x": 2}), json!([["a", "éx"]])), "does not continue");
    let mut byte_level = super::file(false);
    byte_level["model"]["continuing_subword_prefix"] = json!("©");
    byte_level["model"]["merges"] = json!([["Ã", "©"]]);
    refused(&byte_level, "does not continue");
    byte_level["model"]["merges"] = json!([]);
    refused(&byte_level, "byte-level BPE with the prefix");
}

#[test]
fn a_vocabulary_has_tokens_and_an_id_for_each() {
    let end = json!([added("<s>", 1)]);
    let mut empty = bpe(json!({"vocab": {}, "merges": []}));
    empty["added_tokens"] = end.clone();
    refused(&empty, "vocabulary is empty");
    empty["model"]["vocab"] = json!({"": 0});
    refused(&empty, "vocabulary is empty");
    let mut twice = super::file(false);
    twice["model"]["vocab"]["!"] = json!(40);
    refused(&twice, "both have the id 40");
    // The id of an unknown token that is the empty text would be beyond every table.
    let unknown = |text: &str| bpe(json!({"unk_token": text, "vocab": {"": 0, "a": 1}, "merges": []}));
    for text in ["", "?"] {
        refused(&unknown(text), "is not in the vocabulary");
    }
    assert_eq!(open(&unknown("a")).unwrap().encode("zz").unwrap(), [1, 1]);
}

#[test]
fn added_tokens_have_the_ids_that_text_becomes() {
    let with = |token: Value| {
        let mut file = bpe(json!({}));
        file["added_tokens"] = json!([token]);
        file
    };
    assert_eq!(open(&with(added("<s>", 3))).unwrap().encode("a<s>").unwrap(), [0, 3]);
    for id in [0, 2, 4, 100] {
        refused(&with(added("<s>", id)), &format!(r#"added token "<s>" has the id {id} in the file"#));
    }
    refused(&with(added(&"x".repeat(600), 3)), "an added token of 600 bytes");
    let mut word = added("é", 3);
    word["single_word"] = json!(true);
    refused(&with(word), r#"added token "é" is a `single_word`"#);
    // A post-processor that adds an id of no token.
    let mut file = with(added("<s>", 3));
    let template = |id: u32| {
        json!({"type": "TemplateProcessing", "single": [{"ids": [id]}, {"seq": "A"}],
               "pair": [{"seq": "A"}, {"seq": "B", "type_id": 1}]})
    };
    file["post_processor"] = template(3);
    assert_eq!(open(&file).unwrap().encode_framed("a").unwrap(), [3, 0]);
    file["post_processor"] = template(4);
    let e = open(&file).unwrap().encode_framed("a").unwrap_err().to_string();
    assert!(e.contains("it adds the id 4, and its vocabulary has 4"), "{e}");
}

#[test]
fn decoders_get_what_they_can_decode() {
    let with = |decoder: Value| {
        let mut file = bpe(json!({}));
        file["decoder"] = decoder;
        file
    };
    let strip = |stop: u32| json!({"type": "Strip", "content": "a", "start": 1, "stop": stop});
    assert_eq!(open(&with(strip(0))).unwrap().decode(&[0, 1]).unwrap(), "b");
    refused(&with(strip(1)), "strips the end of tokens");
    refused(&with(json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, strip(2)]})), "strips the end");
    let t = open(&with(json!({"type": "BPEDecoder", "suffix": "b"}))).unwrap();
    assert_eq!(t.decode(&[0, 2]).unwrap(), "aa");
    assert_eq!(t.decode(&[]).unwrap(), "");
    assert_eq!(t.decode(&[77]).unwrap(), "");
}

/// A character map that writes "bc" for "A", with these changes: units of the trie by their position, then the texts.
fn charsmap(units: &[(usize, u32)], length: u32, texts: &[u8]) -> Value {
    let mut trie = vec![0u32; 256];
    // The root's children are at 1 ^ byte; the one for "A" leads to the text at 0, which is noted at 200.
    trie[0] = 1 << 10;
    trie[64] = u32::from(b'A') | 1 << 8 | (64 ^ 200) << 10;
    for (i, unit) in units {
        trie[*i] = *unit;
    }
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(trie.iter().flat_map(|u| u.to_le_bytes()));
    bytes.extend(texts);
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let all = three.iter().chain(&[0, 0]).take(3).fold(0u32, |n, b| n << 8 | u32::from(*b));
        for i in 0..4 {
            text.push(if i > three.len() {
                '='
            } else {
                char::from(digits[(all >> (18 - 6 * i) & 63) as usize])
            });
        }
    }
    let mut file = bpe(json!({"vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}));
    file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": text});
    file
}

#[test]
fn character_maps_stay_in_their_tables() {
    let t = open(&charsmap(&[], 1024, b"bc\0")).unwrap();
    assert_eq!(t.encode("aAa").unwrap(), [0, 1, 2, 0]);
    let text_at = |n: u32| (200, n);
    for (units, length, texts) in [
        // No trie, one that is cut short, one longer than the file, one of 4 GiB.
        (vec![], 0, b"bc\0".to_vec()),
        (vec![], 1022, b"bc\0".to_vec()),
        (vec![], 256, b"bc\0".to_vec()),
        (vec![], 1028, b"bc\0".to_vec()),
        (vec![], u32::MAX, b"bc\0".to_vec()),
        // A root, a child and a text beyond the end.
        (vec![(0, 1 << 20)], 1024, b"bc\0".to_vec()),
        (vec![(64, u32::from(b'A') | 1 << 8 | 4000 << 10)], 1024, b"bc\0".to_vec()),
        (vec![(64, u32::from(b'A') | 4000 << 10)], 1024, b"bc\0".to_vec()),
        (vec![text_at(9)], 1024, b"bc\0".to_vec()),
        // The middle of a character, and no text at all.
        (vec![text_at(1)], 1024, "é\0".as_bytes().to_vec()),
        (vec![], 1024, vec![0xff, 0]),
    ] {
        refused(&charsmap(&units, length, &texts), "`precompiled_charsmap` is damaged");
    }
}

/// Seeds that are refused at once teach the fuzzer nothing.
#[test]
fn seeds_of_the_fuzz_target_encode() {
    let seeds = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/tokenizer");
    let mut count = 0;
    for seed in std::fs::read_dir(seeds).unwrap() {
        let path = seed.unwrap().path();
        let t = Tokenizer::from_file(&path).unwrap_or_else(|e| panic!("{e}"));
        let ids = t.encode_framed("a sample of text").unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(!t.decode(&ids).unwrap().is_empty(), "{}", path.display());
        count += 1;
    }
    assert!(count >= 5, "{count}");
}
