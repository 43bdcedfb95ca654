//! State that passes share beside the weights.

use crate::moe::{MoeLayerSpec, MoeState};
use crate::quant::QuantState;
use crate::{Params, Rank};
use ferrotron_tensor::Result;

/// Quantization and MoE state of a model's steps: FP8 scales and cached FP8 weights; expert biases, token counters and
/// recorded routing. Parameters and their placement are [`crate::Params`].
pub struct StepState {
    quant: Option<QuantState>,
    moe: Option<MoeState>,
}

impl StepState {
    /// State for the declared parameters and MoE layers.
    pub fn new(rank: &Rank, params: &Params, moe: &[MoeLayerSpec]) -> Result<StepState> {
        Ok(StepState {
            quant: QuantState::new(rank, params)?,
            moe: MoeState::new(&rank.compute, moe.to_vec())?,
        })
    }

    /// FP8 scales and cached FP8 weights; None where no GEMM is quantized.
    pub fn quant(&self) -> Option<&QuantState> {
        self.quant.as_ref()
    }

    /// State of the MoE layers; None where there are none.
    pub fn moe(&self) -> Option<&MoeState> {
        self.moe.as_ref()
    }
}
