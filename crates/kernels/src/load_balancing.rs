//! Load balancing of MoE experts: auxiliary losses, the z-loss, tokens per expert, and the expert bias.
//!
//! T tokens, E experts, S segments (sequences, or the whole batch). `segments` i32 `[T]` is the segment of each token, negative
//! for padding, which counts nowhere.

use crate::ScoreFunction;
use ferrotron_tensor::{Result, Stream, Tensor};

/// The tokens and scores of an auxiliary loss.
#[derive(Clone, Copy, Debug)]
pub struct AuxLoss<'a> {
    /// `[T, E]`, f32 or bf16
    pub logits: &'a Tensor,
    /// Scores over all experts: the softmax for both softmax variants, otherwise scores divided by the row's sum (+ 1e-20).
    pub score: ScoreFunction,
    /// Top-k of a token.
    pub k: usize,
    /// i32 `[T]`: below S; negative for padding.
    pub segments: &'a Tensor,
}

/// Weights and value of the auxiliary loss from its statistics.
///
/// `weights[s, e] = coefficient·E/(k·N²)·counts[s, e]` with N = Σcounts/(k·S), the mean number of tokens of a segment, and
/// `loss += Σ weights·sums`; for a loss averaged over segments the caller divides the coefficient by S. Weights are 0 where N is 0.
#[derive(Clone, Copy)]
pub struct AuxLossWeights<'a> {
    /// Coefficient of the loss.
    pub coefficient: f32,
    /// Top-k of a token.
    pub k: usize,
    /// f32 `[S, E]`, from [`LoadBalancingKernels::aux_loss_stats`].
    pub sums: &'a Tensor,
    /// i64 `[S, E]`, possibly summed over ranks.
    pub counts: &'a Tensor,
    /// f32 `[1]`: where given, counts are divided by it (a running mean over steps).
    pub steps: Option<&'a Tensor>,
    /// The mean over segments of any length: a segment of n of all N tokens has weight n/N, and its loss is over its own tokens,
    /// `weights[s, e] = coefficient·E/(k·N·n)·counts[s, e]`. Segments without tokens change nothing.
    pub by_tokens: bool,
    /// f32 `[S, E]`
    pub weights: &'a Tensor,
    /// f32 `[1]`: added to.
    pub loss: &'a Tensor,
}

/// Gradient of the z-loss: `dlogits += 2·coefficient/max(sums[1], 1)·logsumexp·softmax(logits)` on tokens that are not padding;
/// nothing where a logit is −inf.
#[derive(Clone, Copy)]
pub struct ZLossBackward<'a> {
    /// Coefficient of the loss.
    pub coefficient: f32,
    /// f64 `[2]`: the sums of [`LoadBalancingKernels::z_loss`], possibly over all ranks.
    pub sums: &'a Tensor,
    /// `[T, E]`
    pub logits: &'a Tensor,
    /// i32 `[T]`
    pub segments: &'a Tensor,
    /// `[T, E]`: added to.
    pub dlogits: &'a Tensor,
}

/// Load-balancing kernels. All tensors are contiguous.
pub trait LoadBalancingKernels {
    /// Statistics of an auxiliary loss per segment, overwritten: `sums` f32 `[S, E]` = column sums of the scores, `counts` i64
    /// `[S, E]` = how often an expert is in a token's top-k. Neither expert bias nor group limit enters.
    fn aux_loss_stats(&self, s: &Stream, b: &AuxLoss, sums: &Tensor, counts: &Tensor) -> Result<()>;

    /// `dlogits +=` the gradient of `Σ_t Σ_e weights[segment(t), e]·score[t, e]`; `weights` f32 `[S, E]`. Nothing where a logit is
    /// −inf.
    fn aux_loss_backward(&self, s: &Stream, b: &AuxLoss, weights: &Tensor, dlogits: &Tensor) -> Result<()>;

    /// See [`AuxLossWeights`].
    fn aux_loss_weights(&self, s: &Stream, a: &AuxLossWeights) -> Result<()>;

    /// `sums` f64 `[2] +=` (`Σ_t logsumexp(logits[t])²`, number of tokens) over tokens that are not padding.
    fn z_loss(&self, s: &Stream, logits: &Tensor, segments: &Tensor, sums: &Tensor) -> Result<()>;

    /// See [`ZLossBackward`].
    fn z_loss_backward(&self, s: &Stream, z: &ZLossBackward) -> Result<()>;

    /// Tokens per expert: `counts` i64 `[E] +=` selections of each expert in `index` i32 `[T, k]`, padding excluded.
    fn count_tokens(&self, s: &Stream, index: &Tensor, segments: &Tensor, counts: &Tensor) -> Result<()>;

    /// Auxiliary-loss-free balancing: `bias[e] += rate·sign(mean(counts) − counts[e])`; then `counts` i64 `[E]` is zeroed.
    fn update_expert_bias(&self, s: &Stream, rate: f32, counts: &Tensor, bias: &Tensor) -> Result<()>;

    /// `total += counts` (i64, equal shapes), `steps` f32 `[1] += 1`.
    fn accumulate_counts(&self, s: &Stream, counts: &Tensor, total: &Tensor, steps: &Tensor) -> Result<()>;

    /// `total += x`, f64.
    fn accumulate_f64(&self, s: &Stream, x: &Tensor, total: &Tensor) -> Result<()>;

    /// Quantile balancing: `beta = decay·beta + (1 − decay)·mean·estimate`, then the mean of `beta` over experts is subtracted;
    /// f32 `[E]`. An estimate with a value that is not finite changes nothing: a running mean would keep it for good.
    fn update_quantiles(
        &self,
        s: &Stream,
        decay: f32,
        mean: f32,
        estimate: &Tensor,
        beta: &Tensor,
    ) -> Result<()>;
}
