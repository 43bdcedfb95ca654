//! Models and files that nobody should trust: broken weights, links out of the folder, devices; and outputs that must
//! not destroy inputs.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A folder with a copy of a golden model in `model` and its input in `input.safetensors`.
fn model() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let golden = golden::fixture("qwen2");
    let (model, input) = (dir.path().join("model"), dir.path().join("input.safetensors"));
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), model.join(name)).unwrap();
    }
    fs::copy(golden.join("expected.safetensors"), &input).unwrap();
    (dir, model, input)
}

/// The header of a safetensors file and where its data begins.
fn header(file: &Path) -> (serde_json::Value, usize) {
    let bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), 8 + length)
}

/// Writes a file of one or more tensors as (name, dtype, shape, bytes).
fn write(file: &Path, tensors: &[(&str, &str, &[usize], Vec<u8>)]) {
    let mut head = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend(bytes);
        let about = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]});
        head.insert((*name).into(), about);
    }
    let head = serde_json::Value::Object(head).to_string();
    fs::write(file, [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), &data].concat()).unwrap();
}

fn i32s(n: usize) -> Vec<u8> {
    (0..n).flat_map(|i| (i as i32 % 7).to_le_bytes()).collect()
}

#[test]
fn weights_that_are_not_numbers_are_named() {
    let (dir, model, input) = model();
    let weights = model.join("model.safetensors");
    let (head, data) = header(&weights);
    let broken = &head["model.layers.0.mlp.down_proj.weight"];
    assert_eq!(broken["dtype"], "F32");
    let at = data + broken["data_offsets"][0].as_u64().unwrap() as usize;
    let mut bytes = fs::read(&weights).unwrap();
    for (i, x) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
        bytes[at + 4 * i..at + 4 * i + 4].copy_from_slice(&x.to_le_bytes());
    }
    fs::write(&weights, bytes).unwrap();
    let [to, back, out] = ["ckpt", "back", "out"].map(|n| dir.path().join(n));
    let forward = ["forward", "--model", path(&model), "--input", path(&input), "--output", path(&out)];
    let convert = ["convert", path(&model), path(&to)];
    let tokenizer = dir.path().join("tokenizer.json");
    fs::write(&tokenizer, ferrotron_bridge::byte_tokenizer_json()).unwrap();
    let generate = ["generate", "--model", path(&model), "--tokenizer", path(&tokenizer), "--prompt", "x"];
    for args in [&forward[..], &convert, &generate] {
        let error = fails(args, 1);
        assert!(error.contains("layers.0") && error.contains("3 of its"), "{error}");
        assert!(error.contains("NaN or infinite"), "{error}");
    }
    assert!(!to.exists() && !out.exists());
    // On request they are converted, and listed, and not changed.
    let v = json(&["convert", path(&model), path(&to), "--allow-nonfinite"]);
    let listed: Vec<_> = v["non_finite"].as_object().unwrap().values().cloned().collect();
    assert_eq!(listed, [3]);
    assert!(fails(&["convert", path(&to), path(&back)], 1).contains("--allow-nonfinite"));
    let again = ferrotron(&["convert", path(&to), path(&back), "--like", path(&model), "--allow-nonfinite"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("warning: tensors with NaN or infinite"));
    assert!(fs::read(back.join("model.safetensors")).unwrap() == fs::read(&weights).unwrap());
}

#[test]
fn the_shapes_and_dtypes_of_a_forward_input_are_exact() {
    let (dir, model, _) = model();
    let [input, out] = ["in", "out"].map(|n| dir.path().join(n));
    let args = ["forward", "--model", path(&model), "--input", path(&input), "--output", path(&out)];
    let ids: (&str, &str, &[usize], Vec<u8>) = ("input_ids", "I32", &[2, 8], i32s(16));
    for (tensor, why) in [
        (("labels", "I32", &[16, 1, 1][..], i32s(16)), "labels is [16, 1, 1], not [2, 8]"),
        (("labels", "I32", &[8, 2], i32s(16)), "labels is [8, 2]"),
        (("labels", "F32", &[2, 8], i32s(16)), "labels must be I64 or I32"),
        (("position_ids", "F32", &[2, 8], i32s(16)), "position_ids must be I64 or I32"),
        (("position_ids", "I32", &[16], i32s(16)), "position_ids is [16]"),
        (("position_ids", "I32", &[2, 8], vec![0xff; 64]), "position_ids holds -1"),
        (("cu_seqlens", "I32", &[1, 2], i32s(2)), "cu_seqlens is [1, 2]"),
        (("attention_mask", "I32", &[2, 8], i32s(16)), "attention_mask masks tokens"),
    ] {
        write(&input, &[ids.clone(), tensor]);
        let error = fails(&args, 1);
        assert!(error.contains(why), "{error}");
    }
    write(&input, &[("input_ids", "F32", &[2, 8], i32s(16))]);
    assert!(fails(&args, 1).contains("input_ids must be I64 or I32"));
    write(&input, &[ids, ("labels", "I32", &[2, 8], i32s(16))]);
    ok(&args);
}

