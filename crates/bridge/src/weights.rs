//! The weights of a model in a Hugging Face folder, a checkpoint or a run folder.

use crate::cast::cast;
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::finite;
use crate::hf_checkpoint::HfCheckpoint;
use crate::initial_weights::InitialWeights;
use crate::logical::LogicalTensor;
use crate::native_checkpoint::NativeCheckpoint;
use crate::peft::{ADAPTER_CONFIG, Adapters, PeftConfig};
use ferrotron_core::checkpoint::{Loaded, latest, load};
use ferrotron_core::model::{
    Model, ModelConfig, ModelOptions, PipelineLayout, set_expert_biases, set_quantiles,
};
use ferrotron_core::train::{CHECKPOINTS, CONFIG, SavedAdapters, Trainer, adapters_of, model_of, to_f32};
use ferrotron_engine::Rank;
use ferrotron_engine::moe::{MoeTraining, RoutingMethod};
use ferrotron_tensor::DType;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The location of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelLocation {
    /// A folder with `config.json` and `.safetensors` files.
    HuggingFace(PathBuf),
    /// A native checkpoint and, if it belongs to a run, the run folder.
    Checkpoint {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// The run's.
        run: Option<PathBuf>,
    },
    /// A PEFT folder, and the Hugging Face folder of its base model.
    Peft {
        /// The adapters'.
        folder: PathBuf,
        /// The base model's.
        base: PathBuf,
    },
}

impl ModelLocation {
    /// The folder that was found.
    pub fn folder(&self) -> &Path {
        match self {
            ModelLocation::HuggingFace(folder)
            | ModelLocation::Checkpoint { folder, .. }
            | ModelLocation::Peft { folder, .. } => folder,
        }
    }
}

/// Detects what a folder holds; for a run folder, finds its newest checkpoint.
pub fn locate_model(path: &Path) -> Result<ModelLocation> {
    let wrong = |what: &str| Err(Error::config(&path.display().to_string(), what));
    if path.join("manifest.json").is_file() {
        let run = path.parent().filter(|p| p.ends_with(CHECKPOINTS)).and_then(Path::parent);
        let run = run.filter(|r| r.join(CONFIG).is_file()).map(Path::to_path_buf);
        return Ok(ModelLocation::Checkpoint { folder: path.into(), run });
    }
    if path.join(ADAPTER_CONFIG).is_file() {
        let config = PeftConfig::from_dir(path)?;
        return match config.base_folder() {
            Some(base) => Ok(ModelLocation::Peft { folder: path.into(), base }),
            None => wrong(&format!(
                "holds adapters of the base model {}, which is no folder here; put its folder into base_model_name_or_path of \
                 adapter_config.json",
                config.base.as_deref().unwrap_or("(not named)")
            )),
        };
    }
    if path.join("config.json").is_file() {
        return Ok(ModelLocation::HuggingFace(path.into()));
    }
    if path.join(CHECKPOINTS).is_dir() || path.join(CONFIG).is_file() {
        return match latest(&path.join(CHECKPOINTS))? {
            Some(folder) => Ok(ModelLocation::Checkpoint { folder, run: Some(path.into()) }),
            None => wrong("is a run without a checkpoint; train until one is saved (checkpoint.every)"),
        };
    }
    if !path.exists() {
        return Err(Error::absent(
            path,
            "does not exist; for a name on the Hugging Face hub, `hf download NAME --local-dir DIR` makes a folder",
        ));
    }
    wrong(
        "holds no model: it is neither a Hugging Face folder (config.json), a PEFT folder (adapter_config.json), a checkpoint (manifest.json) nor a run folder (checkpoints/)",
    )
}

/// Finds and opens a model. A run that is training deletes old checkpoints: if the newest is gone before all its files
/// are open, the one that has replaced it is opened. Open files stay readable.
pub fn open_model(path: &Path) -> Result<(ModelLocation, Weights)> {
    // Each attempt takes milliseconds, and needs a new checkpoint to fail.
    const ATTEMPTS: usize = 100;
    let is_run = path.join(CHECKPOINTS).is_dir();
    let mut attempt = 0;
    loop {
        attempt += 1;
        let place = match locate_model(path) {
            // A folder that changes while it is listed may look empty.
            Err(_) if is_run && attempt < 5 => {
                std::thread::sleep(std::time::Duration::from_millis(10));
                continue;
            }
            place => place?,
        };
        match Weights::at(&place) {
            Err(_) if is_run && attempt < ATTEMPTS && locate_model(path).is_ok_and(|now| now != place) => {}
            weights => return Ok((place, weights?)),
        }
    }
}

/// Weights that are read tensor by tensor.
#[derive(Debug)]
pub enum Weights {
    /// Of a Hugging Face folder.
    HuggingFace(Box<HfCheckpoint>),
    /// Of a checkpoint.
    Checkpoint(Box<NativeCheckpoint>),
    /// The declared initial values.
    Initial(Box<InitialWeights>),
    /// Of a base model, with adapters merged as they are read.
    Adapted(Box<AdaptedWeights>),
}

