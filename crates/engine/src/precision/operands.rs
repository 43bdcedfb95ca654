//! Making narrow factors of the operands of a linear map.

use super::state::{EightState, Kept};
use super::{Method, Recipe, Role, Side};
use crate::{ParamId, Pass, Rank};
use ferrotron_comm::Reduce;
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
enum Source {
    /// Its largest magnitude.
    Amax(Tensor),
    /// Earlier steps: scale, and where the magnitude is gathered.
    Given(Tensor, Tensor),
    /// Nowhere.
    Blocks,
}

impl Pass<'_> {
    /// Input or output gradient `x [tokens, n]` of the map with weight `param` as factors; ranks that share a layer agree
    /// on the scale. With `sums`, f32 `[n]`, the column sums of `x`, too.
    pub(crate) fn narrow(
        &self,
        param: ParamId,
        role: Role,
        x: &Tensor,
        uses: Uses,
        sums: Option<&Tensor>,
    ) -> Result<Narrowed> {
        let (state, recipe) = self.eight(param)?;
        let source = match recipe.method {
            Method::Current => Source::Amax(self.amax(x)?),
            Method::Delayed { .. } => given(state, param, role)?,
            _ => Source::Blocks,
        };
        let draw = || RandomStream::named(self.rank.seed ^ state.draw(), "rounding");
        narrow(self.rank, recipe, role, x, uses, sums, &source, &draw)
    }

    /// The weight `param` as factors. It is narrowed once until it changes, where it is kept.
    pub(crate) fn narrow_weight(&self, param: ParamId, uses: Uses) -> Result<Narrowed> {
        let (state, recipe) = self.eight(param)?;
        let w = self.weight(param)?;
        let mut kept: Kept = state.weights()[param.0].clone();
        let missing = Uses { rows: uses.rows && kept.rows.is_none(), cols: uses.cols && kept.cols.is_none() };
        if missing.rows || missing.cols {
            let source = match recipe.method {
                Method::Current => {
                    let amax = kept.amax.take().map_or_else(|| self.amax(w), Ok)?;
                    kept.amax = Some(amax.clone());
                    Source::Amax(amax)
                }
                Method::Delayed { .. } => given(state, param, Role::Weight)?,
                _ => Source::Blocks,
            };
            // Both uses at once where both will be needed: the weight is read once.
            let keep = state.keeps();
            let make =
                if keep && !recipe.emulated() { Uses { rows: true, cols: self.train } } else { missing };
            let draw = || RandomStream::named(self.rank.seed, "never");
            let made = narrow(self.rank, recipe, Role::Weight, w, make, None, &source, &draw)?;
            let stays = Kept { amax: kept.amax.clone(), ..Kept::default() };
            kept.rows = kept.rows.or(made.rows);
            kept.cols = kept.cols.or(made.cols);
            state.weights()[param.0] = if keep { kept.clone() } else { stays };
        }
        Ok(Narrowed { rows: kept.rows, cols: kept.cols })
    }

    /// The largest magnitude, on which ranks that share layers agree; f32 `[1]`.
    fn amax(&self, x: &Tensor) -> Result<Tensor> {
        let s = &self.rank.compute;
        let amax = s.zeros(&[1], DType::F32, Category::Workspace)?;
        self.rank.kernels.amax(s, x, &amax)?;
        self.rank.tp.all_reduce(s, &amax, Reduce::Max, "largest magnitude")?;
        Ok(amax)
    }

    fn eight(&self, param: ParamId) -> Result<(&EightState, Recipe)> {
        match (self.params.eight(), self.params.specs()[param.0].eight) {
            (Some(state), Some(e)) => Ok((state, e.recipe)),
            _ => shape_error("narrow", "the parameter was not declared for it"),
        }
    }
}

fn given(state: &EightState, param: ParamId, role: Role) -> Result<Source> {
    match state.delayed().map(|d| d.of(param, role)).transpose()?.flatten() {
        Some((scale, amax)) => Ok(Source::Given(scale, amax)),
        None => shape_error("narrow", "there is no scale for it"),
    }
}

/// Gathered values as a factor, with scales of their own blocks.
pub(crate) fn narrow_blocks(
    rank: &Rank,
    recipe: Recipe,
    role: Role,
    x: &Tensor,
    uses: Uses,
) -> Result<Narrowed> {
    let draw = || RandomStream::named(rank.seed, "blocks");
    narrow(rank, recipe, role, x, uses, None, &Source::Blocks, &draw)
}

#[allow(clippy::too_many_arguments)]
fn narrow(
    rank: &Rank,
    recipe: Recipe,
    role: Role,
    x: &Tensor,
    uses: Uses,
    sums: Option<&Tensor>,
    source: &Source,
    draw: &dyn Fn() -> RandomStream,
) -> Result<Narrowed> {
    let (s, k) = (&rank.compute, &rank.kernels);
    if recipe.emulated() {
        if let Some(sums) = sums {
            k.column_sum(s, x, false, sums)?;
        }
        let rounded = |along| -> Result<Tensor> {
            let out = rank.activation(x.shape(), x.dtype())?;
            k.emulate(s, emulated(recipe, role, along, draw), x, &out)?;
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
    let (sums, both) = (sums.map(|t| (t, false)), (rows.as_ref(), cols.as_ref()));
    k.quantise(s, &Quantise { x, range, rows: both.0, cols: both.1, sums })?;
    Ok(Narrowed { rows: rows.map(Side::Bytes), cols: cols.map(Side::Bytes) })
}

fn emulated(recipe: Recipe, role: Role, along: Along, draw: &dyn Fn() -> RandomStream) -> Emulated {
    let square = role == Role::Weight;
    match recipe.method {
        // Turning cancels in the weight gradient, whose factors are the columns of inputs and gradients.
        Method::Nvfp4 => Emulated::Nvfp4 {
            along,
            square,
            hadamard: along == Along::Cols && !square,
            stochastic: (role == Role::Gradient).then(draw),
        },
        _ => Emulated::Mxfp8 { format: recipe.format(role), along, square: false },
    }
}
