//! Calibration of delayed scaling: steps in bf16 that only measure the amax of operands.

use super::Role;
use crate::{ParamId, StepContext};
use ferrotron_tensor::{Result, Tensor};

impl StepContext<'_> {
    /// Whether this is a calibration pass, whose GEMMs stay in bf16. If so, and if a backward may follow, updates the
    /// amax of operand `x` of the linear with weight `param`.
    pub(crate) fn calibrates(&self, param: ParamId, role: Role, x: &Tensor) -> Result<bool> {
        let Some(state) = self.state.quant().filter(|s| s.is_calibrating()) else { return Ok(false) };
        if self.train
            && let Some((_, amax)) = state.delayed().map(|d| d.of(param, role)).transpose()?.flatten()
        {
            self.rank.kernels.amax(&self.rank.compute, x, &amax)?;
        }
        Ok(true)
    }
    /// [`StepContext::calibrates`] for the weight itself.
    pub(crate) fn calibrates_weight(&self, param: ParamId) -> Result<bool> {
        // FP8-resident weights have no bf16 values to measure; calibration is off with them.
        match self.state.quant().is_some_and(|s| s.is_calibrating()) {
            true => self.calibrates(param, Role::Weight, &*self.weight(param)?),
            false => Ok(false),
        }
    }
}
