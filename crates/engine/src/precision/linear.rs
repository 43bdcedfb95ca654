//! The three products of a linear map where some of them have narrow factors.
//!
//! | | who holds what | forward | backward |
//! |---|---|---|---|
//! | one rank | everything | x → bytes both ways, `y = x·Wᵀ` | dy → bytes both ways, `dx = dy·W`, `dW = dyᵀ·x` |
//! | rows of W | its tokens of x; all tokens of its channels of y | bytes of x travel on a ring | `dx` as partial sums; bytes of x are gathered again and turned |
//! | columns of W | all tokens of its channels of x; its tokens of y | partial sums | bytes of dy travel on a ring, and are turned for `dW` |
//!
//! With one scale for a tensor its ranks agree on it, so bytes are those of one rank. Scales of blocks along tokens do not
//! survive a gather: there numbers travel and become bytes where all of them are.

use super::operands::{Uses, narrow_blocks};
use super::{Eight, Multiply, Product, Role, SavedSide, Side};
use crate::linear::{Linear, LinearSaved};
use crate::overlap::{Arriving, Factor};
use crate::{Pass, Rank, WeightGrad};
use ferrotron_kernels::{Bytes, Scaling};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

impl Linear {
    /// [`Linear::forward`] without its bias where sums are partial.
    pub(crate) fn forward_narrow(&self, p: &Pass, e: Eight, x: &Tensor) -> Result<(Tensor, LinearSaved)> {
        let (bias, alone) = (self.bias.map(|b| p.weight(b)).transpose()?, p.rank.tp.size() == 1);
        let gathered = !alone && !self.partial;
        // Columns of gathered rows are made when all rows are there.
        let cols = p.train && e.weight_grad && !gathered && !self.keeps_input;
        let uses = Uses { rows: e.output && (!gathered || e.recipe.per_tensor()), cols };
        let made = match uses.rows || uses.cols {
            true => p.narrow(self.weight, Role::Input, x, uses, None)?,
            false => Default::default(),
        };
        let f =
            Factor { bias: bias.filter(|_| alone || !self.partial), ..self.factor(p, e, Product::Output)? };
        let rows = match &made.rows {
            Some(rows) => rows.clone(),
            None if e.output && gathered => {
                let all = p.all_rows(x, "input of a layer")?;
                narrow_blocks(p.rank, e.recipe, Role::Input, &all, Uses::ROWS)?.take_rows()?
            }
            None => Side::rows_of(x),
        };
        let y = match (alone || (gathered && e.output && made.rows.is_none()), self.partial) {
            (true, _) => p.product(&rows, &f)?,
            (false, false) => p.product_of_all_rows(&rows, &f, false, "input of a layer")?.0,
            (false, true) => p.sum_of_products(&rows, &f, "output of a layer")?,
        };
        let kept = match made.cols {
            Some(cols) => LinearSaved::narrow(SavedSide::of(&cols)),
            // Bytes of rows are half of the numbers, and travel in half the time.
            None if gathered && e.weight_grad && made.rows.as_ref().is_some_and(Side::divides) => {
                LinearSaved::narrow(SavedSide::of(&rows))
            }
            None => LinearSaved::of(x),
        };
        Ok((y, kept))
    }

    /// [`Linear::backward`].
    pub(crate) fn backward_narrow(
        &self,
        p: &Pass,
        e: Eight,
        saved: LinearSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let alone = p.rank.tp.size() == 1;
        let f = self.factor(p, e, Product::InputGrad)?;
        if self.partial && !alone {
            let (dx, dy_cols) = self.backward_gathered(p, e, &f, dy)?;
            let weight = self.weight_grad(p, e, dy_cols, saved)?;
            let bias = self.bias.map(|bias| WeightGrad::columns(bias, dy));
            return Ok((dx, weight.and(bias.unwrap_or_default())));
        }
        let sums = match self.bias {
            Some(_) => Some(p.rank.activation(&[1, dy.shape()[1]], DType::F32)?),
            None => None,
        };
        let flat = sums.as_ref().map(|t| t.view(&[t.numel()])).transpose()?;
        let uses = Uses { rows: e.input_grad, cols: e.weight_grad };
        let made = p.narrow(self.weight, Role::Gradient, dy, uses, flat.as_ref())?;
        let rows = made.rows.unwrap_or_else(|| Side::rows_of(dy));
        let dx = p.sum_of_products(&rows, &f, "gradient of a layer's input")?;
        let weight = self.weight_grad(p, e, made.cols.unwrap_or_else(|| Side::cols_of(dy)), saved)?;
        let bias = self.bias.zip(sums).map(|(bias, sums)| WeightGrad::columns(bias, &sums));
        Ok((dx, weight.and(bias.unwrap_or_default())))
    }

