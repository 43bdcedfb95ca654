//! A model with weights, for inference, evaluation and single passes.

use super::{Decoder, ModelConfig, ModelOptions, PipelineLayout, moe_layer_index};
use crate::Result;
use crate::tensorfile::to_f32;
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{GroupRank, Params, Rank, StepContext, StepState, Tokens};
use ferrotron_tensor::{DType, shape_error};

/// A decoder and its weights on one rank.
pub struct Model {
    /// The rank.
    pub rank: Rank,
    /// The decoder.
    pub decoder: Decoder,
    /// The weights.
    pub params: Params,
    /// Quantization and MoE state.
    pub step_state: StepState,
}

impl Model {
    /// Builds a model for sequences of up to `positions` tokens and loads its weights. `source(name)` returns the
    /// little-endian `dtype` bytes of a logical tensor, and f32 bytes of those of [`super::logical_buffers`]; besides
    /// the model one tensor is in memory at a time.
    pub fn load(
        rank: Rank,
        config: &ModelConfig,
        positions: usize,
        dtype: DType,
        layout: &PipelineLayout,
        source: &dyn Fn(&str) -> Result<Vec<u8>>,
    ) -> Result<Model> {
        Model::load_with(rank, config, positions, dtype, (layout, &ModelOptions::default()), source)
    }

    /// [`Model::load`] with model options.
    pub fn load_with(
        rank: Rank,
        config: &ModelConfig,
        positions: usize,
        dtype: DType,
        (layout, options): (&PipelineLayout, &ModelOptions),
        source: &dyn Fn(&str) -> Result<Vec<u8>>,
    ) -> Result<Model> {
        let (decoder, specs) = Decoder::new(&rank, config, positions, layout, options)?;
        let params = Params::allocate(&rank, specs, dtype)?;
        let step_state = StepState::new(&rank, &params, decoder.moe_layers())?;
        for (spec, value) in params.specs().iter().zip(params.values()) {
            let bytes = value.as_bytes()?;
            for (part, cut, range) in spec.held() {
                let data = source(&part.name)?;
                let shape: Vec<usize> = part.shape.iter().copied().chain([dtype.size()]).collect();
                if data.len() != shape.iter().product::<usize>() {
                    let what = format!("'{}' has {} bytes of {dtype}, not {shape:?}", part.name, data.len());
                    return Ok(shape_error("load", what)?);
                }
                let data = cut.take(&shape, &data);
                let slot = bytes.narrow(0, range.start * dtype.size(), data.len())?;
                rank.compute.upload_into(&slot, &data)?;
            }
        }
        set_expert_biases(&rank, &step_state, &|name| to_f32(DType::F32, &source(name)?))?;
        Ok(Model { rank, decoder, params, step_state })
    }

    /// Gathers logits `[tokens, V]` of sequences of that layout on every rank, from the row and vocabulary shards of
    /// the last pipeline stage.
    pub fn join_logits(&self, layout: &Layout, mine: &[f32]) -> Result<Vec<f32>> {
        let (rank, vocab) = (&self.rank, self.decoder.config().vocab);
        // Other stages have none.
        let some = usize::from(rank.pp.rank() + 1 == rank.pp.size());
        let floats = |bytes: &[u8]| bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
        // Vocabulary shards side by side, then the tokens in order, then to the other stages.
        let columns = rank.tp.all_gather_bytes(bytemuck::cast_slice(mine), "columns of logits")?;
        let mut rows = vec![0f32; some * rank.tokens(layout)?.rows().len() * vocab];
        let mut first = 0;
        for bytes in &columns {
            let values: Vec<f32> = floats(bytes);
            let width = values.len() * vocab / rows.len().max(1);
            for (row, part) in rows.chunks_mut(vocab).zip(values.chunks(width.max(1))) {
                row[first..first + width].copy_from_slice(part);
            }
            first += width;
        }
        let mut out = vec![0f32; some * layout.tokens() * vocab];
        let size = rank.cp.size();
        let all = rank.cp.all_gather_bytes(bytemuck::cast_slice(&rows), "rows of logits")?;
        for (at, bytes) in all.iter().enumerate().filter(|_| some > 0) {
            let tokens = Tokens::new(layout, GroupRank { rank: at, size }, rank.tp.size())?;
            tokens.put(&floats(bytes), vocab, &mut out)?;
        }
        let stages = rank.pp.all_gather_bytes(bytemuck::cast_slice(&out), "logits")?;
        Ok(stages.last().map_or(Vec::new(), |bytes| floats(bytes)))
    }

