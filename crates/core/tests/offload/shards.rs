//! Weights and gradients in host memory: the same bits for every rule, precision and layout, the same checkpoints, and
//! device memory that does not grow with the layers.

use super::*;
use ferrotron_core::checkpoint::{self, Saver};
use ferrotron_core::model::generate::{Prompt, Sampling, generate};
use ferrotron_engine::StepContext;
use ferrotron_tensor::Category;

const BF16: &str = "precision.dtype=bf16";
const ZERO_3: &str = "parallel.zero=3";
const WEIGHTS: &str = "offload.weights=true";
const GRADIENTS: &str = "offload.gradients=true";

/// What is in host memory, besides the first: weights and gradients.
const MODES: [(&str, &[&str]); 4] = [
    ("weights and gradients", &[WEIGHTS, GRADIENTS]),
    ("weights", &[WEIGHTS]),
    ("gradients", &[GRADIENTS]),
    (
        "everything",
        &[
            WEIGHTS,
            GRADIENTS,
            "offload.activations=3",
            "offload.optimizer=1",
            "offload.optimizer_compute=cpu",
        ],
    ),
];

/// One rank with four micro-batches, and layouts with at least two.
const LAYOUTS: [(&str, &[&str]); 11] = [
    ("one rank", &[]),
    ("dp2", &["parallel.dp=2"]),
    ("tp2", &["parallel.tp=2"]),
    ("pp2 vp2", &["model.layers=8", "parallel.pp=2", "parallel.vp=2"]),
    ("cp2", &["parallel.cp=2"]),
    ("hsdp", &["parallel.dp=4", "parallel.fsdp_group=2", "train.global_batch=8"]),
    ("dp2, no overlap", &["parallel.dp=2", "parallel.overlap=false"]),
    (
        "hfsdp",
        &["parallel.dp=4", "parallel.fsdp_group=2", "parallel.fsdp_outer=optimizer", "train.global_batch=8"],
    ),
    ("pp2 zero-bubble", &["model.layers=10", "parallel.pp=2", "parallel.schedule=zero-bubble"]),
    ("one rank, no overlap", &["parallel.overlap=false"]),
    ("one rank, nothing ahead", &["parallel.comm_unit=1"]),
];

const FP8: [&str; 2] = [BF16, "precision.fp8_params=true"];

