//! Self-attention: projections, optional norms of q and k, RoPE, scores, output projection.

mod cache;

pub use cache::KvCache;

use crate::{
    Declarations, Linear, LinearSaved, NormLayer, NormSaved, Pass, Saved, SavedTensor, Split, WeightGrad,
};
use ferrotron_kernels::{AttentionBackward, AttentionForward, Norm, Rope, RopeStyle, Scores, Sequences};
use ferrotron_tensor::{DType, Result, Tensor, shape_error};

/// Sizes and switches of an attention block.
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
    /// Biases of q, k, v.
    pub qkv_bias: bool,
    /// Bias of the output projection.
    pub out_bias: bool,
    /// Scale, cap, mask.
    pub scores: Scores,
    /// Norm of each head of q and k before RoPE.
    pub qk_norm: Option<Norm>,
    /// Standard deviation of initial weights, and of the output projection's.
    pub std: (f32, f32),
}

/// Cosines and sines by position, shared by all layers that use them.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// f32 `[positions, rot/2]`
    pub cos: Tensor,
    /// f32 `[positions, rot/2]`
    pub sin: Tensor,
    /// How channels pair up.
    pub style: RopeStyle,
}

/// Which tokens of a flat batch `[tokens]` see each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `count` sequences of `len` tokens each.
    Rows {
        /// Sequences.
        count: usize,
        /// Tokens of each.
        len: usize,
    },
    /// Sequence i is tokens `offsets[i]..offsets[i+1]`.
    Packed {
        /// Ascending, from 0 to the number of tokens.
        offsets: Vec<i32>,
    },
}

/// Self-attention over `[tokens, hidden]`.
pub struct Attention {
    qkv: Linear,
    out: Linear,
    norms: Option<(NormLayer, NormLayer)>,
    config: AttentionConfig,
    rope: Option<RopeTable>,
}

/// What backward needs.
pub struct AttentionSaved {
    out_proj: LinearSaved,
    /// q and k after norm and RoPE, and v: `[tokens, (n+2g)·d]`, or q and k only when they were normed.
    rotated: SavedTensor,
    v: SavedTensor,
    lse: SavedTensor,
    norms: Option<(NormSaved, NormSaved)>,
    qkv: LinearSaved,
}

impl Saved for AttentionSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.out_proj.tensors(f);
        f(&mut self.rotated);
        f(&mut self.v);
        f(&mut self.lse);
        if let Some((q, k)) = &mut self.norms {
            q.tensors(f);
            k.tensors(f);
        }
        self.qkv.tensors(f);
    }
}

impl AttentionSaved {
    /// Drops the block's input, which the caller can make again.
    pub fn forget_input(&mut self) {
        self.qkv.x = None;
    }

    /// Puts the input back.
    pub fn remember_input(&mut self, x: &Tensor) {
        self.qkv = LinearSaved::of(x);
    }
}

/// q, k, v ready for the scores.
struct Projected {
    /// q and k heads side by side in the first `(n+g)·d` columns.
    rotated: Tensor,
    /// `[tokens, g·d]`
    v: Tensor,
    norms: Option<(NormSaved, NormSaved)>,
    qkv: LinearSaved,
}

