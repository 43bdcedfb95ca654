//! The MoE router: scores, top-k selection, probabilities, capacity.
//!
//! T tokens, E experts, top-k selections per token. A selection is an expert's index in `index` i32 `[T, k]` (−1: none) and its
//! probability in `probs` f32 `[T, k]`. Logits are f32 or bf16 `[T, E]`, contiguous; arithmetic is in f32.
//!
//! Ties go to the smaller index and NaN sorts last. Every score function grows with its logit, so without an expert bias
//! experts are ordered by their logits, which no rounding of scores can change: selections are equal on all devices.

pub(crate) mod check;

use crate::StepKey;
use ferrotron_tensor::{Result, Stream, Tensor};

/// Largest number of experts of a layer.
pub const MAX_EXPERTS: usize = 1024;
/// Largest top-k of a token.
pub const MAX_TOPK: usize = 32;

/// Expert capacity: `⌈tokens·k/experts · factor⌉`, at most one selection per token.
pub fn capacity(tokens: usize, k: usize, experts: usize, factor: f64) -> usize {
    let share = (tokens * k) as f64 / experts.max(1) as f64;
    // The cast saturates: negative and NaN become 0.
    ((share * factor).ceil() as usize).min(tokens)
}

/// How logits become scores, and the scores of the selected experts probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreFunction {
    /// Select by logits; probabilities are the softmax over the selected logits.
    SoftmaxAfterTopK,
    /// Select by the softmax over all logits, which are also the probabilities, not renormalized.
    Softmax,
    /// `σ(x)`; see [`RouterParams::normalize`].
    Sigmoid,
    /// `√softplus(x)`, where `softplus(x) = x` above 20; see [`RouterParams::normalize`].
    SqrtSoftplus,
}

/// Group-limited routing (DeepSeek-V3): experts are selected from the best groups only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// Number of groups, each of E / count consecutive experts.
    pub count: usize,
    /// Groups kept: those with the largest sum of their best selection scores (expert bias included).
    pub keep: usize,
    /// Scores in that sum: k / keep in Megatron Core, two in DeepSeek-V3.
    pub best: usize,
}

/// How tokens are routed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterParams {
    /// Score function.
    pub score: ScoreFunction,
    /// Divide the sigmoid or √softplus scores of the selected experts by their sum + 1e-20. The softmax functions ignore it.
    pub normalize: bool,
    /// Group-limited routing.
    pub groups: Option<GroupLimit>,
    /// Factor on probabilities.
    pub scale: f32,
}

/// Where the selected experts come from.
#[derive(Clone, Copy, Debug)]
pub enum ExpertSelection<'a> {
    /// Top-k of the scores plus an expert bias, which does not enter the probabilities.
    TopK {
        /// f32 `[E]`
        bias: Option<&'a Tensor>,
    },
    /// `index` already holds the selection (routing replay, quantile or Sinkhorn balancing).
    Given,
}

/// Selects experts and computes their probabilities.
#[derive(Clone, Copy)]
pub struct Route<'a> {
    /// How tokens are routed.
    pub params: RouterParams,
    /// Where the selection comes from.
    pub selection: ExpertSelection<'a>,
    /// `[T, E]`
    pub logits: &'a Tensor,
    /// i32 `[T, k]`: written, best first, unless the selection is given. Negative entries get probability 0 and do not count in
    /// normalizing sums.
    pub index: &'a Tensor,
    /// f32 `[T, k]`
    pub probs: &'a Tensor,
}

/// Gradient of [`Route`] with respect to the logits.
///
/// With g = scale·dprobs, R the selection of a token and y its scores:
/// - softmax after top-k: `y·(g − Σ_R g·y)` on R;
/// - softmax: the same over all experts, with g = 0 outside R;
/// - sigmoid, √softplus: `u·y'` on R with `u = (g − Σ_R g·y/A)/A`, `A = Σ_R y + 1e-20` (not normalized: `u = g`), and `y' = y·(1 − y)` or
///   `σ(x)/(2y + 1e-20)`.
///
/// Zero where a logit is −inf.
#[derive(Clone, Copy)]
pub struct RouteBackward<'a> {
    /// As in the forward pass.
    pub params: RouterParams,
    /// `[T, E]`
    pub logits: &'a Tensor,
    /// i32 `[T, k]`: the selection.
    pub index: &'a Tensor,
    /// f32 `[T, k]`
    pub dprobs: &'a Tensor,
    /// `[T, E]`, of the logits' type; overwritten.
    pub dlogits: &'a Tensor,
}

/// Drops selections beyond an expert's capacity, in place: their index becomes −1 and their probability 0.
#[derive(Clone, Copy)]
pub struct CapacityDrop<'a> {
    /// Selections that each expert keeps.
    pub capacity: usize,
    /// E
    pub experts: usize,
    /// Keep the most probable selections (smaller row first among equals); otherwise those of the first rows.
    pub by_probability: bool,
    /// i32 `[T, k]`
    pub index: &'a Tensor,
    /// f32 `[T, k]`
    pub probs: &'a Tensor,
    /// i64 `[1]`: the number of dropped selections is added.
    pub dropped: &'a Tensor,
}

