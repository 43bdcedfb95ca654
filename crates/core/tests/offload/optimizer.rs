//! Optimizer state in host memory: the same bits for every rule, state dtype and sharding, and the same checkpoints.

use super::*;
use ferrotron_core::checkpoint::{self, Saver};
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
    let fractions = ["0", "0.5", "1"];
    let save = |fraction: &str, from: Option<&str>, to: &str, steps: u64| {
        let resolved = with(&set, &[&format!("offload.optimizer={fraction}")]);
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
    let whole = save("0", None, "whole", 4);
    for first in fractions {
        save(first, None, &format!("half-{first}"), 2);
        for second in fractions {
            let resumed = save(second, Some(&format!("half-{first}")), &format!("{first}-{second}"), 2);
            assert!(resumed == whole, "saved with {first}, continued with {second}");
        }
    }
}
