//! Optimizer state in host memory: the same bits for every rule, state dtype and sharding, and the same checkpoints.

mod saves;

use super::*;
use ferrotron_core::checkpoint::{self, Item, Saver};
use ferrotron_tensor::Category;

/// Small buckets, so that fractions are met.
const BUCKETS: &str = "parallel.comm_unit=65536";

fn settings() -> Vec<(&'static str, Vec<&'static str>)> {
    vec![
        ("f32 weights are their own masters", vec!["precision.dtype=f32"]),
        ("bf16", vec!["precision.dtype=bf16"]),
        ("bf16 moments", vec!["precision.dtype=bf16", "optimizer.state_dtype=bf16"]),
        (
            "fp8 moments, remainders",
            vec!["precision.dtype=bf16", "optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"],
        ),
        ("f16 loss scale", vec!["precision.dtype=f16"]),
        ("sgd", vec!["optimizer.kind=sgd", "optimizer.lr=0.1", "precision.dtype=bf16"]),
        ("lion", vec!["optimizer.kind=lion", "precision.dtype=bf16"]),
        ("muon", vec!["optimizer.kind=muon", "precision.dtype=bf16"]),
        (
            "normuon",
            vec!["optimizer.kind=muon", "optimizer.muon={ adaptive = \"normuon\" }", "precision.dtype=bf16"],
        ),
        (
            "fp8 weights",
            vec!["precision.dtype=bf16", "precision.recipe=fp8-current", "precision.fp8_params=true"],
        ),
        (
            "fp8 weights, delayed",
            vec!["precision.dtype=bf16", "precision.recipe=fp8-delayed", "precision.fp8_params=true"],
        ),
        ("moe", vec!["precision.dtype=bf16", "moe.experts=4", "moe.topk=2", "moe.ffn=64"]),
        (
            "frozen group",
            vec!["precision.dtype=bf16", "optimizer.groups=[{ params = \"norm\", frozen = true }]"],
        ),
    ]
}

fn with(set: &[&str], more: &[&str]) -> Resolved {
    recipe(&[set, more].concat())
}

#[test]
fn bits_do_not_depend_on_where_state_is() {
    let mut layouts =
        vec![vec![], vec!["parallel.dp=2", "parallel.zero=1"], vec!["parallel.dp=2", "parallel.zero=3"]];
    layouts.push(vec!["parallel.tp=2", "parallel.pp=2"]);
    for (i, (name, set)) in settings().into_iter().enumerate() {
        // Every rule on one rank, and on one of the other layouts in turn.
        for layout in [&layouts[0], &layouts[1 + i % 3]] {
            let set = [&set[..], layout, &[BUCKETS]].concat();
            let (wanted, before) = run(&with(&set, &[]), 5).unwrap();
            for fraction in ["0.4", "1"] {
                let (found, memory) =
                    run(&with(&set, &[&format!("offload.optimizer={fraction}")]), 5).unwrap();
                assert!(wanted == found, "{name}, {layout:?}, {fraction}: other bits");
                let state = |m: &MemoryReport| m.peak[Category::Optimizer as usize];
                let moved: Vec<usize> = memory.iter().map(|m| m.host.now.max(m.host.peak)).collect();
                assert!(moved.iter().all(|bytes| *bytes > 0), "{name}, {layout:?}, {fraction}: {moved:?}");
                assert!(state(&memory[0]) < state(&before[0]), "{name}, {layout:?}, {fraction}");
            }
        }
    }
}

/// A checkpoint of an offloaded run is that of a run without, and either continues the other.
#[test]
fn checkpoints_do_not_depend_on_where_state_is() {
    let set = ["precision.dtype=bf16", "optimizer.state_dtype=bf16", BUCKETS];
    let dir = tempfile::tempdir().unwrap();
    let places = [("0", "device"), ("0.5", "device"), ("0.5", "cpu"), ("1", "cpu")];
    let save = |(fraction, compute): (&str, &str), from: Option<&str>, to: &str, steps: u64| {
        let offload =
            [format!("offload.optimizer={fraction}"), format!("offload.optimizer_compute={compute}")];
        let resolved = with(&set, &offload.each_ref().map(String::as_str));
        let mut trainer = Trainer::new(Rank::cpu(1, 1234).unwrap(), &resolved).unwrap();
        if let Some(from) = from {
            let loaded =
                checkpoint::load(&checkpoint::latest(&dir.path().join(from)).unwrap().unwrap()).unwrap();
            trainer.restore(&loaded).unwrap();
        }
        let sources = source::open(&resolved).unwrap();
        (0..steps).for_each(|_| drop(trainer.train_step(&*sources.train).unwrap()));
        let mut saver = Saver::new(&dir.path().join(to), None).unwrap();
        saver.save(trainer.snapshot().unwrap()).unwrap();
        saver.finish().unwrap();
        let file = checkpoint::latest(&dir.path().join(to)).unwrap().unwrap();
        ["model.safetensors", "optimizer.safetensors"].map(|f| std::fs::read(file.join(f)).unwrap())
    };
    let whole = save(places[0], None, "whole", 4);
    for (i, first) in places.into_iter().enumerate() {
        save(first, None, &format!("half-{i}"), 2);
        for (j, second) in places.into_iter().enumerate() {
            let resumed = save(second, Some(&format!("half-{i}")), &format!("{i}-{j}"), 2);
            assert!(resumed == whole, "saved with {first:?}, continued with {second:?}");
        }
    }
}

