//! The time at which a run saves and ends by itself, so that a requeued job resumes it: `train.exit_after`, or a margin before
//! the end of its Slurm job.

use crate::config::Config;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The environment variable in which Slurm tells when the job's time ends, in Unix seconds.
pub const SLURM_END: &str = "SLURM_JOB_END_TIME";

/// When a run is to end, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeLimit {
    /// From here on no further step begins.
    pub at: Instant,
    /// For the user.
    pub why: String,
}

impl TimeLimit {
    /// The earlier limit of a recipe and of the job that runs it. `started` is when the process did; `slurm_end` is the value
    /// of [`SLURM_END`], which counts unless it is no number.
    pub fn of(c: &Config, started: Instant, slurm_end: Option<&str>) -> Option<TimeLimit> {
        let own = c.train.exit_after.and_then(|after| {
            let at = started.checked_add(Duration::from_secs(after.0))?;
            Some(TimeLimit { at, why: format!("train.exit_after = {after} has passed") })
        });
        let end = slurm_end.and_then(|text| text.trim().parse::<u64>().ok());
        let job = end.and_then(|end| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
            let left = Duration::from_secs(end).saturating_sub(now);
            let margin = Duration::try_from_secs_f64(c.fault.exit_margin).ok()?;
            let at = Instant::now().checked_add(left.saturating_sub(margin))?;
            let why = format!("the Slurm job ends in {:.0} s (fault.exit_margin)", c.fault.exit_margin);
            Some(TimeLimit { at, why })
        });
        own.into_iter().chain(job).min_by_key(|limit| limit.at)
    }

    /// Whether it has passed.
    pub fn has_passed(&self) -> bool {
        Instant::now() >= self.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Recipe;

    fn limit(set: &[&str], slurm_left: Option<u64>) -> Option<Duration> {
        let mut recipe = Recipe::named("tiny").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        let started = Instant::now();
        let end = |left| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + left;
        let slurm = slurm_left.map(|left| end(left).to_string());
        let limit = TimeLimit::of(&recipe.config, started, slurm.as_deref())?;
        Some(limit.at.saturating_duration_since(started))
    }

    #[test]
    fn the_earlier_limit_counts() {
        let about = |limit: Option<Duration>, seconds: f64| {
            let found = limit.map(|l| l.as_secs_f64());
            assert!(found.is_some_and(|s| (s - seconds).abs() < 5.0), "{found:?} is not {seconds}");
        };
        assert_eq!(limit(&[], None), None);
        about(limit(&["train.exit_after=3h50m"], None), 13_800.0);
        about(limit(&[], Some(1000)), 880.0);
        about(limit(&["fault.exit_margin=300"], Some(1000)), 700.0);
        about(limit(&["train.exit_after=1m"], Some(1000)), 60.0);
        about(limit(&["train.exit_after=1d"], Some(1000)), 880.0);
        // A job that is about to end: at once.
        about(limit(&[], Some(10)), 0.0);
        let c = Recipe::named("tiny").unwrap().config;
        assert_eq!(TimeLimit::of(&c, Instant::now(), Some("never")), None);
    }
}
