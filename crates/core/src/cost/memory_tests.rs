use super::MemoryEstimate;
use crate::bench::workload;
use ferrotron_engine::Rank;
use ferrotron_tensor::Category;

fn estimate(name: &str, set: &[&str]) -> MemoryEstimate {
    let mut recipe = workload(name).unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap());
    MemoryEstimate::of(&recipe.resolve(None).unwrap()).unwrap()
}

/// Selected by name, as the model declares them.
#[test]
fn fp8_resident_weights_are_counted() {
    const FP8: [&str; 2] = ["precision.recipe=fp8-current", "precision.fp8_params=true"];
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
        const HEADS: [&str; 2] = ["precision.fp8_lm_head=true", "model.tied=true"];
        const MOE: [&str; 5] =
            ["moe.experts=4", "moe.topk=2", "moe.ffn=32", "moe.shared_ffn=48", "moe.dense_layers=[0]"];
        for set in [
            &["model.gated=true"][..],
            &["model.gated=false"],
            &[latent],
            &["mtp.layers=2"],
            &HEADS[..1],
            &HEADS,
            &MOE,
        ] {
            let named = match except {
                "\"attn.v\"" => !set.contains(&latent),
                "\"mtp\"" => set.contains(&"mtp.layers=2"),
                "\"experts\"" => set == MOE,
                _ => true,
            };
            if !named {
                continue;
            }
            let mut recipe = workload("tiny").unwrap();
            let except = format!("precision.skip={except}");
            FP8.iter().chain(&[except.as_str()]).chain(set).for_each(|s| recipe.set(s).unwrap());
            let r = recipe.resolve(None).unwrap();
            let trainer = crate::train::Trainer::new(Rank::cpu(1, 0).unwrap(), &r).unwrap();
            let stored = trainer.model.params.specs().iter().filter(|s| s.fp8_resident());
            let counted: usize = stored.map(|s| s.numel()).sum();
            assert_eq!(r.model.fp8_resident_parameters(&r.policy()).unwrap(), counted, "{except} {set:?}");
            assert!(counted > 0);
        }
    }
    let words = estimate("tiny", &FP8).bytes_per_parameter().unwrap();
    assert!(words.contains("weight 1."), "{words}");
}

#[test]
fn optimizer_state_takes_the_bytes_it_is_said_to() {
    for (set, bytes) in [
        (&["precision.dtype=bf16"][..], 12.0),
        (&["optimizer.state_dtype=bf16"], 8.0),
        (&["optimizer.state_dtype=bf16", "optimizer.master_dtype=remainder"], 6.0),
        (&["optimizer.state_dtype=f16", "optimizer.master_dtype=remainder"], 6.0625),
        (&["optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"], 4.0625),
        (&["optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder", "optimizer.kind=sgd"], 3.03125),
        (&["precision.dtype=f32"], 8.0),
    ] {
        let mut recipe = workload("tiny").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        let r = recipe.resolve(None).unwrap();
        assert_eq!(MemoryEstimate::of(&r).unwrap().optimizer_bytes(), bytes, "{set:?}");
        let rank = Rank::cpu(1, 0).unwrap();
        let trainer = crate::train::Trainer::new(rank.clone(), &r).unwrap();
        let held = rank.device().memory().now[Category::Optimizer as usize] as f64;
        let measured = held / trainer.model.params.numel() as f64;
        // Gaps between parameters, step scalars, and what an allocation is rounded up to.
        assert!((1.0..1.02).contains(&(measured / bytes)), "{set:?}: {measured} instead of {bytes}");
    }
    let words = estimate("tiny", &["optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"])
        .bytes_per_parameter()
        .unwrap();
    assert_eq!(words, "10.06 bytes per parameter: weight 2, gradient 4, optimizer state 4.06");
}

#[test]
fn the_paired_schedule_keeps_more_and_1f1b_is_advised() {
    let moe = [
        "moe.experts=8",
        "parallel.dp=2",
        "parallel.ep=2",
        "train.micro_batch=64",
        "train.global_batch=1024",
    ];
    let with = |more: &[&str]| estimate("llama-1b", &[&moe[..], more].concat());
    let bytes = |estimate: &MemoryEstimate| estimate.largest().unwrap();
    let (plain, paired) = (with(&[]), with(&["parallel.schedule=paired"]));
    let ratio =
        |a: &MemoryEstimate, b: &MemoryEstimate| bytes(a).activations as f64 / bytes(b).activations as f64;
    // Twice the micro-batches; with two chunks a rank, three halves.
    assert!((1.95..=2.0).contains(&ratio(&paired, &plain)), "{}", ratio(&paired, &plain));
    let pipeline = ["parallel.pp=2", "parallel.vp=2"];
    let chunks = with(&[&pipeline[..], &["parallel.schedule=paired"]].concat());
    let more = ratio(&chunks, &with(&pipeline));
    assert!((1.47..=1.5).contains(&more), "{more}");
    let capacity = bytes(&paired).static_bytes() + bytes(&plain).activations / 2 * 3;
    let advice = paired.advice(capacity).unwrap();
    assert!(advice.contains("--set parallel.schedule=1f1b"), "{advice}");
}

#[test]
fn the_cheapest_change_that_fits_is_named() {
    let estimate = estimate("llama-1b", &["train.micro_batch=64", "train.global_batch=64"]);
    let advice = |gib: usize| estimate.advice(gib << 30).unwrap();
    for (gib, words) in [
        (139, "--set train.micro_batch="),
        (21, "recompute"),
        (15, "--set offload.optimizer=1"),
        (15, "on the host"),
        (4, "smaller model"),
    ] {
        assert!(advice(gib).contains(words), "{gib} GiB: {}", advice(gib));
    }
}
