//! Checks of the `[fault]` section.

use super::{Recipe, Resolved};
use crate::error::{Error, Result};
use crate::fault::inject::Injection;

impl Resolved {
    /// Refuses faults that no rank and no step of the run would see: a rehearsal would prove nothing. A job that goes on with
    /// fewer ranks has them still.
    pub fn check_injections(&self) -> Result<()> {
        let (world, steps) = (self.config.parallel.layout().world()?, self.plan.steps);
        for entry in &self.config.fault.inject.0 {
            let Ok(fault) = Injection::parse(entry) else { continue };
            let what = if fault.process.is_none() && fault.rank >= world {
                format!("{entry:?}: there are ranks 0 to {}; take one of them", world - 1)
            } else if fault.step > steps {
                format!("{entry:?}: the run ends after step {steps}; take an earlier step")
            } else {
                continue;
            };
            let key = Some("fault.inject".into());
            return Err(Error::Config { file: None, line: None, key, what, hint: None });
        }
        Ok(())
    }
}

impl Recipe {
    pub(super) fn check_fault(&self) -> Result<()> {
        let f = &self.config.fault;
        for (key, value, least, most) in [
            ("fault.soft_timeout", f.soft_timeout, 0.1, 1e6),
            ("fault.hard_timeout", f.hard_timeout, 0.1, 1e6),
            ("fault.heartbeat_timeout", f.heartbeat_timeout, 2.0, 1e6),
            ("fault.min_timeout", f.min_timeout, 0.0, 1e6),
            ("fault.backoff", f.backoff, 0.0, 3600.0),
            ("fault.spike", f.spike, 0.0, 1e12),
            ("fault.straggler_threshold", f.straggler_threshold, 0.0, 1.0),
            ("fault.exit_margin", f.exit_margin, 0.0, 1e7),
            ("fault.rank_failures", f.rank_failures as f64, 1.0, 1e9),
        ] {
            self.within(key, value, least, most)?;
        }
        if f.spike > 0.0 && f.spike < 1.0 {
            return self.refuse(
                "fault.spike",
                "must be at least 1: a loss that many times above its maximum is a spike; 0 means no bound",
            );
        }
        for entry in &f.inject.0 {
            if let Err(e) = Injection::parse(entry) {
                return self.refuse("fault.inject", format!("{entry:?}: {e}"));
            }
        }
        if f.verify_on_partner && (f.verify_every == 0 || f.verify_every != f.snapshot_every) {
            let why = "other processes begin at a snapshot: set fault.verify_every and fault.snapshot_every to the same";
            return self.refuse("fault.verify_on_partner", why);
        }
        let saves = self.config.checkpoint.every;
        if f.verify_on_partner && !saves.is_multiple_of(f.verify_every) {
            let why = format!(
                "only verified states are saved: set checkpoint.every to a multiple of {}",
                f.verify_every
            );
            return self.refuse("fault.verify_on_partner", why);
        }
        let rerun = [("fault.rerun", f.rerun), ("fault.verify_every", f.verify_every > 0)];
        match rerun.iter().find(|(_, on)| *on && f.snapshot_every == 0) {
            Some((key, _)) => {
                self.refuse(key, "runs steps again from a snapshot in memory; set fault.snapshot_every too")
            }
            None => Ok(()),
        }
    }
}
