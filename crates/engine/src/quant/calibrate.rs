//! Steps in full width that only look how large operands are, so that delayed scaling begins with good scales.

use super::Role;
use crate::{ParamId, StepContext};
use ferrotron_tensor::{Result, Tensor};

impl StepContext<'_> {
    /// Are products in full width because scales are not known yet? Then notes how large an operand `x` of the map with
    /// weight `param` is, where a backward may follow.
    pub(crate) fn calibrates(&self, param: ParamId, role: Role, x: &Tensor) -> Result<bool> {
        let Some(state) = self.state.quant().filter(|s| s.is_calibrating()) else { return Ok(false) };
        if self.train
            && let Some((_, amax)) = state.delayed().map(|d| d.of(param, role)).transpose()?.flatten()
        {
            self.rank.kernels.amax(&self.rank.compute, x, &amax)?;
        }
        Ok(true)
    }
    /// The same of the weight itself.
    pub(crate) fn calibrates_weight(&self, param: ParamId) -> Result<bool> {
        // One that is bytes is never asked for: who keeps bytes collects nothing.
        match self.state.quant().is_some_and(|s| s.is_calibrating()) {
            true => self.calibrates(param, Role::Weight, self.weight(param)?),
            false => Ok(false),
        }
    }
}