/// Gradient of [`RouterKernels::gate_f64`]: `dx = dlogits·w`, `dw (+)= dlogitsᵀ·x`, accumulated in f64.
#[derive(Clone, Copy)]
pub struct GateBackward<'a> {
    /// `[T, h]`
    pub x: &'a Tensor,
    /// `[E, h]`
    pub w: &'a Tensor,
    /// f32 `[T, E]`
    pub dlogits: &'a Tensor,
    /// `[T, h]`, of the type of `x`; overwritten.
    pub dx: &'a Tensor,
    /// f32 `[E, h]`
    pub dw: &'a Tensor,
    /// Add to what `dw` holds.
    pub accumulate: bool,
}

/// Input jitter of the router: `y = x·u` with u uniform in `[1 − eps, 1 + eps]`, drawn by (key, row number, column).
#[derive(Clone, Copy)]
pub struct Jitter<'a> {
    /// Half the width of the interval.
    pub eps: f32,
    /// Random stream.
    pub key: StepKey<'a>,
    /// i32 `[T]`: number of each row among all rows of the step, so that values do not depend on the layout.
    pub rows: &'a Tensor,
    /// `[T, h]`
    pub x: &'a Tensor,
    /// `[T, h]`
    pub y: &'a Tensor,
}

/// Router kernels. All tensors are contiguous. `segments` i32 `[T]` marks padding tokens by a negative value.
pub trait RouterKernels {
    /// `index [T, k]` = the k largest of `scores [T, E] − minus [E]` (f32), best first.
    fn top_k(&self, s: &Stream, scores: &Tensor, minus: Option<&Tensor>, index: &Tensor) -> Result<()>;

    /// See [`Route`].
    fn route(&self, s: &Stream, r: &Route) -> Result<()>;

    /// See [`RouteBackward`].
    fn route_backward(&self, s: &Stream, r: &RouteBackward) -> Result<()>;

    /// See [`CapacityDrop`].
    fn drop_over_capacity(&self, s: &Stream, d: &CapacityDrop) -> Result<()>;

    /// Removes the selections of padding tokens: their `index` i32 `[T, k]` becomes −1 and `probs` f32 `[T, k]` 0.
    fn mask_padding(&self, s: &Stream, segments: &Tensor, index: &Tensor, probs: &Tensor) -> Result<()>;

    /// Expands selections to the `etp` expert-tensor-parallel ranks that share each expert: expert e, of `local` experts per
    /// rank, becomes `(e / local·etp + a)·local + e mod local` in slot `j·etp + a`; −1 stays. `index` i32 `[T, k]`, `out` i32
    /// `[T, k·etp]`.
    fn expand_topk(&self, s: &Stream, index: &Tensor, local: usize, etp: usize, out: &Tensor) -> Result<()>;

    /// See [`Jitter`].
    fn jitter(&self, s: &Stream, j: &Jitter) -> Result<()>;

    /// Sinkhorn normalization of `C = exp(logits)`, f32 `[T, E]`: starting from `d1 = 1`,
    /// ```text
    /// d0[t] = 1/(T·(Σ_e C[t, e]·d1[e] + 1e-8)),  d1[e] = 1/(E·(Σ_t d0[t]·C[t, e] + 1e-8))
    /// ```
    /// until the mean of `|d1 − previous d1|` is at most 1e-4, or for 10 000 iterations; `out = d1·C·d0`. On a GPU the host
    /// waits for convergence.
    fn sinkhorn(&self, s: &Stream, logits: &Tensor, out: &Tensor) -> Result<()>;

    /// Quantile balancing: `estimate` f32 `[E] +=` each expert's quantile. With alpha = the (k+1)-th largest of a row of
    /// `logits − beta`, it is the (T·k/E + 1)-th largest of column `logits − alpha`. T·k must be a multiple of E, and k < E. Without
    /// tokens nothing is added.
    fn quantiles(
        &self,
        s: &Stream,
        k: usize,
        logits: &Tensor,
        beta: &Tensor,
        estimate: &Tensor,
    ) -> Result<()>;

    /// Router GEMM with f64 accumulation: `logits` f32 `[T, E] = x·wᵀ`; `x [T, h]`, `w [E, h]` of one type.
    fn gate_f64(&self, s: &Stream, x: &Tensor, w: &Tensor, logits: &Tensor) -> Result<()>;

    /// See [`GateBackward`].
    fn gate_f64_backward(&self, s: &Stream, g: &GateBackward) -> Result<()>;

    /// `x[t] += bias` for every row; `x` f32 `[T, n]`, `bias` f32 or bf16 `[n]`.
    fn add_router_bias(&self, s: &Stream, bias: &Tensor, x: &Tensor) -> Result<()>;

    /// Splits f32 `x [T, n]` into two bf16 numbers whose sum it is: `out [T, 2n]` holds the rounded values, then the remainders.
    fn split_bf16x2(&self, s: &Stream, x: &Tensor, out: &Tensor) -> Result<()>;

    /// Random logits for forced balance: element e of row r of `logits` f32 `[T, E]` is standard normal value `rows[r]·E + e`
    /// of the stream of `key` ([`RandomStream::routing`](crate::philox::RandomStream::routing)). `rows` i32 `[T]` is the number of
    /// each row among all rows of the step. The same bits on every device and under every layout.
    fn fill_normal_logits(&self, s: &Stream, key: StepKey, rows: &Tensor, logits: &Tensor) -> Result<()>;
}
