//! A model with weights, for everything but training.

use super::{Decoder, ModelConfig, Stages};
use crate::Result;
use ferrotron_engine::{Params, Pass, Rank};
use ferrotron_tensor::{DType, shape_error};

/// A decoder and its weights on one rank.
pub struct Model {
    /// The worker.
    pub rank: Rank,
    /// The architecture.
    pub decoder: Decoder,
    /// The weights.
    pub params: Params,
}

impl Model {
    /// A model for sequences of up to `positions` tokens. `source(name)` gives the little-endian `dtype` bytes of
    /// each logical tensor; one tensor is in memory at a time besides the model.
    pub fn load(
        rank: Rank,
        config: &ModelConfig,
        positions: usize,
        dtype: DType,
        stages: &Stages,
        source: &dyn Fn(&str) -> Result<Vec<u8>>,
    ) -> Result<Model> {
        let (decoder, specs) = Decoder::new(&rank, config, positions, stages)?;
        let params = Params::allocate(&rank, specs, dtype)?;
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
                rank.compute.write_to(&slot, &data)?;
            }
        }
        Ok(Model { rank, decoder, params })
    }

    /// Logits `[tokens, V]` on every rank, from the columns `[padded tokens, part of V]` of the ranks of the last stage.
    pub fn join_logits(&self, mine: &[f32], tokens: usize) -> Result<Vec<f32>> {
        let (tp, vocab) = (&self.rank.tp, self.decoder.config().vocab);
        let rows = self.rank.padded(tokens);
        let all = tp.all_gather_bytes(bytemuck::cast_slice(mine), "logits")?;
        let mut out = vec![0f32; tokens * vocab];
        let mut first = 0;
        for bytes in &all {
            let values: Vec<f32> = bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
            let width = values.len() / rows.max(1);
            for (row, part) in out.chunks_mut(vocab).zip(values.chunks(width.max(1))) {
                row[first..first + width].copy_from_slice(part);
            }
            first += width;
        }
        if self.rank.pp.size() == 1 {
            return Ok(out);
        }
        let stages = self.rank.pp.all_gather_bytes(bytemuck::cast_slice(&out), "logits")?;
        let last = stages.last().map_or(&[][..], Vec::as_slice);
        Ok(last.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect())
    }

    /// A pass without dropout.
    pub fn pass(&self) -> Pass<'_> {
        Pass::new(&self.rank, &self.params)
    }
}
