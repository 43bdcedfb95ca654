//! Data in runs: batch-size ramps, evaluation, blends, packed documents.

use super::support::*;
use ferrotron_core::config::Resolved;
use ferrotron_core::data::{Batches, IGNORE, Packed, Row, source};
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

/// The pieces of documents that packing places, each alone in a row: no resets, padding behind it.
struct OnePiecePerRow(Vec<Vec<i64>>);

impl OnePiecePerRow {
    const SEQ: usize = 16;

    fn new(documents: &[Vec<i64>]) -> OnePiecePerRow {
        let piece = |d: &Vec<i64>, offset: usize| d[offset..d.len().min(offset + Self::SEQ + 1)].to_vec();
        let pieces =
            documents.iter().flat_map(|d| (0..d.len() - 1).step_by(Self::SEQ).map(move |o| piece(d, o)));
        OnePiecePerRow(pieces.collect())
    }
}

impl Batches for OnePiecePerRow {
    fn seq(&self) -> usize {
        Self::SEQ
    }
    fn samples(&self) -> u64 {
        self.0.len() as u64
    }
    fn resets(&self) -> bool {
        false
    }
    fn row(&self, n: u64, row: &mut Row) -> ferrotron_core::Result<()> {
        let piece = &self.0[(n % self.samples()) as usize];
        for i in 0..Self::SEQ {
            row.tokens.push(piece[..piece.len() - 1].get(i).map_or(0, |t| *t as i32));
            row.labels.push(piece.get(i + 1).map_or(IGNORE, |t| *t as i32));
            row.positions.push(i as i32);
        }
        row.starts.push(0);
        row.padding = Self::SEQ + 1 - piece.len();
        Ok(())
    }
}

/// Steps over all documents, packed by `data.packing`, against the same documents one to a row.
#[test]
fn packed_documents_train_like_unpacked_ones() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("text");
    let documents = documents(40, 5);
    write_data(&prefix, &documents);
    let alone = OnePiecePerRow::new(&documents);
    let rows = Packed::new(Box::new(documents.clone()), 16, 16, Some(1234)).unwrap().samples();
    assert!(rows < alone.samples() * 9 / 10, "{rows} rows of {} pieces", alone.samples());
    for (name, model) in [("dense", &[][..]), ("moe", &["moe.experts=4", "moe.topk=2"])] {
        let resolved = |batch: u64| {
            let batch = format!("train.global_batch={batch}");
            let common = ["train.steps=4", "train.micro_batch=1", "data.split=[100, 0, 0]", "eval.every=0"];
            let packing = ["data.packing=\"documents\"", batch.as_str()];
            with_data(&[&prefix], &[&packing[..], &common, model].concat())
        };
        let (packed, unpacked) = (resolved(rows), resolved(alone.samples()));
        let sources = source::open(&packed).unwrap();
        assert!(sources.notes[0].contains("% of positions hold tokens"));
        let (mut a, mut b) = (trainer(&packed), trainer(&unpacked));
        for step in 0..4 {
            let ours = a.train_step(&*sources.train).unwrap().loss;
            let oracle = b.train_step(&alone).unwrap().loss;
            // Adam amplifies the rounding of gradients that should be zero.
            let bound = if step == 0 { 2e-6 } else { 1e-4 };
            assert!((ours - oracle).abs() < bound * oracle, "{name} step {step}: {ours} {oracle}");
            // The load-balancing loss is a mean over each micro-batch, so later steps of an MoE model differ.
            if name == "moe" {
                break;
            }
        }
    }
    let (outcome, _) =
        run(&dir.path().join("run"), &resolved_run(&prefix), 2, &*open_run(&prefix), None, None);
    assert!(outcome.finished);
}

fn resolved_run(prefix: &Path) -> Resolved {
    with_data(&[prefix], &["data.packing=\"documents\"", "train.steps=3"])
}

fn open_run(prefix: &Path) -> Box<dyn Batches> {
    source::open(&resolved_run(prefix)).unwrap().train
}

#[test]
fn packed_splits_and_blends() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    write_data(&a, &documents(60, 1));
    write_data(&b, &documents(50, 2).iter().map(|d| vec![15; d.len()]).collect::<Vec<_>>());
    let changes =
        ["data.packing=\"documents\"", "data.weights=[3, 1]", "data.split=[90, 10, 0]", "train.steps=10"];
    let sources = source::open(&with_data(&[&a, &b], &[&changes[..], &["eval.every=5"]].concat())).unwrap();
    let from_b =
        |n: &u64| sources.train.batch(*n, 1).unwrap().labels.iter().all(|t| [IGNORE, 15].contains(t));
    assert_eq!((0..40).filter(from_b).count(), 10);
    // Training and validation share no document: those of `a` differ in their first tokens and lengths.
    let eval = sources.eval.unwrap();
    assert!(eval.samples() > 0 && eval.resets());
}

