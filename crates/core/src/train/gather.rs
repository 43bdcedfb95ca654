//! What the stages of a pipeline hold, brought together.

use super::LogicalValues;
use crate::checkpoint::Item;
use crate::model::{ModelConfig, logical_parts};
use crate::tensorfile::FileDType;
use crate::{Error, Result};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, DType, Tensor};
use std::collections::HashMap;

/// Logical tensors of all stages in the order of the model, on every rank.
pub fn all_stages(rank: &Rank, model: &ModelConfig, mine: Vec<LogicalValues>) -> Result<Vec<LogicalValues>> {
    if rank.pp.size() == 1 {
        return Ok(mine);
    }
    let names: Vec<&str> = mine.iter().map(|v| v.name.as_str()).collect();
    let tables = rank.pp.all_gather_bytes(&encode(&names)?, "names of tensors")?;
    let values: Vec<f32> = mine.iter().flat_map(|v| &v.values).copied().collect();
    let values = rank.pp.all_gather_bytes(bytemuck::cast_slice(&values), "tensors of all stages")?;
    let parts = logical_parts(model)?;
    let sizes: HashMap<&str, usize> =
        parts.iter().map(|p| (p.name.as_str(), p.shape.iter().product())).collect();
    let mut found: HashMap<String, Vec<f32>> = HashMap::new();
    for (table, values) in tables.iter().zip(values) {
        let mut rest = values.chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>);
        for name in decode::<Vec<String>>(table)? {
            let size = sizes.get(name.as_str()).copied().unwrap_or(0);
            found.insert(name, rest.by_ref().take(size).collect());
        }
    }
    let missing = |name: &str| Error::Invalid(format!("no stage brought {name}"));
    parts
        .into_iter()
        .map(|p| {
            let values = found.remove(&p.name).ok_or_else(|| missing(&p.name))?;
            Ok(LogicalValues { name: p.name, shape: p.shape, values })
        })
        .collect()
}

/// The items of all stages on the first rank of the world; elsewhere, a rank's own. One tensor travels at a time.
pub(super) fn on_first_rank(rank: &Rank, mut mine: Vec<Item>) -> Result<Vec<Item>> {
    let s = &rank.compute;
    if rank.pp.size() == 1 || rank.pp.ranks().first() != Some(&0) {
        return Ok(mine);
    }
    let about: Vec<(&str, &str, &[usize])> =
        mine.iter().map(|i| (i.name.as_str(), i.dtype.name(), i.shape.as_slice())).collect();
    let tables = rank.pp.all_gather_bytes(&encode(&about)?, "names of tensors")?;
    let label = "a tensor of a checkpoint";
    if rank.pp.rank() > 0 {
        for item in &mine {
            let bytes = s.upload(&item.bytes, &[item.bytes.len()], Category::Communication)?;
            rank.pp.send(s, &bytes, 0, label)?;
        }
        return Ok(mine);
    }
    let types = FileDType::ALL.iter().filter_map(|d| d.native());
    for (stage, table) in tables.iter().enumerate().skip(1) {
        for (name, dtype, shape) in decode::<Vec<(String, String, Vec<usize>)>>(table)? {
            let Some(dtype) = types.clone().find(|d| d.name() == dtype) else {
                return Err(Error::Invalid(format!("stage {stage} brought {name} of type {dtype}")));
            };
            let len = shape.iter().product::<usize>() * dtype.size();
            let bytes = Tensor::empty(s, &[len], DType::U8, Category::Communication)?;
            rank.pp.receive(s, &bytes, stage, label)?;
            mine.push(Item { name, dtype, shape, bytes: s.download(&bytes)? });
        }
    }
    Ok(mine)
}

fn encode(x: &impl serde::Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(x).map_err(|e| Error::Invalid(format!("a list of tensors: {e}")))
}

fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| Error::Invalid(format!("a list of tensors: {e}")))
}
