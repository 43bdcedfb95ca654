//! The weights of a native checkpoint.

use crate::cast::{cast, is_castable};
use crate::error::{Error, Result};
use crate::hf_checkpoint::zeros;
use crate::logical::{LogicalTensor, logical_buffers, logical_tensors};
use crate::problems::Problem;
use ferrotron_core::checkpoint::{Loaded, load};
use ferrotron_core::model::ModelConfig;
use ferrotron_core::train::{model_of, to_f32};
use ferrotron_tensor::DType;
use std::path::Path;

/// Prefix of weights in a checkpoint, before their logical name.
pub(crate) const PREFIX: &str = "model/";

/// A native checkpoint with verified checksums that holds every parameter of its model.
#[derive(Debug)]
pub struct NativeCheckpoint {
    loaded: Loaded,
    model: ModelConfig,
    tensors: Vec<LogicalTensor>,
    buffers: Vec<LogicalTensor>,
}

impl NativeCheckpoint {
    /// Opens a checkpoint folder, of a run or converted.
    pub fn open(path: &Path) -> Result<NativeCheckpoint> {
        NativeCheckpoint::of(load(path)?)
    }

    /// An open checkpoint.
    pub(crate) fn of(loaded: Loaded) -> Result<NativeCheckpoint> {
        let model = model_of(&loaded)?;
        let (tensors, buffers) = (logical_tensors(&model), logical_buffers(&model));
        let mut problems = Vec::new();
        for t in tensors.iter().chain(&buffers) {
            match loaded.get(&format!("{PREFIX}{}", t.name)) {
                // A missing expert bias starts from zero.
                None if t.buffer => {}
                None => problems.push(Problem::Missing(format!("{} {:?}", t.name, t.shape))),
                Some(found) if found.shape != t.shape => problems.push(Problem::Wrong(
                    t.name.clone(),
                    format!("shape {:?}, but the model needs {:?}", found.shape, t.shape),
                )),
                Some(found) if !found.dtype.native().is_some_and(is_castable) => {
                    problems.push(Problem::Wrong(
                        t.name.clone(),
                        format!("element type {} cannot be read as weights", found.dtype),
                    ))
                }
                Some(_) => {}
            }
        }
        if !problems.is_empty() {
            return Err(Error::Tensors { origin: loaded.path().display().to_string(), problems });
        }
        Ok(NativeCheckpoint { loaded, model, tensors, buffers })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.loaded.path()
    }

    /// The training step it was saved at.
    pub fn step(&self) -> u64 {
        self.loaded.step()
    }

    /// The architecture.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Every parameter under its logical name, in the model's order.
    pub fn tensors(&self) -> &[LogicalTensor] {
        &self.tensors
    }

    /// Buffers: tensors of the model that are not trained.
    pub fn buffers(&self) -> &[LogicalTensor] {
        &self.buffers
    }

    /// Dtype of a tensor in the files.
    pub fn dtype(&self, logical: &str) -> Result<DType> {
        let found = self.loaded.get(&format!("{PREFIX}{logical}")).and_then(|t| t.dtype.native());
        found
            .or_else(|| self.absent(logical).map(|_| DType::F32))
            .ok_or_else(|| Error::tensor(logical, format!("{} has no such parameter", self.path().display())))
    }

    /// One parameter as little-endian `dtype` (f32, bf16 or f16), row-major.
    pub fn read(&self, logical: &str, dtype: DType) -> Result<Vec<u8>> {
        let from = self.dtype(logical)?;
        if !is_castable(dtype) {
            let what = format!("weights are read as f32, bf16 or f16, not as {dtype}");
            return Err(Error::tensor(logical, what));
        }
        if let Some(t) = self.absent(logical) {
            return zeros(logical, t.elements() * dtype.size());
        }
        let bytes = self.loaded.read(&format!("{PREFIX}{logical}"))?;
        if from == dtype {
            return Ok(bytes);
        }
        let mut out = zeros(logical, bytes.len() / from.size() * dtype.size())?;
        cast(&bytes, from, &mut out, dtype);
        Ok(out)
    }

    /// Whether routers of the model subtract quantiles from their logits: it was trained with quantile balancing.
    pub(crate) fn has_quantiles(&self) -> bool {
        self.loaded.tensors().any(|t| t.name.starts_with(PREFIX) && t.name.ends_with(".moe.quantiles"))
    }

    /// The quantiles of an MoE layer, f32 `[E]`, if its router subtracts any.
    pub(crate) fn quantiles(&self, layer: &str) -> Result<Option<Vec<f32>>> {
        let name = format!("{PREFIX}{layer}.quantiles");
        let Some(found) = self.loaded.get(&name) else { return Ok(None) };
        let experts = self.model.moe.as_ref().map_or(0, |m| m.experts);
        if found.dtype.native() != Some(DType::F32) || found.shape != [experts] {
            let what = format!("{} {:?}, but the model needs f32 [{experts}]", found.dtype, found.shape);
            return Err(Error::tensor(&name, what));
        }
        Ok(Some(to_f32(DType::F32, &self.loaded.read(&name)?)?))
    }

    /// A buffer of the model that the checkpoint does not have.
    fn absent(&self, logical: &str) -> Option<&LogicalTensor> {
        let stored = self.loaded.get(&format!("{PREFIX}{logical}")).is_some();
        self.buffers.iter().find(|t| !stored && t.name == logical)
    }
}
