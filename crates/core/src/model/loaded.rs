//! A model with weights, for everything but training.

use super::{Decoder, ModelConfig};
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
        source: &dyn Fn(&str) -> Result<Vec<u8>>,
    ) -> Result<Model> {
        let (decoder, specs) = Decoder::new(&rank, config, positions)?;
        let params = Params::allocate(&rank, specs, dtype)?;
        for (spec, value) in params.specs().iter().zip(params.values()) {
            let bytes = value.as_bytes()?;
            for (part, range) in spec.ranges() {
                let data = source(&part.name)?;
                if data.len() != range.len() * dtype.size() {
                    let what =
                        format!("'{}' has {} bytes of {dtype}, not {}", part.name, data.len(), range.len());
                    return Ok(shape_error("load", what)?);
                }
                let slot = bytes.narrow(0, range.start * dtype.size(), data.len())?;
                rank.compute.write_to(&slot, &data)?;
            }
        }
        Ok(Model { rank, decoder, params })
    }

    /// A pass without dropout.
    pub fn pass(&self) -> Pass<'_> {
        Pass::new(&self.rank, &self.params)
    }
}
