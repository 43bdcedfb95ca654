//! Token rows on their way to the experts: quantized before dispatch, sorted by expert after it.

use super::Experts;
use crate::quant::{GemmOperand, LinearQuant, Orientations, QuantInput, Role, WgradOperand};
use crate::{ParamId, StepContext, WithAmax};
use ferrotron_kernels::{Fp8Tensor, RowMap, ScalingMode};
use ferrotron_tensor::{Result, Tensor};

/// Token rows ready for dispatch: expert inputs, or gradients of expert outputs.
pub(crate) struct DispatchRows {
    /// `[T, width]`: in the model's dtype, or FP8.
    pub(crate) rows: Tensor,
    /// Scale and amax, equal on all ranks of the expert group.
    pub(crate) scales: RowScales,
}

/// Per-tensor scale and amax of dispatched rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowScales {
    /// Inverse scale of FP8 rows, f32 `[1]`; None for rows in the model's dtype.
    scale_inv: Option<Tensor>,
    /// amax f32 `[1]`, where the receiver quantizes.
    amax: Option<Tensor>,
}

/// Rows at the experts.
pub(crate) struct ExpertRows {
    /// `[T, width]` in arrival order.
    pub(crate) x: Tensor,
    pub(crate) scales: RowScales,
    /// f32 `[N]`: routing probabilities, sorted by expert; 0 for alignment padding.
    pub(crate) probs: Tensor,
    /// Permutation from arrival order to expert order.
    pub(crate) map: RowMap,
}

impl Experts {
    /// Rows to dispatch for operand `role` of linear `id`: quantized to FP8 if `fp8`, else as they are, with amax
    /// where `used` by a quantized GEMM.
    fn dispatch_rows(
        &self,
        p: &StepContext,
        (id, e): (ParamId, Option<LinearQuant>),
        role: Role,
        x: &WithAmax,
        (used, fp8): (bool, bool),
    ) -> Result<DispatchRows> {
        let unquantized =
            |amax| DispatchRows { rows: x.values.clone(), scales: RowScales { scale_inv: None, amax } };
        let Some(e) = e.filter(|_| used) else {
            p.calibrates(id, role, &x.values)?;
            return Ok(unquantized(None));
        };
        let amax = e.recipe.measures().then(|| p.dispatched_amax(x)).transpose()?;
        if !fp8 {
            return Ok(unquantized(amax));
        }
        match p
            .quantize(id, role, QuantInput::with_amax(&x.values, amax.as_ref()), Orientations::ROWWISE)?
            .take_rowwise()?
        {
            GemmOperand::Fp8(b) => Ok(DispatchRows {
                rows: b.data,
                scales: RowScales { scale_inv: Some(b.scale_inv), amax: None },
            }),
            GemmOperand::HighPrecision { .. } | GemmOperand::Microscaled(_) => Ok(unquantized(amax)),
        }
    }

    /// Expert inputs `[T, width]` for dispatch.
    pub(crate) fn dispatch_input(&self, p: &StepContext, x: &WithAmax) -> Result<DispatchRows> {
        let [e, _] = self.quant(p);
        let used = e.is_some_and(|e| e.fprop || (p.train && e.wgrad));
        // FP8 rows serve fprop and wgrad alike.
        let fp8 = e.is_some_and(|e| e.recipe.per_tensor() && e.fprop && (e.wgrad || !p.train))
            && self.adapters[0].is_none();
        self.dispatch_rows(p, (self.up, e), Role::Input, x, (used, fp8))
    }

    /// Gradients of expert outputs `[T, width]` for dispatch.
    pub(crate) fn dispatch_grad(&self, p: &StepContext, dy: &Tensor) -> Result<DispatchRows> {
        let [_, e] = self.quant(p);
        let used = e.is_some_and(|e| e.dgrad || e.wgrad);
        // A bias gradient is summed from unquantized values.
        let both = e.is_some_and(|e| e.recipe.per_tensor() && e.dgrad && e.wgrad);
        let fp8 = both && self.down_bias.is_none();
        self.dispatch_rows(p, (self.down, e), Role::Gradient, &WithAmax::from(dy), (used, fp8))
    }

    /// Received rows sorted by expert, as operands of the GEMMs of linear `id`. Per-tensor FP8 rows are transposed for
    /// wgrad only when it runs, so the columnwise operand may still be unsorted; so may inputs that are sorted again for wgrad
    /// where outputs of norms are recomputed, since a token arrives once and is sorted once for each of its experts.
    pub(super) fn sorted(
        &self,
        p: &StepContext,
        (id, role): (ParamId, Role),
        (received, scales, map): (Tensor, &RowScales, &RowMap),
        orientations: Orientations,
    ) -> Result<(GemmOperand, WgradOperand, Tensor)> {
        let rows = p.rank.activation(&[map.source.numel(), received.shape()[1]], received.dtype())?;
        p.rank.kernels.moe_permute(&p.rank.compute, &received, map, &rows)?;
        if let Some(scale_inv) = &scales.scale_inv {
            let (scaling, cols) = (ScalingMode::PerTensor, self.width);
            let operand = |data: &Tensor| {
                GemmOperand::Fp8(Fp8Tensor {
                    data: data.clone(),
                    scale_inv: scale_inv.clone(),
                    scaling,
                    cols,
                    pow2: false,
                })
            };
            return Ok((operand(&rows), WgradOperand { operand: operand(&received), sorted: false }, rows));
        }
        let sorts_again = role == Role::Input && p.recompute.norm && !orientations.cols;
        let unsorted = Some(received).filter(|r| sorts_again && r.shape()[0] < rows.shape()[0]);
        let quantized =
            p.quantize(id, role, QuantInput::with_amax(&rows, scales.amax.as_ref()), orientations)?;
        if let Some(received) = unsorted {
            let rowwise = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&rows));
            let operand = GemmOperand::columnwise(&received);
            return Ok((rowwise, WgradOperand { operand, sorted: false }, rows));
        }
        let columnwise = quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&rows));
        let rowwise = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&rows));
        Ok((rowwise, WgradOperand { operand: columnwise, sorted: true }, rows))
    }
}
