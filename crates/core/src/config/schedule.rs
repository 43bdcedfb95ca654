//! Learning-rate and weight-decay schedules that cannot be: refused by their keys, before anything is allocated.

use super::{Recipe, Resolved, WeightDecayStyle};
use crate::error::Result;

impl Recipe {
    /// Checks the ends of the schedules against each other.
    pub(super) fn check_rates(&self, r: &Resolved) -> Result<()> {
        let (o, s, end) = (&r.config.optimizer, &r.config.schedule, r.plan.weight_decay_end);
        if s.init_lr > o.lr {
            let what = format!("warm-up rises to optimizer.lr, which is {}; set at most that", o.lr);
            return self.refuse("schedule.init_lr", what);
        }
        if end < o.weight_decay {
            let what = format!(
                "weight decay grows from optimizer.weight_decay, which is {}; set at least that",
                o.weight_decay
            );
            return self.refuse("optimizer.weight_decay_end", what);
        }
        if end != o.weight_decay && s.weight_decay_style == WeightDecayStyle::Constant {
            let what = format!(
                "differs from optimizer.weight_decay, which is {}; set schedule.weight_decay_style to linear or cosine",
                o.weight_decay
            );
            return self.refuse("optimizer.weight_decay_end", what);
        }
        Ok(())
    }
}
