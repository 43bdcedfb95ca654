//! The generated matrix: what is offloaded × model × precision × recomputation × layout and schedule.

use super::*;
use std::collections::HashMap;
use std::time::Instant;

/// What is offloaded; the last two are for MoE layers.
const OFFLOADED: [&str; 11] = [
    "auto",
    "1",
    "3",
    "5",
    "[\"core_attn\",\"attn_proj\"]",
    "[\"attn_norm\",\"qkv_linear\"]",
    "[\"mlp_norm\",\"fc1\"]",
    "[\"mlp_act\",\"fc2\",\"core_attn\"]",
    "[\"layer_input\",\"attn_norm\",\"qkv_linear\",\"core_attn\",\"attn_proj\",\"mlp_norm\",\"fc1\",\"mlp_act\",\"fc2\",\"router\",\"expert_fc1\",\"moe_act\",\"expert_fc2\"]",
    "[\"expert_fc1\",\"moe_act\"]",
    "[\"router\",\"expert_fc2\",\"mlp_norm\"]",
];
const MODELS: [(&str, &[&str]); 8] = [
    ("gqa", &[]),
    ("qk-norm, sinks", &["model.qk_norm=true", "model.attn_sink=true"]),
    ("packed", &["data.reset_at_documents=true", "dropout.hidden=0.1"]),
    ("window, biases", &["model.window=8", "model.qkv_bias=true"]),
    (
        "mla",
        &[
            "model.kv_heads=4",
            "model.mla={ q_lora_rank = 32, kv_lora_rank = 32, nope_dim = 16, rope_dim = 16, v_dim = 16 }",
        ],
    ),
    ("moe", MOE),
    (
        "moe with dense layers, shared expert",
        &["moe.experts=4", "moe.topk=2", "moe.ffn=64", "moe.dense_layers=[0, 2]", "moe.shared_ffn=64"],
    ),
    ("mtp", &["mtp.layers=1"]),
];
const MOE: &[&str] = &["moe.experts=4", "moe.topk=2", "moe.ffn=64"];
const PRECISIONS: [(&str, &[&str]); 7] = [
    ("f32", &["precision.dtype=f32"]),
    ("bf16", &["precision.dtype=bf16"]),
    ("fp8-delayed", &["precision.dtype=bf16", "precision.recipe=fp8-delayed"]),
    ("fp8-current", &["precision.dtype=bf16", "precision.recipe=fp8-current"]),
    ("fp8-block", &["precision.dtype=bf16", "precision.recipe=fp8-block"]),
    ("mxfp8", &["precision.dtype=bf16", "precision.recipe=mxfp8"]),
    ("nvfp4", &["precision.dtype=bf16", "precision.recipe=nvfp4"]),
];
const RECOMPUTED: [&str; 4] = ["none", "full", "[\"attention\",\"mlp\"]", "[\"norm\",\"activation\"]"];
const LAYOUTS: [(&str, &[&str]); 9] = [
    ("one rank", &[]),
    ("tp2", &["parallel.tp=2"]),
    ("cp2", &["parallel.cp=2"]),
    ("pp2", &["parallel.pp=2"]),
    ("pp2 vp2", &["model.layers=8", "parallel.pp=2", "parallel.vp=2"]),
    ("pp2 zero-bubble", &["parallel.pp=2", "parallel.schedule=zero-bubble"]),
    ("zero3", &["parallel.dp=2", "parallel.zero=3"]),
    ("ep2", &["parallel.dp=2", "parallel.ep=2"]),
    (
        "pp2 ep2 paired",
        &[
            "model.layers=8",
            "parallel.pp=2",
            "parallel.vp=2",
            "parallel.dp=2",
            "parallel.ep=2",
            "parallel.schedule=paired",
        ],
    ),
];

#[derive(Clone, Copy, Debug)]
struct Case {
    offloaded: usize,
    model: usize,
    precision: usize,
    recomputed: usize,
    layout: usize,
}

impl Case {
    fn settings(&self) -> Vec<String> {
        let lists = [MODELS[self.model].1, PRECISIONS[self.precision].1, LAYOUTS[self.layout].1];
        let mut set: Vec<String> = lists.concat().into_iter().map(String::from).collect();
        // Block scaling of experts is by 128 x 128.
        if self.is_moe() && PRECISIONS[self.precision].0 == "fp8-block" {
            set.extend(["model.hidden=128", "model.ffn=256", "moe.ffn=256"].map(String::from));
            set.extend(
                ["moe.shared_ffn=256"]
                    .map(String::from)
                    .into_iter()
                    .filter(|_| MODELS[self.model].1.len() > 3),
            );
        }
        set.push(format!("train.recompute={}", RECOMPUTED[self.recomputed]));
        set
    }

