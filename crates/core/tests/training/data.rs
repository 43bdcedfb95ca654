//! Data in runs: batch-size ramps, evaluation, blends, packed documents.

use super::support::*;
use ferrotron_core::config::Resolved;
use ferrotron_core::data::{Batches, source};
use ferrotron_core::events::Event;
use std::path::Path;

/// Documents of a toy language, each ended by token 0.
fn documents(count: usize, salt: i64) -> Vec<Vec<i64>> {
    (0..count as i64)
        .map(|d| {
            let mut token = 1 + (d * 5 + salt) % 14;
            let mut out = Vec::new();
            for _ in 0..3 + (d * 7 + salt) % 23 {
                out.push(token);
                token = 1 + (3 * token + salt) % 14;
            }
            out.push(0);
            out
        })
        .collect()
}

fn with_data(prefixes: &[&Path], changes: &[&str]) -> Resolved {
    let list: Vec<String> = prefixes.iter().map(|p| format!("{:?}", p.display().to_string())).collect();
    let path = format!("data.path=[{}]", list.join(", "));
    recipe(&[&[path.as_str(), "data.eod=0"], changes].concat())
}

#[test]
fn the_batch_grows_as_the_recipe_says() {
    let dir = tempfile::tempdir().unwrap();
    let r =
        recipe(&["train.steps=8", "train.global_batch=8", "train.micro_batch=2", "train.ramp=[2, 2, 12]"]);
    let (_, events) = run(dir.path(), &r, 2, &RULE, None, None);
    let mut samples = 0;
    let mut sizes = Vec::new();
    for e in &events {
        if let Event::Step(s) = e {
            sizes.push(s.batch);
            samples += s.batch;
            assert_eq!(s.tokens, samples * 16);
        }
    }
    assert_eq!(sizes.len(), 8);
    assert_eq!((sizes[0], *sizes.last().unwrap()), (2, 8));
    assert!(sizes.windows(2).all(|w| w[0] <= w[1]) && sizes.contains(&4), "{sizes:?}");
    assert_eq!(samples, r.plan.samples);
}

#[test]
fn evaluation_comes_when_asked_and_changes_nothing() {
    let (plain, watched) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let r = recipe(&["train.steps=7"]);
    run(plain.path(), &r, 2, &RULE, None, None);
    let r = recipe(&["train.steps=7", "eval.every=3", "eval.batches=2"]);
    let (outcome, events) = run(watched.path(), &r, 2, &RULE, Some(&RULE), None);
    assert!(newest(plain.path()) == newest(watched.path()));
    let evals: Vec<_> = events
        .iter()
        .filter_map(|e| match e {
            Event::Eval(e) => Some((e.step, e.tokens, e.loss)),
            _ => None,
        })
        .collect();
    assert_eq!(evals.iter().map(|e| (e.0, e.1)).collect::<Vec<_>>(), [(3, 128), (6, 128), (7, 128)]);
    assert!(evals[2].2 < evals[0].2);
    assert_eq!(outcome.eval, Some(evals[2].2));
    // The last evaluation again, from the checkpoint.
    let mut t = trainer(&r);
    let path = ferrotron_core::checkpoint::latest(&watched.path().join("checkpoints")).unwrap().unwrap();
    t.restore(&ferrotron_core::checkpoint::load(&path).unwrap()).unwrap();
    assert_eq!(t.evaluate(&RULE, 4).unwrap(), evals[2].2);
    assert_eq!((t.step(), t.samples(), t.tokens()), (7, 28, 28 * 16));
}

#[test]
fn a_blend_runs_resumes_and_keeps_its_proportions() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    write_data(&a, &documents(60, 1));
    write_data(
        &b,
        &documents(50, 2)
            .iter()
            .map(|d| d.iter().map(|t| if *t == 0 { 0 } else { 15 }).collect())
            .collect::<Vec<_>>(),
    );
    let changes =
        ["data.weights=[3, 1]", "data.split=[90, 10, 0]", "train.steps=10", "eval.every=5", "eval.batches=1"];
    let r = with_data(&[&a, &b], &changes);
    let sources = source::open(&r).unwrap();
    // A sample's tokens tell which dataset it is from.
    let from_b = (0..40)
        .filter(|n| sources.train.batch(*n, 1).unwrap().tokens.iter().all(|t| [0, 15].contains(t)))
        .count();
    assert_eq!(from_b, 10);
    let (whole, stopped) = (dir.path().join("whole"), dir.path().join("stopped"));
    let (_, events) = run(&whole, &r, 2, &*sources.train, sources.eval.as_deref(), None);
    let l = losses(&events);
    assert!(l[9] < l[0], "{l:?}");
    run(&stopped, &r, 1, &*sources.train, sources.eval.as_deref(), Some(4));
    run(&stopped, &r, 2, &*source::open(&r).unwrap().train, sources.eval.as_deref(), None);
    assert!(newest(&whole) == newest(&stopped));
}

#[test]
fn packed_documents_train_without_cross_attention() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("text");
    write_data(&prefix, &documents(80, 3));
    let r =
        with_data(&[&prefix], &["data.reset_at_documents=true", "data.mask_eod_loss=true", "train.steps=12"]);
    let sources = source::open(&r).unwrap();
    let batch = sources.train.batch(0, 4).unwrap();
    let offsets = batch.cu_seqlens.clone().unwrap();
    assert!(offsets.len() > 5, "{offsets:?}");
    for (i, t) in batch.tokens.iter().enumerate().filter(|(_, t)| **t == 0) {
        assert_eq!(batch.labels[i], -100, "the end of a document has a loss: {t}");
    }
    // Another document in front changes nothing: rows that differ only there end with equal losses.
    let mut t = trainer(&r);
    let first = t.train_step(&*sources.train).unwrap();
    let last = (1..12).map(|_| t.train_step(&*sources.train).unwrap()).last().unwrap();
    assert!(last.loss < first.loss, "{first:?} {last:?}");
    let run_dir = dir.path().join("run");
    let (outcome, _) = run(&run_dir, &r, 3, &*sources.train, None, None);
    assert!(outcome.finished && outcome.loss == Some(last.loss));
}

/// Without evaluation, a validation split too small for one sample is accepted.
#[test]
fn few_documents_are_enough_without_evaluation() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("few");
    write_data(&prefix, &documents(12, 4));
    let sources = source::open(&with_data(&[&prefix], &[])).unwrap();
    assert!(sources.eval.is_none());
    sources.train.batch(0, 4).unwrap();
    let sources = source::open(&with_data(&[&prefix], &["eval.every=2"])).unwrap();
    let note = sources.note.unwrap();
    assert!(sources.eval.is_none() && note.contains("few") && note.contains("split"), "{note}");
}
