//! Writes a Hugging Face folder, atomically.

mod sharding;
mod write_tensor;

use crate::companions::write_companions;
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::hf_checkpoint::{HfCheckpoint, Role};
use crate::replaceable::OutputKind;
use crate::shards::INDEX;
use crate::staged_folder::StagedFolder;
use ferrotron_tensor::DType;
use sharding::{OutFile, OutTensor, plan_shards};
use std::collections::HashMap;
use std::path::Path;
use write_tensor::{ShardWriter, copy_unused, write_parameters};
pub use write_tensor::{TensorData, assemble};

/// Returns the values of a parameter by its logical name: row-major, in any float dtype.
pub type TensorSource<'a> = dyn Fn(&str) -> Result<TensorData> + 'a;

/// Options of [`export`].
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions<'a> {
    /// Dtype of the weights; none: as in the reference, otherwise as `config.json` says, otherwise f32.
    pub dtype: Option<DType>,
    /// Largest size of a weight file (a single larger tensor gets a file of its own). With a reference, its sharding
    /// is kept.
    pub max_shard_bytes: u64,
    /// The folder the model came from: the output has its tensor names, order, files, headers and tokenizer files.
    pub reference: Option<&'a HfCheckpoint>,
    /// A folder whose tokenizer files are copied; the reference unless given. Without a reference all files that accompany weights
    /// are.
    pub companions: Option<&'a Path>,
    /// Additional files as name and text, such as a tokenizer for a natively trained model.
    pub more: &'a [(&'a str, &'a str)],
    /// Replace a Hugging Face folder that an earlier export wrote.
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

/// Summary of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// Weight files, in order.
    pub files: Vec<String>,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
}

/// Writes `config.json`, the weights, their index if there are several files, and the tokenizer files of the
/// reference to `out_dir`, which must not exist or be empty unless `overwrite` is set. The folder is written beside
/// it, synced and renamed, so that it appears only once it is complete. One tensor is in memory at a time.
pub fn export(
    out_dir: &Path,
    config: &HfConfig,
    source: &TensorSource,
    options: &ExportOptions,
) -> Result<ExportSummary> {
    let plan = plan_shards(config, options)?;
    let folder = StagedFolder::create(out_dir, OutputKind::HuggingFace, options.overwrite)?;
    let config = options.dtype.map_or_else(|| config.clone(), |d| config.with_dtype(d));
    let config = config.as_written(options.reference.is_some_and(|plan| !plan.is_quantized()));
    folder.write("config.json", config.text().as_bytes())?;
    for file in &plan.files {
        write_file(&folder, file, source, options.reference)?;
    }
    if let Some(index) = &plan.index {
        folder.write(INDEX, index.as_bytes())?;
    }
    let from = (options.reference.map(HfCheckpoint::dir), options.companions);
    write_companions(&folder, from, options.more)?;
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
            Role::Quantized => {
                return Err(Error::tensor(
                    &t.name,
                    "is quantized and is exported dequantized under another name",
                ));
            }
            Role::Unused => match reference {
                Some(plan) => copy_unused(&mut out, plan, t)?,
                None => {
                    return Err(Error::tensor(
                        &t.name,
                        "is not a parameter, and there is no reference folder to copy it from",
                    ));
                }
            },
        }
    }
    out.finish()
}
