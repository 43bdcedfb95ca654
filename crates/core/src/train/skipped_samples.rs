//! Samples of skipped or dropped steps, by which the schedules of learning rate and weight decay lag behind the data: as in Megatron
//! Core, a step that changes no weight does not advance them.
//!
//! Only the device knows in time whether a step is skipped: the next one may be launched before the host has read its
//! result. So a skipped step counts from the second step after it, whether steps are launched ahead or not and whether the
//! run was resumed in between: equal runs have equal rates.

use serde::{Deserialize, Serialize};

/// The samples of skipped steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SkippedSamples {
    /// Of steps that count.
    counted: u64,
    /// Steps that do not count yet, and their samples.
    recent: Vec<(u64, u64)>,
}

impl SkippedSamples {
    /// Step `step` of so many samples was skipped.
    pub(super) fn add(&mut self, step: u64, samples: u64) {
        self.recent.push((step, samples));
    }

    /// The samples of skipped steps that count for the rates of step `step`: all but the step right before it.
    pub(super) fn count_for(&mut self, step: u64) -> u64 {
        let counted = &mut self.counted;
        self.recent.retain(|(skipped, samples)| {
            let counts = skipped.saturating_add(1) < step;
            *counted = counted.saturating_add(if counts { *samples } else { 0 });
            !counts
        });
        self.counted
    }

    /// Samples of all skipped steps.
    pub(super) fn total(&self) -> u64 {
        self.recent.iter().map(|(_, samples)| *samples).fold(self.counted, u64::saturating_add)
    }

    /// No step was skipped.
    pub(super) fn is_empty(&self) -> bool {
        *self == SkippedSamples::default()
    }
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
        assert_eq!([skipped.count_for(4), skipped.count_for(9), skipped.total()], [12, 12, 12]);
        assert!(!skipped.is_empty());
    }
}
