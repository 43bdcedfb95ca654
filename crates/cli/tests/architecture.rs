//! ARCHITECTURE.md names files, folders and functions that exist.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests are tests too

use std::path::Path;

/// Backticked texts of a page, with the text between each and the one before.
fn code_spans(page: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = page.split('`').collect();
    parts.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}

#[test]
fn paths_and_functions_of_the_architecture_page_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
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
