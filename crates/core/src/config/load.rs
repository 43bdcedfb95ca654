//! Layers of a configuration: defaults, then a recipe file, then `--set` values. The origin of each value is recorded,
//! so that an error names file, line and key.

use super::renamed;
use super::suggest::{Suggestion, suggest, suggest_section};
use super::{Config, KEYS, KeyInfo, RECIPES, SECTIONS, nearest};
use crate::error::{Error, Result};
use crate::events;
use crate::fs::read_limited;
use std::collections::BTreeMap;
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// The resolved configuration inside a run folder.
pub const STORED_CONFIG: &str = "config.toml";

/// Longest recipe file.
const MAX_BYTES: u64 = 16 << 20;

/// Pairs of exclusive keys. Setting one clears the other where an earlier layer set it; one layer cannot set both.
const EITHER: &[(&str, &str)] = &[
    ("train.steps", "train.tokens"),
    ("train.steps", "train.epochs"),
    ("train.tokens", "train.epochs"),
    ("model.preset", "model.hf"),
];

/// A configuration before it is resolved: the values of all layers and their origins.
#[derive(Clone, Debug, Default)]
pub struct Recipe {
    /// The name of the recipe or the stem of its file; empty for bare defaults.
    pub name: String,
    /// The values of the layers added so far.
    pub config: Config,
    origins: BTreeMap<&'static str, Origin>,
    layers: usize,
    /// The first layer is a recipe of this program, not a user's file.
    built_in: bool,
    /// The first layer is what a run stored, perhaps one of an earlier version.
    stored: bool,
}

/// The origin of a value.
#[derive(Clone, Debug)]
struct Origin {
    file: String,
    line: Option<usize>,
    layer: usize,
}

impl Recipe {
    /// A recipe by name, or a TOML file by path. A recipe takes precedence over a file of the same name.
    pub fn open(name_or_path: &str) -> Result<Recipe> {
        if RECIPES.iter().any(|r| r.name == name_or_path) {
            return Recipe::named(name_or_path);
        }
        let looks_like_file = name_or_path.ends_with(".toml") || name_or_path.contains(['/', '\\']);
        if looks_like_file || Path::new(name_or_path).is_file() {
            Recipe::read(Path::new(name_or_path))
        } else {
            Recipe::named(name_or_path)
        }
    }

    /// A built-in recipe.
    pub fn named(name: &str) -> Result<Recipe> {
        let Some(found) = RECIPES.iter().find(|r| r.name == name) else {
            let near = nearest(name, RECIPES.iter().map(|r| r.name));
            let hint = match near {
                Some(near) => format!("did you mean {near}?"),
                None => {
                    format!("recipes are {}", RECIPES.iter().map(|r| r.name).collect::<Vec<_>>().join(", "))
                }
            };
            let what = format!("no recipe or file is called {name:?}; `ferrotron recipes` lists the recipes");
            return Err(Error::Config { file: None, line: None, key: None, what, hint: Some(hint) });
        };
        let mut recipe = Recipe { name: name.into(), built_in: true, ..Recipe::default() };
        recipe.add(&format!("recipe {name}"), found.text)?;
        Ok(recipe)
    }

    /// Reads a recipe file. The `config.toml` of a run folder may be one; old keys in it are translated.
    pub fn read(path: &Path) -> Result<Recipe> {
        if !path.exists() {
            let (file, what) = (Some(path.display().to_string()), "there is no such file".into());
            let hint = Some("`ferrotron recipes` lists the built-in recipes".into());
            return Err(Error::Config { file, line: None, key: None, what, hint });
        }
        let is_stored = path.file_name().is_some_and(|name| name == STORED_CONFIG)
            && path.parent().is_some_and(|run| run.join(events::FILE_NAME).is_file());
        Recipe::read_as(path, if is_stored { Source::Stored } else { Source::Written })
    }

    /// Reads a configuration that a run stored, this version's or an earlier one's: renamed keys are translated.
    pub fn read_stored(path: &Path) -> Result<Recipe> {
        Recipe::read_as(path, Source::Stored)
    }

