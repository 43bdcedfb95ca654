//! Corrupt, missing and misplaced files give a one-sentence error and a non-zero exit code, lose no data and never
//! panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/support/golden.rs"]
mod golden;
mod support;

use ferrotron_core::data::{IndexedWriter, TokenType};
use std::path::Path;
use support::soak::rounds;
use support::{
    Finished, SeededRng, assert_no_internals, assert_one_sentence_error, copy, files, recipe, run,
};

/// A corruption may turn a value into another valid one (a weight, a token), and the command may succeed; a truncated
/// file must fail.
fn assert_success_or_one_sentence_error(e: &Finished, corruption: &str, what: &str) {
    if e.code == Some(0) && corruption != "cut short" {
        assert_no_internals(e, what)
    } else {
        assert_one_sentence_error(e, what)
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, "[checkpoint]\nevery = 2\n");
    let out = dir.path().join("run");
    let args = ["train", recipe.to_str().unwrap(), "--out", out.to_str().unwrap()];
    assert_eq!(run(&args).code, Some(0));
    let newest = out.join("checkpoints/step-00000004");
    let mut dice = SeededRng(11);
    for (name, good) in files(&newest) {
        let path = newest.join(&name);
        for round in 0..rounds(24) {
            let (corruption, bad) = dice.corrupt(&good);
            if bad == good {
                continue;
            }
            std::fs::write(&path, &bad).unwrap();
            let before = files(&out);
            let what = format!("{} {corruption} ({round})", name.display());
            let e = run(&args);
            assert_one_sentence_error(&e, &what);
            assert!(e.err.contains(name.to_str().unwrap()), "{what}: {}", e.err);
            assert!(e.err.contains("step-00000002 is still there"), "{what}: {}", e.err);
            assert!(files(&out) == before, "{what}: the folder changed");
        }
        std::fs::write(&path, &good).unwrap();
    }
    // Whole again, it goes on.
    let e = run(&[&args[..], &["--steps", "6"]].concat());
    assert!(e.code == Some(0) && e.err.contains("resuming small after step 4 of 6"), "{}", e.err);
}

#[test]
fn a_damaged_log_is_no_reason_to_stop() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, "");
    let out = dir.path().join("run");
    let args = ["train", recipe.to_str().unwrap(), "--out", out.to_str().unwrap()];
    assert_eq!(run(&args).code, Some(0));
    let log = out.join("events.jsonl");
    let good = std::fs::read(&log).unwrap();
    let mut dice = SeededRng(12);
    for _ in 0..rounds(12) {
        let (corruption, bad) = dice.corrupt(&good);
        std::fs::write(&log, &bad).unwrap();
        let e = run(&args);
        assert_no_internals(&e, corruption);
        assert_eq!(e.code, Some(0), "{corruption}: {}", e.err);
        // What it left is a log again.
        ferrotron_core::events::read(&log).unwrap();
    }
}

#[test]
fn a_damaged_model_folder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, output) = (dir.path().join("model"), dir.path().join("out.safetensors"));
    copy(&golden::fixture("qwen3"), &model);
    let args = ["forward", "--backward", "--model", model.to_str().unwrap(), "--input"];
    let input = model.join("expected.safetensors");
    let args = [&args[..], &[input.to_str().unwrap(), "--output", output.to_str().unwrap()]].concat();
    let mut dice = SeededRng(13);
    for (name, count) in [("config.json", 60), ("model.safetensors", 40), ("expected.safetensors", 40)] {
        let path = model.join(name);
        let good = std::fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()).min(good.len() as u64) as usize;
        for round in 0..rounds(count) {
            // Half of them in the header, which is a small part of the file.
            let (corruption, bad) = if round % 2 == 0 && name != "config.json" {
                let (corruption, mut bad) = dice.corrupt(&good[..header]);
                bad.extend_from_slice(&good[header..]);
                // A cut header with the data after it is as damaged, but is not short.
                (if corruption == "cut short" { "a hole" } else { corruption }, bad)
            } else {
                dice.corrupt(&good)
            };
            std::fs::write(&path, &bad).unwrap();
            let what = format!("{name} {corruption} ({round})");
            let e = run(&args);
            assert_success_or_one_sentence_error(&e, corruption, &what);
            assert_eq!(output.exists(), e.code == Some(0), "{what}: a result of a failure");
            if output.exists() {
                std::fs::remove_file(&output).unwrap();
            }
        }
        std::fs::write(&path, &good).unwrap();
    }
    assert_eq!(run(&args).code, Some(0));
}

