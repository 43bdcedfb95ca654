//! The chat templates and special tokens of a folder, and the template of a run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

#[path = "support/folders.rs"]
mod folders;
#[path = "../../../tests/support/golden.rs"]
mod golden;

use ferrotron_bridge::chat_encoder::ChatEncoder;
use ferrotron_bridge::conversion::{ConvertOptions, convert};
use ferrotron_bridge::evaluate::documents;
use ferrotron_bridge::{Message, ModelSource, Tokenizer};
use ferrotron_core::data::Encode;
use ferrotron_core::train::{CHAT_TEMPLATE, CHECKPOINTS};
use folders::{folder, named, plain, run, tokenizer, write};
use serde_json::{Value, json};
use std::path::Path;

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

fn with_tools() -> Value {
    let mut line = plain();
    line["tools"] = json!([{"type": "function"}]);
    line
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

/// What is wrong with a template is told where it is chosen, with its name.
#[test]
fn a_wrong_template_among_several_is_named() {
    let broken = "{% if %}";
    let dir = folder(&[
        ("chat_template.jinja", named("alone").into()),
        ("additional_chat_templates/tool_use.jinja", broken.into()),
    ]);
    std::fs::write(dir.path().join("additional_chat_templates/rag.jinja"), [0xff]).unwrap();
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "alone:qa");
    let e = rendered(dir.path(), &with_tools()).unwrap_err();
    assert!(e.contains("\"tool_use\"") && e.contains("line 1"), "{e}");
    std::fs::write(dir.path().join("additional_chat_templates/tool_use.jinja"), [0xff]).unwrap();
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "alone:qa");
    let e = rendered(dir.path(), &with_tools()).unwrap_err();
    assert!(e.contains("tool_use.jinja") && e.contains("UTF-8"), "{e}");
    let list =
        json!({"chat_template": [{"name": "default", "template": broken}, {"name": "rag", "template": ""}]});
    let dir = folder(&[("tokenizer_config.json", list)]);
    let e = rendered(dir.path(), &plain()).unwrap_err();
    assert!(e.contains("\"default\"") && e.contains("line 1"), "{e}");
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
    write(dir.path(), &[("tokenizer_config.json", json!({"eos_token": "</config>"}))]);
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "</config>qa");
    // As in transformers the older file counts, unless the configuration lists all added tokens.
    write(dir.path(), &[("special_tokens_map.json", json!({"eos_token": {"content": "</map>"}}))]);
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "</map>qa");
    let lists = json!({"eos_token": "</config>", "added_tokens_decoder": {}});
    write(dir.path(), &[("tokenizer_config.json", lists)]);
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
            json!({"pad_token": "no", "extra_special_tokens": {"image_token": "<image>"}}),
        ),
        (
            "special_tokens_map.json",
            json!({"unk_token": "<unk>", "pad_token": {"content": "<pad>"},
                "additional_special_tokens": ["<a>", {"content": "<b>"}]}),
        ),
    ]);
    assert_eq!(rendered(dir.path(), &plain()).unwrap(), "<pad><unk><image>False<a><b>qa");
    let mut line = plain();
    line["chat_template_kwargs"] = json!({"pad_token": "!"});
    assert_eq!(rendered(dir.path(), &line).unwrap(), "!<unk><image>False<a><b>qa");
}

/// transformers 5 takes every key that ends so, and writes a tokenizer's tokens of its own as such keys.
#[test]
fn special_tokens_of_one_model_are_defined() {
    let all = "{{ image_token }}|{{ eot_token }}|{{ think_token }}|{{ add_bos_token }}|{% for m in messages %}{{ m.content }}{% endfor %}";
    let rendered_with = |config: Value| {
        let dir = folder(&[("chat_template.jinja", all.into()), ("tokenizer_config.json", config)]);
        rendered(dir.path(), &plain()).unwrap()
    };
    let keys = json!({"image_token": "<image>", "eot_token": {"content": "<|eot|>"}, "add_bos_token": true,
        "extra_special_tokens": {"think_token": "<think>"}});
    assert_eq!(rendered_with(keys), "<image>|<|eot|>|<think>||qa");
    let own = json!({"eot_token": "old", "model_specific_special_tokens": {"eot_token": "<|eot|>", "think_token": "<think>"}});
    assert_eq!(rendered_with(own), "|<|eot|>|<think>||qa");
}

