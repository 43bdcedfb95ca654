//! Which experts a token goes to, and with what weight.
//!
//! T tokens, E experts, k choices of each token. A choice is an expert's number in `index` i32 `[T, k]`, -1 where there is
//! none, and its probability in `probs` f32 `[T, k]`. Logits are f32 or bf16 `[T, E]`, contiguous; arithmetic is f32.
//! Among equal values the smaller index comes first, and NaN after everything. Every score grows with its logit, so without a
//! bias the order of experts is the order of logits, whatever rounding does to scores: the same on every device.
//!
//! At most [`MAX_EXPERTS`] experts and [`MAX_TOPK`] choices.

pub(crate) mod check;

use crate::RngKey;
use ferrotron_tensor::{Result, Stream, Tensor};

/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 1024;
/// Most choices of a token.
pub const MAX_TOPK: usize = 32;

/// Choices that each of `experts` keeps: `⌈tokens·k/experts · factor⌉`, at most one of each token.
pub fn capacity(tokens: usize, k: usize, experts: usize, factor: f64) -> usize {
    let share = (tokens * k) as f64 / experts.max(1) as f64;
    // A negative, NaN or huge product is brought into range by the conversion.
    ((share * factor).ceil() as usize).min(tokens)
}

/// From logits to scores, and from the scores of the chosen to probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreFunction {
    /// Chosen by logits; probabilities are the softmax over the chosen logits.
    SoftmaxAfterTopK,
    /// Chosen by, and probabilities are, the softmax over all logits; not normalised again.
    Softmax,
    /// `σ(x)`, divided by the sum over the chosen (+ 1e-20) where k > 1.
    Sigmoid,
    /// `√softplus(x)`, the same; `softplus(x) = x` above 20.
    SqrtSoftplus,
}

/// Choice among the best groups of experts only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// Groups of E / count neighbours.
    pub count: usize,
    /// Groups that stay: those whose best k / keep selection scores (bias included) have the largest sums.
    pub keep: usize,
}

/// How tokens are routed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterParams {
    /// Scores and probabilities.
    pub score: ScoreFunction,
    /// Limits the choice.
    pub groups: Option<GroupLimit>,
    /// Factor on probabilities.
    pub scale: f32,
}

/// Who chooses.
#[derive(Clone, Copy, Debug)]
pub enum ExpertChoice<'a> {
    /// The best scores plus `bias` f32 `[E]`, which probabilities do not see.
    TopK {
        /// f32 `[E]`
        bias: Option<&'a Tensor>,
    },
    /// `index` holds the choice already (replay, quantiles, Sinkhorn).
    Given,
}

/// Statistics of a balancing loss over the rows of each segment; see [`RouterKernels::aux_loss_stats`].
#[derive(Clone, Copy, Debug)]
pub struct AuxLoss<'a> {
    /// `[T, E]`
    pub logits: &'a Tensor,
    /// Scores over all experts: a softmax for both kinds of it, otherwise divided by the row's sum (+ 1e-20).
    pub score: ScoreFunction,
    /// Best scores of a row that count.
    pub k: usize,
    /// i32 `[T]`: a row's segment, below S; negative where it does not count.
    pub segments: &'a Tensor,
}

/// Kernels of the router.
pub trait RouterKernels {
    /// `index [T, k]` = the k largest of `scores [T, E] - minus [E]` (f32), best first.
    fn top_k(&self, s: &Stream, scores: &Tensor, minus: Option<&Tensor>, index: &Tensor) -> Result<()>;

    /// `index` (unless given), best first, and `probs` of `logits`. A choice of -1 (or any negative) has probability 0 and is
    /// not in sums.
    fn route(
        &self,
        s: &Stream,
        how: RouterParams,
        choice: ExpertChoice,
        logits: &Tensor,
        index: &Tensor,
        probs: &Tensor,
    ) -> Result<()>;

    /// `dlogits [T, E]` (overwritten, of the logits' type) from `dprobs` f32 `[T, k]`. Zero where a logit is -inf.
    ///
    /// With g = scale·dprobs, R the choices of a row and y the scores: softmax of the chosen `y·(g - Σ_R g·y)` on R; softmax the
    /// same with g = 0 outside R, on all; others `u·y'` on R with `u = (g - Σ_R g·y/A)/A`, `A = Σ_R y + 1e-20` (k = 1: u = g),
    /// `y' = y·(1 - y)` or `σ(x)/(2y + 1e-20)`.
    fn route_backward(
        &self,
        s: &Stream,
        how: RouterParams,
        logits: &Tensor,
        index: &Tensor,
        dprobs: &Tensor,
        dlogits: &Tensor,
    ) -> Result<()>;

    /// `sums` f32 `[S, E]` = column sums of the scores, `counts` i64 `[S, E]` = how often an expert is among a row's k best;
    /// both overwritten, over the rows of each segment. Neither bias nor groups play a part.
    fn aux_loss_stats(&self, s: &Stream, b: &AuxLoss, sums: &Tensor, counts: &Tensor) -> Result<()>;

    /// `dlogits +=` the gradient of `Σ_t Σ_e weights[segment(t), e]·score[t, e]`; `weights` f32 `[S, E]`. Nothing where a logit
    /// is -inf.
    fn aux_loss_backward(&self, s: &Stream, b: &AuxLoss, weights: &Tensor, dlogits: &Tensor) -> Result<()>;

