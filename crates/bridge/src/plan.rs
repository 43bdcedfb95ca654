//! A folder of weights checked against its configuration, ready to be read tensor by tensor.

use crate::config::HfConfig;
use crate::convert::{convert, convertible, transpose};
use crate::error::{Error, Result};
use crate::expected::{HfTensor, hf_tensors, matches};
use crate::family::HEAD;
use crate::logical::{LogicalTensor, logical_tensors};
use crate::problems::Problem;
use crate::shards::{Shard, Shards};
use ferrotron_core::model::config::ModelConfig;
use ferrotron_core::tensorfile::{TensorFile, TensorInfo};
use ferrotron_tensor::DType;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// What a tensor of the files is to us.
#[derive(Clone, Debug)]
pub(crate) enum Role {
    /// One or more parameters, or a second copy of one (the head in a file of a tied model).
    Parameters(HfTensor),
    /// Something no model needs; exported as it was.
    Stray,
}

/// Where a logical tensor's rows are.
#[derive(Debug)]
struct Place {
    shard: usize,
    hf: String,
    dtype: DType,
    transposed: bool,
    /// Rows before it in the stack.
    first_row: usize,
    rows: usize,
    /// Elements of one row (1 for vectors).
    cols: usize,
    /// Rows of the whole stack.
    stack_rows: usize,
}

/// A Hugging Face folder whose every tensor has been accounted for: nothing missing, nothing unknown, shapes
/// and element types right. Reading takes one tensor's memory.
#[derive(Debug)]
pub struct Plan {
    dir: PathBuf,
    config: HfConfig,
    prefix: &'static str,
    shards: Shards,
    roles: HashMap<String, Role>,
    places: HashMap<String, Place>,
    logical: Vec<LogicalTensor>,
}

/// Bytes read at once where a tensor passes through a buffer.
const BUFFER: usize = 4 << 20;

impl Plan {
    /// Reads `config.json` of a folder and checks all its weight files against it.
    pub fn open(dir: &Path) -> Result<Plan> {
        Plan::with_config(dir, HfConfig::from_dir(dir)?)
    }

