//! Determinism: the same bits when repeated, with other thread counts, resumed, and under the race checker.

use super::support::*;
use ferrotron_core::checkpoint;
use ferrotron_core::data::Batches;
use ferrotron_core::train::{Run, Trainer};
use ferrotron_engine::{Dropout, Part, Rank, StepContext, StepNumber, initial_values};
use ferrotron_tensor::{DType, Instrumentation};

/// Keys that make layer sizes differ from each other; all stay multiples of 32.
const BLOCKS: &str = "model.ffn=96";

/// Recipes that exercise different code paths.
fn settings() -> Vec<(&'static str, Vec<&'static str>)> {
    vec![
        ("f32", vec![]),
        ("bf16, dropout", vec!["precision.dtype=bf16", "dropout.hidden=0.2"]),
        (
            "bf16 moments, accumulation",
            vec!["precision.dtype=bf16", "optimizer.state_dtype=bf16", "train.micro_batch=1"],
        ),
        (
            "fp8 moments, remainders",
            vec![
                "precision.dtype=bf16",
                "optimizer.state_dtype=fp8",
                "optimizer.master_dtype=remainder",
                BLOCKS,
            ],
        ),
        ("f16 moments", vec!["optimizer.state_dtype=f16", BLOCKS]),
        (
            "sgd, fp8 momentum",
            vec!["optimizer.kind=sgd", "optimizer.lr=0.1", "optimizer.state_dtype=fp8", BLOCKS],
        ),
        (
            "sgd, ramp",
            vec!["optimizer.kind=sgd", "optimizer.lr=0.1", "train.ramp=[2, 2, 6]", "dropout.hidden=0.1"],
        ),
        (
            "muon, odd sizes",
            vec![
                "optimizer.kind=muon",
                "optimizer.muon={ adaptive = \"adamuon\" }",
                "precision.dtype=bf16",
                "optimizer.state_dtype=bf16",
                "model.ffn=37",
            ],
        ),
        (
            "normuon and lion, a frozen group",
            vec![
                "optimizer.kind=muon",
                "optimizer.muon={ adaptive = \"normuon\", rest = \"lion\", weight_decay = \"l2\" }",
                "optimizer.groups=[{ params = \"norm\", frozen = true }, { params = \"embedding\", betas = [0.5, 0.9] }]",
            ],
        ),
        (
            "recompute, odd sizes",
            vec![
                "model.hidden=27",
                "model.head_dim=6",
                "model.ffn=37",
                "train.recompute=full",
                "data.seq_len=13",
            ],
        ),
    ]
}

fn data_for(r: &ferrotron_core::config::Resolved) -> Rule {
    Rule { seq: r.plan.seq_len, vocab: 16 }
}

#[test]
fn thread_count_and_repetition_are_bit_equal() {
    for (what, changes) in settings() {
        let r = recipe(&changes);
        let data = data_for(&r);
        let ends: Vec<_> = [1, 2, 3, 2]
            .map(|threads| {
                let dir = tempfile::tempdir().unwrap();
                let (outcome, events) = run(dir.path(), &r, threads, &data, None, None);
                assert!(outcome.finished);
                (newest(dir.path()), losses(&events))
            })
            .to_vec();
        for end in &ends[1..] {
            assert!(*end == ends[0], "{what}: the bits differ");
        }
    }
}

#[test]
fn a_resumed_run_is_the_uninterrupted_run() {
    for (what, changes) in settings() {
        let r = recipe(&[&changes[..], &["train.steps=7", "checkpoint.every=2"]].concat());
        let data = data_for(&r);
        let whole = tempfile::tempdir().unwrap();
        let (_, events) = run(whole.path(), &r, 2, &data, None, None);
        let want = (newest(whole.path()), losses(&events));
        for stops in [&[1][..], &[3, 4, 6]] {
            let dir = tempfile::tempdir().unwrap();
            let mut all = Vec::new();
            for stop in stops {
                let (outcome, events) = run(dir.path(), &r, 1, &data, None, Some(*stop));
                assert!(!outcome.finished, "{what}");
                all.extend(losses(&events));
            }
            let (outcome, events) = run(dir.path(), &r, 3, &data, None, None);
            assert!(outcome.finished, "{what}");
            all.extend(losses(&events));
            assert!(want == (newest(dir.path()), all), "{what}: stopped at {stops:?}");
        }
    }
}

