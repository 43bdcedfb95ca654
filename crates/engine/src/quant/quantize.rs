//! Quantizing the operands of a linear's GEMMs.

use super::fp8_params::transpose;
use super::state::{CachedWeight, QuantState};
use super::{GemmOperand, Method, Recipe, Role};
use crate::{ParamId, Rank, StepContext, WithAmax};
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{BlockAxis, EmulatedFormat, Fp8Tensor, MicroscaledTensor, Quantize, ScaleSource};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

/// Orientations in which an operand is needed, as in Transformer Engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Orientations {
    /// Contracted along its rows, as it is stored.
    pub(crate) rows: bool,
    /// Contracted along its columns: stored transposed.
    pub(crate) cols: bool,
}

impl Orientations {
    pub(crate) const ROWWISE: Orientations = Orientations { rows: true, cols: false };
    pub(crate) const COLUMNWISE: Orientations = Orientations { rows: false, cols: true };
    pub(crate) const NONE: Orientations = Orientations { rows: false, cols: false };
}

/// A quantized operand, in the orientations that were asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quantized {
    pub(crate) rows: Option<GemmOperand>,
    pub(crate) cols: Option<GemmOperand>,
}

impl Quantized {
    /// The rowwise operand.
    pub(crate) fn take_rowwise(self) -> Result<GemmOperand> {
        self.rows
            .map_or_else(|| shape_error("quantize", "the operand was not quantized in this orientation"), Ok)
    }

    /// The columnwise operand.
    pub(crate) fn take_columnwise(self) -> Result<GemmOperand> {
        self.cols
            .map_or_else(|| shape_error("quantize", "the operand was not quantized in this orientation"), Ok)
    }
}

/// Source of an operand's scale.
pub(super) enum QuantScale {
    /// Current scaling: its amax.
    Amax(Tensor),
    /// Delayed scaling: the scale, and where the amax is collected.
    Delayed(Tensor, Tensor),
    /// Block scaling: none, each block has its own.
    Blocks,
}

/// A tensor to quantize, `x [tokens, n]`.
#[derive(Clone, Copy)]
pub(crate) struct QuantInput<'a> {
    pub(crate) x: &'a Tensor,
    /// The all-reduced amax, if known; otherwise it is measured and all-reduced over the tensor-parallel group.
    pub(crate) amax: Option<&'a Tensor>,
    /// f32 `[n]`: also compute the column sums of `x`.
    pub(crate) sums: Option<&'a Tensor>,
}

impl<'a> QuantInput<'a> {
    pub(crate) fn with_amax(x: &'a Tensor, amax: Option<&'a Tensor>) -> QuantInput<'a> {
        QuantInput { x, amax, sums: None }
    }
}

impl<'a> From<&'a Tensor> for QuantInput<'a> {
    fn from(x: &'a Tensor) -> QuantInput<'a> {
        QuantInput { x, amax: None, sums: None }
    }
}

