//! Canonical JSON: sorted keys and fixed spacing, so that equal values have equal text.

use serde_json::Value;

/// Renders a value with sorted object keys, one per line; arrays of scalars stay on one line, and every element of another
/// array has one line, however deep: a manifest lists parts by the million.
pub(super) fn render(value: &Value) -> String {
    let mut out = String::new();
    put(&mut out, value, 0);
    out.push('\n');
    out
}

fn put(out: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            out.push('{');
            for (i, key) in keys.into_iter().enumerate() {
                new_line(out, i, depth + 1);
                out.push_str(&Value::String(key.clone()).to_string());
                out.push_str(": ");
                put(out, &map[key.as_str()], depth + 1);
            }
            close(out, '}', depth);
        }
        Value::Array(list) if list.iter().any(|v| v.is_object() || v.is_array()) => {
            out.push('[');
            for (i, v) in list.iter().enumerate() {
                new_line(out, i, depth + 1);
                put_on_line(out, v);
            }
            close(out, ']', depth);
        }
        other => put_on_line(out, other),
    }
}

fn put_on_line(out: &mut String, value: &Value) {
    let separate = |out: &mut String, i: usize| out.push_str(if i > 0 { ", " } else { "" });
    match value {
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            out.push('{');
            for (i, key) in keys.into_iter().enumerate() {
                separate(out, i);
                out.push_str(&Value::String(key.clone()).to_string());
                out.push_str(": ");
                put_on_line(out, &map[key.as_str()]);
            }
            out.push('}');
        }
        Value::Array(list) => {
            out.push('[');
            for (i, v) in list.iter().enumerate() {
                separate(out, i);
                put_on_line(out, v);
            }
            out.push(']');
        }
        plain => out.push_str(&plain.to_string()),
    }
}

fn new_line(out: &mut String, index: usize, depth: usize) {
    if index > 0 {
        out.push(',');
    }
    out.push('\n');
    out.push_str(&"  ".repeat(depth));
}

fn close(out: &mut String, bracket: char, depth: usize) {
    out.push('\n');
    out.push_str(&"  ".repeat(depth));
    out.push(bracket);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_are_sorted_and_the_text_parses_to_the_same_value() {
        let v = json!({"b": [1, 2.5, "x"], "a": {"z": {}, "y": [], "x": [[1], {"q": null, "p": [{}]}]}, "": u64::MAX});
        let text = render(&v);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), v);
        assert!(text.starts_with("{\n  \"\": 18446744073709551615,\n  \"a\": {\n    \"x\": [\n      [1],\n      {\"p\": [{}], \"q\": null}\n"));
        assert!(text.ends_with("  \"b\": [1, 2.5, \"x\"]\n}\n"));
        let reordered: Value = serde_json::from_str(r#"{"k":1,"j":{"b":1,"a":2}}"#).unwrap();
        assert_eq!(render(&reordered), "{\n  \"j\": {\n    \"a\": 2,\n    \"b\": 1\n  },\n  \"k\": 1\n}\n");
    }
}
