//! Products of experts where some of them have narrow factors.
//!
//! The rows of all experts have one scale, on which the ranks agree between which tokens travel: a token is narrowed once, before
//! it is copied to its experts, and what is sent and sorted are bytes. Every expert's weights have a scale of their own. Scales of
//! blocks are made of sorted rows: experts begin at multiples of 128 of them, so no block has rows of two.

use super::operands::{Narrowed, Source, Uses};
use super::state::Kept;
use super::{Method, Multiply, Product, Role, Side};
use crate::{Measured, ParamId, Pass, Rank};
use ferrotron_comm::{Communicator, Reduce};
use ferrotron_kernels::{
    Bytes, Grouped, Grouped8, GroupedGrad, GroupedGrad8, QuantiseStack, Range, RowBias, RowMap, Scaling,
    Segments,
};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

impl Product {
    /// What profiles call it of experts, in bytes.
    fn grouped(self) -> &'static str {
        match self {
            Product::Output => "grouped (output, fp8)",
            Product::InputGrad => "grouped (input gradient, fp8)",
            Product::WeightGrad => "grouped (weight gradient, fp8)",
        }
    }
}

impl Pass<'_> {
    /// The largest magnitude of rows of tokens, f32 `[1]`, on which all ranks agree that they may travel to.
    pub(crate) fn agreed_on_way(&self, x: &Measured) -> Result<Tensor> {
        let (tp, experts) = (&self.rank.tp, &self.rank.experts);
        // Ranks that share layers have tokens of one micro-batch, wherever their experts are.
        if experts.size().is_multiple_of(tp.size()) {
            return self.agreed_over(experts, x);
        }
        let amax = Some(self.agreed_over(tp, x)?);
        self.agreed_over(experts, &Measured { amax, ..x.clone() })
    }

    /// The largest magnitude of rows, f32 `[1]`, on which the ranks of a group agree.
    pub(crate) fn agreed_over(&self, group: &Communicator, x: &Measured) -> Result<Tensor> {
        let s = &self.rank.compute;
        let amax = match &x.amax {
            Some(amax) if group.size() == 1 => return Ok(amax.clone()),
            // Others agree on it with other ranks.
            Some(amax) => {
                let own = self.magnitude()?;
                s.copy(amax, &own)?;
                own
            }
            None => {
                let own = self.magnitude()?;
                self.rank.kernels.amax(s, &x.values, &own)?;
                own
            }
        };
        group.all_reduce(s, &amax, Reduce::Max, "largest magnitude of experts' rows")?;
        Ok(amax)
    }

    /// The stacked weights `param` of experts, `[E, n, k]`, as factors `[E·n, k]`, and `[E·k, n]` along columns. They are narrowed
    /// once until they change, where they are kept. Where not, backward turns the bytes that forward made.
    pub(crate) fn narrow_stack(&self, param: ParamId, shape: [usize; 3], uses: Uses) -> Result<Narrowed> {
        let (state, _) = self.eight(param)?;
        if let Some(bytes) = self.params.stored().weight(param) {
            self.params.await_weight(self.rank, param)?;
            let turn = || turn_each(self.rank, shape, bytes);
            let cols = uses.cols.then(|| state.turned(self.train, param, turn)).transpose()?;
            return Ok(Narrowed { rows: Some(Side::Bytes(bytes.clone())), cols });
        }
        let mut kept: Kept = state.weights()[param.0].clone();
        let missing = Uses { rows: uses.rows && kept.rows.is_none(), cols: uses.cols && kept.cols.is_none() };
        if missing == Uses::NONE {
            return Ok(Narrowed { rows: kept.rows, cols: kept.cols });
        }
        let keep = state.keeps(self.train);
        if let (false, Uses::COLS, Some(Side::Bytes(rows))) = (keep, missing, &kept.rows) {
            let cols = turn_each(self.rank, shape, rows)?;
            // Nobody needs them any more.
            state.weights()[param.0].rows = None;
            return Ok(Narrowed { rows: None, cols: Some(Side::Bytes(cols)) });
        }
        let make = Uses {
            rows: missing.rows || (keep && kept.rows.is_none()),
            cols: missing.cols || (keep && self.train && kept.cols.is_none()),
        };
        let made = self.narrow_experts(param, shape, make, &mut kept.amax)?;
        let later = self.train && self.params.specs()[param.0].eight.is_some_and(|e| e.input_grad);
        let stays = Kept { rows: made.rows.clone().filter(|_| later), ..kept.clone() };
        kept.rows = kept.rows.or(made.rows);
        kept.cols = kept.cols.or(made.cols);
        if keep || self.train {
            state.weights()[param.0] = if keep { kept.clone() } else { stays };
        }
        Ok(Narrowed { rows: kept.rows, cols: kept.cols })
    }

    /// Makes bytes of stacked weights. `amax` f32 `[E]`: their largest magnitudes, if they are known, or then.
    fn narrow_experts(
        &self,
        param: ParamId,
        shape: [usize; 3],
        make: Uses,
        amax: &mut Option<Tensor>,
    ) -> Result<Narrowed> {
        let ((state, recipe), s, k) = (self.eight(param)?, &self.rank.compute, &self.rank.kernels);
        let ([count, n, width], w) = (shape, self.weight(param)?.view(&shape)?);
        let (mut measure, etp) = (false, &self.rank.etp);
        let source = match recipe.method {
            Method::Current => {
                let known = match amax.take() {
                    Some(known) => known,
                    None => {
                        let fresh = s.zeros(&[count], DType::F32, Category::Workspace)?;
                        // Ranks that share experts agree before bytes are made.
                        measure = etp.size() == 1;
                        if !measure {
                            k.amax_stack(s, &w, &fresh)?;
                            etp.all_reduce(s, &fresh, Reduce::Max, "magnitudes of experts")?;
                        }
                        fresh
                    }
                };
                *amax = Some(known.clone());
                Source::Amax(known)
            }
            Method::Delayed { .. } => self.given(state, param, Role::Weight)?,
            _ => Source::Blocks,
        };
        let (format, scaling) = (recipe.format(Role::Weight), recipe.scaling(Role::Weight));
        let memory = |wanted: bool, shape: [usize; 2]| -> Result<Option<Bytes>> {
            wanted.then(|| stacked(self.rank, count, shape, format, scaling)).transpose()
        };
        let (rows, cols) = (memory(make.rows, [n, width])?, memory(make.cols, [width, n])?);
        let range = match &source {
            Source::Amax(amax) => Range::Amax { amax, pow2: recipe.pow2 },
            Source::Given(scale, amax) => Range::Given { scale, amax },
            Source::Blocks => Range::Blocks { pow2: recipe.pow2 },
        };
        let q = QuantiseStack { x: &w, range, rows: rows.as_ref(), cols: cols.as_ref() };
        match measure {
            true => k.measure_and_quantise_stack(s, &q)?,
            false => k.quantise_stack(s, &q)?,
        }
        if state.is_watched() {
            for e in 0..count {
                let one = |b: &Option<Bytes>| -> Result<Option<Side>> {
                    b.as_ref().map(|b| matrices(b, e..e + 1, count).map(Side::Bytes)).transpose()
                };
                let made = Narrowed { rows: one(&rows)?, cols: one(&cols)? };
                state.note(self.rank, param, Role::Weight, &w.select(0, e)?, &made)?;
            }
        }
        Ok(Narrowed { rows: rows.map(Side::Bytes), cols: cols.map(Side::Bytes) })
    }
}

