//! Numbers of real (tiny) Hugging Face models through the binary: logits, loss and every gradient, in both
//! spellings of their configurations and both types of compute.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program under test: `FERROTRON_BIN` on a machine it was carried to, else the one just built.
fn binary() -> std::ffi::OsString {
    std::env::var_os("FERROTRON_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrotron").into())
}

/// Model types this version covers; others fail.
const COVERED: &[&str] = &[
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
];

/// The two spellings of one configuration.
const SPELLINGS: [&str; 2] = ["config.json", "config_hub.json"];

fn golden() -> PathBuf {
    let root = std::env::var_os("FERROTRON_GOLDEN").map(PathBuf::from);
    root.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")).join("hf")
}

/// Every folder of the set. Unknown architectures fail.
fn cases() -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(golden()).expect("no folder of golden vectors") {
        let dir = entry.unwrap().path();
        if !dir.is_dir() {
            continue;
        }
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let kind = json["model_type"].as_str().unwrap();
        assert!(COVERED.contains(&kind), "{}: unknown architecture {kind}", dir.display());
        out.push(dir);
    }
    out.sort();
    assert!(!out.is_empty(), "no case in {}", golden().display());
    out
}

/// A folder with the case's weights and one spelling of its configuration.
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

/// How many tokens each expert of each layer took.
fn loads(file: &SafeTensors) -> Vec<(String, Vec<f64>)> {
    let mut names: Vec<&str> = file.names().into_iter().filter(|n| n.starts_with("expert_load.")).collect();
    names.sort_unstable();
    names.into_iter().map(|n| (n.to_string(), values(file, n))).collect()
}

/// Compares one run with the expected values under the tolerances of the set's README. Where rounding sent tokens to other
/// experts than the f32 run of the same layout did, only the loss can be compared, and that is said.
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
            "{what} {dtype}: at least {} choices of experts differ; gradients not compared",
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
            // Of an expert that no token went to.
            assert!(d.most == 0.0, "{label}: {} where there is none", d.most);
        } else {
            assert!(d.cosine >= 0.995, "{label}: cosine {}", d.cosine);
        }
    }
}

#[test]
fn golden_hf_forward_and_backward() {
    let temporary = tempfile::tempdir().unwrap();
    for case in cases() {
        let name = case.file_name().unwrap().display().to_string();
        let expected = std::fs::read(case.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&expected).unwrap();
        for spelling in SPELLINGS {
            let folder = temporary.path().join(format!("{name}.{spelling}"));
            model_folder(&case, spelling, &folder);
            let mut f32_loads = Vec::new();
            for dtype in ["f32", "bf16"] {
                let output = folder.join(format!("{dtype}.safetensors"));
                forward(&folder, &case.join("expected.safetensors"), &output, dtype, "");
                let bytes = std::fs::read(&output).unwrap();
                let ours = SafeTensors::deserialize(&bytes).unwrap();
                compare(&format!("{name} ({spelling})"), dtype, &ours, &expected, &mut f32_loads);
            }
        }
        println!("covered: {name}");
    }
}

/// Ranks that share layers, sequences, stages and rows; with more data-parallel ranks than rows, some have none, and
/// with more stages than layers, some have nothing but what they pass on.
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

/// The same with experts over ranks.
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

fn has_experts(case: &Path) -> bool {
    let bytes = std::fs::read(case.join("model.safetensors")).unwrap();
    SafeTensors::deserialize(&bytes).unwrap().names().iter().any(|n| n.contains(".experts."))
}

#[test]
fn golden_hf_under_every_layout() {
    let temporary = tempfile::tempdir().unwrap();
    for case in cases() {
        let name = case.file_name().unwrap().display().to_string();
        let expected = std::fs::read(case.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&expected).unwrap();
        let folder = temporary.path().join(&name);
        model_folder(&case, SPELLINGS[0], &folder);
        let experts = if has_experts(&case) { &EXPERT_LAYOUTS[..] } else { &[] };
        for layout in LAYOUTS.iter().chain(experts).copied() {
            let mut f32_loads = Vec::new();
            for dtype in if layout.contains("tp=2,") { &["f32", "bf16"][..] } else { &["f32"] } {
                let output = folder.join(format!("{dtype}.safetensors"));
                forward(&folder, &case.join("expected.safetensors"), &output, dtype, layout);
                let bytes = std::fs::read(&output).unwrap();
                let ours = SafeTensors::deserialize(&bytes).unwrap();
                compare(&format!("{name} ({layout})"), dtype, &ours, &expected, &mut f32_loads);
            }
        }
    }
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
    assert!(distance("turned", &ours, &theirs).cosine < -0.99);
}