/// A base model and its adapters.
#[derive(Debug)]
pub struct AdaptedWeights {
    /// The base model.
    pub base: Weights,
    /// The adapters.
    pub adapters: Adapters,
    /// The folder of the adapters.
    pub folder: PathBuf,
    /// The adapters are trained further: a trainer gets them beside the base model, not merged into it.
    pub apart: bool,
}

impl Weights {
    /// Opens and checks a Hugging Face folder, a checkpoint or the newest checkpoint of a run folder.
    pub fn open(path: &Path) -> Result<Weights> {
        Ok(open_model(path)?.1)
    }

    /// Opens and checks the model at a location.
    pub fn at(place: &ModelLocation) -> Result<Weights> {
        Ok(match place {
            ModelLocation::HuggingFace(dir) => Weights::HuggingFace(Box::new(HfCheckpoint::open(dir)?)),
            ModelLocation::Checkpoint { folder, .. } => {
                let loaded = load(folder)?;
                match adapters_of(&loaded)? {
                    Some(saved) => Weights::Adapted(Box::new(AdaptedWeights::of(&loaded, saved)?)),
                    None => Weights::Checkpoint(Box::new(NativeCheckpoint::of(loaded)?)),
                }
            }
            ModelLocation::Peft { folder, base } => {
                let base = HfCheckpoint::open(base)?;
                let adapters = Adapters::from_peft(folder, base.config())?;
                let base = Weights::HuggingFace(Box::new(base));
                Weights::Adapted(Box::new(AdaptedWeights {
                    base,
                    adapters,
                    folder: folder.clone(),
                    apart: false,
                }))
            }
        })
    }

    /// The weights that adapters belong to, or these where there are none.
    pub(crate) fn base(&self) -> &Weights {
        match self {
            Weights::Adapted(a) => a.base.base(),
            other => other,
        }
    }

    /// The architecture.
    pub fn model(&self) -> &ModelConfig {
        match self {
            Weights::HuggingFace(checkpoint) => checkpoint.config().model(),
            Weights::Checkpoint(native) => native.model(),
            Weights::Initial(initial) => initial.model(),
            Weights::Adapted(a) => a.base.model(),
        }
    }

    /// Every parameter under its logical name, in the model's order.
    pub fn tensors(&self) -> &[LogicalTensor] {
        match self {
            Weights::HuggingFace(checkpoint) => checkpoint.tensors(),
            Weights::Checkpoint(native) => native.tensors(),
            Weights::Initial(initial) => initial.tensors(),
            Weights::Adapted(a) => a.base.tensors(),
        }
    }

    /// Buffers: tensors of the model that are not trained; f32 whatever the weights' dtype.
    pub fn buffers(&self) -> &[LogicalTensor] {
        match self {
            Weights::HuggingFace(checkpoint) => checkpoint.buffers(),
            Weights::Checkpoint(native) => native.buffers(),
            Weights::Initial(initial) => initial.buffers(),
            Weights::Adapted(a) => a.base.buffers(),
        }
    }

    /// Dtype of a tensor in the files.
    pub fn dtype(&self, logical: &str) -> Result<DType> {
        match self {
            Weights::HuggingFace(checkpoint) => checkpoint.dtype(logical),
            Weights::Checkpoint(native) => native.dtype(logical),
            Weights::Initial(_) => Ok(DType::F32),
            Weights::Adapted(a) => a.base.dtype(logical),
        }
    }

    /// The dtype of all parameters, if they share one.
    pub fn common_dtype(&self) -> Option<DType> {
        let mut types = self.tensors().iter().map(|t| self.dtype(&t.name).ok());
        let first = types.next()??;
        types.all(|t| t == Some(first)).then_some(first)
    }

    /// One parameter as [`Weights::read`] returns it; NaN and infinite values are an error.
    pub fn read_finite(&self, logical: &str, dtype: DType) -> Result<Vec<u8>> {
        let bytes = self.read(logical, dtype)?;
        finite::check(logical, dtype, &bytes)?;
        Ok(bytes)
    }

    /// One parameter as little-endian `dtype` (f32, bf16 or f16), row-major.
    pub fn read(&self, logical: &str, dtype: DType) -> Result<Vec<u8>> {
        match self {
            Weights::HuggingFace(checkpoint) => checkpoint.read(logical, dtype),
            Weights::Checkpoint(native) => native.read(logical, dtype),
            Weights::Initial(initial) => initial.read(logical, dtype),
            Weights::Adapted(a) => a.read(logical, dtype),
        }
    }

    /// The configuration of a Hugging Face folder with these weights.
    pub(crate) fn hf_config(&self) -> Result<HfConfig> {
        match self {
            Weights::HuggingFace(checkpoint) => Ok(checkpoint.config().clone()),
            Weights::Adapted(a) => a.base.hf_config(),
            Weights::Checkpoint(_) | Weights::Initial(_) => {
                HfConfig::from_model(self.model(), self.common_dtype().unwrap_or(DType::F32))
            }
        }
    }

