//! Multi-head self-attention: QKV projection, optional QK norm, RoPE, core attention, output projection.

pub mod context_parallel;
mod core_attention;
mod fp8;
mod kv_cache;
mod layout;
mod mla;
mod self_attention;

pub use kv_cache::KvCache;
pub use layout::Layout;
pub use mla::{MlaConfig, MlaSaved, MultiLatentAttention};
pub use self_attention::{SelfAttention, SelfAttentionSaved};

use crate::{
    Declarations, Linear, LinearSaved, Module, NormLayer, NormSaved, Saved, SavedTensor, Split, StepContext,
    WeightGrad, WithAmax,
};
use core_attention::{CoreAttention, CoreAttentionGrads, CoreAttentionSaved, zero_padding};
use ferrotron_kernels::{AttentionParams, Norm, Rope, RopeStyle};
use ferrotron_tensor::{Result, Tensor};

/// Sizes and options of an attention block.
#[derive(Clone, Debug)]
pub struct AttentionConfig {
    /// Width of the residual stream (h).
    pub hidden: usize,
    /// Query heads (n).
    pub heads: usize,
    /// Key/value heads (g).
    pub kv_heads: usize,
    /// Channels per head (d).
    pub head_dim: usize,
    /// Bias of the QKV projection.
    pub qkv_bias: bool,
    /// Bias of the output projection.
    pub out_bias: bool,
    /// Softmax scale, soft cap and mask.
    pub scores: AttentionParams,
    /// QK norm: normalizes each head of q and k before RoPE.
    pub qk_norm: Option<Norm>,
    /// The QK norm normalizes all heads of q, and all of k, at once. Tensor-parallel ranks, which hold some of the heads,
    /// cannot.
    pub qk_norm_all_heads: bool,
    /// Attention sink: a learned logit per head that joins the softmax denominator.
    pub sink: bool,
    /// Standard deviation of initial weights: of the QKV projection, of the output projection.
    pub std: (f32, f32),
}

/// RoPE cosines and sines by position, shared by all layers with the same RoPE settings.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// f32 `[positions, rot/2]`
    pub cos: Tensor,
    /// f32 `[positions, rot/2]`
    pub sin: Tensor,
    /// How channels pair up: halves (NeoX) or interleaved (GPT-J).
    pub style: RopeStyle,
}

/// Self-attention over `[tokens, hidden]`.
pub struct Attention {
    qkv: Linear,
    out: Linear,
    norms: Option<(NormLayer, NormLayer)>,
    core: CoreAttention,
    config: AttentionConfig,
    rope: Option<RopeTable>,
}

/// Activations that backward needs.
pub struct AttentionSaved {
    out_proj: LinearSaved,
    /// Output of core attention `[tokens, n·d]`: the output projection and core attention's backward both read it.
    heads: SavedTensor,
    scores: CoreAttentionSaved<Operands>,
    norms: Option<(NormSaved, NormSaved)>,
    qkv: LinearSaved,
}

impl Saved for AttentionSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.out_proj.tensors(&mut |t| f(Module::AttnProj, t));
        f(Module::CoreAttn, &mut self.heads);
        self.scores.tensors(&mut |t| f(Module::CoreAttn, t));
        if let Some((q, k)) = &mut self.norms {
            [q, k].into_iter().for_each(|norm| norm.tensors(&mut |t| f(Module::CoreAttn, t)));
        }
        self.qkv.tensors(&mut |t| f(Module::QkvLinear, t));
    }
}

/// Inputs of core attention. `rotated` is q and k after QK norm and RoPE: the whole QKV buffer `[tokens, (n+2g)·d]`, or
/// `[tokens, (n+g)·d]` with a QK norm.
struct Operands {
    rotated: SavedTensor,
    v: SavedTensor,
}

impl Saved for Operands {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.rotated);
        f(&mut self.v);
    }
}

impl AttentionSaved {
    /// Drops the block's input; the caller recomputes it before backward.
    pub fn drop_input(&mut self) {
        self.qkv.drop_input();
    }

    /// Restores the recomputed input.
    pub fn restore_input(&mut self, x: &Tensor) {
        self.qkv.restore_input(x);
    }
}

/// q, k and v, ready for core attention.
struct Projected {
    /// q heads, then k heads, in the first `(n+g)·d` columns.
    rotated: Tensor,
    /// `[tokens, g·d]`
    v: Tensor,
    norms: Option<(NormSaved, NormSaved)>,
    qkv: LinearSaved,
}