impl StepContext<'_> {
    /// Quantizes an input or output gradient of the linear with weight `param`.
    pub(crate) fn quantize<'a>(
        &self,
        param: ParamId,
        role: Role,
        input: impl Into<QuantInput<'a>>,
        orientations: Orientations,
    ) -> Result<Quantized> {
        let QuantInput { x, amax, sums } = input.into();
        if orientations == Orientations::NONE {
            sums.map_or(Ok(()), |sums| self.rank.kernels.column_sum(&self.rank.compute, x, false, sums))?;
            return Ok(Quantized::default());
        }
        let (state, recipe) = self.quant(param)?;
        let source = match recipe.method {
            Method::Current => {
                QuantScale::Amax(amax.cloned().map_or_else(|| self.reduced_amax(&WithAmax::from(x)), Ok)?)
            }
            Method::Delayed { .. } => self.delayed_scale(state, param, role)?,
            _ => QuantScale::Blocks,
        };
        let draw = if recipe.random(role) { state.next_draw() } else { 0 };
        let quantized = quantize(self.rank, Operand { recipe, role, x, sums, draw }, orientations, &source)?;
        state.record(self.rank, param, role, x, &quantized)?;
        Ok(quantized)
    }

    /// Quantizes the weight `param`, once until it changes where the cache is on.
    pub(crate) fn quantize_weight(&self, param: ParamId, orientations: Orientations) -> Result<Quantized> {
        let (state, recipe) = self.quant(param)?;
        if let Some(weight) = self.params.fp8_weight(self.rank, param)? {
            // A frozen weight has one orientation in memory; dgrad transposes it into memory that is free afterwards. That
            // costs 2 bytes of bandwidth per element and micro-batch, little beside the GEMM over its tokens.
            let keep = self.train && !self.params.specs()[param.0].group.base;
            let cols = orientations
                .cols
                .then(|| state.transposed(keep, param, || transpose(self.rank, &weight.fp8)))
                .transpose()?;
            return Ok(Quantized { rows: Some(GemmOperand::Fp8(weight.fp8.clone())), cols });
        }
        let w = &*self.weight(param)?;
        let mut cached: CachedWeight = state.weights()[param.0].clone();
        let missing = Orientations {
            rows: orientations.rows && cached.rows.is_none(),
            cols: orientations.cols && cached.cols.is_none(),
        };
        if missing != Orientations::NONE {
            let source = match recipe.method {
                Method::Current => {
                    let known = state.known(param, &self.params.specs()[param.0])?;
                    let amax = known.or(cached.amax.take());
                    let amax = amax.map_or_else(|| self.reduced_amax(&WithAmax::from(w)), Ok)?;
                    cached.amax = Some(amax.clone());
                    QuantScale::Amax(amax)
                }
                Method::Delayed { .. } => self.delayed_scale(state, param, Role::Weight)?,
                _ => QuantScale::Blocks,
            };
            // Both orientations at once where both will be used: the weight is read once.
            let keep = state.caches(self.train);
            let both = keep && !recipe.emulated();
            let make = Orientations {
                rows: missing.rows || (both && cached.rows.is_none()),
                cols: missing.cols || (both && self.train && cached.cols.is_none()),
            };
            let weight = Operand { recipe, role: Role::Weight, x: w, sums: None, draw: 0 };
            let quantized = quantize(self.rank, weight, make, &source)?;
            state.record(self.rank, param, Role::Weight, w, &quantized)?;
            let retained = cached.clone();
            cached.rows = cached.rows.or(quantized.rows);
            cached.cols = cached.cols.or(quantized.cols);
            if keep || self.train {
                state.weights()[param.0] = if keep { cached.clone() } else { retained };
            }
        }
        Ok(Quantized { rows: cached.rows, cols: cached.cols })
    }

    /// The delayed scale of an operand. Passes without backward do not contribute to the amax history.
    pub(super) fn delayed_scale(&self, state: &QuantState, param: ParamId, role: Role) -> Result<QuantScale> {
        let Some((scale, amax)) = state.delayed().map(|d| d.of(param, role)).transpose()?.flatten() else {
            return shape_error("quantize", "the operand has no delayed scale");
        };
        let unseen = || self.rank.compute.zeros(&[1], DType::F32, Category::Workspace);
        Ok(QuantScale::Delayed(scale, if self.train { amax } else { unseen()? }))
    }

    pub(super) fn quant(&self, param: ParamId) -> Result<(&QuantState, Recipe)> {
        match (self.state.quant(), self.params.specs()[param.0].quant) {
            (Some(state), Some(e)) => Ok((state, e.recipe)),
            _ => shape_error("quantize", "the parameter is not declared as quantized"),
        }
    }
}

/// Quantizes a gathered input columnwise, with block scales.
pub(crate) fn quantize_columnwise(rank: &Rank, recipe: Recipe, x: &Tensor) -> Result<GemmOperand> {
    let input = Operand { recipe, role: Role::Input, x, sums: None, draw: 0 };
    quantize(rank, input, Orientations::COLUMNWISE, &QuantScale::Blocks)?.take_columnwise()
}

