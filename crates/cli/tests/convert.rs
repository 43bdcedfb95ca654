//! `convert`: Hugging Face folders to checkpoints and back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;
#[path = "../../../tests/support/soak.rs"]
mod soak;

use common::*;
use std::path::{Path, PathBuf};

fn same(a: &Path, b: &Path) {
    assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap(), "{} and {}", a.display(), b.display());
}

#[test]
fn golden_models_come_back_byte_for_byte() {
    for model in golden_models() {
        let dir = tempfile::tempdir().unwrap();
        let [checkpoint, like, alone] = ["ckpt", "like", "alone"].map(|n| dir.path().join(n));
        let v = json(&["convert", path(&model), path(&checkpoint)]);
        assert_eq!((&v["kind"], &v["tokenizer"]), (&"checkpoint".into(), &false.into()), "{v}");
        let v = json(&["convert", path(&checkpoint), path(&like), "--like", path(&model)]);
        assert_eq!(v["kind"], "huggingface");
        // What was copied into the checkpoint is enough for the configuration, too.
        ok(&["convert", path(&checkpoint), path(&alone)]);
        for file in ["config.json", "model.safetensors"] {
            same(&model.join(file), &like.join(file));
        }
        same(&model.join("config.json"), &alone.join("config.json"));
        // Nothing but the folders asked for, and no litter.
        assert_eq!(names(dir.path()), ["alone", "ckpt", "like"]);
    }
}

/// Loss of the first step of a run that starts from the weights in `from`.
fn first_loss(dir: &Path, from: &Path, out: &str) -> f64 {
    let set = format!("model.hf={}", from.display());
    let data = RECIPE.split("[data]").nth(1).unwrap();
    let file = dir.join("from.toml");
    std::fs::write(&file, format!("[data]{data}")).unwrap();
    let out = dir.join(out);
    let f32 = "precision.dtype=f32";
    ok(&["train", path(&file), "--out", path(&out), "--set", &set, "--set", f32, "--steps", "1"]);
    let log = std::fs::read_to_string(out.join("events.jsonl")).unwrap();
    let step = log.lines().find(|l| l.contains("\"loss\"")).unwrap();
    serde_json::from_str::<serde_json::Value>(step).unwrap()["loss"].as_f64().unwrap()
}

#[test]
fn a_run_becomes_a_folder_and_a_new_run_starts_from_it() {
    let (dir, recipe, run) = trained(&[]);
    let [hf, again, half] = ["hf", "again", "half"].map(|n| dir.path().join(n));
    let v = json(&["convert", path(&run), path(&hf)]);
    assert_eq!((&v["family"], &v["tokenizer"]), (&"Llama".into(), &true.into()), "{v}");
    assert_eq!(names(&hf), ["config.json", "model.safetensors", "tokenizer.json"]);
    ok(&["convert", path(&hf), path(&again)]);
    for (dtype, word) in [("f16", "float16"), ("bf16", "bfloat16")] {
        let small = json(&["convert", path(&run), path(&half), "--dtype", dtype, "--overwrite"]);
        assert_eq!(small["bytes"].as_u64().unwrap() * 2, v["bytes"].as_u64().unwrap());
        let config: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(half.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["torch_dtype"], word);
    }
    // The same weights: a run from either begins with the same loss.
    let first_loss = |from: &Path, out: &str| first_loss(dir.path(), from, out);
    let losses = [first_loss(&hf, "a"), first_loss(&again, "b")];
    assert_eq!(losses[0], losses[1]);
    // A run that started from a folder is exported with that folder's files.
    let back = dir.path().join("back");
    let v = json(&["convert", path(&dir.path().join("a")), path(&back)]);
    assert_eq!(v["like"], path(&hf));
    same(&back.join("tokenizer.json"), &hf.join("tokenizer.json"));
    // Weights alone are no run to resume.
    let wrong = dir.path().join("c/checkpoints/step-00000000");
    std::fs::create_dir_all(wrong.parent().unwrap()).unwrap();
    std::fs::rename(&again, &wrong).unwrap();
    let error = fails(&["train", path(&recipe), "--out", path(&dir.path().join("c"))], 1);
    assert!(error.contains("weights only") && error.contains("model.hf"), "{error}");
}

