//! The files beside the weights of a run or of adapters that are converted: those that `chat` uses the model with.

use crate::chat::TEMPLATE;
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::generation_config::{GENERATION_CONFIG, generation_config};
use crate::json::read_text;
use crate::model_source::{ModelSource, RunTemplate};
use crate::tokenizer::byte_tokenizer_json;
use std::path::{Path, PathBuf};

/// The files beside the weights.
pub(crate) struct BesideWeights<'a> {
    /// The Hugging Face folder that the output follows, if there is one.
    pub followed: Option<&'a Path>,
    /// True if that is the user's choice, whose tokenizer is then the output's, too.
    pub like: bool,
    /// The folder of the tokenizer's files, where it is another.
    pub tokenizer: Option<PathBuf>,
}

impl<'a> BesideWeights<'a> {
    /// Finds the folders. Where a model is followed, a tokenizer that was another and is gone must not be replaced by that model's.
    pub fn of(found: &ModelSource, followed: Option<&'a Path>, like: bool) -> Result<Self> {
        if like {
            return Ok(Self { followed, like, tokenizer: None });
        }
        if let Some(gone) = found.tokenizer_path().filter(|path| followed.is_some() && !path.exists()) {
            let what = "is the tokenizer that the model was trained with, and does not exist; put it there, or name a Hugging Face \
                        folder whose files the output is to have with --like";
            return Err(Error::absent(&gone, what));
        }
        Ok(Self {
            followed,
            like,
            tokenizer: found.companions().filter(|dir| Some(dir.as_path()) != followed),
        })
    }

    /// Files by name and text, which are written in place of those of the folders. `config` is that of the model.
    pub fn texts(&self, found: &ModelSource, config: &HfConfig) -> Result<Vec<(&'static str, String)>> {
        let tokenizer = match found.tokenizer_path() {
            _ if self.like => None,
            Some(file) if file.is_file() => Some(read_text(&file)?),
            None if self.followed.is_none() && found.reads_bytes() && found.model().vocab >= 256 => {
                Some(byte_tokenizer_json())
            }
            _ => None,
        };
        let template = found.run_template();
        let template = template.as_ref().map(RunTemplate::file).transpose()?.flatten();
        let texts = [
            ("tokenizer.json", tokenizer),
            (GENERATION_CONFIG, generation_config(found, self, config)?),
            // The model is to be prompted with the template that it was trained with.
            (TEMPLATE, template.map(read_text).transpose()?),
        ];
        Ok(texts.into_iter().filter_map(|(name, text)| Some((name, text?))).collect())
    }
}
