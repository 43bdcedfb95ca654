//! Writing a Hugging Face folder: all of it or nothing.

mod folder;
mod sharding;
mod write_tensor;

use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::hf_checkpoint::{HfCheckpoint, Role};
use crate::shards::INDEX;
use ferrotron_tensor::DType;
use folder::StagedFolder;
pub(crate) use folder::copy_companions;
use sharding::{OutFile, OutTensor, plan_shards};
use std::collections::HashMap;
use std::path::Path;
use write_tensor::{ShardWriter, copy_unused, write_parameters};
pub use write_tensor::{TensorData, assemble};

/// Gives the values of one parameter under its logical name, row-major, in any float type.
pub type TensorSource<'a> = dyn Fn(&str) -> Result<TensorData> + 'a;

/// How to write a folder.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions<'a> {
    /// Element type of the weights; none means as in the reference, without one as `config.json` says, else f32.
    pub dtype: Option<DType>,
    /// A new file is begun before one grows beyond this (a single larger tensor still gets its own file).
    /// The reference's files are kept as they are cut.
    pub max_shard_bytes: u64,
    /// The folder the model came from: same names, order, files and headers, and its tokenizer files.
    pub reference: Option<&'a HfCheckpoint>,
    /// A folder whose tokenizer files are copied; the reference's unless given.
    pub companions: Option<&'a Path>,
    /// Further files by name (a tokenizer for a natively trained model, say).
    pub more: &'a [(&'a str, &'a str)],
    /// Replace a Hugging Face folder that is in the way.
    pub overwrite: bool,
}

impl Default for ExportOptions<'_> {
    fn default() -> Self {
        ExportOptions {
            dtype: None,
            max_shard_bytes: 5_000_000_000,
            reference: None,
            companions: None,
            more: &[],
            overwrite: false,
        }
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// Weight files, in order.
    pub files: Vec<String>,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
}

/// Writes `config.json`, the weights (and their index, if there are several files) and, with a reference, its
/// tokenizer files to `out_dir`, which must not exist or be empty unless it may be replaced. The folder is made beside it, synced and
/// renamed, so that it appears whole or not at all. Memory: one tensor.
pub fn export(
    out_dir: &Path,
    config: &HfConfig,
    source: &TensorSource,
    options: &ExportOptions,
) -> Result<ExportSummary> {
    let plan = plan_shards(config, options)?;
    let folder = StagedFolder::create(out_dir, options.overwrite)?;
    let config = options.dtype.map_or_else(|| config.clone(), |d| config.with_dtype(d));
    let config = config.as_written(options.reference.is_some_and(|plan| !plan.is_quantized()));
    folder.write("config.json", config.text().as_bytes())?;
    for file in &plan.files {
        write_file(&folder, file, source, options.reference)?;
    }
    if let Some(index) = &plan.index {
        folder.write(INDEX, index.as_bytes())?;
    }
    if let Some(from) = options.companions.or(options.reference.map(HfCheckpoint::dir)) {
        copy_companions(from, folder.dir())?;
    }
    for (name, text) in options.more {
        folder.write(name, text.as_bytes())?;
    }
    folder.publish()?;
    Ok(ExportSummary {
        files: plan.files.into_iter().map(|f| f.name).collect(),
        tensor_bytes: plan.tensor_bytes,
    })
}

fn write_file(
    folder: &StagedFolder,
    file: &OutFile,
    source: &TensorSource,
    reference: Option<&HfCheckpoint>,
) -> Result<()> {
    let mut out = ShardWriter::create(&folder.path(&file.name), file)?;
    let by_name: HashMap<&str, &OutTensor> = file.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    for name in out.order(file) {
        let Some(&t) = by_name.get(name.as_str()) else { continue };
        match &t.role {
            Role::Parameters(hf) => write_parameters(&mut out, t, hf, source)?,
            Role::Quantized => return Err(Error::tensor(&t.name, "is written decoded, under another name")),
            Role::Unused => match reference {
                Some(plan) => copy_unused(&mut out, plan, t)?,
                None => return Err(Error::tensor(&t.name, "no folder to copy it from")),
            },
        }
    }
    out.finish()
}
