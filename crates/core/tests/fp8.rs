//! Whole models with FP8 recipes: every GEMM of the recipe runs in FP8, and gradients are close to bf16. With
//! `FERROTRON_TEST_DEVICE=cuda` on the first GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/support/device.rs"]
mod device;

use device::test_on_gpu;
use ferrotron_core::bench;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::parity::{Outcome, first_step};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use std::time::Instant;

const LAYERS: usize = 3;

fn recipe(changes: &[&str]) -> Resolved {
    let mut r = Recipe::named("tiny").unwrap();
    let model = format!(
        "[model]\nlayers = {LAYERS}\nhidden = 128\nheads = 4\nkv_heads = 2\nhead_dim = 32\nffn = 256\nvocab = 256\n\
         max_positions = 128\n[data]\npath = \"embedded\"\nseq_len = 128\n[train]\nglobal_batch = 4\nmicro_batch = 4\n\
         [precision]\ndtype = \"bf16\"\n[generate]\ntokens = 0\n"
    );
    r.add("model.toml", &model).unwrap();
    changes.iter().for_each(|c| r.set(c).unwrap_or_else(|e| panic!("{c}: {e}")));
    r.resolve(None).unwrap_or_else(|e| panic!("{changes:?}: {e}"))
}

fn rank(watch: Instrumentation) -> Rank {
    match test_on_gpu() {
        true => Rank::cuda(0, 1, 1234, watch).unwrap().0,
        false => Rank::cpu_instrumented(1, 1234, watch).unwrap(),
    }
}

/// Launches of a kernel in a step.
fn launches(r: Resolved) -> impl Fn(&str) -> usize {
    let rank = rank(Instrumentation { kernel_times: true, ..Instrumentation::default() });
    let profile = bench::train(rank, &r, 1, 1, None, Instant::now()).unwrap().profile;
    move |name: &str| profile.iter().filter(|(k, _)| **k == name).map(|(_, (calls, _))| *calls as usize).sum()
}

const LATENT: [&str; 2] = [
    "model.mla={ q_lora_rank = 48, kv_lora_rank = 64, nope_dim = 32, rope_dim = 16, v_dim = 32 }",
    "model.mla={ kv_lora_rank = 64, nope_dim = 32, rope_dim = 16, v_dim = 32 }",
];

const NARROW: [&str; 3] = ["gemm (output, fp8)", "gemm (input gradient, fp8)", "gemm (weight gradient, fp8)"];

#[test]
fn every_gemm_of_a_recipe_runs_in_fp8() {
    for scaling in ["fp8-current", "fp8-delayed", "fp8-block"] {
        let calls = launches(recipe(&[&format!("precision.recipe={scaling}")]));
        assert_eq!(NARROW.map(&calls), [4 * LAYERS; 3], "{scaling}");
        // Only the LM head stays in bf16.
        assert_eq!((calls("gemm (output)"), calls("gemm (weight gradient)")), (1, 1), "{scaling}");
        assert_eq!(calls("gemm (slow fp8)"), 0, "{scaling}");
        // Or is FP8 too.
        for more in [&[][..], &["model.tied=true"], &["model.vocab=259"], &["precision.fp8_params=true"]] {
            if scaling == "fp8-block" && more.contains(&"model.vocab=259") {
                continue;
            }
            let scaling = format!("precision.recipe={scaling}");
            let set = [&[scaling.as_str(), "precision.fp8_lm_head=true"], more].concat();
            let calls = launches(recipe(&set));
            assert_eq!(NARROW.map(&calls), [4 * LAYERS + 1; 3], "{set:?}");
            let wide =
                ["gemm (output)", "gemm (input gradient)", "gemm (weight gradient)", "gemm (slow fp8)"];
            assert_eq!(wide.map(&calls), [0; 4], "{set:?}");
        }
    }
    let calls = launches(recipe(&[
        "precision.recipe=fp8-current",
        "precision.fp8_lm_head=true",
        "precision.skip=head:output",
    ]));
    assert_eq!(NARROW.map(&calls), [4 * LAYERS, 4 * LAYERS + 1, 4 * LAYERS + 1]);
    assert_eq!(calls("gemm (output)"), 1);
    let except = r#"precision.skip=["first 1", "mlp.down", "attn.out:weight_grad"]"#;
    let calls = launches(recipe(&["precision.recipe=fp8-current", except]));
    let maps = 3 * (LAYERS - 1);
    assert_eq!(NARROW.map(&calls), [maps, maps, maps - (LAYERS - 1)]);
    let calls = launches(recipe(&[]));
    assert_eq!(NARROW.map(&calls), [0; 3]);
    // MLA has four linear layers, also with direct queries.
    for latent in LATENT {
        let calls = launches(recipe(&[
            latent,
            "model.head_dim=48",
            "model.kv_heads=4",
            "precision.recipe=fp8-current",
        ]));
        assert_eq!(NARROW.map(&calls), [6 * LAYERS; 3], "{latent}");
    }
}

