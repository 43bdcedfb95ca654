//! FP8 grouped GEMMs of experts.
//!
//! Per-tensor scaling: the rows of all experts share one scale, whose amax is all-reduced over the ranks that tokens
//! are dispatched between. A token is quantized once, before it is copied to its experts, so FP8 is what is sent and
//! permuted. Every expert's weight has its own scale. Block scaling: sorted rows are quantized at the expert; experts
//! start at multiples of 128 rows, so no block mixes rows of two.

use super::quantize::{Orientations, QuantScale, Quantized};
use super::state::CachedWeight;
use super::{GemmOperand, GemmOptions, LinearGemm, Method, Role};
use crate::{ParamId, Rank, StepContext, WithAmax};
use ferrotron_comm::{Communicator, ReduceOp};
use ferrotron_kernels::{
    Fp8GroupedGemm, Fp8GroupedWgrad, Fp8Tensor, GroupedBias, GroupedGemm, GroupedWgrad, QuantizeStack,
    RowMap, ScaleSource, ScalingMode, Segments,
};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

impl LinearGemm {
    /// Name of the grouped FP8 GEMM in profiles.
    fn grouped(self) -> &'static str {
        match self {
            LinearGemm::Fprop => "grouped (output, fp8)",
            LinearGemm::Dgrad => "grouped (input gradient, fp8)",
            LinearGemm::Wgrad => "grouped (weight gradient, fp8)",
        }
    }
}

