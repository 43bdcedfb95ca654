//! Weights and gradients by their logical names, on the host.

use super::magnitudes::initialize_magnitudes;
use super::{Trainer, gather};
use crate::{Error, Result};
use ferrotron_engine::Part;
use ferrotron_kernels::scalars;
use ferrotron_tensor::Tensor;
use std::ops::Range;

/// A logical tensor on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct LogicalValues {
    /// Its name, such as `layers.0.attn.q.weight`.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Row-major.
    pub values: Vec<f32>,
}

/// The f32 values of a logical tensor in row-major order, by its name. Several threads call it while weights are set, so it must
/// not read those of the same trainer.
pub type Source<'a> = dyn Fn(&str) -> Result<Vec<f32>> + Sync + 'a;

impl Trainer {
    /// Sets every logical tensor but adapters: `source(name)` gives its f32 values in row-major order. DoRA's m become the norms of
    /// the new rows.
    pub fn import(&self, source: &Source) -> Result<()> {
        self.fill(false, source)?;
        initialize_magnitudes(&self.rank, &self.model, &self.optimizer)
    }

    /// Sets the logical tensors of adapters, such as `layers.0.attn.q.lora_a.weight`.
    pub fn import_adapters(&self, source: &Source) -> Result<()> {
        self.fill(true, source)
    }

    fn fill(&self, adapters: bool, source: &Source) -> Result<()> {
        let values = |part: &Part, runs: &[Range<usize>]| {
            let whole = source(&part.name)?;
            if whole.len() != part.shape.iter().product::<usize>() {
                let what = format!("{}: {} values for {:?}", part.name, whole.len(), part.shape);
                return Err(Error::Invalid(what));
            }
            if runs.len() == 1 && runs[0] == (0..whole.len()) {
                return Ok(whole);
            }
            let slices: Vec<&[f32]> = runs.iter().map(|r| &whole[r.clone()]).collect();
            Ok(slices.concat())
        };
        self.optimizer.fill(&self.rank, &self.model.params, &self.model.step_state, (adapters, &values))
    }

    /// Gradients of the last step by logical name, before clipping and without a loss scale; an error before the first step.
    pub fn gradients(&self) -> Result<Vec<LogicalValues>> {
        let mut all = self.logical(&self.model.grads.gathered(&self.rank)?)?;
        if self.optimizer.loss_scale().is_some() {
            let scale = self.rank.compute.download::<f32>(self.optimizer.scalars())?[scalars::LOSS_SCALE];
            all.iter_mut().flat_map(|t| &mut t.values).for_each(|x| *x /= scale);
        }
        Ok(all)
    }

    /// Number of zero elements in the gradients of the last step, each counted once. Every rank calls it.
    pub fn count_zero_grads(&self) -> Result<u64> {
        let zeros = self.optimizer.count_zero_grads(&self.rank, &self.model.grads)?;
        Ok(self.rank.compute.download::<f64>(&zeros)?[0] as u64)
    }

    /// Master weights by logical name.
    pub fn weights(&self) -> Result<Vec<LogicalValues>> {
        self.logical(&self.optimizer.gathered(&self.rank, &self.model.params)?)
    }

    /// Splits f32 tensors, one per parameter, into logical tensors.
    fn logical(&self, tensors: &[Tensor]) -> Result<Vec<LogicalValues>> {
        let mut out = Vec::new();
        for (spec, tensor) in self.model.params.specs().iter().zip(tensors) {
            let values: Vec<f32> = self.rank.compute.download(tensor)?;
            for (part, _, r) in spec.held() {
                let (name, shape) = (part.name.clone(), part.shape.clone());
                out.push(LogicalValues {
                    name,
                    shape,
                    values: self.rank.gather_tensor(spec.experts, part, &values[r])?,
                });
            }
        }
        gather::gather_all_stages(&self.rank, self.model.decoder.config(), out)
    }
}
