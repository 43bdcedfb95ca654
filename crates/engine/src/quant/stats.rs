//! How well operands of narrow products fit their formats.

use super::quantize::Quantized;
use super::{GemmOperand, ScaleSlot};
use crate::Rank;
use ferrotron_kernels::QuantStats;
use ferrotron_tensor::{Result, Tensor};

/// What one operand of one map was like, over all passes since it was last asked.
#[derive(Clone, Debug, PartialEq)]
pub struct OperandStats {
    /// Which.
    pub slot: ScaleSlot,
    /// What was counted.
    pub stats: QuantStats,
}

/// Compares the values `x [r, c]` with a factor made of them, the one along rows if there are both.
pub(super) fn measure(rank: &Rank, x: &Tensor, made: &Quantized) -> Result<Option<QuantStats>> {
    let (s, k) = (&rank.compute, &rank.kernels);
    let (side, turned) = match (&made.rows, &made.cols) {
        (Some(rows), _) => (rows, false),
        (None, Some(cols)) => (cols, true),
        (None, None) => return Ok(None),
    };
    Ok(Some(match side {
        GemmOperand::Fp8(bytes) => k.quant_stats(s, x, bytes, turned)?,
        GemmOperand::HighPrecision { t, .. } => QuantStats::rounded(s, x, t)?,
    }))
}
