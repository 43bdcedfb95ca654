//! `eval` against lm-evaluation-harness on the model, questions and text of `tests/eval`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/eval")
}

fn expected() -> Value {
    serde_json::from_str(&std::fs::read_to_string(root().join("expected.json")).unwrap()).unwrap()
}

fn close(what: &str, ours: &Value, theirs: &Value, allowed: f64) {
    let [a, b] = [ours, theirs].map(|v| v.as_f64().unwrap_or_else(|| panic!("{what}: {v}")));
    assert!((a - b).abs() <= allowed * b.abs().max(1.0), "{what}: {a} here, {b} in the harness");
}

/// Runs all tasks and the text under a layout, and compares every number.
fn compare(more: &[&str]) {
    let (theirs, dir) = (expected(), tempfile::tempdir().unwrap());
    let samples = dir.path().join("samples.jsonl");
    let [model, text] = ["model", "text.jsonl"].map(|n| root().join(n));
    let tasks = ["plain", "arc", "hellaswag"].map(|n| root().join(format!("{n}.jsonl")));
    let length = theirs["seq_len"].to_string();
    let mut args = vec!["eval", path(&model), "--device", "cpu", "--dtype", "f32", "--seq-len", &length];
    args.extend(["--data", path(&text), "--log-samples", path(&samples)]);
    tasks.iter().for_each(|t| args.extend(["--tasks", path(t)]));
    args.extend(more);
    let ours = json(&args);
    let found = &ours["data"][0];
    assert_eq!((&found["tokens"], &found["documents"]), (&theirs["text"]["tokens"], &3.into()));
    for key in ["loss", "bits_per_byte"] {
        close(key, &found[key], &theirs["text"][key], 1e-5);
    }
    let loss = found["loss"].as_f64().unwrap();
    close("perplexity", &found["perplexity"], &loss.exp().into(), 1e-12);
    let lines = std::fs::read_to_string(&samples).unwrap();
    let mut lines = lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    for (task, name) in ours["tasks"].as_array().unwrap().iter().zip(["plain", "arc", "hellaswag"]) {
        let theirs = &theirs["tasks"][name];
        for key in ["acc", "acc_norm", "acc_bytes"] {
            assert_eq!(task[key], theirs[key], "{name} {key}");
            let error = format!("{key}_stderr");
            close(&format!("{name} {error}"), &task[&error], &theirs[&error], 1e-12);
        }
        for scores in theirs["scores"].as_array().unwrap() {
            let line = lines.next().unwrap();
            let (ours, scores) = (line["scores"].as_array().unwrap(), scores.as_array().unwrap());
            assert_eq!(ours.len(), scores.len());
            ours.iter().zip(scores).for_each(|(a, b)| close(&line.to_string(), a, b, 2e-5));
        }
    }
    assert!(lines.next().is_none());
}

#[test]
fn scores_are_those_of_the_harness() {
    compare(&[]);
    // One sequence at a time.
    compare(&["--batch-tokens", "1"]);
}

#[test]
fn ranks_share_the_work_and_the_model() {
    compare(&["--layout", "dp=3", "--batch-tokens", "200"]);
    compare(&["--layout", "tp=2,dp=2"]);
}

#[test]
fn a_run_and_its_checkpoint_are_evaluated() {
    let (dir, _, run) = trained(&["precision.dtype=f32"]);
    let file = dir.path().join("held-out.txt");
    std::fs::write(&file, "ab ba ab ba\n".repeat(20)).unwrap();
    let (text, hf) = (ok(&["eval", path(&run), "--data", path(&file)]), dir.path().join("hf"));
    assert!(text.contains("perplexity") && text.contains("240"), "{text}");
    ok(&["convert", path(&run), path(&hf)]);
    let length = ["--seq-len", "16", "--data", path(&file)];
    let from_run = json(&[&["eval", path(&run)][..], &length].concat());
    let from_hf = json(&[&["eval", path(&hf)][..], &length].concat());
    close("loss", &from_run["data"][0]["loss"], &from_hf["data"][0]["loss"], 1e-6);
    let limited = json(&[&["eval", path(&run), "--limit", "1"][..], &length].concat());
    assert_eq!(limited["data"], from_run["data"]);
}

