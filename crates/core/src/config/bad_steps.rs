//! Keys about bad steps that do nothing unless steps can be run again.

use super::{BadStepPolicy, Recipe};
use crate::error::Result;

impl Recipe {
    /// Refuses a bound or a policy for bad steps where no step is ever run again.
    pub(super) fn check_bad_steps(&self) -> Result<()> {
        let f = &self.config.fault;
        if f.spike > 0.0 && !f.rerun {
            return self.refuse("fault.spike", "a spike is run again with fault.rerun; set that as well");
        }
        if f.on_bad_step != BadStepPolicy::Stop && !f.compares_runs() {
            let what = "is for a step that is bad when it is run again too; set fault.rerun, fault.hash_every or \
                        fault.verify_every as well, or optimizer.skip_nonfinite instead";
            return self.refuse("fault.on_bad_step", what);
        }
        Ok(())
    }
}
