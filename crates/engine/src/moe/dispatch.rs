//! Tokens to the ranks that have their experts, and back.
//!
//! On the way there rows are copied, one copy for each choice (and, where ranks share an expert, one for each of those);
//! on the way back they are summed, in the order of a token's choices. Backward is the same the other way round. Each way has
//! two halves: rows are sent, and taken when they are needed.

use super::exchange::Exchange;
use super::experts::{Rows, Sent};
use super::router::Routes;
use super::{Dispatcher, MoeShape, MoeTraining};
use crate::Pass;
use ferrotron_comm::Reduce;
use ferrotron_kernels::RowMap;
use ferrotron_tensor::{DType, Event, Result, Tensor};

/// Where the rows of a micro-batch go.
pub(crate) enum Dispatch {
    /// To experts that are all here.
    Here(RowMap),
    /// Everywhere: this rank has all tokens.
    Gathered {
        map: RowMap,
        /// Rows of each rank.
        rows: Vec<usize>,
    },
    /// To the ranks that have them.
    Exchanged(Box<Exchange>),
}

/// Rows on their way.
pub(crate) struct Arriving {
    pub(super) to: Tensor,
    /// When they are there, if that is not at once.
    pub(super) done: Option<Event>,
    /// What is sent lives until it has been.
    pub(super) _from: Tensor,
}

impl Arriving {
    /// Rows that are there.
    fn here(t: Tensor) -> Arriving {
        Arriving { to: t.clone(), done: None, _from: t }
    }

    /// The rows, for work on the compute stream.
    pub(super) fn take(self, p: &Pass) -> Result<Tensor> {
        self.done.iter().try_for_each(|event| p.rank.compute.wait(event))?;
        Ok(self.to)
    }
}

/// How rows are laid out for experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Experts in all, and here.
    pub(crate) experts: [usize; 2],
    /// The first expert here.
    pub(crate) first: usize,
    /// Rows of an expert start at multiples of this.
    pub(crate) align: usize,
}

impl Room {
    pub(super) fn of(d: &crate::Declarations, c: &MoeShape, align: usize) -> Room {
        let own = d.experts().own(c.experts);
        Room { experts: [c.experts, own.len()], first: own.start, align }
    }

    /// Memory for the map of choices `[t, k]` of experts `count`.
    pub(super) fn map(&self, p: &Pass, [t, k]: [usize; 2], count: usize, align: usize) -> Result<RowMap> {
        let ints = |shape: &[usize]| p.rank.activation(shape, DType::I32);
        Ok(RowMap {
            offsets: ints(&[count + 1])?,
            counts: ints(&[count])?,
            rows: ints(&[t, k])?,
            source: ints(&[(t * k + count * (align - 1)).next_multiple_of(align)])?,
        })
    }
}

impl Dispatch {
    /// Who gets which rows, and the choices and probabilities of the tokens that this rank then has.
    pub(super) fn plan(
        p: &Pass,
        training: &MoeTraining,
        room: Room,
        routes: &Routes,
    ) -> Result<(Dispatch, Routes)> {
        let (group, topk) = (&p.rank.experts, routes.index.shape()[1]);
        let sorted = |routes: &Routes| -> Result<RowMap> {
            let map = room.map(p, [routes.index.shape()[0], topk], room.experts[1], room.align)?;
            p.rank.kernels.sort(&p.rank.compute, &routes.index, room.first, room.align, &map)?;
            Ok(map)
        };
        match training.dispatcher {
            _ if group.size() == 1 => Ok((Dispatch::Here(sorted(routes)?), routes.clone())),
            Dispatcher::AllToAll => Ok((
                Dispatch::Exchanged(Box::new(Exchange::plan(p, training, room, routes)?)),
                routes.clone(),
            )),
            Dispatcher::AllGather => {
                let t = routes.index.shape()[0];
                let rows = p.mix.map_or_else(|| vec![t; group.size()], |m| m.input.rows_of_ranks.clone());
                let routes = Routes {
                    index: gather(p, &routes.index, &rows, "choices of tokens")?,
                    probs: gather(p, &routes.probs, &rows, "probabilities of choices")?,
                };
                Ok((Dispatch::Gathered { map: sorted(&routes)?, rows }, routes))
            }
        }
    }

    fn map(&self) -> &RowMap {
        match self {
            Dispatch::Here(map) | Dispatch::Gathered { map, .. } => map,
            Dispatch::Exchanged(e) => e.map(),
        }
    }

    /// Sends rows `x [T, w]` to experts: tokens, or the gradients of results.
    pub(crate) fn send(&self, p: &Pass, x: &Tensor, label: &'static str) -> Result<Arriving> {
        match self {
            Dispatch::Here(_) => Ok(Arriving::here(x.clone())),
            Dispatch::Gathered { rows, .. } => Ok(Arriving::here(gather(p, x, rows, label)?)),
            Dispatch::Exchanged(e) => e.send_rows(p, x, label),
        }
    }

