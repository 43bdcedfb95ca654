//! Attention where the ranks of a group share every sequence: each holds its tokens of it (see [`crate::Tokens`]).
//!
//! Three ways lead to the same result. On a ring, keys and values go round while queries stay: the least memory, and
//! communication hides behind computation. Gathered, every rank has all keys and values. With heads exchanged for
//! tokens, every rank has whole sequences and can do all that one rank can. [`choose`] says which a model takes.
//!
//! With c ranks, t tokens of each, rows of w = g·(d_k + d_v) values of keys and values, a rank sends
//!
//! | | forward | backward |
//! |---|---|---|
//! | ring | (c−1)·t·w | (c−2)·t·w, and (c−1)·t·w in f32 |
//! | all-gather | (c−1)·t·w | the same, and (c−1)·t·w in f32 |
//! | all-to-all | (c−1)/c·t·(w + n·d_k + n·d_v) | the same |
//!
//! Sequences are padded at their ends, so attention is causal: nobody looks at padding.

mod all_gather;
mod all_to_all;
pub mod blocks;
mod partial;
mod ring;

use super::Layout;
use crate::{GroupRank, Rank, Saved, SavedTensor};
use all_to_all::AllToAllSaved;
use blocks::CpPlan;
use ferrotron_kernels::{AttentionParams, MaskAlign};
use ferrotron_tensor::{Error, Result, Tensor, shape_error};
use ring::RingSaved;

/// How ranks that share sequences bring queries and keys together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpVariant {
    /// Keys and values travel from rank to rank.
    Ring,
    /// Keys and values of all ranks are gathered on each.
    AllGather,
    /// Every rank gets all tokens of its share of the heads (Ulysses).
    AllToAll,
}

/// The variant for a model, and why. `heads` and `kv_heads` are those of one tensor-parallel rank, `ranks` those that
/// share a sequence.
///
/// | the model has | the variant |
/// |---|---|
/// | a window | all-to-all, or all-gather where heads do not divide: on a ring most steps would see nothing |
/// | none | the ring; soft caps act on single scores, and a sink joins the first keys that a query sees: neither changes anything |
pub fn choose(
    scores: &AttentionParams,
    heads: usize,
    kv_heads: usize,
    ranks: usize,
) -> Result<(CpVariant, &'static str)> {
    if !scores.causal || scores.align != MaskAlign::TopLeft {
        let what = "attention that is not causal would see padding; take cp=1".into();
        return Err(Error::Unsupported { op: "context parallelism", what });
    }
    let divide = heads.is_multiple_of(ranks) && kv_heads.is_multiple_of(ranks);
    Ok(match (scores.left.is_some(), divide) {
        (true, true) => (CpVariant::AllToAll, "a window sees few keys, and the heads divide"),
        (true, false) => (CpVariant::AllGather, "a window sees few keys, but the heads do not divide"),
        (false, _) => (CpVariant::Ring, "every query sees all keys before it"),
    })
}

/// Queries, keys and values of this rank's tokens.
pub struct Inputs<'a> {
    /// `[local, n, d_k]`
    pub q: &'a Tensor,
    /// `[local, g, d_k]`
    pub k: &'a Tensor,
    /// `[local, g, d_v]`
    pub v: &'a Tensor,
    /// f32 `[n]`: one more logit of each head in the denominator.
    pub sink: Option<&'a Tensor>,
}

/// What the backward pass reads and writes, besides what was saved.
pub struct Gradients<'a> {
    /// What forward wrote.
    pub out: &'a Tensor,
    /// Its gradient, contiguous.
    pub dout: &'a Tensor,
    /// As given to forward.
    pub sink: Option<&'a Tensor>,
    /// Written, as are the next two; they may interleave in one buffer.
    pub dq: &'a Tensor,
    /// `[local, g, d_k]`
    pub dk: &'a Tensor,
    /// `[local, g, d_v]`
    pub dv: &'a Tensor,
    /// f32 `[n]`: this rank's share of the gradient is added. Like those of all weights, the shares are summed over
    /// ranks later.
    pub dsink: Option<&'a Tensor>,
}

/// What backward needs. Opaque; it can show its tensors.
pub struct ContextParallelSaved(CpSaved);

enum CpSaved {
    /// There were no tokens.
    Nothing,
    Ring {
        qkv: [SavedTensor; 3],
        ring: RingSaved,
    },
    AllGather {
        qkv: [SavedTensor; 3],
        lse: SavedTensor,
    },
    AllToAll(AllToAllSaved),
}

