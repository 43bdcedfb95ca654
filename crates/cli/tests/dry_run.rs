//! `train --dry-run`, and runs that are refused before they begin.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

mod common;

use common::*;

#[test]
fn dry_run_prints_what_a_run_costs() {
    let text = ok(&["train", "--dry-run"]);
    for line in [
        "# parameters: 3.48M\n",
        "# FLOPs per token: ",
        "# memory per rank, estimated:\n#   weights 6.6 MiB, gradients 13.3 MiB, optimizer state",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(!text.contains("communication") && !text.contains("active"), "{text}");
    let moe = ["--set", "moe.experts=4", "--set", "parallel.tp=2", "--ranks", "8", "--set", "parallel.pp=2"];
    let text = ok(&[&["train", "--dry-run"], &moe[..]].concat());
    for words in
        ["active per token, at most", "stage 0: weights", "stage 1: weights", "workspace", "tp ", "dp_cp "]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    // Eight micro-batches on two stages.
    assert!(text.contains("communication per step") && text.contains("bubble 11.1 %"), "{text}");
    let cost = &json(&[&["train", "--dry-run"], &moe[..]].concat())["cost"];
    assert!(cost["active_parameters"].as_u64() < cost["parameters"].as_u64());
    assert_eq!((cost["ranks"].as_u64(), cost["stages"].as_array().unwrap().len()), (Some(8), 2));
    let stage = &cost["stages"][0];
    assert!(stage["sent"]["tp"].as_u64() > Some(0) && stage["memory"]["activations"].as_u64() > Some(0));
}

/// What "auto" keeps on the device is printed with its reason; the configuration stays as it was set.
#[test]
fn dry_run_shows_how_much_state_is_offloaded() {
    let set = ["--device", "cpu", "--set", "offload.optimizer=auto"];
    let text = ok(&[&["train", "--dry-run"], &set[..]].concat());
    assert!(text.contains("optimizer = \"auto\""), "{text}");
    assert!(text.contains("offload.optimizer = 0") && text.contains("device is not known"), "{text}");
}

#[test]
fn dry_run_shows_the_derived_communication_unit() {
    fn dry<'a>(more: &[&'a str]) -> Vec<&'a str> {
        [&["train", "--dry-run", "--ranks", "2"], more].concat()
    }
    let text = ok(&dry(&["--set", "parallel.zero=3"]));
    assert!(text.contains("(3.3 MiB: two of the largest layer's weights)"), "{text}");
    let found = json(&dry(&["--set", "parallel.zero=3"]))["derived"].clone();
    let found = found.as_array().unwrap().iter().find(|d| d["key"] == "parallel.comm_unit").unwrap().clone();
    let bytes: u64 = found["value"].as_str().unwrap().parse().unwrap();
    assert!(text.contains(&format!("#   parallel.comm_unit = {bytes} ")), "{text}");
    // bf16: attention, a gated MLP and two norms of width 256.
    assert_eq!(bytes, 2 * 2 * (4 * 256 * 256 + 3 * 256 * 768 + 2 * 256));
    // Setting it to what is derived changes nothing else.
    let set = format!("parallel.comm_unit={bytes}");
    let same = ok(&dry(&["--set", "parallel.zero=3", "--set", &set]));
    let costs = |text: &str| {
        text.split("# derived").next().unwrap().split("# parameters").nth(1).unwrap().to_string()
    };
    assert_eq!(costs(&same), costs(&text));
    assert!(!same.contains("#   parallel.comm_unit"), "{same}");
    let buckets = ok(&dry(&[]));
    assert!(
        buckets.contains("#   parallel.comm_unit = 320000000 ")
            && buckets.contains("two buckets of gradients"),
        "{buckets}"
    );
    assert!(!ok(&["train", "--dry-run"]).contains("comm_unit"), "one rank exchanges nothing");
}

