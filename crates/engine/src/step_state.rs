//! State that passes share beside the weights.

use crate::lora::DoraState;
use crate::moe::{MoeLayerSpec, MoeState};
use crate::quant::QuantState;
use crate::{Params, Rank};
use ferrotron_tensor::Result;

/// Quantization, MoE and DoRA state of a model's steps: FP8 scales and cached FP8 weights; expert biases, token counters and
/// recorded routing; row norms. Parameters and their placement are [`crate::Params`].
pub struct StepState {
    quant: Option<QuantState>,
    moe: Option<MoeState>,
    pub(crate) dora: DoraState,
}

impl StepState {
    /// State for the declared parameters and MoE layers.
    pub fn new(rank: &Rank, params: &Params, moe: &[MoeLayerSpec]) -> Result<StepState> {
        Ok(StepState {
            quant: QuantState::new(rank, params)?,
            moe: MoeState::new(&rank.compute, moe.to_vec(), params.specs())?,
            dora: DoraState::default(),
        })
    }

    /// Begins the passes of step `step`, during which weights do not change: what is computed from them alone is kept.
    pub fn begin_step(&self, step: u64, micro_batches: usize) {
        self.dora.begin_step();
        if let Some(quant) = &self.quant {
            quant.begin_step(step, micro_batches);
        }
    }

    /// Ends the passes of a step. Collective over the tp×cp×dp ranks.
    pub fn end_step(&self, rank: &Rank) -> Result<()> {
        self.dora.end();
        self.quant.as_ref().map_or(Ok(()), |quant| quant.end_step(rank))
    }

    /// Begins passes without backward, between which weights do not change.
    pub fn begin_evaluation(&self) {
        self.dora.begin_evaluation();
        if let Some(quant) = &self.quant {
            quant.begin_evaluation();
        }
    }

    /// Ends those passes.
    pub fn end_evaluation(&self) {
        self.dora.end();
        if let Some(quant) = &self.quant {
            quant.end_evaluation();
        }
    }

    /// FP8 scales and cached FP8 weights; None where no GEMM is quantized.
    pub fn quant(&self) -> Option<&QuantState> {
        self.quant.as_ref()
    }

    /// State of the MoE layers; None where there are none.
    pub fn moe(&self) -> Option<&MoeState> {
        self.moe.as_ref()
    }

    /// The same, to be set up.
    pub fn moe_mut(&mut self) -> Option<&mut MoeState> {
        self.moe.as_mut()
    }
}
