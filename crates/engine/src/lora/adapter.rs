//! The adapter of a linear: `y += s·(x·Aᵀ)·Bᵀ`.
//!
//! A weight that stacks several logical matrices (q, k, v; gate, up) has one adapter for each, or one for all (fused). Their A
//! `[r, in]` are stacked, so that `h = s·x·Aᵀ [tokens, Σr]` is one GEMM; each B `[out, r]` adds its columns of h to its columns
//! of y. GEMMs on slices need no block-diagonal operand, whose weight gradient would be mostly wasted. The scale is applied
//! to h and dh, which are narrow; all that touches a wide tensor is a GEMM.
//!
//! | base | A | B | forward | backward |
//! |---|---|---|---|---|
//! | local | whole | whole | h = s·x·Aᵀ; y += h·Bᵀ | dh = s·dy·B; dx += dh·A; dA = dhᵀ·x; dB = dyᵀ·h |
//! | column-parallel | replicated | split by rows, like the weight | h of this rank's tokens is all-gathered | dh is reduce-scattered; dA covers this rank's tokens |
//! | row-parallel | split by columns, like the weight | replicated | partial h is reduce-scattered | dh is all-gathered; dB covers this rank's tokens |
//!
//! Only h and dh, r features wide, are communicated. The gradient of a replicated factor is all-reduced over the
//! tensor-parallel group later, like that of a norm.
//!
//! With DoRA ([`super::dora`]) m `[out]` is split like the rows of B; the bias is added after the output is scaled.

use super::dora::AdaptedRows;
use super::{LORA_A, LORA_B, LORA_M, Slice, fused_module};
use crate::{Declarations, Init, ParamId, Part, Split, StepContext, WeightGrad};
use ferrotron_kernels::{Gemm, ScaleColumns, ScaleColumnsBackward};
use ferrotron_tensor::{Result, Tensor};
use std::ops::Range;

/// Adapters of the logical matrices of one weight.
pub(crate) struct Adapter {
    /// `[Σr, in]`
    a: ParamId,
    /// The B of all adapters, stacked: `[Σout, r]`.
    b: ParamId,
    /// DoRA: the m of all adapters, stacked like B, `[Σout]`.
    m: Option<ParamId>,
    /// The base weight.
    weight: ParamId,
    scale: f32,
    slices: Vec<Slice>,
    parallel: Parallel,
}

/// How tensor-parallel ranks share the base weight.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parallel {
    Replicated,
    Column,
    Row,
}

impl Adapter {
    /// Declares the adapters of a linear from `input` features to the stacked `outputs` (logical name, features) with this
    /// weight, where the policy has any.
    pub(crate) fn declare(
        d: &mut Declarations,
        weight: ParamId,
        input: usize,
        outputs: &[(String, usize)],
        split: Split,
    ) -> Result<Option<Adapter>> {
        let lora = d.lora().clone();
        let covered: Vec<bool> = outputs.iter().map(|(name, _)| lora.covers(name)).collect();
        if !covered.contains(&true) {
            return Ok(None);
        }
        let (a_split, b_split, parallel) = match split {
            Split::Replicated => (Split::Replicated, Split::Replicated, Parallel::Replicated),
            Split::Rows { .. } => (Split::Replicated, split, Parallel::Column),
            Split::Columns { .. } => (split, Split::Replicated, Parallel::Row),
        };
        // Var[A] = 1/(3·in), as of a linear's usual initial weights; B = 0, so that training begins at the base model.
        let init = Init::Normal((3.0 * input as f32).sqrt().recip());
        let a_part = |name: String| Part {
            name: format!("{name}{LORA_A}"),
            shape: vec![lora.rank, input],
            init,
            split: a_split,
        };
        let fused = lora.fused && outputs.len() > 1 && !covered.contains(&false);
        let chosen =
            || outputs.iter().zip(&covered).filter(|(_, covered)| **covered).map(|(output, _)| output);
        let names: Vec<&str> = outputs.iter().map(|(name, _)| name.as_str()).collect();
        let a = match fused {
            true => d.declare(vec![a_part(fused_module(&names))])?,
            false => d.declare(chosen().map(|(name, _)| a_part(name.clone())).collect())?,
        };
        let b_part = |(name, out): &(String, usize)| Part {
            name: format!("{name}{LORA_B}"),
            shape: vec![*out, lora.rank],
            init: Init::Constant(0.0),
            split: b_split,
        };
        let b = d.declare(chosen().map(b_part).collect())?;
        // m begins as the norms of the rows of W, once those are known.
        let m_part = |(name, out): &(String, usize)| Part {
            name: format!("{name}{LORA_M}"),
            shape: vec![*out],
            init: Init::Constant(1.0),
            split: b_split,
        };
        let m = if lora.dora { Some(d.declare(chosen().map(m_part).collect())?) } else { None };
        let place = d.place();
        let (mut slices, mut b_rows, mut y_cols): (Vec<Slice>, usize, usize) = Default::default();
        for (output, covered) in outputs.iter().zip(&covered) {
            let part = b_part(output);
            let local = part.cut(place).shape(&part.shape)[0];
            if *covered {
                let first = if fused { 0 } else { slices.len() * lora.rank };
                let (b, y) = (b_rows..b_rows + local, y_cols..y_cols + local);
                slices.push(Slice { h: first..first + lora.rank, b, y });
                b_rows += local;
            }
            y_cols += local;
        }
        if fused {
            // All of y by all of B, in one GEMM.
            slices = vec![Slice { h: 0..lora.rank, b: 0..b_rows, y: 0..y_cols }];
        }
        Ok(Some(Adapter { a, b, m, weight, scale: lora.scale, slices, parallel }))
    }

