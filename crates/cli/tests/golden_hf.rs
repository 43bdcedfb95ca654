//! Golden Hugging Face models (area `hf`) through the binary: logits, loss and every gradient, in both spellings of
//! their configurations, in f32 and bf16, on one rank and under layouts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/support/golden.rs"]
mod golden;

use golden::{Area, HfModel, Report, count, flag, list, number, only_keys, text};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// The program under test: `FERROTRON_BIN` on a machine it was carried to, else the one just built.
fn binary() -> std::ffi::OsString {
    std::env::var_os("FERROTRON_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrotron").into())
}

/// The two spellings of one configuration.
const SPELLINGS: [&str; 2] = ["config.json", "config_hub.json"];

/// Tensors of `expected.safetensors`; a name that ends in a dot stands for all that begin so.
const TENSORS: [&str; 12] = [
    "input_ids",
    "labels",
    "logits",
    "loss",
    "grad.",
    // Not compared, for this version's `forward` writes none of them:
    "hidden.",
    "aux_loss",
    "loss_with_aux",
    // Compared by the number of tokens that each expert gets.
    "router_logits.",
    // Inputs of packed rows.
    "cu_seqlens",
    "position_ids",
    "allowed",
];

/// A folder with the model's weights and one spelling of its configuration.
fn model_folder(case: &Path, spelling: &str, at: &Path) {
    std::fs::create_dir(at).unwrap();
    std::fs::copy(case.join(spelling), at.join("config.json")).unwrap();
    std::fs::copy(case.join("model.safetensors"), at.join("model.safetensors")).unwrap();
}

fn forward(model: &Path, input: &Path, output: &Path, dtype: &str, layout: &str) {
    let out = Command::new(binary())
        .args(["forward", "--backward", "--dtype", dtype, "--layout", layout, "--threads", "2", "--model"])
        .arg(model)
        .arg("--input")
        .arg(input)
        .arg("--output")
        .arg(output)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{} in {dtype} {layout}: {errors}", input.display());
}

fn values(file: &SafeTensors, name: &str) -> Vec<f64> {
    let t = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(t.dtype(), Dtype::F32, "{name}");
    t.data().as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
}

/// How far apart two tensors are.
struct Distance {
    /// Largest `|a - b|`.
    most: f64,
    /// Largest `|a - b| - (atol + rtol·|b|)` for the tolerance of logits; at most 0 when inside.
    beyond: f64,
    relative_l2: f64,
    cosine: f64,
    /// Largest `|b|`.
    size: f64,
}

fn distance(name: &str, ours: &[f64], theirs: &[f64]) -> Distance {
    assert_eq!(ours.len(), theirs.len(), "{name}");
    assert!(ours.iter().all(|x| x.is_finite()), "{name} has a value that is no number");
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let apart: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).collect();
    let most = |x: &mut dyn Iterator<Item = f64>| x.fold(f64::NEG_INFINITY, f64::max);
    let (aa, bb) = (dot(ours, ours), dot(theirs, theirs));
    Distance {
        most: most(&mut apart.iter().copied()),
        beyond: most(&mut apart.iter().zip(theirs).map(|(d, b)| d - (2e-4 + 2e-4 * b.abs()))),
        relative_l2: (dot(&apart, &apart) / bb.max(1e-300)).sqrt(),
        cosine: dot(ours, theirs) / (aa * bb).sqrt().max(1e-300),
        size: most(&mut theirs.iter().map(|b| b.abs())),
    }
}

/// Tokens of each expert, by MoE layer.
fn loads(file: &SafeTensors) -> Vec<(String, Vec<f64>)> {
    let mut names: Vec<&str> = file.names().into_iter().filter(|n| n.starts_with("expert_load.")).collect();
    names.sort_unstable();
    names.into_iter().map(|n| (n.to_string(), values(file, n))).collect()
}

