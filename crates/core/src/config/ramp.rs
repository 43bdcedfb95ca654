//! Batch ramp-up, as far as turning steps into samples and back needs it.

/// Global batch as a function of samples consumed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ramp {
    start: u64,
    increment: u64,
    until: u64,
    full: u64,
}

impl Ramp {
    /// `ramp` is [start, increment, samples]; its values were checked before.
    pub(super) fn new(full: u64, ramp: Option<[u64; 3]>) -> Ramp {
        match ramp {
            Some([start, increment, until]) if start < full && increment > 0 => {
                Ramp { start, increment, until, full }
            }
            _ => Ramp { start: full, increment: 1, until: 0, full },
        }
    }

    /// The batch after `samples` were consumed:
    /// `start + increment · ⌊samples / (until / ((full − start) / increment))⌋`, and `full` from `until` on.
    pub(super) fn batch(&self, samples: u64) -> u64 {
        if samples >= self.until {
            return self.full;
        }
        let levels = (self.full - self.start) / self.increment;
        let width = self.until as f64 / levels as f64;
        let level = (samples as f64 / width) as u64;
        (self.start + self.increment.saturating_mul(level)).min(self.full)
    }

    /// Samples consumed after `steps` steps. Jumps from level to level: a ramp may be billions of samples long.
    pub(super) fn samples_after(&self, steps: u64) -> u64 {
        let (mut samples, mut left) = (0u64, steps);
        while left > 0 {
            let batch = self.batch(samples);
            if batch == self.full {
                break;
            }
            let here =
                left.min(self.next_level(samples, batch).saturating_sub(samples).div_ceil(batch).max(1));
            samples = samples.saturating_add(here.saturating_mul(batch));
            left -= here;
        }
        samples.saturating_add(left.saturating_mul(self.full))
    }

    /// The first sample count at which the batch is larger than `batch`.
    fn next_level(&self, samples: u64, batch: u64) -> u64 {
        let (mut low, mut high) = (samples, self.until);
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
    fn the_batch_is_the_one_the_run_uses() {
        use crate::schedule::{BatchSchedule, Rampup};
        for (global, [start, increment, samples]) in
            [(32, [8, 8, 100]), (48, [16, 4, 1001]), (7, [1, 3, 11]), (9, [9, 1, 5])]
        {
            let ours = Ramp::new(global, Some([start, increment, samples]));
            let rampup = Some(Rampup { start, increment, samples });
            let theirs = BatchSchedule { rampup, ..BatchSchedule::constant(global, 1) };
            for consumed in 0..2000 {
                assert_eq!(ours.batch(consumed), theirs.global_at(consumed), "{ours:?} at {consumed}");
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
