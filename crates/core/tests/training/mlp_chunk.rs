//! An MLP in chunks of tokens computes what it computes at once, and saves its input alone.

use crate::support::{RULE, recipe};
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::Trainer;
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, Instrumentation};

struct Seen {
    losses: Vec<f64>,
    gradients: Vec<(String, Vec<f32>)>,
    activations: usize,
}

/// Three steps, with the race checker on.
fn run(set: &[&str]) -> Seen {
    let r = recipe(set);
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let work = |rank: Rank| {
        let mut trainer = Trainer::new(rank, &r)?;
        let mut losses = Vec::new();
        for _ in 0..3 {
            losses.push(trainer.train_step(&RULE)?.loss);
        }
        losses.push(trainer.evaluate(&RULE, 1)?);
        let gradients = trainer.gradients()?.into_iter().map(|t| (t.name, t.values)).collect();
        let activations = trainer.rank.device().memory().peak[Category::Activations as usize];
        Ok(Seen { losses, gradients, activations })
    };
    let layout = r.config.parallel.layout();
    on_threads(&layout, || Ok(Rank::cpu_instrumented(1, 1, watch)?), work).unwrap().swap_remove(0)
}

#[test]
fn chunks_compute_the_same() {
    // Two sequences of 16 tokens: chunks of 12, 12 and 8 rows, or of each half under tensor parallelism.
    for model in [
        &[][..],
        &["model.gated=false", "model.mlp_bias=true", "model.activation=gelu_tanh"],
        &["model.preset=gemma2-2b"],
        &["dropout.hidden=0.1"],
        &["parallel.tp=2", "train.mlp_chunk=6"],
        &["parallel.dp=2", "parallel.zero=3"],
        &["optimizer.groups=[{ params = \"*.mlp.*\", frozen = true }]"],
        &["moe.experts=4", "moe.topk=2", "moe.ffn=32", "moe.shared_ffn=32", "moe.dense_layers=[0]"],
    ] {
        for recompute in
            ["train.recompute=none", "train.recompute=full", "train.recompute=[\"norm\",\"mlp\"]"]
        {
            let of =
                |chunk: &'static str| run(&[&[chunk, recompute, "optimizer.lr=1e-4"][..], model].concat());
            let (whole, parts) = (of("train.seed=1234"), of("train.mlp_chunk=12"));
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs().max(1e-2);
            for (a, b) in parts.losses.iter().zip(&whole.losses) {
                assert!(near(*a, *b), "{model:?} {recompute}: {:?}, {:?}", parts.losses, whole.losses);
            }
            for ((name, a), (_, b)) in parts.gradients.iter().zip(&whole.gradients) {
                let size = b.iter().fold(0f32, |m, x| m.max(x.abs()));
                let worst = a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(worst <= 2e-5 * size.max(1e-3), "{model:?} {recompute} {name}: {worst} of {size}");
            }
        }
    }
}

/// FP8 quantizes each chunk's activations and gradients by their own amax.
#[test]
fn chunks_in_fp8_are_near() {
    for recipe in ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8"] {
        let precision = format!("precision.recipe={recipe}");
        let set = [
            "precision.dtype=bf16",
            &precision,
            "train.recompute=full",
            "model.hidden=128",
            "model.ffn=256",
            "optimizer.lr=1e-4",
        ];
        let (whole, parts) = (run(&set), run(&[&set[..], &["train.mlp_chunk=16"]].concat()));
        for (a, b) in parts.losses.iter().zip(&whole.losses) {
            assert!((a - b).abs() <= 5e-3 * b, "{recipe}: {:?}, {:?}", parts.losses, whole.losses);
        }
    }
}

#[test]
fn chunks_save_memory() {
    let wide = ["model.ffn=1024", "train.recompute=full", "train.micro_batch=4"];
    let (whole, parts) = (run(&wide), run(&[&wide[..], &["train.mlp_chunk=8"]].concat()));
    assert!(
        parts.activations * 2 < whole.activations,
        "{} of {} bytes",
        parts.activations,
        whole.activations
    );
}
