//! Which experts a token goes to, and with what weight.
//!
//! T tokens, E experts, k choices of each token. A choice is an expert's number in `index` i32 `[T, k]`, -1 where there is
//! none, and its probability in `probs` f32 `[T, k]`. Logits are f32 or bf16 `[T, E]`, contiguous; arithmetic is f32.
//! Among equal values the smaller index comes first, and NaN after everything.

use ferrotron_tensor::{Result, Stream, Tensor};

/// From logits to scores, and from the scores of the chosen to probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Chosen by logits; probabilities are the softmax over the chosen logits.
    SoftmaxOfChosen,
    /// Chosen by, and probabilities are, the softmax over all logits; not normalised again.
    Softmax,
    /// `σ(x)`, divided by the sum over the chosen (+ 1e-20) where k > 1.
    Sigmoid,
    /// `√softplus(x)`, the same.
    SqrtSoftplus,
}

/// Choice among the best groups of experts only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Groups of E / count neighbours.
    pub count: usize,
    /// Groups that stay: those whose best k / keep selection scores have the largest sums.
    pub keep: usize,
}

/// How tokens are routed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Scores and probabilities.
    pub score: Score,
    /// Limits the choice.
    pub groups: Option<Groups>,
    /// Factor on probabilities.
    pub scale: f32,
}

/// Who chooses.
#[derive(Clone, Copy, Debug)]
pub enum Choice<'a> {
    /// The best scores plus `bias` f32 `[E]`, which probabilities do not see.
    Best {
        /// f32 `[E]`
        bias: Option<&'a Tensor>,
    },
    /// `index` holds the choice already (replay, quantiles, Sinkhorn).
    Given,
}

/// Statistics of a balancing loss over the rows of each segment; see [`RouterKernels::balance`].
#[derive(Clone, Copy, Debug)]
pub struct Balance<'a> {
    /// `[T, E]`
    pub logits: &'a Tensor,
    /// Scores over all experts: a softmax for both kinds of it, otherwise divided by the row's sum (+ 1e-20).
    pub score: Score,
    /// Best scores of a row that count.
    pub k: usize,
    /// i32 `[T]`: a row's segment, below S; negative where it does not count.
    pub segments: &'a Tensor,
}

/// Kernels of the router.
pub trait RouterKernels {
    /// `index [T, k]` = the k largest of `scores [T, E] - minus [E]` (f32), best first.
    fn top_k(&self, s: &Stream, scores: &Tensor, minus: Option<&Tensor>, index: &Tensor) -> Result<()>;

    /// `index` (unless given), best first, and `probs` of `logits`. A choice of -1 has probability 0 and is not in sums.
    fn route(
        &self,
        s: &Stream,
        how: Routing,
        choice: Choice,
        logits: &Tensor,
        index: &Tensor,
        probs: &Tensor,
    ) -> Result<()>;

    /// `dlogits [T, E]` (overwritten, of the logits' type) from `dprobs` f32 `[T, k]`. Zero where a logit is -inf.
    fn route_backward(
        &self,
        s: &Stream,
        how: Routing,
        logits: &Tensor,
        index: &Tensor,
        dprobs: &Tensor,
        dlogits: &Tensor,
    ) -> Result<()>;

    /// `sums` f32 `[S, E]` = column sums of the scores, `counts` i64 `[S, E]` = how often an expert is among a row's k best;
    /// both overwritten, over the rows of each segment.
    fn balance(&self, s: &Stream, b: &Balance, sums: &Tensor, counts: &Tensor) -> Result<()>;

    /// `dlogits +=` the gradient of `Σ_t Σ_e weights[segment(t), e]·score[t, e]`; `weights` f32 `[S, E]`.
    fn balance_backward(&self, s: &Stream, b: &Balance, weights: &Tensor, dlogits: &Tensor) -> Result<()>;

    /// With N = Σcounts/k of a segment: `weights[s, e] = factor·E/(k·N²)·counts[s, e]` (0 where N is 0), and
    /// `loss` f32 `[1] += Σ weights·sums`. `counts` may have been summed over ranks, and carry a divisor: they are
    /// `counts / steps` where `steps` f32 `[1]` is given (a running mean), and so is N.
    #[allow(clippy::too_many_arguments)]
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
    ) -> Result<()>;

    /// `sums` f64 `[2] +=` (Σ_t logsumexp(logits[t])², rows) over rows whose segment is not negative.
    fn z_loss(&self, s: &Stream, logits: &Tensor, segments: &Tensor, sums: &Tensor) -> Result<()>;

    /// `dlogits += scale·2·logsumexp·softmax(logits)` on such rows, `scale = factor / max(rows[1], 1)`; `rows`: the `sums`
    /// of [`RouterKernels::z_loss`], perhaps over all ranks.
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
    fn count_choices(&self, s: &Stream, index: &Tensor, segments: &Tensor, counts: &Tensor) -> Result<()>;

    /// Lets each expert keep `capacity` of its choices, the most probable (`by_probability`; smaller row first among equals)
    /// or those of the first rows; the others become -1 with probability 0. `index`, `probs` in place.
    /// `dropped` i64 `[1] +=` their number.
    #[allow(clippy::too_many_arguments)]
    fn drop_beyond(
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
    fn update_bias(&self, s: &Stream, rate: f32, counts: &Tensor, bias: &Tensor) -> Result<()>;

    /// Sinkhorn's balanced matrix of `exp(logits)`, f32 `[T, E]`: spec §1.4. The host waits once for convergence on devices
    /// that have no loop of their own.
    fn sinkhorn(&self, s: &Stream, logits: &Tensor, out: &Tensor) -> Result<()>;

    /// `estimate` f32 `[E] +=` each expert's quantile: with alpha = the (k+1)-th largest of a row of `logits - beta`, the
    /// (T·k/E + 1)-th largest of column `logits - alpha`. T·k must divide by E.
    fn quantiles(
        &self,
        s: &Stream,
        k: usize,
        logits: &Tensor,
        beta: &Tensor,
        estimate: &Tensor,
    ) -> Result<()>;
}
