//! `bench`: its measurements are complete and consistent; speed is not tested.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;

#[test]
fn every_kernel_of_a_step_is_measured_against_its_ceiling() {
    let (_dir, recipe) = folder();
    for dtype in ["f32", "bf16"] {
        let v = json(&["bench", "kernels", "--work", path(&recipe), "--seconds", "0.001", "--dtype", dtype]);
        assert_eq!(v["dtype"], dtype);
        let list = v["kernels"].as_array().unwrap();
        let has = |name: &str| list.iter().any(|k| k["name"].as_str().unwrap().starts_with(name));
        for family in [
            "gemm.qkv.",
            "gemm.head.",
            "experts.up.forward",
            "experts.down.weight_grad",
            "attention.",
            "norm.",
            "rope",
            "activation.",
            "cross_entropy",
            "adam",
            "column_sum",
            "copy",
        ] {
            assert!(has(family), "{family} is missing");
        }
        for k in list {
            let [ms, rate, ceiling, part] =
                ["ms", "rate", "ceiling", "of_ceiling"].map(|f| k[f].as_f64().unwrap());
            assert!(ms > 0.0 && rate > 0.0 && ceiling > 0.0, "{k}");
            assert!((rate / ceiling / part - 1.0).abs() < 1e-9, "{k}");
            let work = k["work"].as_f64().unwrap();
            assert!((work / (ms / 1e3) / 1e9 / rate - 1.0).abs() < 1e-9, "{k}");
            assert!(k["calls"].as_u64().unwrap() >= 3);
        }
    }
}

/// A workload fixes the batch of one data-parallel rank.
#[test]
fn a_workload_grows_with_its_data_parallel_ranks() {
    let work = "custom/L=1/d=64/h=1/kv=1/hd=64/ffn=128/V=256/T=64/B=2";
    let args = ["bench", "train", "--work", work, "--device", "cpu", "--steps", "1", "--warmup", "1"];
    let tokens =
        |v: serde_json::Value| (v["tok_s"].as_f64().unwrap() * v["step_ms"].as_f64().unwrap() / 1e3).round();
    assert_eq!(tokens(json(&[&args[..], &["--ranks", "2"]].concat())), 2.0 * 2.0 * 64.0);
    let own = ["--ranks", "2", "--set", "train.global_batch=8"];
    assert_eq!(tokens(json(&[&args[..], &own].concat())), 8.0 * 64.0);
}

/// FLOPs and bytes computed by hand: 4 rows of 16 tokens, 32 channels, 2 heads of 16, f 64, 256 tokens.
#[test]
fn work_is_counted_right() {
    let (_dir, recipe) = folder();
    let args = ["bench", "kernels", "--work", path(&recipe), "--seconds", "0", "--dtype", "f32"];
    let v = json(&args);
    let work = |name: &str| {
        let k = v["kernels"].as_array().unwrap().iter().find(|k| k["name"] == name);
        k.unwrap_or_else(|| panic!("{name}"))["work"].as_f64().unwrap()
    };
    assert_eq!(work("gemm.qkv.forward"), 2.0 * 64.0 * 32.0 * 96.0);
    assert_eq!(work("gemm.head.weight_grad"), 2.0 * 64.0 * 32.0 * 256.0);
    // Each query sees itself and all before it: 1 + … + 16 pairs, two products of 16 channels each.
    assert_eq!(work("attention.forward"), 4.0 * 2.0 * 136.0 * 2.0 * 2.0 * 16.0);
    assert_eq!(work("attention.backward"), 2.5 * work("attention.forward"));
    assert_eq!(work("norm.forward"), 2.0 * 64.0 * 32.0 * 4.0);
    assert_eq!(work("cross_entropy"), 3.0 * 64.0 * 256.0 * 4.0);
    let windowed = json(&[&args[..], &["--set", "model.window=4", "--filter", "attention"]].concat());
    let k = &windowed["kernels"][0];
    assert_eq!(k["name"], "attention.window.forward");
    assert_eq!(k["work"].as_f64().unwrap(), 4.0 * 2.0 * (1.0 + 2.0 + 3.0 + 13.0 * 4.0) * 2.0 * 2.0 * 16.0);
}

