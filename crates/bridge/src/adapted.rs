//! The base model of a checkpoint of adapters, with the adapters merged into its weights as they are read.

use crate::cast::cast;
use crate::error::{Error, Result};
use crate::hf_checkpoint::zeros;
use crate::weights::Weights;
use ferrotron_core::checkpoint::Loaded;
use ferrotron_core::model::{ModelConfig, logical_parts};
use ferrotron_core::train::{SavedAdapters, to_f32};
use ferrotron_engine::lora::{LORA_A, LORA_B};
use ferrotron_engine::{Part, initial_values};
use ferrotron_tensor::DType;
use std::collections::HashMap;
use std::path::Path;

/// Where the weights without adapters come from.
#[derive(Debug)]
enum Base {
    /// A folder.
    Folder(Box<Weights>),
    /// The declared initial values of a seed.
    Initial { seed: u64, parts: HashMap<String, Part> },
}

/// A base model and the scale of its adapters.
#[derive(Debug)]
pub(crate) struct AdaptedBase {
    base: Base,
    scale: f32,
}

impl AdaptedBase {
    /// Opens the base model of the adapters in a checkpoint.
    pub(crate) fn open(
        checkpoint: &Path,
        model: &ModelConfig,
        (adapters, seed): &(SavedAdapters, u64),
    ) -> Result<AdaptedBase> {
        let base = match &adapters.base {
            Some(base) => {
                base.check(checkpoint)?;
                Base::Folder(Box::new(Weights::open(Path::new(&base.path))?))
            }
            None => {
                let parts = logical_parts(model).map_err(ferrotron_core::Error::from)?;
                Base::Initial { seed: *seed, parts: parts.into_iter().map(|p| (p.name.clone(), p)).collect() }
            }
        };
        Ok(AdaptedBase { base, scale: adapters.scale })
    }

    /// Dtype of a weight: that of the base model.
    pub(crate) fn dtype(&self, logical: &str) -> Result<DType> {
        match &self.base {
            Base::Folder(weights) => weights.dtype(logical),
            Base::Initial { .. } => Ok(DType::F32),
        }
    }

    /// `W + scale·B·A` of a weight as `dtype`; W where it has no adapter.
    pub(crate) fn read(&self, loaded: &Loaded, prefix: &str, logical: &str, dtype: DType) -> Result<Vec<u8>> {
        let (Base::Folder(weights), None) = (&self.base, adapter(loaded, prefix, logical)) else {
            let mut w = self.values(logical)?;
            if let Some([a, b]) = adapter(loaded, prefix, logical) {
                let values = |name: &str| to_f32(DType::F32, &loaded.read(name)?);
                merge(logical, &mut w, (&values(&a)?, &values(&b)?), self.scale)?;
            }
            let bytes: Vec<u8> = w.iter().flat_map(|x| x.to_le_bytes()).collect();
            if dtype == DType::F32 {
                return Ok(bytes);
            }
            let mut out = zeros(logical, w.len() * dtype.size())?;
            cast(&bytes, DType::F32, &mut out, dtype);
            return Ok(out);
        };
        weights.read(logical, dtype)
    }

    fn values(&self, logical: &str) -> Result<Vec<f32>> {
        match &self.base {
            Base::Folder(weights) => Ok(to_f32(DType::F32, &weights.read(logical, DType::F32)?)?),
            Base::Initial { seed, parts } => {
                let part = parts
                    .get(logical)
                    .ok_or_else(|| Error::tensor(logical, "the model has no such parameter"))?;
                Ok(initial_values(*seed, part, 0..part.shape.iter().product()))
            }
        }
    }
}

/// Names of A and B of a weight in a checkpoint of adapters. Projections that are computed together may share A.
fn adapter(loaded: &Loaded, prefix: &str, logical: &str) -> Option<[String; 2]> {
    let module = logical.strip_suffix(".weight")?;
    let b = format!("{prefix}{module}{LORA_B}");
    loaded.get(&b)?;
    let (parent, leaf) = module.rsplit_once('.')?;
    let shared =
        [("qkv", &["q", "k", "v"][..]), ("gate_up", &["gate", "up"]), ("q_a_kv_a", &["q_a", "kv_a"])];
    let shared = shared.iter().find(|(_, leaves)| leaves.contains(&leaf)).map(|(name, _)| *name);
    [Some(leaf), shared]
        .into_iter()
        .flatten()
        .map(|leaf| format!("{prefix}{parent}.{leaf}{LORA_A}"))
        .find(|a| loaded.get(a).is_some())
        .map(|a| [a, b])
}

/// `w [out, in] += scale·b [out, r]·a [r, in]`
fn merge(logical: &str, w: &mut [f32], (a, b): (&[f32], &[f32]), scale: f32) -> Result<()> {
    // w/a = out/r and b = out·r.
    let rank = ((a.len() * b.len()) as f64 / w.len().max(1) as f64).sqrt().round() as usize;
    let input = a.len() / rank.max(1);
    if rank == 0 || a.len() != rank * input || b.len() * input != w.len() * rank {
        let what =
            format!("an adapter of {} and {} values does not fit {} weights", a.len(), b.len(), w.len());
        return Err(Error::tensor(logical, what));
    }
    for (row, factors) in w.chunks_mut(input).zip(b.chunks(rank)) {
        for (factor, values) in factors.iter().zip(a.chunks(input)) {
            let factor = scale * factor;
            row.iter_mut().zip(values).for_each(|(x, value)| *x += factor * value);
        }
    }
    Ok(())
}
