//! DoRA of the experts: it scales the outputs of their projections.

use super::Experts;
use crate::quant::LinearQuant;
use crate::{SavedTensor, StepContext, WeightGrad, WithAmax};
use ferrotron_kernels::{RowMap, Segments};
use ferrotron_tensor::{Result, Tensor};

impl Experts {
    /// Whether the output of a projection (0 up, 1 down) is scaled by DoRA.
    pub(super) fn is_dora(&self, which: usize) -> bool {
        self.adapters[which].as_ref().is_some_and(|a| a.is_dora())
    }

    /// Scales the output of a projection where it has DoRA, and returns it unscaled.
    pub(super) fn rescale(
        &self,
        p: &StepContext,
        which: usize,
        y: &mut Tensor,
        segments: Segments,
    ) -> Result<Option<Tensor>> {
        let Some(adapter) = &self.adapters[which] else { return Ok(None) };
        Ok(adapter.rescale(p, y, segments)?.map(|scaled| std::mem::replace(y, scaled)))
    }

    /// Gradient of the unscaled output of a projection, where it has DoRA, from the sorted one of its output, with amax where it
    /// is quantized with `e`.
    pub(super) fn rescale_backward(
        &self,
        p: &StepContext,
        (which, e): (usize, Option<LinearQuant>),
        (unscaled, dy, map): (Option<SavedTensor>, &Tensor, &RowMap),
    ) -> Result<Option<(WithAmax, WeightGrad)>> {
        let (Some(adapter), Some(unscaled)) = (&self.adapters[which], unscaled) else { return Ok(None) };
        let (values, grad) = adapter.rescale_backward(p, &unscaled, dy, map)?;
        let mut scaled = WithAmax::from(&values);
        if e.is_some_and(|e| e.recipe.measures() && (e.dgrad || e.wgrad)) {
            scaled.amax = Some(p.reduced_amax_over(&p.rank.etp, &scaled)?);
        }
        Ok(Some((scaled, grad)))
    }
}
