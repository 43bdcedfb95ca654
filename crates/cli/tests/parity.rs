//! `parity`: one step under two settings.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;
use serde_json::Value;
use std::path::Path;

fn verdict(args: &[&str], code: i32) -> Value {
    let out = ferrotron(&[&["parity", "--json"], args].concat());
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {errors}");
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(v["agree"], code == 0);
    assert_eq!(v["tensors"], v["report"].as_array().unwrap().len());
    v
}

/// Biases and learned positions too: among them are gradients that are zero but for rounding.
const EVERYTHING: [&str; 10] = [
    "--set",
    "model.qkv_bias=true",
    "--set",
    "model.mlp_bias=true",
    "--set",
    "model.proj_bias=true",
    "--set",
    "model.norm=layernorm",
    "--set",
    "model.positions=learned",
];

#[test]
fn threads_change_no_bit() {
    let (_dir, recipe) = folder();
    for dtype in ["f32", "bf16"] {
        let [a, b] = ["threads=1", "threads=3"].map(|t| format!("{dtype},{t}"));
        let args = [&[a.as_str(), &b, "--recipe", path(&recipe)][..], &EVERYTHING].concat();
        let v = verdict(&args, 0);
        assert_eq!(v["identical"], v["tensors"]);
        // The loss, and a gradient and a weight of every parameter.
        let kinds = |k: &str| v["report"].as_array().unwrap().iter().filter(|r| r["kind"] == k).count();
        assert_eq!((kinds("loss"), kinds("gradient")), (1, kinds("weight")));
        assert!(kinds("weight") > 10);
    }
    let text = ok(&["parity", "threads=1", "threads=2", "--recipe", path(&recipe)]);
    assert!(text.contains("bit-identical"), "{text}");
}

#[test]
fn micro_batches_and_precisions_agree_within_their_tolerances_and_not_within_less() {
    let (_dir, recipe) = folder();
    let base = ["--recipe", path(&recipe)];
    for sides in [["f32,micro_batch=1", "f32,micro_batch=4"], ["bf16,micro_batch=1", "bf16,micro_batch=2"]] {
        let args = [&sides[..], &base, &EVERYTHING].concat();
        let v = verdict(&args, 0);
        assert_ne!(v["identical"], v["tensors"]);
        assert_eq!(v["bounds"]["gradient"], 1e-5);
        verdict(&[&args[..], &["--tolerance", "0"]].concat(), 1);
    }
    let args = [&["f32", "bf16"][..], &base, &EVERYTHING].concat();
    let v = verdict(&args, 0);
    // The first step of Adam moves a gain of one by the learning rate, whatever the precision of its gradient.
    assert!(v["identical"].as_u64().unwrap() <= 3, "{}", v["identical"]);
    assert_ne!(v["loss"][0], v["loss"][1]);
    let v = verdict(&[&args[..], &["--tolerance", "1e-4"]].concat(), 1);
    assert!(v["different"].as_u64().unwrap() > 10);
    // The worst first: nothing that agrees stands before something that does not.
    let agrees: Vec<bool> =
        v["report"].as_array().unwrap().iter().map(|r| r["agrees"].as_bool().unwrap()).collect();
    assert!(agrees.is_sorted(), "{agrees:?}");
    let out = ferrotron(&[&["parity"], &args[..], &["--tolerance", "1e-4"]].concat());
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text.contains("DIFFERS") && text.contains("THE SIDES DIFFER") && text.lines().count() < 20,
        "{text}"
    );
}