/// What is quantized.
#[derive(Clone, Copy)]
struct Operand<'a> {
    recipe: Recipe,
    role: Role,
    /// `[r, c]`
    x: &'a Tensor,
    /// f32 `[c]`: receives the column sums.
    sums: Option<&'a Tensor>,
    /// Index of the tensor, for stochastic rounding.
    draw: u64,
}

fn quantize(
    rank: &Rank,
    operand: Operand,
    orientations: Orientations,
    source: &QuantScale,
) -> Result<Quantized> {
    let (s, k) = (&rank.compute, &rank.kernels);
    let Operand { recipe, role, x, sums, .. } = operand;
    if recipe.emulated() {
        if let Some(sums) = sums {
            k.column_sum(s, x, false, sums)?;
        }
        // Emulated GEMMs are bf16 too: elsewhere operands stay in the model's dtype.
        let in_hardware = x.dtype() == DType::BF16 && k.takes_microscaled();
        let rounded = |along| -> Result<GemmOperand> {
            let how = emulated(rank, operand, along);
            if in_hardware {
                let shape = [x.shape()[0], x.shape()[1]];
                let out = MicroscaledTensor::empty(s, how, shape, Category::Activations)?;
                k.microscale(s, how, x, &out)?;
                return Ok(GemmOperand::Microscaled(out));
            }
            let t = rank.activation(x.shape(), x.dtype())?;
            k.emulate(s, how, x, &t)?;
            Ok(GemmOperand::HighPrecision { t, trans: along == BlockAxis::Cols })
        };
        let rows = orientations.rows.then(|| rounded(BlockAxis::Rows)).transpose()?;
        let cols = orientations.cols.then(|| rounded(BlockAxis::Cols)).transpose()?;
        return Ok(Quantized { rows, cols });
    }
    let (r, c) = (x.shape()[0], x.shape()[1]);
    let (format, scaling) = (recipe.format(role), recipe.scaling(role));
    let memory = |wanted: bool, shape| -> Result<Option<Fp8Tensor>> {
        let make = || Fp8Tensor::empty(s, shape, format, scaling, Category::Activations);
        Ok(wanted.then(make).transpose()?.map(|b| Fp8Tensor { pow2: recipe.pow2, ..b }))
    };
    let (rows, cols) = (memory(orientations.rows, [r, c])?, memory(orientations.cols, [c, r])?);
    let range = match source {
        QuantScale::Amax(amax) => ScaleSource::Amax { amax, pow2: recipe.pow2 },
        QuantScale::Delayed(scale, amax) => ScaleSource::Given { scale, amax },
        QuantScale::Blocks => ScaleSource::Blocks { pow2: recipe.pow2 },
    };
    let sums = sums.map(|t| (t, false));
    k.quantize(s, &Quantize { x, range, rows: rows.as_ref(), cols: cols.as_ref(), sums })?;
    Ok(Quantized { rows: rows.map(GemmOperand::Fp8), cols: cols.map(GemmOperand::Fp8) })
}

fn emulated(rank: &Rank, operand: Operand, along: BlockAxis) -> EmulatedFormat {
    let Operand { recipe, role, draw, .. } = operand;
    let square = role == Role::Weight;
    // Tensor-parallel ranks share a gradient or hold parts of it, so they share a random stream. Data-parallel ranks
    // round different tokens and must not all round alike.
    let stream = || {
        let use_ = if along == BlockAxis::Rows { "rows" } else { "columns" };
        // Every pipeline stage counts its own tensors.
        let name = format!("rounding of {use_} by {} of stage {}", rank.dp_cp_group.rank(), rank.pp.rank());
        RandomStream::named(rank.seed ^ draw, &name)
    };
    match recipe.method {
        // The Hadamard rotation cancels in wgrad, whose operands are both columnwise.
        Method::Nvfp4 => EmulatedFormat::Nvfp4 {
            along,
            square,
            hadamard: along == BlockAxis::Cols && !square,
            stochastic: recipe.random(role).then(stream),
        },
        _ => EmulatedFormat::Mxfp8 { format: recipe.format(role), along, square: false },
    }
}
