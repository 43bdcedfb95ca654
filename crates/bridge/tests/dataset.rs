//! `.bin/.idx` pairs by name: one pair, whichever of its names is used.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_bridge::dataset::{DatasetOptions, Eod, build, pair_paths};
use ferrotron_bridge::recipe::resolve;
use ferrotron_core::config::{DataFormat, Recipe};
use std::path::{Path, PathBuf};

/// Builds a pair of bytes from text.
fn build_pair(prefix: &Path, text: &str, overwrite: bool) -> ferrotron_bridge::Result<u64> {
    let input = prefix.with_file_name("input.txt");
    std::fs::write(&input, text).unwrap();
    build_from(&[input], prefix, overwrite)
}

fn build_from(inputs: &[PathBuf], prefix: &Path, overwrite: bool) -> ferrotron_bridge::Result<u64> {
    let (field, format, eod) = ("text", DataFormat::Auto, Eod::Derived);
    let options = DatasetOptions {
        inputs,
        prefix,
        tokenizer: None,
        field,
        format,
        chat_template: None,
        eod,
        overwrite,
    };
    Ok(build(&options, &|_, _| ())?.summary.tokens)
}

/// The pairs that a recipe trains on.
fn pairs(path: &Path, cache: &Path) -> ferrotron_bridge::Result<Vec<String>> {
    let mut recipe = Recipe::named("tiny")?;
    recipe.set(&format!("data.path={:?}", path.display().to_string()))?;
    recipe.set(&format!("data.cache={:?}", cache.display().to_string()))?;
    Ok(resolve(&mut recipe)?.0.pairs)
}

#[test]
fn a_pair_named_by_one_of_its_files_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("wiki");
    assert_eq!(build_pair(&prefix, "some text", false).unwrap(), 10);
    let before = pair_paths(&prefix).map(|p| std::fs::read(p).unwrap());
    for ending in ["bin", "idx"] {
        let named = prefix.with_extension(ending);
        assert_eq!(pair_paths(&named), pair_paths(&prefix));
        let e = build_pair(&named, "another text", false).unwrap_err().to_string();
        assert!(e.contains("wiki.bin: already exists") && e.contains("--overwrite"), "{e}");
        assert_eq!(pair_paths(&prefix).map(|p| std::fs::read(p).unwrap()), before);
    }
    assert_eq!(build_pair(&prefix.with_extension("bin"), "another text", true).unwrap(), 13);
    assert_ne!(pair_paths(&prefix).map(|p| std::fs::read(p).unwrap()), before);
    assert!(!dir.path().join("wiki.bin.bin").exists());
}

#[test]
fn a_pair_named_by_one_of_its_files_is_not_taken_for_text() {
    let dir = tempfile::tempdir().unwrap();
    let (prefix, cache) = (dir.path().join("wiki"), dir.path().join("cache"));
    build_pair(&prefix, "some text", false).unwrap();
    for named in [prefix.clone(), prefix.with_extension("bin"), prefix.with_extension("idx")] {
        assert_eq!(pairs(&named, &cache).unwrap(), [named.display().to_string()]);
        assert!(!cache.exists());
    }
    // Nor where a pattern matches it, or `data build` is given it.
    let pattern = dir.path().join("*.bin");
    let e = pairs(&pattern, &cache).unwrap_err().to_string();
    assert!(e.contains("wiki.bin: is a file of a .bin/.idx pair"), "{e}");
    let e = build_from(&[prefix.with_extension("bin")], &dir.path().join("out"), false).unwrap_err();
    assert!(e.to_string().contains("give the pair's prefix"), "{e}");
}

#[test]
fn only_its_own_leftovers_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("wiki");
    let own = ["wiki.bin.7.0.tmp", "wiki.idx.7.12.tmp", "wiki.dataset.json.7.1.tmp", "wiki.lengths.7.0.tmp"];
    let others = [
        "wiki.val.bin.7.0.tmp",
        "wiki.val.documents.7.0.tmp",
        "wikis.bin.7.0.tmp",
        "wiki.bin.tmp",
        "wiki.7.0.tmp",
    ];
    for name in own.iter().chain(&others) {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    build_pair(&prefix, "some text", false).unwrap();
    let left = |names: &[&str]| names.iter().filter(|n| dir.path().join(n).exists()).count();
    assert_eq!((left(&own), left(&others)), (0, others.len()));
}

/// The old pair is not removed before it is known that the new one is complete.
#[test]
fn a_build_whose_temporary_files_are_removed_leaves_the_old_pair() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("wiki");
    build_pair(&prefix, "some text", false).unwrap();
    let before = pair_paths(&prefix).map(|p| std::fs::read(p).unwrap());
    let input = dir.path().join("long.txt");
    std::fs::write(&input, "many words\n".repeat(200_000)).unwrap();
    let lost = || {
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.to_string_lossy().contains("wiki.bin.") {
                std::fs::remove_file(path).unwrap();
            }
        }
    };
    let options = DatasetOptions {
        inputs: &[input],
        prefix: &prefix,
        tokenizer: None,
        field: "text",
        format: DataFormat::Auto,
        chat_template: None,
        eod: Eod::Derived,
        overwrite: true,
    };
    let e = build(&options, &|_, _| lost()).unwrap_err().to_string();
    assert!(e.contains("wiki.bin."), "{e}");
    assert_eq!(pair_paths(&prefix).map(|p| std::fs::read(p).unwrap()), before);
}

#[test]
fn lines_are_tokenized() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("lines.jsonl");
    std::fs::write(&input, "{\"text\": \"one\"}\n{\"text\": \"three\"}\n".repeat(50)).unwrap();
    assert_eq!(build_from(&[input], &dir.path().join("lines"), false).unwrap(), 500);
}

/// The test above where no thread can be started, as at a limit of processes: no address space holds such a stack.
#[test]
fn lines_are_tokenized_without_threads() {
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    alone.args(["--exact", "lines_are_tokenized", "--test-threads=1"]);
    let out = alone.env("RUST_MIN_STACK", (1u64 << 60).to_string()).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
}
