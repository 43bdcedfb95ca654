//! Whole models against golden vectors of Megatron Core (area `megatron-model`): logits, losses (of the LM head, of MoE
//! routers, of MTP layers) and every gradient, on one rank and under layouts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

mod config;
#[path = "../../../../tests/support/golden.rs"]
mod golden;
mod run;
mod weights;

use ferrotron_core::grid::RankLayout as Ranks;
use ferrotron_core::model::ModelConfig;
use ferrotron_core::model::config::Positions;
use ferrotron_engine::moe::{AuxLossKind, MoeTraining};
use ferrotron_tensor::DType;
use golden::{Area, Report, Tensors, count, list, number, only_keys, text};
use run::{Got, run};
use serde_json::Value;
use std::path::Path;
use weights::{Named, ours};

/// A model of the area.
pub struct Case {
    model: ModelConfig,
    moe: MoeTraining,
    /// Weight of the mean of the MTP losses.
    mtp_factor: f64,
    weights: Named,
    expected: Tensors,
    total_loss: f64,
}

impl Case {
    fn open(dir: &Path) -> Case {
        for file in std::fs::read_dir(dir).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            let known = ["config.json", "state_dict.safetensors", "expected.safetensors", "README.md"];
            assert!(known.contains(&name.as_str()), "{name} is no file of the format");
        }
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        let state = Tensors::open(&dir.join("state_dict.safetensors"));
        let table = "embedding.position_embeddings.weight";
        let positions = state.has(table).then(|| state.shape(table)[0]);
        let (model, moe, mtp_factor) = config::read(&json, positions);
        let weights = state.names().iter().flat_map(|name| ours(&model, name, &state.f32(name))).collect();
        let expected = Tensors::open(&dir.join("expected.safetensors"));
        Case { model, moe, mtp_factor, weights, expected, total_loss: number(&json, "total_loss") }
    }

    /// Expected gradients under our names.
    fn gradients(&self) -> Named {
        let names = self.expected.names();
        let theirs = names.iter().filter_map(|name| name.strip_prefix("grad."));
        theirs.flat_map(|name| ours(&self.model, name, &self.expected.f32(&format!("grad.{name}")))).collect()
    }
}

/// Runs `check` on every model of every set.
fn each(check: impl Fn(&mut Report, &str, &Case)) {
    for area in Area::all("megatron-model") {
        let folders: Vec<String> = golden::folders(&area.dir)
            .iter()
            .map(|dir| dir.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        area.known_files(|file| file == "index.json" || folders.iter().any(|folder| folder == file));
        let mut report = area.report();
        for name in &folders {
            let mut skipped = area.report();
            report.case(name, || check(&mut skipped, name, &Case::open(&area.dir.join(name))));
        }
        report.finish();
    }
}

/// The index lists each folder, with the sizes and losses that its files have.
#[test]
fn golden_megatron_index() {
    for area in Area::all("megatron-model").iter().filter(|area| area.has("index.json")) {
        let json = area.json("index.json");
        only_keys("index.json", &json, &["producer", "cases", "failed"]);
        let mut report = area.report();
        for entry in list(&json, "cases") {
            let name = text(entry, "name");
            let known = [
                "name",
                "batch",
                "seq",
                "params",
                "loss",
                "total_loss",
                "perturb_logit_diff",
                "fd_error",
                "failed",
            ];
            only_keys(name, entry, &known);
            let dir = area.dir.join(name);
            if !entry["failed"].is_null() {
                report.skip(name, "the peer cannot build this model");
                continue;
            }
            if !dir.is_dir() {
                report.skip(name, "is in the index but has no folder here");
                continue;
            }
            report.case(name, || {
                let case = Case::open(&dir);
                let shape = [count(entry, "batch"), count(entry, "seq")];
                assert_eq!(case.expected.shape("input_ids"), shape);
                let parameters = case.weights.iter().filter(|(name, _)| !name.ends_with(".expert_bias"));
                let stored: usize = parameters.map(|(_, values)| values.len()).sum();
                assert_eq!(stored, count(entry, "params"));
                assert_eq!(case.model.parameters(), stored, "parameters of the architecture");
                assert!((number(entry, "total_loss") - case.total_loss).abs() < 1e-6);
                assert!((number(entry, "loss") - f64::from(case.expected.f32("loss")[0])).abs() < 1e-6);
            });
        }
        report.finish();
    }
}

/// Largest `|a − b|`, and largest `|b|`.
fn largest(ours: &[f32], theirs: &[f32]) -> (f64, f64) {
    assert_eq!(ours.len(), theirs.len());
    let apart = ours.iter().zip(theirs).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    (apart, theirs.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max))
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

fn close_logits(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!((a - b).abs() <= 2e-4 + 2e-4 * b.abs(), "{what} [{i}]: {a} instead of {b}");
    }
}

