//! Making narrow factors of the operands of a linear map.

use super::state::{EightState, Kept};
use super::stored::turn;
use super::{Method, Recipe, Role, Side};
use crate::{Measured, ParamId, Pass, Rank};
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{Along, Bytes, Emulated, Quantise, Range};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

/// In which products an operand is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Contracted along its rows, as it is stored.
    pub(crate) rows: bool,
    /// Contracted along its columns.
    pub(crate) cols: bool,
}

impl Uses {
    pub(crate) const ROWS: Uses = Uses { rows: true, cols: false };
    pub(crate) const COLS: Uses = Uses { rows: false, cols: true };
    pub(crate) const NONE: Uses = Uses { rows: false, cols: false };
}

/// An operand as a factor, for each of its uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Narrowed {
    pub(crate) rows: Option<Side>,
    pub(crate) cols: Option<Side>,
}

impl Narrowed {
    /// The factor for products along its rows.
    pub(crate) fn take_rows(self) -> Result<Side> {
        self.rows.map_or_else(|| shape_error("narrow", "it was not made for this use"), Ok)
    }

    /// The factor for products along its columns.
    pub(crate) fn take_cols(self) -> Result<Side> {
        self.cols.map_or_else(|| shape_error("narrow", "it was not made for this use"), Ok)
    }
}

/// Where the one scale of a tensor comes from, where there is one.
pub(super) enum Source {
    /// Its largest magnitude.
    Amax(Tensor),
    /// Earlier steps: scale, and where the magnitude is gathered.
    Given(Tensor, Tensor),
    /// Nowhere.
    Blocks,
}

impl Pass<'_> {
    /// Input or output gradient `x [tokens, n]` of the map with weight `param` as factors; ranks that share a layer agree
    /// on the scale, from the magnitude `amax` on which they have agreed where there is one. With `sums`, f32 `[n]`, the
    /// column sums of `x`, too.
    pub(crate) fn narrow(
        &self,
        param: ParamId,
        role: Role,
        x: &Tensor,
        uses: Uses,
        amax: Option<&Tensor>,
        sums: Option<&Tensor>,
    ) -> Result<Narrowed> {
        if uses == Uses::NONE {
            sums.map_or(Ok(()), |sums| self.rank.kernels.column_sum(&self.rank.compute, x, false, sums))?;
            return Ok(Narrowed::default());
        }
        let (state, recipe) = self.eight(param)?;
        let source = match recipe.method {
            Method::Current => {
                Source::Amax(amax.cloned().map_or_else(|| self.agreed(&Measured::from(x)), Ok)?)
            }
            Method::Delayed { .. } => self.given(state, param, role)?,
            _ => Source::Blocks,
        };
        let draw = if recipe.random(role) { state.draw() } else { 0 };
        let made = narrow(self.rank, Operand { recipe, role, x, sums, draw }, uses, &source)?;
        state.note(self.rank, param, role, x, &made)?;
        Ok(made)
    }

    /// The weight `param` as factors. It is narrowed once until it changes, where it is kept.
    pub(crate) fn narrow_weight(&self, param: ParamId, uses: Uses) -> Result<Narrowed> {
        let (state, recipe) = self.eight(param)?;
        if let Some(bytes) = self.params.stored().weight(param) {
            self.params.await_weight(self.rank, param)?;
            let cols =
                uses.cols.then(|| state.turned(self.train, param, || turn(self.rank, bytes))).transpose()?;
            return Ok(Narrowed { rows: Some(Side::Bytes(bytes.clone())), cols });
        }
        let w = self.weight(param)?;
        let mut kept: Kept = state.weights()[param.0].clone();
        let missing = Uses { rows: uses.rows && kept.rows.is_none(), cols: uses.cols && kept.cols.is_none() };
        if missing != Uses::NONE {
            let source = match recipe.method {
                Method::Current => {
                    let known = state.known(param, &self.params.specs()[param.0])?;
                    let amax = known.or(kept.amax.take());
                    let amax = amax.map_or_else(|| self.agreed(&Measured::from(w)), Ok)?;
                    kept.amax = Some(amax.clone());
                    Source::Amax(amax)
                }
                Method::Delayed { .. } => self.given(state, param, Role::Weight)?,
                _ => Source::Blocks,
            };
            // Both uses at once where both will be needed: the weight is read once.
            let keep = state.keeps(self.train);
            let both = keep && !recipe.emulated();
            let make = Uses {
                rows: missing.rows || (both && kept.rows.is_none()),
                cols: missing.cols || (both && self.train && kept.cols.is_none()),
            };
            let weight = Operand { recipe, role: Role::Weight, x: w, sums: None, draw: 0 };
            let made = narrow(self.rank, weight, make, &source)?;
            state.note(self.rank, param, Role::Weight, w, &made)?;
            let stays = kept.clone();
            kept.rows = kept.rows.or(made.rows);
            kept.cols = kept.cols.or(made.cols);
            if keep || self.train {
                state.weights()[param.0] = if keep { kept.clone() } else { stays };
            }
        }
        Ok(Narrowed { rows: kept.rows, cols: kept.cols })
    }

    /// The scale of earlier steps. What passes without a backward see is no part of any step.
    pub(super) fn given(&self, state: &EightState, param: ParamId, role: Role) -> Result<Source> {
        let Some((scale, amax)) = state.delayed().map(|d| d.of(param, role)).transpose()?.flatten() else {
            return shape_error("narrow", "there is no scale for it");
        };
        let unseen = || self.rank.compute.zeros(&[1], DType::F32, Category::Workspace);
        Ok(Source::Given(scale, if self.train { amax } else { unseen()? }))
    }

    pub(super) fn eight(&self, param: ParamId) -> Result<(&EightState, Recipe)> {
        match (self.params.eight(), self.params.specs()[param.0].eight) {
            (Some(state), Some(e)) => Ok((state, e.recipe)),
            _ => shape_error("narrow", "the parameter was not declared for it"),
        }
    }
}

