//! FP8 GEMMs of a linear layer: fprop `y = x·Wᵀ`, dgrad `dx = dy·W`, wgrad `dW = dyᵀ·x`.
//!
//! | tensor parallelism | holds | forward | backward |
//! |---|---|---|---|
//! | none | everything | quantize x row- and columnwise; fprop | quantize dy both ways; dgrad, wgrad |
//! | column-parallel | a sequence shard of x, its output features | all-gather FP8 x in ring order, overlapped with fprop | dgrad partial sums are reduce-scattered; x is gathered again, transposed, for wgrad |
//! | row-parallel | its input features, a sequence shard of y | partial sums are reduce-scattered | all-gather FP8 dy in ring order; transpose it for wgrad |
//! | replicated | a sequence shard of x and y | like one rank, with a shared scale | like one rank; dW is all-reduced later |
//!
//! Per-tensor scaling: amax is all-reduced over the tensor-parallel group first, so quantized values match a single
//! rank's bit for bit. Block scaling: 1×128 blocks along features belong to one row and are gathered with it;
//! 128-token blocks of columnwise operands are gathered only where each rank holds a multiple of 128 tokens.
//! Otherwise, and for emulated formats, bf16 is gathered and quantized afterwards.

use super::quantize::{Orientations, QuantInput, quantize_columnwise};
use super::{GemmOperand, GemmOptions, LinearGemm, LinearQuant, Role, SavedOperand};
use crate::linear::{Linear, LinearSaved};
use crate::tensor_parallel::WeightOperand;
use crate::{ParamId, Rank, SavedTensor, StepContext, WeightGrad, WithAmax};
use ferrotron_kernels::{BLOCK, Fp8Tensor, ScalingMode};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