/// Chat, `generate --chat`, `eval` and `convert` use the template that the run was trained with.
#[test]
fn a_run_is_used_with_the_template_that_it_was_trained_with() {
    let dir = folder(&[
        ("tokenizer/tokenizer.json", tokenizer()),
        ("tokenizer/chat_template.jinja", named("folder").into()),
        ("tokenizer/additional_chat_templates/tool_use.jinja", named("tools").into()),
        ("mine.jinja", named("mine").into()),
        ("given.jinja", named("given").into()),
        ("chats.jsonl", plain()),
        ("text.txt", "text".into()),
    ]);
    let at = |name: &str| dir.path().join(name);
    let (folder, mine) = (at("run"), at("mine.jinja"));
    let own = format!("tokenizer = {:?}", at("tokenizer"));
    run(&folder, &format!("[data]\n{own}\nchat_template = {mine:?}\n"));
    let asked = [Message { role: "user".into(), content: "q".into() }];
    let show = |model: &Path, given: Option<&Path>| -> Result<Option<String>, String> {
        let text = ModelSource::open(model).unwrap().text(None).unwrap();
        let template = text.template(given).map_err(|e| e.to_string())?;
        Ok(template.map(|t| t.render(&asked, true).unwrap()))
    };
    let scored = |given: Option<&str>, file: &str| -> Result<String, String> {
        let text = ModelSource::open(&folder).unwrap().text(None).unwrap();
        let found = documents(&at(file), &text, "text", given, None).map_err(|e| e.to_string())?;
        let ids: Vec<u32> = found[0].tokens.iter().map(|id| *id as u32).collect();
        Ok(text.tokenizer.decode(&ids).unwrap())
    };
    let converted = |name: &str| -> Result<String, String> {
        let options = ConvertOptions {
            dtype: None,
            like: None,
            merge: false,
            upcycle: None,
            overwrite: false,
            allow_non_finite: false,
            progress: &|_, _| {},
        };
        convert(&folder, &at(name), &options).map_err(|e| e.to_string())?;
        Ok(std::fs::read_to_string(at(name).join("chat_template.jinja")).unwrap())
    };
    let is_mine = |out: &str| {
        assert_eq!(show(&folder, None).unwrap().unwrap(), "mine:q");
        let checkpoint = ferrotron_core::checkpoint::latest(&folder.join(CHECKPOINTS)).unwrap().unwrap();
        assert_eq!(show(&checkpoint, None).unwrap().unwrap(), "mine:q");
        assert_eq!(scored(None, "chats.jsonl").unwrap(), "mine:qa");
        assert_eq!(converted(out).unwrap(), named("mine"));
        // Trained with this template, it has no other for tools.
        assert!(!at(out).join("additional_chat_templates").exists());
    };
    is_mine("first");
    // Another that is given counts first.
    assert_eq!(show(&folder, Some(&at("given.jinja"))).unwrap().unwrap(), "given:q");
    assert_eq!(scored(at("given.jinja").to_str(), "chats.jsonl").unwrap(), "given:qa");
    // The text that was kept with the run counts, also where the file is gone.
    std::fs::rename(&mine, folder.join(CHAT_TEMPLATE)).unwrap();
    is_mine("second");
    std::fs::remove_file(folder.join(CHAT_TEMPLATE)).unwrap();
    let errors = [
        show(&folder, None).unwrap_err(),
        scored(None, "chats.jsonl").unwrap_err(),
        converted("third").unwrap_err(),
    ];
    for e in errors {
        assert!(e.contains("mine.jinja") && e.contains("does not exist"), "{e}");
    }
    assert_eq!(show(&folder, Some(&at("given.jinja"))).unwrap().unwrap(), "given:q");
    assert_eq!(scored(None, "text.txt").unwrap(), "text");
    // A run that asked for none, and one that named none.
    std::fs::write(folder.join("config.toml"), format!("[data]\n{own}\nchat_template = \"none\"\n")).unwrap();
    assert_eq!(show(&folder, None).unwrap(), None);
    std::fs::write(folder.join("config.toml"), format!("[data]\n{own}\n")).unwrap();
    assert_eq!(show(&folder, None).unwrap().unwrap(), "folder:q");
    assert_eq!(converted("fourth").unwrap(), named("folder"));
    assert!(at("fourth/additional_chat_templates/tool_use.jinja").is_file());
}
