//! Converts a Hugging Face folder to a native checkpoint, or back.

use crate::beside_weights::BesideWeights;
use crate::cast::cast;
use crate::companions::{copy_companions, copy_own};
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::export::{ExportOptions, TensorData, export};
use crate::finite;
use crate::hf_checkpoint::HfCheckpoint;
use crate::logical::{LogicalTensor, load_dtype, logical_buffers, logical_tensors};
use crate::model_source::{COMPANIONS, ModelSource};
use crate::native_checkpoint::PREFIX;
use crate::peft::{Adapter, write_peft};
use crate::replaceable::OutputKind;
use crate::staged_folder::StagedFolder;
use crate::weights::{AdaptedWeights, ModelLocation, Weights, locate_model, to_core};
use ferrotron_core::checkpoint::{SingleFile, check_folder_name, write_single_file};
use ferrotron_core::fs::sync_folder;
use ferrotron_core::model::upcycle::{UpcycleConfig, Upcycled};
use ferrotron_core::tensorfile::TensorDecl;
use ferrotron_core::train::{to_f32, weights_only};
use ferrotron_tensor::DType;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};

/// Options of [`convert`].
pub struct ConvertOptions<'a> {
    /// Dtype to store weights in; none: unchanged (or as in `like`).
    pub dtype: Option<DType>,
    /// A Hugging Face folder whose tensor names, files, `config.json` and tokenizer the output follows.
    pub like: Option<&'a Path>,
    /// Merge adapters into their base model.
    pub merge: bool,
    /// Turn a dense Hugging Face model into an MoE model.
    pub upcycle: Option<UpcycleConfig>,
    /// Replace an output folder that an earlier conversion wrote.
    pub overwrite: bool,
    /// Convert tensors with NaN or infinite values, too; otherwise they are an error.
    pub allow_non_finite: bool,
    /// Gets the elements done and the total.
    pub progress: &'a dyn Fn(u64, u64),
}

/// What a conversion writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvertedKind {
    /// A native checkpoint.
    Checkpoint,
    /// A Hugging Face folder.
    HuggingFace,
    /// A PEFT folder.
    Peft,
}

/// Summary of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// What was written.
    pub kind: ConvertedKind,
    /// The folder that was read.
    pub from: PathBuf,
    /// Parameters of the model.
    pub parameters: u64,
    /// Bytes of weights written.
    pub bytes: u64,
    /// The folder whose tensor names and tokenizer were followed.
    pub like: Option<PathBuf>,
    /// The Hugging Face family.
    pub family: String,
    /// Tensors with NaN or infinite values, and how many.
    pub non_finite: Vec<(String, u64)>,
    /// True if the output has a tokenizer.
    pub tokenizer: bool,
}

/// Converts a Hugging Face folder to a checkpoint, or a checkpoint (of a run: its newest) to a Hugging Face folder; one of adapters
/// to a PEFT folder. With `merge`, adapters of either kind and their base model become a Hugging Face folder.
/// The new folder `to` appears only once it is complete. One tensor is in memory at a time.
pub fn convert(from: &Path, to: &Path, options: &ConvertOptions) -> Result<Converted> {
    let place = locate_model(from)?;
    for read in [place.folder()].into_iter().chain(options.like) {
        check_apart(read, to)?;
    }
    match place {
        ModelLocation::HuggingFace(_) if options.merge => {
            let what = "is a whole model without adapters; leave out --merge";
            Err(Error::config(&from.display().to_string(), what))
        }
        ModelLocation::HuggingFace(dir) => to_checkpoint(&dir, to, options),
        ModelLocation::Peft { .. } if !options.merge => {
            let what = "is a PEFT folder, which train, generate and eval take as it is; --merge writes the merged model";
            Err(Error::config(&from.display().to_string(), what))
        }
        ModelLocation::Checkpoint { .. } if options.upcycle.is_some() => {
            let what = "is a checkpoint, and --upcycle takes a Hugging Face folder; convert it to one first";
            Err(Error::config(&from.display().to_string(), what))
        }
        ModelLocation::Checkpoint { .. } | ModelLocation::Peft { .. } => {
            let found = ModelSource::open(from)?;
            match &found.weights {
                Weights::Adapted(adapted) if !options.merge => to_peft(&found, adapted, to, options),
                Weights::Checkpoint(_) if options.merge => {
                    let what = "is a checkpoint of a whole model without adapters; leave out --merge";
                    Err(Error::config(&from.display().to_string(), what))
                }
                _ => to_hugging_face(&found, to, options),
            }
        }
    }
}

/// Fails if `to` is the folder `from` or holds it: replacing it would delete what is read.
fn check_apart(from: &Path, to: &Path) -> Result<()> {
    match (from.canonicalize(), to.canonicalize()) {
        (Ok(a), Ok(b)) if a.starts_with(&b) => {
            let what = "is read by this conversion, so it is not replaced; choose another folder".into();
            Err(Error::Output { path: to.into(), what })
        }
        _ => Ok(()),
    }
}