#[test]
fn damaged_data_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("text");
    let mut writer = IndexedWriter::create(&prefix, TokenType::for_vocab(256), false).unwrap();
    let mut dice = SeededRng(14);
    for _ in 0..40 {
        let tokens: Vec<i64> = (0..1 + dice.below(30)).map(|_| dice.below(256) as i64).collect();
        writer.push(tokens, 0).unwrap();
        writer.end_document().unwrap();
    }
    writer.finish().unwrap();
    let recipe = recipe(dir.path(), 2, "");
    let out = dir.path().join("run");
    let args = ["train", recipe.to_str().unwrap(), "--data", prefix.to_str().unwrap(), "--fresh", "--out"];
    let args = [&args[..], &[out.to_str().unwrap()]].concat();
    let e = run(&args);
    assert_eq!(e.code, Some(0), "{}", e.err);
    for ending in ["bin", "idx"] {
        let path = prefix.with_extension(ending);
        let good = std::fs::read(&path).unwrap();
        for round in 0..rounds(50) {
            let (corruption, bad) = dice.corrupt(&good);
            std::fs::write(&path, &bad).unwrap();
            let what = format!(".{ending} {corruption} ({round})");
            assert_success_or_one_sentence_error(&run(&args), corruption, &what);
        }
        std::fs::write(&path, &good).unwrap();
    }
    assert_eq!(run(&args).code, Some(0));
}

#[test]
fn a_damaged_recipe_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let more = "[eval]\nevery = 3\nbatches = 1\n[checkpoint]\nevery = 2\nkeep = 3\n";
    let recipe = recipe(dir.path(), 4, more);
    let args = ["train", recipe.to_str().unwrap(), "--dry-run"];
    let good = std::fs::read(&recipe).unwrap();
    assert_eq!(run(&args).code, Some(0));
    let mut dice = SeededRng(15);
    for round in 0..rounds(120) {
        let (corruption, bad) = dice.corrupt(&good);
        std::fs::write(&recipe, &bad).unwrap();
        let e = run(&args);
        if e.code != Some(0) {
            assert_one_sentence_error(
                &e,
                &format!("{corruption} ({round}): {}", String::from_utf8_lossy(&bad)),
            );
        }
        assert_no_internals(&e, corruption);
    }
}

/// Missing paths, a folder in place of a file, an empty file, a file in place of a folder.
#[test]
fn missing_and_misplaced_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let recipe = recipe(dir.path(), 2, "").to_str().unwrap().to_string();
    let model = at("model");
    copy(&golden::fixture("qwen3"), Path::new(&model));
    let input = format!("{model}/expected.safetensors");
    std::fs::create_dir(at("folder")).unwrap();
    std::fs::write(at("empty"), "").unwrap();
    std::fs::create_dir(at("folder.toml")).unwrap();
    for ending in ["bin", "idx"] {
        std::fs::write(at(&format!("nothing.{ending}")), "").unwrap();
        std::fs::create_dir(at(&format!("folders.{ending}"))).unwrap();
    }
    let forward = |m: &str, i: &str, o: &str| {
        vec![
            "forward".to_string(),
            "--model".into(),
            m.into(),
            "--input".into(),
            i.into(),
            "--output".into(),
            o.into(),
        ]
    };
    let train = |rest: &[&str]| {
        let mut args = vec!["train".to_string()];
        args.extend(rest.iter().map(|s| s.to_string()));
        args
    };
    let cases: Vec<(Vec<String>, &str)> = vec![
        (forward(&at("nowhere"), &input, &at("o")), "nowhere"),
        (forward(&at("folder"), &input, &at("o")), "folder"),
        (forward(&at("empty"), &input, &at("o")), "empty"),
        (forward(&model, &at("nowhere"), &at("o")), "nowhere"),
        (forward(&model, &at("folder"), &at("o")), "folder"),
        (forward(&model, &at("empty"), &at("o")), "empty"),
        (forward(&model, &input, &at("nowhere/o")), "nowhere"),
        (forward(&model, &input, &at("folder")), "folder"),
        (forward(&model, &format!("{model}/model.safetensors"), &at("o")), "input_ids"),
        (train(&[&at("nowhere.toml")]), "nowhere.toml"),
        (train(&[&at("folder.toml")]), "folder.toml"),
        (train(&[&recipe, "--data", &at("nowhere"), "--out", &at("r1")]), "nowhere"),
        (train(&[&recipe, "--data", &at("nothing"), "--out", &at("r2")]), "nothing"),
        (train(&[&recipe, "--data", &at("folders"), "--out", &at("r3")]), "folders"),
        (train(&[&recipe, "--out", &at("empty")]), "empty"),
        (train(&[&recipe, "--out", &at("empty/below")]), "empty"),
        (train(&[&recipe, "--set", &format!("model.hf={}", at("folder")), "--out", &at("r4")]), "folder"),
    ];
    for (args, name) in cases {
        let e = run(&args);
        assert_one_sentence_error(&e, &format!("{args:?}"));
        assert!(e.err.contains(name), "{args:?}: {}", e.err);
        assert!(e.out.is_empty(), "{args:?}: {}", e.out);
    }
    assert!(!Path::new(&at("o")).exists());
}
