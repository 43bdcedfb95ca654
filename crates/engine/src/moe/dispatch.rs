//! Tokens to the ranks that have their experts, and back.
//!
//! On the way there rows are copied, one copy for each choice (and, where ranks share an expert, one for each of those);
//! on the way back they are summed, in the order of a token's choices. Backward is the same the other way round.

use super::exchange::Exchange;
use super::experts::Rows;
use super::router::Routes;
use super::{Dispatcher, MoeShape, MoeTraining};
use crate::Pass;
use ferrotron_comm::Reduce;
use ferrotron_kernels::RowMap;
use ferrotron_tensor::{DType, Result, Tensor};

/// Where the rows of a micro-batch went.
pub(crate) enum Dispatched {
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
    pub(super) fn of(d: &crate::Declarations, c: &MoeShape) -> Room {
        let own = d.experts().own(c.experts);
        Room { experts: [c.experts, own.len()], first: own.start, align: 1 }
    }

    /// Memory for the map of choices `[t, k]` of experts `count`.
    pub(super) fn map(&self, p: &Pass, [t, k]: [usize; 2], count: usize, align: usize) -> Result<RowMap> {
        let ints = |shape: &[usize]| p.rank.activation(shape, DType::I32);
        Ok(RowMap {
            offsets: ints(&[count + 1])?,
            counts: ints(&[count])?,
            rows: ints(&[t, k])?,
            source: ints(&[t * k + count * (align - 1)])?,
        })
    }
}

/// Rows of `x [T, h]` for the experts of this rank.
pub(crate) fn there(
    p: &Pass,
    training: &MoeTraining,
    room: Room,
    routes: &Routes,
    x: &Tensor,
) -> Result<(Rows, Dispatched)> {
    let group = &p.rank.experts;
    if group.size() == 1 {
        let rows = sorted(p, room, routes, x)?;
        let map = rows.map.clone();
        return Ok((rows, Dispatched::Here(map)));
    }
    match training.dispatcher {
        Dispatcher::AllToAll => {
            Exchange::there(p, room, routes, x).map(|(r, e)| (r, Dispatched::Exchanged(Box::new(e))))
        }
        Dispatcher::AllGather => {
            let counts =
                p.mix.map_or_else(|| vec![x.shape()[0]; group.size()], |m| m.input.rows_of_ranks.clone());
            let all = |t: &Tensor, label| gather(p, t, &counts, label);
            let routes = Routes {
                index: all(&routes.index, "choices of tokens")?,
                probs: all(&routes.probs, "probabilities of choices")?,
            };
            let x = all(x, "tokens for experts")?;
            let rows = sorted(p, room, &routes, &x)?;
            let map = rows.map.clone();
            Ok((rows, Dispatched::Gathered { map, rows: counts }))
        }
    }
}

/// Sorted rows of the experts that are here.
fn sorted(p: &Pass, room: Room, routes: &Routes, x: &Tensor) -> Result<Rows> {
    let (k, s) = (&p.rank.kernels, &p.rank.compute);
    let [t, topk] = [routes.index.shape()[0], routes.index.shape()[1]];
    let map = room.map(p, [t, topk], room.experts[1], room.align)?;
    k.sort(s, &routes.index, room.first, room.align, &map)?;
    let n = map.source.numel();
    let rows = Rows {
        x: p.rank.activation(&[n, x.shape()[1]], x.dtype())?,
        probs: p.rank.activation(&[n], DType::F32)?,
        map,
    };
    k.spread_rows(s, x, &rows.map, &rows.x)?;
    k.gather_values(s, &routes.probs, &rows.map.source, &rows.probs)?;
    Ok(rows)
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

impl Dispatched {
    /// Results of experts `[N, w]` summed where their tokens are: `[T, w]`. Also backward of [`there`] for rows.
    pub(crate) fn back(&self, p: &Pass, y: &Tensor) -> Result<Tensor> {
        match self {
            Dispatched::Here(map) => summed(p, map, y),
            Dispatched::Gathered { map, rows } => scatter(p, &summed(p, map, y)?, rows, "results of experts"),
            Dispatched::Exchanged(e) => e.back(p, y),
        }
    }

    /// Backward of [`Dispatched::back`]: `[T, w] → [N, w]`.
    pub(crate) fn there_again(&self, p: &Pass, dy: &Tensor) -> Result<Tensor> {
        match self {
            Dispatched::Here(map) => spread(p, map, dy),
            Dispatched::Gathered { map, rows } => {
                spread(p, map, &gather(p, dy, rows, "gradients for experts")?)
            }
            Dispatched::Exchanged(e) => e.there_again(p, dy),
        }
    }

    /// Gradients of probabilities f32 `[N]` where the choices are: `[T, k]`.
    pub(crate) fn probs_back(&self, p: &Pass, dp: &Tensor) -> Result<Tensor> {
        match self {
            Dispatched::Here(map) => values(p, map, dp),
            Dispatched::Gathered { map, rows } => {
                scatter(p, &values(p, map, dp)?, rows, "gradients of probabilities")
            }
            Dispatched::Exchanged(e) => e.probs_back(p, dp),
        }
    }
}

fn summed(p: &Pass, map: &RowMap, y: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(&[map.rows.shape()[0], y.shape()[1]], y.dtype())?;
    p.rank.kernels.sum_rows(&p.rank.compute, y, &map.rows, None, &out)?;
    Ok(out)
}

fn spread(p: &Pass, map: &RowMap, dy: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(&[map.source.numel(), dy.shape()[1]], dy.dtype())?;
    p.rank.kernels.spread_rows(&p.rank.compute, dy, map, &out)?;
    Ok(out)
}

fn values(p: &Pass, map: &RowMap, dp: &Tensor) -> Result<Tensor> {
    let out = p.rank.activation(map.rows.shape(), DType::F32)?;
    p.rank.kernels.gather_values(&p.rank.compute, dp, &map.rows, &out)?;
    Ok(out)
}
