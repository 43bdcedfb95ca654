//! Attention on the CPU, forward and backward, without materializing a `[queries, keys]` matrix.
//!
//! For a query `i` and the keys `j` it may see (see [`AttentionShape`]):
//! ```text
//! s_ij = scale * q_i·k_j                 (softcap c: s = c * tanh(s / c))
//! lse_i = ln(Σ_j exp(s_ij) + exp(sink))  (the last term only with a sink)
//! out_i = Σ_j exp(s_ij - lse_i) v_j
//! ```
//! Sequences are split into blocks of 64 queries and 64 keys. A block of scores is held *transposed*, one key per
//! row and one query per lane, so that the softmax reduces over rows and never across lanes; fully masked blocks are
//! skipped. Block GEMMs run in f32, or, for bf16 on a CPU with AMX, on AMX tiles with the probabilities (and score
//! gradients) rounded to bf16 and f32 accumulation.
//!
//! The split depends on the problem only and every sum has a fixed order, so results do not depend on the number of threads.

mod backward;
mod block_gemm;
#[cfg(target_arch = "x86_64")]
mod block_gemm_amx;
mod block_gemm_vector;
mod check;
mod forward;
mod mask;
mod math;
mod multiversion_fma;
mod rounding;
mod scratch;
mod softmax;
mod softmax_state;
mod tiles;
mod transpose;
mod view;

pub use backward::backward;
pub(crate) use check::{per_head, shape as check_shape};
pub use forward::forward;
pub use view::{AttentionGradients, AttentionInputs, AttentionOutputs, Heads, HeadsMut};

/// Queries of a block: the lanes of a block of scores.
const QUERIES: usize = 64;
/// Keys of a block: the rows of a block of scores.
const KEYS: usize = 64;
/// Block GEMMs work on multiples of this in every dimension; the rest is zero-padded.
const GRAIN: usize = 32;

/// Rounds up to the grain of the block GEMMs.
const fn padded(n: usize) -> usize {
    n.next_multiple_of(GRAIN)
}

/// Alignment of the causal diagonal and window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskAlign {
    /// Query 0 is aligned with key 0: `off = 0`.
    TopLeft,
    /// The last query is aligned with the last key: `off = k_len - q_len`.
    BottomRight,
}

/// One sequence of a launch: queries `q_start..q_start + q_len` against keys `k_start..k_start + k_len`, both in
/// batch entry `batch`. Lengths may be 0. Tokens in no span are neither read nor written: a caller that packs
/// sequences with gaps zeroes `out`, `dq`, `dk` and `dv` there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Batch entry.
    pub batch: usize,
    /// First query token.
    pub q_start: usize,
    /// Number of queries.
    pub q_len: usize,
    /// First key token.
    pub k_start: usize,
    /// Number of keys.
    pub k_len: usize,
    /// Where query 0, head 0 of this span sits in the log-sum-exp buffer.
    pub lse_base: usize,
}

/// What is computed. Query `i` sees key `j` iff `i + off - left <= j <= i + off + right`, with `off` from
/// [`MaskAlign`], the bounds from `window`, and `right` at most 0 when `causal`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`. Query head `h` uses key head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Channels of queries and keys.
    pub d_qk: usize,
    /// Channels of values and outputs.
    pub d_v: usize,
    /// Multiplies `q·k`.
    pub scale: f32,
    /// `s = c * tanh(s / c)` before masking.
    pub softcap: Option<f32>,
    /// No key after the diagonal.
    pub causal: bool,
    /// Where the diagonal starts when there are more or fewer keys than queries.
    pub align: MaskAlign,
    /// Keys visible before and after the diagonal; `None` is unbounded.
    pub window: (Option<usize>, Option<usize>),
    /// Forward, `exp(s - largest so far)` is rounded to E4M3 of scale 256 before it meets values.
    pub fp8: bool,
    /// Stride between heads in the log-sum-exp buffer.
    pub lse_head: usize,
    /// Stride between queries in the log-sum-exp buffer.
    pub lse_token: usize,
}
