//! `train` and `data build` on conversations and text files, from a Hugging Face folder.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod common;

use common::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const TEMPLATE: &str = "{%- for m in messages -%}{{- '<' + m.role + '>' -}}{%- if m.role == 'assistant' -%}\
    {%- generation -%}{{- m.content + '\\n' -}}{%- endgeneration -%}{%- else -%}{{- m.content + '\\n' -}}{%- endif -%}\
    {%- endfor -%}{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}";

/// A folder with a Hugging Face model of bytes in `hf`, conversations in `chats.jsonl`, and more of them in `more/`.
struct Fixture {
    dir: tempfile::TempDir,
    hf: PathBuf,
}

impl Fixture {
    fn new() -> Fixture {
        let (dir, _, run) = trained(&[]);
        let hf = dir.path().join("hf");
        ok(&["convert", path(&run), path(&hf)]);
        std::fs::write(hf.join("chat_template.jinja"), TEMPLATE).unwrap();
        let chat = |i: usize| json!({"messages": [{"role": "user", "content": format!("{i}?")}, {"role": "assistant", "content": "yes"}]});
        write_lines(&dir.path().join("chats.jsonl"), (0..50).map(chat));
        std::fs::create_dir(dir.path().join("more")).unwrap();
        let share = |i: usize| json!({"conversations": [{"from": "human", "value": format!("{i}!")}, {"from": "gpt", "value": "no"}]});
        write_lines(&dir.path().join("more/a.jsonl"), (0..20).map(share));
        let completion = |i: usize| json!({"prompt": format!("say {i}"), "completion": format!("{i}")});
        write_lines(&dir.path().join("more/b.jsonl"), (0..20).map(completion));
        Fixture { dir, hf }
    }

    fn at(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// `train sft` in a small setting, with its cache beside the data.
    fn train(&self, args: &[&str]) -> Output {
        let hf = format!("model.hf={}", self.hf.display());
        let (out, cache) = (self.at("out"), format!("data.cache={}", self.at("cache")));
        let set = [
            hf.as_str(),
            "data.seq_len=64",
            "train.global_batch=4",
            "eval.every=2",
            "train.log_every=1",
            "data.split=[90, 10, 0]",
            "precision.dtype=f32",
            &cache,
        ];
        let set = set.iter().flat_map(|s| ["--set", s]);
        let all = ["train", "sft", "--out", &out].into_iter().chain(set).chain(args.iter().copied());
        Command::new(binary()).args(all).stdin(Stdio::null()).output().unwrap()
    }

    /// What it prints for people.
    fn trains(&self, args: &[&str]) -> String {
        let out = self.train(args);
        let text = String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success(), "{args:?}: {text}");
        text
    }

    fn refuses(&self, args: &[&str]) -> String {
        let out = self.train(args);
        assert!(!out.status.success(), "{args:?}");
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(!text.contains("panicked"), "{text}");
        text
    }

    fn losses(&self) -> Vec<f64> {
        let lines = std::fs::read_to_string(self.dir.path().join("out/events.jsonl")).unwrap();
        let steps = lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
        steps.filter_map(|e| e["grad_norm"].as_f64().and(e["loss"].as_f64())).collect()
    }
}

fn write_lines(path: &Path, lines: impl Iterator<Item = Value>) {
    std::fs::write(path, lines.map(|l| format!("{l}\n")).collect::<String>()).unwrap();
}

