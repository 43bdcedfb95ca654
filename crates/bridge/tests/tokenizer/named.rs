//! Tokens that the files beside `tokenizer.json` name.

use super::*;

/// What transformers 5.23 makes of tokens that only the files beside `tokenizer.json` name.
#[test]
fn tokens_named_beside_the_file_are_added_to_it() {
    let token = |content: &str| json!({"content": content, "lstrip": false, "special": true});
    let new = vocab().len() as u32 + 2;
    let the = vocab()["Ġthe"];
    let (end, decoder, map) = ("tokenizer_config.json", "added_tokens_decoder", "special_tokens_map.json");
    let open = |files: &[(&str, Value)]| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file(true).to_string()).unwrap();
        for (name, json) in files {
            std::fs::write(dir.path().join(name), json.to_string()).unwrap();
        }
        Tokenizer::from_dir(dir.path())
    };
    let ids = |files: &[(&str, Value)], text: &str| {
        let t = open(files).unwrap();
        (t.encode(text).unwrap(), t.eos().to_vec())
    };
    let [a, b] = ["a", "b"].map(|c| vocab()[c]);
    // Entries of `added_tokens_decoder` in the order of their ids; new tokens have the next ids, whatever it says.
    let two = json!({decoder: {"900": token("<y>"), "899": token("<x>"), "1": token("<|end|>")}, "eos_token": "<y>"});
    assert_eq!(ids(&[(end, two)], "a<y>b<x>"), (vec![a, new + 1, b, new], vec![new + 1]));
    // A token of the vocabulary is looked for in the text before it is split into words.
    let the_end = json!({"eos_token": {"content": "Ġthe"}});
    assert_eq!(ids(&[(end, the_end.clone())], "aĠtheb"), (vec![a, the, b], vec![the]));
    assert_eq!(ids(&[(map, the_end.clone())], "aĠtheb"), (vec![a, the, b], vec![the]));
    let listed = json!({decoder: {"1": token("<|end|>")}});
    assert!(
        ids(&[(end, listed), (map, the_end)], "aĠtheb").1.is_empty(),
        "the map counts without the list only"
    );
    let more = json!({"additional_special_tokens": ["Ġthe"], "pad_token": "<pad>"});
    assert_eq!(ids(&[(end, more)], "Ġthe"), (vec![the], vec![]));
    // An end that no model was trained with.
    let nowhere = (end, json!({"eos_token": "<|nowhere|>"}));
    let e = open(std::slice::from_ref(&nowhere)).unwrap_err().to_string();
    assert!(e.contains("no token \"<|nowhere|>\"") && e.contains("eos_token_id"), "{e}");
    let known = ("generation_config.json", json!({"eos_token_id": 5}));
    assert_eq!(open(&[nowhere, known]).unwrap().eos(), [5]);
}

/// What transformers 5.23 makes of tokens that `tokenizer.json` has as plain ones: a decoder's entry says how they are found, and a token
/// with a name is special.
#[test]
fn flags_beside_the_file_count() {
    let dir = tempfile::tempdir().unwrap();
    let mut file: Value = serde_json::from_str(&ferrotron_bridge::byte_tokenizer_json()).unwrap();
    file["added_tokens"] = json!([{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": false}]);
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    let entry = |special: bool| json!({"256": {"content": "<|end|>", "rstrip": true, "normalized": false, "special": special}});
    let object = json!({"content": "<|end|>", "rstrip": true});
    for (config, stripped, special) in [
        (json!({}), false, false),
        (json!({"eos_token": "<|end|>"}), false, true),
        (json!({"eos_token": object}), false, true),
        (json!({"image_token": "<|end|>"}), false, true),
        (json!({"extra_special_tokens": ["<|end|>"]}), false, false),
        (json!({"added_tokens_decoder": entry(true)}), true, true),
        (json!({"added_tokens_decoder": entry(false)}), true, false),
        (json!({"added_tokens_decoder": entry(false), "eos_token": "<|end|>"}), true, true),
    ] {
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let t = Tokenizer::from_dir(dir.path()).unwrap();
        let want: &[u32] = if stripped { &[97, 256, 98] } else { &[97, 256, 32, 32, 98] };
        assert_eq!(t.encode("a<|end|>  b").unwrap(), want, "{config}");
        let want = if special { "ab" } else { "a<|end|>b" };
        assert_eq!(t.decode(&[97, 256, 98]).unwrap(), want, "{config}");
    }
    // A token of one model that the vocabulary has is found in the text.
    std::fs::write(dir.path().join("tokenizer_config.json"), json!({"image_token": "~"}).to_string())
        .unwrap();
    let t = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!((t.special("~"), t.decode(&[97, 126]).unwrap().as_str()), (Some(126), "a"));
}
