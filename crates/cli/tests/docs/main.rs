//! The documentation: its commands run, its links lead somewhere, its tables and its reference agree with the program.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod commands;
mod gpu;
mod links;
mod reference;

#[path = "../../../../tests/support/device.rs"]
mod device;

use std::path::{Path, PathBuf};

/// The binary under test: `FERROTRON_BIN` if set, otherwise the one just built.
fn binary() -> PathBuf {
    std::env::var_os("FERROTRON_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_ferrotron").into()).into()
}

/// The repository, or what `FERROTRON_REPOSITORY` names: a folder with its pages, on a host without it.
fn root() -> PathBuf {
    let here = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("FERROTRON_REPOSITORY").map_or_else(here, PathBuf::from).canonicalize().unwrap()
}

/// Pages of the site, and those outside it that link to them, relative to the repository.
fn pages() -> Vec<String> {
    let mut pages: Vec<String> = std::fs::read_dir(root().join("docs"))
        .unwrap()
        .map(|entry| format!("docs/{}", entry.unwrap().file_name().to_str().unwrap()))
        .filter(|name| name.ends_with(".md"))
        .collect();
    pages.extend(["README.md", "ARCHITECTURE.md", "BENCHMARKS.md"].map(String::from));
    pages.sort();
    pages
}

fn read(page: &str) -> String {
    std::fs::read_to_string(root().join(page)).unwrap()
}

/// A fenced block of a page.
struct Block {
    /// Line of its first fence, from 1.
    line: usize,
    /// What follows the fence: `sh`, `sh gpu`, `text`, …
    info: String,
    text: String,
}

/// The fenced blocks of a page, and its text without them.
fn split(page: &str) -> (Vec<Block>, String) {
    let (mut blocks, mut prose, mut open): (Vec<Block>, String, bool) = (Vec::new(), String::new(), false);
    for (i, line) in read(page).lines().enumerate() {
        match line.trim_start().strip_prefix("```") {
            Some(info) if !open => {
                blocks.push(Block { line: i + 1, info: info.trim().into(), text: String::new() });
                open = true;
            }
            Some(_) => open = false,
            None if open => blocks.last_mut().unwrap().text += &format!("{line}\n"),
            None => prose += &format!("{line}\n"),
        }
    }
    assert!(!open, "{page}: the last block is not closed");
    (blocks, prose)
}