/// Reports progress in elements.
struct Counter<'a> {
    done: Cell<u64>,
    total: u64,
    allow_non_finite: bool,
    non_finite: RefCell<Vec<(String, u64)>>,
    progress: &'a dyn Fn(u64, u64),
}

impl Counter<'_> {
    fn new<'a>(tensors: &[LogicalTensor], options: &ConvertOptions<'a>) -> Counter<'a> {
        let progress = options.progress;
        let parameters = tensors.iter().filter(|t| !t.buffer);
        let total = parameters.map(|t| t.elements() as u64).sum();
        progress(0, total);
        let (allow_non_finite, non_finite) = (options.allow_non_finite, RefCell::default());
        Counter { done: Cell::new(0), total, allow_non_finite, non_finite, progress }
    }

    /// Counts a tensor and checks that its values are finite.
    fn add(&self, name: &str, dtype: DType, bytes: &[u8]) -> Result<()> {
        match finite::check(name, dtype, bytes) {
            Err(Error::NonFinite { name, count, .. }) if self.allow_non_finite => {
                // Experts of an upcycled model are read several times.
                let mut seen = self.non_finite.borrow_mut();
                if seen.iter().all(|(n, _)| *n != name) {
                    seen.push((name, count));
                }
            }
            Err(e @ Error::NonFinite { .. }) => {
                return Err(Error::CannotExpress(format!("{e}; --allow-nonfinite converts it all the same")));
            }
            other => other?,
        }
        self.done.set(self.done.get() + (bytes.len() / dtype.size()) as u64);
        (self.progress)(self.done.get().min(self.total), self.total);
        Ok(())
    }
}

fn to_checkpoint(from: &Path, to: &Path, options: &ConvertOptions) -> Result<Converted> {
    if options.like.is_some() {
        let what = "becomes a checkpoint, and --like applies to writing a Hugging Face folder; remove --like";
        return Err(Error::config(&from.display().to_string(), what));
    }
    let checkpoint = HfCheckpoint::open(from)?;
    let family = checkpoint.config().family().name.to_string();
    let weights = Weights::HuggingFace(Box::new(checkpoint));
    let upcycled = options.upcycle.map(|how| how.apply(weights.model())).transpose()?;
    let model = upcycled.as_ref().map_or(weights.model(), Upcycled::model);
    let mut tensors = logical_tensors(model);
    tensors.extend(logical_buffers(model));
    let dtype_of = |logical: &str| match &upcycled {
        None => target_dtype(&weights, logical, options.dtype),
        // A new tensor has the dtype of the dense tensor it comes from, a router that of the embedding.
        Some(u) => {
            let origin = u.source_name(logical);
            target_dtype(&weights, origin.as_deref().unwrap_or("embed.tokens"), options.dtype)
        }
    };
    let mut decls = Vec::new();
    for t in &tensors {
        let dtype = dtype_of(&t.name)?;
        let name = format!("{PREFIX}{}", t.name);
        decls.push((dtype, TensorDecl { name, dtype: dtype.into(), shape: t.shape.clone() }));
    }
    let bytes = decls.iter().map(|(d, t)| (t.shape.iter().product::<usize>() * d.size()) as u64).sum();
    check_folder_name(to, 0)?;
    let folder = StagedFolder::create(to, OutputKind::Checkpoint, options.overwrite)?;
    let counter = Counter::new(&tensors, options);
    let source = |name: &str| {
        let logical = name.strip_prefix(PREFIX).unwrap_or(name);
        let dtype = dtype_of(logical).map_err(to_core)?;
        let bytes = match &upcycled {
            None => weights.read(logical, dtype).map_err(to_core)?,
            Some(u) => {
                let dense =
                    |name: &str| to_f32(DType::F32, &weights.read(name, DType::F32).map_err(to_core)?);
                let values: Vec<u8> =
                    u.values(logical, &dense)?.iter().flat_map(|x| x.to_le_bytes()).collect();
                let mut bytes = vec![0; values.len() / 4 * dtype.size()];
                cast(&values, DType::F32, &mut bytes, dtype);
                bytes
            }
        };
        counter.add(logical, dtype, &bytes).map_err(to_core)?;
        Ok(bytes)
    };
    let declared: Vec<TensorDecl> = decls.into_iter().map(|(_, t)| t).collect();
    let state = weights_only(model)?;
    write_single_file(folder.dir(), &SingleFile { step: 0, state, tensors: &declared, source: &source })?;
    let own = folder.path(COMPANIONS);
    std::fs::create_dir(&own).map_err(|e| Error::io(&own, "create", e))?;
    // First the configuration, which names code.
    copy_own(from, "config.json", &own)?;
    copy_companions(from, &own)?;
    sync_folder(&own)?;
    folder.publish()?;
    Ok(Converted {
        kind: ConvertedKind::Checkpoint,
        from: from.into(),
        parameters: counter.total,
        bytes,
        like: None,
        family,
        non_finite: counter.non_finite.take(),
        tokenizer: from.join("tokenizer.json").is_file(),
    })
}

