//! The router on a card: one warp to a token.

mod counts;
mod gate;
mod losses;
mod route;
mod sinkhorn;

use super::{CudaKernels, Grid};
use crate::cuda::groups::{blocks, line};
use crate::{Balance, Choice, DropoutKey, RouterKernels, Routing, Score};
use ferrotron_tensor::{Result, Stream, Tensor};

/// The instance of a kernel for the type and number of experts: `sized!(OP, dtype, experts, "router_route", "route")`.
macro_rules! sized {
    ($op:expr, $dtype:expr, $experts:expr, $source:literal, $name:literal) => {{
        let kernel = |name| $crate::cuda::Kernel { source: $source, name };
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

/// Threads of a block whose threads share one list of experts or values, as in select.cuh.
const WIDE: u32 = 1024;

/// Warps of a block, as in common.cuh.
fn warps(experts: usize) -> usize {
    if experts > 256 { 4 } else { 8 }
}

/// Blocks for `tokens` rows, `rows` to a warp.
fn row_blocks(op: &'static str, tokens: usize, experts: usize, rows: usize) -> Result<Grid> {
    Ok(line(blocks(op, tokens, warps(experts) * rows)?, 32 * warps(experts) as u32))
}

/// As in common.cuh.
fn code(score: Score) -> i32 {
    match score {
        Score::SoftmaxOfChosen => 0,
        Score::Softmax => 1,
        Score::Sigmoid => 2,
        Score::SqrtSoftplus => 3,
    }
}

impl RouterKernels for CudaKernels {
    fn top_k(&self, s: &Stream, scores: &Tensor, minus: Option<&Tensor>, index: &Tensor) -> Result<()> {
        self.queue_top_k(s, scores, minus, index)
    }

    fn route(
        &self,
        s: &Stream,
        how: Routing,
        choice: Choice,
        logits: &Tensor,
        index: &Tensor,
        probs: &Tensor,
    ) -> Result<()> {
        self.queue_route(s, how, choice, logits, index, probs)
    }

    fn route_backward(
        &self,
        s: &Stream,
        how: Routing,
        logits: &Tensor,
        index: &Tensor,
        dprobs: &Tensor,
        dlogits: &Tensor,
    ) -> Result<()> {
        self.queue_route_backward(s, how, logits, index, dprobs, dlogits)
    }

    fn balance(&self, s: &Stream, b: &Balance, sums: &Tensor, counts: &Tensor) -> Result<()> {
        self.queue_balance(s, b, sums, counts)
    }

    fn balance_backward(&self, s: &Stream, b: &Balance, weights: &Tensor, dlogits: &Tensor) -> Result<()> {
        self.queue_balance_backward(s, b, weights, dlogits)
    }

    fn balance_weights(
        &self,
        s: &Stream,
        factor: f32,
        k: usize,
        sums: &Tensor,
        counts: &Tensor,
        steps: Option<&Tensor>,
        weights: &Tensor,
        loss: &Tensor,
    ) -> Result<()> {
        self.queue_balance_weights(s, factor, k, [sums, counts, weights, loss], steps)
    }

    fn z_loss(&self, s: &Stream, logits: &Tensor, segments: &Tensor, sums: &Tensor) -> Result<()> {
        self.queue_z_loss(s, logits, segments, sums)
    }

    fn z_loss_backward(
        &self,
        s: &Stream,
        factor: f32,
        rows: &Tensor,
        logits: &Tensor,
        segments: &Tensor,
        dlogits: &Tensor,
    ) -> Result<()> {
        self.queue_z_loss_backward(s, factor, rows, logits, segments, dlogits)
    }

    fn count_choices(&self, s: &Stream, index: &Tensor, segments: &Tensor, counts: &Tensor) -> Result<()> {
        self.queue_count_choices(s, index, segments, counts)
    }

    fn drop_beyond(
        &self,
        s: &Stream,
        capacity: usize,
        experts: usize,
        by_probability: bool,
        index: &Tensor,
        probs: &Tensor,
        dropped: &Tensor,
    ) -> Result<()> {
        self.queue_drop_beyond(s, capacity, experts, by_probability, [index, probs, dropped])
    }

    fn update_bias(&self, s: &Stream, rate: f32, counts: &Tensor, bias: &Tensor) -> Result<()> {
        self.queue_update_bias(s, rate, counts, bias)
    }

    fn sinkhorn(&self, s: &Stream, logits: &Tensor, out: &Tensor) -> Result<()> {
        self.queue_sinkhorn(s, logits, out)
    }

    fn quantiles(
        &self,
        s: &Stream,
        k: usize,
        logits: &Tensor,
        beta: &Tensor,
        estimate: &Tensor,
    ) -> Result<()> {
        self.queue_quantiles(s, k, logits, beta, estimate)
    }

    fn gate_exact(&self, s: &Stream, x: &Tensor, w: &Tensor, logits: &Tensor) -> Result<()> {
        self.queue_gate(s, x, w, logits)
    }

    fn gate_exact_backward(
        &self,
        s: &Stream,
        x: &Tensor,
        w: &Tensor,
        dlogits: &Tensor,
        dx: &Tensor,
        dw: &Tensor,
        accumulate: bool,
    ) -> Result<()> {
        self.queue_gate_backward(s, [x, w, dlogits, dx, dw], accumulate)
    }

    fn fill_normal_logits(&self, s: &Stream, key: DropoutKey, rows: &Tensor, logits: &Tensor) -> Result<()> {
        self.queue_normal_rows(s, key, rows, logits)
    }
}