    /// `dx` from every rank's rows of `dy`, and all rows as the factor of the weight gradient.
    fn backward_gathered(&self, p: &Pass, e: Eight, f: &Factor, dy: &Tensor) -> Result<(Tensor, Side)> {
        const LABEL: &str = "gradient of a layer's output";
        if e.recipe.per_tensor() && e.input_grad && e.weight_grad {
            let rows = p.narrow(self.weight, Role::Gradient, dy, Uses::ROWS, None)?.take_rows()?;
            let (dx, all) = p.product_of_all_rows(&rows, f, true, LABEL)?;
            let Some(all) = all else { return shape_error(LABEL, "its rows were not kept") };
            return Ok((dx, turned(p.rank, &all)?));
        }
        let all = p.all_rows(dy, LABEL)?;
        let uses = Uses { rows: e.input_grad, cols: e.weight_grad };
        let made = p.narrow(self.weight, Role::Gradient, &all, uses, None)?;
        let dx = p.product(&made.rows.unwrap_or_else(|| Side::rows_of(&all)), f)?;
        Ok((dx, made.cols.unwrap_or_else(|| Side::cols_of(&all))))
    }

    /// `dW = dyᵀ·x`, from the columns of `dy` and what was kept of `x`.
    fn weight_grad(&self, p: &Pass, e: Eight, dy: Side, saved: LinearSaved) -> Result<WeightGrad> {
        let gathered = p.rank.tp.size() > 1 && !self.partial;
        let (x, kept) = match saved {
            LinearSaved { narrow: Some(kept), .. } if !gathered => {
                return Ok(WeightGrad::sides(self.weight, dy, kept.side()));
            }
            LinearSaved { narrow: Some(kept), .. } => (kept.side(), true),
            saved => (Side::rows_of(&*saved.input()?), false),
        };
        let label = "input of a layer, again";
        let x = if gathered { p.arriving_rows(&x, label)? } else { Arriving::here(x) };
        if !e.weight_grad {
            return Ok(crate::overlap::weight_product(self.weight, &untransposed(&dy), x));
        }
        if !kept && e.recipe.per_tensor() {
            // The one scale of the whole: known to the pass, not to work that is put off.
            let all = x.ready()?;
            let cols = p.narrow(self.weight, Role::Input, all.memory(), Uses::COLS, None)?.take_cols()?;
            return Ok(WeightGrad::sides(self.weight, dy, cols));
        }
        let recipe = e.recipe;
        Ok(WeightGrad::other(self.weight, move |rank, grad, accumulate| {
            let all = x.ready()?;
            let cols = match &all {
                Side::Bytes(_) => turned(rank, &all)?,
                Side::Values { t, .. } => {
                    narrow_blocks(rank, recipe, Role::Input, t, Uses::COLS)?.take_cols()?
                }
            };
            let how = Multiply { product: Product::WeightGrad, bias: None, accumulate, fast: false };
            dy.times(rank, &cols, how, grad)
        }))
    }

    /// The weight as the right-hand side of a product.
    fn factor<'a>(&self, p: &Pass<'a>, e: Eight, product: Product) -> Result<Factor<'a>> {
        Ok(match product {
            Product::Output if e.output => Factor {
                w: p.narrow_weight(self.weight, Uses::ROWS)?.take_rows()?,
                bias: None,
                product,
                fast: e.recipe.fast_forward(),
            },
            Product::InputGrad if e.input_grad => {
                let w = p.narrow_weight(self.weight, Uses::COLS)?.take_cols()?;
                Factor { w, bias: None, product, fast: false }
            }
            Product::Output => Factor::output(p.weight(self.weight)?, None),
            _ => Factor::input_grad(p.weight(self.weight)?),
        })
    }
}

/// Values `[tokens, n]` of a factor along their columns.
fn untransposed(side: &Side) -> Tensor {
    side.memory().clone()
}

/// Bytes of rows as the factor along their columns. One scale holds for all of them.
fn turned(rank: &Rank, rows: &Side) -> Result<Side> {
    let Side::Bytes(b) = rows else { return Ok(Side::cols_of(rows.memory())) };
    let (s, shape) = (&rank.compute, [b.cols, b.rows()]);
    let cols = Bytes::empty(s, shape, b.data.dtype(), Scaling::Tensor, Category::Activations)?;
    rank.kernels.turn(s, b, &cols)?;
    Ok(Side::Bytes(cols))
}

impl LinearSaved {
    fn narrow(kept: SavedSide) -> LinearSaved {
        LinearSaved { x: None, narrow: Some(kept) }
    }
}
