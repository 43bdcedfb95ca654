//! Attention sinks and MLA: every layout gives the gradients of one rank.

use super::*;
use ferrotron_core::parity::first_step;

pub const LATENT: &str =
    "model.mla={ q_lora_rank = 24, kv_lora_rank = 20, nope_dim = 12, rope_dim = 4, v_dim = 10 }";
pub const STREAM: &str = "model.mla={ kv_lora_rank = 20, nope_dim = 12, rope_dim = 4, v_dim = 10 }";

/// Recipe keys of each attention variant.
const KINDS: [&[&str]; 5] = [
    &["model.attn_sink=true"],
    &["model.attn_sink=true", "model.window=6"],
    &[LATENT, "model.kv_heads=4"],
    &[STREAM, "model.kv_heads=4", "model.attn_sink=true", "model.tied=true"],
    &[LATENT, "model.kv_heads=4", "model.window=6"],
];

#[test]
fn sinks_and_mla_match_one_rank() {
    let layouts = [
        "tp=2",
        "tp=4,dp=2",
        "cp=2",
        "cp=4",
        "tp=2,cp=2",
        "pp=2,dp=2",
        "tp=2,pp=2,vp=2",
        "tp=2,cp=2,pp=2",
        "tp=4,cp=4",
    ];
    for (i, kind) in KINDS.iter().enumerate() {
        for more in [&[][..], &["data.reset_at_documents=true", "parallel.zero=2"]] {
            let set = [kind, more].concat();
            let one = one();
            let wanted = run(&one, |rank| first_step(rank, &recipe(&one, &set), None)).unwrap();
            // Every variant over some layouts, every layout over both variants.
            for text in layouts.iter().skip(i % 2).step_by(if more.is_empty() { 1 } else { 2 }) {
                let layout = layout(text);
                let resolved = recipe(&layout, &set);
                let ours = run(&layout, |rank| first_step(rank, &resolved, None)).unwrap();
                let (a, b) = (ours.loss.unwrap(), wanted.loss.unwrap());
                assert!((a / b - 1.0).abs() < 1e-6, "{text} {set:?}: loss {a} instead of {b}");
                assert_eq!(
                    difference(&ours.tensors[0].1, &wanted.tensors[0].1, false),
                    None,
                    "{text} {set:?}"
                );
            }
        }
    }
}

#[test]
fn sinks_and_latent_attention_in_bf16() {
    for kind in [KINDS[0], KINDS[2]] {
        let set = [kind, &["precision.dtype=bf16"]].concat();
        let one = one();
        let wanted = run(&one, |rank| first_step(rank, &recipe(&one, &set), None)).unwrap();
        for text in ["tp=2,cp=2", "tp=4", "cp=4"] {
            let layout = layout(text);
            let resolved = recipe(&layout, &set);
            let ours = run(&layout, |rank| first_step(rank, &resolved, None)).unwrap();
            let (a, b) = (ours.loss.unwrap(), wanted.loss.unwrap());
            assert!((a / b - 1.0).abs() < 2e-3, "{text} {set:?}: loss {a} instead of {b}");
        }
    }
}
