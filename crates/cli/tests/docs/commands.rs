//! Runs the commands of the documentation, page by page, in a folder with the files that the pages speak of.
//!
//! | block | is |
//! |---|---|
//! | `sh` | run by bash, in order, and must succeed |
//! | `sh fails` | run line by line; the last fails, and errors are those of the next `text` block, where `…` stands for anything |
//! | `sh gpu` | run by `gpu.rs` on a host with a GPU |
//! | `sh hosts`, `sh toolchain` | not run: it needs several hosts or an MPI, or builds the program |
//!
//! Training is cut to two steps on one thread of the CPU, a simulated job of 1024 GPUs to one of 8, and a run without
//! `--out` replaces the one before.

use super::{binary, pages, root, split};
use serde_json::json;
use std::path::Path;
use std::process::{Command, Stdio};

/// `ferrotron` as pages call it, with shorter runs.
const WRAPPER: &str = r#"#!/usr/bin/env bash
args=("$@")
if [[ " $* " == *" train "* && " $* " != *" --dry-run "* && " $* " != *" bench "* && " $* " != *" --help "* ]]; then
  short=
  for i in "${!args[@]}"; do
    [[ ${args[i]} == --steps ]] && args[i+1]=2 && short=1
    [[ ${args[i]} == train.epochs=* ]] && args[i]=train.epochs=0.1 && short=1
  done
  [[ $short ]] || args+=(--steps 2)
  [[ " $* " == *" --out "* ]] || args+=(--fresh)
  args+=(--set eval.batches=1 --set generate.tokens=8)
  # Of the built-in recipe a smaller batch.
  [[ "$*" == *model.hf=* || "$*" == *.toml* || "$*" == *RECIPE* ]] || args+=(--set data.seq_len=32)
fi
[[ $1 == parity ]] && args+=(--set data.seq_len=32)
[[ "$1 $2" == "bench comm" ]] && args+=(--largest 65536 --seconds 0.01)
[[ "$1 $2" == "bench train" ]] && args+=(--steps 1 --warmup 1)
# A job that is simulated is a smaller one.
[[ $1 == train ]] && args=("${args[@]/1024xH100/8xH100}") && args=("${args[@]/llama-405b/llama-8b}")
[[ " $* " == *" --device "* || $1 == explain ]] || args+=(--device cpu)
[[ $1 == explain ]] || args+=(--threads 1)
exec "$BINARY" "${args[@]}"
"#;

const RECIPE: &str = "[model]\nlayers = 2\nhidden = 32\nheads = 2\nffn = 64\nvocab = 256\nmax_positions = 128\n\
    [data]\npath = \"embedded\"\nseq_len = 16\n[train]\nsteps = 2\nglobal_batch = 8\n[optimizer]\nlr = 1e-3\n";

fn lines(path: &Path, n: usize, line: impl Fn(usize) -> serde_json::Value) {
    let text: String = (0..n).map(|i| format!("{}\n", line(i))).collect();
    std::fs::write(path, text).unwrap();
}

/// A zstd frame of one raw block.
fn zst(bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(&((bytes.len() as u32) << 3 | 1).to_le_bytes()[..3]);
    out.extend(bytes);
    out
}

/// The folder in which the commands of a page run.
struct Scene {
    dir: tempfile::TempDir,
}

