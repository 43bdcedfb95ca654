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

use super::quantize::{Orientations, quantize_columnwise};
use super::{GemmOperand, GemmOptions, LinearGemm, LinearQuant, Role, SavedOperand};
use crate::linear::{Linear, LinearSaved};
use crate::tensor_parallel::WeightOperand;
use crate::{Rank, SavedTensor, StepContext, WeightGrad, WithAmax};
use ferrotron_kernels::{BLOCK, Fp8Tensor, ScalingMode};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

impl Linear {
    /// [`Linear::forward`] without its bias where sums are partial. With `input_recomputed` its input will be made again for backward,
    /// so that nothing narrow is kept of it.
    pub(crate) fn forward_fp8(
        &self,
        p: &StepContext,
        e: LinearQuant,
        x: &WithAmax,
        input_recomputed: bool,
    ) -> Result<(Tensor, LinearSaved)> {
        const LABEL: &str = "input of a layer";
        let (bias, alone) = (self.bias.map(|b| p.weight(b)).transpose()?, self.is_local(p));
        let gathered = !alone && !self.row_parallel;
        let keeps = p.train && e.wgrad && !input_recomputed && !self.input_saved_by_caller;
        let uses = match gathered {
            false => Orientations { rows: e.fprop, cols: keeps },
            // WgradOperand of gathered rows are made when all rows are there, unless their blocks are this rank's own. Bytes of
            // rows are half of the numbers, and travel in half the time, now and again in backward.
            true if e.recipe.per_block() => {
                Orientations { rows: e.fprop, cols: keeps && has_whole_blocks(&x.values) }
            }
            true => Orientations { rows: e.recipe.per_tensor() && (e.fprop || keeps), cols: false },
        };
        let amax = self.needs_input_amax(p).then(|| p.reduced_amax(x)).transpose()?;
        let x = &x.values;
        let made = p.quantize(self.weight, Role::Input, x, uses, amax.as_ref(), None)?;
        let f = WeightOperand {
            bias: bias.filter(|_| alone || !self.row_parallel),
            ..self.factor(p, e, LinearGemm::Fprop)?
        };
        let rows = made.rows.as_ref().filter(|_| e.fprop);
        let y = match rows {
            None if e.fprop && gathered => {
                let all = p.all_gather(x, LABEL)?;
                let rows = p
                    .quantize(self.weight, Role::Input, &all, Orientations::ROWWISE, None, None)?
                    .take_rowwise()?;
                p.gemm(&rows, &f)?
            }
            _ => {
                let rows = &rows.cloned().unwrap_or_else(|| GemmOperand::rowwise(x));
                match (alone, self.row_parallel) {
                    (true, _) => p.gemm(rows, &f)?,
                    (false, false) => p.all_gather_gemm(rows, &f, false, LABEL)?.0,
                    (false, true) => p.gemm_reduce_scatter(rows, &f, "output of a layer")?,
                }
            }
        };
        let narrow = if gathered && e.recipe.per_tensor() { made.rows } else { made.cols };
        let whole = || LinearSaved { amax: amax.as_ref().map(SavedTensor::small), ..LinearSaved::of(x) };
        Ok((y, narrow.filter(|_| keeps).map_or_else(whole, |side| LinearSaved::quantized(&side))))
    }

    /// [`Linear::backward`].
    pub(crate) fn backward_fp8(
        &self,
        p: &StepContext,
        e: LinearQuant,
        saved: LinearSaved,
        dy: &WithAmax,
    ) -> Result<(Tensor, WeightGrad)> {
        let alone = self.is_local(p);
        let f = self.factor(p, e, LinearGemm::Dgrad)?;
        if self.row_parallel && !alone {
            let (dx, dy_cols) = self.backward_gathered(p, e, &f, &dy.values)?;
            let weight = self.weight_grad(p, e, dy_cols, saved)?;
            return Ok((dx, weight.and(self.bias_grad(dy))));
        }
        let uses = Orientations { rows: e.dgrad, cols: e.wgrad };
        // The bias' gradient comes from the numbers, which are read here anyway; where they are not, it can wait.
        let reads = uses != Orientations::NONE;
        let taken = match self.bias.filter(|_| reads && dy.sums.is_none()) {
            Some(_) => Some(p.rank.activation(&[1, dy.values.shape()[1]], DType::F32)?),
            None => None,
        };
        let flat = taken.as_ref().map(|t| t.view(&[t.numel()])).transpose()?;
        let amax = (reads && e.recipe.measures()).then(|| p.reduced_amax(dy)).transpose()?;
        let values = &dy.values;
        let made = p.quantize(self.weight, Role::Gradient, values, uses, amax.as_ref(), flat.as_ref())?;
        let rows = made.rows.unwrap_or_else(|| GemmOperand::rowwise(values));
        let dx = match alone {
            true => p.gemm(&rows, &f)?,
            false => p.gemm_reduce_scatter(&rows, &f, "gradient of a layer's input")?,
        };
        let weight =
            self.weight_grad(p, e, made.cols.unwrap_or_else(|| GemmOperand::columnwise(values)), saved)?;
        let sums = taken.or_else(|| dy.sums.clone());
        Ok((dx, weight.and(self.bias_grad(&WithAmax { values: values.clone(), amax: None, sums }))))
    }

