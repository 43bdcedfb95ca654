//! A Hugging Face folder whose weights have been checked against its configuration.

use crate::cast::is_castable;
use crate::chat::{NAMED_TEMPLATES, named_files};
use crate::companions::is_companion;
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::expected::{HfTensor, fuse, hf_tensors, matches};
use crate::family::HEAD;
use crate::logical::{LogicalTensor, logical_buffers, logical_tensors};
use crate::problems::Problem;
use crate::quantized::{self, BLOCKS, SCALE_INV, SCALES};
use crate::read_tensor::{ShardTensor, StorageFormat, TensorLocation, read};
use crate::shards::{INDEX, Shards};
use crate::view::FusedLayout;
use ferrotron_core::model::config::ModelConfig;
use ferrotron_core::tensorfile::{FileDType, TensorInfo};
use ferrotron_tensor::DType;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The role of a tensor in the files.
#[derive(Clone, Debug)]
pub(crate) enum Role {
    /// Holds one or more parameters, or is a copy of one (the head in a file of a tied model).
    Parameters(HfTensor),
    /// Values or scales of quantized parameters; exported dequantized.
    Quantized,
    /// Not used by the model; exported unchanged.
    Unused,
}

/// A Hugging Face folder whose every tensor has been accounted for: none missing, none unknown, shapes and dtypes
/// right. Tensors are read one at a time.
#[derive(Debug)]
pub struct HfCheckpoint {
    dir: PathBuf,
    config: HfConfig,
    prefix: &'static str,
    shards: Shards,
    roles: HashMap<String, Role>,
    locations: HashMap<String, TensorLocation>,
    logical: Vec<LogicalTensor>,
    buffers: Vec<LogicalTensor>,
}

