//! The chat templates and special tokens of a folder.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_bridge::chat_encoder::ChatEncoder;
use ferrotron_bridge::{Tokenizer, byte_tokenizer_json};
use ferrotron_core::data::Encode;
use serde_json::{Value, json};
use std::path::Path;

/// A folder with these files; values that are no strings are written as JSON.
fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), files);
    dir
}

fn write(dir: &Path, files: &[(&str, Value)]) {
    for (name, content) in files {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content.as_str().map_or_else(|| content.to_string(), String::from)).unwrap();
    }
}

/// What the template of a folder makes of a conversation: tokens are bytes.
fn rendered(dir: &Path, line: &Value) -> Result<String, String> {
    let tokenizer = match dir.join("tokenizer.json").exists() {
        true => Tokenizer::from_dir(dir).unwrap(),
        false => Tokenizer::bytes(),
    };
    let encoder = ChatEncoder::new(&tokenizer, Some(dir), None).map_err(|e| e.to_string())?;
    let spans = encoder.conversation(&line.to_string())?;
    let ids: Vec<u32> = spans.into_iter().flat_map(|s| s.tokens).collect();
    Ok(tokenizer.decode_with_specials(&ids).unwrap())
}

fn plain() -> Value {
    json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
}

fn with_tools() -> Value {
    let mut line = plain();
    line["tools"] = json!([{"type": "function"}]);
    line
}

/// A template that prints its name, then the contents.
fn named(name: &str) -> String {
    format!("{name}:{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}")
}

/// As transformers' `get_chat_template` chooses.
#[test]
fn a_conversation_with_tools_is_rendered_by_the_template_for_tools() {
    let one = |name: &str| json!({"name": name, "template": named(name)});
    let list = |names: &[&str]| json!({"chat_template": names.iter().map(|n| one(n)).collect::<Vec<_>>()});
    let config = |names: &[&str]| folder(&[("tokenizer_config.json", list(names))]);
    let both = config(&["tool_use", "default", "rag"]);
    assert_eq!(rendered(both.path(), &plain()).unwrap(), "default:qa");
    assert_eq!(rendered(both.path(), &with_tools()).unwrap(), "tool_use:qa");
    let mut none = plain();
    none["tools"] = json!([]);
    assert_eq!(rendered(both.path(), &none).unwrap(), "default:qa");
    assert_eq!(rendered(config(&["rag", "default"]).path(), &with_tools()).unwrap(), "default:qa");
    // The first is no default.
    let without = config(&["rag", "tool_use"]);
    assert_eq!(rendered(without.path(), &with_tools()).unwrap(), "tool_use:qa");
    let e = rendered(without.path(), &plain()).unwrap_err();
    assert!(
        e.contains("rag, tool_use") && e.contains("\"default\"") && e.contains("chat_template.jinja"),
        "{e}"
    );
    let object = json!({"chat_template": {"default": named("default"), "tool_use": named("tool_use")}});
    let object = folder(&[("tokenizer_config.json", object)]);
    assert_eq!(rendered(object.path(), &with_tools()).unwrap(), "tool_use:qa");
    for wrong in [json!(3), json!([{"name": "default"}]), json!(["x"]), json!({"default": 1})] {
        let dir = folder(&[("tokenizer_config.json", json!({ "chat_template": wrong }))]);
        let e = rendered(dir.path(), &plain()).unwrap_err();
        assert!(e.contains("tokenizer_config.json") && e.contains("chat_template"), "{e}");
    }
}

#[test]
fn the_files_of_additional_chat_templates_are_named_templates() {
    let dir = folder(&[
        ("chat_template.jinja", named("alone").into()),
        ("additional_chat_templates/tool_use.jinja", named("tools").into()),
        ("additional_chat_templates/notes.txt", "{% none".into()),
        ("additional_chat_templates/rag.jinja", "{% a template that is not used".into()),
        // Files come before it.
        ("tokenizer_config.json", json!({"chat_template": [{"name": "tool_use", "template": "older"}]})),
    ]);
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "alone:qa");
    assert_eq!(rendered(dir.path(), &with_tools()).unwrap(), "tools:qa");
    // Another template for tools is other data.
    let digest = || ChatEncoder::new(&Tokenizer::bytes(), Some(dir.path()), None).unwrap().digest();
    let before = digest();
    write(dir.path(), &[("additional_chat_templates/tool_use.jinja", named("other").into())]);
    assert_ne!(digest(), before);
    std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    assert_eq!(rendered(dir.path(), &with_tools()).unwrap(), "other:qa");
    assert!(rendered(dir.path(), &plain()).unwrap_err().contains("rag, tool_use"));
}

/// A tokenizer of bytes and `<|end|>` (256).
fn tokenizer() -> Value {
    let mut file: Value = serde_json::from_str(&byte_tokenizer_json()).unwrap();
    file["added_tokens"] = json!([{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}]);
    file
}

#[test]
fn special_tokens_come_from_all_files_that_name_them() {
    let ends = "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let dir = folder(&[("tokenizer.json", tokenizer()), ("chat_template.jinja", ends.into())]);
    // Nothing says what ends a text.
    let e = rendered(dir.path(), &plain()).unwrap_err();
    assert!(e.contains("eos_token") && e.contains("tokenizer_config.json"), "{e}");
    // A model's configuration does, by the id.
    write(dir.path(), &[("config.json", json!({"eos_token_id": 256}))]);
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "<|end|>qa");
    write(dir.path(), &[("special_tokens_map.json", json!({"eos_token": {"content": "</map>"}}))]);
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "</map>qa");
    write(dir.path(), &[("tokenizer_config.json", json!({"eos_token": "</config>"}))]);
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "</config>qa");
    // A tokenizer that says that it has none, as Qwen's do of bos_token.
    write(
        dir.path(),
        &[("tokenizer_config.json", json!({"eos_token": null})), ("special_tokens_map.json", json!({}))],
    );
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "qa");
}

/// transformers passes `special_tokens_map` to templates, and variables that are given come before it.
#[test]
fn all_special_tokens_are_defined() {
    let all = "{{ pad_token }}{{ unk_token }}{{ image_token }}{{ mask_token is defined }}\
               {{ additional_special_tokens | join }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let dir = folder(&[
        ("chat_template.jinja", all.into()),
        (
            "tokenizer_config.json",
            json!({"pad_token": {"content": "<pad>"}, "extra_special_tokens": {"image_token": "<image>"}}),
        ),
        (
            "special_tokens_map.json",
            json!({"unk_token": "<unk>", "pad_token": "no", "additional_special_tokens": ["<a>", {"content": "<b>"}]}),
        ),
    ]);
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "<pad><unk><image>False<a><b>qa");
    let mut line = plain();
    line["chat_template_kwargs"] = json!({"pad_token": "!"});
    assert_eq!(rendered(dir.path(), &line).unwrap(), "!<unk><image>False<a><b>qa");
}
