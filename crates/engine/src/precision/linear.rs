//! The three products of a linear map where some of them have narrow factors.
//!
//! | | who holds what | forward | backward |
//! |---|---|---|---|
//! | one rank | everything | x → bytes both ways, `y = x·Wᵀ` | dy → bytes both ways, `dx = dy·W`, `dW = dyᵀ·x` |
//! | rows of W | its tokens of x; all tokens of its channels of y | bytes of x travel on a ring | `dx` as partial sums; bytes of x are gathered again and turned |
//! | all of W | its tokens of x and y | as one rank, on one scale | as one rank; weight gradients are summed later |
//! | columns of W | all tokens of its channels of x; its tokens of y | partial sums | bytes of dy travel on a ring, and are turned for `dW` |
//!
//! With one scale for a tensor its ranks agree on it, so bytes are those of one rank. Blocks along channels are a row's own:
//! bytes and scales of rows travel. Blocks along tokens, of columns, are a rank's own where it has a multiple of 128 tokens:
//! then their bytes and scales travel, each rank's beside the next's. Where not, and for what is emulated, numbers travel and
//! become bytes where all of them are.

use super::operands::{Uses, narrow_blocks};
use super::{Eight, Multiply, Product, Role, SavedSide, Side};
use crate::linear::{Linear, LinearSaved};
use crate::overlap::Factor;
use crate::{Measured, Pass, Rank, SavedTensor, WeightGrad};
use ferrotron_kernels::{BLOCK, Bytes, Scaling};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

impl Linear {
    /// [`Linear::forward`] without its bias where sums are partial. With `again` its input will be made again for backward,
    /// so that nothing narrow is kept of it.
    pub(crate) fn forward_narrow(
        &self,
        p: &Pass,
        e: Eight,
        x: &Measured,
        again: bool,
    ) -> Result<(Tensor, LinearSaved)> {
        const LABEL: &str = "input of a layer";
        let (bias, alone) = (self.bias.map(|b| p.weight(b)).transpose()?, self.alone(p));
        let gathered = !alone && !self.partial;
        let keeps = p.train && e.weight_grad && !again && !self.keeps_input;
        let uses = match gathered {
            false => Uses { rows: e.output, cols: keeps },
            // Columns of gathered rows are made when all rows are there, unless their blocks are this rank's own. Bytes of
            // rows are half of the numbers, and travel in half the time, now and again in backward.
            true if e.recipe.per_block() => Uses { rows: e.output, cols: keeps && own_blocks(&x.values) },
            true => Uses { rows: e.recipe.per_tensor() && (e.output || keeps), cols: false },
        };
        let amax = self.measures_input(p).then(|| p.agreed(x)).transpose()?;
        let x = &x.values;
        let made = p.narrow(self.weight, Role::Input, x, uses, amax.as_ref(), None)?;
        let f =
            Factor { bias: bias.filter(|_| alone || !self.partial), ..self.factor(p, e, Product::Output)? };
        let rows = made.rows.as_ref().filter(|_| e.output);
        let y = match rows {
            None if e.output && gathered => {
                let all = p.all_rows(x, LABEL)?;
                let rows = p.narrow(self.weight, Role::Input, &all, Uses::ROWS, None, None)?.take_rows()?;
                p.product(&rows, &f)?
            }
            _ => {
                let rows = &rows.cloned().unwrap_or_else(|| Side::rows_of(x));
                match (alone, self.partial) {
                    (true, _) => p.product(rows, &f)?,
                    (false, false) => p.product_of_all_rows(rows, &f, false, LABEL)?.0,
                    (false, true) => p.sum_of_products(rows, &f, "output of a layer")?,
                }
            }
        };
        let narrow = if gathered && e.recipe.per_tensor() { made.rows } else { made.cols };
        let whole = || LinearSaved { amax: amax.as_ref().map(SavedTensor::small), ..LinearSaved::of(x) };
        Ok((y, narrow.filter(|_| keeps).map_or_else(whole, |side| LinearSaved::narrow(&side))))
    }