/// Relative distance of all gradients together.
fn apart(a: &Outcome, b: &Outcome) -> f64 {
    let values = |o: &Outcome| -> Vec<f64> {
        o.tensors[0].1.iter().flat_map(|t| t.values.iter().map(|x| f64::from(*x))).collect()
    };
    let (a, b) = (values(a), values(b));
    let size: f64 = a.iter().map(|x| x * x).sum();
    let diff: f64 = a.iter().zip(&b).map(|(x, y)| (x - y) * (x - y)).sum();
    (diff / size).sqrt()
}

#[test]
fn gradients_are_close_to_bf16() {
    let step =
        |changes: &[&str]| first_step(rank(Instrumentation::default()), &recipe(changes), None).unwrap();
    let plain = step(&[]);
    const HEAD: &[&str] = &["precision.fp8_lm_head=true"];
    const ATTENTION: &[&str] = &["precision.fp8_attention=true"];
    const BOTH: &[&str] = &["precision.fp8_lm_head=true", "precision.fp8_attention=true"];
    // E4M3 rounds by at most 1/27, E5M2 by twice that; the bound covers GEMMs of two operands through three layers. NVFP4
    // has one mantissa bit.
    for (scaling, also, most) in [
        ("fp8-current", &[][..], 0.125),
        ("fp8-block", &[], 0.125),
        ("mxfp8", &[], 0.125),
        ("nvfp4", &[], 0.5),
        ("fp8-current", HEAD, 0.125),
        ("fp8-delayed", HEAD, 0.125),
        ("fp8-block", HEAD, 0.125),
        ("mxfp8", HEAD, 0.125),
        ("none", ATTENTION, 0.05),
        ("fp8-current", BOTH, 0.125),
        ("fp8-delayed", ATTENTION, 0.125),
    ] {
        let narrow = step(&[&[format!("precision.recipe={scaling}").as_str()], also].concat());
        let (a, b) = (plain.loss.unwrap(), narrow.loss.unwrap());
        assert!((a - b).abs() < 0.01 * a, "{scaling}: loss {a} and {b}");
        let off = apart(&plain, &narrow);
        assert!(off > 1e-3 && off < most, "{scaling} {also:?}: gradients {off} apart");
    }
    let latent = ["model.head_dim=48", "model.kv_heads=4", LATENT[0]];
    let (plain, narrow) = (step(&latent), step(&[&latent[..], &["precision.recipe=fp8-current"]].concat()));
    let off = apart(&plain, &narrow);
    assert!(off > 1e-3 && off < 0.125, "latent attention: gradients {off} apart");
    let off = apart(&plain, &step(&[&latent[..], &["precision.fp8_attention=true"]].concat()));
    assert!(off > 1e-3 && off < 0.05, "latent attention in 8 bits: gradients {off} apart");
    // Skipped modules and recomputation change nothing.
    let attention = step(&["precision.fp8_attention=true"]);
    let same = |a: &Outcome, b: &Outcome| a.loss == b.loss && apart(a, b) == 0.0;
    assert!(same(&attention, &step(&["precision.fp8_attention=true", "train.recompute=full"])));
    assert!(same(&step(&[]), &step(&["precision.fp8_attention=true", "precision.skip=attn.scores"])));
    assert!(!same(&attention, &step(&["precision.fp8_attention=true", "precision.skip=last 1"])));
}

