//! Resuming with another configuration or other data is noticed.

use super::support::{Finished, SeededRng, assert_one_sentence_error, files, recipe, run};
use super::{of_kind, train};
use ferrotron_core::data::{IndexedWriter, TokenType};
use std::path::Path;

/// A dataset of documents whose lengths do not depend on the seed.
fn data(prefix: &Path, documents: usize, seed: u64) {
    let mut dice = SeededRng(seed);
    let mut out = IndexedWriter::create(prefix, TokenType::U16, false).unwrap();
    for d in 0..documents {
        let tokens: Vec<i64> = (0..10 + d % 7).map(|_| dice.below(256) as i64).collect();
        out.push(tokens, 0).unwrap();
        out.end_document().unwrap();
    }
    out.finish().unwrap();
}

fn ok(e: Finished) -> Finished {
    assert_eq!(e.code, Some(0), "{}", e.err);
    e
}

#[test]
fn changes_are_printed_and_the_configuration_of_every_segment_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, "");
    let out = dir.path().join("run");
    ok(run(&train(&recipe, &out, &[])));
    let first = std::fs::read(out.join("config.toml")).unwrap();
    let changes = [
        "optimizer.lr=2e-3",
        "optimizer.betas=[0.9, 0.99]",
        "schedule.decay=linear",
        "precision.dtype=f32",
        "dropout.hidden=0.2",
        "train.micro_batch=4",
    ];
    let more: Vec<&str> =
        ["--steps", "6"].into_iter().chain(changes.iter().flat_map(|c| ["--set", c])).collect();
    let e = ok(run(&train(&recipe, &out, &more)));
    for key in changes.map(|c| c.split_once('=').unwrap().0) {
        assert!(e.err.contains(&format!("changed since step 4: {key} ")), "{key}: {}", e.err);
    }
    assert!(e.err.contains("optimizer.lr 0.003 -> 0.002"), "{}", e.err);
    assert!(e.err.contains("train.steps 4 -> 6"), "{}", e.err);
    // How the schedule goes on: the old one had ended.
    assert!(e.err.contains("learning rate: 3.000e-4 at step 4 under the old schedule"), "{}", e.err);
    assert!(e.err.contains("at step 5 under the new one"), "{}", e.err);
    assert_eq!(std::fs::read(out.join("config-until-00000004.toml")).unwrap(), first);
    assert!(std::fs::read_to_string(out.join("config.toml")).unwrap().contains("lr = 0.002"));
    let resume = &of_kind(&out, "resume")[0];
    assert_eq!(resume["step"], 4);
    assert!(resume["changes"].as_array().unwrap().iter().any(|c| c["key"] == "optimizer.lr"), "{resume}");
    // The same again: nothing to say.
    let e = ok(run(&train(&recipe, &out, &more)));
    assert!(!e.err.contains("changed since"), "{}", e.err);
}

#[test]
fn what_breaks_the_data_position_is_refused_unless_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, "");
    let fixed =
        std::fs::read_to_string(&recipe).unwrap().replace("layers = 2", "layers = 2\nmax_positions = 64");
    std::fs::write(&recipe, fixed).unwrap();
    let [a, b] = ["a", "b"].map(|n| dir.path().join(n));
    data(&a, 600, 1);
    data(&b, 600, 3);
    let out = dir.path().join("run");
    let with_a = ["--data", a.to_str().unwrap()];
    ok(run(&train(&recipe, &out, &with_a)));
    let before = files(&out);
    let refused = |key: &str, more: &[&str]| {
        let more = [&["--steps", "6"], more].concat();
        let e = run(&train(&recipe, &out, &more));
        assert_one_sentence_error(&e, key);
        assert!(e.err.contains(&format!("--allow-changes {key}")), "{key}: {}", e.err);
        let now = files(&out);
        assert!(before.iter().all(|(p, b)| p.ends_with(".lock") || now.get(p) == Some(b)), "{key}: changed");
    };
    for set in ["data.seed=7", "data.split=90,10,0", "data.seq_len=4", "train.global_batch=8"] {
        let key = set.split_once('=').unwrap().0;
        refused(key, &[&with_a[..], &["--set", set]].concat());
    }
    refused("data.path", &["--data", b.to_str().unwrap()]);
    refused("data.weights,data.path", &["--data", a.to_str().unwrap(), "--data", b.to_str().unwrap()]);
    // Moved data is the same data.
    let moved = dir.path().join("moved");
    for end in ["bin", "idx"] {
        std::fs::copy(a.with_extension(end), moved.with_extension(end)).unwrap();
    }
    let e = ok(run(&train(&recipe, &out, &["--steps", "5", "--data", moved.to_str().unwrap()])));
    assert!(!e.err.contains("data.path"), "{}", e.err);
    // Rebuilt with the same lengths and other tokens.
    let index = std::fs::read(a.with_extension("idx")).unwrap();
    data(&a, 600, 2);
    assert_eq!(std::fs::read(a.with_extension("idx")).unwrap(), index);
    let args = [&["--steps", "6"], &with_a[..]].concat();
    let e = run(&train(&recipe, &out, &args));
    assert_one_sentence_error(&e, "rebuilt data");
    let e = ok(run(&train(&recipe, &out, &[&args[..], &["--allow-changes", "data.path"]].concat())));
    assert!(e.err.contains("changed since step 5: data.path"), "{}", e.err);
    let e = run(&train(&recipe, &out, &["--allow-changes", "optimizer.lr"]));
    assert!(e.code == Some(2) && e.err.contains("never refused"), "{}", e.err);
}

#[test]
fn more_steps_than_an_epoch_holds_reorder_the_data() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, "");
    let a = dir.path().join("a");
    // About 65 samples of 8 tokens: 16 steps of 4 sequences.
    data(&a, 40, 1);
    let out = dir.path().join("run");
    let with_a = ["--data", a.to_str().unwrap()];
    ok(run(&train(&recipe, &out, &with_a)));
    ok(run(&train(&recipe, &out, &[&with_a[..], &["--steps", "8"]].concat())));
    let args = [&with_a[..], &["--steps", "60"]].concat();
    let e = run(&train(&recipe, &out, &args));
    assert_one_sentence_error(&e, "another number of epochs");
    assert!(e.err.contains("--allow-changes data.order") && e.err.contains("epochs"), "{}", e.err);
    ok(run(&train(&recipe, &out, &[&args[..], &["--allow-changes", "data.order"]].concat())));
}