    /// [`Linear::backward`].
    pub(crate) fn backward_narrow(
        &self,
        p: &Pass,
        e: Eight,
        saved: LinearSaved,
        dy: &Measured,
    ) -> Result<(Tensor, WeightGrad)> {
        let alone = self.alone(p);
        let f = self.factor(p, e, Product::InputGrad)?;
        if self.partial && !alone {
            let (dx, dy_cols) = self.backward_gathered(p, e, &f, &dy.values)?;
            let weight = self.weight_grad(p, e, dy_cols, saved)?;
            return Ok((dx, weight.and(self.bias_grad(dy))));
        }
        let uses = Uses { rows: e.input_grad, cols: e.weight_grad };
        // The bias' gradient comes from the numbers, which are read here anyway; where they are not, it can wait.
        let reads = uses != Uses::NONE;
        let taken = match self.bias.filter(|_| reads && dy.sums.is_none()) {
            Some(_) => Some(p.rank.activation(&[1, dy.values.shape()[1]], DType::F32)?),
            None => None,
        };
        let flat = taken.as_ref().map(|t| t.view(&[t.numel()])).transpose()?;
        let amax = (reads && e.recipe.measures()).then(|| p.agreed(dy)).transpose()?;
        let values = &dy.values;
        let made = p.narrow(self.weight, Role::Gradient, values, uses, amax.as_ref(), flat.as_ref())?;
        let rows = made.rows.unwrap_or_else(|| Side::rows_of(values));
        let dx = match alone {
            true => p.product(&rows, &f)?,
            false => p.sum_of_products(&rows, &f, "gradient of a layer's input")?,
        };
        let weight = self.weight_grad(p, e, made.cols.unwrap_or_else(|| Side::cols_of(values)), saved)?;
        let sums = taken.or_else(|| dy.sums.clone());
        Ok((dx, weight.and(self.bias_grad(&Measured { values: values.clone(), amax: None, sums }))))
    }

    /// `dx` from every rank's rows of `dy`, and all rows as the factor of the weight gradient.
    fn backward_gathered(&self, p: &Pass, e: Eight, f: &Factor, dy: &Tensor) -> Result<(Tensor, Side)> {
        const LABEL: &str = "gradient of a layer's output";
        let bytes_serve_both = e.recipe.per_tensor() && e.input_grad && e.weight_grad;
        if bytes_serve_both || !e.input_grad {
            let rows = match e.input_grad {
                true => p.narrow(self.weight, Role::Gradient, dy, Uses::ROWS, None, None)?.take_rows()?,
                false => Side::rows_of(dy),
            };
            let (dx, all) = p.product_of_all_rows(&rows, f, true, LABEL)?;
            let Some(all) = all else { return shape_error(LABEL, "its rows were not kept") };
            let cols = match &all {
                Side::Values { t, .. } if e.weight_grad => {
                    p.narrow(self.weight, Role::Gradient, t, Uses::COLS, None, None)?.take_cols()?
                }
                _ => turned(p.rank, &all)?,
            };
            return Ok((dx, cols));
        }
        let uses = Uses { rows: true, cols: e.weight_grad };
        if e.recipe.per_block() && e.weight_grad && own_blocks(dy) {
            let made = p.narrow(self.weight, Role::Gradient, dy, uses, None, None)?;
            let cols = made.cols.clone();
            let (dx, _) = p.product_of_all_rows(&made.take_rows()?, f, false, LABEL)?;
            let Some(Side::Bytes(mine)) = cols else {
                return shape_error(LABEL, "its columns were not made");
            };
            let data = p.all_rows(&mine.data, "columns of a gradient")?;
            let scales = p.all_rows(&mine.scale_inv, "scales of a gradient")?;
            return Ok((dx, Side::Bytes(Pass::join_cols(p.rank, &mine, &data, &scales)?)));
        }
        let all = p.all_rows(dy, LABEL)?;
        let made = p.narrow(self.weight, Role::Gradient, &all, uses, None, None)?;
        let cols = made.cols.clone().unwrap_or_else(|| Side::cols_of(&all));
        Ok((p.product(&made.take_rows()?, f)?, cols))
    }