/// Logits, loss and gradients in f32.
fn compare_f32(case: &Case, what: &str, got: &Got) {
    let e = &case.expected;
    close_logits(&format!("{what} logits"), &got.logits, &e.f32("logits"));
    let loss = f64::from(e.f32("loss")[0]);
    assert!((got.losses[0] - loss).abs() <= 2e-5, "{what} loss: {} instead of {loss}", got.losses[0]);
    let wanted = case.gradients();
    let names = |n: &Named| n.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&got.gradients), names(&wanted), "{what}: gradients");
    for (name, theirs) in &wanted {
        let (apart, size) = largest(&got.gradients[name], theirs);
        assert!(apart <= 1e-4 * size + 1e-6, "{what} gradient of {name}: {apart:.2e} apart of {size:.2e}");
    }
}

/// The same in bf16. Where rounding moves tokens to other experts, only the loss can be compared.
fn compare_bf16(report: &Report, name: &str, case: &Case, exact: &Got, got: &Got) {
    let e = &case.expected;
    let loss = f64::from(e.f32("loss")[0]);
    assert!((got.losses[0] - loss).abs() <= 2e-2 * loss, "bf16 loss: {} instead of {loss}", got.losses[0]);
    if case.moe.capacity.is_some() && case.model.moe.is_some() {
        return report.skip(&format!("{name} in bf16"), "rounding decides which tokens an expert drops");
    }
    if exact.loads != got.loads {
        return report.skip(&format!("{name} in bf16"), "rounding sent tokens to other experts");
    }
    let logits = e.f32("logits");
    let apart = norm(got.logits.iter().zip(&logits).map(|(a, b)| f64::from(a - b)));
    let limit = 2e-2 * norm(logits.iter().map(|x| f64::from(*x)));
    assert!(apart <= limit, "bf16 logits: {apart} apart, {limit} allowed");
    for (name, theirs) in case.gradients() {
        let mine = &got.gradients[&name];
        let dot: f64 = mine.iter().zip(&theirs).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        if case.model.positions == Positions::Learned && name.ends_with("attn.k.bias") {
            // Softmax is invariant to a shift of all scores, so without RoPE this gradient is 0 up to rounding.
            let scale = norm(got.gradients[&name.replace("attn.k", "attn.q")].iter().map(|x| f64::from(*x)));
            let size = norm(mine.iter().map(|x| f64::from(*x)));
            assert!(size <= 2e-2 * scale, "bf16 gradient of {name}: {size} beside {scale} of the query bias");
            continue;
        }
        let norms = norm(mine.iter().map(|x| f64::from(*x))) * norm(theirs.iter().map(|x| f64::from(*x)));
        assert!(dot >= 0.995 * norms, "bf16 gradient of {name}: cosine {}", dot / norms);
    }
}

