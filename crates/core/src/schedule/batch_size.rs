//! Global batch size and number of micro-batches.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Batch ramp-up: every `samples / ((global − start) / increment)` samples the batch grows by `increment`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rampup {
    /// Initial global batch.
    pub start: u64,
    /// Increment per stage.
    pub increment: u64,
    /// Samples after which the full batch is reached.
    pub samples: u64,
}

/// The global batch size over the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchSchedule {
    /// Samples per step; with ramp-up, that of the last stage.
    pub global: u64,
    /// Samples per rank and micro-batch.
    pub micro: u64,
    /// Linear ramp-up.
    #[serde(default)]
    pub rampup: Option<Rampup>,
    /// Batch sizes from given points on: `(samples consumed, global batch)`, see [`BatchSchedule::parse_steps`].
    #[serde(default)]
    pub steps: Option<Vec<(u64, u64)>>,
    /// Allow rounding the batch down to a multiple of what the ranks can process.
    #[serde(default)]
    pub round_down: bool,
}

/// The batch at one point of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatches {
    /// The scheduled global batch.
    pub global: u64,
    /// The batch that runs: `global`, or less if rounded down.
    pub running: u64,
    /// Micro-batches per rank and step.
    pub count: u64,
}

impl BatchSchedule {
    /// A constant batch size.
    pub fn constant(global: u64, micro: u64) -> Self {
        Self { global, micro, rampup: None, steps: None, round_down: false }
    }

    /// Parses `0:768 250B:1536`: a global batch from each threshold on. K, M, B and T multiply by 10³, 10⁶, 10⁹ and
    /// 10¹². Thresholds are tokens if `seq` (tokens per sample) is given, else samples.
    pub fn parse_steps(text: &str, seq: Option<u64>) -> Result<Vec<(u64, u64)>> {
        let bad = |what: String| Error::Invalid(format!("batch schedule \"{text}\": {what}"));
        let mut steps = Vec::new();
        for entry in text.split([' ', ',']).filter(|e| !e.is_empty()) {
            let pair = entry.split_once(':').and_then(|(at, batch)| number(at).zip(number(batch)));
            let (at, batch) =
                pair.ok_or_else(|| bad(format!("\"{entry}\" is not THRESHOLD:BATCH such as 250B:1536")))?;
            steps.push((at / seq.unwrap_or(1).max(1), batch));
        }
        steps.sort_unstable();
        check_steps(&steps).map_err(bad)?;
        Ok(steps)
    }

    /// Fails if the schedule is inconsistent.
    pub fn check(&self) -> Result<()> {
        let bad = |what: String| Err(Error::Invalid(format!("batch size: {what}")));
        if self.global == 0 || self.micro == 0 {
            return bad(format!("global {} and micro {} must be at least 1", self.global, self.micro));
        }
        if self.rampup.is_some() && self.steps.is_some() {
            return bad("give either rampup or steps, not both".into());
        }
        if let Some(r) = self.rampup {
            let grow = self.global.checked_sub(r.start);
            if r.start == 0 || r.increment == 0 || grow.is_none_or(|g| g % r.increment != 0) {
                return bad(format!(
                    "the ramp from {} to {} is not made of steps of {}",
                    r.start, self.global, r.increment
                ));
            }
        }
        if let Some(steps) = &self.steps {
            check_steps(steps).or_else(bad)?;
        }
        Ok(())
    }

    /// The global batch after `consumed` samples.
    pub fn global_at(&self, consumed: u64) -> u64 {
        if let Some(steps) = &self.steps {
            let past = steps.iter().take_while(|(at, _)| *at <= consumed);
            return past.last().or(steps.first()).map_or(self.global, |s| s.1);
        }
        let Some(r) = self.rampup else { return self.global };
        let stages = self.global.saturating_sub(r.start) / r.increment.max(1);
        if consumed > r.samples || stages == 0 || r.samples == 0 {
            return self.global;
        }
        // In f64 like Megatron: a stage need not be a whole number of samples.
        let per_stage = r.samples as f64 / stages as f64;
        let stage = (consumed as f64 / per_stage) as u64;
        (r.start + stage.min(stages) * r.increment).min(self.global)
    }