    /// Sends the probabilities of choices to experts.
    pub(crate) fn send_probs(&self, p: &Pass, routes: &Routes) -> Result<Arriving> {
        match self {
            Dispatch::Exchanged(e) => e.send_values(p, &routes.probs, "probabilities of choices"),
            _ => Ok(Arriving::here(routes.probs.clone())),
        }
    }

    /// Rows where the experts are, as they came, with the probabilities of their choices f32 `[N]`, sorted.
    pub(crate) fn take_rows(&self, p: &Pass, (x, sent): (Arriving, Sent), probs: Arriving) -> Result<Rows> {
        let map = self.map().clone();
        let probs = probs.take(p)?;
        let probs = match self {
            Dispatch::Here(_) | Dispatch::Gathered { .. } => {
                let out = p.rank.activation(&[map.source.numel()], DType::F32)?;
                p.rank.kernels.gather_values(&p.rank.compute, &probs, &map.source, &out)?;
                out
            }
            Dispatch::Exchanged(e) => e.sorted(p, &probs)?.view(&[map.source.numel()])?,
        };
        Ok(Rows { x: x.take(p)?, sent, probs, map })
    }

    /// Sends rows of experts `[N, w]` back: results, or the gradients of tokens.
    pub(crate) fn send_back(&self, p: &Pass, y: &Tensor, label: &'static str) -> Result<Arriving> {
        match self {
            Dispatch::Here(_) => Ok(Arriving::here(y.clone())),
            Dispatch::Gathered { map, rows } => {
                Ok(Arriving::here(scatter(p, &summed(p, map, y)?, rows, label)?))
            }
            Dispatch::Exchanged(e) => e.send_back(p, y, label),
        }
    }

    /// What came back, summed where its tokens are: `[T, w]`.
    pub(crate) fn take_back(&self, p: &Pass, came: Arriving) -> Result<Tensor> {
        let came = came.take(p)?;
        match self {
            Dispatch::Here(map) => summed(p, map, &came),
            Dispatch::Gathered { .. } => Ok(came),
            Dispatch::Exchanged(e) => e.summed(p, &came),
        }
    }

    /// Sends gradients of probabilities f32 `[N]` back.
    pub(crate) fn send_probs_back(&self, p: &Pass, dp: &Tensor) -> Result<Arriving> {
        const LABEL: &str = "gradients of probabilities";
        match self {
            Dispatch::Here(_) => Ok(Arriving::here(dp.clone())),
            Dispatch::Gathered { map, rows } => {
                Ok(Arriving::here(scatter(p, &values(p, map, dp)?, rows, LABEL)?))
            }
            Dispatch::Exchanged(e) => e.send_back(p, &dp.view(&[dp.numel(), 1])?, LABEL),
        }
    }

    /// Gradients of probabilities where the choices are: f32 `[T, k]`.
    pub(crate) fn take_probs_back(&self, p: &Pass, came: Arriving) -> Result<Tensor> {
        let came = came.take(p)?;
        match self {
            Dispatch::Here(map) => values(p, map, &came),
            Dispatch::Gathered { .. } => Ok(came),
            Dispatch::Exchanged(e) => e.summed_values(p, &came),
        }
    }
}

/// `[rows of this rank, w] → [rows of all, w]`
fn gather(p: &Pass, t: &Tensor, rows: &[usize], label: &'static str) -> Result<Tensor> {
    let w = t.shape()[1];
    let all = p.rank.activation(&[rows.iter().sum(), w], t.dtype())?;
    let counts: Vec<usize> = rows.iter().map(|n| n * w).collect();
    p.rank.experts.all_gather_v(&p.rank.compute, t, &all, &counts, label)?;
    Ok(all)
}

/// This rank's rows of the sum over ranks: `[rows of all, w] → [rows, w]`.
fn scatter(p: &Pass, t: &Tensor, rows: &[usize], label: &'static str) -> Result<Tensor> {
    let (group, s, w) = (&p.rank.experts, &p.rank.compute, t.shape()[1]);
    let mine = p.rank.activation(&[rows[group.rank()], w], t.dtype())?;
    if rows.iter().all(|n| *n == rows[0]) {
        group.reduce_scatter(s, t, &mine, Reduce::Sum, label)?;
        return Ok(mine);
    }
    group.all_reduce(s, t, Reduce::Sum, label)?;
    s.copy(&t.narrow(0, rows[..group.rank()].iter().sum(), rows[group.rank()])?, &mine)?;
    Ok(mine)
}

fn summed(p: &Pass, map: &RowMap, y: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(&[map.rows.shape()[0], y.shape()[1]], y.dtype())?;
    p.rank.kernels.sum_rows(&p.rank.compute, y, &map.rows, None, &out)?;
    Ok(out)
}

fn values(p: &Pass, map: &RowMap, dp: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(map.rows.shape(), DType::F32)?;
    p.rank.kernels.gather_values(&p.rank.compute, dp, &map.rows, &out)?;
    Ok(out)
}