fn to_peft(
    found: &ModelSource,
    adapted: &AdaptedWeights,
    to: &Path,
    options: &ConvertOptions,
) -> Result<Converted> {
    let config = adapted.base.hf_config()?;
    let base = found.config.as_ref().and_then(|c| c.model.hf.as_ref()).map(PathBuf::from);
    let base = base.filter(|dir| dir.join("config.json").is_file());
    let dtype = options.dtype.unwrap_or(DType::F32);
    let count =
        |(_, a): (&str, &Adapter)| (a.a.len() + a.b.len() + a.magnitude.as_ref().map_or(0, Vec::len)) as u64;
    let files = BesideWeights::of(found, base.as_deref(), false)?;
    let texts = files.texts(found, &config)?;
    let more: Vec<(&str, &str)> = texts.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let files = (files.tokenizer.as_deref(), &more[..]);
    let named = (&config, base.as_deref());
    let bytes = write_peft(to, &adapted.adapters, named, files, (dtype, options.overwrite))?;
    Ok(Converted {
        kind: ConvertedKind::Peft,
        from: found.folder().into(),
        parameters: adapted.adapters.iter().map(count).sum(),
        bytes,
        like: None,
        family: config.family().name.to_string(),
        non_finite: Vec::new(),
        tokenizer: to.join("tokenizer.json").is_file(),
    })
}

fn to_hugging_face(found: &ModelSource, to: &Path, options: &ConvertOptions) -> Result<Converted> {
    if found.weights.has_quantiles() {
        let what = "quantiles that the routers subtract from their logits (the model was trained with moe.balance = \"quantile\"), and \
                    without them tokens go to other experts; use it as the checkpoint it is";
        return Err(Error::CannotExpress(what.into()));
    }
    let model = found.model();
    let common = found.weights.common_dtype().unwrap_or(DType::F32);
    let reference = match options.like {
        Some(like) => Some(HfCheckpoint::open(like)?),
        None => origin_checkpoint(found),
    };
    let followed = reference.as_ref().map(HfCheckpoint::dir);
    let files = BesideWeights::of(found, followed, options.like.is_some())?;
    let config = match (&reference, &files.tokenizer) {
        (Some(checkpoint), _) => checkpoint.config().with_model(model)?,
        (None, Some(dir)) if dir.join("config.json").is_file() => {
            // A config.json of another family or shape does not describe this model.
            let said = HfConfig::from_dir(dir).and_then(|c| c.with_model(model));
            said.or_else(|_| HfConfig::from_model(model, options.dtype.unwrap_or(common)))?
        }
        _ => HfConfig::from_model(model, options.dtype.unwrap_or(common))?,
    };
    let texts = files.texts(found, &config)?;
    let more: Vec<(&str, &str)> = texts.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let counter = Counter::new(found.weights.tensors(), options);
    let source = |name: &str| {
        let dtype = found.weights.dtype(name)?;
        let bytes = found.weights.read(name, dtype)?;
        counter.add(name, dtype, &bytes)?;
        Ok(TensorData { dtype, bytes })
    };
    let out = ExportOptions {
        // None: the dtypes of the reference.
        dtype: options.dtype.or(if reference.is_some() { None } else { Some(common) }),
        reference: reference.as_ref(),
        companions: files.tokenizer.as_deref(),
        more: &more,
        overwrite: options.overwrite,
        ..ExportOptions::default()
    };
    let exported = export(to, &config, &source, &out)?;
    Ok(Converted {
        kind: ConvertedKind::HuggingFace,
        from: found.folder().into(),
        parameters: counter.total,
        bytes: exported.tensor_bytes,
        like: reference.map(|p| p.dir().into()),
        family: config.family().name.to_string(),
        non_finite: counter.non_finite.take(),
        tokenizer: to.join("tokenizer.json").is_file(),
    })
}

/// The dtype a tensor is stored in: the requested one, otherwise its own; buffers are f32.
fn target_dtype(weights: &Weights, logical: &str, asked: Option<DType>) -> Result<DType> {
    Ok(load_dtype(logical, asked.map_or_else(|| weights.dtype(logical), Ok)?))
}

/// The Hugging Face folder that a run started from, if it still exists and has the same shapes.
fn origin_checkpoint(found: &ModelSource) -> Option<HfCheckpoint> {
    let dir = match &found.place {
        ModelLocation::Peft { base, .. } => base.clone(),
        _ => PathBuf::from(found.config.as_ref()?.model.hf.as_ref()?),
    };
    let checkpoint = HfCheckpoint::open(&dir).ok()?;
    let same = crate::logical_tensors(checkpoint.config().model()) == found.weights.tensors();
    (same && checkpoint.config().with_model(found.model()).is_ok()).then_some(checkpoint)
}
