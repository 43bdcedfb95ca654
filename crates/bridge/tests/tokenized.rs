//! The cache of tokenized text: what makes an entry another one, and the template of a run that starts from a run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

#[path = "support/folders.rs"]
mod folders;
#[path = "../../../tests/support/golden.rs"]
mod golden;

use ferrotron_bridge::Tokenizer;
use ferrotron_bridge::recipe::resolve;
use ferrotron_core::config::Recipe;
use ferrotron_core::data::IndexedDataset;
use ferrotron_core::train::CHAT_TEMPLATE;
use folders::{folder, named, plain, run, tokenizer, write};
use serde_json::{Value, json};
use std::path::Path;

/// The pair that a recipe with these keys trains on, and its tokens.
fn tokenized(dir: &Path, keys: &[String]) -> Result<(String, Vec<u32>), String> {
    let mut recipe = Recipe::default();
    let own = [
        format!("data.path={:?}", dir.join("chats.jsonl")),
        format!("data.cache={:?}", dir.join("cache")),
        "data.seq_len=16".into(),
        "train.steps=1".into(),
        "train.global_batch=1".into(),
    ];
    own.iter().chain(keys).for_each(|key| recipe.set(key).unwrap());
    let (resolved, _) = resolve(&mut recipe).map_err(|e| e.to_string())?;
    let pair = IndexedDataset::open(Path::new(&resolved.pairs[0])).unwrap();
    let tokens = (0..pair.len()).flat_map(|i| pair.sequence(i).unwrap()).map(|id| id as u32).collect();
    Ok((resolved.pairs[0].clone(), tokens))
}

fn presets() -> Vec<String> {
    let sizes = ["layers=1", "hidden=16", "heads=2", "vocab=300"];
    sizes.iter().map(|size| format!("model.{size}")).collect()
}

/// Tokens follow from all files of the tokenizer's folder, also those of flags alone.
#[test]
fn files_beside_the_tokenizer_make_another_entry() {
    let line =
        json!({"messages": [{"role": "user", "content": "<my>  q"}, {"role": "assistant", "content": "a"}]});
    let dir = folder(&[
        ("tokenizer/tokenizer.json", tokenizer()),
        ("tokenizer/chat_template.jinja", named("t").into()),
        ("chats.jsonl", line),
    ]);
    let keys = [presets(), vec![format!("data.tokenizer={:?}", dir.path().join("tokenizer"))]].concat();
    let config = |config: Value| {
        write(dir.path(), &[("tokenizer/tokenizer_config.json", config)]);
        tokenized(dir.path(), &keys).unwrap()
    };
    let added =
        |rstrip: bool| json!({"added_tokens_decoder": {"257": {"content": "<my>", "rstrip": rstrip}}});
    let (plain, added, stripped) = (config(json!({})), config(added(false)), config(added(true)));
    let count = |tokens: &[u32]| (tokens.contains(&257), tokens.len());
    assert_eq!(count(&plain.1), (false, "t:<my>  qa".len()));
    assert_eq!(count(&added.1), (true, "t:_  qa".len()));
    assert_eq!(count(&stripped.1), (true, "t:_qa".len()));
    assert_eq!(config(json!({})).0, plain.0);
    // The older file names tokens, too.
    write(dir.path(), &[("tokenizer/special_tokens_map.json", json!({"eos_token": "q"}))]);
    assert_ne!(tokenized(dir.path(), &keys).unwrap().0, plain.0);
}

/// Tokens of bytes have a template, too.
#[test]
fn another_template_makes_another_entry_and_another_path_none() {
    let dir = folder(&[("one.jinja", named("one").into()), ("chats.jsonl", plain())]);
    let at = |name: &str| dir.path().join(name);
    let with = |name: &str| {
        let keys = [presets(), vec![format!("data.chat_template={:?}", at(name))]].concat();
        tokenized(dir.path(), &keys)
    };
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
    let one = with("one.jinja").unwrap();
    assert_eq!(one.1, bytes("one:qa"));
    std::fs::rename(at("one.jinja"), at(CHAT_TEMPLATE)).unwrap();
    assert_eq!(with(CHAT_TEMPLATE).unwrap(), one);
    // A run keeps a copy, and the way to it is told.
    let e = with("one.jinja").unwrap_err();
    assert!(e.contains("one.jinja") && e.contains(CHAT_TEMPLATE), "{e}");
    write(dir.path(), &[("one.jinja", named("two").into())]);
    assert_eq!(with("one.jinja").unwrap().1, bytes("two:qa"));
}

/// As with its tokenizer, through any number of runs.
#[test]
fn a_run_that_starts_from_a_run_has_its_template() {
    let dir = folder(&[
        ("tokenizer/tokenizer.json", tokenizer()),
        ("tokenizer/chat_template.jinja", named("folder").into()),
        ("mine.jinja", named("mine").into()),
        ("chats.jsonl", plain()),
    ]);
    let at = |name: &str| dir.path().join(name);
    let own = format!("[data]\ntokenizer = {:?}\n", at("tokenizer"));
    run(&at("a"), &format!("{own}chat_template = {:?}\n", at("mine.jinja")));
    run(&at("b"), &format!("[model]\nhf = {:?}\n", at("a")));
    run(&at("none"), &format!("{own}chat_template = \"none\"\n"));
    run(&at("unset"), &own);
    let t = Tokenizer::from_dir(&at("tokenizer")).unwrap();
    let shown = |from: &str, more: &[String]| {
        let keys = [&[format!("model.hf={:?}", at(from))], more].concat();
        tokenized(dir.path(), &keys).map(|(_, tokens)| t.decode_with_specials(&tokens).unwrap())
    };
    for from in ["a", "b"] {
        assert_eq!(shown(from, &[]).unwrap(), "mine:qa", "{from}");
    }
    // What was kept with the run counts.
    write(dir.path(), &[("mine.jinja", named("changed").into())]);
    write(&at("a"), &[(CHAT_TEMPLATE, named("kept").into())]);
    assert_eq!(shown("b", &[]).unwrap(), "kept:qa");
    assert!(shown("none", &[]).unwrap_err().contains("has no chat template"));
    assert_eq!(shown("unset", &[]).unwrap(), "folder:qa");
    // What the user names counts first.
    let template = format!("data.chat_template={:?}", at("mine.jinja"));
    assert_eq!(shown("a", &[template]).unwrap(), "changed:qa");
    let folder = format!("data.tokenizer={:?}", at("tokenizer"));
    assert_eq!(shown("a", &[folder]).unwrap(), "folder:qa");
}