#[test]
fn a_checkpoint_of_another_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &recipe(&["train.steps=2"]), 1, &RULE, None, None);
    let before = newest(dir.path());
    for (change, word) in [
        ("model.layers=3", "another model or seed"),
        ("model.qk_norm=true", "another model or seed"),
        ("train.seed=5", "another model or seed"),
        ("optimizer.kind=sgd", "another model or optimizer"),
    ] {
        let r = recipe(&[change]);
        let e = refusal(Run::open(rank(1, &r), r.clone(), dir.path(), None));
        assert!(e.contains(word) && e.contains("step-00000002"), "{change}: {e}");
    }
    assert!(before == newest(dir.path()));
    // The compute dtype may change: masters are f32.
    let r = recipe(&["precision.dtype=bf16", "train.steps=3"]);
    assert_eq!(run(dir.path(), &r, 1, &RULE, None, None).0.steps, 1);
}

#[test]
fn training_is_race_free() {
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    for changes in [&["dropout.hidden=0.1"][..], &["precision.dtype=bf16", "train.recompute=full"]] {
        let r = recipe(changes);
        let rank = Rank::cpu_instrumented(2, r.config.train.seed, watch).unwrap();
        let mut t = Trainer::new(rank, &r).unwrap();
        for _ in 0..3 {
            t.train_step(&RULE).unwrap();
        }
        t.evaluate(&RULE, 2).unwrap();
        let watched = t.snapshot().unwrap();
        // The checker changes no result.
        let mut plain = trainer(&r);
        for _ in 0..3 {
            plain.train_step(&RULE).unwrap();
        }
        assert!(watched == plain.snapshot().unwrap());
        // And it detects races: a stream without a wait may not read a weight.
        let other = t.rank.device().stream("other").unwrap();
        let weight = &t.model.params.values()[0];
        let e = other.download::<u8>(&weight.as_bytes().unwrap()).unwrap_err().to_string();
        assert!(e.contains("unordered access") && e.contains("'other'"), "{e}");
        other.wait(&t.rank.compute.record().unwrap()).unwrap();
        other.download::<u8>(&weight.as_bytes().unwrap()).unwrap();
    }
}

/// Dropout masks are a function of their key.
#[test]
fn dropout_is_a_function_of_its_key() {
    let r = recipe(&[]);
    let t = trainer(&r);
    let (rows, width) = (64, 33);
    let ones = t
        .rank
        .compute
        .upload(&vec![1f32; rows * width], &[rows, width], ferrotron_tensor::Category::Activations)
        .unwrap();
    let mask = |step, first: i32, layer, site| -> Vec<f32> {
        let numbers: Vec<i32> = (0..rows as i32).map(|r| first + r).collect();
        let numbers =
            t.rank.compute.upload(&numbers, &[rows], ferrotron_tensor::Category::Activations).unwrap();
        let dropout = Some(Dropout { p: 0.25, step: StepNumber::Known(step), rows: &numbers });
        let pass = StepContext { dropout, ..StepContext::new(&t.rank, &t.model.params, &t.model.step_state) };
        t.rank.compute.download(&pass.dropout(layer, site, ones.clone()).unwrap()).unwrap()
    };
    let first = mask(3, 1, 2, 1);
    assert_eq!(first, mask(3, 1, 2, 1));
    assert!(first.iter().all(|x| *x == 0.0 || (*x - 1.0 / 0.75).abs() < 1e-6));
    let kept = first.iter().filter(|x| **x != 0.0).count() as f64 / first.len() as f64;
    assert!((kept - 0.75).abs() < 0.05, "{kept}");
    for other in [mask(4, 1, 2, 1), mask(3, 0, 2, 1), mask(3, 1, 1, 1), mask(3, 1, 2, 2)] {
        let equal = first.iter().zip(&other).filter(|(a, b)| a == b).count() as f64 / first.len() as f64;
        // Independent masks agree in 0.75² + 0.25² of their elements.
        assert!((equal - 0.625).abs() < 0.06, "{equal}");
    }
}