/// A model whose large weights amplify rounding: sums in another order miss the bound of f32, and the report says why they
/// agree. With so small a learning rate, only gradients can differ.
#[test]
fn ill_conditioned_tensors_are_named_with_how_far_rounding_moves_them() {
    let keys = [
        "model.layers=6",
        "model.hidden=32",
        "model.heads=4",
        "model.head_dim=8",
        "model.ffn=64",
        "model.qkv_bias=true",
        "model.attn_sink=true",
        "model.init_std=0.6",
        "model.preset=tiny",
        "model.kv_heads=4",
        "data.seq_len=32",
        "train.global_batch=4",
        "train.micro_batch=4",
        "optimizer.lr=1e-12",
    ];
    let mut args = vec!["f32", "f32,tp=2"];
    keys.iter().for_each(|key| args.extend(["--set", key]));
    let v = verdict(&args, 0);
    let (count, report) = (v["ill_conditioned"].as_u64().unwrap(), v["report"].as_array().unwrap());
    let named = |r: &&Value| r["ulp_movement"].is_f64();
    assert!(count > 0 && report.iter().filter(named).count() as u64 == count, "{v}");
    for row in report.iter().filter(named) {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("relative") > number("allowed") && (number("allowed") - 1e-5).abs() < 1e-12, "{row}");
        assert!(number("relative") <= 3.0 * number("ulp_movement"), "{row}");
    }
    let text = ok(&[&["parity"], &args[..]].concat());
    assert!(text.contains("ill-conditioned: one ulp in the weights moves it by"), "{text}");
    // A bound that is asked for is kept.
    let v = verdict(&[&args[..], &["--tolerance", "1e-5"]].concat(), 1);
    assert_eq!((v["ill_conditioned"].as_u64(), v["report"][0]["ulp_movement"].is_null()), (Some(0), true));
}

#[test]
fn golden_models_agree_in_both_precisions_and_on_any_number_of_threads() {
    for model in golden_models() {
        let input = model.join("expected.safetensors");
        let on = ["--model", path(&model), "--input", path(&input)];
        // Experts are chosen: rounding sends a token elsewhere, and what follows is another number.
        let config = std::fs::read_to_string(model.join("config.json")).unwrap();
        if !config.contains("experts") {
            let v = verdict(&[&["f32", "bf16"][..], &on].concat(), 0);
            assert!(v["report"].as_array().unwrap().iter().any(|r| r["kind"] == "logits"));
        }
        let v = verdict(&[&["bf16,threads=1", "bf16,threads=3"][..], &on].concat(), 0);
        assert_eq!(v["identical"], v["tensors"]);
    }
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let (_dir, recipe) = folder();
    let recipe = path(&recipe);
    assert!(fails(&["parity", "ep=2", "f32", "--recipe", recipe], 2).contains("needs an MoE model"));
    assert!(fails(&["parity", "cuda:99", "f32", "--recipe", recipe], 1).contains("no CUDA device"));
    assert!(fails(&["parity", "micro_batch=3", "f32", "--recipe", recipe], 2).contains("micro_batch"));
    fails(&["parity", "f32", "bf16", "--recipe", recipe, "--tolerance=-1"], 2);
    fails(&["parity", "f32", "bf16", "--recipe", recipe, "--set", "train.stpes=1"], 2);
    let model = golden_models().remove(0);
    let input = model.join("expected.safetensors");
    let args = ["parity", "micro_batch=1", "f32", "--model", path(&model), "--input", path(&input)];
    assert!(fails(&args, 2).contains("micro_batch"));
    assert!(fails(&["parity", "f32", "f32", "--model", "nowhere", "--input", "x"], 2).contains("nowhere"));
}

/// Sizes that FP8 GEMMs support, on two ranks too.
const FP8_SIZES: [&str; 4] = ["--set", "model.layers=2", "--set", "train.global_batch=8"];

/// A recipe of text that does not change with the program, as the embedded corpus does. What FP8 values of two
/// layouts make of one tensor is near its bound, whose rounding differs wherever a sum differs in its last digit.
fn lasting(dir: &Path) -> String {
    let text = dir.join("text");
    let license = concat!(env!("CARGO_MANIFEST_DIR"), "/../../LICENSE");
    ok(&["data", "build", license, "--output", path(&text)]);
    format!("data.path={}", text.display())
}