/// Every tensor of the files by name, with the index of its file.
type FileTensors<'a> = HashMap<&'a str, (usize, &'a TensorInfo)>;

impl HfCheckpoint {
    /// Reads `config.json` of a folder and checks all its weight files against it.
    pub fn open(dir: &Path) -> Result<HfCheckpoint> {
        let config = HfConfig::from_dir(dir)?;
        let unknown = config.unknown_keys();
        if !unknown.is_empty() {
            let keys = unknown.join(", ");
            tracing::warn!("{}: keys of config.json that are unknown, and ignored: {keys}", dir.display());
        }
        HfCheckpoint::with_config(dir, config)
    }

    /// Checks the weight files of a folder against a configuration.
    pub fn with_config(dir: &Path, config: HfConfig) -> Result<HfCheckpoint> {
        let mut problems = Vec::new();
        let shards = Shards::open(dir, &mut problems)?;
        let family = config.family();
        // Files saved from the base model (GPT-2's own on the hub) have no prefix.
        let bare = shards.tensors().any(|(_, t)| t.name.ends_with(".weight"))
            && !shards.tensors().any(|(_, t)| t.name.starts_with(family.prefix));
        let prefix = if bare { "" } else { family.prefix };

        let mtp = match (config.mtp_layers(), mtp_layers_in(&shards, &config, prefix)) {
            // transformers drops the modules when it saves a model, and leaves the key.
            (_, 0) => 0,
            (stated, found) => stated.unwrap_or(found),
        };
        let config = if family.mtp.is_empty() { config } else { config.with_mtp_layers(mtp) };
        let model = config.model();

        let mut found: FileTensors = HashMap::new();
        for (shard, file) in shards.files.iter().enumerate() {
            for t in file.file.tensors() {
                if found.insert(&t.name, (shard, t)).is_some() {
                    problems.push(Problem::Wrong(t.name.clone(), "is in two files".into()));
                }
            }
        }
        let mut roles = HashMap::new();
        let mut locations = HashMap::new();
        for t in hf_tensors(family, model, prefix)? {
            locate(t, &found, config.weight_block(), (&mut roles, &mut locations), &mut problems);
        }
        for (_, t) in shards.tensors().filter(|(_, t)| !roles.contains_key(&t.name)).collect::<Vec<_>>() {
            let role = if let Some(copy) = tied_head(model, &t.name) {
                check(t, &copy, &mut problems);
                if t.shape == copy.shape && !is_embedding(&shards, t, &locations)? {
                    let how = "holds other values than the embedding, which config.json ties it to; set tie_word_embeddings \
                               to false there to use both";
                    problems.push(Problem::Wrong(t.name.clone(), how.into()));
                }
                Role::Parameters(copy)
            } else if let Some((copy, of)) = mtp_copy(&config, prefix, &t.name) {
                check(t, &copy, &mut problems);
                // transformers takes the model's own whatever this one holds; a copy that is none is kept as it is.
                match found.get(of.as_str()) {
                    Some(&of) if same_values(&shards, t, of)? => Role::Parameters(copy),
                    _ => Role::Unused,
                }
            } else if is_unused(&config, t, prefix) {
                Role::Unused
            } else {
                problems.push(Problem::Unexpected(format!("{} {:?}", t.name, t.shape)));
                continue;
            };
            roles.insert(t.name.clone(), role);
        }
        if !problems.is_empty() {
            problems.sort_by_key(|p| match p {
                Problem::Missing(n) => (0, n.clone()),
                Problem::Unexpected(n) => (1, n.clone()),
                Problem::Wrong(n, _) => (2, n.clone()),
            });
            return Err(Error::Tensors { origin: dir.display().to_string(), problems });
        }
        let (logical, buffers) = (logical_tensors(model), logical_buffers(model));
        Ok(HfCheckpoint { dir: dir.into(), config, prefix, shards, roles, locations, logical, buffers })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its configuration.
    pub fn config(&self) -> &HfConfig {
        &self.config
    }

    /// Every parameter under its logical name, in the model's order.
    pub fn tensors(&self) -> &[LogicalTensor] {
        &self.logical
    }

    /// Buffers: tensors of the model that are not trained; f32 whatever the weights' dtype.
    pub fn buffers(&self) -> &[LogicalTensor] {
        &self.buffers
    }

    /// Dtype of a tensor in the files; bf16 for quantized ones.
    pub fn dtype(&self, logical: &str) -> Result<DType> {
        Ok(self.location(logical)?.format.dtype())
    }

    /// True if some tensor is quantized, to be dequantized when it is read.
    pub fn is_quantized(&self) -> bool {
        self.locations.values().any(|p| !matches!(p.format, StorageFormat::Plain(_)))
    }

    /// Tensors that the model does not use, kept for export.
    pub fn unused_tensors(&self) -> impl Iterator<Item = &str> {
        self.roles.iter().filter(|(_, r)| matches!(r, Role::Unused)).map(|(n, _)| n.as_str())
    }

    /// The tensor in the files that holds this parameter, alone or fused with others.
    pub fn hf_name(&self, logical: &str) -> Result<&str> {
        Ok(&self.location(logical)?.hf)
    }

    /// The tensors in the files that hold parameters, in the model's order.
    pub fn hf_tensors(&self) -> Result<Vec<HfTensor>> {
        hf_tensors(self.config.family(), self.config.model(), self.prefix)
    }

    /// One parameter as little-endian `dtype` (f32, bf16 or f16), row-major.
    pub fn read(&self, logical: &str, dtype: DType) -> Result<Vec<u8>> {
        let rows = self.location(logical)?.rows;
        self.read_rows(logical, 0..rows, dtype)
    }

    /// Some rows of a parameter, such as a rank's slice of a matrix; reads nothing else.
    pub fn read_rows(&self, logical: &str, rows: Range<usize>, dtype: DType) -> Result<Vec<u8>> {
        let p = self.location(logical)?;
        if rows.start > rows.end || rows.end > p.rows {
            let what = format!("rows {rows:?} were asked for, but it has {}", p.rows);
            return Err(Error::tensor(logical, what));
        }
        if !is_castable(dtype) {
            let what = format!("weights are read as f32, bf16 or f16, not as {dtype}");
            return Err(Error::tensor(logical, what));
        }
        let mut out = zeros(logical, rows.len() * p.cols * dtype.size())?;
        read(&self.shards, p, rows, dtype, &mut out)?;
        Ok(out)
    }

    fn location(&self, logical: &str) -> Result<&TensorLocation> {
        self.locations
            .get(logical)
            .ok_or_else(|| Error::tensor(logical, format!("{} has no such parameter", self.dir.display())))
    }

    /// Its configuration, weights and tokenizer files; a folder may hold others.
    pub(crate) fn files(&self) -> Result<Vec<PathBuf>> {
        let weights = |name: &str| self.shards.files.iter().any(|s| s.name == name);
        let own = |name: &str| name == "config.json" || name == INDEX || weights(name) || is_companion(name);
        let list = |e| Error::io(&self.dir, "list", e);
        let templates = self.dir.join(NAMED_TEMPLATES);
        let mut files: Vec<PathBuf> =
            named_files(&self.dir)?.into_iter().map(|name| templates.join(name)).collect();
        for entry in std::fs::read_dir(&self.dir).map_err(list)? {
            let entry = entry.map_err(list)?;
            if entry.file_name().to_str().is_some_and(own) {
                files.push(entry.path());
            }
        }
        Ok(files)
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    pub(crate) fn role(&self, hf: &str) -> Option<&Role> {
        self.roles.get(hf)
    }

    pub(crate) fn prefix(&self) -> &'static str {
        self.prefix
    }
}

/// Finds a tensor in the files, plain or quantized, and records where its parameters are.
fn locate(
    t: HfTensor,
    found: &FileTensors,
    block: [usize; 2],
    (roles, locations): (&mut HashMap<String, Role>, &mut HashMap<String, TensorLocation>),
    problems: &mut Vec<Problem>,
) {
    let beside = |suffix: &str| found.get(format!("{}{suffix}", t.name).as_str()).copied();
    let mut coded = |name: &str| roles.insert(name.into(), Role::Quantized);
    if let Some((shard, values)) = found.get(t.name.as_str()).copied() {
        let format = if values.dtype == FileDType::E4M3 && !t.is_buffer() {
            if let Some((_, scales)) = beside(SCALE_INV) {
                coded(&scales.name);
            }
            if values.shape != t.shape {
                check(values, &t, problems);
            }
            match quantized::fp8(&t, beside(SCALE_INV), block) {
                Ok(format) => Some(format),
                Err(how) => {
                    problems.push(Problem::Wrong(t.name.clone(), how));
                    None
                }
            }
        } else {
            check(values, &t, problems);
            values.dtype.native().map(StorageFormat::Plain)
        };
        if let Some(format) = format {
            record(ShardTensor { shard, name: values.name.clone() }, &format, &t, locations);
        }
        roles.insert(t.name.clone(), Role::Parameters(t));
    } else if let Some((shard, values)) = beside(BLOCKS) {
        let scales = beside(SCALES);
        coded(&values.name);
        if let Some((_, scales)) = scales {
            coded(&scales.name);
        }
        // MXFP4 blocks run along the input features: the values are stored [out, in].
        let straight = t.untransposed();
        match quantized::mxfp4(&straight, values, scales) {
            Ok(format) => {
                record(ShardTensor { shard, name: values.name.clone() }, &format, &straight, locations)
            }
            Err((name, how)) => problems.push(Problem::Wrong(name, how)),
        }
    } else {
        problems.push(Problem::Missing(format!("{} {:?}", t.name, t.shape)));
    }
}

fn check(found: &TensorInfo, wanted: &HfTensor, problems: &mut Vec<Problem>) {
    if found.shape != wanted.shape {
        let how = format!("shape {:?}, but the configuration needs {:?}", found.shape, wanted.shape);
        problems.push(Problem::Wrong(found.name.clone(), how));
    }
    if !found.dtype.native().is_some_and(is_castable) {
        let how = format!("dtype {} cannot be read as weights (F32, BF16 and F16 can)", found.dtype);
        problems.push(Problem::Wrong(found.name.clone(), how));
    }
}

/// MTP modules that the files hold: layers after the decoder's last.
fn mtp_layers_in(shards: &Shards, config: &HfConfig, prefix: &str) -> usize {
    let layers = config.model().layers;
    let holds = |j: &usize| {
        let name = format!("{prefix}layers.{}.", layers + j);
        shards.tensors().any(|(_, t)| t.name.starts_with(&name))
    };
    (0..64).take_while(holds).count()
}

/// The embedding or head that an MTP module's file has once more, and the tensor that it is a copy of.
fn mtp_copy(config: &HfConfig, prefix: &str, name: &str) -> Option<(HfTensor, String)> {
    let model = config.model();
    let layer =
        (0..model.mtp.map_or(0, |m| m.modules())).map(|j| format!("{prefix}layers.{}.", model.layers + j));
    let kind = layer.into_iter().find_map(|layer| name.strip_prefix(&layer))?;
    let (logical, of) = match kind {
        "embed_tokens.weight" => ("embed.tokens", format!("{prefix}embed_tokens.weight")),
        "shared_head.head.weight" if model.tied => ("embed.tokens", format!("{prefix}embed_tokens.weight")),
        "shared_head.head.weight" => ("head.weight", HEAD.hf.into()),
        _ => return None,
    };
    let part = LogicalTensor { name: logical.into(), shape: vec![model.vocab, model.hidden], buffer: false };
    let layout = FusedLayout { transposed: false, interleaved: false };
    Some((fuse(name.into(), vec![part], None, layout), of))
}

/// Do two tensors of the files hold the same bytes?
fn same_values(shards: &Shards, a: &TensorInfo, (shard, b): (usize, &TensorInfo)) -> Result<bool> {
    const CHUNK: u64 = 4 << 20;
    let Some(first) = shards.files.iter().find(|s| s.file.get(&a.name).is_some()) else { return Ok(false) };
    let bytes = a.dtype.tensor_bytes(&a.shape).unwrap_or(0);
    if (a.dtype, &a.shape) != (b.dtype, &b.shape) {
        return Ok(false);
    }
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for at in (0..bytes).step_by(CHUNK as usize) {
        let n = (bytes - at).min(CHUNK) as usize;
        x.resize(n, 0);
        y.resize(n, 0);
        first.file.read_range(&a.name, at, &mut x)?;
        shards.files[shard].file.read_range(&b.name, at, &mut y)?;
        if x != y {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The head that some files of tied models have beside the embedding: not read, and written as the embedding.
fn tied_head(model: &ModelConfig, name: &str) -> Option<HfTensor> {
    (model.tied && name == HEAD.hf).then(|| {
        let shape = vec![model.vocab, model.hidden];
        let part = LogicalTensor { name: "embed.tokens".into(), shape, buffer: false };
        fuse(name.into(), vec![part], None, FusedLayout { transposed: false, interleaved: false })
    })
}

/// Does a head hold the values of the embedding? transformers ties them only then, whatever config.json says. True where there
/// is no embedding, which is a problem of its own.
fn is_embedding(
    shards: &Shards,
    head: &TensorInfo,
    locations: &HashMap<String, TensorLocation>,
) -> Result<bool> {
    let Some(ShardTensor { shard, name }) = locations.get("embed.tokens").map(|l| &l.values) else {
        return Ok(true);
    };
    shards.files[*shard].file.get(name).map_or(Ok(true), |of| same_values(shards, head, (*shard, of)))
}

fn is_unused(config: &HfConfig, found: &TensorInfo, prefix: &str) -> bool {
    let layers = config.model().layers;
    // transformers stores the shared expert of `n_shared_experts = 0` as matrices without rows.
    if found.shape.contains(&0) {
        return true;
    }
    let Some(name) = found.name.strip_prefix(prefix) else { return false };
    config.family().unused.iter().any(|p| matches(p, name, layers))
}

fn record(
    values: ShardTensor,
    format: &StorageFormat,
    t: &HfTensor,
    locations: &mut HashMap<String, TensorLocation>,
) {
    for part in &t.parts {
        let rows = part.tensor.shape.first().copied().unwrap_or(1);
        let cols = part.tensor.shape.get(1).copied().unwrap_or(1);
        let (hf, values, format) = (t.name.clone(), values.clone(), format.clone());
        locations.insert(
            part.tensor.name.clone(),
            TensorLocation { hf, values, format, view: part.view, rows, cols },
        );
    }
}

/// A zeroed buffer, or an error if memory is exhausted.
pub(crate) fn zeros(name: &str, bytes: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    out.try_reserve_exact(bytes)
        .map_err(|_| Error::tensor(name, format!("no memory for its {bytes} bytes")))?;
    out.resize(bytes, 0);
    Ok(out)
}
