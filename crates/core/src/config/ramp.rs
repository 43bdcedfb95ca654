//! Batch ramp-up, as far as turning steps into samples and back needs it.

use crate::schedule::{BatchSchedule, Rampup};

/// Steps and samples of a run whose global batch follows a [`BatchSchedule`].
#[derive(Clone, Debug)]
pub(super) struct Ramp {
    schedule: BatchSchedule,
}

impl Ramp {
    /// `ramp` is [start, increment, samples]; its values were checked before.
    pub(super) fn new(full: u64, ramp: Option<[u64; 3]>) -> Ramp {
        let rampup = ramp
            .filter(|[start, increment, _]| *start < full && *increment > 0)
            .map(|[start, increment, samples]| Rampup { start, increment, samples });
        Ramp { schedule: BatchSchedule { rampup, ..BatchSchedule::constant(full, 1) } }
    }

    /// The global batch after `samples` were consumed.
    pub(super) fn batch(&self, samples: u64) -> u64 {
        self.schedule.global_at(samples)
    }

    /// The global batch after the ramp.
    fn full(&self) -> u64 {
        self.schedule.global
    }

    /// Samples consumed after `steps` steps. Jumps from level to level: a ramp may be billions of samples long.
    pub(super) fn samples_after(&self, steps: u64) -> u64 {
        let (mut samples, mut left) = (0u64, steps);
        while left > 0 {
            let batch = self.batch(samples);
            if batch == self.full() {
                break;
            }
            let here =
                left.min(self.next_level(samples, batch).saturating_sub(samples).div_ceil(batch).max(1));
            samples = samples.saturating_add(here.saturating_mul(batch));
            left -= here;
        }
        samples.saturating_add(left.saturating_mul(self.full()))
    }

    /// The first sample count at which the batch is larger than `batch`.
    fn next_level(&self, samples: u64, batch: u64) -> u64 {
        let (mut low, mut high) = (samples, self.schedule.rampup.map_or(0, |r| r.samples));
        while low < high {
            let middle = low + (high - low) / 2;
            if self.batch(middle) > batch { high = middle } else { low = middle + 1 }
        }
        low
    }

    /// The fewest steps that consume at least `samples`.
    pub(super) fn steps_for(&self, samples: u64) -> u64 {
        let (mut low, mut high) = (0u64, samples);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.samples_after(middle) >= samples { high = middle } else { low = middle + 1 }
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumping_is_stepping() {
        let cases = [
            (32, Some([8, 8, 100])),
            (48, Some([16, 4, 1000])),
            (7, Some([1, 3, 11])),
            (5, None),
            (9, Some([9, 1, 5])),
        ];
        for (full, ramp) in cases {
            let ramp = Ramp::new(full, ramp);
            let mut samples = 0;
            for step in 0..300 {
                assert_eq!(ramp.samples_after(step), samples, "{ramp:?} step {step}");
                assert_eq!(ramp.steps_for(samples), step, "{ramp:?} step {step}");
                samples += ramp.batch(samples);
            }
        }
    }

    #[test]
    fn batches_of_a_ramp() {
        // 3 increments of 8 over 90 samples: a level lasts 30.
        let ramp = Ramp::new(32, Some([8, 8, 90]));
        let at = |n| ramp.batch(n);
        assert_eq!(
            [at(0), at(29), at(30), at(59), at(60), at(89), at(90), at(1 << 40)],
            [8, 8, 16, 16, 24, 24, 32, 32]
        );
        // A ramp too long to step through.
        let long = Ramp::new(2, Some([1, 1, 1 << 50]));
        assert_eq!(long.samples_after(1 << 50), 1 << 50);
    }
}
