//! The commands that `train` suggests at the end work as printed.

use super::support::{binary, recipe};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A working folder, and a folder where `ferrotron` is the binary under test.
struct Scene {
    dir: tempfile::TempDir,
    bin: PathBuf,
}

impl Scene {
    fn new() -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir_all(dir.path().join("here")).unwrap();
        std::fs::create_dir(&bin).unwrap();
        std::os::unix::fs::symlink(binary(), bin.join("ferrotron")).unwrap();
        Scene { dir, bin }
    }

    fn here(&self) -> PathBuf {
        self.dir.path().join("here")
    }

    /// Standard output of a command line that must succeed.
    fn sh(&self, line: &str) -> String {
        let path = format!("{}:{}", self.bin.display(), std::env::var("PATH").unwrap());
        let mut sh = Command::new("sh");
        let out = sh.args(["-c", line]).current_dir(self.here()).env("PATH", path).stdin(Stdio::null());
        let out = out.output().unwrap();
        assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// The suggested commands in what `train` printed, run one after the other.
    fn follow(&self, printed: &str) -> Vec<String> {
        let next = printed.split("\nnext:\n").nth(1).unwrap_or_else(|| panic!("{printed}"));
        let commands: Vec<String> =
            next.lines().filter_map(|l| l.trim().strip_prefix("ferrotron ")).map(String::from).collect();
        for command in commands.iter().filter(|c| !c.contains("DIR")) {
            self.sh(&format!("ferrotron {command}"));
        }
        commands
    }
}

/// Steps of the newest checkpoint of a run.
fn newest(run: &Path) -> String {
    let list = std::fs::read_dir(run.join("checkpoints")).unwrap();
    list.map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.starts_with("step-"))
        .max()
        .unwrap()
}

#[test]
fn after_a_run_of_a_recipe_file_with_blanks_in_every_path() {
    let scene = Scene::new();
    let here = scene.here();
    for folder in ["my recipes", "my data", "my runs"] {
        std::fs::create_dir(here.join(folder)).unwrap();
    }
    recipe(&here.join("my recipes"), 4, "");
    let text: String = (0..400).map(|i| format!("line {i} it's text\n")).collect();
    std::fs::write(here.join("my.txt"), &text).unwrap();
    scene.sh("ferrotron data build my.txt --output 'my data/text'");
    let printed = scene.sh(
        "ferrotron train 'my recipes/small.toml' --out 'my runs/a b' --data 'my data/text' --device cpu \\
         --set train.steps=2 --set 'generate.prompt=it'\\''s' --set 'optimizer.betas=[0.8, 0.9]' --fresh",
    );
    let commands = scene.follow(&printed);
    assert_eq!(newest(&here.join("my runs/a b")), "step-00000004", "{commands:?}");
    assert_eq!(newest(&here.join("runs/mine")), "step-00000002");
    assert!(here.join("my runs/a b-hf/config.json").is_file());
    // Of the longer run, its configuration is still what the user gave.
    let config = std::fs::read_to_string(here.join("my runs/a b/config.toml")).unwrap();
    assert!(config.contains("betas = [0.8, 0.9]") && config.contains("my data/text"), "{config}");
    assert!(config.contains("prompt = \"it's\""), "{config}");
}

#[test]
fn after_a_fine_tuned_run_and_after_a_built_in_recipe() {
    let scene = Scene::new();
    let here = scene.here();
    recipe(&here, 2, "");
    let printed = scene.sh("ferrotron train small.toml --device cpu");
    std::fs::write(here.join("my.txt"), "some text of mine\n".repeat(200)).unwrap();
    let commands = scene.follow(&printed);
    assert!(commands.iter().any(|c| c.starts_with("train finetune-hf --set model.hf=DIR")), "{commands:?}");
    // The export of that run, fine-tuned on the user's data.
    scene.sh("ferrotron data build my.txt --output own --tokenizer runs/small-hf --eod 0");
    let printed = scene
        .sh("ferrotron train finetune-hf --set model.hf=runs/small-hf --data own --steps 2 --device cpu \\
         --set train.global_batch=2 --set eval.every=0 --set data.seq_len=8");
    // What the first suggestions wrote would be in the way of the second ones.
    scene.sh("rm -r my.bin my.idx my.dataset.json runs/mine");
    let commands = scene.follow(&printed);
    assert!(!commands.iter().any(|c| c.contains("DIR")), "{commands:?}");
    assert_eq!(newest(&here.join("runs/finetune-hf")), "step-00000004", "{commands:?}");
    assert_eq!(newest(&here.join("runs/mine")), "step-00000002");
    assert!(here.join("runs/finetune-hf-hf/tokenizer.json").is_file());
}

#[test]
fn after_a_run_of_adapters_and_after_early_stopping() {
    let scene = Scene::new();
    let here = scene.here();
    recipe(&here, 2, "");
    scene.sh("ferrotron train small.toml --device cpu && ferrotron convert runs/small base");
    std::fs::write(here.join("my.txt"), "some text of mine\n".repeat(200)).unwrap();
    let tune = "ferrotron train finetune-hf --set model.hf=base --data my.txt --device cpu --set data.cache=cache \
                --set train.global_batch=2 --set data.seq_len=8 --set generate.tokens=0";
    let printed =
        scene.sh(&format!("{tune} --steps 2 --set lora.rank=2 --set eval.every=0 --out runs/adapters"));
    let commands = scene.follow(&printed);
    let converts: Vec<&String> = commands.iter().filter(|c| c.starts_with("convert")).collect();
    assert_eq!(
        converts,
        ["convert runs/adapters runs/adapters-adapter", "convert runs/adapters runs/adapters-hf --merge"]
    );
    assert!(here.join("runs/adapters-adapter/adapter_config.json").is_file());
    assert!(here.join("runs/adapters-hf/model.safetensors").is_file());
    // Nothing improves by so much, so the second evaluation ends the run.
    std::fs::write(here.join("lines.jsonl"), "{\"text\": \"some more text of mine\"}\n".repeat(100)).unwrap();
    let printed = scene.sh(&format!(
        "{} --steps 9 --set eval.every=1 --set eval.batches=1 --set eval.patience=1 --set eval.min_delta=50 \
         --set checkpoint.best=true --set data.packing=documents --out runs/stopped",
        tune.replace("my.txt", "lines.jsonl")
    ));
    assert!(printed.contains("early stopping") && !printed.contains("train longer"), "{printed}");
    let next = printed.split("\nnext:\n").nth(1).unwrap();
    assert!(next.contains("generate --model runs/stopped/checkpoints/best"), "{next}");
    assert!(next.contains("convert runs/stopped/checkpoints/best runs/stopped-hf"), "{next}");
    scene.sh("ferrotron convert runs/stopped/checkpoints/best runs/stopped-hf");
    // From the best checkpoint with more patience.
    let log = scene.sh(&format!(
        "{} --steps 9 --set eval.every=1 --set eval.batches=1 --set eval.patience=9 --set checkpoint.best=true \
         --set data.packing=documents --out runs/stopped --resume best 2>&1",
        tune.replace("my.txt", "lines.jsonl")
    ));
    assert!(log.contains("resuming finetune-hf after step"), "{log}");
}
