//! The reference is what the table of keys says, and names of other systems in the pages about them are those we know.

use super::{binary, read};
use serde_json::Value;
use std::process::Command;

fn ferrotron(args: &[&str]) -> String {
    let out = Command::new(binary()).args(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn the_reference_is_current() {
    let now = ferrotron(&["explain", "--markdown"]);
    let advice = "docs/reference.md is not current: `cargo run -- explain --markdown > docs/reference.md`";
    assert!(now == read("docs/reference.md"), "{advice}");
    // A search and a link find every key by its heading.
    let keys: Value = serde_json::from_str(&ferrotron(&["explain", "--json"])).unwrap();
    let keys = keys.as_array().unwrap();
    assert!(keys.len() > 150, "{}", keys.len());
    for key in keys {
        let heading = format!("\n### {}\n", key["key"].as_str().unwrap());
        assert_eq!(now.matches(&heading).count(), 1, "{heading}");
        for name in key["elsewhere"].as_array().unwrap() {
            assert!(now.contains(&format!("`{}`", name.as_str().unwrap())), "{name}");
        }
    }
}

/// Rows `| theirs | ours |` of the table under `## Keys`.
fn rows(page: &str) -> Vec<(String, String)> {
    let text = read(page);
    let table = text.split("\n## Keys\n").nth(1).unwrap_or_else(|| panic!("{page} has no table of keys"));
    let code = |cell: &str| cell.split('`').nth(1).map(String::from);
    let cells = table.lines().filter_map(|l| l.strip_prefix("| ")).map(|l| l.split('|').collect::<Vec<_>>());
    cells.filter_map(|c| Some((code(c[0])?, code(c[1])?))).collect()
}

#[test]
fn names_of_other_systems_are_explained_as_the_tables_say() {
    for (page, least) in [("docs/from-megatron.md", 70), ("docs/from-torchtitan.md", 25)] {
        let rows = rows(page);
        assert!(rows.len() > least, "{page}: {} rows", rows.len());
        let wrong: Vec<String> = rows
            .iter()
            .filter_map(|(theirs, ours)| {
                let out = Command::new(binary()).args(["explain", theirs, "--json"]).output().unwrap();
                let key =
                    serde_json::from_slice::<Value>(&out.stdout).map_or(Value::Null, |v| v["key"].clone());
                (key != ours.as_str()).then(|| format!("{page}: {theirs}: {ours}, explain says {key}"))
            })
            .collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
