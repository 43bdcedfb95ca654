//! The declared initial values of a model: the base of adapters that were trained without one in a folder.

use crate::cast::{cast, is_castable};
use crate::error::{Error, Result};
use crate::hf_checkpoint::zeros;
use crate::logical::{LogicalTensor, logical_buffers, logical_tensors};
use ferrotron_core::model::{ModelConfig, logical_parts};
use ferrotron_engine::{Part, initial_values};
use ferrotron_tensor::DType;
use std::collections::HashMap;

/// Weights that are functions of a seed and their names.
#[derive(Debug)]
pub struct InitialWeights {
    model: ModelConfig,
    seed: u64,
    parts: HashMap<String, Part>,
    tensors: Vec<LogicalTensor>,
    buffers: Vec<LogicalTensor>,
}

impl InitialWeights {
    /// The initial values of a model.
    pub fn new(model: ModelConfig, seed: u64) -> Result<InitialWeights> {
        let parts = logical_parts(&model).map_err(ferrotron_core::Error::from)?;
        let parts = parts.into_iter().map(|p| (p.name.clone(), p)).collect();
        let (tensors, buffers) = (logical_tensors(&model), logical_buffers(&model));
        Ok(InitialWeights { model, seed, parts, tensors, buffers })
    }

    /// The architecture.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Every parameter under its logical name, in the model's order.
    pub fn tensors(&self) -> &[LogicalTensor] {
        &self.tensors
    }

    /// Buffers: tensors of the model that are not trained; they begin with zeros.
    pub fn buffers(&self) -> &[LogicalTensor] {
        &self.buffers
    }

    /// One parameter as little-endian `dtype` (f32, bf16 or f16), row-major.
    pub fn read(&self, logical: &str, dtype: DType) -> Result<Vec<u8>> {
        if !is_castable(dtype) {
            let what = format!("weights are read as f32, bf16 or f16, not as {dtype}");
            return Err(Error::tensor(logical, what));
        }
        if let Some(buffer) = self.buffers.iter().find(|t| t.name == logical) {
            return zeros(logical, buffer.elements() * dtype.size());
        }
        let Some(part) = self.parts.get(logical) else {
            return Err(Error::tensor(logical, "the model has no such parameter"));
        };
        let values = initial_values(self.seed, part, 0..part.shape.iter().product());
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut out = zeros(logical, values.len() * dtype.size())?;
        cast(&bytes, DType::F32, &mut out, dtype);
        Ok(out)
    }
}
