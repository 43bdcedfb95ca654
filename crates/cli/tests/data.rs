//! `data build`: tokenizes text, and training uses the result.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;
use serde_json::json;

/// Tokens of a .bin file of u16.
fn tokens(bin: &std::path::Path) -> Vec<u16> {
    std::fs::read(bin).unwrap().chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect()
}

#[test]
fn files_are_documents_and_lines_of_jsonl_are() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c, out] = ["a.txt", "b.jsonl", "c.md", "new/all"].map(|n| dir.path().join(n));
    std::fs::write(&a, "one\ntwo\n").unwrap();
    std::fs::write(&b, "{\"body\": \"x\"}\n\n{\"body\": \"yz\", \"n\": 1}\n").unwrap();
    std::fs::write(&c, "").unwrap();
    let args = ["data", "build", path(&a), path(&b), path(&c), "--output", path(&out), "--field", "body"];
    let v = json(&args);
    assert_eq!((&v["documents"], &v["skipped"], &v["tokens"]), (&json!(3), &json!(2), &json!(14)));
    assert_eq!((&v["vocab"], &v["eod"], &v["token_type"]), (&json!(256), &json!(0), &json!("uint16")));
    let want: Vec<u16> = "one\ntwo\n\0x\0yz\0".bytes().map(u16::from).collect();
    assert_eq!(tokens(&dir.path().join("new/all.bin")), want);
    assert_eq!(names(&dir.path().join("new")), ["all.bin", "all.dataset.json", "all.idx"]);

    assert!(fails(&args, 1).contains("already exists"));
    let text = ok(&[&args[..], &["--overwrite", "--no-eod"]].concat());
    assert!(text.contains("documents") && text.contains("none"), "{text}");
    assert_eq!(tokens(&dir.path().join("new/all.bin")).len(), 11);
    let v = json(&[&args[..], &["--overwrite", "--eod", "255"]].concat());
    assert_eq!(v["eod"], 255);
    assert!(fails(&[&args[..], &["--overwrite", "--eod", "256"]].concat(), 1).contains("vocabulary"));
    fails(&[&args[..], &["--eod", "1", "--no-eod"]].concat(), 2);
}

#[test]
fn a_tokenizer_is_used_and_must_say_where_texts_end() {
    let (dir, _, run) = trained(&[]);
    let [hf, input, out] = ["hf", "in.txt", "out"].map(|n| dir.path().join(n));
    ok(&["convert", path(&run), path(&hf)]);
    std::fs::write(&input, "héllo").unwrap();
    let args = ["data", "build", path(&input), "--output", path(&out), "--tokenizer"];
    assert!(fails(&[&args[..], &[path(&hf), "--overwrite"]].concat(), 1).contains("--eod"));
    std::fs::write(hf.join("generation_config.json"), "{\"eos_token_id\": [7, 8]}").unwrap();
    for tokenizer in [hf.clone(), hf.join("tokenizer.json")] {
        assert_eq!(json(&[&args[..], &[path(&tokenizer), "--overwrite"]].concat())["eod"], 7);
        let mut want: Vec<u16> = "héllo".bytes().map(u16::from).collect();
        want.push(7);
        assert_eq!(tokens(&dir.path().join("out.bin")), want);
    }
    assert!(fails(&[&args[..], &["nowhere", "--overwrite"]].concat(), 2).contains("nowhere"));
}

#[test]
fn what_was_built_can_be_trained_on() {
    let (dir, recipe) = folder();
    let [one, many, pair] = ["one.txt", "many.jsonl", "pair"].map(|n| dir.path().join(n));
    std::fs::write(&one, "all in one document, ".repeat(50)).unwrap();
    let line = |i| format!("{{\"text\": \"document number {i} of many, each of them short\"}}\n");
    std::fs::write(&many, (0..60).map(line).collect::<String>()).unwrap();
    for (input, evaluated) in [(&one, false), (&many, true)] {
        ok(&["data", "build", path(input), "--output", path(&pair), "--overwrite"]);
        let out = dir.path().join(input.file_stem().unwrap());
        let set = ["--set", "eval.every=1", "--set", "eval.batches=1", "--set", "data.split=[90,10,0]"];
        let args = ["train", path(&recipe), "--data", path(&pair), "--out", path(&out)];
        let run = ferrotron(&[&args[..], &set].concat());
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(run.status.success(), "{said}");
        // One document cannot be split: training goes on without validation, and says so.
        assert_eq!(said.contains("no evaluation"), !evaluated, "{said}");
        let log = std::fs::read_to_string(out.join("events.jsonl")).unwrap();
        assert_eq!(log.contains("\"eval\""), evaluated, "{log}");
    }
}