#[test]
fn conversations_train_and_resume_from_files_folders_and_globs() {
    let f = Fixture::new();
    let (chats, more) = (format!("0.75:{}", f.at("chats.jsonl")), format!("0.25:{}", f.at("more")));
    let data = ["--data", &chats, "--data", &more, "--steps", "6"];
    let text = f.trains(&data);
    assert!(text.contains("chats.jsonl: ") && text.contains("loss on"), "{text}");
    assert!(text.contains("validation loss"), "{text}");
    let losses = f.losses();
    assert_eq!(losses.len(), 6);
    assert!(losses.iter().all(|l| l.is_finite() && *l > 0.0), "{losses:?}");
    // The same, with a glob for the folder, is the same data: the run has nothing left to do.
    let glob = format!("0.25:{}", f.at("more/*.jsonl"));
    let text = f.trains(&["--data", &chats, "--data", &glob, "--steps", "6"]);
    assert!(text.contains("all 6 steps are done"), "{text}");
    // Other conversations in the same file are other data.
    let line =
        r#"{"messages": [{"role": "user", "content": "new"}, {"role": "assistant", "content": "data"}]}"#;
    std::fs::write(f.at("chats.jsonl"), format!("{line}\n").repeat(60)).unwrap();
    let text = f.refuses(&["--data", &chats, "--data", &more, "--steps", "8"]);
    assert!(text.contains("--allow-changes") && text.contains("data.path"), "{text}");
}

#[test]
fn a_pair_of_data_build_and_its_files_train_alike() {
    let f = Fixture::new();
    let (chats, pair) = (f.at("chats.jsonl"), f.at("pair"));
    let built = json(&["data", "build", &chats, "--output", &pair, "--tokenizer", path(&f.hf)]);
    assert_eq!(
        (&built["documents"], &built["chat"], &built["eod"]),
        (&json!(50), &json!(true), &Value::Null)
    );
    f.trains(&["--data", &pair, "--steps", "4"]);
    let losses = f.losses();
    f.trains(&["--data", &chats, "--steps", "4", "--fresh"]);
    assert_eq!(f.losses(), losses);
    f.trains(&["--data", &chats, "--steps", "4", "--fresh", "--set", "data.packing=\"none\""]);
    assert_ne!(f.losses(), losses);
    // Both runs have read what the first of them tokenized; another template is other text.
    let cached = || names(&f.dir.path().join("cache")).iter().filter(|n| n.ends_with(".idx")).count();
    assert_eq!(cached(), 1);
    std::fs::write(f.hf.join("chat_template.jinja"), TEMPLATE.replace("'<'", "'['")).unwrap();
    f.trains(&["--data", &chats, "--steps", "4", "--fresh"]);
    assert_eq!(cached(), 2);
}

/// A run names its tokenizer and template by the model it was trained from, through any number of runs.
#[test]
fn a_run_is_trained_further_with_its_tokenizer_and_chat_template() {
    let f = Fixture::new();
    let data = ["--data", &f.at("chats.jsonl"), "--steps", "2"].map(String::from);
    let data: Vec<&str> = data.iter().map(String::as_str).collect();
    f.trains(&data);
    std::fs::rename(f.at("out"), f.at("first")).unwrap();
    for (from, to) in [("first", "second"), ("second", "third")] {
        let hf = format!("model.hf={}", f.at(from));
        let text = f.trains(&[&data[..], &["--set", &hf]].concat());
        assert!(text.contains("loss on"), "{text}");
        std::fs::rename(f.at("out"), f.at(to)).unwrap();
    }
    let [first, third] = ["first", "third"].map(|run| {
        let data = f.at("chats.jsonl");
        json(&["eval", &f.at(run), "--data", &data, "--limit", "3"])["data"][0]["tokens"].clone()
    });
    assert_eq!(first, third);
}

#[test]
fn padding_free_batches_count_conversations_and_their_tokens() {
    let f = Fixture::new();
    let (chats, more) = (f.at("chats.jsonl"), f.at("more"));
    let set =
        ["--set", "data.packing=padding_free", "--set", "train.micro_batch=2", "--set", "train.epochs=2"];
    let text = f.trains(&[&["--data", &chats, "--data", &more, "--set", "eval.every=0"][..], &set].concat());
    assert!(text.contains("padding-free: samples of ") && text.contains("2 to a micro-batch"), "{text}");
    // 90 % of 50 and 40 conversations twice, four to a step.
    assert_eq!(f.losses().len(), 41, "{text}");
    let log = std::fs::read_to_string(f.dir.path().join("out/events.jsonl")).unwrap();
    let last = log.lines().rev().find_map(|l| serde_json::from_str::<Value>(l).unwrap()["epoch"].as_f64());
    assert!((last.unwrap() - 2.0).abs() < 0.1, "{last:?}");
}

