//! Multi-head latent attention (MLA): keys and values of all heads are up-projected from one low-rank latent vector per
//! token; RoPE applies to separate key channels that all heads share.
//!
//! With hidden size h, n heads, and per head a channels without RoPE (`nope`), b with RoPE (`rope`) and v value channels:
//! ```text
//! c_q        = norm(W_qa·x)              [q_rank]
//! q          = W_qb·c_q                  [n, a + b], or W_q·x without q_rank
//! c, k_rope  = W_kva·x                   [kv_rank], [b]
//! k_nope, v  = W_kvb·norm(c)             [n, a], [n, v]
//! k          = [k_nope, rope(k_rope)]    [n, a + b], the last b channels the same for all heads
//! y          = W_o·attention([q_nope, rope(q_rope)], k, v)
//! ```
//!
//! Tensor parallelism splits heads: W_qb, W_kvb (and W_q) are column-parallel, W_o is row-parallel. Down-projections and
//! their norms are replicated and run on this rank's sequence shard; the latent vectors are all-gathered, not the
//! residual stream.

mod norm_linear;
mod saved;

use super::core_attention::{CoreAttention, CoreAttentionGrads, zero_padding};
use super::{KvCache, Layout, RopeTable};
use crate::{Declarations, Linear, SavedTensor, Split, StepContext, WeightGrad, WithAmax};
use ferrotron_kernels::{AttentionParams, Norm, Rope};
use ferrotron_tensor::{Result, Tensor, shape_error};
use norm_linear::NormLinear;
pub use saved::MlaSaved;
use saved::{LatentSaved, Operands, QuerySaved};

/// Sizes and options of an MLA block.
#[derive(Clone, Debug)]
pub struct MlaConfig {
    /// Width of the residual stream (h).
    pub hidden: usize,
    /// Heads (n).
    pub heads: usize,
    /// Rank of the query down-projection (`q_lora_rank`); `None` projects queries directly.
    pub q_rank: Option<usize>,
    /// Rank of the key/value down-projection (`kv_lora_rank`).
    pub kv_rank: usize,
    /// Query/key channels per head without RoPE (`qk_nope_head_dim`).
    pub nope: usize,
    /// Query/key channels per head with RoPE (`qk_rope_head_dim`).
    pub rope: usize,
    /// Value channels per head (`v_head_dim`).
    pub v: usize,
    /// Norm of the latent vectors.
    pub norm: Norm,
    /// Biases of the down-projections.
    pub down_bias: bool,
    /// Bias of the output projection.
    pub out_bias: bool,
    /// Attention sink: a learned logit per head that joins the softmax denominator.
    pub sink: bool,
    /// Softmax scale, soft cap and mask.
    pub scores: AttentionParams,
    /// Standard deviation of initial weights: of all projections but the last, of the output projection.
    pub std: (f32, f32),
}

/// Multi-head latent attention over `[tokens, hidden]`.
pub struct MultiLatentAttention {
    /// Fused down-projections: queries (where low-rank), keys/values, shared RoPE channels of keys.
    down: Linear,
    q: Query,
    kv: NormLinear,
    core: CoreAttention,
    out: Linear,
    config: MlaConfig,
    rope: Option<RopeTable>,
}

/// How queries are projected.
enum Query {
    LowRank(NormLinear),
    Direct(Linear),
}

/// q, and the buffers that k and v are assembled from.
struct Projected {
    operands: Operands,
    latent: LatentSaved,
}

impl MultiLatentAttention {
    /// Declares `<name>.{q_a,q_a_norm,q_b}` (or `<name>.q`), `<name>.{kv_a,kv_a_norm,kv_b,o}` and, with a sink,
    /// `<name>.sink`.
    pub fn declare(
        d: &mut Declarations,
        name: &str,
        config: MlaConfig,
        rope: Option<RopeTable>,
    ) -> Result<MultiLatentAttention> {
        let c = &config;
        if rope.as_ref().is_some_and(|r| 2 * r.cos.shape()[1] != c.rope) {
            return shape_error(
                "latent attention",
                format!("the RoPE table does not have {} channels", c.rope),
            );
        }
        let named = |kind: &str, n: usize| (format!("{name}.{kind}"), n);
        let rows = |unit| Split::Rows { unit };
        let kv = named("kv_a", c.kv_rank + c.rope);
        let outputs: Vec<_> = c.q_rank.map(|r| named("q_a", r)).into_iter().chain([kv]).collect();
        let down = Linear::declare(d, c.hidden, &outputs, c.down_bias, Split::Replicated, c.std.0)?;
        let (width, pair) = (c.nope + c.rope, c.nope + c.v);
        let q = |d: &mut Declarations, kind: &str, input| {
            Linear::declare(d, input, &[named(kind, c.heads * width)], false, rows(width), c.std.0)
        };
        let q = match c.q_rank {
            Some(r) => {
                let norm = (&*format!("{name}.q_a_norm"), r, c.norm);
                Query::LowRank(NormLinear::declare(d, norm, |d| q(d, "q_b", r))?)
            }
            None => Query::Direct(q(d, "q", c.hidden)?),
        };
        let norm = (&*format!("{name}.kv_a_norm"), c.kv_rank, c.norm);
        let kv = NormLinear::declare(d, norm, |d| {
            Linear::declare(d, c.kv_rank, &[named("kv_b", c.heads * pair)], false, rows(pair), c.std.0)
        })?;
        let core = CoreAttention::declare(d, name, c.scores, [c.heads, c.heads], c.sink.then_some(c.std.0))?;
        let columns = Split::Columns { unit: c.v };
        let out = Linear::declare(d, c.heads * c.v, &[named("o", c.hidden)], c.out_bias, columns, c.std.1)?
            .with_input_saved_by_caller();
        // From here on, head counts are this rank's.
        let config = MlaConfig { heads: core.heads(), ..config };
        Ok(MultiLatentAttention { down, q, kv, core, out, config, rope })
    }

