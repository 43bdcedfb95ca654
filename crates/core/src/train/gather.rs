//! Gathers logical tensors and small messages over pipeline stages and expert-parallel ranks.

use super::LogicalValues;
use crate::model::{ModelConfig, logical_parts};
use crate::{Error, Result};
use ferrotron_comm::Communicator;
use ferrotron_engine::{Part, Rank};
use std::collections::HashMap;

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
    let names: Vec<&str> = mine.iter().map(|v| v.name.as_str()).collect();
    let tables = group.all_gather_bytes(&encode(&names)?, "names of tensors")?;
    let values: Vec<f32> = mine.iter().flat_map(|v| &v.values).copied().collect();
    let values = group.all_gather_bytes(bytemuck::cast_slice(&values), "tensors of all stages")?;
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
    let take =
        |p: Part| found.remove(&p.name).map(|values| LogicalValues { name: p.name, shape: p.shape, values });
    Ok(parts.into_iter().filter_map(take).collect())
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