    /// `dx` from every rank's rows of `dy`, and all rows as the factor of the weight gradient.
    fn backward_gathered(
        &self,
        p: &StepContext,
        e: LinearQuant,
        f: &WeightOperand,
        dy: &Tensor,
    ) -> Result<(Tensor, GemmOperand)> {
        const LABEL: &str = "gradient of a layer's output";
        let bytes_serve_both = e.recipe.per_tensor() && e.dgrad && e.wgrad;
        if bytes_serve_both || !e.dgrad {
            let rows = match e.dgrad {
                true => p
                    .quantize(self.weight, Role::Gradient, dy, Orientations::ROWWISE, None, None)?
                    .take_rowwise()?,
                false => GemmOperand::rowwise(dy),
            };
            let (dx, all) = p.all_gather_gemm(&rows, f, true, LABEL)?;
            let Some(all) = all else { return shape_error(LABEL, "its rows were not kept") };
            let cols = match &all {
                GemmOperand::HighPrecision { t, .. } if e.wgrad => p
                    .quantize(self.weight, Role::Gradient, t, Orientations::COLUMNWISE, None, None)?
                    .take_columnwise()?,
                _ => transposed(p.rank, &all)?,
            };
            return Ok((dx, cols));
        }
        let uses = Orientations { rows: true, cols: e.wgrad };
        if e.recipe.per_block() && e.wgrad && has_whole_blocks(dy) {
            let made = p.quantize(self.weight, Role::Gradient, dy, uses, None, None)?;
            let cols = made.cols.clone();
            let (dx, _) = p.all_gather_gemm(&made.take_rowwise()?, f, false, LABEL)?;
            let Some(GemmOperand::Fp8(mine)) = cols else {
                return shape_error(LABEL, "its columns were not made");
            };
            let data = p.all_gather(&mine.data, "columns of a gradient")?;
            let scales = p.all_gather(&mine.scale_inv, "scales of a gradient")?;
            return Ok((dx, GemmOperand::Fp8(StepContext::join_columnwise(p.rank, &mine, &data, &scales)?)));
        }
        let all = p.all_gather(dy, LABEL)?;
        let made = p.quantize(self.weight, Role::Gradient, &all, uses, None, None)?;
        let cols = made.cols.clone().unwrap_or_else(|| GemmOperand::columnwise(&all));
        Ok((p.gemm(&made.take_rowwise()?, f)?, cols))
    }

    /// `dW = dyᵀ·x`, from the columns of `dy` and what was kept of `x`.
    fn weight_grad(
        &self,
        p: &StepContext,
        e: LinearQuant,
        dy: GemmOperand,
        saved: LinearSaved,
    ) -> Result<WeightGrad> {
        let amax = saved.amax.clone();
        let quantize =
            |x: &Tensor, uses| p.quantize(self.weight, Role::Input, x, uses, amax.as_deref(), None);
        if self.is_local(p) || self.row_parallel {
            let cols = match saved.quantized {
                Some(kept) => kept.operand(),
                None if e.wgrad => quantize(&*saved.input()?, Orientations::COLUMNWISE)?.take_columnwise()?,
                None => GemmOperand::columnwise(&*saved.input()?),
            };
            return Ok(WeightGrad::quantized_gemm(self.weight, dy.first_rows(self.outputs())?, cols));
        }
        if e.recipe.per_block() && e.wgrad {
            let mine = match &saved.quantized {
                Some(kept) => Some(kept.operand()),
                None => match &saved.x {
                    Some(x) if has_whole_blocks(x) => {
                        Some(quantize(x, Orientations::COLUMNWISE)?.take_columnwise()?)
                    }
                    _ => None,
                },
            };
            if let Some(GemmOperand::Fp8(mine)) = mine {
                return self.weight_grad_of_shards(p, dy, mine);
            }
        }
        let rows = match saved.quantized {
            Some(kept) => kept.operand(),
            None if e.wgrad && e.recipe.per_tensor() => {
                quantize(&*saved.input()?, Orientations::ROWWISE)?.take_rowwise()?
            }
            None => GemmOperand::rowwise(&*saved.input()?),
        };
        let (x, recipe) = (p.begin_all_gather(&rows, "input of a layer, again")?, e.recipe);
        Ok(WeightGrad::deferred(self.weight, move |rank, grad, accumulate| {
            let all = x.wait(&rank.compute)?;
            let cols = match &all {
                GemmOperand::HighPrecision { t, .. } if e.wgrad => quantize_columnwise(rank, recipe, t)?,
                _ => transposed(rank, &all)?,
            };
            let how = GemmOptions { product: LinearGemm::Wgrad, bias: None, accumulate, fast: false };
            dy.gemm(rank, &cols, how, grad)
        }))
    }

