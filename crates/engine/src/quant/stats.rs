//! Operand statistics: how well values fit their FP8 format.

use super::quantize::Quantized;
use super::{GemmOperand, ScaleSlot};
use crate::Rank;
use ferrotron_kernels::QuantStats;
use ferrotron_tensor::{Result, Tensor};

/// Statistics of one operand of one linear, over all passes since the last query.
#[derive(Clone, Debug, PartialEq)]
pub struct OperandStats {
    /// Which operand.
    pub slot: ScaleSlot,
    /// Its statistics.
    pub stats: QuantStats,
}

/// Compares the values `x [r, c]` with their quantization, rowwise if there are both.
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
