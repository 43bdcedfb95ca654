//! Context-parallel attention: the ranks of the cp group split every sequence (see [`crate::Tokens`]).
//!
//! Three algorithms give the same result. Ring: keys and values are sent from rank to rank while queries stay, with the
//! least memory and communication overlapped with computation. All-gather: every rank gathers all keys and values.
//! All-to-all (Ulysses): ranks exchange tokens for heads, so that each has full sequences and every mask works.
//! [`choose`] picks the one for a model.
//!
//! With c ranks, t tokens per rank and w = g·(d_k + d_v) key and value elements per token, a rank sends
//!
//! | | forward | backward |
//! |---|---|---|
//! | ring | (c−1)·t·w | (c−2)·t·w, and (c−1)·t·w in f32 |
//! | all-gather | (c−1)·t·w | the same, and (c−1)·t·w in f32 |
//! | all-to-all | (c−1)/c·t·(w + n·d_k + n·d_v) | the same |
//!
//! Sequences are padded at their ends and attention is causal, so no token attends to padding.

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

/// The context-parallel algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpVariant {
    /// Ring attention: keys and values are sent from rank to rank.
    Ring,
    /// Keys and values are all-gathered.
    AllGather,
    /// Tokens are exchanged for heads by all-to-all (Ulysses).
    AllToAll,
}

/// Picks the algorithm for a model and says why. `heads` and `kv_heads` are those of one tensor-parallel rank, `ranks` is
/// the cp size.
///
/// | the model has | the variant |
/// |---|---|
/// | a sliding window | all-to-all, or all-gather where heads do not divide by cp: most ring steps would be fully masked |
/// | none | ring; a soft cap acts per score and a sink joins the first block of keys, so both work on a ring |
pub fn choose(
    scores: &AttentionParams,
    heads: usize,
    kv_heads: usize,
    ranks: usize,
) -> Result<(CpVariant, &'static str)> {
    if !scores.causal || scores.align != MaskAlign::TopLeft {
        let what = "non-causal attention would attend to padding; use cp=1".into();
        return Err(Error::Unsupported { op: "context parallelism", what });
    }
    let divide = heads.is_multiple_of(ranks) && kv_heads.is_multiple_of(ranks);
    Ok(match (scores.left.is_some(), divide) {
        (true, true) => (CpVariant::AllToAll, "sliding window, and the heads divide by cp"),
        (true, false) => (CpVariant::AllGather, "sliding window, and the heads do not divide by cp"),
        (false, _) => (CpVariant::Ring, "full causal attention"),
    })
}

/// q, k and v of this rank's tokens.
pub struct Inputs<'a> {
    /// `[local, n, d_k]`
    pub q: &'a Tensor,
    /// `[local, g, d_k]`
    pub k: &'a Tensor,
    /// `[local, g, d_v]`
    pub v: &'a Tensor,
    /// f32 `[n]`: attention sink, one more logit per head in the softmax denominator.
    pub sink: Option<&'a Tensor>,
}

/// What backward reads and writes besides the saved activations.
pub struct Gradients<'a> {
    /// Forward's output.
    pub out: &'a Tensor,
    /// Its gradient, contiguous.
    pub dout: &'a Tensor,
    /// As given to forward.
    pub sink: Option<&'a Tensor>,
    /// Written, like dk and dv; the three may be views of one buffer.
    pub dq: &'a Tensor,
    /// `[local, g, d_k]`
    pub dk: &'a Tensor,
    /// `[local, g, d_v]`
    pub dv: &'a Tensor,
    /// f32 `[n]`: accumulates this rank's contribution; the gradient reduction sums it over ranks, as for all weights.
    pub dsink: Option<&'a Tensor>,
}

/// Activations that backward needs.
pub struct ContextParallelSaved(CpSaved);

enum CpSaved {
    /// The batch had no tokens.
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

/// Attention of one layer on one context-parallel rank.
pub struct ContextParallel<'a> {
    rank: &'a Rank,
    place: GroupRank,
    scores: &'a AttentionParams,
    layout: &'a Layout,
    plan: CpPlan,
    variant: CpVariant,
}

impl<'a> ContextParallel<'a> {
    /// `layout` describes the full, padded sequences.
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

    /// Rows of this rank, sequence padding included.
    pub fn local(&self) -> usize {
        self.plan.local()
    }

    /// Attends from this rank's queries to all keys under the mask: `out [local, n, d_v]`, contiguous.
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

    /// Writes the gradients of this rank's q, k and v.
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
        const OP: &str = "context-parallel attention";
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
            return shape_error(
                OP,
                "ring attention does not support sliding windows; use all-to-all or all-gather",
            );
        }
        Ok(())
    }
}