    /// Runs with and without offloading differ in nothing else.
    fn without(&self) -> (usize, usize, usize, usize) {
        (self.model, self.precision, self.recomputed, self.layout)
    }

    fn is_moe(&self) -> bool {
        MODELS[self.model].0.starts_with("moe")
    }

    /// Whether the recipe exists, and offloads something.
    fn is_legal(&self) -> bool {
        let (layout, model) = (LAYOUTS[self.layout].0, MODELS[self.model].0);
        let (full, precision) = (RECOMPUTED[self.recomputed] == "full", PRECISIONS[self.precision].0);
        let modules = OFFLOADED[self.offloaded];
        let pipelined = layout.starts_with("pp2");
        let blocks = RECOMPUTED[self.recomputed].contains("attention");
        let layers = modules == "auto" || modules.starts_with(char::is_numeric);
        (self.is_moe() || !modules.contains("expert") || modules.contains("fc1\",\"mlp_act"))
            && (self.is_moe() || !layout.contains("ep2"))
            && (!full || layers || modules.contains("layer_input"))
            && (!blocks || modules.contains("norm") || layers)
            && !(model == "mtp" && (pipelined || precision == "nvfp4"))
            && !(self.is_moe() && ["mxfp8", "nvfp4"].contains(&precision))
            && !(model == "packed" && layout == "cp2")
    }

    fn name(&self) -> String {
        let [model, precision, layout] =
            [MODELS[self.model].0, PRECISIONS[self.precision].0, LAYOUTS[self.layout].0];
        let (offloaded, recomputed) = (OFFLOADED[self.offloaded], RECOMPUTED[self.recomputed]);
        format!("{model}, {precision}, {layout}, recompute={recomputed}, offload={offloaded}")
    }
}

/// Every legal case, in a fixed order.
fn whole() -> Vec<Case> {
    let sizes = [OFFLOADED.len(), MODELS.len(), PRECISIONS.len(), RECOMPUTED.len(), LAYOUTS.len()];
    let count: usize = sizes.iter().product();
    let case = |mut i: usize| {
        let [offloaded, model, precision, recomputed, layout] = sizes.map(|n| {
            let k = i % n;
            i /= n;
            k
        });
        Case { offloaded, model, precision, recomputed, layout }
    };
    (0..count).map(case).filter(Case::is_legal).collect()
}

#[test]
fn no_bit_of_the_matrix_changes() {
    let all = whole();
    let total = all.len();
    let mut cases = selected(all, 60, 20261116, Case::name);
    // Cases that share a run without offloading follow each other.
    cases.sort_by_key(Case::without);
    let begin = Instant::now();
    let (mut plain, mut wrong) = (HashMap::new(), Vec::new());
    for (i, case) in cases.iter().enumerate() {
        let settings = case.settings();
        let set: Vec<&str> = settings.iter().map(String::as_str).collect();
        plain.retain(|key, _| *key == case.without());
        let plain =
            plain.entry(case.without()).or_insert_with(|| run(&recipe(&set), 5).map_err(|e| e.to_string()));
        let offload = format!("offload.activations={}", OFFLOADED[case.offloaded]);
        let ours = run(&recipe(&[&set[..], &[&offload]].concat()), 5);
        let what = match (&plain, ours) {
            (Err(e), _) => Some(format!("without offloading: {e}")),
            (_, Err(e)) => Some(e.to_string()),
            (Ok((wanted, _)), Ok((found, memory))) => difference(wanted, &found).or_else(|| {
                let moved = memory.iter().any(|m| m.host.peak > 0);
                (!moved).then(|| "nothing was offloaded".into())
            }),
        };
        if let Some(what) = what {
            println!("{}: {what}", case.name());
            wrong.push(format!("{}: {what}", case.name()));
        }
        if (i + 1) % 100 == 0 {
            println!("{} of {} cases, {:.0} s", i + 1, cases.len(), begin.elapsed().as_secs_f64());
        }
    }
    println!(
        "{} of {total} cases, {} failures, {:.0} s",
        cases.len(),
        wrong.len(),
        begin.elapsed().as_secs_f64()
    );
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

fn difference(wanted: &Outcome, found: &Outcome) -> Option<String> {
    if wanted.losses != found.losses {
        let values = |o: &Outcome| o.losses.iter().map(|b| f64::from_bits(*b)).collect::<Vec<_>>();
        return Some(format!("losses {:?} instead of {:?}", values(found), values(wanted)));
    }
    let other = wanted.tensors.iter().zip(&found.tensors).find(|(a, b)| a != b);
    other.map(|(a, _)| format!("{} differs", a.0))
}
