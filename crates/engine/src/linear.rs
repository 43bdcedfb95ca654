//! Linear layer `y = x·Wᵀ + b`: column-parallel, row-parallel or replicated over the tensor-parallel ranks.

mod backward;
mod saved;

use crate::lora::Adapter;
use crate::quant::{GemmOperand, LinearQuant, Role};
use crate::tensor_parallel::WeightOperand;
use crate::with_amax::GradExtras;
use crate::{Declarations, Init, ParamId, Part, SavedTensor, Split, StepContext, WithAmax};
use ferrotron_kernels::{Act, Gemm, LinearAct};
use ferrotron_tensor::{Result, Tensor};
pub use saved::LinearSaved;

/// Linear layer `[tokens, in] → [tokens, out]` with weight `[out, in]`, which stacks one or more logical matrices along
/// `out`.
///
/// - Column-parallel (the weight split by rows, [`Split::Rows`]): each rank computes its output features for all tokens; the
///   sequence-parallel input is all-gathered.
/// - Row-parallel (the weight split by columns, [`Split::Columns`]): each rank holds a slice of the input features; partial
///   outputs are reduce-scattered to the ranks that hold the tokens.
/// - Replicated: each rank applies the full weight to the tokens it holds. Its weight gradient covers those tokens only and
///   is all-reduced over the tensor-parallel group later, like that of a norm.
pub struct Linear {
    pub(crate) weight: ParamId,
    pub(crate) bias: Option<ParamId>,
    out: usize,
    /// Row-parallel: the weight is split by columns.
    pub(crate) row_parallel: bool,
    /// Replicated: every rank has the full weight.
    replicated: bool,
    /// Quantization of its three GEMMs; None leaves them in the model's dtype.
    quant: Option<LinearQuant>,
    /// The caller saves the input anyway: backward quantizes it instead of saving an FP8 copy.
    pub(crate) input_saved_by_caller: bool,
    /// The GEMMs see the output features padded to a multiple of this with zero rows of the weight.
    pub(crate) pad_outputs_to: usize,
    /// LoRA beside the weight.
    adapter: Option<Box<Adapter>>,
}

impl Linear {
    /// Declares a linear from `input` features to the stacked `outputs` (logical name, features). Weights are named
    /// `<name>.weight`, biases `<name>.bias`. Whether its GEMMs are quantized is the policy's choice.
    pub fn declare(
        d: &mut Declarations,
        input: usize,
        outputs: &[(String, usize)],
        bias: bool,
        split: Split,
        std: f32,
    ) -> Result<Linear> {
        let part = |name: &str, shape, init, split| Part { name: name.into(), shape, init, split };
        let weights = outputs
            .iter()
            .map(|(name, out)| part(&format!("{name}.weight"), vec![*out, input], Init::Normal(std), split));
        let weight = d.declare(weights.collect())?;
        // A row-parallel bias is added once, after the reduce-scatter: every rank has all of it.
        let row_parallel = matches!(split, Split::Columns { .. });
        let bias_split = if row_parallel { Split::Replicated } else { split };
        let biases = outputs
            .iter()
            .map(|(name, out)| part(&format!("{name}.bias"), vec![*out], Init::Constant(0.0), bias_split));
        let bias = if bias { Some(d.declare(biases.collect())?) } else { None };
        let out = d.spec(weight).shape[0];
        let quant = d.quantize_linear(weight, outputs);
        let replicated = split == Split::Replicated;
        let adapter = Adapter::declare(d, weight, input, outputs, split)?.map(Box::new);
        Ok(Linear {
            weight,
            bias,
            out,
            row_parallel,
            replicated,
            quant,
            input_saved_by_caller: false,
            pad_outputs_to: 1,
            adapter,
        })
    }

    /// Declares an unquantized linear `<name>` that every rank holds in full and applies to its own tokens.
    pub fn declare_replicated(
        d: &mut Declarations,
        name: &str,
        input: usize,
        out: usize,
        std: f32,
    ) -> Result<Linear> {
        let weight = d.declare(vec![Part {
            name: format!("{name}.weight"),
            shape: vec![out, input],
            init: Init::Normal(std),
            split: Split::Replicated,
        }])?;
        Ok(Linear {
            weight,
            bias: None,
            out,
            row_parallel: false,
            replicated: true,
            quant: None,
            input_saved_by_caller: false,
            pad_outputs_to: 1,
            adapter: None,
        })
    }