#[test]
fn an_output_replaces_no_input_and_appears_complete() {
    let (dir, model, input) = model();
    let out = dir.path().join("out.safetensors");
    let forward = |output: &Path| {
        ["forward", "--model", path(&model), "--input", path(&input), "--output", path(output)]
            .map(String::from)
    };
    let run = |output: &Path| {
        let args = forward(output);
        ferrotron(&args.each_ref().map(String::as_str))
    };
    let before =
        [&model.join("model.safetensors"), &model.join("config.json"), &input].map(|f| fs::read(f).unwrap());
    let link = dir.path().join("link");
    symlink(model.join("model.safetensors"), &link).unwrap();
    for output in [&model.join("model.safetensors"), &model.join("../model/config.json"), &input, &link] {
        let ended = run(output);
        let error = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(1) && error.contains("choose another name"), "{error}");
    }
    for output in [Path::new("/dev/null"), dir.path()] {
        let ended = run(output);
        assert!(String::from_utf8_lossy(&ended.stderr).contains("not a regular file"));
    }
    let now =
        [&model.join("model.safetensors"), &model.join("config.json"), &input].map(|f| fs::read(f).unwrap());
    assert!(before == now);
    // Another file in the model's folder is an output like any other, and may be replaced.
    let inside = model.join("out.safetensors");
    for _ in 0..2 {
        assert!(run(&inside).status.success());
    }
    // What a killed run left is removed, and an old output is replaced.
    fs::write(dir.path().join(".out.safetensors.partial-4711"), "half").unwrap();
    for _ in 0..2 {
        let ended = run(&out);
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    assert_eq!(names(dir.path()), ["input.safetensors", "link", "model", "out.safetensors"]);
    let whole = fs::read(&out).unwrap();
    for round in 0..10 {
        let args = forward(&out);
        let mut child = start(&args.each_ref().map(String::as_str));
        std::thread::sleep(std::time::Duration::from_millis(20 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(fs::read(&out).unwrap() == whole);
    }
}

#[test]
fn links_do_not_carry_files_of_this_machine_into_a_checkpoint() {
    let (dir, model, _) = model();
    let [secret, to] = ["secret", "ckpt"].map(|n| dir.path().join(n));
    fs::write(&secret, "precious").unwrap();
    for name in ["LICENSE", "tokenizer.json", "config.json"] {
        let file = model.join(name);
        let old = fs::read(&file).ok();
        // A configuration that is read from elsewhere is not copied either.
        fs::write(&secret, old.as_deref().unwrap_or(b"precious")).unwrap();
        let _ = fs::remove_file(&file);
        symlink(&secret, &file).unwrap();
        let error = fails(&["convert", path(&model), path(&to)], 1);
        assert!(error.contains(name) && error.contains("outside of its folder"), "{error}");
        assert!(!to.exists());
        fs::remove_file(&file).unwrap();
        if let Some(old) = old {
            fs::write(&file, old).unwrap();
        }
    }
    symlink(&secret, model.join("tokenizer_x")).unwrap();
    ok(&["convert", path(&model), path(&to)]);
    assert_eq!(names(&to.join("hf")), ["config.json"]);
    // A snapshot of the Hugging Face cache consists of links.
    let snapshot = dir.path().join("models--a--b/snapshots/0123");
    let blobs = dir.path().join("models--a--b/blobs");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join("licence"), "free").unwrap();
    symlink("../../blobs/licence", snapshot.join("LICENSE")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model.join(name), blobs.join(name)).unwrap();
        symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
    }
    ok(&["convert", path(&snapshot), path(&to), "--overwrite"]);
    assert_eq!(names(&to.join("hf")), ["LICENSE", "config.json"]);
    assert!(fs::symlink_metadata(to.join("hf/LICENSE")).unwrap().is_file());
}