#[test]
fn dry_run_shows_parameter_groups() {
    let none = ok(&["train", "--dry-run"]);
    assert!(!none.contains("parameter groups"), "{none}");
    let muon = [
        "--set",
        "optimizer.kind=muon",
        "--set",
        "optimizer.groups=[{ params = \"norm\", lr_factor = 0.5 }]",
    ];
    let args = [&["train", "--dry-run"], &muon[..]].concat();
    let text = ok(&args);
    for line in [
        "# parameter groups:\n",
        "#   others: adamw, moments f32, ",
        "#   matrices of layers: muon, moments f32, ",
        "#   norm: adamw, moments f32, lr x 0.5, ",
        "groups = [{ lr_factor = 0.5, params = [\"norm\"] }]\n",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let groups = &json(&args)["parameter_groups"];
    assert_eq!(groups.as_array().unwrap().len(), 3, "{groups}");
    assert_eq!(groups[1]["rule"], "muon, moments f32", "{groups}");
}

#[test]
fn dry_run_opens_data_and_tokenizer_and_writes_nothing() {
    let (dir, recipe) = folder();
    let (out, typo) = (dir.path().join("run"), dir.path().join("typo"));
    let args = ["train", path(&recipe), "--dry-run", "--out", path(&out)];
    ok(&args);
    let error = fails(&[&args[..], &["--data", path(&typo)]].concat(), 2);
    assert!(error.contains("typo: there is no file, folder or .bin/.idx pair"), "{error}");
    let data = dir.path().join("text");
    ok(&["data", "build", path(&recipe), "--output", path(&data)]);
    // Byte-level data is for a vocabulary of 256, unless the recipe says otherwise.
    let more = ["--set", "eval.every=0", "--set", "model.vocab=512", "--set", "data.check_tokenizer=false"];
    let args = [&args[..], &["--data", path(&data)], &more].concat();
    ok(&args);
    let tokenizer = format!("data.tokenizer={}", typo.display());
    let error = fails(&[&args[..], &["--set", &tokenizer, "--set", "data.eod=0"]].concat(), 2);
    assert!(error.contains("typo"), "{error}");
    assert_eq!(names(dir.path()), ["small.toml", "text.bin", "text.dataset.json", "text.idx"]);
}

/// Text is tokenized by `train`; a look at a run does it only where the number of steps depends on it.
#[test]
fn dry_run_tokenizes_only_what_it_must() {
    let (dir, recipe) = folder();
    let [out, cache, text] = ["run", "cache", "t.jsonl"].map(|n| dir.path().join(n));
    std::fs::write(&text, "{\"text\": \"a document of some words\"}\n".repeat(100)).unwrap();
    let set = format!("data.cache={}", cache.display());
    let args = [
        "train",
        path(&recipe),
        "--data",
        path(&text),
        "--set",
        &set,
        "--set",
        "eval.every=0",
        "--out",
        path(&out),
    ];
    let dry = [&args[..], &["--dry-run"]].concat();
    let printed = ok(&dry);
    assert!(printed.contains("t.jsonl: 3.6 KiB of text, which `train` tokenizes"), "{printed}");
    assert!(!cache.exists(), "the cache was written");
    let typo = dir.path().join("typo.jsonl");
    let error = fails(&["train", path(&recipe), "--dry-run", "--data", path(&typo)], 2);
    assert!(error.contains("typo.jsonl: there is no file"), "{error}");
    let epochs = [&dry[..], &["--set", "train.epochs=2"]].concat();
    let printed = ok(&epochs);
    assert!(
        printed.contains("was tokenized into data.cache") && printed.contains("train.epochs"),
        "{printed}"
    );
    assert!(cache.is_dir());
    // Now that it is there, it is looked at.
    let printed = ok(&dry);
    assert!(!printed.contains("tokenizes") && !printed.contains("was tokenized"), "{printed}");
    assert!(!out.exists());
}

/// On the CPU a run that cannot fit is refused before anything is allocated or written.
#[test]
fn a_run_that_needs_more_memory_than_the_machine_has_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let args = ["train", "tiny", "--device", "cpu", "--out", path(&out), "--set", "model.preset=llama-405b"];
    let error = fails(&args, 1);
    assert!(error.contains("not enough memory: this recipe needs about 6"), "{error}");
    assert!(error.contains("a smaller model") && !out.exists(), "{error}");
    // A dry run of it prints what it needs.
    assert!(ok(&[&args[..], &["--dry-run"]].concat()).contains("# parameters: 405"));
}

/// Every rank of a job is built and checked, on GPUs that are not here.
#[test]
fn dry_run_of_a_job_checks_its_ranks() {
    let job = [
        "train",
        "tiny",
        "--dry-run",
        "--gpus",
        "16xH100",
        "--set",
        "parallel.tp=2",
        "--set",
        "parallel.pp=2",
    ];
    let text = ok(&job);
    for part in [
        "tiny on 16 H100: tp=2,pp=2,dp=4",
        "ranks     16, with",
        "tp 8 x 2",
        "dp 4 x 4",
        "memory    at most",
        "\nok: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let report = json(&job);
    assert_eq!((report["ok"].as_bool(), report["report"]["ranks"].as_u64()), (Some(true), Some(16)));
    assert!(report["report"]["sent"]["tp"].as_u64() > Some(0), "{report}");
    // Too large: the exit code says so, and the text what to change.
    let mut job = vec!["train", "llama-70b", "--dry-run", "--gpus", "8xH100"];
    let layout = ["tp=8", "pp=1", "vp=1", "cp=1", "dp=1"].map(|size| format!("parallel.{size}"));
    let batch = ["train.micro_batch=1".to_string(), "train.global_batch=8".to_string()];
    layout.iter().chain(&batch).for_each(|key| job.extend(["--set", key]));
    let out = ferrotron(&job);
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(text.contains("problem: memory: 8 ranks do not fit; rank 0"), "{text}");
}

/// `--plan` replaces the recipe's layout by the fastest, but for what is set.
#[test]
fn plans_are_taken_over() {
    let job =
        ["train", "llama-8b", "--plan", "--dry-run", "--gpus", "8xH100", "--set", "train.global_batch=64"];
    let out = ferrotron(&job);
    let (text, notes) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert!(out.status.success() && text.contains("\nok: "), "{text}{notes}");
    assert!(notes.contains("plan: ") && notes.contains("the fastest of"), "{notes}");
    let fixed = ok(&[&job[..], &["--set", "parallel.tp=2", "--set", "parallel.pp=2"]].concat());
    assert!(fixed.contains("tp=2,pp=2"), "{fixed}");
    // There is no GPU to plan for.
    let e = fails(&["train", "--plan", "--device", "cpu"], 2);
    assert!(e.contains("a layout for GPUs") && e.contains("--dry-run --gpus"), "{e}");
}