/// A share that rounds to no document still gives one, as long as training has another.
#[test]
fn validation_gets_a_document_where_there_are_two() {
    let dir = tempfile::tempdir().unwrap();
    for packing in ["documents", "padding_free"] {
        for count in 1..5 {
            let (few, all) = (dir.path().join(format!("{packing}{count}")), documents(count, 4));
            write_data(&few, &all);
            let changes = [&format!("data.packing={packing:?}"), "eval.every=5", "data.split=[99, 1, 0]"];
            let sources = source::open(&with_data(&[&few], &changes)).unwrap();
            let note = sources.notes.iter().any(|n| n.contains("no evaluation"));
            assert_eq!((sources.eval.is_some(), note), (count > 1, count == 1), "{count}");
            let Some(eval) = sources.eval else { continue };
            // Only the last document is set aside: the validation rows are its inputs.
            let held_out: Vec<i32> = all[count - 1].iter().map(|t| *t as i32).collect();
            let batch = eval.batch(0, 1).unwrap();
            let length = (held_out.len() - 1).min(16);
            assert_eq!(batch.tokens[..length], held_out[..length], "{packing} {count}");
            assert!(batch.labels[length..].iter().all(|l| *l == IGNORE));
        }
    }
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
    let note = sources.notes.concat();
    assert!(sources.eval.is_none() && note.contains("few") && note.contains("split"), "{note}");
}

/// What goes by evaluations is refused where there can be none.
#[test]
fn the_best_checkpoint_needs_validation_data() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("one");
    let open = |all: &[&str]| source::open(&with_data(&[&prefix], all));
    for set in ["checkpoint.best=true", "eval.patience=2"] {
        let key = set.split('=').next().unwrap();
        let all = ["eval.every=1", "data.packing=\"documents\"", "data.split=[99, 1, 0]", set];
        write_data(&prefix, &documents(1, 4));
        let e = refusal(open(&all));
        assert!(e.contains(key) && e.contains("data.split leaves no validation data"), "{e}");
        write_data(&prefix, &documents(2, 4));
        assert!(open(&all).unwrap().eval.is_some());
    }
}

/// A member without a validation split does not end the evaluation of the others, and every member has its own loss.
#[test]
fn blends_are_evaluated_member_by_member() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a", "b", "few"].map(|n| dir.path().join(n));
    write_data(&paths[0], &documents(80, 1));
    write_data(&paths[1], &documents(80, 2).iter().map(|d| vec![15; d.len()]).collect::<Vec<_>>());
    write_data(&paths[2], &documents(2, 4));
    let changes = ["data.split=[80, 20, 0]", "eval.every=4", "eval.batches=4", "train.steps=4"];
    let with = |which: &[&Path]| with_data(which, &changes);
    let r = with(&[&paths[0], &paths[1], &paths[2]]);
    let sources = source::open(&r).unwrap();
    let note = sources.notes.concat();
    assert!(note.contains("no evaluation on") && note.contains("few"), "{note}");
    let eval = sources.eval.unwrap();
    let members = eval.members();
    assert_eq!(members.iter().map(|m| m.weight).collect::<Vec<_>>(), [0.5, 0.5]);
    let (_, events) = run(&dir.path().join("run"), &r, 2, &*sources.train, Some(&*eval), None);
    let evals: Vec<_> =
        events.iter().filter_map(|e| if let Event::Eval(e) = e { Some(e) } else { None }).collect();
    let [a, b] = [0, 1].map(|m| evals[0].members[&paths[m].display().to_string()]);
    assert_eq!((evals.len(), evals[0].members.len(), evals[0].loss), (1, 2, 0.5 * a + 0.5 * b));
    // The dataset of one token is learnt at once, the other is not.
    assert!(b < a, "{a} {b}");
}

/// The epochs of a run are told where they are many, and one epoch is the training split.
#[test]
fn epochs_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("d");
    let all = documents(50, 1);
    write_data(&prefix, &all);
    let tokens: usize = all.iter().map(Vec::len).sum();
    let open =
        |steps: &str| source::open(&with_data(&[&prefix], &["data.split=[100, 0, 0]", steps])).unwrap();
    let few = open("train.steps=2");
    assert_eq!(few.epoch_tokens, tokens as u64);
    assert!(few.notes.is_empty(), "{:?}", few.notes);
    let many = open("train.steps=2000").notes.concat();
    assert!(many.contains("epochs") && many.contains(&tokens.to_string()), "{many}");
}
