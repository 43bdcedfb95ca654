use super::Need;
use crate::bench::{train, work};
use ferrotron_engine::Rank;
use ferrotron_tensor::Category;
use std::time::Instant;

fn need(name: &str, set: &[&str]) -> Need {
    let mut recipe = work(name).unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap());
    Need::of(&recipe.resolve(None).unwrap())
}

#[test]
fn estimates_are_near_what_a_step_takes() {
    for set in [
        &[][..],
        &["train.recompute=full"],
        &["precision.dtype=f32"],
        &["mtp.layers=2"],
        &["mtp.layers=1", "train.recompute=full"],
        &["optimizer.moments=bf16"],
        &["model.mla={ q_lora_rank = 96, kv_lora_rank = 64, nope_dim = 48, rope_dim = 32, v_dim = 48 }"],
        &["optimizer.moments=fp8", "optimizer.master=remainder"],
        &["precision.scaling=current", "precision.weights=fp8", "precision.except=\"mlp.up:output\""],
        &["precision.scaling=current", "precision.also=head"],
        &["precision.also=attention"],
        &["moe.experts=8", "moe.topk=2", "moe.ffn=256"],
        &["moe.experts=16", "moe.topk=4", "moe.ffn=128", "moe.shared_ffn=256", "moe.dense=[0]"],
        &["moe.experts=8", "moe.topk=2", "moe.ffn=256", "train.recompute=full"],
        &["moe.experts=8", "moe.topk=2", "moe.ffn=256", "precision.scaling=current", "precision.weights=fp8"],
    ] {
        let mut recipe = work("tiny").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        let r = recipe.resolve(None).unwrap();
        let bench = train(Rank::cpu(2, 0).unwrap(), &r, 0, 1, None, Instant::now()).unwrap();
        let measured = bench.memory.total_peak as f64;
        let ratio = Need::of(&r).total() as f64 / measured;
        assert!((0.8..1.25).contains(&ratio), "{set:?}: {ratio} of what was measured");
    }
}

/// By names, as the model declares them.
#[test]
fn weights_in_bytes_are_counted() {
    const FP8: [&str; 2] = ["precision.scaling=current", "precision.weights=fp8"];
    for except in [
        "[]",
        "\"attn.q\"",
        "\"layers.1\"",
        "[\"up:output\", \"first 1\"]",
        "\"attn.v\"",
        "\"mtp\"",
        "\"experts\"",
    ] {
        let latent = "model.mla={ kv_lora_rank = 64, nope_dim = 48, rope_dim = 32, v_dim = 48 }";
        const HEADS: [&str; 2] = ["precision.also=head", "model.tied=true"];
        const MIXTURE: [&str; 5] =
            ["moe.experts=4", "moe.topk=2", "moe.ffn=32", "moe.shared_ffn=48", "moe.dense=[0]"];
        for set in [
            &["model.gated=true"][..],
            &["model.gated=false"],
            &[latent],
            &["mtp.layers=2"],
            &HEADS[..1],
            &HEADS,
            &MIXTURE,
        ] {
            let mut recipe = work("tiny").unwrap();
            let except = format!("precision.except={except}");
            FP8.iter().chain(&[except.as_str()]).chain(set).for_each(|s| recipe.set(s).unwrap());
            let r = recipe.resolve(None).unwrap();
            let trainer = crate::train::Trainer::new(Rank::cpu(1, 0).unwrap(), &r).unwrap();
            let stored = trainer.params.specs().iter().filter(|s| s.stored());
            let counted: usize = stored.map(|s| s.numel()).sum();
            assert_eq!(Need::of(&r).stored.sum(), counted, "{except} {set:?}");
            assert!(counted > 0);
        }
    }
    let words = need("tiny", &FP8).per_parameter();
    assert!(words.contains("weight 1."), "{words}");
}

#[test]
fn optimizer_state_takes_the_bytes_it_is_said_to() {
    for (set, bytes) in [
        (&["precision.dtype=bf16"][..], 12.0),
        (&["optimizer.moments=bf16"], 8.0),
        (&["optimizer.moments=bf16", "optimizer.master=remainder"], 6.0),
        (&["optimizer.moments=f16", "optimizer.master=remainder"], 6.0625),
        (&["optimizer.moments=fp8", "optimizer.master=remainder"], 4.0625),
        (&["optimizer.moments=fp8", "optimizer.master=remainder", "optimizer.kind=sgd"], 3.03125),
        (&["precision.dtype=f32"], 8.0),
    ] {
        let mut recipe = work("tiny").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        let r = recipe.resolve(None).unwrap();
        assert_eq!(Need::of(&r).optimizer_bytes(), bytes, "{set:?}");
        let rank = Rank::cpu(1, 0).unwrap();
        let trainer = crate::train::Trainer::new(rank.clone(), &r).unwrap();
        let held = rank.device().memory().now[Category::Optimizer as usize] as f64;
        let measured = held / trainer.params.numel() as f64;
        // Gaps between parameters, step scalars, and what an allocation is rounded up to.
        assert!((1.0..1.02).contains(&(measured / bytes)), "{set:?}: {measured} instead of {bytes}");
    }
    let words = need("tiny", &["optimizer.moments=fp8", "optimizer.master=remainder"]).per_parameter();
    assert_eq!(words, "10.06 bytes per parameter: weight 2, gradient 4, optimizer state 4.06");
}

#[test]
fn pairs_of_passes_keep_more_and_the_way_back_is_named() {
    let moe = [
        "moe.experts=8",
        "parallel.dp=2",
        "parallel.ep=2",
        "train.micro_batch=64",
        "train.global_batch=1024",
    ];
    let with = |more: &[&str]| need("llama-1b", &[&moe[..], more].concat());
    let plain = with(&[]);
    let paired = with(&["parallel.schedule=paired"]);
    assert_eq!(paired.activations(), 2 * plain.activations());
    let pipeline = ["parallel.pp=2", "parallel.vp=2"];
    let chunks = with(&[&pipeline[..], &["parallel.schedule=paired"]].concat()).activations();
    assert_eq!(chunks, with(&pipeline).activations() / 2 * 3);
    let room = paired.fixed() + plain.activations() / 2 * 3;
    assert!(paired.advice(room).contains("--set parallel.schedule=1f1b"), "{}", paired.advice(room));
}

#[test]
fn the_cheapest_change_that_fits_is_named() {
    let need = need("llama-1b", &["train.micro_batch=64", "train.global_batch=64"]);
    let gib = |n: usize| n << 30;
    assert!(need.advice(gib(139)).contains("--set train.micro_batch="), "{}", need.advice(gib(139)));
    assert!(need.advice(gib(21)).contains("recompute"), "{}", need.advice(gib(21)));
    assert!(need.advice(gib(8)).contains("smaller model"), "{}", need.advice(gib(8)));
}
