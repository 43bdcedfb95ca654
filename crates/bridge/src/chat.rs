//! Chat templates: render a conversation into the text that a chat model continues.
//!
//! A template is a program that came with a model, so it is bounded in source length, nesting, instructions, memory and
//! stack, whatever it does.

mod budget;
mod filters;
mod instrument;
mod slice;

use crate::error::{Error, Result};
use crate::json::{parse_object, read_text};
use crate::tokenizer::token_text;
use budget::Budget;
use minijinja::machinery::{CodeGenerator, Token, eval, make_string_output, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde_json::{Map, Value as Json, json};
use std::path::Path;
use std::sync::Arc;

/// Limit on template instructions; published templates need a few hundred per message.
const FUEL: u64 = 2_000_000;
/// Longest template; published ones have up to 30 kB.
const MAX_SOURCE: usize = 512 << 10;
/// Most tokens of one tag, and most `elif` of a template: each may be a level of recursion in parser and compiler.
const MAX_TAG_TOKENS: usize = 4096;
const MAX_ELIF: usize = 1000;
/// Stack for these levels; only what is used takes memory.
const STACK: usize = 256 << 20;

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
    source: String,
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

    /// Checks a template; `bos` and `eos` are the texts of the beginning and end tokens.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        if source.len() > MAX_SOURCE {
            return Err(Error::Chat(format!("it has {} bytes, more than {MAX_SOURCE}", source.len())));
        }
        let source = without_generation_marks(source);
        with_stack(|| run(&source, None))?;
        Ok(ChatTemplate { source, bos: bos.into(), eos: eos.into() })
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
        with_stack(|| run(&self.source, Some(Value::from(Serde(&context)))))
    }
}

/// Calls `work` on a thread whose stack is deep enough for any template within the limits.
fn with_stack(work: impl FnOnce() -> Result<String, String> + Send) -> Result<String> {
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        match thread.spawn_scoped(scope, work) {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err("the template library panicked on it".into())),
            Err(e) => Err(format!("cannot start a thread with {STACK} bytes of stack: {e}")),
        }
    });
    done.map_err(Error::Chat)
}

/// Parses and compiles a template, and renders it if there are variables.
fn run(source: &str, variables: Option<Value>) -> Result<String, String> {
    let explained = |e: minijinja::Error| explain(&e);
    // The settings of transformers' Jinja environment.
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(explained)?;
    check_tokens(source, syntax.clone())?;
    let template = parse(source, "chat", syntax).map_err(explained)?;
    let template = instrument::instrument(&template)?;
    let mut generator = CodeGenerator::new("chat", source);
    generator.compile_stmt(&template);
    let (instructions, blocks) = generator.finish();
    let Some(variables) = variables else { return Ok(String::new()) };
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    filters::add(&mut environment, &Arc::new(Budget::new()));
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    let done = eval(&environment, &instructions, variables, &blocks, &mut out, AutoEscape::None);
    done.map(drop).map_err(explained)?;
    drop(out);
    Ok(text)
}

/// Fails if the template could nest deeper than the stack allows; reading tokens needs no stack.
fn check_tokens(source: &str, syntax: SyntaxConfig) -> Result<(), String> {
    let (mut in_tag, mut elifs) = (0, 0);
    for token in tokenize(source, false, syntax) {
        let (token, _) = token.map_err(|e| explain(&e))?;
        match token {
            Token::BlockStart | Token::VariableStart => in_tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        in_tag += 1;
        if in_tag > MAX_TAG_TOKENS {
            return Err(format!("it has a tag of more than {MAX_TAG_TOKENS} tokens"));
        }
        if elifs > MAX_ELIF {
            return Err(format!("it has more than {MAX_ELIF} elif"));
        }
    }
    Ok(())
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
