//! Samples of skipped or dropped steps, by which the schedules of learning rate and weight decay lag behind the data: as in Megatron
//! Core, a step that changes no weight does not advance them.
//!
//! Only the device knows in time whether a step is skipped: the next one may be launched before the host has read its
//! result. So a skipped step counts from the second step after it, whether steps are launched ahead or not, whether the run was
//! resumed in between, and whether a step is launched again after the one behind it: equal runs have equal rates.

use serde::{Deserialize, Serialize};

/// The samples of skipped steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SkippedSamples {
    /// Of steps that count for all steps to come.
    counted: u64,
    /// The other steps, and their samples.
    recent: Vec<(u64, u64)>,
}

impl SkippedSamples {
    /// Step `step` of so many samples was skipped.
    pub(super) fn add(&mut self, step: u64, samples: u64) {
        self.recent.push((step, samples));
    }

    /// The samples of skipped steps that count for the rates of step `step`: all but the step right before it.
    pub(super) fn count_for(&mut self, step: u64) -> u64 {
        let counts = |skipped: u64, step: u64| skipped.saturating_add(1) < step;
        // The step before this one may be launched once more.
        let last = step.saturating_sub(1);
        let settled: Vec<_> = self.recent.extract_if(.., |(skipped, _)| counts(*skipped, last)).collect();
        self.counted = add(self.counted, settled.iter());
        add(self.counted, self.recent.iter().filter(|(skipped, _)| counts(*skipped, step)))
    }

    /// Samples of all skipped steps.
    pub(super) fn total(&self) -> u64 {
        add(self.counted, self.recent.iter())
    }

    /// No step was skipped.
    pub(super) fn is_empty(&self) -> bool {
        *self == SkippedSamples::default()
    }
}

/// `sum` and the samples of steps.
fn add<'a>(sum: u64, steps: impl Iterator<Item = &'a (u64, u64)>) -> u64 {
    steps.fold(sum, |sum, (_, samples)| sum.saturating_add(*samples))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skipped_step_counts_from_the_second_step_after_it() {
        let mut skipped = SkippedSamples::default();
        assert!(skipped.is_empty());
        skipped.add(1, 4);
        assert_eq!(skipped.count_for(2), 0);
        let ahead = skipped.clone();
        skipped.add(2, 8);
        // Whether step 2 has been read when step 3 is launched makes no difference.
        assert_eq!([skipped.count_for(3), ahead.clone().count_for(3)], [4, 4]);
        // Nor does it whether step 4 was launched before.
        assert_eq!([skipped.count_for(4), skipped.count_for(3)], [12, 4]);
        assert_eq!([skipped.count_for(4), skipped.count_for(9), skipped.total()], [12, 12, 12]);
        assert!(!skipped.is_empty());
    }
}
