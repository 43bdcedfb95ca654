//! Tokens to the ranks that have their experts, and back.
//!
//! On the way there rows are copied, one copy for each choice (and, where ranks share an expert, one for each of those);
//! on the way back they are summed, in the order of a token's choices. Backward is the same the other way round. Each way has
//! two halves: rows are sent, and taken when they are needed.

use super::all_to_all::AllToAll;
use super::experts::{ExpertRows, RowScales};
use super::router::TopK;
use super::{Dispatcher, MoeShape, MoeTraining};
use crate::StepContext;
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::RowMap;
use ferrotron_tensor::{DType, Event, Result, Tensor};

/// Where the rows of a micro-batch go.
pub(crate) enum TokenDispatch {
    /// To experts that are all here.
    Local(RowMap),
    /// Everywhere: this rank has all tokens.
    AllGather {
        map: RowMap,
        /// Rows of each rank.
        rows: Vec<usize>,
    },
    /// To the ranks that have them.
    AllToAll(Box<AllToAll>),
}

/// Rows on their way.
pub(crate) struct InFlight {
    pub(super) to: Tensor,
    /// When they are there, if that is not at once.
    pub(super) done: Option<Event>,
    /// What is sent lives until it has been.
    pub(super) _from: Tensor,
}

impl InFlight {
    /// Rows that are there.
    fn ready_now(t: Tensor) -> InFlight {
        InFlight { to: t.clone(), done: None, _from: t }
    }

    /// The rows, for work on the compute stream.
    pub(super) fn take(self, p: &StepContext) -> Result<Tensor> {
        self.done.iter().try_for_each(|event| p.rank.compute.wait(event))?;
        Ok(self.to)
    }
}

/// How rows are laid out for experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertLayout {
    /// Experts in all, and here.
    pub(crate) experts: [usize; 2],
    /// The first expert here.
    pub(crate) first: usize,
    /// Rows of an expert start at multiples of this.
    pub(crate) align: usize,
}

impl ExpertLayout {
    pub(super) fn of(d: &crate::Declarations, c: &MoeShape, align: usize) -> ExpertLayout {
        let own = d.experts().own(c.experts);
        ExpertLayout { experts: [c.experts, own.len()], first: own.start, align }
    }

    /// Memory for the map of choices `[t, k]` of experts `count`.
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
    /// Who gets which rows, and the choices and probabilities of the tokens that this rank then has.
    pub(super) fn plan(
        p: &StepContext,
        training: &MoeTraining,
        layout: ExpertLayout,
        topk_routes: &TopK,
    ) -> Result<(TokenDispatch, TopK)> {
        let (group, topk) = (&p.rank.etp_ep_group, topk_routes.index.shape()[1]);
        let sorted = |topk_routes: &TopK| -> Result<RowMap> {
            let map = layout.map(p, [topk_routes.index.shape()[0], topk], layout.experts[1], layout.align)?;
            p.rank.kernels.sort_by_expert(
                &p.rank.compute,
                &topk_routes.index,
                layout.first,
                layout.align,
                &map,
            )?;
            Ok(map)
        };
        match training.dispatcher {
            _ if group.size() == 1 => Ok((TokenDispatch::Local(sorted(topk_routes)?), topk_routes.clone())),
            Dispatcher::AllToAll => Ok((
                TokenDispatch::AllToAll(Box::new(AllToAll::plan(p, training, layout, topk_routes)?)),
                topk_routes.clone(),
            )),
            Dispatcher::AllGather => {
                let t = topk_routes.index.shape()[0];
                let rows = p.moe.map_or_else(|| vec![t; group.size()], |m| m.input.rows_per_rank.clone());
                let topk_routes = TopK {
                    index: gather(p, &topk_routes.index, &rows, "choices of tokens")?,
                    probs: gather(p, &topk_routes.probs, &rows, "probabilities of choices")?,
                };
                Ok((TokenDispatch::AllGather { map: sorted(&topk_routes)?, rows }, topk_routes))
            }
        }
    }

    fn map(&self) -> &RowMap {
        match self {
            TokenDispatch::Local(map) | TokenDispatch::AllGather { map, .. } => map,
            TokenDispatch::AllToAll(e) => e.map(),
        }
    }

    /// Sends rows `x [T, w]` to experts: tokens, or the gradients of results.
    pub(crate) fn send(&self, p: &StepContext, x: &Tensor, label: &'static str) -> Result<InFlight> {
        match self {
            TokenDispatch::Local(_) => Ok(InFlight::ready_now(x.clone())),
            TokenDispatch::AllGather { rows, .. } => Ok(InFlight::ready_now(gather(p, x, rows, label)?)),
            TokenDispatch::AllToAll(e) => e.send_rows(p, x, label),
        }
    }

