//! Reads JSON objects key by key, with errors that name the file and the key.

use crate::error::{Error, Result};
use ferrotron_core::fs::read_limited;
use serde_json::{Map, Value};
use std::path::Path;

/// Size limit of a configuration file.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a small text file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read_limited(path, MAX_BYTES)?)
        .map_err(|e| Error::config(&path.display().to_string(), format!("not UTF-8 text: {e}")))
}

/// Parses text that must be one JSON object.
pub(crate) fn parse_object(text: &str, origin: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Error::config(origin, format!("must be a JSON object, not {}", kind(&other)))),
        Err(e) => Err(Error::config(origin, format!("not valid JSON: {e}"))),
    }
}

/// A value as text for error messages, truncated to 60 characters.
pub(crate) fn show(v: &Value) -> String {
    let text = v.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}

fn kind(v: &Value) -> &'static str {
    match v {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// An object with its file and the key that holds it (`rope_scaling.` or nothing), for error messages.
#[derive(Clone, Copy)]
pub(crate) struct Object<'a> {
    pub map: &'a Map<String, Value>,
    pub origin: &'a str,
    pub under: &'a str,
}

impl<'a> Object<'a> {
    /// The value of `key`; null counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// An error about `key`.
    pub fn wrong(&self, key: &str, what: impl std::fmt::Display) -> Error {
        Error::config(self.origin, format!("`{}{key}` {what}", self.under))
    }

    pub fn missing(&self, key: &str) -> Error {
        self.wrong(key, "is missing")
    }

    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|v| size(v).ok_or_else(|| self.mistyped(key, v, "a whole number"))).transpose()
    }

    pub fn real(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|v| v.as_f64().ok_or_else(|| self.mistyped(key, v, "a number"))).transpose()
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|v| v.as_bool().ok_or_else(|| self.mistyped(key, v, "true or false"))).transpose()
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.get(key).map(|v| v.as_str().ok_or_else(|| self.mistyped(key, v, "a string"))).transpose()
    }

    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        self.get(key).map(|v| v.as_object().ok_or_else(|| self.mistyped(key, v, "an object"))).transpose()
    }

    pub fn list(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        self.get(key).map(|v| v.as_array().ok_or_else(|| self.mistyped(key, v, "a list"))).transpose()
    }

    pub fn mistyped(&self, key: &str, v: &Value, wanted: &str) -> Error {
        self.wrong(key, format_args!("must be {wanted}, not {}", show(v)))
    }
}

fn size(v: &Value) -> Option<usize> {
    v.as_u64().and_then(|n| usize::try_from(n).ok())
}
