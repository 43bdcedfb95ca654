//! Tokens to the ranks that hold their experts, and expert outputs back.
//!
//! Dispatch copies a token's row once per selected expert (and, with expert tensor parallelism, once per rank that holds a
//! slice of the expert). Combine sums the k rows of each token in the order of its top-k. Backward runs the same two
//! movements on gradients. Each movement is split into a send, which may run on the dispatch stream, and a function that
//! waits for it and finishes the permutation.

use super::all_to_all::AllToAll;
use super::experts::{ExpertRows, RowScales};
use super::router::TopK;
use super::{Dispatcher, MoeLayerId, MoeShape, MoeTraining};
use crate::StepContext;
use ferrotron_comm::{InFlight, ReduceOp};
use ferrotron_kernels::RowMap;
use ferrotron_tensor::{DType, Result, Tensor};

/// How the tokens of one micro-batch reach their experts.
pub(crate) enum TokenDispatch {
    /// All experts are on this rank: permute only.
    Local(RowMap),
    /// Every rank gathers all tokens and computes those of its experts.
    AllGather {
        map: RowMap,
        /// Tokens of each rank.
        rows: Vec<usize>,
    },
    /// Every rank receives the tokens of its experts.
    AllToAll(Box<AllToAll>),
}

/// Where this rank's experts are and how their rows are aligned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertLayout {
    /// Experts of the layer, and of this rank.
    pub(crate) experts: [usize; 2],
    /// First expert of this rank.
    pub(crate) first: usize,
    /// The rows of each expert start at a multiple of this (FP8 block scaling needs 128).
    pub(crate) align: usize,
    /// Number of the layer.
    pub(super) layer: MoeLayerId,
}

impl ExpertLayout {
    pub(super) fn of(d: &crate::Declarations, c: &MoeShape, layer: MoeLayerId, align: usize) -> ExpertLayout {
        let own = d.experts().own(c.experts);
        ExpertLayout { experts: [c.experts, own.len()], first: own.start, align, layer }
    }

    /// Memory for the permutation of `[t, k]` selected experts over `count` experts.
    pub(super) fn map(
        &self,
        p: &StepContext,
        [t, k]: [usize; 2],
        count: usize,
        align: usize,
    ) -> Result<RowMap> {
        let ints = |shape: &[usize]| p.rank.activation(shape, DType::I32);
        Ok(RowMap {
            offsets: ints(&[count + 1])?,
            counts: ints(&[count])?,
            rows: ints(&[t, k])?,
            source: ints(&[(t * k + count * (align - 1)).next_multiple_of(align)])?,
        })
    }
}

impl TokenDispatch {
    /// Plans the dispatch of `topk`. Also returns the routing of the tokens that this rank will have: all ranks' with
    /// [`Dispatcher::AllGather`], its own otherwise.
    pub(super) fn plan(
        p: &StepContext,
        training: &MoeTraining,
        layout: ExpertLayout,
        topk: &TopK,
    ) -> Result<(TokenDispatch, TopK)> {
        let (group, k) = (&p.rank.etp_ep_group, topk.index.shape()[1]);
        let sorted = |topk: &TopK| -> Result<RowMap> {
            let map = layout.map(p, [topk.index.shape()[0], k], layout.experts[1], layout.align)?;
            p.rank.kernels.sort_by_expert(&p.rank.compute, &topk.index, layout.first, layout.align, &map)?;
            Ok(map)
        };
        match training.dispatcher {
            _ if group.size() == 1 => Ok((TokenDispatch::Local(sorted(topk)?), topk.clone())),
            Dispatcher::AllToAll => Ok((
                TokenDispatch::AllToAll(Box::new(AllToAll::plan(p, training, layout, topk)?)),
                topk.clone(),
            )),
            Dispatcher::AllGather => {
                let t = topk.index.shape()[0];
                let rows = p.moe.map_or_else(|| vec![t; group.size()], |m| m.input.rows_per_rank.clone());
                let topk = TopK {
                    index: gather(p, &topk.index, &rows, "top-k indices")?,
                    probs: gather(p, &topk.probs, &rows, "routing probabilities")?,
                };
                Ok((TokenDispatch::AllGather { map: sorted(&topk)?, rows }, topk))
            }
        }
    }

    fn map(&self) -> &RowMap {
        match self {
            TokenDispatch::Local(map) | TokenDispatch::AllGather { map, .. } => map,
            TokenDispatch::AllToAll(e) => e.recv_map(),
        }
    }

    /// Sends rows `x [T, w]` to the experts: hidden states, or output gradients.
    pub(crate) fn send(&self, p: &StepContext, x: &Tensor, label: &'static str) -> Result<InFlight<Tensor>> {
        match self {
            TokenDispatch::Local(_) => Ok(InFlight::ready(x.clone())),
            TokenDispatch::AllGather { rows, .. } => Ok(InFlight::ready(gather(p, x, rows, label)?)),
            TokenDispatch::AllToAll(e) => e.send_rows(p, x, label),
        }
    }

    /// Sends the routing probabilities to the experts.
    pub(crate) fn send_probs(&self, p: &StepContext, topk: &TopK) -> Result<InFlight<Tensor>> {
        match self {
            TokenDispatch::AllToAll(e) => e.send_values(p, &topk.probs, "routing probabilities"),
            _ => Ok(InFlight::ready(topk.probs.clone())),
        }
    }

