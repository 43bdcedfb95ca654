//! Scaled dot-product attention without a materialized score matrix (FlashAttention).

pub(crate) mod merge;
pub(crate) mod mla;
pub(crate) mod plan;

use ferrotron_tensor::{Result, Stream, Tensor};

/// Where the causal diagonal and windows start when there are more keys than queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskAlign {
    /// Query 0 sits at key 0.
    TopLeft,
    /// The last query sits at the last key (decoding with a cache).
    BottomRight,
}

/// Which scores count, and how they are formed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionParams {
    /// Factor on q·k.
    pub scale: f32,
    /// `c·tanh(score/c)` before masking.
    pub softcap: Option<f32>,
    /// No key after the query.
    pub causal: bool,
    /// Meaning of positions when lengths differ.
    pub align: MaskAlign,
    /// Keys at most this far before the query.
    pub left: Option<usize>,
    /// Keys at most this far after it.
    pub right: Option<usize>,
    /// Forward, `exp(score − the largest so far)`, which is at most 1, is rounded to E4M3 of scale 256 before it meets the
    /// values: as matrix units that multiply bytes want it. The sum of them all, and so `lse`, is that of what was not
    /// rounded. Backward knows nothing of it. Not with f16.
    pub fp8: bool,
}

/// Which tokens see each other.
#[derive(Clone, Copy)]
pub enum Sequences<'a> {
    /// q, k, v are `[batch, tokens, heads, d]` views: each batch entry is one sequence.
    Batch,
    /// q, k, v are `[tokens, heads, d]` views; sequence i owns tokens `offsets[i]..offsets[i+1]`.
    Packed {
        /// Offsets into the tokens of q, and out.
        q: &'a [i32],
        /// Offsets into the tokens of k and v.
        k: &'a [i32],
    },
}

/// Forward: `out = softmax(scores)·v`, `lse = log Σ exp(scores)` (with the sink, where there is one).
/// Tokens outside all sequences get zeros.
pub struct AttentionForward<'a> {
    /// Queries, heads n, width d_qk.
    pub q: &'a Tensor,
    /// Keys, heads g (divides n), width d_qk.
    pub k: &'a Tensor,
    /// Values, heads g, width d_v.
    pub v: &'a Tensor,
    /// f32 `[n]`: one more logit in the denominator.
    pub sink: Option<&'a Tensor>,
    /// Heads n, width d_v.
    pub out: &'a Tensor,
    /// f32, `[batch, n, tokens]` or `[tokens, n]`.
    pub lse: &'a Tensor,
}

/// Backward. `dq`, `dk`, `dv` are overwritten and may interleave in one buffer.
pub struct AttentionBackward<'a> {
    /// What the forward pass read and wrote.
    pub forward: AttentionForward<'a>,
    /// Gradient of `out`.
    pub dout: &'a Tensor,
    /// Gradient of `q`.
    pub dq: &'a Tensor,
    /// Gradient of `k`.
    pub dk: &'a Tensor,
    /// Gradient of `v`.
    pub dv: &'a Tensor,
    /// f32 `[n]`: added to.
    pub dsink: Option<&'a Tensor>,
}

/// Attention.
pub trait AttentionKernels {
    /// See [`AttentionForward`].
    fn attention_forward(
        &self,
        s: &Stream,
        scores: &AttentionParams,
        sequences: Sequences,
        a: &AttentionForward,
    ) -> Result<()>;

    /// The forward pass where `scores.fp8`, of q, k and v that are rounded to E4M3 first, each under the largest power of two
    /// that keeps its largest magnitude, of f32 `magnitudes [3]`, in range; products are of bytes. Their sums may keep fewer
    /// digits than f32 has. False, and nothing is done, where a home has no kernel for that: then round q, k and v, and
    /// call [`AttentionKernels::attention_forward`].
    fn attention_fp8(
        &self,
        _s: &Stream,
        _scores: &AttentionParams,
        _sequences: Sequences,
        _a: &AttentionForward,
        _magnitudes: &Tensor,
    ) -> Result<bool> {
        Ok(false)
    }

    /// See [`AttentionBackward`].
    fn attention_backward(
        &self,
        s: &Stream,
        scores: &AttentionParams,
        sequences: Sequences,
        a: &AttentionBackward,
    ) -> Result<()>;

    /// Merges attention over further keys into a running result, in place and in f32 (ring attention):
    /// ```text
    /// lse' = log(e^lse + e^part_lse)
    /// out' = out·e^(lse − lse') + part·e^(part_lse − lse')
    /// ```
    /// `out` f32 `[tokens, heads, d]`, `lse` f32 `[tokens, heads]`; `part` (f32, bf16 or f16) and `part_lse` f32 have the same
    /// shapes, all contiguous. A row with `part_lse = −inf` saw no key: it adds nothing and its `part` is not read.
    fn merge_attention(
        &self,
        s: &Stream,
        out: &Tensor,
        lse: &Tensor,
        part: &Tensor,
        part_lse: &Tensor,
    ) -> Result<()>;

    /// Keys of multi-head latent attention: `k[t, h] = [nope[t, h], rope[t]]`.
    ///
    /// `nope [tokens, heads, a]` holds each head's channels without position, `rope [tokens, b]` the rotated channels that all
    /// heads share, `k [tokens, heads, a + b]`; f32, bf16 or f16 alike, any strides with contiguous channels.
    fn mla_concat_keys(&self, s: &Stream, nope: &Tensor, rope: &Tensor, k: &Tensor) -> Result<()>;

    /// Gradient of [`AttentionKernels::mla_concat_keys`]: `nope[t, h] = k[t, h, ..a]`, `rope[t] = Σ_h k[t, h, a..]`, summed in
    /// f32 and rounded once.
    fn mla_split_keys(&self, s: &Stream, k: &Tensor, nope: &Tensor, rope: &Tensor) -> Result<()>;
}