    fn read_as(path: &Path, source: Source) -> Result<Recipe> {
        let shown = path.display().to_string();
        let bytes = read_limited(path, MAX_BYTES)?;
        let text = String::from_utf8(bytes).map_err(|e| {
            let line =
                e.as_bytes()[..e.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
            let what = "the file is not UTF-8 text; a recipe is a TOML file".into();
            Error::Config { file: Some(shown.clone()), line: Some(line), key: None, what, hint: None }
        })?;
        let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let stored = matches!(source, Source::Stored);
        let mut recipe = Recipe { name, stored, ..Recipe::default() };
        recipe.add_from(&shown, &text, source)?;
        Ok(recipe)
    }

    /// Adds a layer, TOML text whose values replace earlier ones; `file` is its name in error messages.
    pub fn add(&mut self, file: &str, text: &str) -> Result<()> {
        self.add_from(file, text, Source::Written)
    }

    fn add_from(&mut self, file: &str, text: &str, source: Source) -> Result<()> {
        let line_at =
            |at: usize| text.as_bytes()[..at.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1;
        let table = DeTable::parse(text).map_err(|e| Error::Config {
            file: Some(file.into()),
            line: e.span().map(|s| line_at(s.start)),
            key: None,
            what: format!("not valid TOML: {}", one_line(e.message())),
            hint: None,
        })?;
        let mut entries = Vec::new();
        flatten(table.get_ref(), "", &mut entries);
        // Tables come sorted by name; errors should come in the order of the file.
        entries.sort_by_key(|e| e.at);
        self.layers += 1;
        for entry in entries {
            let line = Some(line_at(entry.at));
            let translated = match (&entry.value, source) {
                (Entry::Value(value), Source::Stored) => renamed::translate(&entry.key, value),
                _ => None,
            };
            match translated {
                None => self.put(file, line, &entry.key, entry.value)?,
                Some(list) => list
                    .into_iter()
                    .try_for_each(|(key, value)| self.put(file, line, key, Entry::Value(value)))?,
            }
        }
        if let Source::Stored = source {
            // A run that stored no chunk computed all logits at once, and resumes so.
            self.config.train.loss_chunk.get_or_insert(0);
            // Runs stored the score function of the architecture where Sinkhorn trained with another; it is derived again.
            if self.config.moe.balance.0.iter().any(|word| word == "sinkhorn")
                && self.config.model.hf.is_none()
            {
                (self.config.moe.score_function, self.config.moe.pre_softmax) = (None, None);
            }
        }
        Ok(())
    }

    /// A recipe with all values of a configuration, to change some of them.
    pub fn of_config(config: Config) -> Recipe {
        Recipe { config, ..Recipe::default() }
    }

    /// Sets one `key=value` as a layer of its own. The value is TOML; what is not valid TOML is taken as a string.
    pub fn set(&mut self, assignment: &str) -> Result<()> {
        self.set_all(&[assignment])
    }

    /// Sets every `key=value` of a command line as one layer: of two exclusive keys, neither is the later one.
    pub fn set_all<S: AsRef<str>>(&mut self, assignments: &[S]) -> Result<()> {
        self.layers += 1;
        assignments.iter().try_for_each(|a| self.assign(a.as_ref()))
    }

    fn assign(&mut self, assignment: &str) -> Result<()> {
        let Some((key, text)) = assignment.split_once('=') else {
            let what = format!("{assignment:?} is not key=value; write for example --set train.steps=100");
            return Err(Error::Config {
                file: Some("--set".into()),
                line: None,
                key: None,
                what,
                hint: None,
            });
        };
        let text = text.trim();
        let value = text.parse::<toml::Value>().unwrap_or_else(|_| toml::Value::String(text.into()));
        self.put("--set", None, key.trim(), Entry::Value(value))
    }

    /// Sets one value of the command line, already typed.
    pub fn put_key(&mut self, key: &str, value: impl Into<toml::Value>) -> Result<()> {
        self.layers += 1;
        self.put("--set", None, key, Entry::Value(value.into()))
    }

    fn put(&mut self, file: &str, line: Option<usize>, key: &str, entry: Entry) -> Result<()> {
        let fail = |what: String, hint: Option<String>| {
            Err(Error::Config { file: Some(file.into()), line, key: Some(key.into()), what, hint })
        };
        let value = match entry {
            Entry::Value(value) => value,
            Entry::Number(text) => return fail(format!("the number {text} is out of range"), None),
            Entry::Section if SECTIONS.iter().any(|s| s.name == key) => return Ok(()),
            Entry::Section => {
                let hint = suggest_section(key).map(|s| format!("did you mean the section [{s}]?"));
                let names = SECTIONS.iter().map(|s| s.name).collect::<Vec<_>>().join(", ");
                return fail(format!("unknown section; the sections are {names}"), hint);
            }
        };
        let Some(info) = KeyInfo::find(key) else {
            if let Some(new) = renamed::replacement(key, &value) {
                let hint = renamed::new_name(key).map(|k| format!("`ferrotron explain {k}` says more"));
                return fail(format!("unknown key; {key} is now {new}"), hint);
            }
            let (what, hint) = unknown(key);
            return fail(what, Some(hint));
        };
        if let Err(what) = self.config.put(info, value) {
            return fail(what, None);
        }
        for (a, b) in EITHER {
            let other = if info.key == *a {
                *b
            } else if info.key == *b {
                *a
            } else {
                continue;
            };
            match self.origins.get(other) {
                Some(origin) if origin.layer == self.layers => {
                    return fail(format!("{other} is set as well; keep one of the two"), None);
                }
                Some(_) => {
                    self.origins.remove(other);
                    KeyInfo::find(other).iter().for_each(|k| self.config.clear(k));
                }
                None => {}
            }
        }
        self.origins.insert(info.key, Origin { file: file.into(), line, layer: self.layers });
        Ok(())
    }

    /// Whether a file or the command line has set this key.
    pub fn is_set(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// Whether a recipe of this program has set this key, and no user has.
    pub(super) fn is_built_in(&self, key: &str) -> bool {
        self.built_in && self.origins.get(key).is_some_and(|o| o.layer == 1)
    }

    /// True if the user has set a key, in a file or on the command line.
    pub fn is_users(&self, key: &str) -> bool {
        let given = self.built_in || self.stored;
        self.origins.get(key).is_some_and(|o| !given || o.layer > 1)
    }

    /// An error about a key's value, with the file and line that set it.
    pub(super) fn refuse<T>(&self, key: &str, what: impl Into<String>) -> Result<T> {
        Err(self.error(key, what, None))
    }

    pub(super) fn error(&self, key: &str, what: impl Into<String>, hint: Option<String>) -> Error {
        let origin = self.origins.get(key);
        Error::Config {
            file: origin.map(|o| o.file.clone()),
            line: origin.and_then(|o| o.line),
            key: Some(key.into()),
            what: what.into(),
            hint,
        }
    }
}

/// The author of a configuration file.
#[derive(Clone, Copy)]
enum Source {
    /// A user, by hand: a renamed key is an error that gives the new spelling.
    Written,
    /// A run, by this version or an earlier one: renamed keys are translated.
    Stored,
}

/// The value at a key of the file.
enum Entry {
    Value(toml::Value),
    /// A number that does not fit in 64 bits.
    Number(String),
    /// A table in place of a key.
    Section,
}

struct Found {
    at: usize,
    key: String,
    value: Entry,
}

/// Flattens nested tables into dotted keys. A table at a known key is that key's value; an unknown section is reported
/// as one error, whatever it holds.
fn flatten(table: &DeTable<'_>, prefix: &str, out: &mut Vec<Found>) {
    for (name, value) in table {
        let key = format!("{prefix}{}", name.get_ref());
        let at = name.span().start;
        match value.get_ref() {
            DeValue::Table(inner) if !KEYS.iter().any(|k| k.key == key) => {
                if prefix.is_empty() && !SECTIONS.iter().any(|s| s.name == key) {
                    out.push(Found { at, key, value: Entry::Section });
                } else {
                    flatten(inner, &format!("{key}."), out);
                }
            }
            other => {
                let value = plain(other).map_or_else(Entry::Number, Entry::Value);
                out.push(Found { at, key, value });
            }
        }
    }
}

/// Converts a parsed value, dropping its source spans; the error is a number that does not fit in 64 bits.
fn plain(value: &DeValue<'_>) -> std::result::Result<toml::Value, String> {
    Ok(match value {
        DeValue::String(s) => toml::Value::String(s.to_string()),
        DeValue::Integer(i) => {
            let digits = i.as_str();
            toml::Value::Integer(i64::from_str_radix(digits, i.radix()).map_err(|_| digits.to_string())?)
        }
        DeValue::Float(x) => toml::Value::Float(x.as_str().parse().map_err(|_| x.as_str().to_string())?),
        DeValue::Boolean(b) => toml::Value::Boolean(*b),
        DeValue::Datetime(d) => toml::Value::Datetime(*d),
        DeValue::Array(items) => toml::Value::Array(
            items.iter().map(|v| plain(v.get_ref())).collect::<std::result::Result<_, _>>()?,
        ),
        DeValue::Table(table) => toml::Value::Table(
            table
                .iter()
                .map(|(k, v)| Ok((k.get_ref().to_string(), plain(v.get_ref())?)))
                .collect::<std::result::Result<_, String>>()?,
        ),
    })
}

/// Error message and hint for an unknown key.
pub(super) fn unknown(key: &str) -> (String, String) {
    let every = "`ferrotron explain` lists every key";
    match suggest(key) {
        Suggestion::Known(k) => {
            (format!("unknown key; here it is {k}"), format!("`ferrotron explain {k}` says more"))
        }
        Suggestion::Near(list) => (format!("unknown key; did you mean {}?", list.join(" or ")), every.into()),
        Suggestion::Advice(advice) => (format!("unknown key; {advice}"), every.into()),
        Suggestion::Nothing => {
            (format!("unknown key; {every}"), format!("there are {} keys, all with defaults", KEYS.len()))
        }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
