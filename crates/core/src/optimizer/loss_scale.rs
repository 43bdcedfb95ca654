//! Dynamic loss scaling for f16 training: without it, activation gradients underflow.

use crate::Result;
use ferrotron_engine::Rank;
use ferrotron_kernels::grad_scaler::{DynamicScaler, ScalerConfig};
use ferrotron_kernels::scaler;
use ferrotron_tensor::{Category, DType, Tensor};
use serde::{Deserialize, Serialize};

/// The loss scale and its counters, on the device, which alone knows in time whether a step is skipped. Equal on all ranks,
/// because the gradient norm is.
#[derive(Clone)]
pub struct LossScale {
    config: ScalerConfig,
    /// f64 `[scaler::COUNT]`
    state: Tensor,
}

/// The loss scale as checkpoints store it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedLossScale {
    /// The factor on the loss.
    pub scale: f32,
    /// Steps since the last change (growth tracker).
    pub good_steps: u32,
    /// Overflows left before the scale falls (hysteresis tracker).
    pub hysteresis: i32,
}

impl LossScale {
    /// Initial state.
    pub fn new(rank: &Rank, config: ScalerConfig) -> Result<LossScale> {
        let start = scaler::of(&DynamicScaler::new(config));
        let state = rank.compute.upload(&start, &[scaler::COUNT], Category::Optimizer)?;
        Ok(LossScale { config, state })
    }

    /// Its parameters.
    pub fn config(&self) -> ScalerConfig {
        self.config
    }

    /// f64 `[scaler::COUNT]`
    pub(super) fn state(&self) -> &Tensor {
        &self.state
    }

    /// Multiplies f32 loss weights of tokens by the scale.
    pub(crate) fn weights(&self, rank: &Rank, weights: &Tensor) -> Result<Tensor> {
        let scaled = rank.activation(weights.shape(), DType::F32)?;
        rank.kernels.scale_loss(&rank.compute, &self.state, weights, &scaled)?;
        Ok(scaled)
    }

    /// Unscales the sum of squared gradients.
    pub(super) fn unscale(&self, rank: &Rank, square: &Tensor) -> Result<()> {
        Ok(rank.kernels.unscale_square(&rank.compute, &self.state, square)?)
    }

    /// Updates the scale from the step's norm; folds the unscaling into the clip factor.
    pub(super) fn update(&self, rank: &Rank, scalars: &Tensor) -> Result<()> {
        Ok(rank.kernels.update_scaler(&rank.compute, self.config, &self.state, scalars)?)
    }

    /// Reads the state for a checkpoint; synchronizes with the device.
    pub fn saved(&self, rank: &Rank) -> Result<SavedLossScale> {
        let s = scaler::from(self.config, &rank.compute.download::<f64>(&self.state)?);
        Ok(SavedLossScale { scale: s.scale, good_steps: s.growth_tracker, hysteresis: s.hysteresis_tracker })
    }

    /// Restores the state of a checkpoint, or the initial state where it has none.
    pub fn restore(&self, rank: &Rank, saved: Option<SavedLossScale>) -> Result<()> {
        let start = DynamicScaler::new(self.config);
        let s = saved.map_or(start, |s| DynamicScaler {
            scale: s.scale,
            growth_tracker: s.good_steps,
            hysteresis_tracker: s.hysteresis,
            ..start
        });
        Ok(rank.compute.upload_into(&self.state, &scaler::of(&s))?)
    }
}
