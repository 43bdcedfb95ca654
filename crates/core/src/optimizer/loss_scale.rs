//! The factor on the loss of f16 training: gradients of activations would vanish without it.

use crate::Result;
use ferrotron_engine::Rank;
use ferrotron_kernels::grad_scaler::{DynamicScaler, ScalerConfig};
use ferrotron_kernels::scaler;
use ferrotron_tensor::{Category, DType, Tensor};
use serde::{Deserialize, Serialize};

/// The scale and its counters, on the device: only that knows in time whether a step was made. All ranks have the same,
/// because all have the same norm.
#[derive(Clone)]
pub struct LossScale {
    config: ScalerConfig,
    /// f64 `[scaler::COUNT]`
    state: Tensor,
}

/// The same as checkpoints hold it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedLossScale {
    /// The factor on the loss.
    pub scale: f32,
    /// Steps since it last moved, or would have.
    pub good_steps: u32,
    /// Overflows before it falls.
    pub hysteresis: i32,
}

impl LossScale {
    /// At the start of a run.
    pub fn new(rank: &Rank, config: ScalerConfig) -> Result<LossScale> {
        let start = scaler::of(&DynamicScaler::new(config));
        let state = rank.compute.upload(&start, &[scaler::COUNT], Category::Optimizer)?;
        Ok(LossScale { config, state })
    }

    /// How it moves.
    pub fn config(&self) -> ScalerConfig {
        self.config
    }

    /// Weights f32 of tokens in a loss that is scaled.
    pub(crate) fn weights(&self, rank: &Rank, weights: &Tensor) -> Result<Tensor> {
        let scaled = rank.activation(weights.shape(), DType::F32)?;
        rank.kernels.scale_loss(&rank.compute, &self.state, weights, &scaled)?;
        Ok(scaled)
    }

    /// The sum of squares of gradients without the scale.
    pub(super) fn unscale(&self, rank: &Rank, square: &Tensor) -> Result<()> {
        Ok(rank.kernels.unscale_square(&rank.compute, &self.state, square)?)
    }

    /// The norm of the step is known: gradients are unscaled where they are clipped, and the scale moves.
    pub(super) fn update(&self, rank: &Rank, scalars: &Tensor) -> Result<()> {
        Ok(rank.kernels.update_scaler(&rank.compute, self.config, &self.state, scalars)?)
    }

    /// For a checkpoint. Waits for the device.
    pub fn saved(&self, rank: &Rank) -> Result<SavedLossScale> {
        let s = scaler::from(self.config, &rank.compute.download::<f64>(&self.state)?);
        Ok(SavedLossScale { scale: s.scale, good_steps: s.growth_tracker, hysteresis: s.hysteresis_tracker })
    }

    /// From a checkpoint; from the start where it has none.
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
