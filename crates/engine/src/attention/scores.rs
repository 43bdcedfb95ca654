//! The scores, of whole sequences or of this rank's tokens of them.

use super::context::{self, Context, ContextSaved, Gradients, Inputs};
use super::{Attention, Layout, Projected};
use crate::{Pass, Saved, SavedTensor};
use ferrotron_kernels::{AttentionBackward, AttentionForward};
use ferrotron_tensor::{DType, Result, Tensor};

/// What backward needs of the scores.
#[expect(clippy::large_enum_variant, reason = "handles of a few words, once a layer")]
pub(super) enum ScoresSaved {
    /// Of whole sequences.
    Whole {
        /// q and k after norm and RoPE, and v: `[tokens, (n+2g)·d]`, or q and k only when they were normed.
        rotated: SavedTensor,
        v: SavedTensor,
        lse: SavedTensor,
    },
    /// Of this rank's tokens of them.
    Shared(ContextSaved),
}

impl Saved for ScoresSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        match self {
            ScoresSaved::Whole { rotated, v, lse } => [rotated, v, lse].into_iter().for_each(f),
            ScoresSaved::Shared(saved) => saved.tensors(f),
        }
    }
}

impl Attention {
    /// Softmax of the scores times v, into `heads [tokens, n·d]`.
    pub(super) fn attend(
        &self,
        p: &Pass,
        layout: &Layout,
        x: &Projected,
        heads: &Tensor,
    ) -> Result<ScoresSaved> {
        let c = &self.config;
        let views = self.views(p, layout, &x.rotated, &x.v, heads)?;
        if p.rank.cp.size() > 1 {
            let inputs = Inputs { q: &views.q, k: &views.k, v: &views.v, sink: None };
            return Ok(ScoresSaved::Shared(self.context(p, layout)?.forward(&inputs, &views.out)?));
        }
        let lse = p.rank.activation(&layout.lse_shape(c.heads), DType::F32)?;
        let a = AttentionForward {
            q: &views.q,
            k: &views.k,
            v: &views.v,
            sink: None,
            out: &views.out,
            lse: &lse,
        };
        p.rank.kernels.attention_forward(&p.rank.compute, &c.scores, layout.sequences(), &a)?;
        Ok(ScoresSaved::Whole {
            rotated: SavedTensor::activation(&x.rotated),
            v: SavedTensor::activation(&x.v),
            lse: SavedTensor::activation(&lse),
        })
    }

    /// How the ranks that share the sequences go about it.
    fn context<'a>(&'a self, p: &Pass<'a>, layout: &'a Layout) -> Result<Context<'a>> {
        let c = &self.config;
        let (variant, _) = context::choose(&c.scores, false, c.heads, c.kv_heads, p.rank.cp.size())?;
        Context::new(p.rank, &c.scores, layout, variant)
    }

    /// q, k, v and out of the tokens of the sequences; rows past them are padding.
    fn views(&self, p: &Pass, layout: &Layout, rotated: &Tensor, v: &Tensor, out: &Tensor) -> Result<Views> {
        let c = &self.config;
        let real = |t: &Tensor| t.narrow(0, 0, held(p, layout));
        let (rotated, v, out) = (&real(rotated)?, &real(v)?, &real(out)?);
        let (q, k) = self.q_and_k(rotated)?;
        let per_head = |t: &Tensor, n: usize| t.view(&[t.shape()[0], n, c.head_dim]);
        let views = Views { q, k, v: per_head(v, c.kv_heads)?, out: per_head(out, c.heads)? };
        if p.rank.cp.size() > 1 {
            return Ok(views);
        }
        Ok(Views {
            q: layout.shaped(&views.q)?,
            k: layout.shaped(&views.k)?,
            v: layout.shaped(&views.v)?,
            out: layout.shaped(&views.out)?,
        })
    }

    /// From the gradient of `heads`, those of q and k (side by side) and of v.
    pub(super) fn attend_backward(
        &self,
        p: &Pass,
        layout: &Layout,
        saved: ScoresSaved,
        heads: &Tensor,
        dheads: &Tensor,
        (drotated, dv): (&Tensor, &Tensor),
    ) -> Result<()> {
        let g = self.views(p, layout, drotated, dv, dheads)?;
        match saved {
            ScoresSaved::Whole { rotated, v, lse } => {
                let v = self.views(p, layout, &rotated, &v, heads)?;
                let a = AttentionBackward {
                    forward: AttentionForward {
                        q: &v.q,
                        k: &v.k,
                        v: &v.v,
                        sink: None,
                        out: &v.out,
                        lse: &lse,
                    },
                    dout: &g.out,
                    dq: &g.q,
                    dk: &g.k,
                    dv: &g.v,
                    dsink: None,
                };
                let scores = &self.config.scores;
                p.rank.kernels.attention_backward(&p.rank.compute, scores, layout.sequences(), &a)
            }
            ScoresSaved::Shared(saved) => {
                let context = self.context(p, layout)?;
                let out = heads.narrow(0, 0, context.local())?.view(g.out.shape())?;
                let (dq, dk, dv) = (&g.q, &g.k, &g.v);
                let y = Gradients { out: &out, dout: &g.out, sink: None, dq, dk, dv, dsink: None };
                context.backward(saved, &y)
            }
        }
    }
}

struct Views {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
}

/// Rows of this rank that belong to sequences.
fn held(p: &Pass, layout: &Layout) -> usize {
    layout.tokens() / p.rank.cp.size()
}

/// Zeroes the rows of `t` past those of sequences: attention does not write them, products read them.
pub(super) fn blank(p: &Pass, layout: &Layout, t: &Tensor) -> Result<()> {
    let held = held(p, layout);
    match t.shape()[0].checked_sub(held) {
        None | Some(0) => Ok(()),
        Some(rest) => p.rank.compute.zero(&t.narrow(0, held, rest)?),
    }
}
