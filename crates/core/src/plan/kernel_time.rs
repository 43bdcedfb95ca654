//! Time of single kernels: GEMMs by their shape, attention, memory-bound kernels.

use super::hardware::{GemmDtype, Hardware};
use crate::model::description::{CoreAttention, Gemm};
use ferrotron_engine::quant::LinearGemm;

/// Rows and columns of the result that one multiprocessor computes at a time.
const TILE: [usize; 2] = [128, 256];

/// Seconds of a GEMM or grouped GEMM, with `dtype` operands where the description says FP8.
pub(super) fn gemm_seconds(hw: &Hardware, g: &Gemm, dtype: GemmDtype) -> f64 {
    let dtype = if g.fp8 { dtype } else { GemmDtype::Bf16 };
    let Some(curve) = hw.curve(dtype) else { return f64::INFINITY };
    let experts = g.experts.max(1);
    // Experts share the rows of a micro-batch: the results' rows, or of weight gradients the contracted axis.
    let (m, n, k) = match g.gemm {
        LinearGemm::Wgrad => (g.m, g.n, g.k.div_ceil(experts)),
        _ => (g.m.div_ceil(experts), g.n, g.k),
    };
    let tiles = experts * m.div_ceil(TILE[0]) * n.div_ceil(TILE[1]);
    let waves = tiles as f64 / hw.sms as f64;
    // A last wave that is nearly empty is divided along k.
    let filled = (waves / waves.ceil()).max(0.5);
    let used = (experts * m) as f64 * n as f64 / (tiles * TILE[0] * TILE[1]) as f64;
    let grouped = if experts > 1 { hw.gemm.grouped } else { 1.0 };
    let ramp = k as f64 / (k as f64 + curve.half_k);
    let flops = 2.0 * (experts * m) as f64 * n as f64 * k as f64;
    let compute = flops / (curve.peak * 1e12 * curve.achieved * grouped * ramp * filled * used.max(0.05));
    let (size, out) = (operand_bytes(dtype), if g.gemm == LinearGemm::Wgrad { 4.0 } else { 2.0 });
    let (m, n, k, experts) = (m as f64, n as f64, k as f64, experts as f64);
    let bytes = experts * ((m * k + k * n) * size + m * n * out);
    compute.max(bytes / (hw.memory_gb_s * 1e9)) + hw.kernel_us * 1e-6
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
    // Small head dimensions use the tensor cores less.
    let narrow = (a.head_dim.min(a.value_dim) as f64 / 128.0).clamp(0.25, 1.0).powf(0.5);
    let ramp = seen / (seen + rates.half_length) * narrow;
    let seconds = |flops: f64, rate: f64| flops / (rate * 1e12 * ramp) + hw.kernel_us * 1e-6;
    [seconds(forward, rates.forward), seconds(2.5 * forward, rates.backward)]
}

/// Seconds of `kernels` kernels that move `bytes` together.
pub(super) fn memory_seconds(hw: &Hardware, bytes: f64, kernels: f64) -> f64 {
    bytes / (hw.memory_gb_s * 1e9) + kernels * hw.kernel_us * 1e-6
}
