//! ARCHITECTURE.md names files, folders and functions that exist, and every other page names files that do.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests too

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Backticked texts of a page, with the text between each and the one before.
fn code_spans(page: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = page.split('`').collect();
    parts.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}

#[test]
fn paths_and_functions_of_the_architecture_page_exist() {
    let root = root();
    let page = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    // Fenced blocks would shift the pairing of backticks.
    let page: String = page.split("```").step_by(2).collect();
    let (mut paths, mut functions, mut last) = (0, 0, None);
    for (between, span) in code_spans(&page) {
        let is_path = span.starts_with("crates/");
        if is_path {
            assert!(root.join(span).exists(), "ARCHITECTURE.md names {span}, which does not exist");
            paths += 1;
            last = Some(span);
        } else if between == " → " {
            let file = last.unwrap_or_else(|| panic!("ARCHITECTURE.md: no file before → {span}"));
            let source = std::fs::read_to_string(root.join(file)).unwrap();
            assert!(source.contains(&format!("fn {span}")), "{file} has no function {span}");
            functions += 1;
        }
    }
    assert!(paths >= 20 && functions >= 12, "{paths} paths, {functions} functions: the page lost its list");
}

/// Paths in code spans begin at the root of the repository: `crates/engine/src/moe`, not `engine/src/moe`.
#[test]
fn paths_of_every_page_exist() {
    let root = root();
    let files = |folder: &str| {
        let entries = std::fs::read_dir(root.join(folder)).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect::<Vec<String>>()
    };
    let crates = files("crates");
    let mut pages = ["README.md", "BENCHMARKS.md"].map(String::from).to_vec();
    pages
        .extend(files("docs").iter().filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")));
    let (mut wrong, mut checked) = (Vec::new(), 0);
    for page in pages {
        let text = std::fs::read_to_string(root.join(&page)).unwrap();
        let prose: String = text.split("```").step_by(2).collect();
        for (_, span) in code_spans(&prose) {
            // A command's first word; patterns such as `crates/*/src` name no file.
            let path = span.split_whitespace().next().unwrap_or_default();
            let in_crate = |name: &String| {
                path.strip_prefix(name.as_str())
                    .is_some_and(|rest| rest.starts_with("/src") || rest.starts_with("/tests"))
            };
            if crates.iter().any(in_crate) {
                wrong.push(format!("{page}: {path}: write crates/{path}"));
            } else if ["crates/", "scripts/"].iter().any(|p| path.starts_with(p)) && !path.contains('*') {
                checked += 1;
                if !root.join(path).exists() {
                    wrong.push(format!("{page}: {path} does not exist"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked >= 25, "only {checked} paths were found");
}
