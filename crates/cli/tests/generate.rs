//! `generate`: text from run folders, checkpoints and Hugging Face folders.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;
use serde_json::json;

#[test]
fn text_from_a_run_its_checkpoint_and_its_export() {
    let (dir, _, run) = trained(&["precision.dtype=f32"]);
    let checkpoint = run.join("checkpoints/step-00000002");
    let exported = dir.path().join("hf");
    ok(&["convert", path(&run), path(&exported)]);
    let args = ["--prompt", "pub fn", "--tokens", "12"];
    let first = json(&[&["generate", "--model", path(&run)][..], &args].concat());
    assert_eq!(first["dtype"], "f32");
    assert_eq!(first["prompt_tokens"], 6);
    let tokens: Vec<u8> =
        first["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u8).collect();
    assert!(tokens.len() == 12 || first["stopped"] == "end", "{first}");
    if first["stopped"] == "tokens" {
        assert_eq!(first["text"], json!(String::from_utf8_lossy(&tokens)));
    }
    // The same weights and seed write the same text, wherever the weights are.
    for model in [&checkpoint, &exported] {
        let again = json(&[&["generate", "--model", path(model)][..], &args].concat());
        // A Hugging Face folder of a byte model does not say which byte ends a document, so text goes on there.
        let drawn = again["tokens"].as_array().unwrap();
        assert_eq!(drawn[..tokens.len()], first["tokens"].as_array().unwrap()[..]);
        if drawn.len() == tokens.len() {
            assert_eq!(again["text"], first["text"]);
        } else {
            assert!(model == &exported && first["stopped"] == "end", "{again}");
        }
    }
    let plain = ok(&[&["generate", "--model", path(&run)][..], &args].concat());
    assert_eq!(plain, format!("{}\n", first["text"].as_str().unwrap()));
    let other = json(&[&["generate", "--model", path(&run), "--seed", "5"][..], &args].concat());
    assert_ne!(other["tokens"], first["tokens"]);
    // Ranks that share the model write what one writes.
    let cold = [&["generate", "--model", path(&run), "--temperature", "0"][..], &args].concat();
    let wanted = json(&cold);
    let shared = json(&[&cold[..], &["--layout", "tp=2", "--device", "cpu"]].concat());
    assert_eq!((&shared["tokens"], &shared["text"]), (&wanted["tokens"], &wanted["text"]));
    let text = ok(&[&cold[..], &["--layout", "tp=2", "--device", "cpu"]].concat());
    assert_eq!(text, format!("{}\n", wanted["text"].as_str().unwrap()), "written once");
    assert!(fails(&[&cold[..], &["--layout", "dp=2"]].concat(), 2).contains("tensor parallelism only"));
    // Threads change nothing.
    let threads = json(&[&["generate", "--model", path(&run), "--threads", "3"][..], &args].concat());
    assert_eq!(threads["tokens"], first["tokens"]);
}

#[test]
fn f16_is_for_dense_models() {
    let (dir, recipe, run) = trained(&["precision.dtype=f32"]);
    let text = json(&["generate", "--model", path(&run), "--tokens", "4", "--dtype", "f16"]);
    assert_eq!(text["dtype"], "f16");
    let moe = dir.path().join("moe");
    ok(&["train", path(&recipe), "--out", path(&moe), "--set", "moe.experts=4"]);
    let why = fails(&["generate", "--model", path(&moe), "--dtype", "f16"], 2);
    assert!(why.contains("--dtype: f16 does not support MoE models"), "{why}");
}

/// A run of adapters writes what its merged export does. Its base model is a folder, or drawn from the seed of the run.
#[test]
fn text_from_a_run_of_adapters_and_its_merged_export() {
    let (dir, recipe, base) = trained(&["precision.dtype=f32"]);
    let hf = dir.path().join("base-hf");
    ok(&["convert", path(&base), path(&hf)]);
    let from = format!("model.hf={}", path(&hf));
    let folder =
        ["finetune-hf", "--set", &from, "--data", "embedded", "--set", "data.seq_len=32", "--steps", "4"];
    for (name, recipe) in [("drawn", &[path(&recipe)][..]), ("folder", &folder)] {
        let (run, exported) = (dir.path().join(name), dir.path().join(format!("{name}-hf")));
        let adapters =
            ["--set", "lora.rank=2", "--set", "precision.dtype=f32", "--set", "optimizer.lr=0.1", "--out"];
        ok(&[&["train"], recipe, &adapters, &[path(&run)]].concat());
        ok(&["convert", path(&run), path(&exported), "--merge"]);
        let text = |model: &std::path::Path| {
            let args = ["--prompt", "pub fn", "--tokens", "8", "--temperature", "0"];
            json(&[&["generate", "--model", path(model)][..], &args].concat())["tokens"].clone()
        };
        assert_eq!(text(&run), text(&exported), "{name}");
        if name == "folder" {
            assert_ne!(text(&run), text(&hf), "the adapters change nothing");
        }
    }
    // Weights that the adapters were not trained for.
    ok(&["convert", path(&dir.path().join("drawn")), path(&hf), "--merge", "--overwrite"]);
    let error = fails(&["generate", "--model", path(&dir.path().join("folder"))], 1);
    assert!(error.contains("holds other weights now"), "{error}");
}

#[test]
fn prompts_from_standard_input_and_from_nothing() {
    let (_dir, _, run) = trained(&[]);
    let args = ["generate", "--model", path(&run), "--tokens", "5", "--json", "--temperature", "0"];
    let piped = with_input(&[&args[..], &["--prompt", "-"]].concat(), "one\ntwo\n");
    let piped: serde_json::Value = serde_json::from_slice(&piped.stdout).unwrap();
    assert_eq!((&piped["prompt"], &piped["prompt_tokens"]), (&json!("one\ntwo\n"), &json!(8)));
    let empty: serde_json::Value = serde_json::from_str(&ok(&args)).unwrap();
    assert_eq!((&empty["prompt"], &empty["prompt_tokens"]), (&json!(""), &json!(1)));
    assert_eq!(empty["dtype"], "bf16", "as it was trained");
    // 64 positions: a prompt of 60 leaves room for four tokens.
    let long = "x".repeat(60);
    let cut = json(&[&args[..4], &["9", "--prompt", &long]].concat());
    assert!(cut["stopped"] == "positions" || cut["stopped"] == "end", "{cut}");
    assert!(cut["tokens"].as_array().unwrap().len() <= 4);
    let error = fails(&["generate", "--model", path(&run), "--prompt", &"x".repeat(64)], 1);
    assert!(error.contains("64 tokens") && error.contains("64 positions"), "{error}");
}

#[test]
fn chat_goes_through_the_template_and_stops_at_its_end() {
    let (dir, _, run) = trained(&["precision.dtype=f32"]);
    let model = dir.path().join("chatty");
    ok(&["convert", path(&run), path(&model)]);
    fn chat<'a>(model: &'a str, extra: &[&'a str]) -> Vec<&'a str> {
        [&["generate", "--model", model, "--chat"], extra].concat()
    }
    let chat = |extra: &[&'static str]| chat(path(&model), extra);
    assert!(fails(&chat(&[]), 1).contains("chat template"));
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>";
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    let out = json(&chat(&["--prompt", "hey", "--tokens", "3"]));
    assert_eq!(out["prompt_tokens"], "<user>hey<bot>".len());
    // Whatever it writes first, as an end: nothing is shown of it.
    let first = json(&chat(&["--prompt", "hey", "--tokens", "1", "--temperature", "0"]));
    let ends = json!({ "eos_token_id": first["tokens"][0] });
    std::fs::write(model.join("generation_config.json"), ends.to_string()).unwrap();
    let out = json(&chat(&["--prompt", "hey", "--tokens", "9", "--temperature", "0"]));
    assert_eq!(
        (&out["stopped"], &out["text"], &out["tokens"]),
        (&json!("end"), &json!(""), &first["tokens"])
    );
    std::fs::write(model.join("chat_template.jinja"), "{% if").unwrap();
    assert!(fails(&chat(&[]), 1).contains("chat template"));
}

#[test]
fn what_cannot_be_opened_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let here = path(dir.path());
    assert!(fails(&["generate", "--model", "no/such/folder"], 2).contains("no/such/folder"));
    let error = fails(&["generate", "--model", here], 1);
    assert!(error.contains("config.json") && error.contains("manifest.json"), "{error}");
    std::fs::create_dir(dir.path().join("checkpoints")).unwrap();
    assert!(fails(&["generate", "--model", here], 1).contains("without a checkpoint"));
    for bad in [["--temperature", "-1"], ["--top-p", "0"], ["--temperature", "nan"], ["--top-p", "1.5"]] {
        fails(&[&["generate", "--model", here][..], &bad].concat(), 2);
    }
    // A model without a tokenizer says so.
    let model = golden_models().remove(0);
    let error = fails(&["generate", "--model", path(&model), "--prompt", "a"], 1);
    assert!(error.contains("tokenizer.json"), "{error}");
}

#[test]
fn a_damaged_checkpoint_is_refused() {
    let (_dir, _, run) = trained(&[]);
    let file = run.join("checkpoints/step-00000002/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert!(fails(&["generate", "--model", path(&run)], 1).contains("model.safetensors"));
}

/// `forward` opens what `generate` opens, and a run gives what its export gives.
#[test]
fn forward_takes_a_run_and_its_checkpoint() {
    let (dir, _, run) = trained(&["precision.dtype=f32"]);
    let checkpoint = run.join("checkpoints/step-00000002");
    let [exported, input, out] = ["hf", "ids.safetensors", "out.safetensors"].map(|n| dir.path().join(n));
    ok(&["convert", path(&run), path(&exported)]);
    let ids: Vec<u8> = (0..16i32).flat_map(|i| (i * 5 % 251).to_le_bytes()).collect();
    let view = |name| {
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::I32, vec![2, 8], &ids).unwrap())
    };
    let bytes = safetensors::serialize([view("input_ids"), view("labels")], None).unwrap();
    std::fs::write(&input, bytes).unwrap();
    let forward = |model, out| {
        let args =
            ["forward", "--backward", "--model", path(model), "--input", path(&input), "--output", out];
        args.map(String::from).to_vec()
    };
    let words = |args: &[String]| ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let result = |model| {
        words(&forward(model, path(&out)));
        std::fs::read(&out).unwrap()
    };
    let wanted = result(&exported);
    for model in [&run, &checkpoint] {
        assert!(result(model) == wanted, "{}", model.display());
    }
    // A file of the checkpoint is not replaced.
    let weights = checkpoint.join("model.safetensors");
    let args = forward(&run, path(&weights));
    let error = fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), 1);
    assert!(error.contains("is a file of the model"), "{error}");
}
