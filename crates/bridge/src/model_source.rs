//! A model with what text generation needs: weights, tokenizer, stop tokens and chat template.

use crate::chat::{ChatTemplate, Message};
use crate::dataset::folder_of;
use crate::error::{Error, Result};
use crate::forward::check_dtype;
use crate::generation_config::GENERATION_CONFIG;
use crate::logical::load_dtype;
use crate::tokenizer::Tokenizer;
pub use crate::tokenizer_of_model::tokenizer_at;
use crate::tokenizer_of_model::{MAX_RUNS, run_config, template_of, tokenizer_of};
use crate::weights::{ModelLocation, Weights, open_model, to_core};
use ferrotron_core::config::Config;
use ferrotron_core::model::{Model, ModelConfig, PipelineLayout};
use ferrotron_engine::Rank;
use ferrotron_tensor::DType;
use std::path::{Path, PathBuf};

/// Folder inside a converted checkpoint for the files that the Hugging Face folder had beside its weights.
pub(crate) const COMPANIONS: &str = "hf";

/// The files that name a model's beginning and end tokens by their ids.
const GENERATION_FILES: [&str; 2] = [GENERATION_CONFIG, "config.json"];

/// A model that has been found and checked, but not loaded.
#[derive(Debug)]
pub struct ModelSource {
    /// Its location.
    pub place: ModelLocation,
    /// Its weights.
    pub weights: Weights,
    /// The configuration of the run it belongs to, if any.
    pub config: Option<Config>,
}

/// Tokenization for a model: text to prompt ids and generated ids to text.
#[derive(Debug)]
pub struct TextIo {
    /// Encodes and decodes text.
    pub tokenizer: Tokenizer,
    /// The token to start from without a prompt: beginning of text, otherwise end of text, otherwise a newline.
    pub start: Option<i32>,
    /// Ids that end generation.
    pub stop: Vec<i32>,
    /// The folder of the model's chat template, which is read only when it is needed.
    pub chat_dir: Option<PathBuf>,
    /// The `data.chat_template` of the run that the model is of, or the template of its adapters: it counts before the folder's.
    pub run_template: Option<RunTemplate>,
}

/// The chat template that a run or adapters were trained with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunTemplate {
    /// It asked for none.
    None,
    /// This file.
    File(PathBuf),
}

impl ModelSource {
    /// Finds and checks a Hugging Face folder, a checkpoint, or the newest checkpoint of a run folder.
    pub fn open(path: &Path) -> Result<ModelSource> {
        let (place, weights) = open_model(path)?;
        let config = run_config(&place)?;
        Ok(ModelSource { place, weights, config })
    }

    /// The architecture.
    pub fn model(&self) -> &ModelConfig {
        self.weights.model()
    }

    /// The dtype to compute in: `given`, if the model can compute in it; otherwise its own, [`ModelSource::dtype`].
    pub fn compute_dtype(&self, given: Option<DType>) -> Result<DType> {
        let Some(dtype) = given else { return Ok(self.dtype()) };
        check_dtype(self.model(), dtype).map(|()| dtype)
    }

    /// The compute precision: bf16 if the model was trained in it, otherwise f32.
    pub fn dtype(&self) -> DType {
        let known = match (&self.weights, &self.config) {
            (_, Some(config)) => Some(config.precision.dtype.dtype()),
            (Weights::HuggingFace(checkpoint), _) => {
                checkpoint.config().dtype().or(self.weights.common_dtype())
            }
            _ => self.weights.common_dtype(),
        };
        if known == Some(DType::BF16) { DType::BF16 } else { DType::F32 }
    }

    /// The folder or file of its tokenizer: its own, the one converted with it, or the one its recipe names.
    pub fn tokenizer_path(&self) -> Option<PathBuf> {
        tokenizer_of(&self.place, self.config.as_ref(), MAX_RUNS)
    }

    /// The folder with the files that belong to the model beside its weights, if there is one.
    pub(crate) fn companions(&self) -> Option<PathBuf> {
        let own = self.folder().join(COMPANIONS);
        if own.is_dir() {
            return Some(own);
        }
        self.tokenizer_path().and_then(|path| folder_of(&path)).filter(|dir| dir.is_dir())
    }

    /// True if its tokens are bytes: according to its recipe, otherwise by its vocabulary size of 256.
    pub fn reads_bytes(&self) -> bool {
        let recipe = self.config.as_ref().is_some_and(|c| c.data.tokenizer.is_none() && c.model.hf.is_none());
        self.tokenizer_path().is_none() && (recipe || self.model().vocab == 256)
    }

    /// The chat template that counts before that of the tokenizer's folder, if there is one.
    pub(crate) fn run_template(&self) -> Option<RunTemplate> {
        template_of(&self.place, self.config.as_ref())
    }