/// Compares one run with the expected values under the format's tolerances. Where rounding sent tokens to other
/// experts than in the f32 run of the same layout, only the loss can be compared, and that is printed.
fn compare(
    what: &str,
    dtype: &str,
    ours: &SafeTensors,
    theirs: &SafeTensors,
    f32_loads: &mut Vec<(String, Vec<f64>)>,
) {
    let of = |name: &str| {
        let label = format!("{what} {dtype} {name}");
        let d = distance(&label, &values(ours, name), &values(theirs, name));
        let shapes = [ours, theirs].map(|f| f.tensor(name).unwrap().shape().to_vec());
        assert_eq!(shapes[0], shapes[1], "{label}");
        (label, d)
    };
    let exact = dtype == "f32";
    let (label, d) = of("loss");
    assert!(d.most <= if exact { 2e-5 } else { 2e-2 * d.size }, "{label}: {} apart", d.most);
    if exact {
        *f32_loads = loads(ours);
    } else if *f32_loads != loads(ours) {
        let moved: f64 = f32_loads
            .iter()
            .zip(loads(ours))
            .flat_map(|(a, b)| a.1.iter().zip(b.1).map(|(a, b)| (a - b).abs()).collect::<Vec<_>>())
            .sum();
        println!(
            "skipped: {what} {dtype}: rounding sent at least {} tokens to other experts; gradients not compared",
            moved / 2.0
        );
        return;
    }
    let (label, d) = of("logits");
    if exact {
        assert!(d.beyond <= 0.0, "{label}: {} past the tolerance", d.beyond);
    } else {
        assert!(d.relative_l2 <= 2e-2, "{label}: relative L2 {}", d.relative_l2);
    }
    let gradients = |f: &SafeTensors| {
        let mut names: Vec<String> =
            f.names().iter().filter(|n| n.starts_with("grad.")).map(|n| n.to_string()).collect();
        names.sort();
        names
    };
    let names = gradients(theirs);
    assert!(!names.is_empty(), "{what}: no gradients to compare with");
    assert_eq!(gradients(ours), names, "{what}");
    for name in names {
        let (label, d) = of(&name);
        if exact {
            let inside = d.most <= 1e-4 * d.size + 1e-6 || d.relative_l2 <= 1e-4;
            assert!(inside, "{label}: {} apart of {}, relative L2 {}", d.most, d.size, d.relative_l2);
        } else if d.size == 0.0 {
            // An expert without tokens.
            assert!(d.most == 0.0, "{label}: {} instead of zeros", d.most);
        } else {
            assert!(d.cosine >= 0.995, "{label}: cosine {}", d.cosine);
        }
    }
}

/// Runs `check` on every model of every set.
fn each(check: impl Fn(&Report, &HfModel)) {
    for area in Area::all("hf") {
        let models = HfModel::of(&area);
        area.known_files(|file| file == "index.json" || models.iter().any(|m| m.name == file));
        let mut report = area.report();
        for model in &models {
            let skipped = area.report();
            report.case(&model.name, || check(&skipped, model));
        }
        report.finish();
    }
}

/// The index lists every folder, with the sizes that its files have.
#[test]
fn golden_hf_index() {
    for area in Area::all("hf").iter().filter(|area| area.has("index.json")) {
        let json = area.json("index.json");
        only_keys("index.json", &json, &["producer", "cases"]);
        let mut report = area.report();
        for entry in list(&json, "cases") {
            let name = text(entry, "name");
            let known = [
                "name",
                "model_type",
                "batch",
                "seq",
                "params",
                "loss",
                "tied",
                "f64_logit_diff",
                "perturb_logit_diff",
                "logit_absmax",
                "cu_seqlens",
                "clamp_active_fraction_estimate",
            ];
            only_keys(name, entry, &known);
            if !area.dir.join(name).is_dir() {
                report.skip(name, "is in the index but has no folder here");
                continue;
            }
            report.case(name, || {
                let expected = golden::Tensors::open(&area.dir.join(name).join("expected.safetensors"));
                for tensor in expected.names() {
                    let named = |known: &&str| match known.ends_with('.') {
                        true => tensor.starts_with(*known),
                        false => tensor == **known,
                    };
                    assert!(TENSORS.iter().any(named), "the format has no tensor {tensor}");
                }
                assert_eq!(expected.shape("input_ids"), [count(entry, "batch"), count(entry, "seq")]);
                assert!((f64::from(expected.f32("loss")[0]) - number(entry, "loss")).abs() < 1e-5);
                let weights = golden::Tensors::open(&area.dir.join(name).join("model.safetensors"));
                let head = weights.has("lm_head.weight");
                assert_eq!(head, !flag(entry, "tied"), "a tied head has no weight of its own");
                // Buffers (router corrections) are stored but are no parameters.
                let parameters: Vec<String> =
                    weights.names().into_iter().filter(|n| !n.ends_with("e_score_correction_bias")).collect();
                let stored: usize =
                    parameters.iter().map(|n| weights.shape(n).iter().product::<usize>()).sum();
                assert_eq!(stored, count(entry, "params"), "parameters");
            });
        }
        report.finish();
    }
}

