//! Adapters of experts: `y += s·(x·A_eᵀ)·B_eᵀ` for the rows of expert e, as grouped GEMMs.
//!
//! Expert tensor parallelism needs no communication for them. Ranks of an expert hold the same rows. B of the up projection is
//! split by rows and A of the down projection by columns, like the weight; the other factor is replicated. Then h of the down
//! projection, and dh of the up projection, are partial sums, like the output and the input gradient that they add to; the
//! gradient of a replicated factor is the sum over the ranks.
//!
//! With DoRA each expert has an m of its own, split like the rows of B. Partial sums of the down projection are scaled like whole
//! ones; the gradient of its m is their sum over the ranks.

use super::dora::AdaptedRows;
use super::{LORA_A, LORA_B, LORA_M, Slice, fused_module};
use crate::quant::WgradOperand;
use crate::{Declarations, Init, ParamId, Part, Rank, Split, StepContext, WeightGrad};
use ferrotron_kernels::{
    GroupedBias, GroupedGemm, GroupedWgrad, RowMap, ScaleColumns, ScaleColumnsBackward, Segments,
};
use ferrotron_tensor::{Category, DType, Result, Tensor};
use std::ops::Range;

/// Adapters of one projection of this rank's experts: of gate and up together, or of down.
pub(crate) struct ExpertAdapter {
    /// `[experts·Σr, in]`
    a: ParamId,
    /// `[experts·Σout, r]`
    b: ParamId,
    /// DoRA: `[experts·Σout]`
    m: Option<ParamId>,
    /// The experts' weights `[experts·n, in]`.
    weight: ParamId,
    scale: f32,
    count: usize,
    slices: Vec<Slice>,
    /// Whether the adapters write all columns of y.
    whole: bool,
}

/// The matrices of a projection.
pub(crate) struct Projection<'a> {
    /// Names after the expert's, such as `gate` and `up`, and features.
    pub(crate) outputs: &'a [(&'a str, usize)],
    pub(crate) input: usize,
    pub(crate) split: Split,
    pub(crate) weight: ParamId,
}

impl ExpertAdapter {
    /// Declares the adapters of experts `<name>.<e>`, where the policy has any. All experts of a layer have the same.
    pub(crate) fn declare(
        d: &mut Declarations,
        (name, own): (&str, Range<usize>),
        p: &Projection,
    ) -> Result<Option<ExpertAdapter>> {
        let lora = d.lora().clone();
        let covered: Vec<bool> =
            p.outputs.iter().map(|(what, _)| lora.covers(&format!("{name}.0.{what}"))).collect();
        if !covered.contains(&true) {
            return Ok(None);
        }
        let (a_split, b_split) = match p.split {
            Split::Columns { .. } => (p.split, Split::Replicated),
            _ => (Split::Replicated, p.split),
        };
        let init = Init::Normal((3.0 * p.input as f32).sqrt().recip());
        let (rank, input) = (lora.rank, p.input);
        let a_part = |module: String| Part {
            name: format!("{module}{LORA_A}"),
            shape: vec![rank, input],
            init,
            split: a_split,
        };
        let b_part = |module: &str, out: usize| Part {
            name: format!("{module}{LORA_B}"),
            shape: vec![out, rank],
            init: Init::Constant(0.0),
            split: b_split,
        };
        let m_part = |module: &str, out: usize| Part {
            name: format!("{module}{LORA_M}"),
            shape: vec![out],
            init: Init::Constant(1.0),
            split: b_split,
        };
        let whole = !covered.contains(&false);
        let fused = lora.fused && p.outputs.len() > 1 && whole;
        let (mut a_parts, mut b_parts, mut m_parts) = (Vec::new(), Vec::new(), Vec::new());
        for e in own.clone() {
            let modules: Vec<String> =
                p.outputs.iter().map(|(what, _)| format!("{name}.{e}.{what}")).collect();
            if fused {
                let names: Vec<&str> = modules.iter().map(String::as_str).collect();
                a_parts.push(a_part(fused_module(&names)));
            }
            for ((module, (_, out)), _) in
                modules.iter().zip(p.outputs).zip(&covered).filter(|(_, covered)| **covered)
            {
                if !fused {
                    a_parts.push(a_part(module.clone()));
                }
                b_parts.push(b_part(module, *out));
                m_parts.push(m_part(module, *out));
            }
        }
        let (a, b) = (d.declare_experts(a_parts)?, d.declare_experts(b_parts)?);
        let (count, etp) = (own.len(), d.experts().etp);
        d.stack_matrices(&[a, b], count);
        let m = if lora.dora { Some(d.declare_experts(m_parts)?) } else { None };
        d.stack_matrices(m.as_slice(), count);
        let (mut slices, mut b_rows, mut y_cols): (Vec<Slice>, usize, usize) = Default::default();
        for ((what, out), covered) in p.outputs.iter().zip(&covered) {
            let part = b_part(what, *out);
            let local = part.cut(etp).shape(&part.shape)[0];
            if *covered {
                let first = if fused { 0 } else { slices.len() * rank };
                let (b, y) = (b_rows..b_rows + local, y_cols..y_cols + local);
                slices.push(Slice { h: first..first + rank, b, y });
                b_rows += local;
            }
            y_cols += local;
        }
        if fused {
            slices = vec![Slice { h: 0..rank, b: 0..b_rows, y: 0..y_cols }];
        }
        let (weight, scale) = (p.weight, lora.scale);
        Ok(Some(ExpertAdapter { a, b, m, weight, scale, count, slices, whole }))
    }