    /// Tokenizer, stop tokens and chat template, from `given` or the model's own tokenizer.
    pub fn text(&self, given: Option<&Path>) -> Result<TextIo> {
        let eod = self.config.as_ref().and_then(|c| c.data.eod);
        let path = match given {
            Some(path) => Some(path.to_path_buf()),
            None if self.reads_bytes() => None,
            None => Some(self.tokenizer_path().ok_or_else(|| self.no_tokenizer())?),
        };
        let Some(path) = path else {
            let stop = vec![eod.unwrap_or(0) as i32];
            return Ok(TextIo {
                tokenizer: Tokenizer::bytes(),
                start: Some(i32::from(b'\n')),
                stop,
                chat_dir: None,
                run_template: self.run_template(),
            });
        };
        let mut tokenizer = tokenizer_at(&path)?;
        if let ModelLocation::Peft { folder, base } = &self.place
            && path == *folder
            && !GENERATION_FILES.iter().any(|name| folder.join(name).is_file())
        {
            // The base model's folder says where it stops.
            tokenizer.add_ends(base)?;
        }
        let chat_dir = if path.is_dir() { Some(path) } else { path.parent().map(Path::to_path_buf) };
        let inside = |id: &u32| (*id as usize) < self.model().vocab;
        let mut stop: Vec<u32> = tokenizer.eos().iter().copied().chain(eod).filter(inside).collect();
        stop.dedup();
        let line = || tokenizer.encode("\n").ok().and_then(|ids| ids.first().copied()).filter(inside);
        let start = tokenizer.bos().filter(inside).or(stop.first().copied()).or_else(line);
        let stop = stop.into_iter().map(|id| id as i32).collect();
        let run_template = self.run_template();
        Ok(TextIo { start: start.map(|id| id as i32), stop, chat_dir, run_template, tokenizer })
    }

    fn no_tokenizer(&self) -> Error {
        let what = match self.config.as_ref().and_then(|c| c.model.hf.as_ref()) {
            Some(hf) => {
                format!("was trained from {hf}, which has no tokenizer any more; give one with --tokenizer")
            }
            None => "does not name its tokenizer; give one with --tokenizer".into(),
        };
        Error::Tokenizer { origin: self.folder().display().to_string(), what }
    }

    /// Loads the weights in `dtype` for sequences of up to `positions` tokens, limited to the model's maximum.
    pub fn load(&self, rank: Rank, dtype: DType, positions: usize) -> Result<Model> {
        let positions = positions.clamp(1, self.model().max_positions.max(1));
        let source = |name: &str| self.weights.read_finite(name, load_dtype(name, dtype)).map_err(to_core);
        // Text is drawn from the model's own logits: MTP modules are not loaded.
        let model = ModelConfig { mtp: None, ..self.model().clone() };
        let layout = PipelineLayout::default();
        Ok(self.weights.load_model(rank, &model, (positions, dtype), &layout, &source)?)
    }

    /// The folder the weights are in.
    pub fn folder(&self) -> &Path {
        self.place.folder()
    }
}

impl RunTemplate {
    /// The file, which must be there; none if the run asked for no template.
    pub(crate) fn file(&self) -> Result<Option<&Path>> {
        match self {
            RunTemplate::None => Ok(None),
            RunTemplate::File(path) if path.is_file() => Ok(Some(path)),
            RunTemplate::File(path) => Err(Error::absent(
                path,
                "is the data.chat_template that the run was trained with, and does not exist; put it there (chat and eval take \
                 another with --chat-template)",
            )),
        }
    }
}

impl TextIo {
    /// The chat template: that of a Jinja file, or the model's own if it has one. Its date is the present.
    pub fn template(&self, given: Option<&Path>) -> Result<Option<ChatTemplate>> {
        let folder = self.chat_dir.as_deref();
        let template = match (given, &self.run_template) {
            (Some(path), _) => Some(ChatTemplate::from_file(path, folder)?),
            (None, Some(run)) => run.file()?.map(|path| ChatTemplate::from_file(path, folder)).transpose()?,
            (None, None) => folder.map(ChatTemplate::from_dir).transpose()?.flatten(),
        };
        Ok(template.map(|t| t.with_tokenizer(&self.tokenizer).at_present()))
    }

    /// The ids of a conversation up to where the model's answer begins.
    pub fn answer_prompt(&self, template: &ChatTemplate, messages: &[Message]) -> Result<Vec<i32>> {
        let ids = self.tokenizer.encode(&template.render(messages, true)?)?;
        match ids.is_empty() {
            true => Err(Error::Chat("it renders the conversation as nothing".into())),
            false => Ok(ids.into_iter().map(|id| id as i32).collect()),
        }
    }

    /// The prompt ids: of the text, of the text as a user message in the chat template, or the start token where
    /// there is no text.
    pub fn prompt(&self, text: &str, chat: bool) -> Result<Vec<i32>> {
        let wrong = |what: &str| Err(Error::Chat(what.into()));
        let ids = if chat {
            let Some(template) = self.template(None)? else {
                return wrong("this model has none; remove --chat and format the prompt yourself");
            };
            let message = Message { role: "user".into(), content: text.into() };
            return self.answer_prompt(&template, &[message]);
        } else if text.is_empty() {
            Vec::new()
        } else {
            self.tokenizer.encode_framed(text)?
        };
        match (ids.is_empty(), self.start) {
            (true, Some(start)) => Ok(vec![start]),
            (true, None) => {
                let what = "has no beginning-of-text token, and the prompt is empty; give a prompt".into();
                Err(Error::Tokenizer { origin: "the tokenizer".into(), what })
            }
            (false, _) => Ok(ids.into_iter().map(|id| id as i32).collect()),
        }
    }
}
