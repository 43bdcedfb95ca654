//! The dynamic loss scale of fp16 training.

/// How the scale moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerConfig {
    /// Scale at the start.
    pub initial: f32,
    /// The scale never falls below this.
    pub min: f32,
    /// Factor after `growth_interval` good steps.
    pub growth: f32,
    /// Factor after an overflow, once hysteresis is used up.
    pub backoff: f32,
    /// Good steps in a row before the scale grows.
    pub growth_interval: u32,
    /// Overflows that are tolerated before the scale falls.
    pub hysteresis: i32,
}

impl Default for ScalerConfig {
    fn default() -> ScalerConfig {
        ScalerConfig {
            initial: 4_294_967_296.0,
            min: 1.0,
            growth: 2.0,
            backoff: 0.5,
            growth_interval: 1000,
            hysteresis: 2,
        }
    }
}

/// The loss scale and its counters. All fields are state to checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicScaler {
    /// How it moves.
    pub config: ScalerConfig,
    /// The factor on the loss now.
    pub scale: f32,
    /// Good steps since the last overflow or growth.
    pub growth_tracker: u32,
    /// Overflows left before the scale falls; goes on counting below zero, refilled only when the scale grows.
    pub hysteresis_tracker: i32,
}

impl DynamicScaler {
    /// At the start of training.
    pub fn new(config: ScalerConfig) -> DynamicScaler {
        DynamicScaler {
            config,
            scale: config.initial,
            growth_tracker: 0,
            hysteresis_tracker: config.hysteresis,
        }
    }

    /// What gradients are multiplied by before the optimizer.
    pub fn inverse(&self) -> f32 {
        1.0 / self.scale
    }

    /// After each step: did any gradient overflow on any rank?
    pub fn update(&mut self, found_inf: bool) {
        if found_inf {
            self.growth_tracker = 0;
            self.hysteresis_tracker = self.hysteresis_tracker.saturating_sub(1);
            if self.hysteresis_tracker <= 0 {
                self.scale = (self.scale * self.config.backoff).max(self.config.min);
            }
        } else {
            self.growth_tracker += 1;
            if self.growth_tracker >= self.config.growth_interval {
                self.growth_tracker = 0;
                self.hysteresis_tracker = self.config.hysteresis;
                self.scale *= self.config.growth;
            }
        }
    }
}
