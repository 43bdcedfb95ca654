//! The loss scale of f16 training as the value of one key.

use super::{Config, KeyType, Precision, Recipe, Resolved};
use crate::error::Result;
use ferrotron_kernels::grad_scaler::ScalerConfig;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Good steps after which it doubles, where nothing is said.
const INTERVAL: u32 = 1000;

/// Initial loss scale, and the growth interval in steps: `65536`, or `[65536, 500]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// At the start of a run.
    pub initial: f64,
    /// Good steps after which it doubles.
    pub interval: u32,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale { initial: 4_294_967_296.0, interval: INTERVAL }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Form {
    Whole(u64),
    One(f64),
    Both(f64, u32),
}

impl Serialize for LossScale {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self.interval {
            INTERVAL => Form::One(self.initial),
            interval => Form::Both(self.initial, interval),
        }
        .serialize(s)
    }
}

impl<'de> Deserialize<'de> for LossScale {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<LossScale, D::Error> {
        Ok(match Form::deserialize(d)? {
            Form::Whole(initial) => LossScale { initial: initial as f64, interval: INTERVAL },
            Form::One(initial) => LossScale { initial, interval: INTERVAL },
            Form::Both(initial, interval) => LossScale { initial, interval },
        })
    }
}

impl KeyType for LossScale {
    fn expects() -> String {
        format!("a number, or a list of it and the good steps after which it doubles ({INTERVAL})")
    }
}

impl Config {
    /// Dynamic loss scaling of f16 training; none for other dtypes.
    pub(crate) fn loss_scale(&self) -> Option<ScalerConfig> {
        let LossScale { initial, interval } = self.precision.loss_scale;
        (self.precision.dtype == Precision::F16).then(|| ScalerConfig {
            initial: initial as f32,
            growth_interval: interval,
            ..ScalerConfig::default()
        })
    }
}

impl Recipe {
    /// Refuses loss scales that are none, or of losses that have none.
    pub(super) fn check_loss_scale(&self, r: &Resolved) -> Result<()> {
        const KEY: &str = "precision.loss_scale";
        let p = &r.config.precision;
        if let Some(why) = r.model.refused_dtype(p.dtype.dtype()) {
            return self.refuse("precision.dtype", why);
        }
        if p.loss_scale == LossScale::default() {
            return Ok(());
        }
        if p.dtype != Precision::F16 {
            let what = "only f16 needs a loss scale; set precision.dtype = \"f16\", or leave this out";
            return self.refuse(KEY, what);
        }
        if !((p.loss_scale.initial as f32).is_finite() && p.loss_scale.initial >= 1.0) {
            return self.refuse(KEY, "must be at least 1 and finite");
        }
        match p.loss_scale.interval {
            0 => self.refuse(KEY, "must double after at least 1 step"),
            _ => Ok(()),
        }
    }
}