impl Attention {
    /// Declares `<name>.{q,k,v,out}` and, with norms, `<name>.{q,k}_norm`, with a sink `<name>.sink`.
    pub fn declare(
        d: &mut Declarations,
        name: &str,
        config: AttentionConfig,
        rope: Option<RopeTable>,
    ) -> Result<Attention> {
        let c = &config;
        let (nd, gd) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let parts = [("q", nd), ("k", gd), ("v", gd)].map(|(part, n)| (format!("{name}.{part}"), n));
        let heads = c.head_dim;
        let qkv = Linear::declare(d, c.hidden, &parts, c.qkv_bias, Split::Rows { unit: heads }, c.std.0)?;
        let norms = match c.qk_norm {
            Some(norm) => {
                let [q, k] = if c.qk_norm_all_heads { [nd, gd] } else { [c.head_dim; 2] };
                Some((
                    NormLayer::declare(d, &format!("{name}.q_norm"), q, norm)?,
                    NormLayer::declare(d, &format!("{name}.k_norm"), k, norm)?,
                ))
            }
            None => None,
        };
        let sink = c.sink.then_some(c.std.0);
        let core = CoreAttention::declare(d, name, c.scores, [c.heads, c.kv_heads], sink)?;
        let to_hidden = [(format!("{name}.out"), c.hidden)];
        let out = Linear::declare(d, nd, &to_hidden, c.out_bias, Split::Columns { unit: heads }, c.std.1)?
            .with_input_saved_by_caller();
        // From here on, head counts are this rank's.
        let config = AttentionConfig { heads: core.heads(), kv_heads: core.kv_heads(), ..config };
        Ok(Attention { qkv, out, norms, core, config, rope })
    }

    /// Whether the producer of its input should also compute the input's amax (for FP8 quantization).
    pub fn needs_input_amax(&self, p: &StepContext) -> bool {
        self.qkv.needs_input_amax(p)
    }

