//! Weight-decay schedules, and overrides of parameter groups.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How weight decay grows; ρ is the elapsed fraction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WdIncrease {
    /// Constant; start and end are equal.
    #[default]
    Constant,
    /// ρ
    Linear,
    /// ½(cos π(1 − ρ) + 1)
    Cosine,
}

/// A weight-decay schedule. Counts are in samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WdSchedule {
    /// Weight decay at the start.
    pub start: f64,
    /// Weight decay at the end of the increase and after.
    pub end: f64,
    /// Samples over which it grows.
    #[serde(default)]
    pub samples: u64,
    /// How it grows.
    #[serde(default)]
    pub style: WdIncrease,
}

/// A parameter group's own values; `None` uses the schedule's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupOverride {
    /// Learning rate at the end of the warm-up.
    pub max_lr: Option<f64>,
    /// Learning rate at the end of the decay.
    pub min_lr: Option<f64>,
    /// Weight decay at the start.
    pub start_wd: Option<f64>,
    /// Weight decay at the end.
    pub end_wd: Option<f64>,
    /// Multiplier of the weight decay: 0 for biases and norms.
    pub wd_mult: f64,
}

impl Default for GroupOverride {
    fn default() -> Self {
        Self { max_lr: None, min_lr: None, start_wd: None, end_wd: None, wd_mult: 1.0 }
    }
}

impl WdSchedule {
    /// A constant weight decay.
    pub fn constant(wd: f64) -> Self {
        Self { start: wd, end: wd, samples: 0, style: WdIncrease::Constant }
    }

    /// Fails if the schedule is inconsistent.
    pub fn check(&self) -> Result<()> {
        let Self { start, end, .. } = *self;
        if !(end.is_finite() && start >= 0.0 && start <= end) {
            return Err(Error::Invalid(format!("weight decay: need 0 <= start {start} <= end {end}")));
        }
        if self.style == WdIncrease::Constant && start != end {
            return Err(Error::Invalid(format!(
                "weight decay: start {start} and end {end} differ; set style to linear or cosine"
            )));
        }
        Ok(())
    }

    /// The weight decay after `n` samples.
    pub fn at(&self, n: u64) -> f64 {
        self.at_group(n, &GroupOverride::default())
    }

    /// The weight decay after `n` samples for a parameter group, including its multiplier.
    pub fn at_group(&self, n: u64, group: &GroupOverride) -> f64 {
        let (start, end) = (group.start_wd.unwrap_or(self.start), group.end_wd.unwrap_or(self.end));
        let wd = if n > self.samples || self.samples == 0 || self.style == WdIncrease::Constant {
            end
        } else {
            let rho = n as f64 / self.samples as f64;
            let share = match self.style {
                WdIncrease::Cosine => 0.5 * ((PI * (1.0 - rho)).cos() + 1.0),
                WdIncrease::Constant | WdIncrease::Linear => rho,
            };
            start + share * (end - start)
        };
        wd * group.wd_mult
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_from_start_to_end() {
        for style in [WdIncrease::Linear, WdIncrease::Cosine] {
            let s = WdSchedule { start: 0.01, end: 0.1, samples: 80, style };
            s.check().unwrap();
            assert_eq!((s.at(0), s.at(81)), (0.01, 0.1));
            assert!((0..100).all(|n| s.at(n + 1) >= s.at(n)));
            assert!((s.at(40) - 0.055).abs() < 1e-15);
        }
        assert_eq!(WdSchedule::constant(0.1).at(0), 0.1);
        let half = GroupOverride { wd_mult: 0.5, ..GroupOverride::default() };
        assert_eq!(WdSchedule::constant(0.1).at_group(3, &half), 0.05);
    }

    #[test]
    fn impossible_schedules_are_refused() {
        let s = |start, end| WdSchedule { start, end, samples: 1, style: WdIncrease::Linear };
        assert!(s(-0.1, 0.1).check().is_err());
        assert!(s(0.2, 0.1).check().is_err());
        assert!(s(0.1, f64::NAN).check().is_err());
        assert!(WdSchedule { style: WdIncrease::Constant, ..s(0.1, 0.2) }.check().is_err());
    }
}