    /// Tokens per expert of every MoE layer in the training passes so far, by layer number, MTP layers after the
    /// decoder's: of all ranks' tokens, on every rank.
    pub fn tokens_per_expert(&self) -> Result<Vec<(usize, Vec<i64>)>> {
        let rank = &self.rank;
        let mut mine: Vec<(usize, Vec<i64>)> = Vec::new();
        if let Some(moe) = self.step_state.moe() {
            let load = moe.tokens_per_expert(rank)?;
            let load = rank.compute.download::<i64>(&load)?;
            let width = load.len() / moe.specs().len().max(1);
            for (spec, row) in moe.specs().iter().zip(load.chunks(width.max(1))) {
                let layer = moe_layer_index(&spec.name, self.decoder.config().layers);
                mine.push((layer, row[..spec.experts].to_vec()));
            }
        }
        let broken =
            |e: serde_json::Error| crate::Error::Invalid(format!("tokens per expert of other stages: {e}"));
        let text = serde_json::to_vec(&mine).map_err(broken)?;
        let mut all = Vec::new();
        for part in rank.pp.all_gather_bytes(&text, "tokens per expert")? {
            all.extend(serde_json::from_slice::<Vec<(usize, Vec<i64>)>>(&part).map_err(broken)?);
        }
        all.sort();
        Ok(all)
    }

    /// A context without dropout.
    pub fn pass(&self) -> StepContext<'_> {
        StepContext::new(&self.rank, &self.params, &self.step_state)
    }
}

/// Sets the expert biases: `source(name)` returns f32 values.
pub fn set_expert_biases(
    rank: &Rank,
    step_state: &StepState,
    source: &dyn Fn(&str) -> Result<Vec<f32>>,
) -> Result<()> {
    let Some(moe) = step_state.moe() else { return Ok(()) };
    for (i, spec) in moe.specs().iter().enumerate().filter(|(_, m)| m.expert_bias) {
        let values = source(&format!("{}.expert_bias", spec.name))?;
        rank.compute.upload_into(&moe.expert_bias.narrow(0, i, 1)?, &values)?;
    }
    Ok(())
}

/// Sets the quantiles that routers subtract: `source(layer)` returns f32 values `[E]`, none where there are none.
pub fn set_quantiles(
    rank: &Rank,
    step_state: &StepState,
    source: &dyn Fn(&str) -> Result<Option<Vec<f32>>>,
) -> Result<()> {
    let Some(moe) = step_state.moe() else { return Ok(()) };
    for (i, spec) in moe.specs().iter().enumerate().filter(|(_, m)| m.quantiles) {
        if let Some(values) = source(&spec.name)? {
            rank.compute.upload_into(&moe.quantiles.narrow(0, i, 1)?, &values)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{MoeConfig, MtpConfig, logical_parts};
    use std::collections::HashMap;

    #[test]
    fn mtp_layers_have_tokens_per_expert_of_their_own() {
        let mut config = ModelConfig::preset("tiny").unwrap();
        config.moe = Some(MoeConfig { layers: vec![true, false, false, true], ..MoeConfig::plain(4, 2, 16) });
        config.mtp = Some(MtpConfig { layers: 2, shared_layer: false });
        let parts = logical_parts(&config).unwrap();
        let sizes: HashMap<&str, usize> =
            parts.iter().map(|p| (p.name.as_str(), p.shape.iter().product())).collect();
        let zeros = |name: &str| Ok(vec![0; 4 * sizes[name]]);
        let rank = Rank::cpu(1, 0).unwrap();
        let stages = PipelineLayout::default();
        let model = Model::load(rank, &config, 16, DType::F32, &stages, &zeros).unwrap();
        let layers: Vec<usize> = model.tokens_per_expert().unwrap().into_iter().map(|(i, _)| i).collect();
        assert_eq!(layers, [0, 3, 4, 5]);
    }
}
