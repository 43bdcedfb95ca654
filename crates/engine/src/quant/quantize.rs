//! Making narrow factors of the operands of a linear map.

use super::fp8_params::transpose;
use super::state::{CachedWeight, QuantState};
use super::{GemmOperand, Method, Recipe, Role};
use crate::{ParamId, Rank, StepContext, WithAmax};
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{BlockAxis, EmulatedFormat, Fp8Tensor, Quantize, ScaleSource};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

/// In which products an operand is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Orientations {
    /// Contracted along its rows, as it is stored.
    pub(crate) rows: bool,
    /// Contracted along its columns.
    pub(crate) cols: bool,
}

impl Orientations {
    pub(crate) const ROWWISE: Orientations = Orientations { rows: true, cols: false };
    pub(crate) const COLUMNWISE: Orientations = Orientations { rows: false, cols: true };
    pub(crate) const NONE: Orientations = Orientations { rows: false, cols: false };
}

/// An operand as a factor, for each of its uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quantized {
    pub(crate) rows: Option<GemmOperand>,
    pub(crate) cols: Option<GemmOperand>,
}

impl Quantized {
    /// The factor for products along its rows.
    pub(crate) fn take_rowwise(self) -> Result<GemmOperand> {
        self.rows.map_or_else(|| shape_error("quantize", "it was not made for this use"), Ok)
    }

    /// The factor for products along its columns.
    pub(crate) fn take_columnwise(self) -> Result<GemmOperand> {
        self.cols.map_or_else(|| shape_error("quantize", "it was not made for this use"), Ok)
    }
}

/// Where the one scale of a tensor comes from, where there is one.
pub(super) enum QuantScale {
    /// Its largest magnitude.
    Amax(Tensor),
    /// Earlier steps: scale, and where the magnitude is gathered.
    Delayed(Tensor, Tensor),
    /// Nowhere.
    Blocks,
}

impl StepContext<'_> {
    /// Input or output gradient `x [tokens, n]` of the map with weight `param` as factors; ranks that share a layer agree
    /// on the scale, from the magnitude `amax` on which they have agreed where there is one. With `sums`, f32 `[n]`, the
    /// column sums of `x`, too.
    pub(crate) fn quantize(
        &self,
        param: ParamId,
        role: Role,
        x: &Tensor,
        uses: Orientations,
        amax: Option<&Tensor>,
        sums: Option<&Tensor>,
    ) -> Result<Quantized> {
        if uses == Orientations::NONE {
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
        let made = quantize(self.rank, Operand { recipe, role, x, sums, draw }, uses, &source)?;
        state.record(self.rank, param, role, x, &made)?;
        Ok(made)
    }

    /// The weight `param` as factors. It is narrowed once until it changes, where it is kept.
    pub(crate) fn quantize_weight(&self, param: ParamId, uses: Orientations) -> Result<Quantized> {
        let (state, recipe) = self.quant(param)?;
        if let Some(bytes) = self.params.fp8_params().weight(param) {
            self.params.wait_weight(self.rank, param)?;
            let cols = uses
                .cols
                .then(|| state.transposed(self.train, param, || transpose(self.rank, bytes)))
                .transpose()?;
            return Ok(Quantized { rows: Some(GemmOperand::Fp8(bytes.clone())), cols });
        }
        let w = self.weight(param)?;
        let mut kept: CachedWeight = state.weights()[param.0].clone();
        let missing =
            Orientations { rows: uses.rows && kept.rows.is_none(), cols: uses.cols && kept.cols.is_none() };
        if missing != Orientations::NONE {
            let source = match recipe.method {
                Method::Current => {
                    let known = state.known(param, &self.params.specs()[param.0])?;
                    let amax = known.or(kept.amax.take());
                    let amax = amax.map_or_else(|| self.reduced_amax(&WithAmax::from(w)), Ok)?;
                    kept.amax = Some(amax.clone());
                    QuantScale::Amax(amax)
                }
                Method::Delayed { .. } => self.delayed_scale(state, param, Role::Weight)?,
                _ => QuantScale::Blocks,
            };
            // Both uses at once where both will be needed: the weight is read once.
            let keep = state.caches(self.train);
            let both = keep && !recipe.emulated();
            let make = Orientations {
                rows: missing.rows || (both && kept.rows.is_none()),
                cols: missing.cols || (both && self.train && kept.cols.is_none()),
            };
            let weight = Operand { recipe, role: Role::Weight, x: w, sums: None, draw: 0 };
            let made = quantize(self.rank, weight, make, &source)?;
            state.record(self.rank, param, Role::Weight, w, &made)?;
            let stays = kept.clone();
            kept.rows = kept.rows.or(made.rows);
            kept.cols = kept.cols.or(made.cols);
            if keep || self.train {
                state.weights()[param.0] = if keep { kept.clone() } else { stays };
            }
        }
        Ok(Quantized { rows: kept.rows, cols: kept.cols })
    }

    /// The scale of earlier steps. What passes without a backward see is no part of any step.
    pub(super) fn delayed_scale(&self, state: &QuantState, param: ParamId, role: Role) -> Result<QuantScale> {
        let Some((scale, amax)) = state.delayed().map(|d| d.of(param, role)).transpose()?.flatten() else {
            return shape_error("quantize", "there is no scale for it");
        };
        let unseen = || self.rank.compute.zeros(&[1], DType::F32, Category::Workspace);
        Ok(QuantScale::Delayed(scale, if self.train { amax } else { unseen()? }))
    }

    pub(super) fn quant(&self, param: ParamId) -> Result<(&QuantState, Recipe)> {
        match (self.state.quant(), self.params.specs()[param.0].quant) {
            (Some(state), Some(e)) => Ok((state, e.recipe)),
            _ => shape_error("quantize", "the parameter was not declared for it"),
        }
    }
}

