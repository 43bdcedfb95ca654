//! Finds golden vectors.
#![allow(dead_code)] // each test file uses its part

use std::path::PathBuf;

use serde_json::Value;

/// The folder of an area: `FERROTRON_GOLDEN`, or `tests/golden` in the repository.
pub fn golden(area: &str) -> PathBuf {
    let root = std::env::var_os("FERROTRON_GOLDEN").map(PathBuf::from);
    root.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")))
        .join(area)
}

pub fn json(area: &str, file: &str) -> Value {
    let path = golden(area).join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The cases under `key`; none is a failure.
pub fn cases(value: &Value, key: &str) -> Vec<Value> {
    let cases = value[key].as_array().expect("a list of cases").clone();
    assert!(!cases.is_empty(), "no cases under {key}");
    cases
}

/// Fails on a file of the area that no test knows.
pub fn assert_known_files(area: &str, known: impl Fn(&str) -> bool) {
    for entry in std::fs::read_dir(golden(area)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(known(&name), "{area}/{name} is no file that this version knows");
    }
}

pub fn uint(v: &Value) -> u64 {
    v.as_u64().unwrap_or_else(|| panic!("{v} is not a count"))
}

pub fn float(v: &Value) -> f64 {
    v.as_f64().unwrap_or_else(|| panic!("{v} is not a number"))
}

pub fn flag(v: &Value) -> bool {
    v.as_bool().unwrap_or_else(|| panic!("{v} is not a switch"))
}

pub fn text(v: &Value) -> &str {
    v.as_str().unwrap_or_else(|| panic!("{v} is not a string"))
}

pub fn list<T>(v: &Value, f: impl Fn(&Value) -> T) -> Vec<T> {
    v.as_array().unwrap_or_else(|| panic!("{v} is not a list")).iter().map(f).collect()
}
