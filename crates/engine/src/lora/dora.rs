//! DoRA: `y = c ⊙ (x·Wᵀ + s·(x·Aᵀ)·Bᵀ) + b` with `c = m / ‖W + s·B·A‖`, the norm of each row, and m `[out]` trained.
//!
//! The norm is a constant in backward, as the paper has it (section 4.3): with the unscaled output u and `g = dy ⊙ c`,
//! W, A and B and the input get their gradients from g, and `dm = Σ_tokens dy ⊙ u / ‖W + s·B·A‖`. u is saved: 2·out bytes per token
//! in bf16. To recompute it would take the GEMM x·Wᵀ again, half as many FLOPs as forward and dgrad together, 2·in·out per token.
//!
//! Norms depend on weights alone, so they are computed once per step: at the first use, then kept until the next. That reads W
//! twice (its squares, W·Aᵀ). Where W is split by columns, squared norms are partial sums and are all-reduced, `[out]` values.

use super::Slice;
use crate::quant::dequantized_matrix;
use crate::{ParamId, ParamSpec, Params, Rank, Split, StepContext, StepState};
use ferrotron_comm::{Communicator, ReduceOp};
use ferrotron_kernels::{BatchedGemm, DoraFactor, DoraUpdate};
use ferrotron_tensor::{Category, DType, Result, Tensor};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Factors of the rows of a weight, f32 `[out]`, of experts `[experts, out]`.
#[derive(Clone)]
pub(crate) struct RowFactors {
    /// c; 1 for rows without an adapter.
    pub(crate) factor: Tensor,
    /// `1 / ‖W + s·B·A‖`; 0 for rows without an adapter.
    pub(crate) inv_norm: Tensor,
}

/// Factors that are known while weights do not change.
#[derive(Default)]
pub struct DoraState {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    passes: Passes,
    factors: HashMap<ParamId, RowFactors>,
}

/// Passes between which weights do not change.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Passes {
    #[default]
    None,
    /// Those of a step. Others may run at any time.
    Training,
    All,
}

impl DoraState {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, passes: Passes) {
        *self.lock() = Known { passes, factors: HashMap::new() };
    }

    /// Begins the passes of a step.
    pub(crate) fn begin_step(&self) {
        self.begin(Passes::Training);
    }

    /// Begins passes without backward, between which weights do not change.
    pub(crate) fn begin_evaluation(&self) {
        self.begin(Passes::All);
    }

    /// Ends either; weights may change.
    pub(crate) fn end(&self) {
        self.begin(Passes::None);
    }
}

/// The parameters of the adapters of a weight, and where they meet.
pub(crate) struct AdaptedRows<'a> {
    /// `[groups·out, in]`
    pub(crate) weight: ParamId,
    /// `[groups·Σr, in]`
    pub(crate) a: ParamId,
    /// `[groups·Σout, r]`
    pub(crate) b: ParamId,
    /// `[groups·Σout]`
    pub(crate) m: ParamId,
    /// Experts, each with matrices of its own; else 1.
    pub(crate) groups: usize,
    pub(crate) scale: f32,
    pub(crate) slices: &'a [Slice],
}