impl Attention {
    /// Declares `<name>.{q,k,v,out}` and, with norms, `<name>.{q,k}_norm`.
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
            Some(norm) => Some((
                NormLayer::declare(d, &format!("{name}.q_norm"), c.head_dim, norm)?,
                NormLayer::declare(d, &format!("{name}.k_norm"), c.head_dim, norm)?,
            )),
            None => None,
        };
        let to_hidden = [(format!("{name}.out"), c.hidden)];
        let out = Linear::declare(d, nd, &to_hidden, c.out_bias, Split::Columns { unit: heads }, c.std.1)?;
        // From here on: the heads of this rank. Where there are fewer key heads than ranks, neighbours share one.
        let (n, t) = (c.heads, d.place().size);
        if !n.is_multiple_of(t) || !(c.kv_heads.is_multiple_of(t) || t.is_multiple_of(c.kv_heads)) {
            return shape_error(
                "attention",
                format!(
                    "{n} query and {} key heads do not divide over {t} ranks; take a tp that divides both",
                    c.kv_heads
                ),
            );
        }
        let config = AttentionConfig { heads: n / t, kv_heads: (c.kv_heads / t).max(1), ..config };
        Ok(Attention { qkv, out, norms, config, rope })
    }

    /// `x [tokens, hidden]`, `positions` i32 `[tokens]` → `[tokens, hidden]`
    pub fn forward(
        &self,
        p: &Pass,
        x: &Tensor,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<(Tensor, AttentionSaved)> {
        let Projected { rotated, v, norms, qkv } = self.project(p, x, positions)?;
        let c = &self.config;
        let heads = p.empty(&[rotated.shape()[0], c.heads * c.head_dim])?;
        layout.blank(p, &heads)?;
        let lse = p.rank.activation(&layout.lse_shape(c.heads), DType::F32)?;
        let views = self.views(layout, &rotated, &v, &heads)?;
        let a = AttentionForward {
            q: &views.q,
            k: &views.k,
            v: &views.v,
            sink: None,
            out: &views.out,
            lse: &lse,
        };
        p.rank.kernels.attention_forward(&p.rank.compute, &c.scores, layout.sequences(), &a)?;
        let (y, out_proj) = self.out.forward(p, &heads)?;
        let saved = AttentionSaved {
            out_proj,
            rotated: SavedTensor::activation(&rotated),
            v: SavedTensor::activation(&v),
            lse: SavedTensor::activation(&lse),
            norms,
            qkv,
        };
        Ok((y, saved))
    }

    fn project(&self, p: &Pass, x: &Tensor, positions: &Tensor) -> Result<Projected> {
        let c = &self.config;
        let (qkv, saved) = self.qkv.forward(p, x)?;
        let (tokens, d) = (qkv.shape()[0], c.head_dim);
        let v = qkv.narrow(1, (c.heads + c.kv_heads) * d, c.kv_heads * d)?;
        let (rotated, norms) = match &self.norms {
            None => (qkv, None),
            Some((q_norm, k_norm)) => {
                let normed = p.empty(&[tokens, (c.heads + c.kv_heads) * d])?;
                let (from, to) = (self.q_and_k(&qkv)?, self.q_and_k(&normed)?);
                let q = q_norm.forward_into(p, &from.0, &to.0)?;
                let k = k_norm.forward_into(p, &from.1, &to.1)?;
                (normed, Some((q, k)))
            }
        };
        self.rotate(p, &rotated, positions, false)?;
        Ok(Projected { rotated, v, norms, qkv: saved })
    }

    /// The q heads `[tokens, n, d]` and k heads `[tokens, g, d]` of a buffer that starts with them.
    fn q_and_k(&self, t: &Tensor) -> Result<(Tensor, Tensor)> {
        let (c, tokens, d) = (&self.config, t.shape()[0], self.config.head_dim);
        let q = t.narrow(1, 0, c.heads * d)?.view(&[tokens, c.heads, d])?;
        let k = t.narrow(1, c.heads * d, c.kv_heads * d)?.view(&[tokens, c.kv_heads, d])?;
        Ok((q, k))
    }

    /// RoPE on all q and k heads in one launch.
    fn rotate(&self, p: &Pass, rotated: &Tensor, positions: &Tensor, inverse: bool) -> Result<()> {
        let Some(table) = &self.rope else { return Ok(()) };
        let c = &self.config;
        let n = c.heads + c.kv_heads;
        let x = rotated.narrow(1, 0, n * c.head_dim)?.view(&[rotated.shape()[0], n, c.head_dim])?;
        let r = Rope { x: &x, cos: &table.cos, sin: &table.sin, positions, style: table.style, inverse };
        p.rank.kernels.rope(&p.rank.compute, &r)
    }

    /// q, k, v and out of the tokens of the sequences; rows past them are padding.
    fn views(&self, layout: &Layout, rotated: &Tensor, v: &Tensor, out: &Tensor) -> Result<Views> {
        let c = &self.config;
        let real = |t: &Tensor| t.narrow(0, 0, layout.tokens());
        let (rotated, v, out) = (&real(rotated)?, &real(v)?, &real(out)?);
        let (q, k) = self.q_and_k(rotated)?;
        let per_head = |t: &Tensor, n: usize| t.view(&[t.shape()[0], n, c.head_dim]);
        Ok(Views {
            q: layout.shaped(&q)?,
            k: layout.shaped(&k)?,
            v: layout.shaped(&per_head(v, c.kv_heads)?)?,
            out: layout.shaped(&per_head(out, c.heads)?)?,
        })
    }

    /// Gradient of the input.
    pub fn backward(
        &self,
        p: &Pass,
        saved: AttentionSaved,
        layout: &Layout,
        positions: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let c = &self.config;
        let Some(heads) = saved.out_proj.x.clone() else {
            return shape_error("attention backward", "its output was dropped");
        };
        let (dheads, out_grad) = self.out.backward(p, saved.out_proj, dy)?;
        let (tokens, d) = (dheads.shape()[0], c.head_dim);
        let dqkv = p.empty(&[tokens, (c.heads + 2 * c.kv_heads) * d])?;
        layout.blank(p, &dqkv)?;
        // With norms in between, dq and dk first go to memory of their own.
        let drotated = match &self.norms {
            None => dqkv.clone(),
            Some(_) => p.empty(&[tokens, (c.heads + c.kv_heads) * d])?,
        };
        layout.blank(p, &drotated)?;
        let dv = dqkv.narrow(1, (c.heads + c.kv_heads) * d, c.kv_heads * d)?;
        let v = self.views(layout, &saved.rotated, &saved.v, &heads)?;
        let g = self.views(layout, &drotated, &dv, &dheads)?;
        let a = AttentionBackward {
            forward: AttentionForward { q: &v.q, k: &v.k, v: &v.v, sink: None, out: &v.out, lse: &saved.lse },
            dout: &g.out,
            dq: &g.q,
            dk: &g.k,
            dv: &g.v,
            dsink: None,
        };
        p.rank.kernels.attention_backward(&p.rank.compute, &c.scores, layout.sequences(), &a)?;
        self.rotate(p, &drotated, positions, true)?;
        let mut grads = out_grad;
        if let (Some((q_norm, k_norm)), Some((q_saved, k_saved))) = (&self.norms, saved.norms) {
            let (from, to) = (self.q_and_k(&drotated)?, self.q_and_k(&dqkv)?);
            grads = grads.and(q_norm.backward_into(p, q_saved, &from.0, None, &to.0)?);
            grads = grads.and(k_norm.backward_into(p, k_saved, &from.1, None, &to.1)?);
        }
        let (dx, qkv_grad) = self.qkv.backward(p, saved.qkv, &dqkv)?;
        Ok((dx, grads.and(qkv_grad)))
    }
}