#[test]
fn text_files_are_tokenized_by_train() {
    let (dir, recipe) = folder();
    let at = |name: &str| dir.path().join(name).display().to_string();
    write_lines(
        &dir.path().join("t.jsonl"),
        (0..200).map(|i| json!({"text": format!("document {i} of many")})),
    );
    let (cache, out, data) = (format!("data.cache={}", at("cache")), at("out"), at("*.jsonl"));
    ok(&["train", path(&recipe), "--data", &data, "--set", &cache, "--set", "eval.every=0", "--out", &out]);
    let wrong = format!("{data}x");
    let e = fails(&["train", path(&recipe), "--data", &wrong, "--set", &cache, "--out", &at("none")], 1);
    assert!(e.contains("no file matches"), "{e}");
    let set = ["--set", &cache, "--set", "data.field=\"body\""];
    let e = fails(&[&["train", path(&recipe), "--data", &data, "--out", &at("none")][..], &set].concat(), 1);
    assert!(e.contains("line 1: has no key \"body\""), "{e}");
}

#[test]
fn refusals_say_the_way_out() {
    let f = Fixture::new();
    let chats = f.at("chats.jsonl");
    let e = f.refuses(&["--data", &format!("0.5:{chats}"), "--data", &f.at("more")]);
    assert!(e.contains("has no weight") && e.contains("--data 1:"), "{e}");
    let e = f.refuses(&["--data", &chats, "--set", "data.truncation=\"left\""]);
    assert!(e.contains("data.truncation") && e.contains("keep_start"), "{e}");
    let e = f.refuses(&["--data", &chats, "--set", "data.truncation=\"refuse\"", "--set", "data.seq_len=4"]);
    assert!(e.contains("raise it, or choose with data.truncation"), "{e}");
    let e = f.refuses(&["--data", &chats, "--set", "data.format=\"text\""]);
    assert!(e.contains("has no key \"text\""), "{e}");
    let e = f.refuses(&["--data", &f.at("nowhere.jsonl")]);
    assert!(e.contains("there is no file, folder or .bin/.idx pair") && e.contains("data build"), "{e}");
    // A list of conversations, and lines under another ending, are not one text.
    let (list, other) = (f.at("list.json"), f.at("lines.txt"));
    std::fs::write(&list, "[{\"messages\": []}]").unwrap();
    std::fs::copy(&chats, &other).unwrap();
    for (path, set) in
        [(&list, "data.format=auto"), (&list, "data.format=chat"), (&other, "data.format=chat")]
    {
        let e = f.refuses(&["--data", path, "--set", set]);
        assert!(e.contains(path.as_str()) && e.contains("jq -c") && e.contains("rename it to .jsonl"), "{e}");
    }
    let bad = f.at("bad.jsonl");
    std::fs::write(&bad, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n{\"messages\": []}\n")
        .unwrap();
    let e = f.refuses(&["--data", &bad]);
    assert!(e.contains("bad.jsonl: line 2: \"messages\" is empty"), "{e}");
    std::fs::write(&bad, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n").unwrap();
    let e = f.refuses(&["--data", &bad]);
    assert!(e.contains("none of its 1 conversations has an assistant's turn"), "{e}");
    std::fs::remove_file(f.hf.join("chat_template.jinja")).unwrap();
    let e = f.refuses(&["--data", &chats]);
    assert!(e.contains("no chat template") && e.contains("data.chat_template"), "{e}");
    // Prompts and completions need none.
    f.trains(&["--data", &f.at("more/b.jsonl"), "--steps", "2"]);
}