    /// Checks the weight files of a folder against a configuration.
    pub fn with_config(dir: &Path, config: HfConfig) -> Result<Plan> {
        let mut problems = Vec::new();
        let shards = Shards::open(dir, &mut problems)?;
        let family = config.family();
        let model = config.model();
        // Files of the bare decoder (GPT-2's own on the hub) have no prefix.
        let bare = shards.tensors().any(|(_, t)| t.name.ends_with(".weight"))
            && !shards.tensors().any(|(_, t)| t.name.starts_with(family.prefix));
        let prefix = if bare { "" } else { family.prefix };

        let mut wanted: HashMap<String, HfTensor> =
            hf_tensors(family, model, prefix)?.into_iter().map(|t| (t.name.clone(), t)).collect();
        let mut roles = HashMap::new();
        let mut places = HashMap::new();
        for (shard, found) in shards.files.iter().enumerate().flat_map(|(i, s)| with(i, s)) {
            let role = if let Some(t) = wanted.remove(&found.name) {
                check(found, &t, &mut problems);
                place(shard, found, &t, &mut places);
                Role::Parameters(t)
            } else if roles.contains_key(&found.name) {
                problems.push(Problem::Wrong(found.name.clone(), "is in two files".into()));
                continue;
            } else if let Some(copy) = tied_head(model, &found.name) {
                check(found, &copy, &mut problems);
                Role::Parameters(copy)
            } else if is_stray(family.strays, found, prefix, model.layers) {
                Role::Stray
            } else {
                problems.push(Problem::Unexpected(format!("{} {:?}", found.name, found.shape)));
                continue;
            };
            roles.insert(found.name.clone(), role);
        }
        problems.extend(wanted.into_values().map(|t| Problem::Missing(format!("{} {:?}", t.name, t.shape))));
        if !problems.is_empty() {
            problems.sort_by_key(|p| match p {
                Problem::Missing(n) => (0, n.clone()),
                Problem::Unexpected(n) => (1, n.clone()),
                Problem::Wrong(n, _) => (2, n.clone()),
            });
            return Err(Error::Tensors { origin: dir.display().to_string(), problems });
        }
        let logical = logical_tensors(model);
        Ok(Plan { dir: dir.into(), config, prefix, shards, roles, places, logical })
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

    /// Element type of a parameter in the files.
    pub fn dtype(&self, logical: &str) -> Result<DType> {
        Ok(self.place(logical)?.dtype)
    }

    /// Tensors that are of no use to a model and are kept for export only.
    pub fn strays(&self) -> impl Iterator<Item = &str> {
        self.roles.iter().filter(|(_, r)| matches!(r, Role::Stray)).map(|(n, _)| n.as_str())
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
        if !convertible(dtype) {
            let what = format!("weights are read as f32, bf16 or f16, not as {dtype}");
            return Err(Error::tensor(logical, what));
        }
        let rows = p.first_row + rows.start..p.first_row + rows.end;
        let mut out = zeros(logical, rows.len() * p.cols * dtype.size())?;
        let Some(shard) = self.shards.files.get(p.shard) else {
            return Err(Error::tensor(logical, "its file is gone"));
        };
        if p.transposed {
            read_columns(&shard.file, p, rows, dtype, &mut out)?;
        } else {
            read_straight(&shard.file, p, rows, dtype, &mut out)?;
        }
        Ok(out)
    }

    fn place(&self, logical: &str) -> Result<&Place> {
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

fn with(i: usize, s: &Shard) -> impl Iterator<Item = (usize, &TensorInfo)> {
    s.file.tensors().iter().map(move |t| (i, t))
}

fn check(found: &TensorInfo, wanted: &HfTensor, problems: &mut Vec<Problem>) {
    if found.shape != wanted.shape {
        let how = format!("shape {:?}, but the configuration needs {:?}", found.shape, wanted.shape);
        problems.push(Problem::Wrong(found.name.clone(), how));
    }
    if !found.dtype.native().is_some_and(convertible) {
        let how = format!("element type {} cannot be read as weights (F32, BF16 and F16 can)", found.dtype);
        problems.push(Problem::Wrong(found.name.clone(), how));
    }
}

/// The head that some files of tied models have beside the embedding: not read, written as the embedding is.
fn tied_head(model: &ModelConfig, name: &str) -> Option<HfTensor> {
    (model.tied && name == HEAD.hf).then(|| {
        let shape = vec![model.vocab, model.hidden];
        let part = LogicalTensor { name: "embed.tokens".into(), shape: shape.clone() };
        HfTensor { name: name.into(), shape, parts: vec![part], transposed: false }
    })
}

fn is_stray(strays: &[&str], found: &TensorInfo, prefix: &str, layers: usize) -> bool {
    found.name.strip_prefix(prefix).is_some_and(|name| strays.iter().any(|p| matches(p, name, layers)))
}

fn place(shard: usize, found: &TensorInfo, t: &HfTensor, places: &mut HashMap<String, Place>) {
    let Some(dtype) = found.dtype.native() else { return };
    let stack_rows = t.parts.iter().filter_map(|p| p.shape.first()).sum();
    let mut first_row = 0;
    for part in &t.parts {
        let rows = part.shape.first().copied().unwrap_or(1);
        let cols = part.shape.get(1).copied().unwrap_or(1);
        let (hf, transposed) = (found.name.clone(), t.transposed);
        let place = Place { shard, hf, dtype, transposed, first_row, rows, cols, stack_rows };
        places.insert(part.name.clone(), place);
        first_row += rows;
    }
}

/// Rows lie one after the other.
fn read_straight(
    file: &TensorFile,
    p: &Place,
    rows: Range<usize>,
    dtype: DType,
    out: &mut [u8],
) -> Result<()> {
    let start = (rows.start * p.cols * p.dtype.size()) as u64;
    if p.dtype == dtype {
        return Ok(file.read_range(&p.hf, start, out)?);
    }
    let per_buffer = BUFFER / p.dtype.size();
    let mut buffer = vec![0u8; BUFFER.min(rows.len() * p.cols * p.dtype.size())];
    for (i, chunk) in out.chunks_mut(per_buffer * dtype.size()).enumerate() {
        let from = &mut buffer[..chunk.len() / dtype.size() * p.dtype.size()];
        file.read_range(&p.hf, start + (i * BUFFER) as u64, from)?;
        convert(from, p.dtype, chunk, dtype);
    }
    Ok(())
}

/// The file holds `[cols, stack_rows]`: our rows are some of its columns.
fn read_columns(
    file: &TensorFile,
    p: &Place,
    rows: Range<usize>,
    dtype: DType,
    out: &mut [u8],
) -> Result<()> {
    let (wide, size) = (p.stack_rows, p.dtype.size());
    let n = rows.len();
    let at_once = (BUFFER / (n * size).max(1)).clamp(1, p.cols.max(1));
    let mut raw = vec![0u8; at_once * n * size];
    let mut converted = vec![0u8; at_once * n * dtype.size()];
    for c0 in (0..p.cols).step_by(at_once) {
        let count = at_once.min(p.cols - c0);
        let raw = &mut raw[..count * n * size];
        if n == wide {
            file.read_range(&p.hf, (c0 * wide * size) as u64, raw)?;
        } else {
            for (i, line) in raw.chunks_exact_mut((n * size).max(1)).enumerate() {
                file.read_range(&p.hf, (((c0 + i) * wide + rows.start) * size) as u64, line)?;
            }
        }
        let converted = &mut converted[..count * n * dtype.size()];
        convert(raw, p.dtype, converted, dtype);
        transpose(converted, count, n, out, p.cols, c0, dtype.size());
    }
    Ok(())
}

/// Memory for a tensor, or an error where there is none.
pub(crate) fn zeros(name: &str, bytes: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    out.try_reserve_exact(bytes)
        .map_err(|_| Error::tensor(name, format!("no memory for its {bytes} bytes")))?;
    out.resize(bytes, 0);
    Ok(out)
}
