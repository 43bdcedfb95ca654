//! `chat`: turns from a pipe, the template, the context's end, and models without a template.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;
use serde_json::{Value, json};
use std::path::PathBuf;

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>";

/// A byte-level model with a template.
fn chatty() -> (tempfile::TempDir, PathBuf) {
    let (dir, _, run) = trained(&["precision.dtype=f32", "model.max_positions=256"]);
    let model = dir.path().join("chatty");
    ok(&["convert", path(&run), path(&model)]);
    std::fs::write(model.join("chat_template.jinja"), TEMPLATE).unwrap();
    (dir, model)
}

fn talk(args: &[&str], input: &str) -> (String, String) {
    let out = with_input(args, input);
    let [text, errors] = [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
    assert!(out.status.success(), "{args:?}: {errors}");
    (text, errors)
}

#[test]
fn a_conversation_grows_turn_by_turn() {
    let (_dir, model) = chatty();
    let cold = ["chat", path(&model), "--temperature", "0", "--tokens", "4", "--device", "cpu"];
    let as_json = [&cold[..], &["--system", "S", "--json"]].concat();
    let (out, _) = talk(&as_json, "one\n\ntwo\n/reset\none\n/exit\nnever read\n");
    let out: Value = serde_json::from_str(&out).unwrap();
    let turns = out["turns"].as_array().unwrap();
    assert_eq!(turns.iter().map(|t| &t["user"]).collect::<Vec<_>>(), ["one", "two", "one"]);
    // Tokens are bytes: the prompt is what the template makes of the conversation so far.
    let answer = turns[0]["assistant"].as_str().unwrap();
    let first = "<system>S<user>one<bot>";
    let second = format!("<system>S<user>one<assistant>{answer}<user>two<bot>");
    assert_eq!((&turns[0]["prompt_tokens"], &turns[0]["tokens"]), (&json!(first.len()), &json!(4)));
    if turns[0]["tokens"] == answer.len() {
        assert_eq!(turns[1]["prompt_tokens"], second.len());
    }
    // After a reset the same question has the same answer, and `generate` gives it, too.
    assert_eq!((&turns[2]["assistant"], &turns[2]["prompt_tokens"]), (&json!(answer), &json!(first.len())));
    let asked = ["--prompt", first, "--temperature", "0", "--tokens", "4"];
    let alone = json(&[&["generate", "--model", path(&model)][..], &asked].concat());
    assert_eq!(alone["text"], answer);
    // As text: an answer per line, written once, also where ranks share the model.
    let (text, errors) = talk(&[&cold[..], &["--system", "S"]].concat(), "one\n");
    assert_eq!((text, errors.as_str()), (format!("{answer}\n"), ""));
    let (text, _) = talk(&[&cold[..], &["--system", "S", "--layout", "tp=2"]].concat(), "one");
    assert_eq!(text, format!("{answer}\n"));
}

#[test]
fn the_oldest_turns_leave_a_full_context() {
    let (_dir, model) = chatty();
    let args = ["chat", path(&model), "--temperature", "0", "--tokens", "4", "--context", "60", "--json"];
    let long = "x".repeat(80);
    let (out, errors) = talk(&args, &format!("first question\nsecond question\n{long}\nthird\n"));
    let out: Value = serde_json::from_str(&out).unwrap();
    let turns = out["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 3, "{out}");
    assert!(turns.iter().all(|t| t["prompt_tokens"].as_u64().unwrap() <= 56), "{out}");
    assert!(errors.contains("left out") && errors.contains("--context 60"), "{errors}");
}

#[test]
fn a_model_without_a_template_says_what_to_do() {
    let (dir, model) = chatty();
    let template = dir.path().join("other.jinja");
    std::fs::rename(model.join("chat_template.jinja"), &template).unwrap();
    let error = fails(&["chat", path(&model)], 2);
    assert!(error.contains("--chat-template") && error.contains("ferrotron generate"), "{error}");
    let given = ["chat", path(&model), "--chat-template", path(&template), "--tokens", "2"];
    assert!(!talk(&given, "hello\n").0.is_empty());
    assert!(fails(&[&given[..], &["--context", "1000"]].concat(), 2).contains("256 positions"));
    assert!(fails(&[&given[..], &["--layout", "dp=2"]].concat(), 2).contains("tensor parallelism only"));
}