impl Scene {
    fn new(page: &str) -> Scene {
        let scene = Scene { dir: tempfile::tempdir().unwrap() };
        let at = |name: &str| {
            let path = scene.dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        std::fs::write(at("bin/ferrotron"), WRAPPER).unwrap();
        assert!(Command::new("chmod").arg("+x").arg(at("bin/ferrotron")).status().unwrap().success());
        for name in ["my.toml", "recipe.toml", "RECIPE"] {
            std::fs::write(at(name), RECIPE).unwrap();
        }
        for model in ["models/Qwen3-0.6B", "DIR"] {
            for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
                std::fs::copy(root().join("tests/eval/model").join(file), at(&format!("{model}/{file}")))
                    .unwrap();
            }
            let template = root().join("tests/sft_masks/templates/plain.jinja");
            std::fs::copy(template, at(&format!("{model}/chat_template.jinja"))).unwrap();
        }
        let text = |i: usize| json!({ "text": format!("the water of river {i} is over the stone and the old house") });
        for name in ["corpus.jsonl", "held-out.jsonl", "valid.jsonl", "test.jsonl"] {
            lines(&at(name), 200, text);
        }
        std::fs::write(at("book.txt"), "the cat walks over the stone\n".repeat(20)).unwrap();
        std::fs::write(at("more/one.txt"), "the dog sees the cat\n".repeat(200)).unwrap();
        std::fs::copy(root().join("tests/eval/arc.jsonl"), at("arc_easy.jsonl")).unwrap();
        let chat = |i: usize| {
            let [user, assistant] = [("user", format!("{i}?")), ("assistant", format!("{i} is the answer"))]
                .map(|(role, content)| json!({ "role": role, "content": content }));
            json!({ "messages": [user, assistant] })
        };
        lines(&at("chats.jsonl"), 100, chat);
        let chats = std::fs::read(at("chats.jsonl")).unwrap();
        std::fs::write(at("more/a.jsonl.zst"), zst(&chats)).unwrap();
        let gzip = "gzip -k chats.jsonl && cp chats.jsonl.gz more/b.jsonl.gz";
        scene.bash(gzip).map_err(|e| panic!("{e}")).unwrap();
        for folder in ["docs", "tests/data", "runs"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        let rows = "tests/data/published-rows.csv";
        std::fs::copy(root().join(rows), at(rows)).unwrap();
        // The page evaluates runs that are there.
        if page == "docs/evaluate.md" {
            for run in ["runs/tiny", "runs/big"] {
                scene
                    .bash(&format!("ferrotron train my.toml --out {run}"))
                    .map_err(|e| panic!("{e}"))
                    .unwrap();
            }
        }
        scene
    }

    /// Runs a script; what it printed, as an error if it failed.
    fn bash(&self, script: &str) -> Result<String, String> {
        let path = self.dir.path();
        let inherited = std::env::var("PATH").unwrap_or_default();
        let out = Command::new("bash")
            .args(["-euo", "pipefail", "-c", script])
            .current_dir(path)
            .env("PATH", format!("{}:{inherited}", path.join("bin").display()))
            .env("HOME", path)
            .env("BINARY", binary())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
        if out.status.success() { Ok(text) } else { Err(text) }
    }
}

/// Whether one of the lines of `text` is `pattern`, in which `…` stands for anything.
fn has_line(text: &str, pattern: &str) -> bool {
    let (begin, end) = pattern.split_once('…').unwrap_or((pattern, ""));
    let long = |line: &str| line.len() >= begin.len() + end.len();
    text.lines().any(|l| {
        l == pattern || (pattern.contains('…') && long(l) && l.starts_with(begin) && l.ends_with(end))
    })
}

/// Commands of a page that were run.
fn check(page: &str) -> usize {
    let (blocks, _) = split(page);
    let mut scene: Option<Scene> = None;
    let mut count = 0;
    for (i, block) in blocks.iter().enumerate() {
        let place = format!("{page}:{}", block.line);
        match block.info.as_str() {
            "sh" => {
                let scene = scene.get_or_insert_with(|| Scene::new(page));
                if let Err(said) = scene.bash(&block.text) {
                    panic!("{place}: failed\n{}\n{said}", block.text);
                }
                count += 1;
            }
            "sh fails" => {
                let scene = scene.get_or_insert_with(|| Scene::new(page));
                let lines: Vec<Result<String, String>> = block.text.lines().map(|l| scene.bash(l)).collect();
                assert!(lines.last().is_some_and(Result::is_err), "{place}: did not fail");
                let said: String = lines.into_iter().filter_map(Result::err).collect();
                let expected = blocks.get(i + 1).filter(|b| b.info == "text");
                let expected =
                    expected.unwrap_or_else(|| panic!("{place}: no text block says what is printed"));
                for line in expected.text.lines() {
                    assert!(has_line(&said, line), "{place}: {line:?} is not in\n{said}");
                }
                count += 1;
            }
            "sh gpu" | "sh hosts" | "sh toolchain" => {}
            info => assert!(!info.starts_with("sh") && info != "bash", "{place}: what is `{info}`?"),
        }
    }
    count
}

macro_rules! pages_with_commands {
    ($($name:ident: $page:literal, $blocks:literal;)+) => {
        $(
            /// Runs the page; there are at least so many blocks to run.
            #[test]
            fn $name() {
                let count = check($page);
                assert!(count >= $blocks, "{}: {count} blocks were run", $page);
            }
        )+
        const WITH_COMMANDS: &[&str] = &[$($page),+];
    };
}
pages_with_commands! {
    readme: "README.md", 1;
    cards: "docs/cards.md", 1;
    checkpoints: "docs/checkpoints.md", 1;
    errors: "docs/errors.md", 6;
    evaluate: "docs/evaluate.md", 1;
    faults: "docs/faults.md", 1;
    finetune: "docs/finetune.md", 7;
    from_megatron: "docs/from-megatron.md", 1;
    from_torchtitan: "docs/from-torchtitan.md", 1;
    fsdp: "docs/fsdp.md", 1;
    install: "docs/install.md", 2;
    launch: "docs/launch.md", 2;
    moe: "docs/moe.md", 1;
    offload: "docs/offload.md", 1;
    optimizers: "docs/optimizers.md", 1;
    plan: "docs/plan.md", 3;
    precision: "docs/precision.md", 1;
    pretrain: "docs/pretrain.md", 4;
    profile: "docs/profile.md", 2;
    regression: "docs/regression.md", 2;
    quickstart: "docs/quickstart.md", 5;
    recipes: "docs/recipes.md", 3;
    runs: "docs/runs.md", 4;
    scale_out: "docs/scale-out.md", 2;
    watch: "docs/watch.md", 1;
}

#[test]
fn every_page_with_commands_is_run() {
    for page in pages() {
        let has = split(&page).0.iter().any(|b| b.info.starts_with("sh") || b.info == "bash");
        assert!(
            !has || WITH_COMMANDS.contains(&page.as_str()),
            "{page} has commands: add it to the list of tests"
        );
    }
}

#[test]
fn patterns_match_lines() {
    assert!(has_line("a\nerror: b c d", "error: b … d") && has_line("x y", "x y"));
    assert!(!has_line("error: b d", "error: b … d") && !has_line("ab", "a"));
}