    /// The batch after `consumed` samples over `ranks` data-parallel ranks.
    pub fn at(&self, consumed: u64, ranks: u64) -> Result<MicroBatches> {
        let global = self.global_at(consumed);
        let step = self.micro.checked_mul(ranks).filter(|&s| s > 0);
        let Some(step) = step else {
            return Err(Error::Invalid(format!("{ranks} ranks of {} samples make no batch", self.micro)));
        };
        let count = global / step;
        if count == 0 || !(global.is_multiple_of(step) || self.round_down) {
            return Err(Error::Invalid(format!(
                "a global batch of {global} is not made of micro-batches of {} on {ranks} data-parallel \
                 ranks; use a multiple of {step}",
                self.micro
            )));
        }
        Ok(MicroBatches { global, running: count * step, count })
    }
}

/// Parses a count such as `1.5K`.
fn number(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_uppercase();
    let factor = match text.chars().last()? {
        'K' => 1e3,
        'M' => 1e6,
        'B' => 1e9,
        'T' => 1e12,
        _ => 1.0,
    };
    let digits = text.trim_end_matches(['K', 'M', 'B', 'T']);
    let value = digits.parse::<f64>().ok()? * factor;
    (value.is_finite() && (0.0..9e18).contains(&value)).then_some(value as u64)
}

fn check_steps(steps: &[(u64, u64)]) -> Result<(), String> {
    if steps.first().is_none_or(|s| s.0 != 0) {
        return Err("the first threshold must be 0".into());
    }
    if steps.windows(2).any(|w| w[1].0 <= w[0].0) {
        return Err("two entries have the same threshold, or thresholds fall".into());
    }
    if steps.iter().any(|s| s.1 == 0) {
        return Err("a batch of 0".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_by_tokens_and_samples() {
        let steps = BatchSchedule::parse_steps("0:768 250B:1536, 500b:3072", Some(4096)).unwrap();
        assert_eq!(steps, [(0, 768), (61_035_156, 1536), (122_070_312, 3072)]);
        let s = BatchSchedule { steps: Some(steps), ..BatchSchedule::constant(3072, 1) };
        s.check().unwrap();
        assert_eq!(s.global_at(0), 768);
        assert_eq!(s.global_at(61_035_155), 768);
        assert_eq!(s.global_at(61_035_156), 1536);
        assert_eq!(s.global_at(u64::MAX), 3072);
        assert_eq!(BatchSchedule::parse_steps("0:1 1.5K:2", None).unwrap(), [(0, 1), (1500, 2)]);
        for bad in ["", "768", "5:768", "0:0", "0:1 0:2", "0:x", "-1:2", "0:1 1e30:2", ":", "0:1 KK:2"] {
            assert!(BatchSchedule::parse_steps(bad, None).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_cannot_be_divided_is_refused() {
        let s = BatchSchedule::constant(30, 4);
        assert!(s.at(0, 2).is_err());
        assert!(s.at(0, 0).is_err());
        assert!(BatchSchedule { round_down: true, ..s.clone() }.at(0, 8).is_err());
        let r = Rampup { start: 8, increment: 5, samples: 100 };
        assert!(BatchSchedule { rampup: Some(r), ..s }.check().is_err());
    }

    #[test]
    fn ramps_without_length_or_growth_are_constant() {
        let ramp = |start, samples| BatchSchedule {
            rampup: Some(Rampup { start, increment: 8, samples }),
            ..BatchSchedule::constant(64, 1)
        };
        assert_eq!(ramp(64, 100).global_at(0), 64);
        assert_eq!(ramp(16, 0).global_at(0), 64);
        assert_eq!(ramp(16, 600).global_at(600), 64);
    }
}
