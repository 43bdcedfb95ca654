//! The tokenizer and the chat template of a model, through the runs that it was trained from.

use crate::chat::TEMPLATE;
use crate::chat_encoder::NO_TEMPLATE;
use crate::error::Result;
use crate::model_source::{COMPANIONS, RunTemplate};
use crate::tokenizer::Tokenizer;
use crate::weights::{ModelLocation, locate_model};
use ferrotron_core::config::{Config, Recipe};
use ferrotron_core::train::{CHAT_TEMPLATE, CONFIG};
use std::path::{Path, PathBuf};

/// Most runs, each trained from the one before, through which a tokenizer is looked for.
pub(crate) const MAX_RUNS: usize = 100;

/// The configuration of the run that a checkpoint belongs to.
pub(crate) fn run_config(place: &ModelLocation) -> Result<Option<Config>> {
    match place {
        ModelLocation::Checkpoint { run: Some(run), .. } if run.join(CONFIG).is_file() => {
            Ok(Some(Recipe::read_stored(&run.join(CONFIG))?.config))
        }
        _ => Ok(None),
    }
}

/// The chat template that a run names: the text that was kept with the run, otherwise the file. Of adapters that have a template and
/// their base model's tokenizer, that template.
pub(crate) fn template_of(place: &ModelLocation, config: Option<&Config>) -> Option<RunTemplate> {
    match place {
        ModelLocation::Checkpoint { run: Some(run), .. } => {
            let named = config?.data.chat_template.as_ref()?;
            Some(match run.join(CHAT_TEMPLATE) {
                _ if named == NO_TEMPLATE => RunTemplate::None,
                kept if kept.is_file() => RunTemplate::File(kept),
                _ => RunTemplate::File(PathBuf::from(named)),
            })
        }
        ModelLocation::Peft { folder, .. } if !has_tokenizer(folder) => {
            Some(folder.join(TEMPLATE)).filter(|file| file.is_file()).map(RunTemplate::File)
        }
        _ => None,
    }
}

/// The folder or file of a model's tokenizer: its own, the one converted with it, the one that its recipe names, or that of
/// the model that it was trained from.
pub(crate) fn tokenizer_of(place: &ModelLocation, config: Option<&Config>, runs: usize) -> Option<PathBuf> {
    match place {
        ModelLocation::HuggingFace(dir) => Some(dir.clone()),
        ModelLocation::Peft { folder, base } => {
            Some(if has_tokenizer(folder) { folder.clone() } else { base.clone() })
        }
        ModelLocation::Checkpoint { folder, .. } => {
            let named = config.and_then(|c| c.data.tokenizer.as_ref()).map(PathBuf::from);
            let converted = || Some(folder.join(COMPANIONS)).filter(|dir| has_tokenizer(dir));
            let first = || tokenizer_of_start(Path::new(config?.model.hf.as_ref()?), runs);
            named.or_else(converted).or_else(first)
        }
    }
}

/// The tokenizer of the model in `path` that a run starts from, if there is one; it may be another run's model.
pub(crate) fn tokenizer_of_start(path: &Path, runs: usize) -> Option<PathBuf> {
    let own = [path.to_path_buf(), path.join(COMPANIONS)];
    own.into_iter().find(|dir| has_tokenizer(dir)).or_else(|| {
        let (runs, place) = (runs.checked_sub(1)?, locate_model(path).ok()?);
        let found = tokenizer_of(&place, run_config(&place).ok()?.as_ref(), runs)?;
        // One that is named and gone is an error where it is opened.
        (!found.is_dir() || has_tokenizer(&found)).then_some(found)
    })
}

/// The chat template that counts before that of [`tokenizer_of_start`]'s folder.
pub(crate) fn template_of_start(path: &Path, runs: usize) -> Result<Option<RunTemplate>> {
    if has_tokenizer(path) {
        return Ok(None);
    }
    let Ok(place) = locate_model(path) else { return Ok(None) };
    let config = run_config(&place)?;
    match (template_of(&place, config.as_ref()), config, runs.checked_sub(1)) {
        (None, Some(config), Some(runs)) if config.data.tokenizer.is_none() => match config.model.hf {
            Some(hf) => template_of_start(Path::new(&hf), runs),
            None => Ok(None),
        },
        (found, ..) => Ok(found),
    }
}

fn has_tokenizer(dir: &Path) -> bool {
    dir.join("tokenizer.json").is_file()
}

/// Opens a tokenizer by the folder of its `tokenizer.json`, or by a file of that format.
pub fn tokenizer_at(path: &Path) -> Result<Tokenizer> {
    // The files beside a tokenizer.json name the beginning and end tokens.
    match path.parent().filter(|_| path.is_file() && path.ends_with("tokenizer.json")) {
        Some(dir) if dir.as_os_str().is_empty() => Tokenizer::from_dir(Path::new(".")),
        Some(dir) => Tokenizer::from_dir(dir),
        None if path.is_dir() || !path.exists() => Tokenizer::from_dir(path),
        None => Tokenizer::from_file(path),
    }
}