    /// `dW = dyᵀ·x`, from the columns of `dy` and what was kept of `x`.
    fn weight_grad(&self, p: &Pass, e: Eight, dy: Side, saved: LinearSaved) -> Result<WeightGrad> {
        let amax = saved.amax.clone();
        let narrow = |x: &Tensor, uses| p.narrow(self.weight, Role::Input, x, uses, amax.as_deref(), None);
        if self.alone(p) || self.partial {
            let cols = match saved.narrow {
                Some(kept) => kept.side(),
                None if e.weight_grad => narrow(&*saved.input()?, Uses::COLS)?.take_cols()?,
                None => Side::cols_of(&*saved.input()?),
            };
            return Ok(WeightGrad::sides(self.weight, dy.first_rows(self.outputs())?, cols));
        }
        if e.recipe.per_block() && e.weight_grad {
            let mine = match &saved.narrow {
                Some(kept) => Some(kept.side()),
                None => match &saved.x {
                    Some(x) if own_blocks(x) => Some(narrow(x, Uses::COLS)?.take_cols()?),
                    _ => None,
                },
            };
            if let Some(Side::Bytes(mine)) = mine {
                return self.weight_grad_of_parts(p, dy, mine);
            }
        }
        let rows = match saved.narrow {
            Some(kept) => kept.side(),
            None if e.weight_grad && e.recipe.per_tensor() => {
                narrow(&*saved.input()?, Uses::ROWS)?.take_rows()?
            }
            None => Side::rows_of(&*saved.input()?),
        };
        let (x, recipe) = (p.arriving_rows(&rows, "input of a layer, again")?, e.recipe);
        Ok(WeightGrad::other(self.weight, move |rank, grad, accumulate| {
            let all = x.ready()?;
            let cols = match &all {
                Side::Values { t, .. } if e.weight_grad => narrow_blocks(rank, recipe, t)?,
                _ => turned(rank, &all)?,
            };
            let how = Multiply { product: Product::WeightGrad, bias: None, accumulate, fast: false };
            dy.times(rank, &cols, how, grad)
        }))
    }

    /// `dW = dyᵀ·x`, from the columns of `dy` and this rank's columns of `x`, whose blocks are its own.
    fn weight_grad_of_parts(&self, p: &Pass, dy: Side, mine: Bytes) -> Result<WeightGrad> {
        let data = p.arriving_rows(&Side::rows_of(&mine.data), "input of a layer, again")?;
        let scales = p.arriving_rows(&Side::rows_of(&mine.scale_inv), "scales of an input, again")?;
        Ok(WeightGrad::other(self.weight, move |rank, grad, accumulate| {
            let (data, scales) = (data.ready()?, scales.ready()?);
            let cols = Pass::join_cols(rank, &mine, data.memory(), scales.memory())?;
            let how = Multiply { product: Product::WeightGrad, bias: None, accumulate, fast: false };
            dy.times(rank, &Side::Bytes(cols), how, grad)
        }))
    }

    /// The weight as the right-hand side of a product.
    pub(crate) fn factor<'a>(&self, p: &Pass<'a>, e: Eight, product: Product) -> Result<Factor<'a>> {
        let f = self.odd_factor(p, e, product)?;
        if self.outputs().is_multiple_of(self.even) {
            return Ok(f);
        }
        Ok(Factor { w: f.w.padded(p.rank, product, self.outputs().next_multiple_of(self.even))?, ..f })
    }

    fn odd_factor<'a>(&self, p: &Pass<'a>, e: Eight, product: Product) -> Result<Factor<'a>> {
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

/// Are blocks along the tokens of `x [tokens, n]`, of which other ranks have more, all its own?
fn own_blocks(x: &Tensor) -> bool {
    x.shape()[0].is_multiple_of(BLOCK)
}

/// Rows as the factor along their columns: numbers as they are, bytes turned round. One scale holds for all of them.
fn turned(rank: &Rank, rows: &Side) -> Result<Side> {
    let Side::Bytes(b) = rows else { return Ok(Side::cols_of(rows.memory())) };
    let (s, shape) = (&rank.compute, [b.cols, b.rows()]);
    let cols = Bytes::empty(s, shape, b.data.dtype(), Scaling::Tensor, Category::Activations)?;
    rank.kernels.turn(s, b, &cols)?;
    Ok(Side::Bytes(cols))
}

impl LinearSaved {
    fn narrow(side: &Side) -> LinearSaved {
        LinearSaved { x: None, narrow: Some(SavedSide::of(side)), amax: None }
    }
}
