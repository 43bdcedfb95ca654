//! MoE router on CUDA: one warp per token.

pub(super) mod counts;
pub(super) mod gate;
pub(super) mod losses;
pub(super) mod route;
pub(super) mod sinkhorn;

use super::{CudaKernels, LaunchConfig};
use crate::cuda::grid::{blocks, line};
use crate::{
    AuxLoss, AuxLossWeights, CapacityDrop, GateBackward, Jitter, LoadBalancingKernels, Route, RouteBackward,
    RouterKernels, ScoreFunction, StepKey, ZLossBackward,
};
use ferrotron_tensor::{Result, Stream, Tensor};

/// Kernel instance for a dtype and number of experts: `sized!(OP, dtype, experts, "router/route", "route")`.
macro_rules! sized {
    ($op:expr, $dtype:expr, $experts:expr, $source:literal, $name:literal) => {{
        let kernel = |name| $crate::cuda::Kernel::new($source, name);
        match ($dtype, $experts) {
            (ferrotron_tensor::DType::F32, ..=128) => Ok(kernel(concat!($name, "_4_f32"))),
            (ferrotron_tensor::DType::F32, 129..=256) => Ok(kernel(concat!($name, "_8_f32"))),
            (ferrotron_tensor::DType::F32, _) => Ok(kernel(concat!($name, "_32_f32"))),
            (ferrotron_tensor::DType::BF16, ..=128) => Ok(kernel(concat!($name, "_4_bf16"))),
            (ferrotron_tensor::DType::BF16, 129..=256) => Ok(kernel(concat!($name, "_8_bf16"))),
            (ferrotron_tensor::DType::BF16, _) => Ok(kernel(concat!($name, "_32_bf16"))),
            (found, _) => {
                Err(ferrotron_tensor::Error::DType { op: $op, found, wanted: ferrotron_tensor::DType::F32 })
            }
        }
    }};
}
use sized;

/// Threads of a block that sorts one list, as in select.cuh.
const BLOCK_THREADS: u32 = 1024;

/// Warps of a block, as in common.cuh.
fn warps(experts: usize) -> usize {
    if experts > 256 { 4 } else { 8 }
}

/// Grid for `tokens` rows, `rows` per warp.
fn row_blocks(op: &'static str, tokens: usize, experts: usize, rows: usize) -> Result<LaunchConfig> {
    Ok(line(blocks(op, tokens, warps(experts) * rows)?, 32 * warps(experts) as u32))
}

/// Code of a score function, as in common.cuh.
fn code(score: ScoreFunction) -> i32 {
    match score {
        ScoreFunction::SoftmaxAfterTopK => 0,
        ScoreFunction::Softmax => 1,
        ScoreFunction::Sigmoid => 2,
        ScoreFunction::SqrtSoftplus => 3,
    }
}

impl RouterKernels for CudaKernels {
    fn top_k(&self, s: &Stream, scores: &Tensor, minus: Option<&Tensor>, index: &Tensor) -> Result<()> {
        self.launch_top_k(s, scores, minus, index)
    }

    fn route(&self, s: &Stream, r: &Route) -> Result<()> {
        self.launch_route(s, r)
    }

    fn route_backward(&self, s: &Stream, r: &RouteBackward) -> Result<()> {
        self.launch_route_backward(s, r)
    }

    fn drop_over_capacity(&self, s: &Stream, d: &CapacityDrop) -> Result<()> {
        let &CapacityDrop { capacity, experts, by_probability, index, probs, dropped } = d;
        self.launch_drop_over_capacity(s, capacity, experts, by_probability, [index, probs, dropped])
    }

    fn sinkhorn(&self, s: &Stream, logits: &Tensor, out: &Tensor) -> Result<()> {
        self.launch_sinkhorn(s, logits, out)
    }

    fn quantiles(
        &self,
        s: &Stream,
        k: usize,
        logits: &Tensor,
        beta: &Tensor,
        estimate: &Tensor,
    ) -> Result<()> {
        self.launch_quantiles(s, k, logits, beta, estimate)
    }

    fn gate_f64(&self, s: &Stream, x: &Tensor, w: &Tensor, logits: &Tensor) -> Result<()> {
        self.launch_gate(s, x, w, logits)
    }

    fn gate_f64_backward(&self, s: &Stream, g: &GateBackward) -> Result<()> {
        let &GateBackward { x, w, dlogits, dx, dw, accumulate } = g;
        self.launch_gate_backward(s, [x, w, dlogits, dx, dw], accumulate)
    }

    fn fill_normal_logits(&self, s: &Stream, key: StepKey, rows: &Tensor, logits: &Tensor) -> Result<()> {
        self.launch_normal_rows(s, key, rows, logits)
    }

    fn mask_padding(&self, s: &Stream, segments: &Tensor, index: &Tensor, probs: &Tensor) -> Result<()> {
        self.launch_mask_padding(s, segments, index, probs)
    }

    fn expand_topk(&self, s: &Stream, index: &Tensor, local: usize, etp: usize, out: &Tensor) -> Result<()> {
        self.launch_expand_topk(s, index, local, etp, out)
    }

    fn jitter(&self, s: &Stream, j: &Jitter) -> Result<()> {
        self.launch_jitter(s, j)
    }

    fn split_bf16x2(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        self.launch_split_bf16x2(s, x, out)
    }

    fn add_router_bias(&self, s: &Stream, bias: &Tensor, x: &Tensor) -> Result<()> {
        self.launch_add_router_bias(s, bias, x)
    }
}

impl LoadBalancingKernels for CudaKernels {
    fn aux_loss_stats(&self, s: &Stream, b: &AuxLoss, sums: &Tensor, counts: &Tensor) -> Result<()> {
        self.launch_aux_loss_stats(s, b, sums, counts)
    }

    fn aux_loss_backward(&self, s: &Stream, b: &AuxLoss, weights: &Tensor, dlogits: &Tensor) -> Result<()> {
        self.launch_aux_loss_backward(s, b, weights, dlogits)
    }

    fn aux_loss_weights(&self, s: &Stream, a: &AuxLossWeights) -> Result<()> {
        self.launch_aux_loss_weights(s, a)
    }

    fn z_loss(&self, s: &Stream, logits: &Tensor, segments: &Tensor, sums: &Tensor) -> Result<()> {
        self.launch_z_loss(s, logits, segments, sums)
    }

    fn z_loss_backward(&self, s: &Stream, z: &ZLossBackward) -> Result<()> {
        self.launch_z_loss_backward(s, z)
    }

    fn count_tokens(&self, s: &Stream, index: &Tensor, segments: &Tensor, counts: &Tensor) -> Result<()> {
        self.launch_count_tokens(s, index, segments, counts)
    }

    fn update_expert_bias(&self, s: &Stream, rate: f32, counts: &Tensor, bias: &Tensor) -> Result<()> {
        self.launch_update_expert_bias(s, rate, counts, bias)
    }

    fn accumulate_counts(&self, s: &Stream, counts: &Tensor, total: &Tensor, steps: &Tensor) -> Result<()> {
        self.launch_accumulate_counts(s, counts, total, steps)
    }

    fn accumulate_f64(&self, s: &Stream, x: &Tensor, total: &Tensor) -> Result<()> {
        self.launch_accumulate_f64(s, x, total)
    }

    fn update_quantiles(
        &self,
        s: &Stream,
        keep: f32,
        mean: f32,
        found: &Tensor,
        beta: &Tensor,
    ) -> Result<()> {
        self.launch_update_quantiles(s, keep, mean, found, beta)
    }
}
