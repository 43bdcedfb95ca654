//! Scaled dot-product attention without a materialized score matrix (FlashAttention).

pub(crate) mod merge;
pub(crate) mod mla;
pub(crate) mod plan;

use crate::cuda::CapturedSequences;
use ferrotron_tensor::{Result, Stream, Tensor};

/// Alignment of the causal diagonal and sliding window where queries and keys differ in number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskAlign {
    /// Query 0 is aligned with key 0.
    TopLeft,
    /// The last query is aligned with the last key (decoding with a KV cache).
    BottomRight,
}

/// Scaling, masking and precision of attention scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionParams {
    /// Factor on q·k, usually 1/√d.
    pub scale: f32,
    /// Soft cap c: scores become `c·tanh(score/c)` before masking.
    pub softcap: Option<f32>,
    /// Causal mask: no key after the query.
    pub causal: bool,
    /// Alignment of the mask where lengths differ.
    pub align: MaskAlign,
    /// Sliding window: keys at most this far before the query.
    pub left: Option<usize>,
    /// Sliding window: keys at most this far after the query.
    pub right: Option<usize>,
    /// Round the unnormalized probabilities `exp(score − running max) ≤ 1` to E4M3 with scale 256 before P·V, as FP8 tensor
    /// cores need them. The row sum, and so `lse`, is that of the unrounded values. Forward only; not for f16.
    pub fp8: bool,
}

/// How tokens are grouped into sequences.
#[derive(Clone, Copy)]
pub enum Sequences<'a> {
    /// q, k, v are `[batch, tokens, heads, d]` views: each batch entry is one sequence.
    Batch,
    /// Packed sequences (THD layout): q, k, v are `[tokens, heads, d]` views; sequence i is tokens `offsets[i]..offsets[i+1]`.
    Packed {
        /// Cumulative sequence lengths of q and out.
        q: &'a [i32],
        /// Cumulative sequence lengths of k and v.
        k: &'a [i32],
    },
    /// The same where the launch is captured in a CUDA graph, and replayed with other sequences.
    Captured(&'a CapturedSequences),
}

impl<'a> Sequences<'a> {
    /// Cumulative sequence lengths of queries and of keys; `None` if each batch entry is one sequence.
    pub(crate) fn offsets(self) -> Option<[&'a [i32]; 2]> {
        match self {
            Sequences::Batch => None,
            Sequences::Packed { q, k } => Some([q, k]),
            Sequences::Captured(c) => Some([c.offsets(); 2]),
        }
    }
}

/// Forward pass: `out = softmax(scores)·v`, `lse = log Σ exp(scores)`, the attention sink included.
/// Tokens outside all sequences get zeros.
pub struct AttentionForward<'a> {
    /// Queries: n heads of d_qk channels.
    pub q: &'a Tensor,
    /// Keys: g heads of d_qk channels; g divides n (GQA).
    pub k: &'a Tensor,
    /// Values: g heads of d_v channels.
    pub v: &'a Tensor,
    /// Attention sink, f32 `[n]`: one more logit per head in the softmax denominator.
    pub sink: Option<&'a Tensor>,
    /// Output: n heads of d_v channels.
    pub out: &'a Tensor,
    /// f32, `[batch, n, tokens]` or `[tokens, n]`.
    pub lse: &'a Tensor,
}

/// Backward pass. `dq`, `dk`, `dv` are overwritten and may be interleaved views of one buffer.
pub struct AttentionBackward<'a> {
    /// Inputs and outputs of the forward pass.
    pub forward: AttentionForward<'a>,
    /// Gradient of `out`.
    pub dout: &'a Tensor,
    /// Gradient of `q`.
    pub dq: &'a Tensor,
    /// Gradient of `k`.
    pub dk: &'a Tensor,
    /// Gradient of `v`.
    pub dv: &'a Tensor,
    /// Gradient of `sink`, f32 `[n]`: accumulated.
    pub dsink: Option<&'a Tensor>,
}

/// Attention kernels.
pub trait AttentionKernels {
    /// See [`AttentionForward`].
    fn attention_forward(
        &self,
        s: &Stream,
        params: &AttentionParams,
        sequences: Sequences,
        a: &AttentionForward,
    ) -> Result<()>;

    /// FP8 forward pass for `params.fp8`: q, k and v are quantized to E4M3 under power-of-two scales from their amax, f32
    /// `amax [3]`, and multiplied by FP8 tensor cores, whose accumulators may hold fewer bits than f32. Returns false and does
    /// nothing where the device has no such kernel: the caller then quantizes and dequantizes q, k and v and calls
    /// [`AttentionKernels::attention_forward`].
    fn attention_fp8(
        &self,
        _s: &Stream,
        _params: &AttentionParams,
        _sequences: Sequences,
        _a: &AttentionForward,
        _amax: &Tensor,
    ) -> Result<bool> {
        Ok(false)
    }

    /// See [`AttentionBackward`].
    fn attention_backward(
        &self,
        s: &Stream,
        params: &AttentionParams,
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