impl StepContext<'_> {
    /// amax of token rows, f32 `[1]`, all-reduced over all ranks that they may be dispatched to.
    pub(crate) fn dispatched_amax(&self, x: &WithAmax) -> Result<Tensor> {
        let (tp, experts) = (&self.rank.tp, &self.rank.etp_ep_group);
        // Tensor-parallel ranks hold tokens of one micro-batch, wherever their experts are.
        if experts.size().is_multiple_of(tp.size()) {
            return self.reduced_amax_over(experts, x);
        }
        let amax = Some(self.reduced_amax_over(tp, x)?);
        self.reduced_amax_over(experts, &WithAmax { amax, ..x.clone() })
    }

    /// amax of rows, f32 `[1]`, all-reduced over a group.
    pub(crate) fn reduced_amax_over(&self, group: &Communicator, x: &WithAmax) -> Result<Tensor> {
        let s = &self.rank.compute;
        let amax = match &x.amax {
            Some(amax) if group.size() == 1 => return Ok(amax.clone()),
            // The caller may all-reduce its amax over another group.
            Some(amax) => {
                let own = self.zero_amax()?;
                s.copy(amax, &own)?;
                own
            }
            None => {
                let own = self.zero_amax()?;
                self.rank.kernels.amax(s, &x.values, &own)?;
                own
            }
        };
        group.all_reduce(s, &amax, ReduceOp::Max, "amax of expert rows")?;
        Ok(amax)
    }

    /// The stacked expert weights `param` `[E, n, k]`, quantized as rowwise operand `[E·n, k]` and columnwise `[E·k,
    /// n]`. Where the cache is on, they are quantized once until they change; where it is off, backward transposes the
    /// FP8 weights of forward.
    pub(crate) fn quantize_expert_weights(
        &self,
        param: ParamId,
        shape: [usize; 3],
        orientations: Orientations,
    ) -> Result<Quantized> {
        let (state, _) = self.quant(param)?;
        if let Some(weight) = self.params.fp8_weight(self.rank, param)? {
            let transpose = || transpose_each(self.rank, shape, &weight.fp8);
            let cols =
                orientations.cols.then(|| state.transposed(self.train, param, transpose)).transpose()?;
            return Ok(Quantized { rows: Some(GemmOperand::Fp8(weight.fp8.clone())), cols });
        }
        let mut cached: CachedWeight = state.weights()[param.0].clone();
        let missing = Orientations {
            rows: orientations.rows && cached.rows.is_none(),
            cols: orientations.cols && cached.cols.is_none(),
        };
        if missing == Orientations::NONE {
            return Ok(Quantized { rows: cached.rows, cols: cached.cols });
        }
        let keep = state.caches(self.train);
        if let (false, Orientations::COLUMNWISE, Some(GemmOperand::Fp8(rows))) = (keep, missing, &cached.rows)
        {
            let cols = transpose_each(self.rank, shape, rows)?;
            // Used for the last time in this step.
            state.weights()[param.0].rows = None;
            return Ok(Quantized { rows: None, cols: Some(GemmOperand::Fp8(cols)) });
        }
        let make = Orientations {
            rows: missing.rows || (keep && cached.rows.is_none()),
            cols: missing.cols || (keep && self.train && cached.cols.is_none()),
        };
        let quantized = self.quantize_stack(param, shape, make, &mut cached.amax)?;
        let later =
            self.train && !state.sharded() && self.params.specs()[param.0].quant.is_some_and(|e| e.dgrad);
        let retained = CachedWeight { rows: quantized.rows.clone().filter(|_| later), ..cached.clone() };
        cached.rows = cached.rows.or(quantized.rows);
        cached.cols = cached.cols.or(quantized.cols);
        if keep || self.train {
            state.weights()[param.0] = if keep { cached.clone() } else { retained };
        }
        Ok(Quantized { rows: cached.rows, cols: cached.cols })
    }

    /// Quantizes stacked weights. `amax` f32 `[E]`: taken if known, else set.
    fn quantize_stack(
        &self,
        param: ParamId,
        shape: [usize; 3],
        make: Orientations,
        amax: &mut Option<Tensor>,
    ) -> Result<Quantized> {
        let ((state, recipe), s, k) = (self.quant(param)?, &self.rank.compute, &self.rank.kernels);
        let ([count, n, width], w) = (shape, self.weight(param)?.view(&shape)?);
        let (mut measure, etp) = (false, &self.rank.etp);
        let source = match recipe.method {
            Method::Current => {
                let known = match amax.take() {
                    Some(known) => known,
                    None => {
                        let fresh = s.zeros(&[count], DType::F32, Category::Workspace)?;
                        // Expert tensor-parallel ranks hold parts of one matrix: all-reduce amax before quantizing.
                        measure = etp.size() == 1;
                        if !measure {
                            k.amax_stack(s, &w, &fresh)?;
                            etp.all_reduce(s, &fresh, ReduceOp::Max, "amax of expert weights")?;
                        }
                        fresh
                    }
                };
                *amax = Some(known.clone());
                QuantScale::Amax(known)
            }
            Method::Delayed { .. } => self.delayed_scale(state, param, Role::Weight)?,
            _ => QuantScale::Blocks,
        };
        let (format, scaling) = (recipe.format(Role::Weight), recipe.scaling(Role::Weight));
        let memory = |wanted: bool, shape: [usize; 2]| -> Result<Option<Fp8Tensor>> {
            wanted.then(|| stacked(self.rank, count, shape, format, scaling)).transpose()
        };
        let (rows, cols) = (memory(make.rows, [n, width])?, memory(make.cols, [width, n])?);
        let range = match &source {
            QuantScale::Amax(amax) => ScaleSource::Amax { amax, pow2: recipe.pow2 },
            QuantScale::Delayed(scale, amax) => ScaleSource::Given { scale, amax },
            QuantScale::Blocks => ScaleSource::Blocks { pow2: recipe.pow2 },
        };
        let q = QuantizeStack { x: &w, range, rows: rows.as_ref(), cols: cols.as_ref() };
        match measure {
            true => k.amax_quantize_stack(s, &q)?,
            false => k.quantize_stack(s, &q)?,
        }
        if state.records_stats() {
            for e in 0..count {
                let one = |b: &Option<Fp8Tensor>| -> Result<Option<GemmOperand>> {
                    b.as_ref().map(|b| slice_matrices(b, e..e + 1, count).map(GemmOperand::Fp8)).transpose()
                };
                let quantized = Quantized { rows: one(&rows)?, cols: one(&cols)? };
                state.record(self.rank, param, Role::Weight, &w.select(0, e)?, &quantized)?;
            }
        }
        Ok(Quantized { rows: rows.map(GemmOperand::Fp8), cols: cols.map(GemmOperand::Fp8) })
    }
}

/// Memory for `count` FP8 matrices `[r, c]`; with per-tensor scaling each has its own scale.
fn stacked(
    rank: &Rank,
    count: usize,
    [r, c]: [usize; 2],
    format: DType,
    scaling: ScalingMode,
) -> Result<Fp8Tensor> {
    let (s, category) = (&rank.compute, Category::Activations);
    let bytes = Fp8Tensor::empty(s, [count * r, c], format, scaling, category)?;
    Ok(match scaling {
        ScalingMode::PerTensor => {
            Fp8Tensor { scale_inv: Tensor::empty(s, &[count], DType::F32, category)?, ..bytes }
        }
        _ => bytes,
    })
}

/// Transposes each of a stack of FP8 matrices `[E, n, k]`.
fn transpose_each(rank: &Rank, [count, n, k]: [usize; 3], rows: &Fp8Tensor) -> Result<Fp8Tensor> {
    let cols = stacked(rank, count, [k, n], rows.data.dtype(), rows.scaling)?;
    rank.kernels.transpose_stack(&rank.compute, count, rows, &cols)?;
    Ok(cols)
}