    /// Whether the producer of its input should also compute the input's amax (for FP8 quantization).
    pub fn needs_input_amax(&self, p: &StepContext) -> bool {
        let direct = match &self.q {
            Query::LowRank(_) => false,
            Query::Direct(q) => q.needs_input_amax(p),
        };
        direct || self.down.needs_input_amax(p)
    }

    /// `x [tokens, hidden]`, `positions` i32 `[tokens]` → `[tokens, hidden]`. Tensors hold this rank's tokens (see
    /// [`crate::Tokens`]); `layout` describes the full sequences.
    pub fn forward(
        &self,
        p: &StepContext,
        x: impl Into<WithAmax>,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<(Tensor, MlaSaved)> {
        let Projected { operands, latent } = self.project(p, &x.into(), positions)?;
        let heads = p.empty(&[operands.q.shape()[0], self.config.heads * self.config.v])?;
        let [q, k, v] = &self.q_k_v(p, &operands)?;
        let scores = self.core.forward(p, layout, [q, k, v], &heads, || operands)?;
        let (y, out_proj) = self.out.forward(p, &heads)?;
        let heads = SavedTensor::activation(&heads);
        Ok((y, MlaSaved { out_proj, heads, scores, latent }))
    }

    fn project(&self, p: &StepContext, x: &WithAmax, positions: &Tensor) -> Result<Projected> {
        let (latent, down) = self.down.forward_recomputable(p, x, p.recompute.norm)?;
        let [q_latent, kv_latent, k_rope] = self.parts(&latent)?;
        let (q, q_saved) = match &self.q {
            Query::LowRank(up) => {
                let (q, saved) = up.forward(p, &q_latent)?;
                (q, QuerySaved::LowRank(saved))
            }
            Query::Direct(up) => {
                let (q, saved) = up.forward_recomputable(p, x, p.recompute.norm)?;
                (q, QuerySaved::Direct(saved))
            }
        };
        let (kv, kv_saved) = self.kv.forward(p, &kv_latent)?;
        // Without tensor parallelism RoPE runs in place: nothing reads these channels without it again.
        let k_rope = match p.rank.tp.size() {
            1 => k_rope,
            _ => p.all_gather(&contiguous(p, &k_rope)?, "shared RoPE channels of keys")?,
        };
        self.rotate(p, &q, &k_rope, positions, false)?;
        let keep = SavedTensor::activation;
        let operands = Operands { q: keep(&q), kv: keep(&kv), k_rope: keep(&k_rope) };
        Ok(Projected { operands, latent: LatentSaved { q: q_saved, kv: kv_saved, down } })
    }

    /// Splits the down-projected rows: query latent (if any), key/value latent, shared RoPE channels of keys.
    fn parts(&self, latent: &Tensor) -> Result<[Tensor; 3]> {
        let (c, q) = (&self.config, self.config.q_rank.unwrap_or(0));
        Ok([
            latent.narrow(1, 0, q)?,
            latent.narrow(1, q, c.kv_rank)?,
            latent.narrow(1, q + c.kv_rank, c.rope)?,
        ])
    }

    /// Applies RoPE to the last channels of every query head and to the shared key channels.
    fn rotate(
        &self,
        p: &StepContext,
        q: &Tensor,
        k: &Tensor,
        positions: &Tensor,
        inverse: bool,
    ) -> Result<()> {
        let Some(table) = &self.rope else { return Ok(()) };
        let (c, rows) = (&self.config, q.shape()[0]);
        let q = q.view(&[rows, c.heads, c.nope + c.rope])?.narrow(2, c.nope, c.rope)?;
        for x in [&q, &k.view(&[rows, 1, c.rope])?] {
            let r = Rope { x, cos: &table.cos, sin: &table.sin, positions, style: table.style, inverse };
            p.rank.kernels.rope(&p.rank.compute, &r)?;
        }
        Ok(())
    }

    /// q, k and v by head. Keys are assembled here from their two parts, which are smaller to save than the keys.
    fn q_k_v(&self, p: &StepContext, o: &Operands) -> Result<[Tensor; 3]> {
        let (c, rows) = (&self.config, o.q.shape()[0]);
        let kv = o.kv.view(&[rows, c.heads, c.nope + c.v])?;
        let k = p.empty(&[rows, c.heads, c.nope + c.rope])?;
        p.rank.kernels.mla_concat_keys(&p.rank.compute, &kv.narrow(2, 0, c.nope)?, &o.k_rope, &k)?;
        Ok([o.q.view(k.shape())?, k, kv.narrow(2, c.nope, c.v)?])
    }

    /// An empty KV cache of this rank's heads for `batch` sequences of up to `capacity` tokens.
    pub fn cache(&self, p: &StepContext, batch: usize, capacity: usize) -> Result<KvCache> {
        let c = &self.config;
        let widths = [c.nope + c.rope, c.v];
        KvCache::new(&p.rank.compute, batch, capacity, c.heads, widths, p.dtype())
    }

    /// Appends new tokens `x [batch·new, hidden]` to the KV cache and attends over it. Input and output hold this rank's
    /// rows, the cache its heads; `layout` is `batch` sequences of `new` tokens.
    pub fn decode(
        &self,
        p: &StepContext,
        x: impl Into<WithAmax>,
        cache: &mut KvCache,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<Tensor> {
        cache.room(layout)?;
        let operands = self.project(p, &x.into(), positions)?.operands;
        let heads = p.empty(&[operands.q.shape()[0], self.config.heads * self.config.v])?;
        let [q, k, v] = &self.q_k_v(p, &operands)?;
        self.core.decode(p, layout, cache, [q, k, v], &heads)?;
        Ok(self.out.forward(p, &heads)?.0)
    }

    /// Returns the input gradient `[tokens, hidden]` and the deferred weight gradients.
    pub fn backward(
        &self,
        p: &StepContext,
        saved: MlaSaved,
        layout: &Layout,
        positions: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let (c, MlaSaved { out_proj, heads, scores, latent }) = (&self.config, saved);
        let (dheads, mut grads) = self.out.backward(p, out_proj, dy)?;
        let (rows, width) = (dheads.shape()[0], c.nope + c.rope);
        let (dq, dkv) = (p.empty(&[rows, c.heads * width])?, p.empty(&[rows, c.heads * (c.nope + c.v)])?);
        let dk = p.empty(&[rows, c.heads, width])?;
        let by_heads = dkv.view(&[rows, c.heads, c.nope + c.v])?;
        [&dq, &dkv, &dk].into_iter().try_for_each(|t| zero_padding(p, layout, t))?;
        let dqkv = [&dq.view(dk.shape())?, &dk, &by_heads.narrow(2, c.nope, c.v)?];
        let y = CoreAttentionGrads { out: &heads, dout: &dheads, dqkv };
        let recompute = |kept: &Operands| self.q_k_v(p, kept);
        grads = grads.and(self.core.backward(p, layout, scores, &y, recompute)?);
        // The shared key channels' gradient is summed over this rank's heads, then reduce-scattered over tp.
        let dlatent = p.empty(&[rows / p.rank.tp.size(), self.down.outputs()])?;
        let [dq_latent, dkv_latent, dk_rope] = self.parts(&dlatent)?;
        let sum = if p.rank.tp.size() == 1 { dk_rope.clone() } else { p.empty(&[rows, c.rope])? };
        p.rank.kernels.mla_split_keys(&p.rank.compute, &dk, &by_heads.narrow(2, 0, c.nope)?, &sum)?;
        drop(dk);
        self.rotate(p, &dq, &sum, positions, true)?;
        if p.rank.tp.size() > 1 {
            let mine = p.reduce_scatter(&sum, "gradient of shared RoPE channels of keys")?;
            p.rank.kernels.copy(&p.rank.compute, &mine, &dk_rope)?;
        }
        let LatentSaved { q, kv, down } = latent;
        grads = grads.and(self.kv.backward_into(p, kv, &dkv, &dkv_latent)?);
        let direct = match (&self.q, q) {
            (Query::LowRank(up), QuerySaved::LowRank(saved)) => {
                grads = grads.and(up.backward_into(p, saved, &dq, &dq_latent)?);
                None
            }
            (Query::Direct(up), QuerySaved::Direct(saved)) => {
                let (dx, g) = up.backward(p, saved, &dq)?;
                grads = grads.and(g);
                Some(dx)
            }
            _ => {
                return shape_error(
                    "latent attention",
                    "the saved activation belongs to a block of another shape",
                );
            }
        };
        let (dx, g) = self.down.backward(p, down, &dlatent)?;
        if let Some(direct) = direct {
            p.rank.kernels.add_assign(&p.rank.compute, &dx, &direct)?;
        }
        Ok((dx, grads.and(g)))
    }
}

fn contiguous(p: &StepContext, t: &Tensor) -> Result<Tensor> {
    let out = p.empty(t.shape())?;
    p.rank.kernels.copy(&p.rank.compute, t, &out)?;
    Ok(out)
}