    /// Whether routers of the model subtract quantiles from their logits: it was trained with quantile balancing.
    pub(crate) fn has_quantiles(&self) -> bool {
        matches!(self.base(), Weights::Checkpoint(native) if native.has_quantiles())
    }

    /// The quantiles of an MoE layer, if its router subtracts any.
    fn quantiles(&self, layer: &str) -> ferrotron_core::Result<Option<Vec<f32>>> {
        match self.base() {
            Weights::Checkpoint(native) => native.quantiles(layer).map_err(to_core),
            _ => Ok(None),
        }
    }

    /// [`Model::load`] of these weights, as `source` reads them. Where the model was trained with quantile balancing, its routers
    /// select experts by the same quantiles.
    pub(crate) fn load_model(
        &self,
        rank: Rank,
        config: &ModelConfig,
        (positions, dtype): (usize, DType),
        layout: &PipelineLayout,
        source: &dyn Fn(&str) -> ferrotron_core::Result<Vec<u8>>,
    ) -> ferrotron_core::Result<Model> {
        let mut options = ModelOptions::default();
        if self.has_quantiles() {
            let routing_method = RoutingMethod::Quantiles { keep: 1.0 };
            options.moe_training = Arc::new(MoeTraining { routing_method, ..MoeTraining::default() });
        }
        let model = Model::load_with(rank, config, positions, dtype, (layout, &options), source)?;
        set_quantiles(&model.rank, &model.step_state, &|layer| self.quantiles(layer))?;
        Ok(model)
    }

    /// Loads the weights into a trainer.
    pub fn fill(&self, trainer: &Trainer) -> ferrotron_core::Result<()> {
        if let Weights::Adapted(a) = self
            && a.apart
        {
            a.base.fill(trainer)?;
            return trainer.import_adapters(&|name| a.values(name).map_err(to_core));
        }
        // Merged into their base model, adapters are used with its quantiles.
        let quantiles =
            matches!(trainer.model.decoder.moe_training().routing_method, RoutingMethod::Quantiles { .. });
        if self.has_quantiles() && trainer.model.has_adapters() && !quantiles {
            let what = "the base model was trained with quantile balancing, and its routers subtract quantiles; set moe.balance = \
                        \"quantile\" for its adapters, too";
            return Err(ferrotron_core::Error::Invalid(what.into()));
        }
        let source = |name: &str| to_f32(DType::F32, &self.read_finite(name, DType::F32).map_err(to_core)?);
        trainer.import(&source)?;
        // A recipe may enable expert biases that the weights lack: they start from zero.
        set_expert_biases(&trainer.rank, &trainer.model.step_state, &|name| {
            let known = self.buffers().iter().any(|t| t.name == name);
            let experts = trainer.model.decoder.config().moe.as_ref().map_or(0, |m| m.experts);
            if known { source(name) } else { Ok(vec![0.0; experts]) }
        })?;
        set_quantiles(&trainer.rank, &trainer.model.step_state, &|layer| self.quantiles(layer))
    }
}

impl AdaptedWeights {
    /// The model of a checkpoint that holds adapters only.
    fn of(loaded: &Loaded, (saved, seed): (SavedAdapters, u64)) -> Result<AdaptedWeights> {
        let folder = loaded.path();
        let base = match &saved.base {
            Some(base) => {
                base.check(folder)?;
                Weights::open(Path::new(&base.path))?
            }
            None => Weights::Initial(Box::new(InitialWeights::new(model_of(loaded)?, seed)?)),
        };
        let adapters = Adapters::of_checkpoint(loaded, f64::from(saved.scale))?;
        Ok(AdaptedWeights { base, adapters, folder: folder.into(), apart: false })
    }

    /// The values of an adapter's tensor.
    fn values(&self, logical: &str) -> Result<Vec<f32>> {
        let none = || {
            let what =
                format!("is not among the adapters of {}; leave out lora.targets", self.folder.display());
            Error::tensor(logical, what)
        };
        self.adapters.tensor(logical).map(<[f32]>::to_vec).ok_or_else(none)
    }

    /// One parameter of the merged model, which is computed in f32.
    fn read(&self, logical: &str, dtype: DType) -> Result<Vec<u8>> {
        let is_adapted = logical.strip_suffix(".weight").is_some_and(|m| self.adapters.get(m).is_some());
        if !is_adapted {
            return self.base.read(logical, dtype);
        }
        let mut values = to_f32(DType::F32, &self.base.read(logical, DType::F32)?)?;
        self.adapters.merge(logical, &mut values)?;
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut out = vec![0; values.len() * dtype.size()];
        cast(&bytes, DType::F32, &mut out, dtype);
        Ok(out)
    }
}

/// Converts an error for code that returns core's.
pub(crate) fn to_core(e: Error) -> ferrotron_core::Error {
    match e {
        Error::Core(e) => *e,
        other => ferrotron_core::Error::Invalid(other.to_string()),
    }
}
