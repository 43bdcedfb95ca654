//! Statistics of FP8 operands, as an event.

use super::step::or_nan;
use serde::{Deserialize, Serialize};

/// Statistics of FP8 operands over all micro-batches of a step and all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Precision {
    /// The step, from 1.
    pub step: u64,
    /// Every operand, in model order.
    pub operands: Vec<Operand>,
}

/// How well an operand fits its FP8 format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Operand {
    /// The linear layer, by its fused outputs: `layers.0.attn.q+k+v`.
    pub module: String,
    /// `input`, `weight` or `gradient` (of the output).
    pub role: String,
    /// Saturation: percent of values beyond the format's maximum.
    pub saturation: f64,
    /// Underflow: percent of non-zero values that became zero.
    pub underflow: f64,
    /// amax.
    pub amax: f64,
    /// Quantization scale: smallest and largest over all blocks, equal with per-tensor scaling. Absent where scales are part
    /// of the format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<[f64; 2]>,
    /// Relative quantization error `|q(x) - x| / |x|` in the l2 norm.
    #[serde(deserialize_with = "or_nan")]
    pub error: f64,
}
