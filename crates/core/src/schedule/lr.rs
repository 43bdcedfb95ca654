//! Learning-rate schedules.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use super::GroupOverride;
use crate::{Error, Result};

/// Shape of the decay between warm-up and its end; ρ is the elapsed fraction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decay {
    /// Stays at the maximum.
    Constant,
    /// 1 − ρ
    Linear,
    /// ½(1 + cos πρ)
    #[default]
    Cosine,
    /// max·√W/√n, not below the minimum.
    InverseSquareRoot,
    /// Warmup-stable-decay: at the maximum until the last `wsd` samples.
    Wsd,
}

/// Shape of the final decay of [`Decay::Wsd`], x from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WsdDecay {
    /// 1 − x
    Linear,
    /// ½(1 + cos πx)
    Cosine,
    /// 2·½ˣ − 1
    #[default]
    Exponential,
    /// 1 − √x
    MinusSqrt,
}

/// A learning-rate schedule. Counts are in samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrSchedule {
    /// Learning rate at the end of the warm-up.
    pub max: f64,
    /// Learning rate at the end of the decay and after.
    #[serde(default)]
    pub min: f64,
    /// Learning rate at the start of the warm-up.
    #[serde(default)]
    pub init: f64,
    /// Samples of linear warm-up (W).
    #[serde(default)]
    pub warmup: u64,
    /// Samples at which the decay ends, including the warm-up (D).
    pub decay: u64,
    /// Shape of the decay.
    #[serde(default)]
    pub style: Decay,
    /// Samples of the final decay of [`Decay::Wsd`].
    #[serde(default)]
    pub wsd: u64,
    /// Shape of that final decay.
    #[serde(default)]
    pub wsd_style: WsdDecay,
}

impl LrSchedule {
    /// Fails if the schedule is inconsistent.
    pub fn check(&self) -> Result<()> {
        let bad = |what: String| Err(Error::Invalid(format!("learning rate: {what}")));
        let Self { max, min, init, warmup, decay, .. } = *self;
        if !(max.is_finite() && min >= 0.0 && init >= 0.0) {
            return bad(format!("max {max}, min {min} and init {init} must be numbers from 0 up"));
        }
        if min > max || init > max {
            return bad(format!("min {min} and init {init} must not exceed max {max}"));
        }
        // A constant learning rate has no decay to reach; a run may end within its warm-up.
        if self.style != Decay::Constant && (decay == 0 || warmup >= decay) {
            return bad(format!(
                "the warm-up of {warmup} samples must end before the decay does, at {decay}"
            ));
        }
        if self.style == Decay::Wsd && self.wsd > decay {
            return bad(format!("the final decay of {} samples exceeds the {decay} of the whole", self.wsd));
        }
        Ok(())
    }

    /// The learning rate after `n` samples.
    pub fn at(&self, n: u64) -> f64 {
        self.at_group(n, &GroupOverride::default())
    }

    /// The learning rate after `n` samples for a parameter group with its own maximum or minimum.
    pub fn at_group(&self, n: u64, group: &GroupOverride) -> f64 {
        let (max, min) = (group.max_lr.unwrap_or(self.max), group.min_lr.unwrap_or(self.min));
        if self.warmup > 0 && n <= self.warmup {
            return self.init + (max - self.init) * n as f64 / self.warmup as f64;
        }
        if self.style == Decay::Constant {
            return max;
        }
        if n > self.decay {
            return min;
        }
        // Here W ≤ n ≤ D. W < D in checked schedules; otherwise ρ is 1.
        let rho = (n - self.warmup) as f64 / (self.decay.saturating_sub(self.warmup)).max(1) as f64;
        let share = match self.style {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - rho,
            Decay::Cosine => 0.5 * ((PI * rho).cos() + 1.0),
            Decay::InverseSquareRoot => {
                let (w, n) = (self.warmup.max(1) as f64, n.max(1) as f64);
                return min.max(max * w.sqrt() / n.sqrt());
            }
            Decay::Wsd => self.wsd_share(n),
        };
        min + share * (max - min)
    }

    fn wsd_share(&self, n: u64) -> f64 {
        let start = self.decay.saturating_sub(self.wsd);
        if n <= start {
            return 1.0;
        }
        let x = (n - start) as f64 / self.wsd as f64;
        match self.wsd_style {
            WsdDecay::Linear => 1.0 - x,
            WsdDecay::Cosine => 0.5 * ((PI * x).cos() + 1.0),
            WsdDecay::Exponential => 2.0 * 0.5f64.powf(x) - 1.0,
            WsdDecay::MinusSqrt => 1.0 - x.sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule() -> LrSchedule {
        serde_json::from_str(r#"{"max": 1.0, "min": 0.1, "warmup": 10, "decay": 110}"#).unwrap()
    }

    #[test]
    fn ends_meet_for_every_style() {
        for style in [Decay::Linear, Decay::Cosine, Decay::Wsd, Decay::Constant, Decay::InverseSquareRoot] {
            for wsd_style in [WsdDecay::Linear, WsdDecay::Cosine, WsdDecay::Exponential, WsdDecay::MinusSqrt]
            {
                let s = LrSchedule { style, wsd: 25, wsd_style, ..schedule() };
                s.check().unwrap();
                assert_eq!((s.at(0), s.at(5), s.at(10)), (0.0, 0.5, 1.0));
                let rates: Vec<f64> = (10..200).map(|n| s.at(n)).collect();
                assert!(rates.windows(2).all(|w| w[1] <= w[0] && w[1] >= 0.1), "{style:?}");
                let end = if style == Decay::Constant { 1.0 } else { 0.1 };
                assert!((s.at(111) - end).abs() < 1e-15);
            }
        }
    }

    #[test]
    fn impossible_schedules_are_refused() {
        for bad in [
            LrSchedule { min: 2.0, ..schedule() },
            LrSchedule { init: 2.0, ..schedule() },
            LrSchedule { max: f64::NAN, ..schedule() },
            LrSchedule { warmup: 110, ..schedule() },
            LrSchedule { style: Decay::Wsd, wsd: 111, ..schedule() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        LrSchedule { style: Decay::Constant, warmup: 110, ..schedule() }.check().unwrap();
        assert!(serde_json::from_str::<LrSchedule>(r#"{"max": 1.0, "decay": 1, "x": 1}"#).is_err());
    }
}