/// What a rank has after some steps: bits of the losses, whether each step was skipped, and weights and optimizer state as
/// checkpoints hold them.
type RankState = (Vec<u64>, Vec<bool>, Vec<Item>);

fn states(resolved: &Resolved, steps: usize) -> Vec<RankState> {
    let work = |rank: Rank| {
        let sources = source::open(resolved)?;
        let mut trainer = Trainer::new(rank, resolved)?;
        let mut reports = Vec::new();
        for _ in 0..steps {
            reports.push(trainer.train_step(&*sources.train)?);
        }
        let losses = reports.iter().map(|r| r.loss.to_bits()).collect();
        let skipped = reports.iter().map(|r| !r.grad_norm.is_finite()).collect();
        Ok((losses, skipped, trainer.snapshot()?.items))
    };
    let layout = resolved.config.parallel.layout();
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    if test_on_gpu() {
        let rank = Rank::cuda(0, 2, 1234, watch).unwrap().0;
        return on_one_device(&layout, DEFAULT_TIMEOUT, &rank, work).unwrap();
    }
    on_threads(&layout, || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work).unwrap()
}

/// What updates state in host memory changes no bit of weights and state, under the race checker.
#[test]
fn bits_do_not_depend_on_what_updates() {
    let mut cases = settings();
    for state in ["bf16", "f16", "fp8"] {
        for master in ["f32", "remainder"] {
            let set = [format!("optimizer.state_dtype={state}"), format!("optimizer.master_dtype={master}")];
            let set: Vec<&'static str> = set.into_iter().map(|s| &*s.leak()).collect();
            cases.push(("state dtypes", [&["precision.dtype=bf16"], &set[..]].concat()));
        }
    }
    cases.push((
        "groups",
        vec![
            "precision.dtype=bf16",
            "optimizer.weight_decay=0.3",
            "optimizer.groups=[{ params = \"embedding\", lr_factor = 0.3 }, { params = \"layers.1.*\", frozen = true }]",
        ],
    ));
    cases.push(("remainders of experts", {
        vec![
            "precision.dtype=bf16",
            "optimizer.master_dtype=remainder",
            "moe.experts=4",
            "moe.topk=2",
            "moe.ffn=64",
        ]
    }));
    for recipe in ["fp8-current", "fp8-delayed", "fp8-block"] {
        let recipe: &'static str = format!("precision.recipe={recipe}").leak();
        cases.push(("fp8 GEMMs, bf16 weights", vec!["precision.dtype=bf16", recipe]));
    }
    cases.push(("fp8 experts", {
        let fp8 = ["precision.dtype=bf16", "precision.recipe=fp8-delayed", "precision.fp8_params=true"];
        [&fp8[..], &["moe.experts=4", "moe.topk=2", "moe.ffn=64"]].concat()
    }));
    cases.push(("skipped steps", vec!["precision.dtype=f16", "precision.loss_scale=4194304"]));
    let layouts = [
        vec![],
        vec!["parallel.dp=2", "parallel.zero=1"],
        vec!["parallel.dp=2", "parallel.zero=2"],
        vec!["parallel.dp=2", "parallel.zero=3"],
        vec!["parallel.zero=3"],
    ];
    for (i, (name, set)) in cases.iter().enumerate() {
        let layout = &layouts[i % layouts.len()];
        let set = [&set[..], layout, &[BUCKETS]].concat();
        let wanted = states(&with(&set, &[]), 5);
        let skipped = &wanted[0].1;
        let both = skipped.contains(&true) && skipped.contains(&false);
        assert!(*name != "skipped steps" || both, "{skipped:?}: choose another loss scale");
        for (compute, fraction) in [("device", "1"), ("cpu", "0.3"), ("cpu", "1")] {
            let offload =
                [format!("offload.optimizer={fraction}"), format!("offload.optimizer_compute={compute}")];
            let offload: Vec<&str> = offload.iter().map(String::as_str).collect();
            let found = states(&with(&set, &offload), 5);
            assert!(wanted == found, "{name}, {layout:?}, {compute}, {fraction}: other bits");
        }
    }
}