    /// Waits for rows and probabilities: rows in arrival order, probabilities f32 `[N]` sorted by expert.
    pub(crate) fn expert_rows(
        &self,
        p: &StepContext,
        (x, scales): (InFlight<Tensor>, RowScales),
        probs: InFlight<Tensor>,
    ) -> Result<ExpertRows> {
        let map = self.map().clone();
        let probs = probs.wait(&p.rank.compute)?;
        let probs = match self {
            TokenDispatch::Local(_) | TokenDispatch::AllGather { .. } => {
                let out = p.rank.activation(&[map.source.numel()], DType::F32)?;
                p.rank.kernels.gather_values(&p.rank.compute, &probs, &map.source, &out)?;
                out
            }
            TokenDispatch::AllToAll(e) => e.sorted(p, &probs)?.view(&[map.source.numel()])?,
        };
        Ok(ExpertRows { x: x.wait(&p.rank.compute)?, scales, probs, map })
    }

    /// Sends the experts' rows `[N, w]` back: outputs, or input gradients.
    pub(crate) fn send_back(
        &self,
        p: &StepContext,
        y: &Tensor,
        label: &'static str,
    ) -> Result<InFlight<Tensor>> {
        match self {
            TokenDispatch::Local(_) => Ok(InFlight::ready(y.clone())),
            TokenDispatch::AllGather { map, rows } => {
                Ok(InFlight::ready(scatter(p, &unpermuted(p, map, y)?, rows, label)?))
            }
            TokenDispatch::AllToAll(e) => e.send_back(p, y, label),
        }
    }

    /// Waits for the experts' rows and sums those of each token: `[T, w]`.
    pub(crate) fn combine(&self, p: &StepContext, rows: InFlight<Tensor>) -> Result<Tensor> {
        let rows = rows.wait(&p.rank.compute)?;
        match self {
            TokenDispatch::Local(map) => unpermuted(p, map, &rows),
            TokenDispatch::AllGather { .. } => Ok(rows),
            TokenDispatch::AllToAll(e) => e.unpermuted(p, &rows),
        }
    }

    /// Sends gradients of the probabilities f32 `[N]` back.
    pub(crate) fn send_dprobs(&self, p: &StepContext, dp: &Tensor) -> Result<InFlight<Tensor>> {
        const LABEL: &str = "gradients of probabilities";
        match self {
            TokenDispatch::Local(_) => Ok(InFlight::ready(dp.clone())),
            TokenDispatch::AllGather { map, rows } => {
                Ok(InFlight::ready(scatter(p, &values(p, map, dp)?, rows, LABEL)?))
            }
            TokenDispatch::AllToAll(e) => e.send_back(p, &dp.view(&[dp.numel(), 1])?, LABEL),
        }
    }

    /// Waits for the gradients of the probabilities: f32 `[T, k]`.
    pub(crate) fn combine_dprobs(&self, p: &StepContext, dp: InFlight<Tensor>) -> Result<Tensor> {
        let dp = dp.wait(&p.rank.compute)?;
        match self {
            TokenDispatch::Local(map) => values(p, map, &dp),
            TokenDispatch::AllGather { .. } => Ok(dp),
            TokenDispatch::AllToAll(e) => e.reduced_probs(p, &dp),
        }
    }
}

/// All-gather of rows over the expert group: `[rows of this rank, w] → [rows of all, w]`.
fn gather(p: &StepContext, t: &Tensor, rows: &[usize], label: &'static str) -> Result<Tensor> {
    let w = t.shape()[1];
    let all = p.rank.activation(&[rows.iter().sum(), w], t.dtype())?;
    let counts: Vec<usize> = rows.iter().map(|n| n * w).collect();
    p.rank.etp_ep_group.all_gather_v(&p.rank.compute, t, &all, &counts, label)?;
    Ok(all)
}

/// Reduce-scatter of rows over the expert group: `[rows of all, w] → [rows of this rank, w]`.
fn scatter(p: &StepContext, t: &Tensor, rows: &[usize], label: &'static str) -> Result<Tensor> {
    let (group, s, w) = (&p.rank.etp_ep_group, &p.rank.compute, t.shape()[1]);
    let mine = p.rank.activation(&[rows[group.rank()], w], t.dtype())?;
    if rows.iter().all(|n| *n == rows[0]) {
        group.reduce_scatter(s, t, &mine, ReduceOp::Sum, label)?;
        return Ok(mine);
    }
    group.all_reduce(s, t, ReduceOp::Sum, label)?;
    s.copy(&t.narrow(0, rows[..group.rank()].iter().sum(), rows[group.rank()])?, &mine)?;
    Ok(mine)
}

/// Sums the rows of each token's experts: `[N, w] → [T, w]`.
fn unpermuted(p: &StepContext, map: &RowMap, y: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(&[map.rows.shape()[0], y.shape()[1]], y.dtype())?;
    p.rank.kernels.moe_unpermute(&p.rank.compute, y, &map.rows, None, &out)?;
    Ok(out)
}

/// One value per row back to one per token and selected expert: f32 `[N] → [T, k]`.
fn values(p: &StepContext, map: &RowMap, dp: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(map.rows.shape(), DType::F32)?;
    p.rank.kernels.gather_values(&p.rank.compute, dp, &map.rows, &out)?;
    Ok(out)
}
