//! Experts with FP8 grouped GEMMs: every GEMM of the recipe runs in FP8, gradients are close to bf16, and layouts match one
//! rank. With `FERROTRON_TEST_DEVICE=cuda` on the first GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/support/device.rs"]
mod device;

use device::test_on_gpu;
use ferrotron_core::bench;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::parity::{Outcome, first_step};
use ferrotron_core::ranks::{on_one_device, on_threads};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, Instrumentation};
use std::time::Instant;

/// A dense first layer, then MoE layers.
const MIXTURES: usize = 2;

const MODEL: &str = "
[model]
layers = 3
hidden = 128
heads = 4
kv_heads = 2
head_dim = 32
ffn = 256
vocab = 256
max_positions = 64
[moe]
experts = 4
topk = 2
ffn = 256
dense_layers = [0]
[data]
path = \"embedded\"
seq_len = 64
[train]
global_batch = 4
micro_batch = 4
[precision]
dtype = \"bf16\"
[generate]
tokens = 0
";

fn parse(changes: &[&str]) -> ferrotron_core::Result<Resolved> {
    let mut r = Recipe::named("tiny").unwrap();
    r.add("model.toml", MODEL)?;
    changes.iter().try_for_each(|c| r.set(c))?;
    r.resolve(None)
}

fn recipe(changes: &[&str]) -> Resolved {
    parse(changes).unwrap_or_else(|e| panic!("{changes:?}: {e}"))
}

fn rank(watch: Instrumentation) -> Rank {
    match test_on_gpu() {
        true => Rank::cuda(0, 1, 1234, watch).unwrap().0,
        false => Rank::cpu_instrumented(1, 1234, watch).unwrap(),
    }
}

/// Launches of a kernel in a step, and the peak of activation memory.
fn step(r: Resolved) -> (impl Fn(&str) -> usize, usize) {
    let rank = rank(Instrumentation { kernel_times: true, ..Instrumentation::default() });
    let bench = bench::train(rank, &r, 1, 1, None, Instant::now()).unwrap();
    let most = bench.memory.peak[Category::ALL.iter().position(|c| *c == Category::Activations).unwrap()];
    let profile = bench.profile;
    let calls = move |name: &str| {
        profile.iter().filter(|(k, _)| **k == name).map(|(_, (calls, _))| *calls as usize).sum()
    };
    (calls, most)
}

const NARROW: [&str; 3] =
    ["grouped (output, fp8)", "grouped (input gradient, fp8)", "grouped (weight gradient, fp8)"];
const PLAIN: [&str; 3] = ["grouped (output)", "grouped (input gradient)", "grouped (weight gradient)"];

