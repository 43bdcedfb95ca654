//! Writing values and whole configurations in one canonical form.

use super::{Config, KEYS, SECTIONS};
use std::fmt::Write;

/// One value in TOML.
pub(super) fn value(value: &toml::Value) -> String {
    match value {
        toml::Value::Float(x) => float(*x),
        toml::Value::Array(items) => {
            format!("[{}]", items.iter().map(self::value).collect::<Vec<_>>().join(", "))
        }
        toml::Value::Table(table) => {
            let entries = table.iter().map(|(key, v)| format!("{key} = {}", self::value(v)));
            format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// The shortest form that reads back to the same bits, in powers of ten when far from one.
fn float(x: f64) -> String {
    let size = x.abs();
    if x.is_finite() && size != 0.0 && !(1e-3..1e15).contains(&size) {
        format!("{x:e}")
    } else {
        format!("{x:?}")
    }
}

impl Config {
    /// The configuration as TOML: every section and every key that has a value, in the order of the table.
    /// Reading it back gives the same configuration, and writing that gives the same text.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        for section in SECTIONS {
            let gap = if out.is_empty() { "" } else { "\n" };
            let mut body = String::new();
            for key in KEYS.iter().filter(|k| k.section == section.name) {
                match self.get(key.section, key.name) {
                    // An empty list means unset, as `None` does.
                    Some(toml::Value::Array(items)) if items.is_empty() => {}
                    Some(v) => _ = writeln!(body, "{} = {}", key.name, value(&v)),
                    None => {}
                }
            }
            if !body.is_empty() {
                _ = write!(out, "{gap}[{}]\n{body}", section.name);
            }
        }
        out
    }
}
