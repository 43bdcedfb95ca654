//! A folder of weights checked against its configuration, ready to be read tensor by tensor.

use crate::cast::is_castable;
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::expected::{HfTensor, fuse, hf_tensors, matches};
use crate::family::HEAD;
use crate::logical::{LogicalTensor, logical_buffers, logical_tensors};
use crate::problems::Problem;
use crate::quantized::{self, BLOCKS, SCALE_INV, SCALES};
use crate::read_tensor::{ShardTensor, StorageFormat, TensorLocation, read};
use crate::shards::Shards;
use crate::view::FusedLayout;
use ferrotron_core::model::config::ModelConfig;
use ferrotron_core::tensorfile::{FileDType, TensorInfo};
use ferrotron_tensor::DType;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// What a tensor of the files is to us.
#[derive(Clone, Debug)]
pub(crate) enum Role {
    /// One or more parameters, or a second copy of one (the head in a file of a tied model).
    Parameters(HfTensor),
    /// Numbers or scales of parameters that were stored in few bits; exported decoded.
    Quantized,
    /// Something no model needs; exported as it was.
    Unused,
}

/// A Hugging Face folder whose every tensor has been accounted for: nothing missing, nothing unknown, shapes
/// and element types right. Reading takes one tensor's memory.
#[derive(Debug)]
pub struct HfCheckpoint {
    dir: PathBuf,
    config: HfConfig,
    prefix: &'static str,
    shards: Shards,
    roles: HashMap<String, Role>,
    places: HashMap<String, TensorLocation>,
    logical: Vec<LogicalTensor>,
    buffers: Vec<LogicalTensor>,
}

