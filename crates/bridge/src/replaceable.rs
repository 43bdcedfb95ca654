//! Recognizes folders that a conversion wrote, so that nothing else is ever replaced.

use crate::chat::{NAMED_TEMPLATES, is_template};
use crate::companions::is_companion;
use crate::config::HfConfig;
use crate::custom_code::code_files;
use crate::error::{Error, Result};
use crate::model_source::COMPANIONS;
use crate::peft::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, PeftConfig};
use crate::shards::{INDEX, SINGLE, shard_names};
use ferrotron_core::checkpoint::listed_files;
use ferrotron_core::fs::is_regular_file;
use ferrotron_core::tensorfile::TensorFile;
use std::collections::BTreeSet;
use std::path::Path;

/// What a conversion writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputKind {
    Checkpoint,
    HuggingFace,
    Peft,
}

/// Fails unless the folder is what a conversion of this kind writes, by its content: a checkpoint's manifest and the
/// files it lists, or a model's configuration and weights; and nothing in it but these, the tokenizer's files and
/// the code that they name, all of them regular files.
pub(crate) fn check_replaceable(dir: &Path, kind: OutputKind) -> Result<()> {
    let refuse = |what: String| {
        let what = format!("{what}, so it is not replaced; choose another folder or remove it yourself");
        Err(Error::Output { path: dir.into(), what })
    };
    let own = match kind {
        OutputKind::Checkpoint => match listed_files(dir) {
            Ok(listed) if listed.training => {
                return refuse("is a checkpoint of a run, with optimizer state".into());
            }
            Ok(listed) => Ok(listed.files),
            Err(e) => Err(format!("is not a checkpoint ({e})")),
        },
        OutputKind::HuggingFace => hugging_face_files(dir),
        OutputKind::Peft => peft_files(dir),
    };
    let (own, reason) = match own {
        Ok(own) => (own, String::new()),
        Err(reason) => (Vec::new(), reason),
    };
    let code = |dir: &Path| code_files(dir, dir).unwrap_or_default();
    let mut own: BTreeSet<String> = own.into_iter().collect();
    if !own.is_empty() && kind != OutputKind::Checkpoint {
        own.extend(code(dir));
    }
    let mut foreign = Vec::new();
    for name in names(dir)? {
        let path = dir.join(&name);
        match kind {
            _ if own.contains(&name) && is_regular_file(&path) => {}
            OutputKind::HuggingFace | OutputKind::Peft
                if !own.is_empty() && is_companion(&name) && is_regular_file(&path) => {}
            OutputKind::HuggingFace | OutputKind::Peft
                if !own.is_empty() && name == NAMED_TEMPLATES && is_folder(&path) =>
            {
                foreign.extend(no_templates(dir)?);
            }
            OutputKind::Checkpoint if !own.is_empty() && name == COMPANIONS && is_folder(&path) => {
                let code = code(&path);
                let known = |n: &String| n == "config.json" || is_companion(n) || code.contains(n);
                let mut strange = Vec::new();
                for n in names(&path)? {
                    let inner = path.join(&n);
                    if n == NAMED_TEMPLATES && is_folder(&inner) {
                        strange.extend(no_templates(&path)?);
                    } else if !known(&n) || !is_regular_file(&inner) {
                        strange.push(n);
                    }
                }
                foreign.extend(strange.into_iter().map(|n| format!("{COMPANIONS}/{n}")));
            }
            _ => foreign.push(name),
        }
    }
    match foreign.is_empty() {
        true => Ok(()),
        false if reason.is_empty() => {
            refuse(format!("holds what no conversion has written: {}", list(&foreign)))
        }
        false => refuse(format!("{reason} and holds {}", list(&foreign))),
    }
}

/// The configuration and weight files of a Hugging Face folder, or why it is none.
fn hugging_face_files(dir: &Path) -> Result<Vec<String>, String> {
    let wrong = |e: Error| format!("is not a Hugging Face folder ({e})");
    HfConfig::from_dir(dir).map_err(wrong)?;
    let mut files = vec![SINGLE.to_string()];
    if !dir.join(SINGLE).exists() {
        files = shard_names(dir).map_err(wrong)?;
    }
    for file in &files {
        TensorFile::open(&dir.join(file)).map_err(|e| wrong(e.into()))?;
    }
    files.extend(["config.json", INDEX].map(String::from));
    Ok(files)
}

/// The files of a PEFT folder, or why it is none.
fn peft_files(dir: &Path) -> Result<Vec<String>, String> {
    let wrong = |e: Error| format!("is not a PEFT folder ({e})");
    PeftConfig::from_dir(dir).map_err(wrong)?;
    TensorFile::open(&dir.join(ADAPTER_WEIGHTS)).map_err(|e| wrong(e.into()))?;
    Ok([ADAPTER_CONFIG, ADAPTER_WEIGHTS].map(String::from).to_vec())
}

/// What lies in a folder's [`NAMED_TEMPLATES`] and is no template.
fn no_templates(dir: &Path) -> Result<Vec<String>> {
    let folder = dir.join(NAMED_TEMPLATES);
    let strange = |n: &String| !is_template(n) || !is_regular_file(&folder.join(n));
    Ok(names(&folder)?.into_iter().filter(strange).map(|n| format!("{NAMED_TEMPLATES}/{n}")).collect())
}

fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// The names in a folder, sorted.
fn names(dir: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(dir).map_err(|e| Error::io(dir, "list", e))?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(|e| Error::io(dir, "list", e))?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// The first few names.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = names.iter().take(SHOWN).map(|n| format!("{n:?}")).collect();
    let more = names.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    shown.join(", ") + &more
}