/// Tokens of each expert by the stored router logits, for routers that take the k best logits.
fn compare_routing(model: &HfModel, ours: &SafeTensors, theirs: &SafeTensors) {
    if !["mixtral", "qwen3_moe", "gpt_oss"].contains(&model.model_type.as_str()) {
        return;
    }
    let k = count(&model.config(SPELLINGS[0]), "num_experts_per_tok");
    let number = |name: &str| name.rsplit('.').next().and_then(|n| n.parse::<usize>().ok());
    let mut names: Vec<&str> =
        theirs.names().into_iter().filter(|n| n.starts_with("router_logits.")).collect();
    names.sort_by_key(|name| number(name));
    let mut ours: Vec<(String, Vec<f64>)> = loads(ours);
    ours.sort_by_key(|(name, _)| number(name));
    assert_eq!(names.len(), ours.len(), "MoE layers with router logits");
    for (name, (layer, load)) in names.into_iter().zip(ours) {
        let experts = theirs.tensor(name).unwrap().shape()[1];
        let mut wanted = vec![0.0; experts];
        for row in values(theirs, name).chunks(experts) {
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
            order[..k].iter().for_each(|e| wanted[*e] += 1.0);
        }
        assert_eq!(load, wanted, "{layer} against {name}");
    }
}

#[test]
fn golden_hf_forward_and_backward() {
    each(|_, model| {
        let temporary = tempfile::tempdir().unwrap();
        let expected = std::fs::read(model.dir.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&expected).unwrap();
        for spelling in SPELLINGS {
            let folder = temporary.path().join(spelling);
            model_folder(&model.dir, spelling, &folder);
            let mut f32_loads = Vec::new();
            for dtype in ["f32", "bf16"] {
                let output = temporary.path().join(format!("{dtype}.safetensors"));
                forward(&folder, &model.dir.join("expected.safetensors"), &output, dtype, "");
                let bytes = std::fs::read(&output).unwrap();
                let ours = SafeTensors::deserialize(&bytes).unwrap();
                compare(&format!("{} ({spelling})", model.name), dtype, &ours, &expected, &mut f32_loads);
                if dtype == "f32" {
                    compare_routing(model, &ours, &expected);
                }
            }
        }
        println!("covered: {}", model.name);
    });
}

/// Tensor, data, context and pipeline parallelism. With more data-parallel ranks than rows some ranks have no rows,
/// with more stages than layers some have no layers.
const LAYOUTS: [&str; 16] = [
    "tp=2",
    "tp=4",
    "dp=2",
    "dp=4",
    "cp=2",
    "cp=4",
    "pp=2",
    "pp=4",
    "pp=2,vp=2",
    "tp=2,dp=3",
    "tp=2,cp=2",
    "tp=2,pp=2",
    "cp=2,pp=2,dp=2",
    "tp=2,cp=2,pp=2",
    "tp=4,cp=2,dp=2",
    "cp=4,pp=2,vp=2",
];