impl Linear {
    /// [`Linear::forward`] with this bias, left out where partial sums follow. With `input_recomputed` the caller recomputes
    /// the input for backward, so no quantized copy of it is saved.
    pub(crate) fn forward_fp8(
        &self,
        p: &StepContext,
        e: LinearQuant,
        x: &WithAmax,
        (input_recomputed, bias): (bool, Option<ParamId>),
    ) -> Result<(Tensor, LinearSaved)> {
        const LABEL: &str = "input of a layer";
        let (bias, alone) = (bias.map(|b| p.weight(b)).transpose()?, self.is_local(p));
        let gathered = !alone && !self.row_parallel;
        let saves_input = p.train && e.wgrad && !input_recomputed && !self.input_saved_by_caller;
        let orientations = match gathered {
            false => Orientations { rows: e.fprop, cols: saves_input },
            // The columnwise operand of a gathered input is quantized after the all-gather, unless its blocks are this
            // rank's own. Rowwise FP8 takes half the bandwidth of bf16, now and in backward.
            true if e.recipe.per_block() => {
                Orientations { rows: e.fprop, cols: saves_input && has_whole_blocks(&x.values) }
            }
            true => Orientations { rows: e.recipe.per_tensor() && (e.fprop || saves_input), cols: false },
        };
        let amax = self.needs_input_amax(p).then(|| p.reduced_amax(x)).transpose()?;
        let x = &x.values;
        let quantized =
            p.quantize(self.weight, Role::Input, QuantInput::with_amax(x, amax.as_ref()), orientations)?;
        let f = WeightOperand {
            bias: bias.as_deref().filter(|_| alone || !self.row_parallel),
            ..self.factor(p, e, LinearGemm::Fprop)?
        };
        let rows = quantized.rows.as_ref().filter(|_| e.fprop);
        let y = match rows {
            None if e.fprop && gathered => {
                let all = p.all_gather(x, LABEL)?;
                let rows =
                    p.quantize(self.weight, Role::Input, &all, Orientations::ROWWISE)?.take_rowwise()?;
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
        let narrow = if gathered && e.recipe.per_tensor() { quantized.rows } else { quantized.cols };
        let unquantized =
            || LinearSaved { amax: amax.as_ref().map(SavedTensor::small), ..LinearSaved::of(x) };
        Ok((
            y,
            narrow
                .filter(|_| saves_input)
                .map_or_else(unquantized, |operand| LinearSaved::quantized(&operand)),
        ))
    }

    /// [`Linear::save_input`].
    pub(crate) fn save_input_fp8(
        &self,
        p: &StepContext,
        e: LinearQuant,
        x: &WithAmax,
    ) -> Result<LinearSaved> {
        if !e.wgrad {
            return Ok(LinearSaved::of(&x.values));
        }
        let amax = self.needs_input_amax(p).then(|| p.reduced_amax(x)).transpose()?;
        let input = QuantInput::with_amax(&x.values, amax.as_ref());
        let operand =
            p.quantize(self.weight, Role::Input, input, Orientations::COLUMNWISE)?.take_columnwise()?;
        Ok(LinearSaved::quantized(&operand))
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
            let weight = match p.is_frozen(self.weight) {
                true => WeightGrad::default(),
                false => self.weight_grad(p, e, dy_cols, saved)?,
            };
            return Ok((dx, weight.and(self.bias_grad(dy))));
        }
        let orientations = Orientations { rows: e.dgrad, cols: e.wgrad };
        // The bias gradient is summed while the unquantized gradient is read for quantization; otherwise it is
        // deferred.
        let reads = orientations != Orientations::NONE;
        let taken = match self.bias.filter(|_| reads && dy.sums.is_none()) {
            Some(_) => Some(p.rank.activation(&[1, dy.values.shape()[1]], DType::F32)?),
            None => None,
        };
        let flat = taken.as_ref().map(|t| t.view(&[t.numel()])).transpose()?;
        let amax = (reads && e.recipe.measures()).then(|| p.reduced_amax(dy)).transpose()?;
        let values = &dy.values;
        let input = QuantInput { x: values, amax: amax.as_ref(), sums: flat.as_ref() };
        let quantized = p.quantize(self.weight, Role::Gradient, input, orientations)?;
        let rows = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(values));
        let dx = match alone {
            true => p.gemm(&rows, &f)?,
            false => p.gemm_reduce_scatter(&rows, &f, "gradient of a layer's input")?,
        };
        let weight = match p.is_frozen(self.weight) {
            true => WeightGrad::default(),
            false => self.weight_grad(
                p,
                e,
                quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(values)),
                saved,
            )?,
        };
        let sums = taken.or_else(|| dy.sums.clone());
        Ok((dx, weight.and(self.bias_grad(&WithAmax { values: values.clone(), amax: None, sums }))))
    }

    /// Row-parallel: dgrad from all ranks' rows of `dy`, and the gathered rows as the columnwise operand of wgrad.
    fn backward_gathered(
        &self,
        p: &StepContext,
        e: LinearQuant,
        f: &WeightOperand,
        dy: &Tensor,
    ) -> Result<(Tensor, GemmOperand)> {
        const LABEL: &str = "gradient of a layer's output";
        let rowwise_serves_both = e.recipe.per_tensor() && e.dgrad && e.wgrad;
        if rowwise_serves_both || !e.dgrad {
            let rows = match e.dgrad {
                true => p.quantize(self.weight, Role::Gradient, dy, Orientations::ROWWISE)?.take_rowwise()?,
                false => GemmOperand::rowwise(dy),
            };
            let (dx, all) = p.all_gather_gemm(&rows, f, true, LABEL)?;
            let Some(all) = all else { return shape_error(LABEL, "the ring cached no gathered rows") };
            let cols = match &all {
                GemmOperand::HighPrecision { t, .. } if e.wgrad => {
                    p.quantize(self.weight, Role::Gradient, t, Orientations::COLUMNWISE)?.take_columnwise()?
                }
                _ => transposed(p.rank, &all)?,
            };
            return Ok((dx, cols));
        }
        let orientations = Orientations { rows: true, cols: e.wgrad };
        if e.recipe.per_block() && e.wgrad && has_whole_blocks(dy) {
            let quantized = p.quantize(self.weight, Role::Gradient, dy, orientations)?;
            let cols = quantized.cols.clone();
            let (dx, _) = p.all_gather_gemm(&quantized.take_rowwise()?, f, false, LABEL)?;
            let Some(GemmOperand::Fp8(mine)) = cols else {
                return shape_error(LABEL, "the gradient was not quantized columnwise");
            };
            const LABELS: [&str; 2] = ["columns of a gradient", "scales of a gradient"];
            let [data, scales] = p.all_gather_pair([&mine.data, &mine.scale_inv], LABELS)?;
            return Ok((dx, GemmOperand::Fp8(StepContext::join_columnwise(p.rank, &mine, &data, &scales)?)));
        }
        let all = p.all_gather(dy, LABEL)?;
        let quantized = p.quantize(self.weight, Role::Gradient, &all, orientations)?;
        let cols = quantized.cols.clone().unwrap_or_else(|| GemmOperand::columnwise(&all));
        Ok((p.gemm(&quantized.take_rowwise()?, f)?, cols))
    }

    /// wgrad `dW = dyᵀ·x`, from columnwise `dy` and the saved input.
    fn weight_grad(
        &self,
        p: &StepContext,
        e: LinearQuant,
        dy: GemmOperand,
        saved: LinearSaved,
    ) -> Result<WeightGrad> {
        let amax = saved.amax.clone();
        let quantize = |x: &Tensor, orientations| {
            p.quantize(self.weight, Role::Input, QuantInput::with_amax(x, amax.as_deref()), orientations)
        };
        if self.is_local(p) || self.row_parallel {
            let cols = match saved.quantized {
                Some(cached) => cached.operand(),
                None if e.wgrad => quantize(&*saved.input()?, Orientations::COLUMNWISE)?.take_columnwise()?,
                None => GemmOperand::columnwise(&*saved.input()?),
            };
            return Ok(WeightGrad::quantized_gemm(self.weight, dy.first_rows(self.outputs())?, cols));
        }
        if e.recipe.per_block() && e.wgrad {
            let mine = match &saved.quantized {
                Some(cached) => Some(cached.operand()),
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
            Some(cached) => cached.operand(),
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

    /// Column-parallel wgrad from columnwise `dy` and this rank's columnwise shard of `x`, whose blocks no other rank
    /// shares.
    fn weight_grad_of_shards(&self, p: &StepContext, dy: GemmOperand, mine: Fp8Tensor) -> Result<WeightGrad> {
        const LABELS: [&str; 2] = ["input of a layer, again", "scales of an input, again"];
        let all = p.begin_all_gather_pair([&mine.data, &mine.scale_inv], LABELS)?;
        Ok(WeightGrad::deferred(self.weight, move |rank, grad, accumulate| {
            let [data, scales] = all.wait(&rank.compute)?;
            let cols = StepContext::join_columnwise(rank, &mine, &data, &scales)?;
            let how = GemmOptions { product: LinearGemm::Wgrad, bias: None, accumulate, fast: false };
            dy.gemm(rank, &GemmOperand::Fp8(cols), how, grad)
        }))
    }

    /// The weight as the right-hand operand of `product`, with its output features padded.
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
            LinearGemm::Fprop => WeightOperand::fprop(&*p.weight(self.weight)?, None),
            _ => WeightOperand::dgrad(&*p.weight(self.weight)?),
        })
    }
}

/// Whether the 128-token blocks of this rank's shard `x [tokens, n]` are shared with no other rank.
fn has_whole_blocks(x: &Tensor) -> bool {
    x.shape()[0].is_multiple_of(BLOCK)
}

/// Rowwise as columnwise operand: bf16 by reinterpretation, per-tensor FP8 by a transpose.
fn transposed(rank: &Rank, rows: &GemmOperand) -> Result<GemmOperand> {
    let GemmOperand::Fp8(b) = rows else { return Ok(GemmOperand::columnwise(rows.memory())) };
    let (s, shape) = (&rank.compute, [b.cols, b.rows()]);
    let cols = Fp8Tensor::empty(s, shape, b.data.dtype(), ScalingMode::PerTensor, Category::Activations)?;
    rank.kernels.fp8_transpose(s, b, &cols)?;
    Ok(GemmOperand::Fp8(cols))
}

impl LinearSaved {
    fn quantized(operand: &GemmOperand) -> LinearSaved {
        LinearSaved::of_quantized(SavedOperand::of(operand))
    }
}
