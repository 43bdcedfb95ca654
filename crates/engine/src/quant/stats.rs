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
pub(super) fn measure(rank: &Rank, x: &Tensor, quantized: &Quantized) -> Result<Option<QuantStats>> {
    let (s, k) = (&rank.compute, &rank.kernels);
    let (operand, transposed) = match (&quantized.rows, &quantized.cols) {
        (Some(rows), _) => (rows, false),
        (None, Some(cols)) => (cols, true),
        (None, None) => return Ok(None),
    };
    Ok(Some(match operand {
        GemmOperand::Fp8(fp8) => k.quant_stats(s, x, fp8, transposed)?,
        GemmOperand::HighPrecision { t, .. } => QuantStats::rounded(s, x, t)?,
        GemmOperand::Microscaled(q) => {
            let rounded = rank.activation(x.shape(), x.dtype())?;
            k.dequantize_microscaled(s, q, &rounded)?;
            QuantStats::rounded(s, x, &rounded)?
        }
    }))
}