    /// Whether the output is scaled afterwards.
    pub(crate) fn is_dora(&self) -> bool {
        self.m.is_some()
    }

    /// DoRA's parameters; none of a plain adapter.
    fn rows(&self) -> Option<AdaptedRows<'_>> {
        let &ExpertAdapter { a, b, weight, scale, count: groups, .. } = self;
        self.m.map(|m| AdaptedRows { weight, a, b, m, groups, scale, slices: &self.slices })
    }

    /// `c ⊙ u`, the output from the unscaled one for sorted rows; none without DoRA.
    pub(crate) fn rescale(
        &self,
        p: &StepContext,
        unscaled: &Tensor,
        segments: Segments,
    ) -> Result<Option<Tensor>> {
        let Some(rows) = self.rows() else { return Ok(None) };
        let (factor, y) = (rows.factors(p)?.factor, p.empty(unscaled.shape())?);
        let segments = Some(segments);
        let c = ScaleColumns { x: unscaled, factor: &factor, segments, bias: None, y: &y };
        p.rank.kernels.scale_columns(&p.rank.compute, &c)?;
        Ok(Some(y))
    }

    /// Gradient of the unscaled output of sorted rows; that of m follows when the result runs.
    pub(crate) fn rescale_backward(
        &self,
        p: &StepContext,
        unscaled: &Tensor,
        dy: &Tensor,
        map: &RowMap,
    ) -> Result<(Tensor, WeightGrad)> {
        let Some(rows) = self.rows() else { return Ok((dy.clone(), WeightGrad::default())) };
        let (found, dx, products) = (rows.factors(p)?, p.empty(dy.shape())?, p.empty(dy.shape())?);
        let c = ScaleColumnsBackward {
            dy,
            x: unscaled,
            factor: &found.factor,
            inv_norm: &found.inv_norm,
            segments: Some(segments(map)),
            dx: &dx,
            products: &products,
        };
        p.rank.kernels.scale_columns_backward(&p.rank.compute, &c)?;
        let (count, whole, slices, map) = (self.count, self.whole, self.slices.clone(), map.clone());
        let m_grad = WeightGrad::deferred(rows.m, move |rank, grad, accumulate| {
            let grad = grad.view(&[count, grad.numel() / count.max(1)])?;
            if whole {
                return segment_sums(rank, &products, &map, (&grad, accumulate));
            }
            let s = &rank.compute;
            let sums = Tensor::empty(s, &[count, products.shape()[1]], DType::F32, Category::Workspace)?;
            segment_sums(rank, &products, &map, (&sums, false))?;
            let own = Tensor::empty(s, grad.shape(), DType::F32, Category::Workspace)?;
            for slice in &slices {
                rank.kernels.copy(s, &columns(&sums, &slice.y)?, &columns(&own, &slice.b)?)?;
            }
            match accumulate {
                true => rank.kernels.add_assign(s, &grad, &own),
                false => rank.kernels.copy(s, &own, &grad),
            }
        });
        Ok((dx, m_grad))
    }

    /// A parameter as one matrix for each expert.
    fn matrices(&self, p: &StepContext, id: ParamId) -> Result<Tensor> {
        stacked(&*p.weight(id)?, self.count)
    }

    fn apply_scale(&self, p: &StepContext, h: &Tensor) -> Result<()> {
        if self.scale == 1.0 {
            return Ok(());
        }
        p.rank.kernels.scale(&p.rank.compute, h, self.scale)
    }

    /// Adds the adapters' output for sorted rows `x` to `y` and returns `h = s·x·Aᵀ [N, Σr]` for backward.
    pub(crate) fn forward(
        &self,
        p: &StepContext,
        x: &Tensor,
        segments: Segments,
        y: &Tensor,
    ) -> Result<Tensor> {
        let h = self.hidden(p, x, segments)?;
        let (b, update) = (self.matrices(p, self.b)?, p.empty(y.shape())?);
        if !self.whole {
            p.rank.compute.zero(&update)?;
        }
        for slice in &self.slices {
            let (h, y) = (columns(&h, &slice.h)?, columns(&update, &slice.y)?);
            let w = b.narrow(1, slice.b.start, slice.b.len())?;
            let g = GroupedGemm { x: &h, w: &w, as_stored: false, segments, bias: None, y: &y };
            p.rank.kernels.grouped_gemm(&p.rank.compute, &g)?;
        }
        p.rank.kernels.add_assign(&p.rank.compute, y, &update)?;
        Ok(h)
    }

    fn hidden(&self, p: &StepContext, x: &Tensor, segments: Segments) -> Result<Tensor> {
        let a = self.matrices(p, self.a)?;
        let h = p.empty(&[x.shape()[0], a.shape()[1]])?;
        let g = GroupedGemm { x, w: &a, as_stored: false, segments, bias: None, y: &h };
        p.rank.kernels.grouped_gemm(&p.rank.compute, &g)?;
        self.apply_scale(p, &h)?;
        Ok(h)
    }

    /// Adds the adapters' input gradient to `dx`; their weight gradients follow when the result runs.
    pub(crate) fn backward(
        &self,
        p: &StepContext,
        (x, h, map): (WgradOperand, &Tensor, &RowMap),
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<WeightGrad> {
        let (k, s, segments) = (&p.rank.kernels, &p.rank.compute, segments(map));
        let (b, dh) = (self.matrices(p, self.b)?, p.empty(h.shape())?);
        for slice in &self.slices {
            let (dy, dh) = (columns(dy, &slice.y)?, columns(&dh, &slice.h)?);
            let w = b.narrow(1, slice.b.start, slice.b.len())?;
            k.grouped_gemm(s, &GroupedGemm { x: &dy, w: &w, as_stored: true, segments, bias: None, y: &dh })?;
        }
        self.apply_scale(p, &dh)?;
        let (a, update) = (self.matrices(p, self.a)?, p.empty(dx.shape())?);
        k.grouped_gemm(s, &GroupedGemm { x: &dh, w: &a, as_stored: true, segments, bias: None, y: &update })?;
        k.add_assign(s, dx, &update)?;
        let (count, slices, dy, h) = (self.count, self.slices.clone(), dy.clone(), h.clone());
        let rows = map.clone();
        let b_grad = WeightGrad::deferred(self.b, move |rank, grad, accumulate| {
            let grad = stacked(grad, count)?;
            for slice in &slices {
                let (dy, h) = (columns(&dy, &slice.y)?, columns(&h, &slice.h)?);
                let dw = grad.narrow(1, slice.b.start, slice.b.len())?;
                wgrad(rank, (&dy, &h), &rows, (&dw, accumulate))?;
            }
            Ok(())
        });
        let rows = map.clone();
        let a_grad = WeightGrad::deferred(self.a, move |rank, grad, accumulate| {
            let x = x.ready(rank, &rows)?;
            wgrad(rank, (&dh, x.memory()), &rows, (&stacked(grad, count)?, accumulate))
        });
        Ok(a_grad.and(b_grad))
    }
}

/// `sums[e] (+)= Σ x[r]` over the rows r of expert e, f32 `[experts, n]`: the gradient of a bias.
fn segment_sums(rank: &Rank, x: &Tensor, map: &RowMap, sums: (&Tensor, bool)) -> Result<()> {
    let s = &rank.compute;
    let bias = s.zeros(sums.0.shape(), x.dtype(), Category::Workspace)?;
    let b = GroupedBias { segments: segments(map), bias: &bias, weights: None };
    rank.kernels.grouped_bias_backward(s, &b, x, sums, None)
}

fn segments(map: &RowMap) -> Segments<'_> {
    Segments { offsets: &map.offsets, counts: &map.counts }
}

fn wgrad(rank: &Rank, (dy, x): (&Tensor, &Tensor), map: &RowMap, dw: (&Tensor, bool)) -> Result<()> {
    rank.kernels.grouped_wgrad(&rank.compute, &GroupedWgrad { dy, x, segments: segments(map), dw })
}

/// `[count·n, k]` as `[count, n, k]`.
fn stacked(t: &Tensor, count: usize) -> Result<Tensor> {
    t.view(&[count, t.shape()[0] / count.max(1), t.shape()[1]])
}

fn columns(t: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    t.narrow(1, range.start, range.len())
}
