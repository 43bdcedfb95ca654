//! Assigns tensors to weight files.

use super::ExportOptions;
use crate::cast::is_castable;
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::expected::hf_tensors;
use crate::hf_checkpoint::{HfCheckpoint, Role};
use crate::shards::{SINGLE, Shard};
use ferrotron_core::tensorfile::FileDType;
use ferrotron_tensor::DType;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Read;

/// A tensor to be written.
pub(super) struct OutTensor {
    pub name: String,
    pub dtype: FileDType,
    pub shape: Vec<usize>,
    pub role: Role,
}

impl OutTensor {
    pub fn bytes(&self) -> u64 {
        // Shapes come from checked files or a validated model, so the product does not overflow.
        self.dtype.tensor_bytes(&self.shape).unwrap_or(0)
    }
}

/// A weight file to be written.
pub(super) struct OutFile {
    pub name: String,
    pub tensors: Vec<OutTensor>,
    pub metadata: BTreeMap<String, String>,
    pub header: Header,
}

/// The safetensors header of a file.
pub(super) enum Header {
    /// A new header, with tensors in the order of the safetensors library.
    New,
    /// A new header, with tensors in the given order.
    Ordered,
    /// The bytes of the reference's header.
    Copied(Vec<u8>),
}

pub(super) struct ShardPlan {
    pub files: Vec<OutFile>,
    pub index: Option<String>,
    pub tensor_bytes: u64,
}

pub(super) fn plan_shards(config: &HfConfig, options: &ExportOptions) -> Result<ShardPlan> {
    if let Some(d) = options.dtype
        && !is_castable(d)
    {
        return Err(Error::CannotExpress(format!("weights are written as f32, bf16 or f16, not as {d}")));
    }
    let (files, old_index) = match options.reference {
        // Dequantized tensors have other names and sizes.
        Some(checkpoint) if checkpoint.is_quantized() => (new_files(config, options)?, None),
        Some(checkpoint) => {
            (like_reference(checkpoint, config, options.dtype)?, checkpoint.shards().index.as_deref())
        }
        None => (new_files(config, options)?, None),
    };
    let tensor_bytes = files.iter().flat_map(|f| &f.tensors).map(OutTensor::bytes).sum();
    let unchanged = files.iter().all(|f| matches!(f.header, Header::Copied(_)));
    let index = match old_index {
        Some(text) if unchanged => Some(text.to_string()),
        Some(text) => Some(index(&files, serde_json::from_str(text).unwrap_or_default(), tensor_bytes)?),
        None if files.len() > 1 => Some(index(&files, Map::new(), tensor_bytes)?),
        None => None,
    };
    Ok(ShardPlan { files, index, tensor_bytes })
}

/// The files of the reference.
fn like_reference(
    checkpoint: &HfCheckpoint,
    config: &HfConfig,
    dtype: Option<DType>,
) -> Result<Vec<OutFile>> {
    let wanted = hf_tensors(config.family(), config.model(), checkpoint.prefix())?;
    let had = hf_tensors(checkpoint.config().family(), checkpoint.config().model(), checkpoint.prefix())?;
    if wanted != had {
        return Err(Error::CannotExpress(format!(
            "the model is not of the shape of {}; export it without that reference",
            checkpoint.dir().display()
        )));
    }
    checkpoint.shards().files.iter().map(|shard| like_reference_file(checkpoint, shard, dtype)).collect()
}

fn like_reference_file(checkpoint: &HfCheckpoint, shard: &Shard, dtype: Option<DType>) -> Result<OutFile> {
    let mut tensors = Vec::new();
    let mut changed = false;
    for t in shard.file.tensors() {
        let Some(role) = checkpoint.role(&t.name) else { continue };
        let dtype = match (role, dtype) {
            (Role::Parameters(hf), Some(d)) if !hf.is_buffer() => FileDType::from(d),
            _ => t.dtype,
        };
        changed |= dtype != t.dtype;
        tensors.push(OutTensor { name: t.name.clone(), dtype, shape: t.shape.clone(), role: role.clone() });
    }
    let header = if changed { Header::Ordered } else { Header::Copied(header_bytes(shard)?) };
    Ok(OutFile { name: shard.name.clone(), tensors, metadata: shard.file.metadata().clone(), header })
}

/// The bytes before the first tensor. Copying them keeps a round trip byte for byte, however the writer ordered and
/// padded its header.
fn header_bytes(shard: &Shard) -> Result<Vec<u8>> {
    let path = shard.file.path();
    let length = shard.file.tensors().first().map_or(shard.file.bytes(), |t| t.begin);
    let mut head = Vec::new();
    let file = ferrotron_core::fs::open_regular(path)?;
    file.take(length).read_to_end(&mut head).map_err(|e| Error::io(path, "read", e))?;
    if head.len() as u64 != length {
        return Err(Error::config(&path.display().to_string(), "was truncated while it was being read"));
    }
    Ok(head)
}

/// New files of at most `max_shard_bytes`, filled in the model's order.
fn new_files(config: &HfConfig, options: &ExportOptions) -> Result<Vec<OutFile>> {
    let dtype = FileDType::from(options.dtype.or(config.dtype()).unwrap_or(DType::F32));
    let family = config.family();
    let mut shards: Vec<Vec<OutTensor>> = Vec::new();
    let mut filled = 0;
    for t in hf_tensors(family, config.model(), family.prefix)? {
        let (name, shape) = (t.name.clone(), t.shape.clone());
        let dtype = if t.is_buffer() { FileDType::from(DType::F32) } else { dtype };
        let t = OutTensor { name, dtype, shape, role: Role::Parameters(t) };
        let bytes = t.bytes();
        match shards.last_mut() {
            Some(shard) if filled + bytes <= options.max_shard_bytes => {
                filled += bytes;
                shard.push(t);
            }
            _ => {
                filled = bytes;
                shards.push(vec![t]);
            }
        }
    }
    let count = shards.len();
    let files = shards.into_iter().enumerate().map(|(i, tensors)| OutFile {
        name: match count {
            1 => SINGLE.into(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        },
        tensors,
        metadata: BTreeMap::from([("format".to_string(), "pt".to_string())]),
        header: Header::New,
    });
    Ok(files.collect())
}

fn index(files: &[OutFile], mut map: Map<String, Value>, tensor_bytes: u64) -> Result<String> {
    let places: BTreeMap<&str, &str> =
        files.iter().flat_map(|f| f.tensors.iter().map(|t| (t.name.as_str(), f.name.as_str()))).collect();
    let metadata = map.entry("metadata").or_insert_with(|| json!({}));
    if let Some(m) = metadata.as_object_mut() {
        m.insert("total_size".into(), json!(tensor_bytes));
    }
    map.insert("weight_map".into(), json!(places));
    let text = serde_json::to_string_pretty(&map);
    Ok(text.map_err(|e| Error::CannotExpress(format!("the index cannot be written: {e}")))? + "\n")
}
