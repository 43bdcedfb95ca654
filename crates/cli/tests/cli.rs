//! The command line: help, errors, exit codes and JSON output.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::Value;
use std::process::{Command, Output, Stdio};

/// The binary under test: `FERROTRON_BIN` if set (on a GPU host), otherwise the one just built.
fn binary() -> std::ffi::OsString {
    std::env::var_os("FERROTRON_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrotron").into())
}

fn ferrotron(args: &[&str]) -> Output {
    Command::new(binary()).args(args).stdin(Stdio::null()).output().unwrap()
}

fn ok(args: &[&str]) -> String {
    let out = ferrotron(args);
    let (text, errors) =
        (String::from_utf8(out.stdout).unwrap(), String::from_utf8_lossy(&out.stderr).into_owned());
    assert!(out.status.success() && errors.is_empty(), "{args:?}: {:?}\n{errors}", out.status);
    text
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(&[args, &["--json"]].concat())).unwrap()
}

/// Standard error of a command that must fail with `code` and write no result.
fn fails(args: &[&str], code: i32) -> String {
    let out = ferrotron(args);
    let errors = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {errors}");
    assert!(out.stdout.is_empty(), "{args:?}");
    assert!(!errors.contains("panicked") && !errors.contains("backtrace"), "{errors}");
    errors
}

const COMMANDS: [&str; 22] = [
    "train",
    "forward",
    "parity",
    "convert",
    "eval",
    "generate",
    "chat",
    "data",
    "bench",
    "kernels",
    "doctor",
    "plan",
    "recipes",
    "explain",
    "runs",
    "completions",
    "man",
    "watch",
    "launch",
    "drill",
    "replay",
    "regress",
];

#[test]
fn help_lists_commands_and_examples() {
    let text = ok(&["--help"]);
    for word in COMMANDS.iter().chain(&["Examples:", "Exit codes:", "--json", "--device", "--threads"]) {
        assert!(text.contains(word), "{word} not in\n{text}");
    }
    for command in COMMANDS {
        let text = ok(&[command, "--help"]);
        let text = if command == "data" { ok(&["data", "build", "--help"]) } else { text };
        assert!(text.contains("Examples:"), "{command}:\n{text}");
        assert!(text.contains("Usage: ferrotron"), "{command}");
        // Nothing may be wider than a comfortable terminal.
        assert!(text.lines().all(|l| l.chars().count() <= 130), "{command}:\n{text}");
    }
    assert!(ok(&["--version"]).starts_with("ferrotron "));
}

#[test]
fn wrong_usage_is_exit_code_2_with_a_tip() {
    let text = fails(&["trian"], 2);
    assert!(text.contains("unrecognized subcommand 'trian'") && text.contains("train"), "{text}");
    assert!(fails(&["train", "--stepz", "3"], 2).contains("--steps"));
    fails(&["forward", "--model", "x"], 2);
    fails(&["train", "--device", "gpu"], 2);
    fails(&["train", "--threads", "-1"], 2);
    assert!(fails(&["parity", "f32", "fp16"], 2).contains("f32, bf16"));
    assert!(
        fails(&["forward", "--model", "a", "--input", "b", "--output", "c", "--layout", "zp=2"], 2)
            .contains("tp, cp")
    );
    for (old, new) in [("--patience", "--timeout"), ("--forced", "--force-balance")] {
        let text = fails(&["bench", "train", old, "3"], 2);
        assert!(text.contains(&format!("unexpected argument {old}")), "{text}");
        assert!(text.contains(&format!("hint: {old} is now {new}")), "{text}");
        let v: Value = serde_json::from_str(&fails(&["bench", "train", old, "--json"], 2)).unwrap();
        assert_eq!(v["hint"], format!("{old} is now {new}"));
    }
    for (args, says) in [
        (&["train", "--as", "sm_8"][..], "sm_80"),
        (&["generate", "--model", "none", "--tokens", "0"], "--tokens must be at least 1"),
        (&["bench", "train", "--peak", "0"], "--peak above 0"),
        (&["plan", "tiny", "--gpus", "8xH100", "--vary", "recompute"], "the keys are tp, cp"),
        (&["plan", "tiny", "--gpus", "8xH100", "--vary", "tp,tp"], "tp is given twice"),
        (&["plan", "tiny", "--gpus", "8xH100", "--layout", "tp=2,tp=4"], "tp is given twice"),
        (&["plan", "tiny", "--gpus", "8xH100", "--layout", "foo=3"], "--layout: layout \"foo=3\""),
        (&["plan", "tiny", "--gpus", "8xH100", "--layout", "tp=3"], "tp"),
        (&["train", "--dry-run", "--set", "fault.inject=kill:rank=5,step=1"], "there are ranks 0 to 0"),
        (&["train", "--dry-run", "--steps", "5", "--set", "fault.inject=kill:step=9"], "ends after step 5"),
        (&["train", "--set", "lora.adapter=nowhere"], "lora.adapter: needs the base model"),
        (&["train", "--data", "nowhere.jsonl"], "nowhere.jsonl: there is no file"),
        (&["train", "--set", "data.tokenizer=nowhere", "--data", "Cargo.toml"], "nowhere: does not exist"),
        (&["train", "finetune-hf", "--set", "model.hf=org/name", "--data", "Cargo.toml"], "hf download"),
    ] {
        let error = fails(args, 2);
        assert!(error.contains(says), "{args:?}: {error}");
    }
    let v: Value = serde_json::from_str(&fails(&["trian", "--json"], 2)).unwrap();
    assert!(v["error"].as_str().unwrap().contains("trian"));
    assert!(fails(&[], 2).contains("Usage"));
}