/// Columns of a gathered input, with scales of their own blocks.
pub(crate) fn narrow_blocks(rank: &Rank, recipe: Recipe, x: &Tensor) -> Result<Side> {
    let input = Operand { recipe, role: Role::Input, x, sums: None, draw: 0 };
    narrow(rank, input, Uses::COLS, &Source::Blocks)?.take_cols()
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

fn narrow(rank: &Rank, operand: Operand, uses: Uses, source: &Source) -> Result<Narrowed> {
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
        let rows = uses.rows.then(|| rounded(Along::Rows)).transpose()?;
        let cols = uses.cols.then(|| rounded(Along::Cols)).transpose()?;
        return Ok(Narrowed {
            rows: rows.as_ref().map(Side::rows_of),
            cols: cols.as_ref().map(Side::cols_of),
        });
    }
    let (r, c) = (x.shape()[0], x.shape()[1]);
    let (format, scaling) = (recipe.format(role), recipe.scaling(role));
    let memory = |wanted: bool, shape| {
        wanted.then(|| Bytes::empty(s, shape, format, scaling, Category::Activations)).transpose()
    };
    let (rows, cols) = (memory(uses.rows, [r, c])?, memory(uses.cols, [c, r])?);
    let range = match source {
        Source::Amax(amax) => Range::Amax { amax, pow2: recipe.pow2 },
        Source::Given(scale, amax) => Range::Given { scale, amax },
        Source::Blocks => Range::Blocks { pow2: recipe.pow2 },
    };
    let sums = sums.map(|t| (t, false));
    k.quantise(s, &Quantise { x, range, rows: rows.as_ref(), cols: cols.as_ref(), sums })?;
    Ok(Narrowed { rows: rows.map(Side::Bytes), cols: cols.map(Side::Bytes) })
}

fn emulated(rank: &Rank, operand: Operand, along: Along) -> Emulated {
    let Operand { recipe, role, draw, .. } = operand;
    let square = role == Role::Weight;
    // Ranks that share a layer share its gradient, or have parts of it: one stream serves them. Ranks with other tokens
    // must not all round the same way.
    let stream = || {
        let use_ = if along == Along::Rows { "rows" } else { "columns" };
        let name = format!("rounding of {use_} by {}", rank.copies.rank());
        RandomStream::named(rank.seed ^ draw, &name)
    };
    match recipe.method {
        // Turning cancels in the weight gradient, whose factors are the columns of inputs and gradients.
        Method::Nvfp4 => Emulated::Nvfp4 {
            along,
            square,
            hadamard: along == Along::Cols && !square,
            stochastic: recipe.random(role).then(stream),
        },
        _ => Emulated::Mxfp8 { format: recipe.format(role), along, square: false },
    }
}
