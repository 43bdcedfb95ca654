//! The memory estimate of a step beside what a step takes, for a sample of models and settings.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_core::bench::{train, workload};
use ferrotron_core::cost::MemoryEstimate;
use ferrotron_engine::Rank;
use ferrotron_tensor::Category;
use std::time::Instant;

/// Sizes at which activations take much of the memory; tokens, widths and vocabulary in proportion.
const SMALL: [&str; 19] = [
    "model.layers=3",
    "model.hidden=128",
    "model.heads=4",
    "model.head_dim=32",
    "model.ffn=384",
    "model.vocab=1024",
    "model.max_positions=256",
    "data.path=embedded",
    "data.seq_len=256",
    "train.micro_batch=2",
    "train.global_batch=2",
    "train.recompute=none",
    "parallel.dp=1",
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.vp=1",
    "parallel.zero=0",
    "optimizer.state_dtype=bf16",
    "generate.tokens=0",
];
const MOE: [&str; 4] = ["moe.experts=16", "moe.topk=2", "moe.ffn=96", "parallel.ep=1"];
const FP8: &str = "precision.recipe=fp8-current";
const FULL: &str = "train.recompute=full";
const FEW_WORDS: &str = "model.vocab=256";

/// The estimate, and what a step on the CPU takes: bytes of its passes beside what stays allocated, and all of them.
fn compared(name: &str, set: &[&str]) -> [(f64, f64); 2] {
    let mut recipe = workload(name).unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap_or_else(|e| panic!("{name} {s}: {e}")));
    let r = recipe.resolve(None).unwrap();
    // Gradients are allocated in the first step.
    let bench = train(Rank::cpu(2, 0).unwrap(), &r, 1, 1, None, Instant::now()).unwrap();
    let bytes = MemoryEstimate::of(&r).unwrap().largest().unwrap();
    let [total, passes] = [bytes.total(), bytes.total() - bytes.static_bytes()].map(|b| b as f64);
    let stays: usize = [Category::Parameters, Category::Gradients, Category::Optimizer]
        .iter()
        .map(|c| bench.memory.peak[*c as usize])
        .sum();
    let measured = bench.memory.total_peak;
    [(passes, measured.saturating_sub(stays) as f64), (total, measured as f64)]
}

/// Every family, and what changes the moment that needs most: recomputation, a large or a small vocabulary, FP8.
#[test]
fn estimates_are_near_what_a_step_takes() {
    let mut far = Vec::new();
    let mut check = |name: &str, more: &[&str]| {
        let set = [&SMALL[..], more].concat();
        let [passes, total] = compared(name, &set);
        let error = |(estimated, measured): (f64, f64)| (estimated / measured - 1.0) * 100.0;
        let line =
            format!("{name} {more:?}: {:+.1} % of all, {:+.1} % of passes", error(total), error(passes));
        println!("{line}");
        if error(total).abs() > 5.0 {
            far.push(line);
        }
    };
    let recompute = [
        FULL,
        "train.recompute=[\"norm\", \"activation\"]",
        "train.recompute=[\"mlp\"]",
        "train.recompute=[\"attention\"]",
    ];
    for more in recompute {
        check("llama-1b", &["model.kv_heads=2", more]);
        check("llama-1b", &["model.kv_heads=2", FEW_WORDS, more]);
        check("llama-1b", &["model.kv_heads=2", FEW_WORDS, FP8, more]);
    }
    for name in ["llama-1b", "gpt2-124m", "gemma2-2b", "gemma3-1b", "qwen3-0.6b"] {
        let heads = if name == "gpt2-124m" { "model.kv_heads=4" } else { "model.kv_heads=2" };
        check(name, &[heads]);
        check(name, &[heads, FP8]);
        check(name, &[heads, FEW_WORDS, FULL]);
    }
    check("gemma2-2b", &["model.kv_heads=2", "model.vocab=4096"]);
    for name in ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"] {
        let with = |more: &[&'static str]| [&MOE[..], &["model.kv_heads=2"], more].concat();
        check(name, &with(&[]));
        check(name, &with(&[FP8]));
        check(name, &with(&[FEW_WORDS, FULL]));
    }
    for more in [
        &["train.loss_chunk=128", "model.vocab=4096"][..],
        &["model.mla={ q_lora_rank = 96, kv_lora_rank = 64, nope_dim = 48, rope_dim = 32, v_dim = 48 }"],
        &["mtp.layers=1"],
        &["mtp.layers=2", FULL],
        &["train.global_batch=4", FP8],
        &["precision.fp8_lm_head=true", FP8],
        &["offload.activations=1", "offload.min_bytes=0"],
        &["train.mlp_chunk=128", FEW_WORDS],
        &["lora.rank=8"],
        &["lora.rank=8", "lora.dora=true"],
        &["optimizer.kind=muon"],
        &["precision.dtype=f32"],
        &["precision.fp8_attention=true"],
    ] {
        let heads: &[&str] = match more[0].starts_with("model.mla") {
            true => &["model.kv_heads=4", "model.head_dim=80"],
            false => &["model.kv_heads=2"],
        };
        check("llama-1b", &[heads, more].concat());
    }
    assert!(far.is_empty(), "{}", far.join("\n"));
}