/// Runs a command that must fail within a few seconds and without much memory, whatever it is given to read.
fn refuses(args: &[&str]) {
    let mut child = start(args);
    let begin = std::time::Instant::now();
    while child.try_wait().unwrap().is_none() {
        let waited = begin.elapsed();
        if waited.as_secs() >= 20 {
            child.kill().unwrap();
            panic!("{args:?} is still running");
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let ended = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&ended.stderr);
    assert!(matches!(ended.status.code(), Some(1 | 2)), "{args:?}: {:?} {error}", ended.status);
    // A folder whose config.json is no file is no model.
    let said = ["not a regular file", "holds no model"].iter().any(|why| error.contains(why));
    assert!(said, "{args:?}: {error}");
}

#[test]
fn devices_and_pipes_are_refused_as_inputs() {
    let (dir, model, input) = model();
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let at = |name: &str| dir.path().join(name);
    for (i, special) in [Path::new("/dev/zero"), &pipe].into_iter().enumerate() {
        let special_path = path(special);
        let to = at("to");
        refuses(&["forward", "--model", path(&model), "--input", special_path, "--output", path(&to)]);
        refuses(&["data", "build", special_path, "--output", path(&to)]);
        refuses(&["train", special_path, "--out", path(&to)]);
        refuses(&["generate", "--model", path(&model), "--tokenizer", special_path]);
        // Each file of a model and of a dataset.
        for name in ["config.json", "model.safetensors", "tokenizer.json"] {
            let hostile = at(&format!("hostile-{i}-{name}"));
            fs::create_dir(&hostile).unwrap();
            for own in ["config.json", "model.safetensors"] {
                fs::copy(model.join(own), hostile.join(own)).unwrap();
            }
            let _ = fs::remove_file(hostile.join(name));
            symlink(special, hostile.join(name)).unwrap();
            let out = at("out");
            if name != "tokenizer.json" {
                refuses(&[
                    "forward",
                    "--model",
                    path(&hostile),
                    "--input",
                    path(&input),
                    "--output",
                    path(&out),
                ]);
                refuses(&["convert", path(&hostile), path(&to)]);
            }
            refuses(&["generate", "--model", path(&hostile), "--prompt", "x"]);
        }
        let data = at(&format!("data-{i}"));
        for ending in ["bin", "idx"] {
            symlink(special, data.with_extension(ending)).unwrap();
        }
        refuses(&["train", "--data", path(&data), "--out", path(&to)]);
        let checkpoint = at(&format!("checkpoint-{i}"));
        fs::create_dir(&checkpoint).unwrap();
        symlink(special, checkpoint.join("manifest.json")).unwrap();
        assert!(!ferrotron(&["generate", "--model", path(&checkpoint)]).status.success());
    }
    // A socket cannot even be opened.
    let ended = ferrotron(&["data", "build", path(&socket), "--output", path(&at("to"))]);
    assert_eq!(ended.status.code(), Some(1));
    // An endless prompt.
    let mut command = std::process::Command::new(binary());
    command.args(["generate", "--model", path(&model), "--prompt", "-"]);
    let ended = command.stdin(fs::File::open("/dev/zero").unwrap()).output().unwrap();
    assert!(String::from_utf8_lossy(&ended.stderr).contains("longer than"));
}

#[test]
fn leftovers_of_a_killed_data_build_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("text.txt"), "some text").unwrap();
    for name in ["corpus.bin.4711.0.tmp", "corpus.idx.4711.12.tmp", "corpus2.bin.4711.0.tmp", "corpus.x.tmp"]
    {
        fs::write(at(name), "half").unwrap();
    }
    ok(&["data", "build", path(&at("text.txt")), "--output", path(&at("corpus"))]);
    let left = ["corpus.bin", "corpus.idx", "corpus.x.tmp", "corpus2.bin.4711.0.tmp", "text.txt"];
    let now: Vec<String> = names(dir.path()).into_iter().filter(|n| !n.ends_with(".json")).collect();
    assert_eq!(now, left);
}