/// WgradOperand of a gathered input, with scales of their own blocks.
pub(crate) fn quantize_columnwise(rank: &Rank, recipe: Recipe, x: &Tensor) -> Result<GemmOperand> {
    let input = Operand { recipe, role: Role::Input, x, sums: None, draw: 0 };
    quantize(rank, input, Orientations::COLUMNWISE, &QuantScale::Blocks)?.take_columnwise()
}

/// What is narrowed.
#[derive(Clone, Copy)]
struct Operand<'a> {
    recipe: Recipe,
    role: Role,
    /// `[r, c]`
    x: &'a Tensor,
    /// f32 `[c]`: gets its column sums.
    sums: Option<&'a Tensor>,
    /// Number of the tensor, where it is rounded at random.
    draw: u64,
}

fn quantize(rank: &Rank, operand: Operand, uses: Orientations, source: &QuantScale) -> Result<Quantized> {
    let (s, k) = (&rank.compute, &rank.kernels);
    let Operand { recipe, role, x, sums, .. } = operand;
    if recipe.emulated() {
        if let Some(sums) = sums {
            k.column_sum(s, x, false, sums)?;
        }
        let rounded = |along| -> Result<Tensor> {
            let out = rank.activation(x.shape(), x.dtype())?;
            k.emulate(s, emulated(rank, operand, along), x, &out)?;
            Ok(out)
        };
        let rows = uses.rows.then(|| rounded(BlockAxis::Rows)).transpose()?;
        let cols = uses.cols.then(|| rounded(BlockAxis::Cols)).transpose()?;
        return Ok(Quantized {
            rows: rows.as_ref().map(GemmOperand::rowwise),
            cols: cols.as_ref().map(GemmOperand::columnwise),
        });
    }
    let (r, c) = (x.shape()[0], x.shape()[1]);
    let (format, scaling) = (recipe.format(role), recipe.scaling(role));
    let memory = |wanted: bool, shape| {
        wanted.then(|| Fp8Tensor::empty(s, shape, format, scaling, Category::Activations)).transpose()
    };
    let (rows, cols) = (memory(uses.rows, [r, c])?, memory(uses.cols, [c, r])?);
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
    // Ranks that share a layer share its gradient, or have parts of it: one stream serves them. Ranks with other tokens
    // must not all round the same way.
    let stream = || {
        let use_ = if along == BlockAxis::Rows { "rows" } else { "columns" };
        let name = format!("rounding of {use_} by {}", rank.dp_cp_group.rank());
        RandomStream::named(rank.seed ^ draw, &name)
    };
    match recipe.method {
        // Turning cancels in the weight gradient, whose factors are the columns of inputs and gradients.
        Method::Nvfp4 => EmulatedFormat::Nvfp4 {
            along,
            square,
            hadamard: along == BlockAxis::Cols && !square,
            stochastic: recipe.random(role).then(stream),
        },
        _ => EmulatedFormat::Mxfp8 { format: recipe.format(role), along, square: false },
    }
}