/// Initial values depend on seed, name and global index only, not on fusion.
#[test]
fn initial_values_do_not_depend_on_the_layout() {
    let values = |changes: &[&str]| {
        let r = recipe(changes);
        let t = trainer(&r);
        let snapshot = t.snapshot().unwrap();
        let parts: Vec<Part> = t.model.params.specs().iter().flat_map(|s| s.parts.clone()).collect();
        let all: Vec<(Part, Vec<f32>)> = parts
            .into_iter()
            .map(|p| {
                let item = snapshot.items.iter().find(|i| i.name == format!("model/{}", p.name)).unwrap();
                let floats = ferrotron_core::train::to_f32(DType::F32, &item.bytes).unwrap();
                assert_eq!(item.shape, p.shape);
                (p, floats)
            })
            .collect();
        (all, r.config.train.seed)
    };
    let (gated, seed) = values(&[]);
    for (part, held) in &gated {
        assert_eq!(*held, initial_values(seed, part, 0..held.len()), "{}", part.name);
        // Any range, as a rank with a shard draws it.
        let range = held.len() / 3..held.len() - held.len() / 5;
        assert_eq!(held[range.clone()], initial_values(seed, part, range), "{}", part.name);
    }
    // The same names in differently fused models: no gate, biases, untied LM head.
    for changes in [
        &["model.gated=false"][..],
        &["model.qkv_bias=true", "model.mlp_bias=true"],
        &["model.tied=true"],
        &["precision.dtype=bf16"],
    ] {
        let (other, _) = values(changes);
        let mut shared = 0;
        for (part, held) in &other {
            if let Some((_, same)) = gated.iter().find(|(p, _)| p.name == part.name) {
                assert_eq!(same, held, "{changes:?}: {}", part.name);
                shared += 1;
            }
        }
        assert!(shared > 8);
    }
    let (reseeded, _) = values(&["train.seed=99"]);
    let differ = gated.iter().zip(&reseeded).filter(|(a, b)| a.1 != b.1).count();
    assert!(differ > 8);
}

/// The micro-batch size affects speed only: loss and gradient norm agree to f32 accuracy.
#[test]
fn micro_batch_size_does_not_change_the_step() {
    let reports = |micro: u32| {
        let r = recipe(&["train.global_batch=8", &format!("train.micro_batch={micro}")]);
        let mut t = trainer(&r);
        (0..5).map(|_| t.train_step(&RULE).unwrap()).collect::<Vec<_>>()
    };
    let one = reports(1);
    for micro in [2, 4, 8] {
        for (a, b) in one.iter().zip(reports(micro)) {
            assert!((a.loss - b.loss).abs() < 2e-6 * a.loss, "micro-batch {micro}: {a:?} {b:?}");
            assert!(
                (a.grad_norm - b.grad_norm).abs() < 1e-5 * a.grad_norm,
                "micro-batch {micro}: {a:?} {b:?}"
            );
            assert_eq!((a.tokens, a.samples, a.lr), (b.tokens, b.samples, b.lr));
        }
    }
}

/// Unlabelled tokens have zero weight, in whatever micro-batch they are.
#[test]
fn the_loss_is_the_mean_over_labelled_tokens() {
    struct Sparse;
    impl Batches for Sparse {
        fn seq(&self) -> usize {
            RULE.seq
        }
        fn samples(&self) -> u64 {
            16
        }
        fn resets(&self) -> bool {
            false
        }
        fn row(&self, n: u64, row: &mut ferrotron_core::data::Row) -> ferrotron_core::Result<()> {
            RULE.row(n, row)?;
            // Sample n has n mod 4 labels; every fourth has none.
            row.labels[(n % 4) as usize..].fill(-100);
            Ok(())
        }
    }
    let reports = |micro: u32| {
        let r = recipe(&[&format!("train.micro_batch={micro}")]);
        trainer(&r).train_step(&Sparse).unwrap()
    };
    let (apart, together) = (reports(1), reports(4));
    assert!((apart.loss - together.loss).abs() < 2e-6 * apart.loss, "{apart:?} {together:?}");
    assert!((apart.grad_norm - together.grad_norm).abs() < 1e-5 * apart.grad_norm);
    // The mean loss of an untrained model is near ln(vocab), not a fraction of it.
    assert!((apart.loss - 16f64.ln()).abs() < 0.2, "{apart:?}");
}

#[test]
fn divergence_is_an_error_and_the_last_checkpoint_stays() {
    let dir = tempfile::tempdir().unwrap();
    let good = recipe(&["train.steps=2"]);
    run(dir.path(), &good, 1, &RULE, None, None);
    let mut bad = recipe(&["train.steps=40", "checkpoint.every=1"]);
    // Refused as a recipe value, so set here; a diverging model gets there by itself.
    bad.config.optimizer.lr = 1e30;
    let mut r = Run::open(rank(1, &bad), bad.clone(), dir.path(), None).unwrap();
    let e = refusal(r.train(&RULE, None, &mut Stopper::default()));
    assert!(e.contains("optimizer.lr"), "{e}");
    drop(r);
    // No NaN was saved.
    let path = checkpoint::latest(&dir.path().join("checkpoints")).unwrap().unwrap();
    let loaded = checkpoint::load(&path).unwrap();
    for t in loaded.tensors().filter(|t| t.name.starts_with("model/")) {
        let values = ferrotron_core::train::to_f32(DType::F32, &loaded.read(&t.name).unwrap()).unwrap();
        assert!(values.iter().all(|x| x.is_finite()), "{}", t.name);
    }
}