#[test]
fn doctor_reports_hardware_and_libraries() {
    let text = ok(&["doctor"]);
    let nccl = text.lines().find(|l| l.starts_with("libnccl.so")).unwrap();
    assert!(nccl.contains("between several GPUs") && !nccl.contains("not used"), "{nccl}");
    for word in ["CPU", "cores", "instructions", "memory", "GPU", "libcuda.so", "libnccl.so", "Looked for"] {
        assert!(text.contains(word), "{word} not in\n{text}");
    }
    let v = json(&["doctor"]);
    assert!(v["cpu"]["usable"].as_u64().unwrap() >= 1);
    assert!(v["instructions"].is_string());
    assert_eq!(v["device"], "cpu");
    let libraries = v["libraries"]["list"].as_array().unwrap();
    assert_eq!(libraries.len(), 5);
    assert!(libraries.iter().all(|l| l["file"].is_string() && l["purpose"].is_string()));
    assert_eq!(json(&["doctor", "--threads", "3"])["threads"], 3);
}

#[test]
fn recipes_are_listed_and_printed() {
    let list = json(&["recipes"]);
    let text = ok(&["recipes"]);
    for r in list.as_array().unwrap() {
        let name = r["name"].as_str().unwrap();
        assert!(text.contains(name) && text.contains(r["summary"].as_str().unwrap()), "{name}");
        // The file itself, and as comments what follows from it: still the same recipe.
        let (printed, file) = (ok(&["recipes", name]), r["toml"].as_str().unwrap());
        let rest = printed.strip_prefix(file.trim_end()).unwrap_or_else(|| panic!("{name}: {printed}"));
        assert!(rest.lines().all(|l| l.is_empty() || l.starts_with('#')), "{name}: {rest}");
        assert_eq!(rest.contains("# derived:"), r["config"].is_object(), "{name}: {rest}");
    }
    assert!(list.as_array().unwrap().len() >= 5);
    // What 8 H100s run, by the planner.
    let machine = json(&["recipes", "--for", "8xH100"]);
    let names: Vec<&str> =
        machine["recipes"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"llama-8b") && !names.contains(&"llama-405b"), "{names:?}");
    assert!(ok(&["recipes", "--for", "8xH100"]).contains("llama-405b"), "is among the others");
    assert!(fails(&["recipes", "--for", "0xH100"], 2).contains("number of GPUs"));
    let error = fails(&["recipes", "tinny"], 2);
    assert!(error.starts_with("error: ") && error.contains("hint: did you mean tiny?"), "{error}");
}

#[test]
fn explain_finds_every_key_and_names_of_other_systems() {
    let all = json(&["explain"]);
    let text = ok(&["explain"]);
    let all = all.as_array().unwrap();
    assert!(all.len() > 50);
    for k in all {
        assert!(text.contains(k["meaning"].as_str().unwrap()));
    }
    let one = ok(&["explain", "train.global_batch"]);
    for word in [
        "Global batch size in sequences.",
        "a whole number",
        "32",
        "global_batch_size",
        "--set train.global_batch=32",
    ] {
        assert!(one.contains(word), "{word} not in\n{one}");
    }
    assert!(
        ok(&["explain", "global_batch_size"]).contains("global_batch_size is called train.global_batch here")
    );
    assert!(ok(&["explain", "model.preset"]).contains("gpt2-124m"));
    let section = json(&["explain", "optimizer"]);
    let keys = section.as_array().unwrap().iter().map(|k| k["key"].as_str().unwrap());
    assert!(keys.clone().all(|k| k.starts_with("optimizer.")) && keys.count() > 10);
    assert!(fails(&["explain", "train.stpes"], 2).contains("hint: did you mean train.steps?"));
    assert!(fails(&["explain", "optimiser"], 2).contains("hint: did you mean"));
    assert!(fails(&["explain", "num_workers"], 2).contains("hint: data is read without workers"));
    let v: Value = serde_json::from_str(&fails(&["explain", "nonsense_xyz", "--json"], 2)).unwrap();
    assert!(v["error"].is_string());
}

