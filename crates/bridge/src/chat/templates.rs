//! The chat templates of a model: one, or several by name, of which transformers' `get_chat_template` chooses.

use super::{MAX_SOURCE, compile, generation, names_of, with_stack};
use crate::error::{Error, Result};
use crate::json::{parse_object, read_text};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The file of a folder's template, or of the one called [`DEFAULT`].
pub(crate) const TEMPLATE: &str = "chat_template.jinja";
/// Folder of the others, each in `NAME.jinja`.
pub(crate) const NAMED_TEMPLATES: &str = "additional_chat_templates";
const ENDING: &str = ".jinja";

/// The template of conversations with tools.
const TOOL_USE: &str = "tool_use";
/// The template of all others, and of these where there is no other; an only template is called so.
const DEFAULT: &str = "default";

/// Templates by name, before any is read.
type Texts = BTreeMap<String, Text>;

enum Text {
    File(PathBuf),
    Read(String),
}

impl Text {
    fn source(&self) -> Result<Source> {
        match self {
            Text::File(path) => Source::new(&read_text(path)?),
            Text::Read(text) => Source::new(text),
        }
    }
}

/// One template, checked.
#[derive(Debug)]
pub(super) struct Source {
    /// Without `{% generation %}` tags.
    pub text: String,
    /// With marks around what `{% generation %}` blocks print, if there are any.
    pub marked: Option<String>,
    /// The names of variables and functions that it reads.
    pub names: Vec<String>,
}

impl Source {
    fn new(source: &str) -> Result<Source> {
        if source.len() > MAX_SOURCE {
            return Err(Error::Chat(format!("it has {} bytes, more than {MAX_SOURCE}", source.len())));
        }
        let (text, marked) = (generation::removed(source), generation::marked(source));
        for checked in [Some(&text), marked.as_ref()].into_iter().flatten() {
            with_stack(|| compile(checked).map(drop))?;
        }
        let names = names_of(&text).map_err(Error::Chat)?;
        Ok(Source { text, marked, names })
    }

    /// What `{% generation %}` has printed marks around, if anything.
    pub fn whole(&self) -> &str {
        self.marked.as_ref().unwrap_or(&self.text)
    }
}

/// The templates that conversations choose from. Others are not read: they may need what is not supported.
#[derive(Debug)]
pub(super) struct Templates {
    default: Option<Source>,
    /// Conversations without tools do not need it, so that what is wrong with it is told where it is chosen.
    tool_use: Option<Result<Source, String>>,
    /// The names of all.
    names: Vec<String>,
}

impl Templates {
    /// A single template, which renders every conversation.
    pub fn one(source: &str) -> Result<Templates> {
        Ok(Templates { default: Some(Source::new(source)?), tool_use: None, names: vec![DEFAULT.into()] })
    }

    /// The templates of a folder: its files, otherwise those in `tokenizer_config.json` or `chat_template.json`. None if the
    /// folder has none.
    pub fn of_folder(dir: &Path) -> Result<Option<Templates>> {
        let mut texts = texts_of_files(dir)?;
        for name in ["tokenizer_config.json", "chat_template.json"] {
            let path = dir.join(name);
            if texts.is_empty() && path.exists() {
                texts = texts_of_json(&read_text(&path)?, &path.display().to_string())?;
            }
        }
        let names: Vec<String> = texts.keys().cloned().collect();
        let alone = names.len() == 1;
        let wrong = |name: &str, e: Error| match e {
            Error::Chat(what) if alone => what,
            Error::Chat(what) => format!("of its templates that called {name:?}: {what}"),
            other => other.to_string(),
        };
        let source = |name: &str| texts.get(name).map(|text| text.source().map_err(|e| wrong(name, e)));
        let default = source(DEFAULT).transpose().map_err(Error::Chat)?;
        Ok((!names.is_empty()).then_some(Templates { default, tool_use: source(TOOL_USE), names }))
    }

    /// The template of a conversation with or without tools.
    pub fn of(&self, tools: bool) -> Result<&Source, String> {
        if let Some(own) = self.tool_use.as_ref().filter(|_| tools) {
            return own.as_ref().map_err(String::clone);
        }
        self.default.as_ref().ok_or_else(|| {
            format!(
                "the model's templates are called {}, and none {DEFAULT:?}, so that none is chosen for a conversation {} tools; \
                 write the one to use into {TEMPLATE} of its folder, or give it as a file (--chat-template, in training \
                 data.chat_template)",
                self.names.join(", "),
                if tools { "with" } else { "without" }
            )
        })
    }

    /// All that may be chosen, with their names.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &Source)> {
        let tool_use = self.tool_use.as_ref().and_then(|source| source.as_ref().ok());
        let named = [(DEFAULT, self.default.as_ref()), (TOOL_USE, tool_use)];
        named.into_iter().filter_map(|(name, source)| Some((name, source?)))
    }
}

/// Templates that are files of their own.
fn texts_of_files(dir: &Path) -> Result<Texts> {
    let mut texts = Texts::new();
    let own = dir.join(TEMPLATE);
    if own.exists() {
        texts.insert(DEFAULT.into(), Text::File(own));
    }
    for name in named_files(dir)? {
        let stem = name.strip_suffix(ENDING).unwrap_or(&name);
        texts.insert(stem.into(), Text::File(dir.join(NAMED_TEMPLATES).join(&name)));
    }
    Ok(texts)
}

/// The names of the files in a folder's [`NAMED_TEMPLATES`] that hold templates.
pub(crate) fn named_files(dir: &Path) -> Result<Vec<String>> {
    let dir = dir.join(NAMED_TEMPLATES);
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let list = |e| Error::io(&dir, "list", e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&dir).map_err(list)? {
        let entry = entry.map_err(list)?;
        let name = entry.file_name();
        let name = name.to_str().filter(|name| is_template(name) && entry.path().is_file());
        names.extend(name.map(String::from));
    }
    names.sort();
    Ok(names)
}

/// True for the names of such files.
pub(crate) fn is_template(name: &str) -> bool {
    name.strip_suffix(ENDING).is_some_and(|stem| !stem.is_empty())
}

/// Templates under the key `chat_template` of a JSON file: one, or several by name.
fn texts_of_json(text: &str, origin: &str) -> Result<Texts> {
    const KEY: &str = "chat_template";
    let map = parse_object(text, origin)?;
    let pair = |name: &str, text: &Json| Some((name.to_string(), Text::Read(text.as_str()?.into())));
    let found = match map.get(KEY) {
        None | Some(Json::Null) => Some(Texts::new()),
        Some(Json::String(one)) => Some(Texts::from([(DEFAULT.into(), Text::Read(one.clone()))])),
        Some(Json::Array(list)) => {
            list.iter().map(|t| pair(t.get("name")?.as_str()?, t.get("template")?)).collect()
        }
        Some(Json::Object(map)) => map.iter().map(|(name, text)| pair(name, text)).collect(),
        Some(_) => None,
    };
    found.ok_or_else(|| {
        let what = "must be a template, or a list of objects with \"name\" and \"template\"";
        Error::config(origin, format!("`{KEY}` {what}"))
    })
}