#[test]
fn fp8_gemms_agree_on_any_layout() {
    let (dir, recipe) = folder();
    let data = lasting(dir.path());
    let text = ["--set", &*data, "--set", "model.vocab=272"];
    let base = [&["--recipe", path(&recipe)][..], &FP8_SIZES, &text].concat();
    for scaling in ["current", "delayed", "block"] {
        let one = format!("cpu,bf16,fp8={scaling},micro_batch=1");
        for layout in ["tp=2", "cp=2", "dp=2", "pp=2"] {
            let other = format!("{one},{layout}");
            let sides = [one.as_str(), &other, "--set", "parallel.zero=1"];
            let v = verdict(&[&sides[..], &base].concat(), 0);
            // Half of the tokens have another scale, and round their own way, unless it is a power of two.
            let rescaled = scaling == "current" && layout == "cp=2";
            assert_eq!(v["bounds"]["gradient"], if rescaled { 1e-1 } else { 5e-2 });
            if rescaled {
                let pow2 = ["--set", "precision.pow2_scales=true"];
                assert_eq!(verdict(&[&sides[..], &base, &pow2].concat(), 0)["bounds"]["gradient"], 5e-2);
            }
        }
        // Threads alone change no bit.
        let [a, b] = ["threads=1", "threads=3"].map(|t| format!("{one},{t}"));
        let v = verdict(&[&[a.as_str(), &b][..], &base].concat(), 0);
        assert_eq!(v["identical"], v["tensors"]);
    }
}

/// Heads and stages have the same scales and tiles; ranks that share sequences meet keys in another order.
#[test]
fn fp8_attention_agrees_on_any_layout() {
    let (_dir, recipe) = folder();
    let base =
        [&["--recipe", path(&recipe)][..], &FP8_SIZES, &["--set", "precision.fp8_attention=true"]].concat();
    let one = "cpu,bf16,micro_batch=1";
    for layout in ["tp=2", "pp=2", "cp=2"] {
        let other = format!("{one},{layout}");
        let sides = [one, &other, "--set", "parallel.zero=1"];
        let room: &[&str] = if layout == "cp=2" { &["--tolerance", "5e-2"] } else { &[] };
        verdict(&[&sides[..], &base, room].concat(), 0);
    }
    let [a, b] = ["threads=1", "threads=3"].map(|t| format!("{one},{t}"));
    let v = verdict(&[&[a.as_str(), &b][..], &base].concat(), 0);
    assert_eq!(v["identical"], v["tensors"]);
}

#[test]
fn fp8_gemms_agree_with_bf16_within_their_tolerances_and_not_within_less() {
    let (_dir, recipe) = folder();
    let base = [&["--recipe", path(&recipe)][..], &FP8_SIZES].concat();
    for (scaling, bound) in
        [("current", 0.25), ("delayed", 0.25), ("block", 0.25), ("mxfp8", 0.25), ("nvfp4", 0.5)]
    {
        for layout in ["", ",tp=2"] {
            let other = format!("bf16,fp8={scaling}{layout}");
            let args = [&["bf16", other.as_str()][..], &base].concat();
            let v = verdict(&args, 0);
            assert_eq!(
                (v["bounds"]["gradient"].as_f64(), v["bounds"]["loss"].as_f64()),
                (Some(bound), Some(2e-2))
            );
            // They are narrow indeed.
            verdict(&[&args[..], &["--tolerance", "5e-3"]].concat(), 1);
        }
    }
    let model = golden_models().remove(0);
    let input = model.join("expected.safetensors");
    let on = ["parity", "bf16", "bf16,fp8=block", "--model", path(&model), "--input", path(&input)];
    assert!(fails(&on, 2).contains("recipes"));
    assert!(fails(&[&["parity", "f32", "f32,fp8=block"][..], &base].concat(), 2).contains("bf16"));
}