/// What `explain` prints for the command line, a shell passes on as one value.
#[test]
fn examples_of_explain_work_in_a_shell() {
    for key in [
        "data.split",
        "optimizer.betas",
        "precision.dtype",
        "schedule.decay",
        "moe.log",
        "train.global_batch",
    ] {
        let text = ok(&["explain", key]);
        let set = text.lines().find_map(|l| l.trim().strip_prefix("on the command line:")).unwrap().trim();
        let script = format!("\"$0\" train --dry-run {set}");
        let out = Command::new("sh").args(["-c", &script]).arg(binary()).output().unwrap();
        assert!(out.status.success(), "{script}: {}", String::from_utf8_lossy(&out.stderr));
    }
    assert!(ok(&["explain", "data.split"]).contains("--set 'data.split=[99.0, 1.0, 0.0]'\n"));
    assert!(ok(&["explain", "precision.dtype"]).contains("--set precision.dtype=bf16\n"));
    assert!(ok(&["explain", "model.hf"]).contains("hf = \"…\"\n"));
}

#[test]
fn an_error_tells_its_cause_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("no");
    let none = file.to_str().unwrap();
    let recipe = format!("{none}.toml");
    for (args, cause) in [
        (&["train", &recipe][..], "there is no such file"),
        (&["train", "--data", none], "there is no file"),
        (&["data", "build", none, "--output", none], "there is no such file"),
    ] {
        let error = fails(args, 2);
        assert_eq!(error.matches(cause).count(), 1, "{error}");
        assert_eq!(error.matches(none).count(), 1, "{error}");
    }
}

#[test]
fn exclusive_keys_on_one_command_line_are_refused() {
    for more in [&["--set", "train.steps=3"][..], &["--steps", "3"]] {
        let args = [&["train", "--dry-run", "--set", "train.tokens=1M"], more].concat();
        assert!(fails(&args, 2).contains("train.tokens is set as well; keep one of the two"));
    }
    assert!(
        fails(&["bench", "train", "--set", "train.steps=3", "--set", "train.tokens=1M"], 2)
            .contains("keep one")
    );
    assert!(
        fails(&["train", "--dry-run", "--set", "parallel.etp=64"], 2)
            .contains("parallel.etp: 64 splits experts")
    );
}

/// The help says which commands use an option.
#[test]
fn options_that_some_commands_ignore_say_so() {
    let text = ok(&["recipes", "--help"]);
    let [every, compute] =
        ["Options of every command:", "Device and rank options"].map(|h| text.find(h).unwrap());
    let place = |option: &str| text.find(option).unwrap();
    for option in ["--device", "--as", "--threads", "--check", "--timeout"] {
        let heading =
            if every < compute { place(option) > compute } else { (compute..every).contains(&place(option)) };
        assert!(heading, "{option}: {text}");
    }
    assert!(text.contains("ignored by commands that do not compute"), "{text}");
}

#[test]
fn dry_run_prints_the_resolved_configuration() {
    let text = ok(&["train", "--dry-run", "--steps", "7", "--set", "optimizer.lr=1e-3"]);
    assert!(text.contains("steps = 7\n") && text.contains("lr = 0.001\n"), "{text}");
    assert!(text.contains("# derived:") && text.contains("schedule.decay_steps = 7"), "{text}");
    assert!(text.contains("# 18 bytes per parameter: weight 2, gradient 4, optimizer state 12\n"), "{text}");
    // What it prints is a recipe.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("again.toml");
    std::fs::write(&file, &text).unwrap();
    let again = json(&["train", file.to_str().unwrap(), "--dry-run"]);
    let first = json(&["train", "--dry-run", "--steps", "7", "--set", "optimizer.lr=1e-3"]);
    assert_eq!(again["config"], first["config"]);
    assert_eq!(again["plan"], first["plan"]);
    assert_eq!(again["plan"]["steps"], 7);
}

#[test]
fn configuration_errors_point_at_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.toml");
    let name = file.to_str().unwrap();
    let cases = [
        ("[train]\nstpes = 3\n", "bad.toml:2: train.stpes: unknown key; did you mean train.steps?"),
        ("[train]\nsteps = \"x\"\n", "bad.toml:2: train.steps: expected a whole number, found \"x\""),
        ("[train\n", "bad.toml:1: not valid TOML"),
        (
            "model.preset = \"tiny\"\ntrain.steps = 3\n[parallel]\nep = 2\n",
            "bad.toml:4: parallel.ep: ep=2 needs an MoE model",
        ),
    ];
    for (text, message) in cases {
        std::fs::write(&file, text).unwrap();
        let error = fails(&["train", name, "--dry-run"], 2);
        assert!(error.starts_with("error: ") && error.contains(message), "{error}");
        let lines = error.lines().count();
        assert!(lines == 1 || (lines == 2 && error.lines().nth(1).unwrap().starts_with("hint: ")), "{error}");
    }
    fails(&["train", "--dry-run", "--set", "train.steps"], 2);
    // No machine has that many cards, and most have no driver.
    assert!(fails(&["train", "--device", "cuda:99"], 1).contains("no CUDA device"));
    assert!(fails(&["train", "no/such/file.toml"], 2).contains("no/such/file.toml: there is no such file"));
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let mut child =
        Command::new(binary()).arg("explain").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(out.stderr.is_empty());
}