/// Every tensor of the files by name, with its file.
type FileTensors<'a> = HashMap<&'a str, (usize, &'a TensorInfo)>;

impl HfCheckpoint {
    /// Reads `config.json` of a folder and checks all its weight files against it.
    pub fn open(dir: &Path) -> Result<HfCheckpoint> {
        HfCheckpoint::with_config(dir, HfConfig::from_dir(dir)?)
    }

    /// Checks the weight files of a folder against a configuration.
    pub fn with_config(dir: &Path, config: HfConfig) -> Result<HfCheckpoint> {
        let mut problems = Vec::new();
        let shards = Shards::open(dir, &mut problems)?;
        let family = config.family();
        let model = config.model();
        // Files of the bare decoder (GPT-2's own on the hub) have no prefix.
        let bare = shards.tensors().any(|(_, t)| t.name.ends_with(".weight"))
            && !shards.tensors().any(|(_, t)| t.name.starts_with(family.prefix));
        let prefix = if bare { "" } else { family.prefix };

        let mut found: FileTensors = HashMap::new();
        for (shard, file) in shards.files.iter().enumerate() {
            for t in file.file.tensors() {
                if found.insert(&t.name, (shard, t)).is_some() {
                    problems.push(Problem::Wrong(t.name.clone(), "is in two files".into()));
                }
            }
        }
        let mut roles = HashMap::new();
        let mut places = HashMap::new();
        for t in hf_tensors(family, model, prefix)? {
            locate(t, &found, config.weight_block(), (&mut roles, &mut places), &mut problems);
        }
        for (_, t) in shards.tensors().filter(|(_, t)| !roles.contains_key(&t.name)).collect::<Vec<_>>() {
            let role = if let Some(copy) = tied_head(model, &t.name) {
                check(t, &copy, &mut problems);
                Role::Parameters(copy)
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
        Ok(HfCheckpoint { dir: dir.into(), config, prefix, shards, roles, places, logical, buffers })
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

    /// What belongs to the model without being a parameter: f32, whatever the weights are.
    pub fn buffers(&self) -> &[LogicalTensor] {
        &self.buffers
    }

    /// Element type of a parameter in the files; bf16 where it is stored in fewer bits.
    pub fn dtype(&self, logical: &str) -> Result<DType> {
        Ok(self.place(logical)?.format.dtype())
    }

    /// Is something stored in few bits, to be decoded when it is read?
    pub fn is_quantized(&self) -> bool {
        self.places.values().any(|p| !matches!(p.format, StorageFormat::Plain(_)))
    }

    /// Tensors that are of no use to a model and are kept for export only.
    pub fn unused_tensors(&self) -> impl Iterator<Item = &str> {
        self.roles.iter().filter(|(_, r)| matches!(r, Role::Unused)).map(|(n, _)| n.as_str())
    }

    /// The tensor of the files that holds this parameter, alone or with others.
    pub fn hf_name(&self, logical: &str) -> Result<&str> {
        Ok(&self.place(logical)?.hf)
    }

    /// The tensors of the files that hold parameters, in the model's order.
    pub fn hf_tensors(&self) -> Result<Vec<HfTensor>> {
        hf_tensors(self.config.family(), self.config.model(), self.prefix)
    }

    /// One parameter as little-endian `dtype` (f32, bf16 or f16), row-major.
    pub fn read(&self, logical: &str, dtype: DType) -> Result<Vec<u8>> {
        let rows = self.place(logical)?.rows;
        self.read_rows(logical, 0..rows, dtype)
    }

    /// Some rows of one parameter, reading nothing else: a rank's own slice of a matrix.
    pub fn read_rows(&self, logical: &str, rows: Range<usize>, dtype: DType) -> Result<Vec<u8>> {
        let p = self.place(logical)?;
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

    fn place(&self, logical: &str) -> Result<&TensorLocation> {
        self.places
            .get(logical)
            .ok_or_else(|| Error::tensor(logical, format!("{} has no such parameter", self.dir.display())))
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

/// Finds a tensor in the files, as it is or in few bits, and says where its parameters are.
fn locate(
    t: HfTensor,
    found: &FileTensors,
    block: [usize; 2],
    (roles, places): (&mut HashMap<String, Role>, &mut HashMap<String, TensorLocation>),
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
            place(ShardTensor { shard, name: values.name.clone() }, &format, &t, places);
        }
        roles.insert(t.name.clone(), Role::Parameters(t));
    } else if let Some((shard, values)) = beside(BLOCKS) {
        let scales = beside(SCALES);
        coded(&values.name);
        if let Some((_, scales)) = scales {
            coded(&scales.name);
        }
        // Decoded, they are [out, in], whatever the others are.
        let straight = t.untransposed();
        match quantized::mxfp4(&straight, values, scales) {
            Ok(format) => place(ShardTensor { shard, name: values.name.clone() }, &format, &straight, places),
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
        let how = format!("element type {} cannot be read as weights (F32, BF16 and F16 can)", found.dtype);
        problems.push(Problem::Wrong(found.name.clone(), how));
    }
}

/// The head that some files of tied models have beside the embedding: not read, written as the embedding is.
fn tied_head(model: &ModelConfig, name: &str) -> Option<HfTensor> {
    (model.tied && name == HEAD.hf).then(|| {
        let shape = vec![model.vocab, model.hidden];
        let part = LogicalTensor { name: "embed.tokens".into(), shape, buffer: false };
        fuse(name.into(), vec![part], None, FusedLayout { transposed: false, interleaved: false })
    })
}

fn is_unused(config: &HfConfig, found: &TensorInfo, prefix: &str) -> bool {
    let layers = config.model().layers;
    let Some(name) = found.name.strip_prefix(prefix) else { return false };
    config.family().unused.iter().any(|p| matches(p, name, layers))
        || (layers..layers + config.mtp_layers()).any(|i| name.starts_with(&format!("layers.{i}.")))
}

fn place(
    values: ShardTensor,
    format: &StorageFormat,
    t: &HfTensor,
    places: &mut HashMap<String, TensorLocation>,
) {
    for part in &t.parts {
        let rows = part.tensor.shape.first().copied().unwrap_or(1);
        let cols = part.tensor.shape.get(1).copied().unwrap_or(1);
        let (hf, values, format) = (t.name.clone(), values.clone(), format.clone());
        places.insert(
            part.tensor.name.clone(),
            TensorLocation { hf, values, format, view: part.view, rows, cols },
        );
    }
}

/// Memory for a tensor, or an error where there is none.
pub(crate) fn zeros(name: &str, bytes: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    out.try_reserve_exact(bytes)
        .map_err(|_| Error::tensor(name, format!("no memory for its {bytes} bytes")))?;
    out.resize(bytes, 0);
    Ok(out)
}