/// Expert parallelism.
const EXPERT_LAYOUTS: [&str; 10] = [
    "ep=2",
    "ep=4",
    "ep=2,etp=2",
    "tp=2,ep=2",
    "tp=2,ep=4,etp=1",
    "cp=2,ep=2",
    "pp=2,ep=2,cp=2",
    "tp=2,cp=2,ep=4,etp=1",
    "pp=2,vp=2,ep=2",
    "tp=2,pp=2,ep=2,dp=2",
];

/// Why a model cannot be laid out so, if it cannot.
fn refusal(config: &Value, layout: &str) -> Option<String> {
    let size = |keys: &[&str]| keys.iter().find_map(|key| config[*key].as_u64()).map(|n| n as usize);
    let axis = |name: &str| -> usize {
        let found = layout.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        found.map_or(1, |n| n.parse().unwrap())
    };
    let (tp, ep) = (axis("tp"), axis("ep"));
    let heads = size(&["num_attention_heads", "n_head"]).unwrap();
    let latent = !config["kv_lora_rank"].is_null();
    let kv_heads = size(&["num_key_value_heads"]).filter(|_| !latent).unwrap_or(heads);
    if !heads.is_multiple_of(tp) || !(kv_heads.is_multiple_of(tp) || tp.is_multiple_of(kv_heads)) {
        return Some(format!("{heads} query and {kv_heads} key heads do not divide over tp={tp}"));
    }
    let experts = size(&["num_local_experts", "num_experts", "n_routed_experts"]).unwrap_or(0);
    (!experts.is_multiple_of(ep)).then(|| format!("{experts} experts do not divide over ep={ep}"))
}

fn has_experts(case: &Path) -> bool {
    let bytes = std::fs::read(case.join("model.safetensors")).unwrap();
    SafeTensors::deserialize(&bytes).unwrap().names().iter().any(|n| n.contains(".experts."))
}

#[test]
fn golden_hf_under_every_layout() {
    each(|report, model| {
        let temporary = tempfile::tempdir().unwrap();
        let expected = std::fs::read(model.dir.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&expected).unwrap();
        let folder = temporary.path().join("model");
        model_folder(&model.dir, SPELLINGS[0], &folder);
        let config = model.config(SPELLINGS[0]);
        let experts = if has_experts(&model.dir) { &EXPERT_LAYOUTS[..] } else { &[] };
        for layout in LAYOUTS.iter().chain(experts).copied() {
            if let Some(why) = refusal(&config, layout) {
                report.skip(&format!("{} under {layout}", model.name), &why);
                continue;
            }
            let mut f32_loads = Vec::new();
            for dtype in if layout.contains("tp=2,") { &["f32", "bf16"][..] } else { &["f32"] } {
                let output = temporary.path().join(format!("{dtype}.safetensors"));
                forward(&folder, &model.dir.join("expected.safetensors"), &output, dtype, layout);
                let bytes = std::fs::read(&output).unwrap();
                let ours = SafeTensors::deserialize(&bytes).unwrap();
                compare(&format!("{} ({layout})", model.name), dtype, &ours, &expected, &mut f32_loads);
            }
        }
    });
}

/// The comparison itself: values outside a tolerance must not pass.
#[test]
fn a_difference_is_seen() {
    let theirs: Vec<f64> = (0..100).map(|i| f64::from(i) / 7.0 - 5.0).collect();
    let d = distance("same", &theirs, &theirs);
    assert!(d.most == 0.0 && d.beyond < 0.0 && d.relative_l2 == 0.0 && (d.cosine - 1.0).abs() < 1e-12);
    let mut ours = theirs.clone();
    ours[35] += 3e-4; // where the expected value is 0: only the absolute part holds
    let d = distance("one off", &ours, &theirs);
    assert!(d.beyond > 0.0 && (d.most - 3e-4).abs() < 1e-12 && d.relative_l2 > 0.0);
    ours.iter_mut().for_each(|x| *x = -*x);
    assert!(distance("negated", &ours, &theirs).cosine < -0.99);
}
