//! `explain`: the meaning of recipe keys.

use crate::args::Global;
use crate::output::{self, UsageError};
use crate::shell::quote;
use anyhow::Result;
use ferrotron_core::config::{KEYS, KeyInfo, SECTIONS, Suggestion, suggest, suggest_section};
use ferrotron_core::model::preset::PRESETS;
use serde_json::{Value, json};
use std::process::ExitCode;

const AFTER: &str = "\
Examples:
  ferrotron explain                        list every key
  ferrotron explain optimizer              list the keys of a section
  ferrotron explain train.micro_batch      explain one key
  ferrotron explain global_batch_size      find the key for a name of another system
  ferrotron explain --markdown             the reference of every key, docs/reference.md";

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub struct Args {
    /// Key, section, or the name another system uses; without it, list every key
    #[arg(value_name = "KEY")]
    pub key: Option<String>,
    /// Write the reference of every key as Markdown
    #[arg(long, conflicts_with_all = ["key", "json"])]
    pub markdown: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<ExitCode> {
    if args.markdown {
        output::print(&markdown())?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(key) = args.key else {
        let keys: Vec<&KeyInfo> = KEYS.iter().collect();
        return list(&keys, global);
    };
    if let Some(info) = KeyInfo::find(&key) {
        return one(info, None, global);
    }
    let section: Vec<&KeyInfo> = KEYS.iter().filter(|k| k.section == key).collect();
    if !section.is_empty() {
        return list(&section, global);
    }
    let unknown = UsageError::new(format!("there is no key {key:?}; `ferrotron explain` lists every key"));
    match suggest(&key) {
        Suggestion::Known(name) => match KeyInfo::find(name) {
            Some(info) => one(info, Some(&key), global),
            None => Err(unknown.into()),
        },
        Suggestion::Near(names) => Err(unknown.hint(format!("did you mean {}?", names.join(" or "))).into()),
        Suggestion::Advice(advice) => Err(unknown.hint(advice).into()),
        Suggestion::Nothing => match suggest_section(&key) {
            Some(section) => Err(unknown.hint(format!("did you mean the section {section}?")).into()),
            None => Err(unknown.into()),
        },
    }
}

fn as_json(k: &KeyInfo) -> Value {
    json!({
        "key": k.key,
        "type": (k.expects)(),
        "default": k.default(),
        "meaning": k.doc,
        "elsewhere": k.aliases,
    })
}

fn one(k: &KeyInfo, asked: Option<&str>, global: &Global) -> Result<ExitCode> {
    if global.json {
        output::print_json(&as_json(k))?;
        return Ok(ExitCode::SUCCESS);
    }
    let asked = asked.map(|name| format!("{name} is called {} here.\n\n", k.key)).unwrap_or_default();
    let default = default(k);
    let mut rows = vec![
        vec!["  type".into(), (k.expects)()],
        vec!["  default".into(), default],
        vec!["  elsewhere".into(), k.aliases.join(", ")],
    ];
    if k.key == "model.preset" {
        rows.insert(1, vec!["  presets".into(), PRESETS.join(", ")]);
    }
    let rows = output::table(&rows);
    let (in_recipe, on_command_line) = examples(k);
    output::print(&format!(
        "{asked}{}\n  {}\n\n{rows}\n  in a recipe:          [{}]\n                        {} = {in_recipe}\n  on the command line:  --set {on_command_line}\n",
        k.key, k.doc, k.section, k.name,
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// The default as a value of a recipe, and as a word of a shell.
fn examples(k: &KeyInfo) -> (String, String) {
    match k.default().filter(|d| d != "[]") {
        Some(value) => {
            // `--set` takes text without quotes, which a shell would remove.
            let bare = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap_or(&value);
            let word = quote(&format!("{}={bare}", k.key));
            (value, word)
        }
        None => {
            let text = (k.expects)().starts_with("text");
            (if text { "\"…\"" } else { "…" }.into(), format!("{}=…", k.key))
        }
    }
}

fn default(k: &KeyInfo) -> String {
    match k.default() {
        Some(value) if value != "[]" => value,
        _ if k.doc.to_ascii_lowercase().contains("derived") => "derived".into(),
        _ => "unset".into(),
    }
}

fn list(keys: &[&KeyInfo], global: &Global) -> Result<ExitCode> {
    if global.json {
        output::print_json(&keys.iter().map(|k| as_json(k)).collect::<Vec<_>>())?;
        return Ok(ExitCode::SUCCESS);
    }
    // One table over all sections keeps the columns aligned.
    let rows: Vec<_> =
        keys.iter().map(|k| vec![format!("  {}", k.name), default(k), k.doc.to_string()]).collect();
    let text = output::table(&rows);
    let mut out = String::new();
    let mut lines = text.lines();
    for section in SECTIONS {
        let own = keys.iter().filter(|k| k.section == section.name).count();
        if own > 0 {
            out += &format!("[{}] {}\n", section.name, section.doc);
            lines.by_ref().take(own).for_each(|l| out += &format!("{l}\n"));
            out.push('\n');
        }
    }
    output::print(&format!("{out}`ferrotron explain SECTION.KEY` explains one key.\n"))?;
    Ok(ExitCode::SUCCESS)
}

const REFERENCE: &str = "\
# Reference of recipe keys

<!-- Written by `ferrotron explain --markdown > docs/reference.md`; a test compares. -->

Every key of a recipe, by section, with the names that other systems use for it. `ferrotron explain KEY` prints one of them, also by another
system's name. In a recipe a section is a TOML table; on the command line a key is set by `--set section.key=value`.
";

/// A heading for every key, so that links and searches find it.
fn markdown() -> String {
    let mut out = REFERENCE.to_string();
    for section in SECTIONS {
        out += &format!("\n## {}\n{}\n", section.name, escaped(section.doc));
        for k in KEYS.iter().filter(|k| k.section == section.name) {
            let default = match default(k).as_str() {
                word @ ("derived" | "unset") => word.to_string(),
                value => code(value),
            };
            out += &format!("\n### {}\n{}\n\n", k.key, escaped(k.doc));
            out += &format!("- takes {}\n- default: {default}\n", escaped(&(k.expects)()));
            if k.key == "model.preset" {
                let names: Vec<String> = PRESETS.iter().map(|name| code(name)).collect();
                out += &format!("- presets: {}\n", names.join(", "));
            }
            if !k.aliases.is_empty() {
                let names: Vec<String> = k.aliases.iter().map(|name| code(name)).collect();
                out += &format!("- elsewhere: {}\n", names.join(", "));
            }
        }
    }
    out
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

/// Text in which Markdown sees no emphasis and no HTML.
fn escaped(text: &str) -> String {
    text.replace('*', "\\*").replace('<', "&lt;")
}
