//! The files beside the weights of a run or of adapters that are converted: those that the model is used with.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

#[path = "support/folders.rs"]
mod folders;
#[path = "../../../tests/support/golden.rs"]
mod golden;

use ferrotron_bridge::conversion::{ConvertOptions, Converted, convert};
use ferrotron_bridge::{ModelSource, byte_tokenizer_json};
use folders::{folder, named, run, write};
use serde_json::{Value, json};
use std::path::Path;

fn converted(from: &Path, to: &Path, like: Option<&Path>, merge: bool) -> Result<Converted, String> {
    let options = ConvertOptions {
        dtype: None,
        like,
        merge,
        upcycle: None,
        overwrite: false,
        allow_non_finite: false,
        progress: &|_, _| {},
    };
    convert(from, to, &options).map_err(|e| e.to_string())
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&text(path)).unwrap()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// A base model that ends texts with 2 and has no template, and the tokenizer of its chat model, which ends them with `~` (126).
fn base_and_chat_tokenizer() -> tempfile::TempDir {
    let dir = folder(&[
        ("base/tokenizer.json", byte_tokenizer_json().into()),
        ("base/tokenizer_config.json", json!({"eos_token": "!"})),
        ("base/generation_config.json", json!({"eos_token_id": 2, "temperature": 0.5})),
        ("base/LICENSE", "base".into()),
        ("chat/tokenizer.json", byte_tokenizer_json().into()),
        ("chat/tokenizer_config.json", json!({"eos_token": "~"})),
        ("chat/chat_template.jinja", named("chat").into()),
        ("chat/LICENSE", "chat".into()),
    ]);
    copy(&golden::fixture("qwen2"), &dir.path().join("base"));
    dir
}

/// The usual start of a chat model: a base model, whose folder has no template, with another model's tokenizer.
#[test]
fn a_run_is_exported_with_the_tokenizer_that_it_was_trained_with() {
    let dir = base_and_chat_tokenizer();
    let at = |name: &str| dir.path().join(name);
    let recipe =
        |tokenizer: &Path| format!("[model]\nhf = {:?}\n[data]\ntokenizer = {tokenizer:?}\n", at("base"));
    run(&at("run"), &recipe(&at("chat")));
    let done = converted(&at("run"), &at("out"), None, false).unwrap();
    assert_eq!(done.like.unwrap(), at("base"));
    assert_eq!(text(&at("out/chat_template.jinja")), named("chat"));
    assert_eq!(read(&at("out/tokenizer_config.json")), json!({"eos_token": "~"}));
    // It stops where the run does; what else the base model says of generation stays.
    assert_eq!(ModelSource::open(&at("run")).unwrap().text(None).unwrap().stop, [126]);
    assert_eq!(read(&at("out/generation_config.json")), json!({"eos_token_id": 126, "temperature": 0.5}));
    assert_eq!(ModelSource::open(&at("out")).unwrap().text(None).unwrap().stop, [126]);
    // The licence is that of the weights.
    assert_eq!(text(&at("out/LICENSE")), "base");
    // A tokenizer's folder that says what is generated with it is taken at its word.
    write(dir.path(), &[("chat/generation_config.json", json!({"eos_token_id": [126, 33], "top_k": 3}))]);
    converted(&at("run"), &at("own"), None, false).unwrap();
    assert_eq!(read(&at("own/generation_config.json")), json!({"eos_token_id": [126, 33], "top_k": 3}));
    // --like asks for the files of another.
    converted(&at("run"), &at("like"), Some(&at("base")), false).unwrap();
    assert!(!at("like/chat_template.jinja").exists());
    assert_eq!(read(&at("like/tokenizer_config.json")), json!({"eos_token": "!"}));
    // The base model's tokenizer does not take the place of one that is gone.
    std::fs::rename(at("chat"), at("moved")).unwrap();
    let e = converted(&at("run"), &at("gone"), None, false).unwrap_err();
    assert!(e.contains("chat") && e.contains("does not exist") && e.contains("--like"), "{e}");
    assert!(!at("gone").exists());
}

/// Naming the file is naming its folder, as for training.
#[test]
fn a_tokenizer_named_by_its_file_is_exported_with_the_files_beside_it() {
    let dir = base_and_chat_tokenizer();
    let at = |name: &str| dir.path().join(name);
    for (name, base) in [("with", true), ("alone", false)] {
        let base = if base { format!("[model]\nhf = {:?}\n", at("base")) } else { String::new() };
        run(&at(name), &format!("{base}[data]\ntokenizer = {:?}\n", at("chat/tokenizer.json")));
        let out = at("out").join(name);
        std::fs::create_dir_all(at("out")).unwrap();
        converted(&at(name), &out, None, false).unwrap();
        assert_eq!(text(&out.join("chat_template.jinja")), named("chat"));
        assert_eq!(read(&out.join("tokenizer_config.json")), json!({"eos_token": "~"}));
        assert_eq!(read(&out.join("generation_config.json"))["eos_token_id"], 126);
    }
}

/// PEFT's folder of adapters for a Llama, whose base model ends texts with 2.
fn adapters() -> tempfile::TempDir {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/peft/llama");
    let dir = tempfile::tempdir().unwrap();
    for name in ["base", "adapter"] {
        copy(&golden.join(name), &dir.path().join(name));
    }
    let config = dir.path().join("adapter/adapter_config.json");
    let mut adapter = read(&config);
    adapter["base_model_name_or_path"] = json!(dir.path().join("base"));
    std::fs::write(config, adapter.to_string()).unwrap();
    write(
        dir.path(),
        &[
            ("base/tokenizer.json", byte_tokenizer_json().into()),
            ("base/chat_template.jinja", named("base").into()),
            ("base/LICENSE", "base".into()),
        ],
    );
    dir
}

#[test]
fn merged_adapters_have_the_tokenizer_and_template_of_their_folder() {
    let dir = adapters();
    let at = |name: &str| dir.path().join(name);
    converted(&at("adapter"), &at("plain"), None, true).unwrap();
    assert_eq!(text(&at("plain/chat_template.jinja")), named("base"));
    // A template alone.
    write(dir.path(), &[("adapter/chat_template.jinja", named("adapter").into())]);
    converted(&at("adapter"), &at("template"), None, true).unwrap();
    assert_eq!(text(&at("template/chat_template.jinja")), named("adapter"));
    let used =
        ModelSource::open(&at("adapter")).unwrap().text(None).unwrap().template(None).unwrap().unwrap();
    assert_eq!(used.render(&[], false).unwrap(), "adapter:");
    // A tokenizer, as PEFT saves it: where texts end is in the base model's files.
    write(
        dir.path(),
        &[
            ("adapter/tokenizer.json", byte_tokenizer_json().into()),
            ("adapter/tokenizer_config.json", json!({"eos_token": "~"})),
        ],
    );
    converted(&at("adapter"), &at("merged"), None, true).unwrap();
    assert_eq!(text(&at("merged/chat_template.jinja")), named("adapter"));
    assert_eq!(read(&at("merged/tokenizer_config.json")), json!({"eos_token": "~"}));
    assert_eq!(text(&at("merged/LICENSE")), "base");
    let stop = |model: &str| ModelSource::open(&at(model)).unwrap().text(None).unwrap().stop;
    assert_eq!(stop("adapter"), [126, 2]);
    assert_eq!(stop("merged"), [126, 2]);
    assert_eq!(read(&at("merged/generation_config.json"))["bos_token_id"], 1);
}