/// Memory for `count` matrices `[r, c]`, each with a scale of its own where blocks have none.
fn stacked(rank: &Rank, count: usize, [r, c]: [usize; 2], format: DType, scaling: Scaling) -> Result<Bytes> {
    let (s, category) = (&rank.compute, Category::Activations);
    let bytes = Bytes::empty(s, [count * r, c], format, scaling, category)?;
    Ok(match scaling {
        Scaling::Tensor => Bytes { scale_inv: Tensor::empty(s, &[count], DType::F32, category)?, ..bytes },
        _ => bytes,
    })
}

/// Each of a stack of matrices `[E, n, k]` in bytes the other way round.
fn turn_each(rank: &Rank, [count, n, k]: [usize; 3], rows: &Bytes) -> Result<Bytes> {
    let cols = stacked(rank, count, [k, n], rows.data.dtype(), rows.scaling)?;
    rank.kernels.turn_stack(&rank.compute, count, rows, &cols)?;
    Ok(cols)
}

/// Some of `count` matrices.
pub(super) fn matrices(b: &Bytes, which: std::ops::Range<usize>, count: usize) -> Result<Bytes> {
    let part = |t: &Tensor| {
        let each = t.shape()[0] / count;
        t.narrow(0, which.start * each, which.len() * each)
    };
    Ok(Bytes { data: part(&b.data)?, scale_inv: part(&b.scale_inv)?, ..b.clone() })
}