#[test]
fn what_cannot_work_is_refused_in_one_sentence() {
    for (changes, words) in [
        (&["precision.recipe=fp8-current", "precision.dtype=f32"][..], "bf16"),
        (&["precision.recipe=fp8-delayed", "precision.skip=first 1"], "delayed"),
        (&["precision.recipe=fp8-current", "model.ffn=250"], "multiples of 16"),
        (
            &[
                "precision.recipe=fp8-current",
                "model.mla={ kv_lora_rank = 24, nope_dim = 32, rope_dim = 16, v_dim = 32 }",
            ],
            "multiples of 16",
        ),
        (
            &["precision.recipe=fp8-current", "precision.skip=mlp.down:sideways"],
            "output, input_grad, weight_grad",
        ),
        (&["precision.skip=mlp.down"], "precision.recipe"),
        (&["precision.recipe=fp8-current", "precision.skip=mlp.dwon"], "\"mlp.dwon\" names no module"),
        (&["precision.recipe=fp8-current", "precision.skip=first 50"], "leaves no GEMM"),
        (&["precision.recipe=fp8-current", "model.ffn=250", "precision.skip=mlp.down"], "multiples of 16"),
        (
            &["precision.recipe=fp8-current", "moe.experts=4", "moe.ffn=64", "moe.shared_ffn=40"],
            "multiples of 16",
        ),
        (&["precision.margin=1"], "fp8-delayed"),
        (&["precision.recipe=fp8-current", "precision.amax_history=16"], "fp8-delayed"),
        (&["precision.recipe=fp8-delayed", "precision.margin=65"], "at most 64"),
        (&["precision.fp8_lm_head=true"], "precision.recipe"),
        (&["precision.fp8_attention=true", "precision.dtype=f16"], "bf16"),
        (&["precision.recipe=fp8-block", "precision.fp8_lm_head=true", "model.vocab=259"], "multiple of 16"),
        (
            &[
                "precision.recipe=fp8-current",
                "precision.fp8_lm_head=true",
                "model.vocab=272",
                "parallel.tp=2",
            ],
            "multiple of 32",
        ),
        (&["precision.recipe=fp8-delayed", "precision.amax_history=0"], "at least 1"),
    ] {
        let mut r = Recipe::named("tiny").unwrap();
        let said = changes.iter().try_for_each(|c| r.set(c)).and_then(|()| r.resolve(None).map(|_| ()));
        let said = said.unwrap_err().to_string();
        assert!(said.contains(words) && !said.trim().contains('\n'), "{changes:?}: {said}");
    }
}

/// What is named in precision.skip, and what no layer uses, may have any size.
#[test]
fn widths_of_skipped_and_of_absent_modules_are_free() {
    for changes in [
        &["precision.recipe=fp8-current", "model.ffn=250", "precision.skip=mlp"][..],
        &["precision.recipe=fp8-current", "model.ffn=250", "moe.experts=4", "moe.ffn=64"],
        &[
            "precision.recipe=fp8-current",
            "moe.experts=4",
            "moe.ffn=64",
            "moe.shared_ffn=40",
            "precision.skip=shared",
        ],
        &[
            "precision.recipe=fp8-current",
            "moe.experts=4",
            "moe.ffn=64",
            "precision.skip=[\"experts.gate:output\", \"layers.1\", \"head\", \"attn.scores\"]",
        ],
    ] {
        let mut r = Recipe::named("tiny").unwrap();
        changes.iter().for_each(|c| r.set(c).unwrap());
        r.resolve(None).unwrap();
    }
}
