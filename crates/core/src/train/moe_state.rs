//! Expert biases and quantiles of MoE layers in checkpoints: f32 `[E]` per layer, `model/<layer>.expert_bias` and
//! `model/<layer>.quantiles`. They are equal on all ranks of a stage; a checkpoint without them starts from zeros. Those of
//! the base model of adapters are not trained and stay out of checkpoints, as its weights do.

use super::{LogicalValues, Trainer, gather};
use crate::checkpoint::{Item, Loaded};
use crate::model::ModelConfig;
use crate::{Error, Result};
use ferrotron_engine::moe::MoeState;
use ferrotron_tensor::{DType, Tensor};

const BIAS: &str = "expert_bias";
const QUANTILES: &str = "quantiles";

/// The tables of MoE layers that persist between steps: name and f32 `[E]`. `base`: those of the base model too.
fn tables(moe: &MoeState, base: bool) -> Result<Vec<(String, Tensor)>> {
    let mut out = Vec::new();
    for (i, m) in moe.specs().iter().enumerate().filter(|(_, m)| base || !m.router.base) {
        let kinds = [(BIAS, m.expert_bias, &moe.expert_bias), (QUANTILES, m.quantiles, &moe.quantiles)];
        for (kind, _, table) in kinds.into_iter().filter(|k| k.1) {
            out.push((format!("{}.{kind}", m.name), table.narrow(0, i, 1)?));
        }
    }
    Ok(out)
}

/// All tables of this rank, as they are stored.
pub(super) fn persistent(moe: &MoeState) -> Vec<(String, Tensor)> {
    [(BIAS, &moe.expert_bias), (QUANTILES, &moe.quantiles)]
        .map(|(name, t)| (name.to_string(), t.clone()))
        .into()
}

/// The tables of this rank's stage for a checkpoint; all ranks of the stage have the same.
pub(super) fn items(t: &Trainer) -> Result<Vec<Item>> {
    let Some(moe) = t.model.step_state.moe() else { return Ok(Vec::new()) };
    let item = |(name, table): (String, Tensor)| {
        let values = t.rank.compute.download::<f32>(&table)?;
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(Item::whole(&format!("model/{name}"), DType::F32, vec![values.len()], bytes))
    };
    tables(moe, false)?.into_iter().map(item).collect()
}

/// Names and shapes of the tables that a checkpoint has; each is optional.
pub(super) fn found<'a>(loaded: &'a Loaded, model: &ModelConfig) -> Vec<(&'a str, &'a [usize])> {
    let experts = model.moe.as_ref().map_or(0, |m| m.experts);
    let is_moe_table = |name: &str| {
        let Some((layer, kind)) = name.strip_prefix("model/").and_then(|rest| rest.split_once(".moe."))
        else {
            return false;
        };
        let number = |n: &str| n.parse::<usize>().ok();
        let layer = match (layer.strip_prefix("layers."), layer.strip_prefix("mtp.")) {
            (Some(n), _) => number(n),
            (_, Some(n)) => n.strip_suffix(".layer").and_then(number).map(|d| model.layers + d),
            _ => None,
        };
        layer.is_some_and(|i| model.moe_layer(i).is_some()) && [BIAS, QUANTILES].contains(&kind)
    };
    let tensors = loaded.tensors().filter(|t| is_moe_table(&t.name) && t.shape == [experts]);
    tensors.map(|t| (t.name.as_str(), t.shape.as_slice())).collect()
}

/// Restores the tables from a checked checkpoint.
pub(super) fn restore(t: &Trainer, loaded: &Loaded) -> Result<()> {
    let Some(moe) = t.model.step_state.moe() else { return Ok(()) };
    for (name, table) in tables(moe, false)? {
        let name = format!("model/{name}");
        match loaded.get(&name) {
            Some(_) => {
                t.rank.compute.upload_into(&table, &super::to_f32(DType::F32, &loaded.read(&name)?)?)?
            }
            None => t.rank.compute.zero(&table)?,
        }
    }
    Ok(())
}

impl Trainer {
    /// Expert biases and quantiles of all MoE layers, by name. Every rank calls it.
    pub fn expert_tables(&self) -> Result<Vec<LogicalValues>> {
        let mut mine = Vec::new();
        for (name, table) in
            self.model.step_state.moe().map(|moe| tables(moe, true)).transpose()?.unwrap_or_default()
        {
            let values = self.rank.compute.download::<f32>(&table)?;
            mine.push(LogicalValues { name, shape: vec![values.len()], values });
        }
        let text = serde_json::to_vec(&mine.iter().map(|v| (&v.name, &v.values)).collect::<Vec<_>>());
        let broken = |e: serde_json::Error| Error::Invalid(format!("expert tables of other stages: {e}"));
        let mut all = Vec::new();
        for part in gather::all_gather_stages(&self.rank, &text.map_err(broken)?)? {
            let values: Vec<(String, Vec<f32>)> = serde_json::from_slice(&part).map_err(broken)?;
            all.extend(values.into_iter().map(|(name, values)| LogicalValues {
                name,
                shape: vec![values.len()],
                values,
            }));
        }
        Ok(all)
    }
}
