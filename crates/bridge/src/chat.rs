//! Chat templates: render a conversation into the text that a chat model continues.
//!
//! A template is a program that came with a model, so it is bounded in source length, nesting, instructions, memory and
//! stack, whatever it does.

mod assistant_spans;
mod budget;
mod filters;
mod generation;
mod instrument;
mod pattern;
mod slice;
mod special_tokens;
mod strftime;
mod templates;

pub use assistant_spans::{ChatInput, RenderedChat};
pub(crate) use templates::{NAMED_TEMPLATES, TEMPLATE, is_template, named_files};

use crate::error::{Error, Result};
use crate::json::read_text;
use crate::tokenizer::Tokenizer;
use budget::{Budget, refused};
use minijinja::machinery::{CodeGenerator, Instructions, Token, eval, make_string_output, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, context, escape_formatter};
use special_tokens::SpecialTokens;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use strftime::DateTime;
use templates::{Source, Templates};

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
    tokens: SpecialTokens,
    /// What `strftime_now` prints.
    now: DateTime,
}

impl ChatTemplate {
    /// The template of a folder, or several by name: `chat_template.jinja` and the files of `additional_chat_templates`, otherwise
    /// those in `tokenizer_config.json` or `chat_template.json`. None if the folder has none.
    pub fn from_dir(dir: &Path) -> Result<Option<ChatTemplate>> {
        let tokens = SpecialTokens::of_folder(dir)?;
        Ok(Templates::of_folder(dir)?.map(|templates| ChatTemplate::of(templates, tokens)))
    }

    /// A template from a Jinja file; the texts of its special tokens come from the tokenizer's `folder`.
    pub fn from_file(path: &Path, folder: Option<&Path>) -> Result<ChatTemplate> {
        let tokens = folder.map(SpecialTokens::of_folder).transpose()?.unwrap_or_default();
        Ok(ChatTemplate::of(Templates::one(&read_text(path)?)?, tokens))
    }

    /// Checks a template; `bos` and `eos` are the texts of the beginning and end tokens.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        Ok(ChatTemplate::of(Templates::one(source)?, SpecialTokens::of_ends(bos, eos)))
    }

    fn of(templates: Templates, tokens: SpecialTokens) -> ChatTemplate {
        ChatTemplate { templates, tokens, now: DateTime::OF_DATA }
    }

    /// Defines `bos_token` and `eos_token` by the ids that begin and end a text, where no file of the folder names them.
    pub(crate) fn with_tokenizer(mut self, tokenizer: &Tokenizer) -> ChatTemplate {
        self.tokens.add_ends(tokenizer);
        self
    }

    /// `strftime_now` prints the present (UTC), and the same in every rendering: the beginning of a conversation stays as it
    /// is. Without this it prints a date that never changes: what data are tokenized to must not depend on the day, nor may
    /// ranks and a resumed run see other tokens.
    pub fn at_present(mut self) -> ChatTemplate {
        self.now = DateTime::present();
        self
    }

    /// CRC-32C of all that its renderings depend on: the templates, the tokens that they name and, if one asks for it, the date.
    pub(crate) fn digest(&self) -> u32 {
        let mut parts: Vec<String> =
            self.templates.all().flat_map(|(name, source)| [name.into(), source.whole().into()]).collect();
        let named = |name: &str| self.templates.all().any(|(_, source)| source.whole().contains(name));
        for (name, token) in self.tokens.defined().filter(|(name, _)| named(name)) {
            parts.extend([name.clone(), token.to_string()]);
        }
        parts.extend(named(STRFTIME_NOW).then(|| self.now.to_string()));
        parts.iter().fold(0, |crc, s| {
            crc32c::crc32c_append(crc32c::crc32c_append(crc, &s.len().to_le_bytes()), s.as_bytes())
        })
    }

    /// Renders a conversation; with `add_generation_prompt` the text ends where the model's answer begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let message = |m: &Message| context! { role => &m.role, content => &m.content };
        self.render_values(messages.iter().map(message).collect(), &[], add_generation_prompt)
    }

    /// Renders messages given as a JSON list (tool calls, several parts), with further template variables (`tools`,
    /// `enable_thinking`…) in a JSON object. Both are texts, whose objects keep the order of their keys.
    pub fn render_json(&self, messages: &str, add_generation_prompt: bool, more: &str) -> Result<String> {
        let wrong = |what: &str, e| Error::Chat(format!("the {what} are not valid JSON: {e}"));
        let messages: Vec<Value> = serde_json::from_str(messages).map_err(|e| wrong("messages", e))?;
        let more: BTreeMap<String, Value> = serde_json::from_str(more).map_err(|e| wrong("variables", e))?;
        self.render_values(messages, &Vec::from_iter(more), add_generation_prompt)
    }

    fn render_values(
        &self,
        messages: Vec<Value>,
        more: &[(String, Value)],
        add_generation_prompt: bool,
    ) -> Result<String> {
        let variables = self.variables(messages.into(), more, add_generation_prompt);
        with_stack(|| compile(&self.source(more)?.text)?.render(variables, self.now))
    }

    /// The template that renders a conversation with these variables. It is refused if it needs a token of which nothing is
    /// known: without it the model would read what it has not been trained on.
    fn source(&self, more: &[(String, Value)]) -> Result<&Source, String> {
        let given = |name: &str| more.iter().any(|(given, _)| given == name);
        let tools = more.iter().any(|(name, v)| name == TOOLS && !v.is_none() && !v.is_undefined());
        let source = self.templates.of(tools)?;
        match source.names.iter().find(|name| self.tokens.lacks(name) && !given(name)) {
            None => Ok(source),
            Some(name) => Err(format!(
                "it reads {name}, and no file of the tokenizer's folder says what that is; set {name:?} in \
                 tokenizer_config.json there (null if the tokenizer has none), or write its text into the template"
            )),
        }
    }

    /// The variables of a rendering. As in transformers, those that are given come before special tokens.
    fn variables(&self, messages: Value, more: &[(String, Value)], add_generation_prompt: bool) -> Value {
        // As transformers has it, these are there, and none, where they are not given.
        let ungiven = UNGIVEN.iter().map(|name| (name.to_string(), Value::from(())));
        let tokens = self.tokens.defined().map(|(name, token)| (name.clone(), token.clone()));
        let own = [
            ("messages".to_string(), messages),
            ("add_generation_prompt".to_string(), Value::from(add_generation_prompt)),
        ];
        let all = ungiven.chain(tokens).chain(more.iter().cloned()).chain(own);
        Value::from(all.collect::<BTreeMap<String, Value>>())
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

/// The names that a template reads and does not set itself; what only follows a dot is none.
fn names_of(source: &str) -> Result<Vec<String>, String> {
    let (mut read, mut own) = (BTreeSet::new(), BTreeSet::new());
    let mut before = None;
    // The library's own list of undeclared variables would compute constants first, without a limit on their size.
    for token in tokenize(source, false, SyntaxConfig::default()) {
        let (token, _) = token.map_err(|e| explain(&e))?;
        match (&before, &token) {
            (Some(Token::Dot), _) => {}
            (Some(Token::Ident("set")), Token::Ident(name)) => _ = own.insert(name.to_string()),
            (_, Token::Ident(name)) => _ = read.insert(name.to_string()),
            _ => {}
        }
        before = Some(token);
    }
    Ok(read.difference(&own).cloned().collect())
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
