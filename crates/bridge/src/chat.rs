//! Chat templates: render a conversation into the text that a chat model continues.

use crate::error::{Error, Result};
use crate::json::{parse_object, read_text};
use crate::tokenizer::token_text;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value as Json, json};
use std::path::Path;

/// Limit on template instructions; published templates need a few hundred per message.
const FUEL: u64 = 10_000_000;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant`…
    pub role: String,
    /// The text.
    pub content: String,
}

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The template of a folder: `chat_template.jinja`, otherwise the one in `tokenizer_config.json` or
    /// `chat_template.json`. None if the folder has none.
    pub fn from_dir(dir: &Path) -> Result<Option<ChatTemplate>> {
        let read = |name: &str| -> Result<Map<String, Json>> {
            let path = dir.join(name);
            match path.exists() {
                true => parse_object(&read_text(&path)?, &path.display().to_string()),
                false => Ok(Map::new()),
            }
        };
        let config = read("tokenizer_config.json")?;
        let alone = dir.join("chat_template.jinja");
        let source = if alone.exists() {
            Some(read_text(&alone)?)
        } else {
            let old = read("chat_template.json")?;
            [&config, &old].into_iter().find_map(|m| m.get("chat_template").and_then(default_template))
        };
        let token = |key: &str| config.get(key).and_then(token_text).unwrap_or_default();
        source.map(|s| ChatTemplate::new(&s, token("bos_token"), token("eos_token"))).transpose()
    }

    /// Compiles a template; `bos` and `eos` are the texts of the beginning and end tokens.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        let mut environment = Environment::new();
        // The settings of transformers' Jinja environment.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| Error::Chat(explain(&e)))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", to_json);
        let source = without_generation_marks(source);
        environment.add_template_owned("chat", source).map_err(|e| Error::Chat(explain(&e)))?;
        Ok(ChatTemplate { environment, bos: bos.into(), eos: eos.into() })
    }

    /// Renders a conversation; with `add_generation_prompt` the text ends where the model's answer begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let messages: Vec<Json> =
            messages.iter().map(|m| json!({"role": m.role, "content": m.content})).collect();
        self.render_json(&Json::Array(messages), add_generation_prompt, &Map::new())
    }

    /// Renders messages given as JSON (tool calls, several parts), with further template variables (`tools`,
    /// `enable_thinking`…).
    pub fn render_json(
        &self,
        messages: &Json,
        add_generation_prompt: bool,
        more: &Map<String, Json>,
    ) -> Result<String> {
        let mut context = more.clone();
        context.insert("messages".into(), messages.clone());
        context.insert("add_generation_prompt".into(), json!(add_generation_prompt));
        context.insert("bos_token".into(), json!(self.bos));
        context.insert("eos_token".into(), json!(self.eos));
        let template = self.environment.get_template("chat").map_err(|e| Error::Chat(explain(&e)))?;
        template.render(Value::from(Serde(&context))).map_err(|e| Error::Chat(explain(&e)))
    }
}

/// The template itself or, of several, the one called "default".
fn default_template(v: &Json) -> Option<String> {
    match v {
        Json::String(s) => Some(s.clone()),
        Json::Array(list) => {
            let named = |n: &str| list.iter().find(|t| t.get("name").and_then(Json::as_str) == Some(n));
            let one = named("default").or(list.first())?;
            one.get("template")?.as_str().map(str::to_string)
        }
        _ => None,
    }
}

/// An error and its line in one sentence.
fn explain(e: &minijinja::Error) -> String {
    let what = match e.kind() {
        ErrorKind::OutOfFuel => "it runs for too long".to_string(),
        kind => e.detail().map_or_else(|| kind.to_string(), str::to_string),
    };
    match e.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

/// Replaces `{% generation %}`, which marks the assistant's text for training and prints nothing, by an `{% if true
/// %}` block, so that its whitespace control keeps working.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inside = tag.trim_start_matches("{%").trim_end_matches("%}");
        match inside.trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The `tojson` filter as Python's `json.dumps` prints: spaces after commas and colons, no HTML escapes.
fn to_json(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<Value> = match indent {
        Some(i) => Some(i),
        None => options.get("indent")?,
    };
    // Accepted without effect: non-ASCII text is never escaped, and keys are already sorted.
    let _: Option<Value> = options.get("ensure_ascii")?;
    let _: Option<Value> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let indent = match indent {
        Some(i) if !i.is_none() => Some(usize::try_from(i)?.min(64)),
        _ => None,
    };
    let wrong = |e: serde_json::Error| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("cannot be written as JSON: {e}"))
    };
    let json = serde_json::to_value(value).map_err(wrong)?;
    let mut text = String::new();
    print(&json, indent, 0, &mut text);
    Ok(Value::from_safe_string(text))
}

fn print(v: &Json, indent: Option<usize>, depth: usize, out: &mut String) {
    let line = |depth: usize, out: &mut String| {
        if let Some(n) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', n * depth));
        }
    };
    let separator = if indent.is_some() { "," } else { ", " };
    match v {
        Json::Array(list) if !list.is_empty() => {
            out.push('[');
            for (i, item) in list.iter().enumerate() {
                out.push_str(if i > 0 { separator } else { "" });
                line(depth + 1, out);
                print(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push(']');
        }
        Json::Object(map) if !map.is_empty() => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                out.push_str(if i > 0 { separator } else { "" });
                line(depth + 1, out);
                out.push_str(&Json::String(key.clone()).to_string());
                out.push_str(": ");
                print(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
}