impl Side {
    /// Sorted rows `self [N, k]`, those of each expert times its own matrix of `w`: `y [N, n]`. Numbers of `w` are `[E, n, k]`, or
    /// `[E, k, n]` the other way round; the bias of `how` is `[E, n]`.
    pub(crate) fn times_each(
        &self,
        rank: &Rank,
        w: &Side,
        segments: Segments,
        how: Multiply,
        y: &Tensor,
    ) -> Result<()> {
        let (s, k, Multiply { product, bias, fast, .. }) = (&rank.compute, &rank.kernels, how);
        match (self, w) {
            (Side::Values { t: x, trans: false }, Side::Values { t: w, trans }) => {
                k.grouped(s, &Grouped { x, w, as_stored: *trans, segments, bias, y })
            }
            (Side::Bytes(x), Side::Bytes(w)) => {
                k.grouped8(s, &Grouped8 { x, w, segments, y, fast, name: product.grouped() })?;
                let Some(bias) = bias else { return Ok(()) };
                let n = y.shape()[0];
                let weights = &s.upload(&vec![1f32; n], &[n], Category::Workspace)?;
                k.add_bias(s, &RowBias { segments, bias, weights }, y)
            }
            _ => shape_error(product.grouped(), "one factor is in bytes and the other is not"),
        }
    }
}

/// A factor of the weight gradients of experts: columns of sorted rows.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    /// Columns; of rows of tokens that are not sorted yet, the rows.
    pub(crate) side: Side,
    /// Are they sorted?
    pub(crate) sorted: bool,
}

impl Columns {
    /// The factor, of rows that `map` sorts.
    fn ready(&self, rank: &Rank, map: &RowMap) -> Result<Side> {
        let Side::Bytes(b) = &self.side else { return Ok(self.side.clone()) };
        if self.sorted {
            return Ok(self.side.clone());
        }
        let (s, shape) = (&rank.compute, [b.cols, map.source.numel()]);
        let cols = Bytes::empty(s, shape, b.data.dtype(), Scaling::Tensor, Category::Activations)?;
        rank.kernels.turn_rows(s, &b.data, map, &cols.data)?;
        Ok(Side::Bytes(Bytes { scale_inv: b.scale_inv.clone(), ..cols }))
    }

    /// `dw[e] (+)= Σ dyᵀ·x` over the rows of each expert: `self` is dy, `dw` f32 `[E, n, k]`.
    pub(crate) fn gradient(&self, rank: &Rank, x: &Columns, map: &RowMap, dw: (&Tensor, bool)) -> Result<()> {
        let (s, k) = (&rank.compute, &rank.kernels);
        let segments = Segments { offsets: &map.offsets, counts: &map.counts };
        match (self.ready(rank, map)?, x.ready(rank, map)?) {
            (Side::Values { t: dy, .. }, Side::Values { t: x, .. }) => {
                k.grouped_grad(s, &GroupedGrad { dy: &dy, x: &x, segments, dw })
            }
            (Side::Bytes(dy), Side::Bytes(x)) => {
                k.grouped_grad8(s, &GroupedGrad8 { dy: &dy, x: &x, segments, dw, fast: false })
            }
            _ => shape_error(Product::WeightGrad.grouped(), "one factor is in bytes and the other is not"),
        }
    }
}
