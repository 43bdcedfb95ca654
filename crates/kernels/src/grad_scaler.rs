//! Dynamic loss scaling for fp16 training.

/// Configuration of the dynamic loss scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerConfig {
    /// Initial scale.
    pub initial: f32,
    /// Lower bound of the scale.
    pub min: f32,
    /// Factor on the scale after `growth_interval` steps without overflow.
    pub growth: f32,
    /// Factor on the scale after an overflow, once hysteresis is used up.
    pub backoff: f32,
    /// Consecutive steps without overflow before the scale grows.
    pub growth_interval: u32,
    /// Overflows tolerated before the scale is reduced.
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

/// The loss scale and its counters, all of which are checkpointed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicScaler {
    /// Configuration.
    pub config: ScalerConfig,
    /// Current factor on the loss.
    pub scale: f32,
    /// Steps since the last overflow or growth.
    pub growth_tracker: u32,
    /// Overflows left before the scale is reduced. It keeps counting below zero and is refilled only when the scale grows.
    pub hysteresis_tracker: i32,
}

impl DynamicScaler {
    /// State at the start of training.
    pub fn new(config: ScalerConfig) -> DynamicScaler {
        DynamicScaler {
            config,
            scale: config.initial,
            growth_tracker: 0,
            hysteresis_tracker: config.hysteresis,
        }
    }

    /// Factor that unscales gradients before the optimizer.
    pub fn inverse(&self) -> f32 {
        1.0 / self.scale
    }

    /// Updates the scale after a step; `found_inf`: whether a gradient overflowed on any rank.
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