/// The tokenizer names neither a beginning nor an end of text; the run knows what ends a document, and its export says so.
#[test]
fn a_fine_tuned_run_and_its_export_have_the_same_perplexity() {
    let (dir, _, run) = trained(&["precision.dtype=f32"]);
    let [hf, tuned, exported, file] = ["hf", "tuned", "exported", "t.txt"].map(|n| dir.path().join(n));
    ok(&["convert", path(&run), path(&hf)]);
    // What it says of generation stays.
    std::fs::write(hf.join("generation_config.json"), "{\"top_k\": 7}").unwrap();
    std::fs::write(&file, "ab ba ab ba\n".repeat(60)).unwrap();
    let (model, cache) = (format!("model.hf={}", hf.display()), dir.path().join("cache"));
    let cache = format!("data.cache={}", cache.display());
    let set =
        [&model, &cache, "data.seq_len=16", "eval.every=0", "train.global_batch=2", "precision.dtype=f32"];
    let mut args = vec!["train", "finetune-hf", "--data", path(&file), "--steps", "2", "--out", path(&tuned)];
    set.iter().for_each(|s| args.extend(["--set", s]));
    ok(&args);
    ok(&["convert", path(&tuned), path(&exported)]);
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(exported.join("generation_config.json")).unwrap())
            .unwrap();
    assert_eq!(config, serde_json::json!({"eos_token_id": 0, "top_k": 7}));
    let loss = |model: &Path| {
        json(&["eval", path(model), "--seq-len", "16", "--data", path(&file)])["data"][0]["loss"].clone()
    };
    let (ours, theirs) = (loss(&tuned), loss(&exported));
    assert_eq!(ours, theirs);
    // From a newline, where the export would not say it, the first token has another loss.
    std::fs::remove_file(exported.join("generation_config.json")).unwrap();
    assert_ne!(loss(&exported), ours);
}

/// Tokens are bytes here, so that what is scored can be counted.
#[test]
fn of_conversations_the_assistants_turns_are_scored() {
    let (dir, _, run) = trained(&["precision.dtype=f32"]);
    let [model, file] = ["chatty", "chats.jsonl"].map(|n| dir.path().join(n));
    ok(&["convert", path(&run), path(&model)]);
    let template = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}\
                    {{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    let chat = |answer: &str| {
        let turns = [("user", "hi"), ("assistant", answer)]
            .map(|(role, content)| serde_json::json!({ "role": role, "content": content }));
        serde_json::json!({ "messages": turns }).to_string()
    };
    std::fs::write(&file, format!("{}\n{}\n", chat("hello"), chat("a long answer to a short question")))
        .unwrap();
    // Shorter windows than conversations: everything is still scored once.
    for length in ["64", "7"] {
        let out = json(&["eval", path(&model), "--data", path(&file), "--seq-len", length]);
        let found = &out["data"][0];
        assert_eq!(found["tokens"], "hello.".len() + "a long answer to a short question.".len(), "{out}");
        assert!(found["bits_per_byte"].is_null() && found["loss"].as_f64().unwrap() > 0.0, "{out}");
    }
    let one = json(&["eval", path(&model), "--data", path(&file), "--limit", "1"]);
    assert_eq!((&one["data"][0]["tokens"], &one["data"][0]["documents"]), (&6.into(), &1.into()));
    // A run of bytes has no folder of a template: it is given.
    let error = fails(&["eval", path(&run), "--data", path(&file)], 1);
    assert!(error.contains("--chat-template"), "{error}");
    let given = model.join("chat_template.jinja");
    let given =
        json(&["eval", path(&run), "--data", path(&file), "--limit", "1", "--chat-template", path(&given)]);
    assert_eq!(given["data"][0]["tokens"], 6);
    // Only questions have prompts and samples.
    fails(&["eval", path(&run), "--data", path(&file), "--log-samples", "none.jsonl"], 2);
}

#[test]
fn wrong_questions_name_file_line_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let (model, file) = (root().join("model"), dir.path().join("q.jsonl"));
    let task = ["eval", path(&model), "--tasks", path(&file)];
    let good = r#"{"question": "q?", "choices": ["a", "b"], "answer": 1}"#;
    for (line, words) in [
        ("not json", "line 2"),
        (r#"{"question": "q?"}"#, "choices"),
        (r#"{"question": "q?", "choices": ["a", "b"], "answer": 7}"#, "none of its 2 choices"),
        (r#"{"question": "q?", "choices": ["a", ""], "answer": 0}"#, "empty"),
    ] {
        std::fs::write(&file, format!("{good}\n{line}\n")).unwrap();
        let error = fails(&task, 1);
        assert!(error.contains("q.jsonl") && error.contains("line 2") && error.contains(words), "{error}");
    }
    std::fs::write(&file, "\n").unwrap();
    assert!(fails(&task, 1).contains("holds no question"));
    std::fs::write(&file, good).unwrap();
    let error = fails(&[&task[..], &["--seq-len", "1000000"]].concat(), 2);
    assert!(error.contains("128 positions"), "{error}");
    assert!(fails(&[&task[..], &["--layout", "pp=2"]].concat(), 2).contains("pp=1"));
    assert!(fails(&["eval", path(&model)], 2).contains("--data"));
    assert!(fails(&[&task[..], &["--prompt", "no place"]].concat(), 2).contains("{question}"));
}