/// Some of `count` stacked matrices.
pub(super) fn slice_matrices(
    b: &Fp8Tensor,
    which: std::ops::Range<usize>,
    count: usize,
) -> Result<Fp8Tensor> {
    let part = |t: &Tensor| {
        let each = t.shape()[0] / count;
        t.narrow(0, which.start * each, which.len() * each)
    };
    Ok(Fp8Tensor { data: part(&b.data)?, scale_inv: part(&b.scale_inv)?, ..b.clone() })
}

impl GemmOperand {
    /// Grouped GEMM: sorted rows `self [N, k]` times each expert's matrix of `w`, into `y [N, n]`. bf16 weights are
    /// `[E, n, k]`, or `[E, k, n]` transposed; the bias of `how` is `[E, n]`.
    pub(crate) fn grouped_gemm(
        &self,
        rank: &Rank,
        w: &GemmOperand,
        segments: Segments,
        how: GemmOptions,
        y: &Tensor,
    ) -> Result<()> {
        let (s, k, GemmOptions { product, bias, fast, .. }) = (&rank.compute, &rank.kernels, how);
        match (self, w) {
            (
                GemmOperand::HighPrecision { t: x, trans: false },
                GemmOperand::HighPrecision { t: w, trans },
            ) => k.grouped_gemm(s, &GroupedGemm { x, w, as_stored: *trans, segments, bias, y }),
            (GemmOperand::Fp8(x), GemmOperand::Fp8(w)) => {
                k.fp8_grouped_gemm(s, &Fp8GroupedGemm { x, w, segments, y, fast, name: product.grouped() })?;
                let Some(bias) = bias else { return Ok(()) };
                k.grouped_bias(s, &GroupedBias { segments, bias, weights: None }, y)
            }
            _ => shape_error(product.grouped(), "one operand is FP8 and the other is not"),
        }
    }
}

/// An operand of the experts' wgrad.
#[derive(Clone, Debug)]
pub(crate) struct WgradOperand {
    /// Columnwise; rowwise in arrival order where not `sorted` yet.
    pub(crate) operand: GemmOperand,
    /// Whether the rows are sorted by expert.
    pub(crate) sorted: bool,
}

impl WgradOperand {
    /// The columnwise operand of rows sorted by `map`.
    pub(crate) fn ready(&self, rank: &Rank, map: &RowMap) -> Result<GemmOperand> {
        if self.sorted {
            return Ok(self.operand.clone());
        }
        let b = match &self.operand {
            GemmOperand::Fp8(b) => b,
            GemmOperand::HighPrecision { t, .. } => {
                let rows = rank.activation(&[map.source.numel(), t.shape()[1]], t.dtype())?;
                rank.kernels.moe_permute(&rank.compute, t, map, &rows)?;
                return Ok(GemmOperand::columnwise(&rows));
            }
            GemmOperand::Microscaled(_) => {
                return shape_error(LinearGemm::Wgrad.grouped(), "experts have no microscaled operands");
            }
        };
        let (s, shape) = (&rank.compute, [b.cols, map.source.numel()]);
        let cols = Fp8Tensor::empty(s, shape, b.data.dtype(), ScalingMode::PerTensor, Category::Activations)?;
        rank.kernels.moe_permute_transposed(s, &b.data, map, &cols.data)?;
        Ok(GemmOperand::Fp8(Fp8Tensor { scale_inv: b.scale_inv.clone(), ..cols }))
    }

    /// wgrad `dw[e] (+)= Σ dyᵀ·x` over the rows of each expert: `self` is dy, `dw` f32 `[E, n, k]`.
    pub(crate) fn gradient(
        &self,
        rank: &Rank,
        x: &WgradOperand,
        map: &RowMap,
        dw: (&Tensor, bool),
    ) -> Result<()> {
        let (s, k) = (&rank.compute, &rank.kernels);
        let segments = Segments { offsets: &map.offsets, counts: &map.counts };
        match (self.ready(rank, map)?, x.ready(rank, map)?) {
            (GemmOperand::HighPrecision { t: dy, .. }, GemmOperand::HighPrecision { t: x, .. }) => {
                k.grouped_wgrad(s, &GroupedWgrad { dy: &dy, x: &x, segments, dw })
            }
            (GemmOperand::Fp8(dy), GemmOperand::Fp8(x)) => {
                k.fp8_grouped_wgrad(s, &Fp8GroupedWgrad { dy: &dy, x: &x, segments, dw, fast: false })
            }
            _ => shape_error(LinearGemm::Wgrad.grouped(), "one operand is FP8 and the other is not"),
        }
    }
}
