//! Gathers logical tensors and small messages over pipeline stages and expert-parallel ranks.

use super::LogicalValues;
use crate::model::{ModelConfig, logical_parts};
use crate::{Error, Result};
use ferrotron_comm::Communicator;
use ferrotron_engine::Rank;
use std::collections::{HashMap, HashSet};

/// Gathers the logical tensors of all stages and experts to every rank, in model order.
pub fn gather_all_stages(
    rank: &Rank,
    model: &ModelConfig,
    mut mine: Vec<LogicalValues>,
) -> Result<Vec<LogicalValues>> {
    // Experts first: then the ranks of every pipeline have all of their stages.
    for group in [&rank.etp_ep_group, &rank.pp] {
        if group.size() > 1 && (group.name() == rank.pp.name() || rank.expert_parallel_rank().size > 1) {
            mine = gather_group(group, model, mine)?;
        }
    }
    Ok(mine)
}

/// All-gathers the logical tensors of a group, in model order.
fn gather_group(
    group: &Communicator,
    model: &ModelConfig,
    mine: Vec<LogicalValues>,
) -> Result<Vec<LogicalValues>> {
    let shapes: Vec<(&str, &[usize])> = mine.iter().map(|v| (v.name.as_str(), &v.shape[..])).collect();
    let tables = group.all_gather_bytes(&encode(&shapes)?, "names of tensors")?;
    let values: Vec<f32> = mine.iter().flat_map(|v| &v.values).copied().collect();
    let values = group.all_gather_bytes(bytemuck::cast_slice(&values), "tensors of all stages")?;
    let mut found: Vec<LogicalValues> = Vec::new();
    let mut names = HashSet::new();
    for (table, values) in tables.iter().zip(values) {
        let mut rest = values.chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>);
        for (name, shape) in decode::<Vec<(String, Vec<usize>)>>(table)? {
            let values = rest.by_ref().take(shape.iter().product()).collect();
            if names.insert(name.clone()) {
                found.push(LogicalValues { name, shape, values });
            }
        }
    }
    // Adapters, which the architecture does not list, after the rest in the order of stages.
    let order: HashMap<String, usize> =
        logical_parts(model)?.into_iter().enumerate().map(|(i, p)| (p.name, i)).collect();
    found.sort_by_key(|v| order.get(&v.name).copied().unwrap_or(usize::MAX));
    Ok(found)
}

/// All-gathers a message of each pipeline stage, in stage order.
pub(super) fn all_gather_stages(rank: &Rank, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
    Ok(rank.pp.all_gather_bytes(mine, "messages of stages")?)
}

fn encode(x: &impl serde::Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(x).map_err(|e| Error::Invalid(format!("a list of tensors: {e}")))
}

fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| Error::Invalid(format!("a list of tensors: {e}")))
}
