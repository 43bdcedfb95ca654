//! The chat templates of a folder.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_bridge::Tokenizer;
use ferrotron_bridge::chat_encoder::ChatEncoder;
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