/// transformers' `generate` stops at what the files say, not at what the tokenizer names.
#[test]
fn a_model_trained_from_scratch_is_exported_with_its_tokenizers_end() {
    let (dir, recipe, run) = trained(&[]);
    let [hf, tokenizer, text, tuned, exported] =
        ["hf", "tokenizer", "t.txt", "tuned", "exported"].map(|n| dir.path().join(n));
    ok(&["convert", path(&run), path(&hf)]);
    let bytes = std::fs::read_to_string(hf.join("tokenizer.json")).unwrap();
    let mut file: serde_json::Value = serde_json::from_str(&bytes).unwrap();
    file["added_tokens"] = serde_json::json!([{"id": 256, "content": "<end>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true}]);
    std::fs::create_dir(&tokenizer).unwrap();
    std::fs::write(tokenizer.join("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(tokenizer.join("tokenizer_config.json"), r#"{"eos_token": "<end>"}"#).unwrap();
    std::fs::write(&text, "ab ba ab ba\n".repeat(60)).unwrap();
    let set = [
        format!("data.tokenizer={}", tokenizer.display()),
        format!("data.cache={}", dir.path().join("cache").display()),
        "model.vocab=257".into(),
    ];
    let mut args = vec!["train", path(&recipe), "--data", path(&text), "--out", path(&tuned)];
    set.iter().for_each(|s| args.extend(["--set", s]));
    ok(&args);
    ok(&["convert", path(&tuned), path(&exported)]);
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(exported.join(name)).unwrap()).unwrap()
    };
    assert_eq!(read("generation_config.json"), serde_json::json!({"eos_token_id": 256}));
    assert_eq!(read("tokenizer_config.json"), serde_json::json!({"eos_token": "<end>"}));
}

/// MoE runs with the architectures of three families: exported, sampled from, fine-tuned, and converted back.
#[test]
fn moe_runs_are_exported_as_their_families() {
    let families: [(&str, &[&str]); 3] = [
        ("Mixtral", &["moe.experts=4", "moe.ffn=64"]),
        ("Qwen3-MoE", &["moe.experts=4", "moe.ffn=16", "model.qk_norm=true", "moe.pre_softmax=true"]),
        (
            "DeepSeek-V3",
            &[
                "moe.experts=8",
                "moe.topk=4",
                "moe.ffn=16",
                "moe.score_function=sigmoid",
                "moe.expert_bias=true",
                "moe.groups=[4,2]",
                "moe.route_scale=2.5",
                "moe.shared_ffn=32",
                "model.mla={ kv_lora_rank = 12, nope_dim = 8, rope_dim = 4, v_dim = 8 }",
            ],
        ),
    ];
    for (family, set) in families {
        let (dir, _, run) = trained(&[set, &["precision.dtype=f32"]].concat());
        let [hf, again, back] = ["hf", "again", "back"].map(|n| dir.path().join(n));
        let v = json(&["convert", path(&run), path(&hf)]);
        assert_eq!(v["family"], family, "{v}");
        ok(&["convert", path(&hf), path(&again)]);
        ok(&["convert", path(&again), path(&back)]);
        same(&hf.join("model.safetensors"), &back.join("model.safetensors"));
        let text = |model: &Path| {
            let args = [
                "generate",
                "--model",
                path(model),
                "--prompt",
                "pub fn",
                "--tokens",
                "6",
                "--temperature",
                "0",
            ];
            json(&args)["text"].clone()
        };
        assert_eq!(text(&run), text(&hf), "{family}");
        assert_eq!(text(&hf), text(&again), "{family}");
        assert_eq!(first_loss(dir.path(), &hf, "a"), first_loss(dir.path(), &again, "b"), "{family}");
    }
}

#[test]
fn a_dense_model_is_upcycled() {
    let (dir, _, run) = trained(&["precision.dtype=f32"]);
    let [hf, whole, pieces, mixtral] = ["hf", "whole", "pieces", "mixtral"].map(|n| dir.path().join(n));
    let dense = json(&["convert", path(&run), path(&hf)]);
    let v = json(&["convert", path(&hf), path(&whole), "--upcycle", "experts=4"]);
    let (one, four) = (dense["parameters"].as_u64().unwrap(), v["parameters"].as_u64().unwrap());
    assert_eq!(four - one, 3 * 3 * 32 * 64 + 4 * 32, "three further copies of an MLP, and a router");
    ok(&["convert", path(&hf), path(&pieces), "--upcycle", "experts=4,granularity=2,topk=4"]);
    let losses = [&hf, &whole, &pieces]
        .map(|m| first_loss(dir.path(), m, m.file_name().unwrap().to_str().unwrap().to_uppercase().as_str()));
    assert!((losses[0] - losses[1]).abs() < 1e-5 && (losses[0] - losses[2]).abs() < 1e-1, "{losses:?}");
    assert_eq!(json(&["convert", path(&whole), path(&mixtral)])["family"], "Mixtral");
    let error = fails(
        &["convert", path(&hf), path(&dir.path().join("no")), "--upcycle", "experts=4,granularity=3"],
        1,
    );
    assert!(error.contains("granularity=3"), "{error}");
    let error = fails(&["convert", path(&run), path(&dir.path().join("no")), "--upcycle", "experts=4"], 1);
    assert!(error.contains("--upcycle"), "{error}");
    fails(&["convert", path(&hf), path(&dir.path().join("no")), "--upcycle", "granularity=3"], 2);
}

#[test]
fn nothing_is_overwritten_unless_asked_and_nothing_foreign_ever() {
    let (dir, _, run) = trained(&[]);
    let [hf, checkpoint, foreign] = ["hf", "ckpt", "foreign"].map(|n| dir.path().join(n));
    ok(&["convert", path(&run), path(&hf)]);
    ok(&["convert", path(&hf), path(&checkpoint)]);
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("precious"), "x").unwrap();
    let runs = [(&run, &hf), (&hf, &checkpoint)];
    for (from, to) in runs {
        assert!(fails(&["convert", path(from), path(to)], 1).contains("already exists"));
        let before = names(to);
        ok(&["convert", path(from), path(to), "--overwrite"]);
        assert_eq!(names(to), before);
        for overwrite in [&[][..], &["--overwrite"]] {
            let args = [&["convert", path(from), path(&foreign)][..], overwrite].concat();
            fails(&args, 1);
        }
        assert!(fails(&["convert", path(from), path(&foreign), "--overwrite"], 1).contains("not replaced"));
    }
    assert_eq!(names(&foreign), ["precious"]);
    assert_eq!(names(dir.path()), ["ckpt", "foreign", "hf", "run", "small.toml"]);
    // An empty folder is as good as none.
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    ok(&["convert", path(&hf), path(&empty)]);
    assert!(empty.join("manifest.json").is_file());
}

#[test]
fn invalid_conversions_are_refused() {
    let (dir, _, run) = trained(&[]);
    let to = dir.path().join("to");
    assert!(fails(&["convert", "no/such", path(&to)], 2).contains("no/such"));
    let model = golden_models().remove(0);
    let error = fails(&["convert", path(&run), path(&to), "--like", path(&model)], 1);
    assert!(error.contains("cannot express") || error.contains("not of the shape"), "{error}");
    let error = fails(&["convert", path(&model), path(&to), "--like", path(&model)], 1);
    assert!(error.contains("--like"), "{error}");
    let error = fails(&["convert", path(&model), path(&dir.path().join("step-00000007"))], 1);
    assert!(error.contains("another step"), "{error}");
    fails(&["convert", path(&run), path(&to), "--dtype", "f8"], 2);
    assert!(!to.exists());
}

/// A trained run, its export and a checkpoint of that: every direction of a conversion as (from, to).
fn both_directions() -> (tempfile::TempDir, [(PathBuf, PathBuf); 2]) {
    let (dir, _, run) = trained(&[]);
    let [hf, checkpoint] = ["hf", "ckpt"].map(|n| dir.path().join(n));
    ok(&["convert", path(&run), path(&hf)]);
    ok(&["convert", path(&hf), path(&checkpoint)]);
    (dir, [(run, hf.clone()), (hf, checkpoint)])
}

#[test]
fn only_what_a_conversion_wrote_is_replaced() {
    let (dir, runs) = both_directions();
    for (from, to) in &runs {
        // Somebody else's folder, whatever its files are called.
        for name in ["manifest.json", "config.json", "model.safetensors"] {
            let thesis = dir.path().join("thesis");
            std::fs::create_dir(&thesis).unwrap();
            std::fs::write(thesis.join(name), "{}").unwrap();
            std::fs::write(thesis.join("chapter 1.tex"), "years of work").unwrap();
            let error = fails(&["convert", path(from), path(&thesis), "--overwrite"], 1);
            assert!(error.contains("not replaced") && error.contains("chapter 1.tex"), "{error}");
            assert_eq!(names(&thesis), ["chapter 1.tex", name]);
            std::fs::remove_dir_all(&thesis).unwrap();
        }
        // A stranger in our own folder: a file, a folder, a link, one that is named like a tokenizer's.
        let mut strangers = vec!["notes.md", "sub/notes.md", "tokenizer_notes"];
        strangers.extend(to.join("hf").is_dir().then_some("hf/notes.md"));
        for stranger in strangers {
            let file = to.join(stranger);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, "x").unwrap();
            let error = fails(&["convert", path(from), path(to), "--overwrite"], 1);
            let top = if stranger.starts_with("sub/") { "sub" } else { stranger };
            assert!(error.contains("not replaced") && error.contains(&format!("{top:?}")), "{error}");
            std::fs::remove_file(&file).unwrap();
            if stranger.starts_with("sub/") {
                std::fs::remove_dir(to.join("sub")).unwrap();
            }
        }
        #[cfg(unix)]
        {
            let link = to.join("LICENSE");
            std::os::unix::fs::symlink(from, &link).unwrap();
            assert!(fails(&["convert", path(from), path(to), "--overwrite"], 1).contains("LICENSE"));
            std::fs::remove_file(&link).unwrap();
        }
        ok(&["convert", path(from), path(to), "--overwrite"]);
    }
    let [(run, hf), (_, checkpoint)] = &runs;
    // Not in the other direction, not a checkpoint with optimizer state, not what is being read.
    let step = run.join("checkpoints/step-00000002");
    for (from, to, why) in [
        (run, checkpoint, "not a Hugging Face folder"),
        (hf, &hf.join("."), "is read by this conversion"),
        (&step, &step, "is read by this conversion"),
        (checkpoint, hf, ""),
    ] {
        let args = ["convert", path(from), path(to), "--overwrite"];
        match why {
            "" => drop(ok(&args)),
            why => assert!(fails(&args, 1).contains(why)),
        }
    }
    let other = dir.path().join("other");
    std::fs::rename(&step, &other).unwrap();
    assert!(fails(&["convert", path(hf), path(&other), "--overwrite"], 1).contains("optimizer state"));
}

/// Every file of a folder, by its path inside it.
fn contents(dir: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let mut found = std::collections::BTreeMap::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for name in names(&folder) {
            let at = folder.join(name);
            match at.is_dir() {
                true => folders.push(at),
                false => {
                    let bytes = std::fs::read(&at).unwrap();
                    found.insert(at.strip_prefix(dir).unwrap().to_path_buf(), bytes);
                }
            }
        }
    }
    found
}