    /// `dW = dyᵀ·x`, from the columns of `dy` and this rank's columns of `x`, whose blocks are its own.
    fn weight_grad_of_shards(&self, p: &StepContext, dy: GemmOperand, mine: Fp8Tensor) -> Result<WeightGrad> {
        let data = p.begin_all_gather(&GemmOperand::rowwise(&mine.data), "input of a layer, again")?;
        let scales =
            p.begin_all_gather(&GemmOperand::rowwise(&mine.scale_inv), "scales of an input, again")?;
        Ok(WeightGrad::deferred(self.weight, move |rank, grad, accumulate| {
            let (data, scales) = (data.wait(&rank.compute)?, scales.wait(&rank.compute)?);
            let cols = StepContext::join_columnwise(rank, &mine, data.memory(), scales.memory())?;
            let how = GemmOptions { product: LinearGemm::Wgrad, bias: None, accumulate, fast: false };
            dy.gemm(rank, &GemmOperand::Fp8(cols), how, grad)
        }))
    }

    /// The weight as the right-hand side of a product.
    pub(crate) fn factor<'a>(
        &self,
        p: &StepContext<'a>,
        e: LinearQuant,
        product: LinearGemm,
    ) -> Result<WeightOperand<'a>> {
        let f = self.unpadded_factor(p, e, product)?;
        if self.outputs().is_multiple_of(self.pad_outputs_to) {
            return Ok(f);
        }
        Ok(WeightOperand {
            w: f.w.padded(p.rank, product, self.outputs().next_multiple_of(self.pad_outputs_to))?,
            ..f
        })
    }

    fn unpadded_factor<'a>(
        &self,
        p: &StepContext<'a>,
        e: LinearQuant,
        product: LinearGemm,
    ) -> Result<WeightOperand<'a>> {
        Ok(match product {
            LinearGemm::Fprop if e.fprop => WeightOperand {
                w: p.quantize_weight(self.weight, Orientations::ROWWISE)?.take_rowwise()?,
                bias: None,
                product,
                fast: e.recipe.fast_forward(),
            },
            LinearGemm::Dgrad if e.dgrad => {
                let w = p.quantize_weight(self.weight, Orientations::COLUMNWISE)?.take_columnwise()?;
                WeightOperand { w, bias: None, product, fast: false }
            }
            LinearGemm::Fprop => WeightOperand::fprop(p.weight(self.weight)?, None),
            _ => WeightOperand::dgrad(p.weight(self.weight)?),
        })
    }
}

/// Are blocks along the tokens of `x [tokens, n]`, of which other ranks have more, all its own?
fn has_whole_blocks(x: &Tensor) -> bool {
    x.shape()[0].is_multiple_of(BLOCK)
}

/// Rows as the factor along their columns: numbers as they are, bytes turned round. One scale holds for all of them.
fn transposed(rank: &Rank, rows: &GemmOperand) -> Result<GemmOperand> {
    let GemmOperand::Fp8(b) = rows else { return Ok(GemmOperand::columnwise(rows.memory())) };
    let (s, shape) = (&rank.compute, [b.cols, b.rows()]);
    let cols = Fp8Tensor::empty(s, shape, b.data.dtype(), ScalingMode::PerTensor, Category::Activations)?;
    rank.kernels.fp8_transpose(s, b, &cols)?;
    Ok(GemmOperand::Fp8(cols))
}

impl LinearSaved {
    fn quantized(side: &GemmOperand) -> LinearSaved {
        LinearSaved { x: None, quantized: Some(SavedOperand::of(side)), amax: None }
    }
}