    /// `x [tokens, hidden]`, `positions` i32 `[tokens]` → `[tokens, hidden]`. Tensors hold this rank's tokens (see
    /// [`crate::Tokens`]); `layout` describes the full sequences.
    pub fn forward(
        &self,
        p: &StepContext,
        x: impl Into<WithAmax>,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<(Tensor, AttentionSaved)> {
        let Projected { rotated, v, norms, qkv } = self.project(p, &x.into(), positions)?;
        let c = &self.config;
        let heads = p.empty(&[rotated.shape()[0], c.heads * c.head_dim])?;
        let keep = || Operands { rotated: SavedTensor::activation(&rotated), v: SavedTensor::activation(&v) };
        let [q, k, v] = &self.q_k_v(&rotated, &v)?;
        let scores = self.core.forward(p, layout, [q, k, v], &heads, keep)?;
        let (y, out_proj) = self.out.forward(p, &heads)?;
        let heads = SavedTensor::activation(&heads);
        Ok((y, AttentionSaved { out_proj, heads, scores, norms, qkv }))
    }

    /// An empty KV cache of this rank's heads for `batch` sequences of up to `capacity` tokens.
    pub fn cache(&self, p: &StepContext, batch: usize, capacity: usize) -> Result<KvCache> {
        let c = &self.config;
        KvCache::new(&p.rank.compute, batch, capacity, c.kv_heads, [c.head_dim; 2], p.dtype())
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
        let c = &self.config;
        cache.room(layout)?;
        let Projected { rotated, v, .. } = self.project(p, &x.into(), positions)?;
        let heads = p.empty(&[rotated.shape()[0], c.heads * c.head_dim])?;
        let [q, k, v] = &self.q_k_v(&rotated, &v)?;
        self.core.decode(p, layout, cache, [q, k, v], &heads)?;
        Ok(self.out.forward(p, &heads)?.0)
    }

    fn project(&self, p: &StepContext, x: &WithAmax, positions: &Tensor) -> Result<Projected> {
        let c = &self.config;
        let (qkv, saved) = self.qkv.forward_recomputable(p, x, p.recompute.norm)?;
        let (tokens, d) = (qkv.shape()[0], c.head_dim);
        let v = qkv.narrow(1, (c.heads + c.kv_heads) * d, c.kv_heads * d)?;
        let (rotated, norms) = match &self.norms {
            None => (qkv, None),
            Some((q_norm, k_norm)) => {
                let normed = p.empty(&[tokens, (c.heads + c.kv_heads) * d])?;
                let (from, to) = (self.normalized(&qkv)?, self.normalized(&normed)?);
                let q = q_norm.forward_into(p, &from.0, &to.0)?;
                let k = k_norm.forward_into(p, &from.1, &to.1)?;
                (normed, Some((q, k)))
            }
        };
        self.rotate(p, &rotated, positions, false)?;
        Ok(Projected { rotated, v, norms, qkv: saved })
    }

    /// Views q `[tokens, n, d]` and k `[tokens, g, d]` in a buffer whose columns begin with them.
    fn q_and_k(&self, t: &Tensor) -> Result<(Tensor, Tensor)> {
        let (c, tokens, d) = (&self.config, t.shape()[0], self.config.head_dim);
        let q = t.narrow(1, 0, c.heads * d)?.view(&[tokens, c.heads, d])?;
        let k = t.narrow(1, c.heads * d, c.kv_heads * d)?.view(&[tokens, c.kv_heads, d])?;
        Ok((q, k))
    }

    /// Views of q and k whose last axis the QK norm runs over: by head, or `[tokens, n·d]` and `[tokens, g·d]`.
    fn normalized(&self, t: &Tensor) -> Result<(Tensor, Tensor)> {
        if !self.config.qk_norm_all_heads {
            return self.q_and_k(t);
        }
        let (n, g) = (self.config.heads * self.config.head_dim, self.config.kv_heads * self.config.head_dim);
        Ok((t.narrow(1, 0, n)?, t.narrow(1, n, g)?))
    }

    /// Views q, k and v by head.
    fn q_k_v(&self, rotated: &Tensor, v: &Tensor) -> Result<[Tensor; 3]> {
        let (q, k) = self.q_and_k(rotated)?;
        Ok([q, k, v.view(&[v.shape()[0], self.config.kv_heads, self.config.head_dim])?])
    }

    /// Applies RoPE (or its inverse) to all q and k heads in one launch.
    fn rotate(&self, p: &StepContext, rotated: &Tensor, positions: &Tensor, inverse: bool) -> Result<()> {
        let Some(table) = &self.rope else { return Ok(()) };
        let c = &self.config;
        let n = c.heads + c.kv_heads;
        let x = rotated.narrow(1, 0, n * c.head_dim)?.view(&[rotated.shape()[0], n, c.head_dim])?;
        let r = Rope { x: &x, cos: &table.cos, sin: &table.sin, positions, style: table.style, inverse };
        p.rank.kernels.rope(&p.rank.compute, &r)
    }

    /// Returns the input gradient `[tokens, hidden]` and the deferred weight gradients.
    pub fn backward(
        &self,
        p: &StepContext,
        saved: AttentionSaved,
        layout: &Layout,
        positions: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let c = &self.config;
        let heads = saved.heads;
        let (dheads, out_grad) = self.out.backward(p, saved.out_proj, dy)?;
        let (tokens, d) = (dheads.shape()[0], c.head_dim);
        let dqkv = p.empty(&[tokens, (c.heads + 2 * c.kv_heads) * d])?;
        zero_padding(p, layout, &dqkv)?;
        // QK norm backward needs dq and dk as separate inputs; without it they are written in place.
        let drotated = match &self.norms {
            None => dqkv.clone(),
            Some(_) => p.empty(&[tokens, (c.heads + c.kv_heads) * d])?,
        };
        zero_padding(p, layout, &drotated)?;
        let dv = dqkv.narrow(1, (c.heads + c.kv_heads) * d, c.kv_heads * d)?;
        let [dq, dk, dv] = &self.q_k_v(&drotated, &dv)?;
        let y = CoreAttentionGrads { out: &heads, dout: &dheads, dqkv: [dq, dk, dv] };
        let recompute = |kept: &Operands| self.q_k_v(&kept.rotated, &kept.v);
        let sink_grad = self.core.backward(p, layout, saved.scores, &y, recompute)?;
        self.rotate(p, &drotated, positions, true)?;
        let mut grads = out_grad.and(sink_grad);
        if let (Some((q_norm, k_norm)), Some((q_saved, k_saved))) = (&self.norms, saved.norms) {
            let (from, to) = (self.normalized(&drotated)?, self.normalized(&dqkv)?);
            grads = grads.and(q_norm.backward_into(p, q_saved, &from.0, None, &to.0)?);
            grads = grads.and(k_norm.backward_into(p, k_saved, &from.1, None, &to.1)?);
        }
        let (dx, qkv_grad) = self.qkv.backward(p, saved.qkv, &dqkv)?;
        Ok((dx, grads.and(qkv_grad)))
    }
}