    /// Sends the probabilities of choices to experts.
    pub(crate) fn send_probs(&self, p: &StepContext, topk_routes: &TopK) -> Result<InFlight> {
        match self {
            TokenDispatch::AllToAll(e) => e.send_values(p, &topk_routes.probs, "probabilities of choices"),
            _ => Ok(InFlight::ready_now(topk_routes.probs.clone())),
        }
    }

    /// Rows where the experts are, as they came, with the probabilities of their choices f32 `[N]`, sorted.
    pub(crate) fn take_rows(
        &self,
        p: &StepContext,
        (x, sent): (InFlight, RowScales),
        probs: InFlight,
    ) -> Result<ExpertRows> {
        let map = self.map().clone();
        let probs = probs.take(p)?;
        let probs = match self {
            TokenDispatch::Local(_) | TokenDispatch::AllGather { .. } => {
                let out = p.rank.activation(&[map.source.numel()], DType::F32)?;
                p.rank.kernels.gather_values(&p.rank.compute, &probs, &map.source, &out)?;
                out
            }
            TokenDispatch::AllToAll(e) => e.sorted(p, &probs)?.view(&[map.source.numel()])?,
        };
        Ok(ExpertRows { x: x.take(p)?, sent, probs, map })
    }

    /// Sends rows of experts `[N, w]` back: results, or the gradients of tokens.
    pub(crate) fn send_combine(&self, p: &StepContext, y: &Tensor, label: &'static str) -> Result<InFlight> {
        match self {
            TokenDispatch::Local(_) => Ok(InFlight::ready_now(y.clone())),
            TokenDispatch::AllGather { map, rows } => {
                Ok(InFlight::ready_now(scatter(p, &unpermuted(p, map, y)?, rows, label)?))
            }
            TokenDispatch::AllToAll(e) => e.send_combine(p, y, label),
        }
    }

    /// What came back, summed where its tokens are: `[T, w]`.
    pub(crate) fn take_combined(&self, p: &StepContext, came: InFlight) -> Result<Tensor> {
        let came = came.take(p)?;
        match self {
            TokenDispatch::Local(map) => unpermuted(p, map, &came),
            TokenDispatch::AllGather { .. } => Ok(came),
            TokenDispatch::AllToAll(e) => e.unpermuted(p, &came),
        }
    }

    /// Sends gradients of probabilities f32 `[N]` back.
    pub(crate) fn send_dprobs(&self, p: &StepContext, dp: &Tensor) -> Result<InFlight> {
        const LABEL: &str = "gradients of probabilities";
        match self {
            TokenDispatch::Local(_) => Ok(InFlight::ready_now(dp.clone())),
            TokenDispatch::AllGather { map, rows } => {
                Ok(InFlight::ready_now(scatter(p, &values(p, map, dp)?, rows, LABEL)?))
            }
            TokenDispatch::AllToAll(e) => e.send_combine(p, &dp.view(&[dp.numel(), 1])?, LABEL),
        }
    }

    /// Gradients of probabilities where the choices are: f32 `[T, k]`.
    pub(crate) fn take_dprobs(&self, p: &StepContext, came: InFlight) -> Result<Tensor> {
        let came = came.take(p)?;
        match self {
            TokenDispatch::Local(map) => values(p, map, &came),
            TokenDispatch::AllGather { .. } => Ok(came),
            TokenDispatch::AllToAll(e) => e.reduced_probs(p, &came),
        }
    }
}

/// `[rows of this rank, w] → [rows of all, w]`
fn gather(p: &StepContext, t: &Tensor, rows: &[usize], label: &'static str) -> Result<Tensor> {
    let w = t.shape()[1];
    let all = p.rank.activation(&[rows.iter().sum(), w], t.dtype())?;
    let counts: Vec<usize> = rows.iter().map(|n| n * w).collect();
    p.rank.etp_ep_group.all_gather_v(&p.rank.compute, t, &all, &counts, label)?;
    Ok(all)
}

/// This rank's rows of the sum over ranks: `[rows of all, w] → [rows, w]`.
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

fn unpermuted(p: &StepContext, map: &RowMap, y: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(&[map.rows.shape()[0], y.shape()[1]], y.dtype())?;
    p.rank.kernels.moe_unpermute(&p.rank.compute, y, &map.rows, None, &out)?;
    Ok(out)
}

fn values(p: &StepContext, map: &RowMap, dp: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(map.rows.shape(), DType::F32)?;
    p.rank.kernels.gather_values(&p.rank.compute, dp, &map.rows, &out)?;
    Ok(out)
}
