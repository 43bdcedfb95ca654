//! Chat templates: render a conversation into the text that a chat model continues.
//!
//! A template is a program that came with a model, so it is bounded in source length, nesting, instructions, memory and
//! stack, whatever it does.

mod assistant_spans;
mod budget;
mod filters;
mod generation;
mod instrument;
mod slice;
mod strftime;
mod templates;

pub use assistant_spans::{ChatInput, RenderedChat};
pub(crate) use templates::{NAMED_TEMPLATES, is_template, named_files};

use crate::error::{Error, Result};
use crate::json::{parse_object, read_text};
use crate::tokenizer::token_text;
use budget::{Budget, refused};
use minijinja::machinery::{CodeGenerator, Instructions, Token, eval, make_string_output, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, escape_formatter};
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use strftime::DateTime;
use templates::Templates;

/// Limit on template instructions; published templates need a few hundred per message.
const FUEL: u64 = 2_000_000;
/// Longest template; published ones have up to 30 kB.
const MAX_SOURCE: usize = 512 << 10;
/// Most tokens of one tag, and most `elif` of a template: each may be a level of recursion in parser and compiler.
const MAX_TAG_TOKENS: usize = 4096;
const MAX_ELIF: usize = 1000;
/// Stack for these levels; only what is used takes memory.
const STACK: usize = 256 << 20;

/// Variables that transformers always defines.
const UNGIVEN: [&str; 2] = [TOOLS, "documents"];
const TOOLS: &str = "tools";
/// The function of the date, as transformers names it.
const STRFTIME_NOW: &str = "strftime_now";

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant`…
    pub role: String,
    /// The text.
    pub content: String,
}

/// A model's chat template. Where it has one for conversations with tools, that one renders these.
#[derive(Debug)]
pub struct ChatTemplate {
    templates: Templates,
    bos: String,
    eos: String,
    /// What `strftime_now` prints.
    now: DateTime,
}

impl ChatTemplate {
    /// The template of a folder, or several by name: `chat_template.jinja` and the files of `additional_chat_templates`, otherwise
    /// those in `tokenizer_config.json` or `chat_template.json`. None if the folder has none.
    pub fn from_dir(dir: &Path) -> Result<Option<ChatTemplate>> {
        let path = dir.join("tokenizer_config.json");
        let config = match path.exists() {
            true => parse_object(&read_text(&path)?, &path.display().to_string())?,
            false => Map::new(),
        };
        Ok(Templates::of_folder(dir)?.map(|templates| ChatTemplate::of(templates, &config)))
    }

    /// A template from a Jinja file; the texts of its beginning and end tokens come from the tokenizer's `folder`.
    pub fn from_file(path: &Path, folder: Option<&Path>) -> Result<ChatTemplate> {
        let config = folder.map(|dir| dir.join("tokenizer_config.json")).filter(|path| path.exists());
        let config = match &config {
            Some(path) => parse_object(&read_text(path)?, &path.display().to_string())?,
            None => Map::new(),
        };
        Ok(ChatTemplate::of(Templates::one(&read_text(path)?)?, &config))
    }

    /// Checks a template; `bos` and `eos` are the texts of the beginning and end tokens.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        let (templates, now) = (Templates::one(source)?, DateTime::OF_DATA);
        Ok(ChatTemplate { templates, bos: bos.into(), eos: eos.into(), now })
    }

    /// Templates with the tokens that a `tokenizer_config.json` names.
    fn of(templates: Templates, config: &Map<String, Json>) -> ChatTemplate {
        let token = |key: &str| config.get(key).and_then(token_text).unwrap_or_default().to_string();
        ChatTemplate { templates, bos: token("bos_token"), eos: token("eos_token"), now: DateTime::OF_DATA }
    }

    /// `strftime_now` prints the present (UTC), and the same in every rendering: the beginning of a conversation stays as it
    /// is. Without this it prints a date that never changes: what data are tokenized to must not depend on the day, nor may
    /// ranks and a resumed run see other tokens.
    pub fn at_present(mut self) -> ChatTemplate {
        self.now = DateTime::present();
        self
    }

    /// CRC-32C of all that its renderings depend on: the templates, their tokens and, if one asks for it, the date.
    pub(crate) fn digest(&self) -> u32 {
        let mut parts: Vec<String> =
            self.templates.all().flat_map(|(name, source)| [name.into(), source.whole().into()]).collect();
        let dated = self.templates.all().any(|(_, source)| source.whole().contains(STRFTIME_NOW));
        parts.extend([self.bos.clone(), self.eos.clone()]);
        parts.extend(dated.then(|| self.now.to_string()));
        parts.iter().fold(0, |crc, s| {
            crc32c::crc32c_append(crc32c::crc32c_append(crc, &s.len().to_le_bytes()), s.as_bytes())
        })
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
        // As transformers has it, these are there, and none, where they are not given.
        let mut context: Map<String, Json> =
            UNGIVEN.iter().map(|name| (name.to_string(), Json::Null)).collect();
        context.extend(more.clone());
        context.insert("messages".into(), messages.clone());
        context.insert("add_generation_prompt".into(), json!(add_generation_prompt));
        context.insert("bos_token".into(), json!(self.bos));
        context.insert("eos_token".into(), json!(self.eos));
        let tools = context.get(TOOLS).is_some_and(|tools| !tools.is_null());
        with_stack(|| {
            compile(&self.templates.of(tools)?.text)?.render(Value::from(Serde(&context)), self.now)
        })
    }
}

/// Calls `work` on a thread whose stack is deep enough for any template within the limits.
fn with_stack<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T> {
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        match thread.spawn_scoped(scope, work) {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err("the template library panicked on it".into())),
            Err(e) => Err(format!("cannot start a thread with {STACK} bytes of stack: {e}")),
        }
    });
    done.map_err(Error::Chat)
}

/// A compiled template; it is used where [`with_stack`] has it compiled.
struct Compiled<'s> {
    instructions: Instructions<'s>,
    blocks: BTreeMap<&'s str, Instructions<'s>>,
}

/// Parses and compiles a template.
fn compile(source: &str) -> Result<Compiled<'_>, String> {
    let explained = |e: minijinja::Error| explain(&e);
    // The settings of transformers' Jinja environment.
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(explained)?;
    check_tokens(source, syntax.clone())?;
    let template = parse(source, "chat", syntax).map_err(explained)?;
    let template = instrument::instrument(&template)?;
    let mut generator = CodeGenerator::new("chat", source);
    generator.compile_stmt(&template);
    let (instructions, blocks) = generator.finish();
    Ok(Compiled { instructions, blocks })
}

impl Compiled<'_> {
    fn render(&self, variables: Value, now: DateTime) -> Result<String, String> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        // Floats as Python prints them.
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::Number if !value.is_integer() => {
                let text = filters::python_float(f64::try_from(value.clone())?);
                out.write_str(&text).map_err(|_| refused("its output cannot be written".into()))
            }
            _ => escape_formatter(out, state, value),
        });
        filters::add(&mut environment, &Arc::new(Budget::new()));
        environment.add_function(STRFTIME_NOW, move |format: String| now.format(&format).map_err(refused));
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        let Compiled { instructions, blocks } = self;
        let done = eval(&environment, instructions, variables, blocks, &mut out, AutoEscape::None);
        done.map(drop).map_err(|e| explain(&e))?;
        drop(out);
        Ok(text)
    }
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