    /// A column-parallel linear to `out` features over a weight that another module has declared.
    pub(crate) fn column_parallel(
        weight: ParamId,
        out: usize,
        quant: LinearQuant,
        pad_outputs_to: usize,
    ) -> Linear {
        let (bias, row_parallel, replicated, input_saved_by_caller) = (None, false, false, false);
        Linear {
            weight,
            bias,
            out,
            row_parallel,
            replicated,
            quant: Some(quant),
            input_saved_by_caller,
            pad_outputs_to,
            adapter: None,
        }
    }

    /// Whether it runs without communication.
    pub(crate) fn is_local(&self, p: &StepContext) -> bool {
        self.replicated || p.rank.tp.size() == 1
    }

    /// Leaves saving the input to the caller, whatever the precision.
    pub(crate) fn with_input_saved_by_caller(self) -> Linear {
        Linear { input_saved_by_caller: true, ..self }
    }

    /// Output features of this rank.
    pub fn outputs(&self) -> usize {
        self.out
    }

    /// `[tokens, in] → [tokens, out]`. The side that faces the residual stream has this rank's sequence shard of the
    /// tokens, the other side all of them.
    pub fn forward(&self, p: &StepContext, x: impl Into<WithAmax>) -> Result<(Tensor, LinearSaved)> {
        self.forward_recomputable(p, &x.into(), false)
    }

    /// Whether the amax of the input is needed, now or in backward.
    pub(crate) fn needs_input_amax(&self, p: &StepContext) -> bool {
        self.quant(p).is_some_and(|e| e.recipe.measures() && (e.fprop || (p.train && e.wgrad)))
    }

    /// What backward needs of the output gradient besides its values. Quantizing the gradient computes the bias
    /// gradient's column sums on the way.
    pub(crate) fn grad_extras(&self) -> GradExtras {
        let reads = self.quant.filter(|e| e.dgrad || e.wgrad);
        // DoRA scales the gradient before it is quantized.
        let scaled = self.adapter.as_ref().is_some_and(|a| a.is_dora());
        GradExtras {
            amax: !scaled && reads.is_some_and(|e| e.recipe.measures()),
            sums: self.bias.is_some() && reads.is_none(),
        }
    }

    /// Quantization of its GEMMs in this pass: there is no wgrad of a frozen weight, and an adapter reads the input as it is.
    fn quant(&self, p: &StepContext) -> Option<LinearQuant> {
        let wgrad = !p.is_frozen(self.weight) && self.adapter.is_none();
        self.quant.map(|e| LinearQuant { wgrad: e.wgrad && wgrad, ..e })
    }

    /// [`Linear::forward`]; with `input_recomputed` the caller will drop the saved input and recompute it for backward.
    pub(crate) fn forward_recomputable(
        &self,
        p: &StepContext,
        x: &WithAmax,
        input_recomputed: bool,
    ) -> Result<(Tensor, LinearSaved)> {
        // DoRA's bias is added after the output is scaled.
        let scaled = self.adapter.as_ref().is_some_and(|a| a.is_dora());
        let (mut y, mut saved) = self.forward_base(p, x, input_recomputed, self.bias.filter(|_| !scaled))?;
        if let Some(adapter) = &self.adapter {
            saved.adapter = Some(SavedTensor::activation(&adapter.forward(p, &x.values, &y)?));
            if let Some(scaled) = adapter.rescale(p, &y, self.bias)? {
                saved.unscaled = Some(SavedTensor::activation(&y));
                y = scaled;
            }
        } else if p.is_frozen(self.weight) {
            saved = LinearSaved { input_unused: true, ..LinearSaved::empty() };
        }
        Ok((y, saved))
    }