    /// Whether the output is scaled afterwards.
    pub(crate) fn is_dora(&self) -> bool {
        self.m.is_some()
    }

    /// DoRA's parameters; none of a plain adapter.
    fn rows(&self) -> Option<AdaptedRows<'_>> {
        let &Adapter { a, b, weight, scale, .. } = self;
        self.m.map(|m| AdaptedRows { weight, a, b, m, groups: 1, scale, slices: &self.slices })
    }

    /// `c ⊙ u + bias`, the output from the unscaled one; none without DoRA.
    pub(crate) fn rescale(
        &self,
        p: &StepContext,
        unscaled: &Tensor,
        bias: Option<ParamId>,
    ) -> Result<Option<Tensor>> {
        let Some(rows) = self.rows() else { return Ok(None) };
        let factor = rows.factors(p)?.factor;
        let (bias, y) = (bias.map(|b| p.weight(b)).transpose()?, p.empty(unscaled.shape())?);
        let c = ScaleColumns {
            x: unscaled,
            factor: &factor.view(&[factor.numel()])?,
            segments: None,
            bias: bias.as_deref(),
            y: &y,
        };
        p.rank.kernels.scale_columns(&p.rank.compute, &c)?;
        Ok(Some(y))
    }

    /// Gradient of the unscaled output; that of m follows when the result runs.
    pub(crate) fn rescale_backward(
        &self,
        p: &StepContext,
        unscaled: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let Some(rows) = self.rows() else { return Ok((dy.clone(), WeightGrad::default())) };
        let (found, dx, products) = (rows.factors(p)?, p.empty(dy.shape())?, p.empty(dy.shape())?);
        let flat = |t: &Tensor| t.view(&[t.numel()]);
        let c = ScaleColumnsBackward {
            dy,
            x: unscaled,
            factor: &flat(&found.factor)?,
            inv_norm: &flat(&found.inv_norm)?,
            segments: None,
            dx: &dx,
            products: &products,
        };
        p.rank.kernels.scale_columns_backward(&p.rank.compute, &c)?;
        let slices = self.slices.clone();
        let m_grad = WeightGrad::deferred(rows.m, move |rank, grad, accumulate| {
            slices.iter().try_for_each(|slice| {
                let sums = grad.narrow(0, slice.b.start, slice.b.len())?;
                rank.kernels.column_sum(&rank.compute, &columns(&products, &slice.y)?, accumulate, &sums)
            })
        });
        Ok((dx, m_grad))
    }

    fn communicates(&self, p: &StepContext) -> bool {
        self.parallel != Parallel::Replicated && p.rank.tp.size() > 1
    }

    /// Adds the adapters' output to `y` and returns `h = s·x·Aᵀ` for backward: of the tokens of y.
    pub(crate) fn forward(&self, p: &StepContext, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let h = self.hidden(p, x)?;
        let b = p.weight(self.b)?;
        for slice in &self.slices {
            let (h, y) = (columns(&h, &slice.h)?, columns(y, &slice.y)?);
            let b = b.narrow(0, slice.b.start, slice.b.len())?;
            add(p, (&h, false), (&b, true), &y)?;
        }
        Ok(h)
    }

    /// `h = s·x·Aᵀ [tokens of y, Σr]`
    pub(crate) fn hidden(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        let a = p.weight(self.a)?;
        let h = p.empty(&[x.shape()[0], a.shape()[0]])?;
        write(p, (x, false), (&a, true), &h)?;
        self.apply_scale(p, &h)?;
        const LABEL: &str = "LoRA activations";
        match self.parallel {
            Parallel::Column if self.communicates(p) => p.all_gather(&h, LABEL),
            Parallel::Row if self.communicates(p) => p.reduce_scatter(&h, LABEL),
            _ => Ok(h),
        }
    }

    fn apply_scale(&self, p: &StepContext, h: &Tensor) -> Result<()> {
        if self.scale == 1.0 {
            return Ok(());
        }
        p.rank.kernels.scale(&p.rank.compute, h, self.scale)
    }

    /// Adds the adapters' input gradient to `dx`; their weight gradients follow when the result runs.
    pub(crate) fn backward(
        &self,
        p: &StepContext,
        (x, h): (&Tensor, &Tensor),
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<WeightGrad> {
        let b = p.weight(self.b)?;
        let dh = p.empty(&[dy.shape()[0], h.shape()[1]])?;
        for slice in &self.slices {
            let (dy, dh) = (columns(dy, &slice.y)?, columns(&dh, &slice.h)?);
            let b = b.narrow(0, slice.b.start, slice.b.len())?;
            write(p, (&dy, false), (&b, false), &dh)?;
        }
        self.apply_scale(p, &dh)?;
        const LABEL: &str = "gradient of LoRA activations";
        let dh = match self.parallel {
            Parallel::Column if self.communicates(p) => p.reduce_scatter(&dh, LABEL)?,
            Parallel::Row if self.communicates(p) => p.all_gather(&dh, LABEL)?,
            _ => dh,
        };
        add(p, (&dh, false), (&*p.weight(self.a)?, false), dx)?;
        let (slices, dy, h) = (self.slices.clone(), dy.clone(), h.clone());
        let b_grad = WeightGrad::deferred(self.b, move |rank, grad, accumulate| {
            for slice in &slices {
                let (dy, h) = (columns(&dy, &slice.y)?, columns(&h, &slice.h)?);
                let c = grad.narrow(0, slice.b.start, slice.b.len())?;
                let g = Gemm { a: &dy, trans_a: true, b: &h, trans_b: false, bias: None, accumulate, c: &c };
                rank.kernels.gemm(&rank.compute, &g)?;
            }
            Ok(())
        });
        Ok(WeightGrad::gemm(self.a, &dh, x).and(b_grad))
    }
}

fn columns(t: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    t.narrow(1, range.start, range.len())
}

/// `c = op(a)·op(b)`
fn write(p: &StepContext, a: (&Tensor, bool), b: (&Tensor, bool), c: &Tensor) -> Result<()> {
    let g = Gemm { a: a.0, trans_a: a.1, b: b.0, trans_b: b.1, bias: None, accumulate: false, c };
    p.rank.kernels.gemm(&p.rank.compute, &g)
}

/// `c += op(a)·op(b)`
fn add(p: &StepContext, a: (&Tensor, bool), b: (&Tensor, bool), c: &Tensor) -> Result<()> {
    let g = Gemm { a: a.0, trans_a: a.1, b: b.0, trans_b: b.1, bias: None, accumulate: true, c };
    p.rank.kernels.gemm_add(&p.rank.compute, &g)
}