fn settings() -> Vec<(&'static str, Vec<&'static str>)> {
    let fp8 = |recipe, more: &[&'static str]| [&FP8[..], &[recipe], more].concat();
    vec![
        ("f32", vec!["precision.dtype=f32"]),
        ("bf16", vec![BF16]),
        (
            "fp8 moments, remainders",
            vec![BF16, "optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"],
        ),
        // All of its steps are skipped.
        ("f16 loss scale", vec!["precision.dtype=f16", "precision.loss_scale=1e30"]),
        ("sgd", vec!["optimizer.kind=sgd", "optimizer.lr=0.1", BF16]),
        ("lion", vec!["optimizer.kind=lion", BF16]),
        ("muon", vec!["optimizer.kind=muon", BF16]),
        ("fp8 weights", fp8("precision.recipe=fp8-current", &[])),
        ("fp8 weights, delayed", fp8("precision.recipe=fp8-delayed", &[])),
        ("fp8 weights, blocks", fp8("precision.recipe=fp8-block", &["model.hidden=128", "model.ffn=256"])),
        ("moe", vec![BF16, "moe.experts=4", "moe.topk=2", "moe.ffn=64"]),
        ("tied", vec![BF16, "model.tied=true"]),
        ("mtp", vec![BF16, "mtp.layers=1"]),
        (
            "frozen layers",
            vec![BF16, "optimizer.groups=[{ params = [\"layers.0\", \"norm\"], frozen = true }]"],
        ),
        ("recompute", vec![BF16, "train.recompute=full"]),
        ("fp8 recipe of bf16 weights", vec![BF16, "precision.recipe=fp8-current"]),
    ]
}

fn difference(wanted: &Outcome, found: &Outcome) -> Option<String> {
    if wanted.losses != found.losses {
        return Some("other losses".into());
    }
    let other = wanted.tensors.iter().zip(&found.tensors).find(|(a, b)| a != b);
    other.map(|(a, _)| format!("{} differs", a.0))
}

/// Runs a setting with and without shards in host memory; what is wrong.
fn compare(name: &str, set: &[&str], modes: &[(&str, &[&str])]) -> Vec<String> {
    let mut wrong = Vec::new();
    let set = [&[ZERO_3], set].concat();
    let (wanted, before) = match run(&recipe(&set), 3) {
        Ok(made) => made,
        Err(e) => return vec![format!("{name}, without: {e}")],
    };
    for (mode, more) in modes {
        let what = match run(&recipe(&[&set[..], more].concat()), 3) {
            Err(e) => Some(e.to_string()),
            Ok((found, memory)) => difference(&wanted, &found).or_else(|| {
                let stays = |key, category: Category| {
                    let kind = category as usize;
                    more.contains(&key) && memory.iter().zip(&before).any(|(m, b)| m.now[kind] >= b.now[kind])
                };
                let weights = stays(WEIGHTS, Category::Parameters);
                let gradients = stays(GRADIENTS, Category::Gradients);
                let none = memory.iter().any(|m| m.host.now == 0);
                (weights || gradients || none).then(|| {
                    format!(
                        "weights stay: {weights}, gradients stay: {gradients}, nothing on the host: {none}"
                    )
                })
            }),
        };
        wrong.extend(what.map(|what| format!("{name}, {mode}: {what}")));
    }
    wrong
}

/// Every setting on one rank and on another layout in turn, each with both in host memory and another choice in turn.
#[test]
fn bits_do_not_depend_on_where_shards_are() {
    let mut wrong = Vec::new();
    for (i, (name, set)) in settings().into_iter().enumerate() {
        let other = 1 + i % (LAYOUTS.len() - 1);
        // MTP layers are on the last stage of all.
        let other = if name == "mtp" && LAYOUTS[other].0.starts_with("pp2") { 1 } else { other };
        for (k, (layout, more)) in [LAYOUTS[0], LAYOUTS[other]].into_iter().enumerate() {
            let set = [&set[..], more].concat();
            let modes = [MODES[0], MODES[1 + (i + k) % 3]];
            wrong.extend(compare(&format!("{name}, {layout}"), &set, &modes));
        }
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

/// Layouts that settings above need not have met.
#[test]
fn bits_do_not_depend_on_where_shards_are_with_other_parallelism() {
    const MOE: [&str; 4] = [BF16, "moe.experts=4", "moe.topk=2", "moe.ffn=64"];
    let moe = |more: &[&'static str]| [&MOE[..], more].concat();
    let mut cases: Vec<(String, Vec<&str>)> = vec![
        ("moe, ep2".into(), moe(&["parallel.dp=2", "parallel.ep=2"])),
        ("moe, dp4 ep2".into(), moe(&["parallel.dp=4", "parallel.ep=2", "train.global_batch=8"])),
        (
            "moe, pp2 ep2 paired".into(),
            moe(&[
                "model.layers=8",
                "parallel.pp=2",
                "parallel.vp=2",
                "parallel.dp=2",
                "parallel.ep=2",
                "parallel.schedule=paired",
            ]),
        ),
        ("tied, pp2".into(), vec![BF16, "model.tied=true", "parallel.pp=2"]),
        ("tied, dp2 tp2".into(), vec![BF16, "model.tied=true", "parallel.tp=2", "parallel.dp=2"]),
        ("muon, hfsdp".into(), [LAYOUTS[7].1, &["optimizer.kind=muon", BF16]].concat()),
        ("fp8 weights, hfsdp".into(), [LAYOUTS[7].1, &FP8[..], &["precision.recipe=fp8-current"]].concat()),
        ("fp8 weights, moe".into(), {
            let wide = ["model.hidden=128", "precision.recipe=fp8-delayed", FP8[1], "parallel.dp=2"];
            moe(&wide)
        }),
    ];
    for (name, more) in &LAYOUTS[1..] {
        cases.push((format!("bf16, {name}"), [&[BF16][..], *more].concat()));
    }
    let mut wrong = Vec::new();
    for (i, (name, set)) in cases.iter().enumerate() {
        wrong.extend(compare(name, set, &[MODES[3 * (i % 2)]]));
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

/// Twice the layers take no more device memory of weights and gradients.
#[test]
fn device_memory_does_not_grow_with_the_layers() {
    for (layout, more) in [LAYOUTS[0], LAYOUTS[1]] {
        let peaks = |layers: &str| {
            let set = [&[ZERO_3, BF16, WEIGHTS, GRADIENTS, layers], more].concat();
            let (_, memory) = run(&recipe(&set), 2).unwrap();
            (
                [Category::Parameters, Category::Gradients].map(|c| memory[0].peak[c as usize]),
                memory[0].host.now,
            )
        };
        let ((four, host), (eight, more)) = (peaks("model.layers=4"), peaks("model.layers=8"));
        assert_eq!(four, eight, "{layout}: weights and gradients");
        assert!(host < more, "{layout}: {host} and {more} bytes on the host");
    }
}

#[test]
fn text_does_not_depend_on_where_weights_are() {
    let text = |more: &[&str]| {
        let resolved = recipe(&[&[ZERO_3, BF16], more].concat());
        let work = |rank: Rank| {
            let sources = source::open(&resolved)?;
            let mut t = Trainer::new(rank, &resolved)?;
            t.train_step(&*sources.train)?;
            let pass = StepContext::new(&t.rank, &t.model.params, &t.model.step_state);
            let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 7 };
            let prompt = Prompt { tokens: &[10, 20, 30], max_new: 12, stop: &[] };
            let text = generate(&t.model.decoder, &pass, prompt, sampling, &mut |_| true)?;
            // Training goes on.
            Ok((text, t.train_step(&*sources.train)?.loss.to_bits()))
        };
        let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
        let layout = resolved.config.parallel.layout();
        on_threads(&layout, || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work).unwrap()
    };
    for dp in ["parallel.dp=1", "parallel.dp=2"] {
        let wanted = text(&[dp]);
        assert!(wanted == text(&[dp, WEIGHTS, GRADIENTS]), "{dp}");
    }
}

/// A checkpoint is that of a run without shards in host memory, and either continues the other.
#[test]
fn checkpoints_do_not_depend_on_where_shards_are() {
    let dir = tempfile::tempdir().unwrap();
    let save = |mode: &[&str], from: Option<&str>, to: &str, steps: u64| {
        let resolved = recipe(&[&[ZERO_3, BF16, "optimizer.state_dtype=bf16"], mode].concat());
        let mut trainer = Trainer::new(Rank::cpu(1, 1234).unwrap(), &resolved).unwrap();
        if let Some(from) = from {
            let saved = checkpoint::latest(&dir.path().join(from)).unwrap().unwrap();
            trainer.restore(&checkpoint::load(&saved).unwrap()).unwrap();
        }
        let sources = source::open(&resolved).unwrap();
        (0..steps).for_each(|_| drop(trainer.train_step(&*sources.train).unwrap()));
        let mut saver = Saver::new(&dir.path().join(to), None).unwrap();
        saver.save(trainer.snapshot().unwrap()).unwrap();
        saver.finish().unwrap();
        let file = checkpoint::latest(&dir.path().join(to)).unwrap().unwrap();
        ["model.safetensors", "optimizer.safetensors"].map(|f| std::fs::read(file.join(f)).unwrap())
    };
    let modes = [("nothing", &[][..]), MODES[0], MODES[1], MODES[3]];
    let whole = save(&[], None, "whole", 4);
    for (first, mode) in modes {
        save(mode, None, &format!("half-{first}"), 2);
        for (second, mode) in modes {
            let resumed = save(mode, Some(&format!("half-{first}")), &format!("{first}-{second}"), 2);
            assert!(resumed == whole, "saved with {first} in host memory, continued with {second}");
        }
    }
}

#[test]
fn a_budget_that_is_too_small_for_shards_is_an_error_that_names_it() {
    for key in [WEIGHTS, GRADIENTS] {
        let e = run(&recipe(&[ZERO_3, key, "offload.host_budget=\"64KiB\""]), 1).unwrap_err().to_string();
        assert!(e.contains("out of host memory") && e.contains("offload.host_budget"), "{key}: {e}");
    }
}

#[test]
fn shards_need_zero_3() {
    for key in [WEIGHTS, GRADIENTS] {
        let mut recipe = Recipe::named("tiny").unwrap();
        recipe.set(key).unwrap();
        let e = recipe.resolve(None).unwrap_err().to_string();
        assert!(e.contains("offload.") && e.contains("set parallel.zero = 3"), "{key}: {e}");
    }
}