#[test]
fn bad_input_is_named_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let [good, bad, out] = ["good.txt", "bad.jsonl", "out"].map(|n| dir.path().join(n));
    std::fs::write(&good, "x").unwrap();
    let cases: [(&[u8], &str); 6] = [
        (b"{\"text\": \"a\"}\nno", "line 2: is not a JSON object (expected ident at column 2)"),
        (b"{\n\"text\": \"a\"\n}\n", "every line of the file holds a whole object"),
        (b"{\"text\": 1}", "line 1"),
        (b"{\"txet\": \"a\"}", "txet"),
        (b"\xff", "UTF-8"),
        (b"", "no document"),
    ];
    for (content, says) in cases {
        std::fs::write(&bad, content).unwrap();
        let error = fails(&["data", "build", path(&bad), "--output", path(&out)], 1);
        assert!(error.contains("bad.jsonl") && error.contains(says), "{error}");
    }
    std::fs::write(&bad, "{}").unwrap();
    fails(&["data", "build", path(&good), path(&bad), "--output", path(&out)], 1);
    let empty = tempfile::tempdir().unwrap();
    let error = fails(&["data", "build", path(empty.path()), "--output", path(&out)], 1);
    assert!(error.contains("holds no data") && error.contains(".jsonl"), "{error}");
    assert!(fails(&["data", "build", "missing.txt", "--output", path(&out)], 2).contains("missing.txt"));
    fails(&["data", "build", path(&good)], 2);
    let folder = format!("{}/", dir.path().display());
    assert!(fails(&["data", "build", path(&good), "--output", &folder], 1).contains("add a name"));
    // A pair beside its text would be read in its place.
    assert!(fails(&["data", "build", path(&good), "--output", path(&good)], 1).contains("is a file"));
    assert_eq!(names(dir.path()), ["bad.jsonl", "good.txt"]);
}

/// Data of another tokenizer is refused before a run folder exists, and so are ids outside the vocabulary.
#[test]
fn data_of_another_tokenizer_is_refused() {
    let (dir, recipe) = folder();
    let [text, pair, out] = ["t.jsonl", "pair", "run"].map(|n| dir.path().join(n));
    let line = |i| format!("{{\"text\": \"document number {i} of many, each of them short\"}}\n");
    std::fs::write(&text, (0..60).map(line).collect::<String>()).unwrap();
    ok(&["data", "build", path(&text), "--output", path(&pair)]);
    let train = ["train", path(&recipe), "--data", path(&pair), "--out", path(&out), "--steps", "1"];
    let larger = [&train[..], &["--set", "model.vocab=1000"]].concat();
    let error = fails(&larger, 1);
    assert!(error.contains("byte-level tokens") && error.contains("data.check_tokenizer"), "{error}");
    assert!(!out.exists());
    ok(&[&larger[..], &["--set", "data.check_tokenizer=false", "--set", "generate.tokens=0"]].concat());
    let smaller = [&train[..], &["--set", "model.vocab=64", "--fresh"]].concat();
    let error = fails(&smaller, 2);
    assert!(
        error.contains("model.vocab: the data holds token") && error.contains("set it to 256"),
        "{error}"
    );
    // A pair of another tool has no description: its ids are read.
    std::fs::remove_file(dir.path().join("pair.dataset.json")).unwrap();
    let error = fails(&smaller, 1);
    assert!(error.contains("outside the vocabulary of 64"), "{error}");
    // A stale description is not believed.
    std::fs::write(
        dir.path().join("pair.dataset.json"),
        "{\"version\":1,\"tokenizer\":{\"vocab\":256,\"digest\":null},\"eod\":0,\"tokens\":5,\"largest_id\":9}",
    )
    .unwrap();
    assert!(fails(&smaller, 1).contains("describes 5 tokens"));
}

/// `train.epochs` gives the number of steps.
#[test]
fn epochs_give_the_length_of_a_run() {
    let (dir, recipe) = folder();
    let [text, pair] = ["t.jsonl", "pair"].map(|n| dir.path().join(n));
    let line = |i| format!("{{\"text\": \"document number {i:03} of many, each of them short\"}}\n");
    std::fs::write(&text, (0..200).map(line).collect::<String>()).unwrap();
    let tokens = json(&["data", "build", path(&text), "--output", path(&pair)])["tokens"].as_u64().unwrap();
    let dry = |epochs: &str| {
        let set = format!("train.epochs={epochs}");
        json(&[
            "train",
            path(&recipe),
            "--data",
            path(&pair),
            "--dry-run",
            "--set",
            &set,
            "--set",
            "data.split=[1,0,0]",
        ])
    };
    let (one, three) = (dry("1"), dry("3"));
    let per_step =
        one["config"]["train"]["global_batch"].as_u64().unwrap() * one["plan"]["seq_len"].as_u64().unwrap();
    assert_eq!(one["plan"]["steps"].as_u64().unwrap(), tokens.div_ceil(per_step));
    assert_eq!(three["plan"]["steps"].as_u64().unwrap(), (3 * tokens).div_ceil(per_step));
    let both = ["train", path(&recipe), "--dry-run", "--set", "train.epochs=0"];
    assert!(fails(&both, 2).contains("train.epochs"));
}