#[cfg(unix)]
#[test]
fn killed_at_any_moment_it_leaves_the_old_folder_or_the_new_one() {
    let (dir, runs) = both_directions();
    for (from, to) in &runs {
        let wanted = ["f32", "bf16"].map(|dtype| {
            ok(&["convert", path(from), path(to), "--overwrite", "--dtype", dtype]);
            contents(to)
        });
        let begin = std::time::Instant::now();
        ok(&["convert", path(from), path(to), "--overwrite", "--dtype", "f32"]);
        let mut length = begin.elapsed();
        let mut killed = 0;
        for round in 0..soak::rounds(40) {
            let dtype = ["f32", "bf16"][round % 2];
            let mut child = start(&["convert", path(from), path(to), "--overwrite", "--dtype", dtype]);
            std::thread::sleep(length.mul_f64(0.5 + 0.5 * (round as f64 * 0.618).fract()));
            match child.try_wait().unwrap() {
                None => killed += 1,
                // What was measured was slower than this: the machine did other things besides.
                Some(_) => length = length.mul_f64(0.9),
            }
            child.kill().unwrap();
            child.wait().unwrap();
            let now = contents(to);
            assert!(wanted.contains(&now), "round {round}: {:?}", now.keys());
        }
        assert!(killed > 0);
        // What the killed ones left does not stop the next, and is removed by it.
        ok(&["convert", path(from), path(to), "--overwrite", "--dtype", "bf16"]);
        assert!(contents(to) == wanted[1]);
    }
    assert_eq!(names(dir.path()), ["ckpt", "hf", "run", "small.toml"]);
}

#[test]
fn several_at_once_never_damage_the_target() {
    let (dir, runs) = both_directions();
    for (from, to) in &runs {
        let wanted = contents(to);
        for _ in 0..soak::rounds(10) {
            let args = ["convert", path(from), path(to), "--overwrite"];
            let children: Vec<_> = (0..3).map(|_| start(&args)).collect();
            let ended: Vec<_> = children.into_iter().map(|c| c.wait_with_output().unwrap()).collect();
            assert!(ended.iter().any(|e| e.status.success()));
            for e in &ended {
                let error = String::from_utf8_lossy(&e.stderr);
                let refused = e.status.code() == Some(1) && error.contains("is writing here");
                assert!(e.status.success() || refused, "{error}");
            }
            assert!(contents(to) == wanted);
        }
    }
    assert_eq!(names(dir.path()), ["ckpt", "hf", "run", "small.toml"]);
}