#[test]
fn filters_and_mistakes() {
    let (_dir, recipe) = folder();
    let args = ["bench", "kernels", "--work", path(&recipe), "--seconds", "0.001", "--filter"];
    let text = ok(&[&args[..], &["norm"]].concat());
    assert!(text.contains("norm.backward") && !text.contains("gemm"), "{text}");
    let error = fails(&[&args[..], &["nothing"]].concat(), 2);
    assert!(error.contains("nothing") && error.contains("hint: the kernels are gemm.qkv.forward"), "{error}");
    let error = fails(&["bench", "kernels", "--work", "tinny"], 2);
    assert!(error.contains("no workload is called \"tinny\"; did you mean tiny?"), "{error}");
    let error = fails(&["bench", "train", "--work", "nope"], 2);
    assert!(error.contains("hint: the workloads are gpt2-124m, llama-1b, llama-8b-8l, moe-8l"), "{error}");
    assert!(error.contains("tiny") && error.contains("custom/") && error.contains(".toml"), "{error}");
    fails(&["bench", "kernels", "--seconds", "-1"], 2);
    let v =
        json(&["bench", "train", "--work", path(&recipe), "--steps", "2", "--warmup", "1", "--peak", "1"]);
    assert!(v["tok_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn every_collective_is_measured_with_its_bandwidths() {
    let args =
        ["bench", "comm", "--ranks", "3", "--device", "cpu", "--largest", "4096", "--seconds", "0.001"];
    let v = json(&args);
    assert_eq!((&v["ranks"], &v["engine"]), (&3.into(), &"threads".into()));
    let rows = v["results"].as_array().unwrap();
    // Six collectives, two types, two sizes.
    assert_eq!(rows.len(), 24);
    for (name, factor) in [
        ("all-reduce", 4.0 / 3.0),
        ("all-gather", 2.0 / 3.0),
        ("reduce-scatter", 2.0 / 3.0),
        ("all-to-all", 2.0 / 3.0),
        ("broadcast", 1.0),
        ("message", 1.0),
    ] {
        let of: Vec<_> = rows.iter().filter(|r| r["collective"] == name).collect();
        assert_eq!(of.len(), 4, "{name}");
        for r in of {
            let [bytes, s, algorithm, bus] =
                ["bytes", "seconds", "algorithm", "bus"].map(|f| r[f].as_f64().unwrap());
            assert!(s > 0.0 && (algorithm / (bytes / s / 1e9) - 1.0).abs() < 1e-9, "{r}");
            assert!((bus / algorithm / factor - 1.0).abs() < 1e-9, "{r}");
            assert!(bytes <= 4096.0 && bytes > 1000.0, "{r}");
            assert!(r["host_seconds"].as_f64().unwrap() > 0.0, "{r}");
            // Threads have no library that moves data, and no frames.
            assert!(r["own_seconds"].is_null() && r["frames"] == 0.0, "{r}");
        }
    }
    let text = ok(&[&args[..], &["--filter", "reduce", "--dtype", "bf16"]].concat());
    assert!(
        text.contains("bus GB/s") && text.contains("2(n-1)/n") && text.contains("reduce-scatter"),
        "{text}"
    );
    assert!(!text.contains("f32") && !text.contains("\nbroadcast"), "{text}");
    assert!(fails(&["bench", "comm", "--filter", "nothing"], 2).contains("all-to-all"));
}

#[test]
fn a_step_over_ranks_tells_hidden_from_exposed_communication() {
    let (_dir, recipe) = folder();
    let args =
        ["bench", "train", "--work", path(&recipe), "--steps", "2", "--warmup", "1", "--device", "cpu"];
    let v = json(&[&args[..], &["--ranks", "4", "--set", "parallel.tp=2"]].concat());
    assert_eq!((&v["ranks"], &v["engine"]), (&4.into(), &"threads".into()));
    let number = |v: &serde_json::Value, key: &str| v[key].as_f64().unwrap_or_else(|| panic!("{key}: {v}"));
    assert!(number(&v, "step_ms") > 0.0 && number(&v, "tok_s") > 0.0 && number(&v, "peak_bytes") > 0.0);
    assert!(number(&v, "reserved_bytes") >= number(&v, "peak_bytes"));
    assert!(v["mfu"].is_null(), "the peak of the CPU is not known: {v}");
    let kinds = v["communication"].as_array().unwrap();
    let has = |group: &str| kinds.iter().any(|k| k["group"].as_str().unwrap().starts_with(group));
    assert!(has("tp") && has("dp"), "{kinds:?}");
    for k in kinds.iter().chain([&v["communication_total"]]) {
        let [total, hidden, exposed] = ["ms", "hidden_ms", "exposed_ms"].map(|key| number(k, key));
        assert!(hidden >= 0.0 && exposed >= 0.0 && (hidden + exposed - total).abs() < 1e-9, "{k}");
    }
    let text = ok(&[&args[..], &["--set", "parallel.pp=2"]].concat());
    assert!(text.contains("exposed") && text.contains("2 ranks (pp=2)"), "{text}");
    let error = fails(&[&args[..], &["--ranks", "3", "--set", "parallel.tp=2"]].concat(), 2);
    assert!(error.contains("3"), "{error}");
}