    /// The output without that of adapters, with this bias.
    fn forward_base(
        &self,
        p: &StepContext,
        x: &WithAmax,
        input_recomputed: bool,
        bias: Option<ParamId>,
    ) -> Result<(Tensor, LinearSaved)> {
        let plain = || -> Result<bool> {
            Ok(p.calibrates(self.weight, Role::Input, &x.values)?
                && p.calibrates(self.weight, Role::Weight, &*p.weight(self.weight)?)?)
        };
        if let Some(e) = self.quant(p)
            && !plain()?
        {
            let (y, saved) = self.forward_fp8(p, e, x, (input_recomputed, bias))?;
            if let Some(bias) = bias.filter(|_| self.row_parallel && !self.is_local(p)) {
                add_bias_rows(p, &*p.weight(bias)?, &y)?;
            }
            return Ok((y, saved));
        }
        let x = &x.values;
        let saved = LinearSaved::of(x);
        let (w, bias) = (p.weight(self.weight)?, bias.map(|b| p.weight(b)).transpose()?);
        let (x, f) = (&GemmOperand::rowwise(x), &WeightOperand::fprop(&w, bias.as_deref()));
        if self.is_local(p) {
            return Ok((p.gemm(x, f)?, saved));
        }
        if !self.row_parallel {
            return Ok((p.all_gather_gemm(x, f, false, "input of a layer")?.0, saved));
        }
        let y = p.gemm_reduce_scatter(x, &WeightOperand { bias: None, ..f.clone() }, "output of a layer")?;
        if let Some(bias) = bias {
            add_bias_rows(p, &bias, &y)?;
        }
        Ok((y, saved))
    }

    /// What [`Linear::forward`] saves of its input, without the output: of a linear whose input is not gathered.
    pub(crate) fn save_input(&self, p: &StepContext, x: &WithAmax) -> Result<LinearSaved> {
        if self.adapter.as_ref().is_some_and(|a| a.is_dora()) {
            // Backward reads the output, too.
            return Ok(self.forward_recomputable(p, x, false)?.1);
        }
        let mut saved = match self.quant(p) {
            Some(e) if !p.state.quant().is_some_and(|s| s.is_calibrating()) => {
                self.save_input_fp8(p, e, x)?
            }
            _ => LinearSaved::of(&x.values),
        };
        if let Some(adapter) = &self.adapter {
            saved.adapter = Some(SavedTensor::activation(&adapter.hidden(p, &x.values)?));
        } else if p.is_frozen(self.weight) {
            saved = LinearSaved { input_unused: true, ..LinearSaved::empty() };
        }
        Ok(saved)
    }

    /// [`Linear::forward`] and the activation function of its output: `h [tokens, out]` and `act(h)`, with amax if
    /// `measure`.
    pub(crate) fn forward_act(
        &self,
        p: &StepContext,
        act: Act,
        x: &WithAmax,
        measure: bool,
    ) -> Result<(Tensor, WithAmax, LinearSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        // Where backward recomputes `act(h)` from the rounded `h`, forward must compute it from that too.
        let fused = self.quant.is_none() && self.adapter.is_none() && !p.is_frozen(self.weight);
        if p.rank.tp.size() > 1 || p.recompute.activation || !fused || measure {
            let (h, saved) = self.forward_recomputable(p, x, p.recompute.norm)?;
            let y = p.act_forward(act, false, &h, self.out, measure)?;
            return Ok((h, y, saved));
        }
        let x = &x.values;
        let (w, bias) = (p.weight(self.weight)?, self.bias.map(|b| p.weight(b)).transpose()?);
        let shape = [x.shape()[0], self.out];
        let (h, y) = (p.empty(&shape)?, p.empty(&shape)?);
        k.linear_act_forward(s, &LinearAct { act, x, w: &w, bias: bias.as_deref(), h: &h, y: &y })?;
        Ok((h, WithAmax::from(&y), LinearSaved::of(x)))
    }
}

/// Adds a bias to every row: a GEMM with k = 0 that accumulates.
fn add_bias_rows(p: &StepContext, bias: &Tensor, y: &Tensor) -> Result<()> {
    let [rows, out] = [y.shape()[0], y.shape()[1]];
    let (a, b) = (p.empty(&[rows, 0])?, p.empty(&[out, 0])?);
    let g = Gemm { a: &a, trans_a: false, b: &b, trans_b: true, bias: Some(bias), accumulate: true, c: y };
    p.rank.kernels.gemm(&p.rank.compute, &g)
}
