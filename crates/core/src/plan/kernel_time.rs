//! Time of single kernels: GEMMs by their shape, attention, memory-bound kernels.

use super::hardware::{GemmCurve, GemmDtype, Hardware};
use crate::model::description::{CoreAttention, Gemm};
use ferrotron_engine::quant::LinearGemm;

/// Rows of the result that one multiprocessor computes at a time.
const TILE_ROWS: usize = 128;
/// Columns, and the rate of tiles of that width over that of the widest: narrow tiles read operands more often.
const TILE_COLUMNS: [(usize, f64); 3] = [(256, 1.0), (192, 0.97), (128, 0.93)];
/// The most parts that the contracted axis is divided into where tiles are few, and the least length of a part.
const SPLIT: (usize, usize) = (8, 1024);

/// A GEMM `[m, k]·[k, n]`, or a grouped GEMM of several experts: `m` are the rows of all of them together, of a weight
/// gradient `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Fprop, dgrad or wgrad.
    pub gemm: LinearGemm,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// The contracted axis.
    pub k: usize,
    /// Experts; 1 for a dense GEMM.
    pub experts: usize,
    /// The result is added to what is there.
    pub accumulate: bool,
}

/// Seconds of a GEMM of a description, with `dtype` operands where it says FP8; `accumulate`: weight gradients are added to those
/// of earlier micro-batches.
pub(super) fn gemm_seconds(hw: &Hardware, g: &Gemm, dtype: GemmDtype, accumulate: bool) -> f64 {
    let dtype = if g.fp8 { dtype } else { GemmDtype::Bf16 };
    let accumulate = accumulate && g.gemm == LinearGemm::Wgrad;
    GemmShape { gemm: g.gemm, m: g.m, n: g.n, k: g.k, experts: g.experts.max(1), accumulate }
        .seconds(hw, dtype)
}

impl GemmShape {
    /// Seconds by the curve of `dtype`.
    pub fn seconds(&self, hw: &Hardware, dtype: GemmDtype) -> f64 {
        let Some(curve) = hw.curve(dtype) else { return f64::INFINITY };
        let experts = self.experts;
        // Experts share the rows of a micro-batch: the results' rows, or of weight gradients the contracted axis.
        let (m, n, k) = match self.gemm {
            LinearGemm::Wgrad => (self.m, self.n, self.k.div_ceil(experts)),
            _ => (self.m.div_ceil(experts), self.n, self.k),
        };
        let part = reached(hw, &curve, experts, [m, n, k]);
        let grouped = if experts > 1 { hw.gemm.grouped } else { 1.0 };
        let rate = curve.peak * 1e12 * curve.achieved * grouped * part;
        let (m, n, k, experts) = (m as f64, n as f64, k as f64, experts as f64);
        let compute = 2.0 * experts * m * n * k / rate;
        let result = match (self.gemm, self.accumulate) {
            (LinearGemm::Wgrad, true) => 8.0,
            (LinearGemm::Wgrad, false) => 4.0,
            _ => 2.0,
        };
        let bandwidth = hw.memory_gb_s * 1e9;
        let read = experts * (m * k + k * n) * operand_bytes(dtype) / bandwidth;
        let written = experts * m * n * result / bandwidth;
        // Tiles of a grouped GEMM are written before the next ones begin, those of a dense one beside them.
        let seconds = if experts > 1.0 { compute.max(read) + written } else { compute.max(read + written) };
        seconds + hw.kernel_us * 1e-6
    }
}

/// Part of the rate that a GEMM of `[m, n, k]` per expert reaches: by the length of the contracted axis, the part of the tiles that
/// lies inside the result, and the part of the last wave of tiles that has work. Libraries choose among tiles, and divide the
/// contracted axis where that fills the wave; tiles of experts are scheduled dynamically.
fn reached(hw: &Hardware, curve: &GemmCurve, experts: usize, [m, n, k]: [usize; 3]) -> f64 {
    let mut best = 0.05f64;
    for (columns, rate) in TILE_COLUMNS {
        let tiles = experts * m.div_ceil(TILE_ROWS) * n.div_ceil(columns);
        let used = (experts * m) as f64 * n as f64 / (tiles * TILE_ROWS * columns).max(1) as f64;
        let most = if experts > 1 { 1 } else { (k / SPLIT.1).clamp(1, SPLIT.0) };
        for parts in 1..=most {
            let (waves, k) = ((tiles * parts) as f64 / hw.sms as f64, k as f64 / parts as f64);
            let filled = if experts > 1 { waves / (waves + 0.5) } else { waves / waves.ceil() };
            best = best.max(k / (k + curve.half_k) * filled * used * rate);
        }
    }
    best
}

/// Bytes of an element, scales included.
fn operand_bytes(dtype: GemmDtype) -> f64 {
    match dtype {
        GemmDtype::Bf16 => 2.0,
        GemmDtype::Fp8 => 1.0,
        GemmDtype::Mxfp8 => 1.0 + 1.0 / 32.0,
        GemmDtype::Nvfp4 => 0.5 + 1.0 / 16.0,
    }
}

/// Seconds of core attention, forward and backward, over the `tokens` queries of this rank in sequences of `length`.
pub(super) fn attention_seconds(hw: &Hardware, a: &CoreAttention, tokens: f64, length: f64) -> [f64; 2] {
    // Tokens that a query sees on average under the causal mask.
    let seen = match a.window {
        Some(w) if (w as f64) < length => {
            let w = w as f64;
            w - w * (w - 1.0) / (2.0 * length)
        }
        _ => length / 2.0,
    };
    let widths = (a.heads * (a.head_dim + a.value_dim)) as f64;
    // Two GEMMs of 2 FLOPs per pair and channel in forward, five in backward.
    let forward = 2.0 * tokens * seen * widths;
    let rates = hw.attention;
    let ramp = rates.reached(a.head_dim.min(a.value_dim), seen);
    let seconds = |flops: f64, rate: f64| flops / (rate * 1e12 * ramp) + hw.kernel_us * 1e-6;
    [seconds(forward, rates.forward), seconds(2.5 * forward, rates.backward)]
}

/// Seconds of `kernels` kernels that move `bytes` together.
pub(super) fn memory_seconds(hw: &Hardware, bytes: f64, kernels: f64) -> f64 {
    bytes / (hw.memory_gb_s * 1e9) + kernels * hw.kernel_us * 1e-6
}