struct Views {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
}

impl Layout {
    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        match self {
            Layout::Rows { count, len } => count * len,
            Layout::Packed { offsets } => offsets.last().map_or(0, |n| usize::try_from(*n).unwrap_or(0)),
        }
    }

    /// Zeroes the rows of `t` past the sequences' tokens: attention does not write them, products read them.
    fn blank(&self, p: &Pass, t: &Tensor) -> Result<()> {
        match t.shape()[0].checked_sub(self.tokens()) {
            None | Some(0) => Ok(()),
            Some(rest) => p.rank.compute.zero(&t.narrow(0, self.tokens(), rest)?),
        }
    }

    /// Checks that it describes exactly `tokens` tokens.
    pub fn check(&self, tokens: usize) -> Result<()> {
        let fits = match self {
            Layout::Rows { count, len } => count.checked_mul(*len) == Some(tokens),
            Layout::Packed { offsets } => {
                offsets.first() == Some(&0)
                    && offsets.last().is_some_and(|n| usize::try_from(*n) == Ok(tokens))
                    && offsets.windows(2).all(|w| w[0] <= w[1])
            }
        };
        if fits { Ok(()) } else { shape_error("sequences", format!("{self:?} does not cut {tokens} tokens")) }
    }

    fn sequences(&self) -> Sequences<'_> {
        match self {
            Layout::Rows { .. } => Sequences::Batch,
            Layout::Packed { offsets } => Sequences::Packed { q: offsets, k: offsets },
        }
    }

    /// `[tokens, heads, d]` as the kernels want it.
    fn shaped(&self, t: &Tensor) -> Result<Tensor> {
        match (self, t.shape()) {
            (Layout::Rows { count, len }, [_, n, d]) => t.view(&[*count, *len, *n, *d]),
            _ => Ok(t.clone()),
        }
    }

    fn lse_shape(&self, heads: usize) -> Vec<usize> {
        match self {
            Layout::Rows { count, len } => vec![*count, heads, *len],
            Layout::Packed { .. } => vec![self.tokens(), heads],
        }
    }
}