    /// With N = Σcounts/(k·S), the mean number of rows of a segment: `weights[s, e] = factor·E/(k·N²)·counts[s, e]` (0 where N
    /// is 0), and `loss` f32 `[1] += Σ weights·sums`. `counts` may have been summed over ranks, and carry a divisor: they are
    /// `counts / steps` where `steps` f32 `[1]` is given (a running mean), and so is N. A mean over segments (the loss of
    /// sequences) is the caller's: factor / S.
    #[allow(clippy::too_many_arguments)]
    fn aux_loss_weights(
        &self,
        s: &Stream,
        factor: f32,
        k: usize,
        sums: &Tensor,
        counts: &Tensor,
        steps: Option<&Tensor>,
        weights: &Tensor,
        loss: &Tensor,
    ) -> Result<()>;

    /// `sums` f64 `[2] +=` (Σ_t logsumexp(logits[t])², rows) over rows whose segment (i32 `[T]`) is not negative.
    fn z_loss(&self, s: &Stream, logits: &Tensor, segments: &Tensor, sums: &Tensor) -> Result<()>;

    /// `dlogits += scale·2·logsumexp·softmax(logits)` on such rows, `scale = factor / max(rows[1], 1)`; `rows`: the `sums`
    /// of [`RouterKernels::z_loss`], perhaps over all ranks. Nothing where a logit is -inf.
    fn z_loss_backward(
        &self,
        s: &Stream,
        factor: f32,
        rows: &Tensor,
        logits: &Tensor,
        segments: &Tensor,
        dlogits: &Tensor,
    ) -> Result<()>;

    /// `counts` i64 `[E] +=` choices of each expert on rows whose segment is not negative.
    fn count_tokens(&self, s: &Stream, index: &Tensor, segments: &Tensor, counts: &Tensor) -> Result<()>;

    /// Lets each expert keep `capacity` of its choices, the most probable (`by_probability`; smaller row first among equals)
    /// or those of the first rows; the others become -1 with probability 0. `index`, `probs` in place.
    /// `dropped` i64 `[1] +=` their number.
    #[allow(clippy::too_many_arguments)]
    fn drop_over_capacity(
        &self,
        s: &Stream,
        capacity: usize,
        experts: usize,
        by_probability: bool,
        index: &Tensor,
        probs: &Tensor,
        dropped: &Tensor,
    ) -> Result<()>;

    /// `bias[e] += rate·sign(mean(counts) - counts[e])`; `counts` i64 `[E]` then 0.
    fn update_expert_bias(&self, s: &Stream, rate: f32, counts: &Tensor, bias: &Tensor) -> Result<()>;

    /// Sinkhorn's balanced matrix of `C = exp(logits)`, f32 `[T, E]`: from `d1 = 1` on
    /// ```text
    /// d0[t] = 1/(T·(Σ_e C[t, e]·d1[e] + 1e-8)),  d1[e] = 1/(E·(Σ_t d0[t]·C[t, e] + 1e-8))
    /// ```
    /// until the mean of `|d1 - d1 before|` is not above 1e-4 (or after 10 000 rounds); `out = d1·C·d0`. The host waits for
    /// convergence on devices that have no loop of their own.
    fn sinkhorn(&self, s: &Stream, logits: &Tensor, out: &Tensor) -> Result<()>;

    /// `estimate` f32 `[E] +=` each expert's quantile: with alpha = the (k+1)-th largest of a row of `logits - beta`, the
    /// (T·k/E + 1)-th largest of column `logits - alpha`. T·k must divide by E, and k < E. Without tokens nothing is added.
    fn quantiles(
        &self,
        s: &Stream,
        k: usize,
        logits: &Tensor,
        beta: &Tensor,
        estimate: &Tensor,
    ) -> Result<()>;

    /// `logits` f32 `[T, E] = x·wᵀ`, sums in f64; `x [T, h]`, `w [E, h]` of one type. The gate of a router in fp64.
    fn gate_f64(&self, s: &Stream, x: &Tensor, w: &Tensor, logits: &Tensor) -> Result<()>;

    /// `dx = dlogits·w` (of x's type, overwritten) and `dw` f32 `[E, h] (+)= dlogitsᵀ·x`, sums in f64; `dlogits` f32 `[T, E]`.
    #[allow(clippy::too_many_arguments)]
    fn gate_f64_backward(
        &self,
        s: &Stream,
        x: &Tensor,
        w: &Tensor,
        dlogits: &Tensor,
        dx: &Tensor,
        dw: &Tensor,
        accumulate: bool,
    ) -> Result<()>;

    /// Logits of forced balance: `logits` f32 `[T, E]`, element e of row r being standard normal value `rows[r]·E + e` of the
    /// stream of `key` ([`crate::philox::RandomStream::routing`]). `rows` i32 `[T]` has the number of each row among all rows of
    /// the step, so that values depend on no layout. The same bits on every device.
    fn fill_normal_logits(&self, s: &Stream, key: RngKey, rows: &Tensor, logits: &Tensor) -> Result<()>;
}