impl Saved for ContextParallelSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        match &mut self.0 {
            CpSaved::Nothing => {}
            CpSaved::Ring { qkv, ring } => {
                f(&mut ring.last);
                f(&mut ring.lse);
                qkv.iter_mut().for_each(f);
            }
            CpSaved::AllGather { qkv, lse } => {
                qkv.iter_mut().for_each(&mut *f);
                f(lse);
            }
            CpSaved::AllToAll(s) => [&mut s.qkv, &mut s.out, &mut s.lse].into_iter().for_each(f),
        }
    }
}

/// One call of attention on one rank of several that share sequences.
pub struct ContextParallel<'a> {
    rank: &'a Rank,
    place: GroupRank,
    scores: &'a AttentionParams,
    layout: &'a Layout,
    plan: CpPlan,
    variant: CpVariant,
}

impl<'a> ContextParallel<'a> {
    /// `layout` describes the whole padded sequences.
    pub fn new(
        rank: &'a Rank,
        scores: &'a AttentionParams,
        layout: &'a Layout,
        variant: CpVariant,
    ) -> Result<ContextParallel<'a>> {
        let place = GroupRank { rank: rank.cp.rank(), size: rank.cp.size() };
        layout.check(layout.tokens())?;
        let plan = CpPlan::new(layout, place)?;
        Ok(ContextParallel { rank, place, scores, layout, plan, variant })
    }

    /// Rows of this rank that are tokens or padding of sequences.
    pub fn local(&self) -> usize {
        self.plan.local()
    }

    /// Attention of this rank's queries over all keys they may see: `out [local, n, d_v]`, contiguous.
    pub fn forward(&self, x: &Inputs, out: &Tensor) -> Result<ContextParallelSaved> {
        self.check([x.q, x.k, x.v, out], x.sink)?;
        if self.local() == 0 {
            return Ok(ContextParallelSaved(CpSaved::Nothing));
        }
        let qkv = || [x.q, x.k, x.v].map(SavedTensor::activation);
        Ok(ContextParallelSaved(match self.variant {
            CpVariant::Ring => CpSaved::Ring { qkv: qkv(), ring: self.ring_forward(x, out)? },
            CpVariant::AllGather => CpSaved::AllGather { qkv: qkv(), lse: self.all_gather_forward(x, out)? },
            CpVariant::AllToAll => CpSaved::AllToAll(self.all_to_all_forward(x, out)?),
        }))
    }

    /// Gradients of this rank's queries, keys and values.
    pub fn backward(&self, saved: ContextParallelSaved, y: &Gradients) -> Result<()> {
        self.check([y.dq, y.dk, y.dv, y.out], y.sink)?;
        match &saved.0 {
            CpSaved::Nothing => Ok(()),
            CpSaved::Ring { qkv: [q, k, v], ring } => {
                self.ring_backward(ring, &Inputs { q, k, v, sink: None }, y)
            }
            CpSaved::AllGather { qkv: [q, k, v], lse } => {
                self.all_gather_backward(lse, &Inputs { q, k, v, sink: None }, y)
            }
            CpSaved::AllToAll(saved) => self.all_to_all_backward(saved, y),
        }
    }

    fn check(&self, tensors: [&Tensor; 4], sink: Option<&Tensor>) -> Result<()> {
        const OP: &str = "attention over context-parallel ranks";
        let local = self.local();
        if tensors.iter().any(|t| t.rank() != 3 || t.shape()[0] != local) || !tensors[3].is_contiguous() {
            return shape_error(
                OP,
                format!("{tensors:?} are not {local} tokens by heads, the output contiguous"),
            );
        }
        let [n, g] = [tensors[0].shape()[1], tensors[1].shape()[1]];
        let c = self.place.size;
        if self.variant == CpVariant::AllToAll && !(n.is_multiple_of(c) && g.is_multiple_of(c)) {
            return shape_error(OP, format!("{n} query and {g} key heads do not divide over {c} ranks"));
        }
        if sink.is_some_and(|s| s.shape() != [n]) {
            return shape_error(OP, format!("a sink {sink:?} for {n} heads"));
        }
        if self.variant == CpVariant::Ring && (self.scores.left.is_some() || self.scores.right.is_some()) {
            return shape_error(OP, "a ring knows no windows: take all-to-all or all-gather");
        }
        Ok(())
    }
}