impl AdaptedRows<'_> {
    /// Factors of the rows, computed unless they are known.
    pub(crate) fn factors(&self, p: &StepContext) -> Result<RowFactors> {
        let state = p.state.dora();
        let keeps = |passes| passes == Passes::All || (passes == Passes::Training && p.train);
        {
            let known = state.lock();
            if let Some(found) = known.factors.get(&self.m).filter(|_| keeps(known.passes)) {
                return Ok(found.clone());
            }
        }
        let found = self.compute(p)?;
        let mut known = state.lock();
        if keeps(known.passes) {
            known.factors.insert(self.m, found.clone());
        }
        Ok(found)
    }

    fn compute(&self, p: &StepContext) -> Result<RowFactors> {
        let (k, s, groups) = (&p.rank.kernels, &p.rank.compute, self.groups);
        let spec = &p.params.specs()[self.weight.0];
        let [out, _] = spec.matrix();
        let (a, b) = (p.weight(self.a)?, p.weight(self.b)?);
        let stack = |t: &Tensor| t.view(&[groups, t.shape()[0] / groups.max(1), t.shape()[1]]);
        let (a, b) = (stack(&a)?, stack(&b)?);
        let squares = f32s(p.rank, &[groups, out])?;
        let updates: Vec<Tensor> =
            self.slices.iter().map(|slice| f32s(p.rank, &[groups, slice.y.len()])).collect::<Result<_>>()?;
        for_matrices(p.rank, p.params, self.weight, &mut |at, w| {
            squares_of(p.rank, w, &squares.narrow(0, at.start, at.len())?)?;
            for (slice, update) in self.slices.iter().zip(&updates) {
                let part = |t: &Tensor, rows: &Range<usize>| {
                    t.narrow(0, at.start, at.len())?.narrow(1, rows.start, rows.len())
                };
                let (a, b) = (part(&a, &slice.h)?, part(&b, &slice.b)?);
                let w = w.narrow(1, slice.y.start, slice.y.len())?;
                let u = f32s(p.rank, b.shape())?;
                let gram = f32s(p.rank, &[at.len(), slice.h.len(), slice.h.len()])?;
                for (left, c) in [(&w, &u), (&a, &gram)] {
                    let g = BatchedGemm { a: left, trans_a: false, b: &a, trans_b: true, c };
                    k.gemm_batched(s, &g)?;
                }
                let out = update.narrow(0, at.start, at.len())?;
                k.dora_update(s, &DoraUpdate { u: &u, b: &b, gram: &gram, scale: self.scale, out: &out })?;
            }
            Ok(())
        })?;
        if let Some(group) = sums_over(p.rank, spec) {
            const LABEL: &str = "squared norms of rows (DoRA)";
            let all: Vec<_> = updates.iter().chain([&squares]).map(|t| (t, LABEL)).collect();
            group.all_reduce_coalesced(s, &all, ReduceOp::Sum)?;
        }
        let covered: usize = self.slices.iter().map(|slice| slice.y.len()).sum();
        let (factor, inv_norm) = match covered == out {
            true => (f32s(p.rank, &[groups, out])?, f32s(p.rank, &[groups, out])?),
            false => (
                s.constant(&vec![1f32; groups * out], &[groups, out], Category::Activations)?,
                s.zeros(&[groups, out], DType::F32, Category::Activations)?,
            ),
        };
        let m = p.weight(self.m)?.view(&[groups, covered])?;
        for (slice, update) in self.slices.iter().zip(&updates) {
            let part = |t: &Tensor| t.narrow(1, slice.y.start, slice.y.len());
            let (base, factor, inv_norm) = (part(&squares)?, part(&factor)?, part(&inv_norm)?);
            let m = m.narrow(1, slice.b.start, slice.b.len())?;
            let d = DoraFactor { base: &base, update, m: &m, factor: &factor, inv_norm: &inv_norm };
            k.dora_factor(s, &d)?;
        }
        Ok(RowFactors { factor, inv_norm })
    }
}

/// Norms of the rows of a weight, f32 on the host: initial values of m, since B begins at zero. Collective over the ranks that
/// share rows or shards of it.
pub fn row_norms(rank: &Rank, params: &Params, weight: ParamId) -> Result<Vec<f32>> {
    let spec = &params.specs()[weight.0];
    let squares = f32s(rank, &[spec.matrices, spec.matrix()[0]])?;
    for_matrices(rank, params, weight, &mut |at, w| {
        squares_of(rank, w, &squares.narrow(0, at.start, at.len())?)
    })?;
    if let Some(group) = sums_over(rank, spec) {
        group.all_reduce(&rank.compute, &squares, ReduceOp::Sum, "squared norms of rows (DoRA)")?;
    }
    Ok(rank.compute.download::<f32>(&squares)?.into_iter().map(f32::sqrt).collect())
}

impl StepState {
    /// Row factors of DoRA.
    pub(crate) fn dora(&self) -> &DoraState {
        &self.dora
    }
}

/// The group over which squared norms are partial sums: that of a weight split by columns.
fn sums_over<'a>(rank: &'a Rank, spec: &ParamSpec) -> Option<&'a Communicator> {
    let split = spec.parts.iter().any(|part| matches!(part.split, Split::Columns { .. }));
    let group = if spec.experts { &rank.etp } else { &rank.tp };
    Some(group).filter(|group| split && group.size() > 1)
}

/// Squared norms f32 `[count, out]` of the rows of `w [count, out, in]`.
fn squares_of(rank: &Rank, w: &Tensor, squares: &Tensor) -> Result<()> {
    let &[count, out, input] = w.shape() else {
        return ferrotron_tensor::shape_error("row norms", format!("{:?} is no stack", w.shape()));
    };
    let rows = count * out;
    rank.kernels.row_squares(&rank.compute, &w.view(&[rows, input])?, &squares.view(&[rows])?)
}

/// Calls `f` with the stacked matrices `[count, out, in]` of a weight in the compute dtype: with all of them, or with one after
/// another where they are FP8-resident, so that one is dequantized at a time.
fn for_matrices(
    rank: &Rank,
    params: &Params,
    weight: ParamId,
    f: &mut dyn FnMut(Range<usize>, &Tensor) -> Result<()>,
) -> Result<()> {
    let spec = &params.specs()[weight.0];
    let ([n, k], count) = (spec.matrix(), spec.matrices);
    if !spec.fp8_resident() {
        return f(0..count, &params.weight(rank, weight)?.view(&[count, n, k])?);
    }
    for i in 0..count {
        f(i..i + 1, &dequantized_matrix(rank, params, weight, i)?.view(&[1, n, k])?)?;
    }
    Ok(())
}

fn f32s(rank: &Rank, shape: &[usize]) -> Result<Tensor> {
    rank.activation(shape, DType::F32)
}