/// Losses beside that of the LM head: each as logged by the peer, and their sum. Returns the total loss.
fn attached_losses(case: &Case, got: &Got) -> f64 {
    let e = &case.expected;
    let near = |what: &str, ours: f64, theirs: f64| {
        assert!((ours - theirs).abs() <= 1e-5 * theirs.abs(), "{what}: {ours} instead of {theirs}");
    };
    let mut total = got.losses[0];
    let depths = case.model.mtp_depth();
    if depths > 0 {
        let logged = e.f32("logged.mtp_loss");
        assert_eq!(logged.len(), depths, "logged.mtp_loss");
        for (d, theirs) in logged.iter().enumerate() {
            let weighted = got.losses[d + 1];
            let ours = weighted * depths as f64 / case.mtp_factor;
            assert!((ours - f64::from(*theirs)).abs() <= 2e-5, "MTP loss {d}: {ours} instead of {theirs}");
            total += weighted;
        }
        assert_eq!(got.mtp_logits.len(), depths);
        for (d, logits) in got.mtp_logits.iter().enumerate() {
            close_logits(&format!("mtp_logits.{d}"), logits, &e.f32(&format!("mtp_logits.{d}")));
        }
    }
    // Decoder layers, then MTP layers.
    let layers: Vec<usize> =
        (0..case.model.layers + depths).filter(|i| case.model.moe_layer(*i).is_some()).collect();
    for (kind, coefficient) in &case.moe.balance {
        let at = AuxLossKind::ALL.iter().position(|k| k == kind).unwrap();
        let logged = e.f32(&format!("logged.{}", kind.name()));
        assert_eq!(got.balance.len(), layers.len());
        for (layer, ours) in layers.iter().zip(&got.balance) {
            let what = format!("{} of layer {layer}", kind.name());
            near(&what, f64::from(ours[at] / coefficient), f64::from(logged[*layer]));
            total += f64::from(ours[at]);
        }
    }
    if case.moe.z_loss > 0.0 && !layers.is_empty() {
        let logged = e.f32("logged.z_loss");
        for (layer, z) in layers.iter().zip(&got.z) {
            near(&format!("z loss of layer {layer}"), *z, f64::from(logged[*layer]));
            total += f64::from(case.moe.z_loss) * z;
        }
    }
    total
}

/// Cross-entropy of every token from our logits, whatever the mask.
fn per_token_losses(case: &Case, got: &Got) {
    let (labels, wanted) = (case.expected.i64("labels"), case.expected.f32("loss_per_token"));
    for (i, (row, label)) in got.logits.chunks(case.model.vocab).zip(labels).enumerate() {
        let top = row.iter().fold(f32::MIN, |a, b| a.max(*b));
        let sum: f64 = row.iter().map(|x| f64::from(x - top).exp()).sum();
        let loss = sum.ln() + f64::from(top) - f64::from(row[label as usize]);
        assert!((loss - f64::from(wanted[i])).abs() <= 4e-4, "loss of token {i}: {loss} not {}", wanted[i]);
    }
}

#[test]
fn golden_megatron_on_one_rank() {
    each(|report, name, case| {
        let got = run(case, DType::F32, &Ranks::default());
        compare_f32(case, "f32", &got);
        per_token_losses(case, &got);
        let total = attached_losses(case, &got);
        let wanted = case.total_loss;
        assert!((total - wanted).abs() <= 2e-5, "total loss: {total} instead of {wanted}");
        case.expected.all_read("");
        compare_bf16(report, name, case, &got, &run(case, DType::BF16, &Ranks::default()));
    });
}

/// Why a model cannot be laid out so, if it cannot.
fn refusal(m: &ModelConfig, layout: &Ranks) -> Option<String> {
    let (tp, ep) = (layout.tp, layout.ep);
    if !m.heads.is_multiple_of(tp) || !(m.kv_heads.is_multiple_of(tp) || tp.is_multiple_of(m.kv_heads)) {
        return Some(format!("{} query and {} key heads do not divide over tp={tp}", m.heads, m.kv_heads));
    }
    let experts = m.moe.as_ref().map_or(0, |moe| moe.experts);
    (!experts.is_multiple_of(ep)).then(|| format!("{experts} experts do not divide over ep={ep}"))
}

#[test]
fn golden_megatron_under_layouts() {
    let dense = ["tp=2", "cp=2", "pp=2", "tp=2,cp=2", "tp=2,pp=2", "pp=3,cp=2"];
    let experts = [
        "cp=2,ep=2",
        "tp=2,ep=2,etp=1",
        "tp=2,cp=2,ep=4,etp=1",
        "cp=2,ep=1,etp=2",
        "pp=2,cp=2,ep=2",
        "tp=2,cp=4,ep=8,etp=1",
    ];
    each(|report, name, case| {
        let more = if case.model.moe.is_some() { &experts[..] } else { &[] };
        for text in dense.iter().chain(more) {
            let layout: Ranks = text.parse().unwrap();
            if let Some(why) = refusal(&case.model, &layout) {
                report.skip(&format!("{name} under {text}"), &why);
                continue;
            }
            compare_f32(case, text, &run(case, DType::F32, &layout));
        }
    });
}