#[test]
fn every_expert_gemm_of_a_recipe_runs_in_fp8() {
    for scaling in ["fp8-current", "fp8-delayed", "fp8-block"] {
        let (calls, _) = step(recipe(&[&format!("precision.recipe={scaling}")]));
        assert_eq!(NARROW.map(&calls), [2 * MIXTURES; 3], "{scaling}");
        assert_eq!(PLAIN.map(&calls), [0; 3], "{scaling}");
    }
    let plain = || step(recipe(&[])).0;
    assert_eq!((NARROW.map(plain()), PLAIN.map(plain())), ([0; 3], [2 * MIXTURES; 3]));
    for (except, narrow) in [
        (r#"["first 2"]"#, [2, 2, 2]),
        (r#"["last 1"]"#, [2, 2, 2]),
        (r#"["experts"]"#, [0, 0, 0]),
        (r#"["moe.experts.down"]"#, [2, 2, 2]),
        (r#"["experts.up:weight_grad"]"#, [4, 4, 2]),
        (r#"["experts.down:input_grad", "experts.gate:output"]"#, [2, 2, 4]),
        (r#"["layers.1", "experts.down:output", "experts.down:input_grad"]"#, [1, 1, 2]),
    ] {
        for scaling in ["fp8-current", "fp8-block"] {
            let except = format!("precision.skip={except}");
            let (calls, _) = step(recipe(&[&format!("precision.recipe={scaling}"), &except]));
            assert_eq!(NARROW.map(&calls), narrow, "{scaling} {except}");
            assert_eq!(PLAIN.map(&calls), narrow.map(|n| 2 * MIXTURES - n), "{scaling} {except}");
        }
    }
}

/// Saved expert activations are FP8: smaller than bf16, although rows are padded.
#[test]
fn fp8_experts_save_less_for_backward() {
    let more = ["train.micro_batch=32", "train.global_batch=32"];
    let (_, plain) =
        step(recipe(&[&more[..], &["precision.recipe=fp8-current", "precision.skip=experts"]].concat()));
    let (_, narrow) = step(recipe(&[&more[..], &["precision.recipe=fp8-current"]].concat()));
    // Per routed row: x and the activation output in FP8 instead of bf16.
    let rows = 32 * 64 * 2;
    let (x, a) = (128, 256);
    let saved = MIXTURES * rows * (2 * x + 2 * a - a) - MIXTURES * (rows / 2 * x);
    // Padding rows between experts, and FP8 weights.
    let padding = MIXTURES * 4 * 128 * (2 * 512 + a) + 2 * 4 * 512 * 128;
    assert!(narrow + saved / 2 < plain + padding, "{narrow} and {plain}, {saved} less and {padding} more");
}

/// Relative distance of all gradients together.
fn apart(a: &Outcome, b: &Outcome) -> f64 {
    let values = |o: &Outcome| -> Vec<f64> {
        o.tensors[0].1.iter().flat_map(|t| t.values.iter().map(|x| f64::from(*x))).collect()
    };
    let (a, b) = (values(a), values(b));
    assert_eq!(a.len(), b.len());
    let size: f64 = a.iter().map(|x| x * x).sum();
    let diff: f64 = a.iter().zip(&b).map(|(x, y)| (x - y) * (x - y)).sum();
    (diff / size).sqrt()
}

/// The same over expert weights alone.
fn experts(o: &Outcome) -> Outcome {
    let mut o = Outcome { tensors: o.tensors.clone(), ..*o };
    o.tensors[0].1.retain(|t| t.name.contains(".experts."));
    assert!(!o.tensors[0].1.is_empty());
    o
}

#[test]
fn gradients_with_fp8_experts_are_close_to_bf16() {
    let of = |changes: &[&str]| first_step(rank(Instrumentation::default()), &recipe(changes), None).unwrap();
    // Learned routing may flip at near ties, which gives experts other tokens.
    let more: [&[&str]; 5] = [
        &[],
        &["moe.force_balance=0"],
        // Biases, and recomputation.
        &["moe.force_balance=0", "moe.bias=true", "train.recompute=[\"activation\"]"],
        &["moe.force_balance=0", "moe.latent=64", "moe.shared_ffn=64"],
        &["moe.force_balance=0", "train.recompute=full", "train.micro_batch=2"],
    ];
    for more in more {
        let plain = of(more);
        for (scaling, except) in [
            ("fp8-current", "[]"),
            ("fp8-block", "[]"),
            ("fp8-current", r#"["attn", "mlp"]"#),
            ("fp8-current", r#"["experts.up:output", "experts.down:weight_grad"]"#),
        ] {
            if scaling == "fp8-block" && more.contains(&"moe.latent=64") {
                continue;
            }
            let (scaling, except) =
                (format!("precision.recipe={scaling}"), format!("precision.skip={except}"));
            let narrow = of(&[more, &[&scaling, &except]].concat());
            let what = format!("{more:?} {scaling} {except}");
            let (a, b) = (plain.loss.unwrap(), narrow.loss.unwrap());
            assert!((a - b).abs() < 0.01 * a, "{what}: loss {a} and {b}");
            // The bound of dense models.
            let found = apart(&plain, &narrow);
            let each = apart(&experts(&plain), &experts(&narrow));
            println!("{what}: {found:.4}, experts {each:.4}");
            assert!(found > 1e-4 && found < 0.125, "{what}: gradients {found} apart");
            let alike = each > 1e-3 && each < 0.125;
            assert!(alike || more.is_empty(), "{what}: gradients of experts {each} apart");
        }
    }
}

/// An expert without tokens has a gradient of exactly 0.
#[test]
fn experts_without_tokens_have_no_gradient() {
    for scaling in ["fp8-current", "fp8-block"] {
        let changes = [
            "moe.experts=32",
            "moe.topk=1",
            "moe.pre_softmax=true",
            "train.global_batch=1",
            "train.micro_batch=1",
            "data.seq_len=16",
            &format!("precision.recipe={scaling}"),
        ];
        let o = first_step(rank(Instrumentation::default()), &recipe(&changes), None).unwrap();
        let still = o.tensors[0].1.iter().filter(|t| t.name.contains(".experts."));
        let (none, some): (Vec<_>, Vec<_>) = still.partition(|t| t.values.iter().all(|x| *x == 0.0));
        assert!(!none.is_empty() && !some.is_empty(), "{} and {}", none.len(), some.len());
        assert!(o.tensors[0].1.iter().all(|t| t.values.iter().all(|x| x.is_finite())), "{scaling}");
        // gate, up and down of an expert.
        assert!(none.len().is_multiple_of(3), "{scaling}: {} matrices", none.len());
    }
}

fn at(layout: &str, changes: &[&str]) -> Outcome {
    let layout: RankLayout = layout.parse().unwrap();
    let layout = RankLayout { dp: Some(1), ..layout };
    let sizes = [("tp", layout.tp), ("ep", layout.ep), ("etp", layout.etp()), ("cp", layout.cp)];
    let dp = Grid::of(layout).unwrap().dp();
    let mut set: Vec<String> = sizes.iter().map(|(k, n)| format!("parallel.{k}={n}")).collect();
    set.push(format!("parallel.dp={dp}"));
    // The tokens of a micro-batch of one rank, over all ranks.
    set.push(format!("train.micro_batch={}", 4 / dp));
    // Routing is forced, so that it does not depend on the last bit of a logit.
    set.push("moe.force_balance=0".into());
    set.extend(changes.iter().map(|c| c.to_string()));
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let r = recipe(&set);
    let layout = r.config.parallel.layout();
    let work = |rank| first_step(rank, &r, None);
    let all = match test_on_gpu() {
        true => on_one_device(
            &layout,
            std::time::Duration::from_secs(60),
            &rank(Instrumentation::default()),
            work,
        ),
        false => on_threads(&layout, || Ok(Rank::cpu(1, 1234)?), work),
    };
    all.unwrap_or_else(|e| panic!("{set:?}: {e}")).remove(0)
}

#[test]
fn layouts_match_one_rank() {
    const MOST: f64 = 5e-2;
    for keys in [
        // fc2's input is scaled by this rank's rows alone.
        &["precision.recipe=fp8-current", "precision.skip=[\"attn\", \"mlp\"]"][..],
        // Power-of-two scales: ranks with other tokens round alike.
        &["precision.recipe=fp8-current", "precision.pow2_scales=true"],
        &["precision.recipe=fp8-delayed", "precision.skip=[\"attn\", \"mlp\"]"],
        &["precision.recipe=fp8-block"],
    ] {
        let one = at("tp=1", keys);
        for layout in ["ep=2", "ep=2,etp=2", "tp=2,ep=2,etp=1", "tp=2,ep=2,etp=2", "tp=2,etp=1", "cp=2,ep=2"]
        {
            for dispatcher in ["all_to_all", "all_gather"] {
                let more = format!("moe.dispatcher={dispatcher}");
                let ours = at(layout, &[keys, &[&more]].concat());
                let what = format!("{layout} {dispatcher} {keys:?}");
                let (a, b) = (one.loss.unwrap(), ours.loss.unwrap());
                assert!((a - b).abs() < 2e-3 * a, "{what}: loss {b} instead of {a}");
                let found = apart(&one, &ours);
                let each = apart(&experts(&one), &experts(&ours));
                println!("{what}: {found:.4}, experts {each:.4}");
                assert!(found < MOST && each < MOST, "{what}: gradients {found} apart, of experts {each}");
            }
        }
    }
}

#[test]
fn unsupported_expert_widths_are_refused() {
    for (changes, words) in [
        (&["precision.recipe=fp8-current", "moe.ffn=40"][..], "multiples of 16"),
        (
            &[
                "precision.recipe=fp8-current",
                "moe.ffn=80",
                "parallel.etp=2",
                "parallel.dp=2",
                "train.micro_batch=2",
            ],
            "multiples of 16",
        ),
        (&["precision.recipe=fp8-block", "moe.ffn=192"], "multiples of 128"),
        (&["precision.recipe=fp8-block", "moe.latent=64"], "multiples of 128"),
        (&["precision.recipe=mxfp8"], "experts have FP8 or bf16"),
    ] {
        let said = parse(changes).map(|_| ()).unwrap_err().to_string();
        assert!(said.contains(words) && !said.trim().contains('\n'), "{changes:?}: {said}");
    }
    let fine = ["precision.recipe=fp8-block", "moe.ffn=40", "precision.skip=experts"];
    parse(&fine).unwrap();
}
