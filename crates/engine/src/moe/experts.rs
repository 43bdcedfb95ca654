//! This rank's routed experts: two grouped GEMMs over rows sorted by expert, with the activation function between
//! them.

use crate::lora::{ExpertAdapter, Projection};
use crate::quant::{
    GemmOperand, GemmOptions, LinearGemm, LinearQuant, Orientations, QuantInput, Role, SavedOperand,
    WgradOperand,
};
use crate::{
    Declarations, Init, Module, ParamId, Part, Saved, SavedTensor, Split, StepContext, WeightGrad, WithAmax,
};
use ferrotron_kernels::{
    Act, BLOCK, Fp8Tensor, GroupedBias, RowMap, ScalingMode, Segments, WeightedAct, WeightedActBackward,
};
use ferrotron_tensor::{Category, DType, Result, Tensor};

use super::MoeShape;

/// `down_e(p·act(gate_e(x))·up_e(x))` for the rows x of expert e; p is the routing probability.
pub struct Experts {
    up: ParamId,
    up_bias: Option<ParamId>,
    down: ParamId,
    down_bias: Option<ParamId>,
    /// Quantization of the up and down projections.
    quant: [Option<LinearQuant>; 2],
    /// LoRA beside the up and down projections.
    adapters: [Option<Box<ExpertAdapter>>; 2],
    act: Act,
    gated: bool,
    /// Experts on this rank, their input width, and their intermediate size on this rank.
    count: usize,
    width: usize,
    ffn: usize,
}

/// Token rows ready for dispatch: expert inputs, or gradients of expert outputs.
pub(crate) struct DispatchRows {
    /// `[T, width]`: in the model's dtype, or FP8.
    pub(crate) rows: Tensor,
    /// Scale and amax, equal on all ranks of the expert group.
    pub(crate) scales: RowScales,
}

/// Per-tensor scale and amax of dispatched rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowScales {
    /// Inverse scale of FP8 rows, f32 `[1]`; None for rows in the model's dtype.
    scale_inv: Option<Tensor>,
    /// amax f32 `[1]`, where the receiver quantizes.
    amax: Option<Tensor>,
}

/// Rows at the experts.
pub(crate) struct ExpertRows {
    /// `[T, width]` in arrival order.
    pub(crate) x: Tensor,
    pub(crate) scales: RowScales,
    /// f32 `[N]`: routing probabilities, sorted by expert; 0 for alignment padding.
    pub(crate) probs: Tensor,
    /// Permutation from arrival order to expert order.
    pub(crate) map: RowMap,
}

/// What backward needs.
pub struct ExpertsSaved {
    a: Option<SavedOperand>,
    /// amax of `a`, where backward recomputes and quantizes it.
    amax: Option<SavedTensor>,
    h: SavedTensor,
    x: SavedOperand,
    /// Whether `x` is sorted by expert already.
    sorted: bool,
    probs: SavedTensor,
    map: RowMap,
    /// What adapters of the up and down projections have computed from their inputs, `[N, Σr]`.
    adapters: [Option<SavedTensor>; 2],
    /// With DoRA, their outputs before they are scaled.
    unscaled: [Option<SavedTensor>; 2],
}

impl Saved for ExpertsSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.a.tensors(&mut |t| f(Module::ExpertFc2, t));
        self.amax.tensors(&mut |t| f(Module::MoeAct, t));
        f(Module::MoeAct, &mut self.h);
        self.x.tensors(&mut |t| f(Module::ExpertFc1, t));
        f(Module::ExpertFc1, &mut self.probs);
        let [up, down] = &mut self.adapters;
        up.tensors(&mut |t| f(Module::ExpertFc1, t));
        down.tensors(&mut |t| f(Module::ExpertFc2, t));
        let [up, down] = &mut self.unscaled;
        up.tensors(&mut |t| f(Module::ExpertFc1, t));
        down.tensors(&mut |t| f(Module::ExpertFc2, t));
    }
}

pub(crate) fn segments(map: &RowMap) -> Segments<'_> {
    Segments { offsets: &map.offsets, counts: &map.counts }
}

impl Experts {
    /// Declares `<name>.<e>.{gate,up,down}` of this rank's experts e.
    pub(super) fn declare(d: &mut Declarations, name: &str, c: &MoeShape) -> Result<Experts> {
        let own = d.experts().own(c.experts);
        let width = c.latent.unwrap_or(c.hidden);
        let ups: &[&str] = if c.gated { &["gate", "up"] } else { &["up"] };
        let part = |e: usize, what: &str, kind: &str, shape: &[usize], init, split| Part {
            name: format!("{name}.{e}.{what}.{kind}"),
            shape: shape.to_vec(),
            init,
            split,
        };
        let (rows, columns) = (Split::Rows { unit: 1 }, Split::Columns { unit: 1 });
        let zero = Init::Constant(0.0);
        let of_ups = |kind: &str, shape: &[usize], init| {
            let one = |e| ups.iter().map(move |u| (e, *u));
            own.clone().flat_map(one).map(|(e, u)| part(e, u, kind, shape, init, rows)).collect::<Vec<_>>()
        };
        let up = d.declare_experts(of_ups("weight", &[c.ffn, width], Init::Normal(c.std.0)))?;
        let up_bias = c.bias.then(|| d.declare_experts(of_ups("bias", &[c.ffn], zero))).transpose()?;
        let downs =
            own.clone().map(|e| part(e, "down", "weight", &[width, c.ffn], Init::Normal(c.std.1), columns));
        let down = d.declare_experts(downs.collect())?;
        // The down projections give partial sums over the etp ranks of an expert; the first of them adds the bias.
        let biases = own.clone().map(|e| part(e, "down", "bias", &[width], zero, Split::Replicated));
        let down_bias = c.bias.then(|| d.declare_experts(biases.collect())).transpose()?;
        let ffn = d.spec(down).shape[1];
        let names = |all: &[&str]| all.iter().map(|what| format!("{name}.{what}")).collect::<Vec<_>>();
        let quant = [d.quantize_experts(up, &names(ups)), d.quantize_experts(down, &names(&["down"]))];
        let count = own.len();
        let outputs: Vec<(&str, usize)> = ups.iter().map(|what| (*what, c.ffn)).collect();
        let up_adapter = Projection { outputs: &outputs, input: width, split: rows, weight: up };
        let down_adapter =
            Projection { outputs: &[("down", width)], input: c.ffn, split: columns, weight: down };
        let mut adapters = [None, None];
        for (adapter, projection) in adapters.iter_mut().zip([&up_adapter, &down_adapter]) {
            *adapter = ExpertAdapter::declare(d, (name, own.clone()), projection)?.map(Box::new);
        }
        let (act, gated) = (c.act, c.gated);
        Ok(Experts { up, up_bias, down, down_bias, quant, adapters, act, gated, count, width, ffn })
    }

    /// Row alignment of each expert.
    pub(super) fn align(&self) -> usize {
        if self.quant.iter().any(Option::is_some) { BLOCK } else { 1 }
    }

    /// Quantization in this pass; none while scales are being calibrated. There is no wgrad of frozen weights, and an
    /// adapter reads rows as they are.
    fn quant(&self, p: &StepContext) -> [Option<LinearQuant>; 2] {
        if p.state.quant().is_some_and(|s| s.is_calibrating()) {
            return [None; 2];
        }
        let of = |which: usize, id: ParamId| {
            let wgrad = !p.is_frozen(id) && self.adapters[which].is_none();
            self.quant[which].map(|e| LinearQuant { wgrad: e.wgrad && wgrad, ..e })
        };
        [of(0, self.up), of(1, self.down)]
    }

    /// Whether the amax of the input is needed, now or in backward.
    pub(super) fn needs_input_amax(&self, p: &StepContext) -> bool {
        self.quant(p)[0].is_some_and(|e| e.recipe.measures() && (e.fprop || (p.train && e.wgrad)))
    }

    /// Output width of the up projection.
    fn inner(&self) -> usize {
        self.ffn * if self.gated { 2 } else { 1 }
    }

    /// A bias as `[experts, n]`.
    fn bias(&self, p: &StepContext, id: Option<ParamId>, n: usize) -> Result<Option<Tensor>> {
        id.map(|id| p.weight(id)?.view(&[self.count, n])).transpose()
    }

    /// The weights `[n, k]` of all experts as the right-hand operand of `product`, and whether fast accumulation is
    /// allowed.
    fn factor(
        &self,
        p: &StepContext,
        (id, e): (ParamId, Option<LinearQuant>),
        [n, k]: [usize; 2],
        product: LinearGemm,
    ) -> Result<(GemmOperand, bool)> {
        let shape = [self.count, n, k];
        let values =
            |trans| Ok((GemmOperand::HighPrecision { t: p.weight(id)?.view(&shape)?, trans }, false));
        match (product, e) {
            (LinearGemm::Fprop, Some(e)) if e.fprop => Ok((
                p.quantize_expert_weights(id, shape, Orientations::ROWWISE)?.take_rowwise()?,
                e.recipe.fast_forward(),
            )),
            (LinearGemm::Dgrad, Some(e)) if e.dgrad => Ok((
                p.quantize_expert_weights(id, shape, Orientations::COLUMNWISE)?.take_columnwise()?,
                false,
            )),
            (LinearGemm::Fprop, _) => values(false),
            _ => values(true),
        }
    }

    /// Rows to dispatch for operand `role` of linear `id`: quantized to FP8 if `fp8`, else as they are, with amax
    /// where `used` by a quantized GEMM.
    fn dispatch_rows(
        &self,
        p: &StepContext,
        (id, e): (ParamId, Option<LinearQuant>),
        role: Role,
        x: &WithAmax,
        (used, fp8): (bool, bool),
    ) -> Result<DispatchRows> {
        let unquantized =
            |amax| DispatchRows { rows: x.values.clone(), scales: RowScales { scale_inv: None, amax } };
        let Some(e) = e.filter(|_| used) else {
            p.calibrates(id, role, &x.values)?;
            return Ok(unquantized(None));
        };
        let amax = e.recipe.measures().then(|| p.dispatched_amax(x)).transpose()?;
        if !fp8 {
            return Ok(unquantized(amax));
        }
        match p
            .quantize(id, role, QuantInput::with_amax(&x.values, amax.as_ref()), Orientations::ROWWISE)?
            .take_rowwise()?
        {
            GemmOperand::Fp8(b) => Ok(DispatchRows {
                rows: b.data,
                scales: RowScales { scale_inv: Some(b.scale_inv), amax: None },
            }),
            GemmOperand::HighPrecision { .. } | GemmOperand::Microscaled(_) => Ok(unquantized(amax)),
        }
    }

    /// Expert inputs `[T, width]` for dispatch.
    pub(super) fn dispatch_input(&self, p: &StepContext, x: &WithAmax) -> Result<DispatchRows> {
        let [e, _] = self.quant(p);
        let used = e.is_some_and(|e| e.fprop || (p.train && e.wgrad));
        // FP8 rows serve fprop and wgrad alike.
        let fp8 = e.is_some_and(|e| e.recipe.per_tensor() && e.fprop && (e.wgrad || !p.train))
            && self.adapters[0].is_none();
        self.dispatch_rows(p, (self.up, e), Role::Input, x, (used, fp8))
    }

    /// Gradients of expert outputs `[T, width]` for dispatch.
    pub(super) fn dispatch_grad(&self, p: &StepContext, dy: &Tensor) -> Result<DispatchRows> {
        let [_, e] = self.quant(p);
        let used = e.is_some_and(|e| e.dgrad || e.wgrad);
        // A bias gradient is summed from unquantized values.
        let both = e.is_some_and(|e| e.recipe.per_tensor() && e.dgrad && e.wgrad);
        let fp8 = both && self.down_bias.is_none();
        self.dispatch_rows(p, (self.down, e), Role::Gradient, &WithAmax::from(dy), (used, fp8))
    }

    /// Received rows sorted by expert, as operands of the GEMMs of linear `id`. Per-tensor FP8 rows are transposed for
    /// wgrad only when it runs, so the columnwise operand may still be unsorted; so may inputs that are sorted again for wgrad
    /// where outputs of norms are recomputed, since a token arrives once and is sorted once for each of its experts.
    fn sorted(
        &self,
        p: &StepContext,
        (id, role): (ParamId, Role),
        (received, scales, map): (Tensor, &RowScales, &RowMap),
        orientations: Orientations,
    ) -> Result<(GemmOperand, WgradOperand, Tensor)> {
        let rows = p.rank.activation(&[map.source.numel(), received.shape()[1]], received.dtype())?;
        p.rank.kernels.moe_permute(&p.rank.compute, &received, map, &rows)?;
        if let Some(scale_inv) = &scales.scale_inv {
            let (scaling, cols) = (ScalingMode::PerTensor, self.width);
            let operand = |data: &Tensor| {
                GemmOperand::Fp8(Fp8Tensor {
                    data: data.clone(),
                    scale_inv: scale_inv.clone(),
                    scaling,
                    cols,
                    pow2: false,
                })
            };
            return Ok((operand(&rows), WgradOperand { operand: operand(&received), sorted: false }, rows));
        }
        let sorts_again = role == Role::Input && p.recompute.norm && !orientations.cols;
        let unsorted = Some(received).filter(|r| sorts_again && r.shape()[0] < rows.shape()[0]);
        let quantized =
            p.quantize(id, role, QuantInput::with_amax(&rows, scales.amax.as_ref()), orientations)?;
        if let Some(received) = unsorted {
            let rowwise = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&rows));
            let operand = GemmOperand::columnwise(&received);
            return Ok((rowwise, WgradOperand { operand, sorted: false }, rows));
        }
        let columnwise = quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&rows));
        let rowwise = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&rows));
        Ok((rowwise, WgradOperand { operand: columnwise, sorted: true }, rows))
    }

    /// The activation function times the routing probability, with amax where the down projection needs it.
    fn activate(&self, p: &StepContext, h: &Tensor, probs: &Tensor, measure: bool) -> Result<WithAmax> {
        let (k, s, a) = (&p.rank.kernels, &p.rank.compute, p.empty(&[h.shape()[0], self.ffn])?);
        if !measure {
            k.weighted_act(s, &WeightedAct { act: self.act, gated: self.gated, x: h, probs, y: &a })?;
            return Ok(WithAmax::from(&a));
        }
        let amax = p.zero_amax()?;
        k.weighted_act_amax(s, &WeightedAct { act: self.act, gated: self.gated, x: h, probs, y: &a }, &amax)?;
        Ok(WithAmax { values: a, amax: Some(amax), sums: None })
    }

    /// `[N, width]`: expert outputs for sorted rows, weighted by the probabilities; partial sums with expert tensor
    /// parallelism.
    pub(crate) fn forward(&self, p: &StepContext, rows: ExpertRows) -> Result<(Tensor, ExpertsSaved)> {
        let (k, s, [up, down]) = (&p.rank.kernels, &p.rank.compute, self.quant(p));
        let ExpertRows { x, scales, probs, map } = rows;
        let (n, segments) = (map.source.numel(), segments(&map));
        let orientations = |e: Option<LinearQuant>, cols: bool| Orientations {
            rows: e.is_some_and(|e| e.fprop),
            cols: e.is_some_and(|e| cols && p.train && e.wgrad),
        };
        let (x, kept, sorted_rows) =
            self.sorted(p, (self.up, Role::Input), (x, &scales, &map), orientations(up, true))?;
        let mut h = p.empty(&[n, self.inner()])?;
        let up_bias = self.bias(p, self.up_bias, self.inner())?;
        // DoRA's bias is added after the output is scaled.
        let bias = up_bias.clone().filter(|_| !self.is_dora(0));
        p.calibrates_weight(self.up)?;
        let (w, fast) = self.factor(p, (self.up, up), [self.inner(), self.width], LinearGemm::Fprop)?;
        let how = GemmOptions { product: LinearGemm::Fprop, bias: bias.as_ref(), accumulate: false, fast };
        x.grouped_gemm(p.rank, &w, segments, how, &h)?;
        let up_adapter = match &self.adapters[0] {
            Some(adapter) => Some(adapter.forward(p, &sorted_rows, segments, &h)?),
            None => None,
        };
        let up_unscaled = self.rescale(p, 0, &mut h, segments)?;
        if let Some(bias) = up_bias.filter(|_| self.is_dora(0)) {
            k.grouped_bias(s, &GroupedBias { segments, bias: &bias, weights: None }, &h)?;
        }
        drop((x, w, sorted_rows));
        let recompute = p.recompute.activation;
        let measure = down.is_some_and(|e| e.recipe.measures() && (e.fprop || (p.train && e.wgrad)));
        let a = self.activate(p, &h, &probs, measure)?;
        let amax = measure.then(|| p.reduced_amax_over(&p.rank.etp, &a)).transpose()?;
        p.calibrates(self.down, Role::Input, &a.values)?;
        let input = QuantInput::with_amax(&a.values, amax.as_ref());
        let quantized = p.quantize(self.down, Role::Input, input, orientations(down, !recompute))?;
        let cols = quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&a.values));
        let unquantized = a.values.clone();
        let a = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&a.values));
        let mut y = p.empty(&[n, self.width])?;
        p.calibrates_weight(self.down)?;
        let (w, fast) = self.factor(p, (self.down, down), [self.width, self.ffn], LinearGemm::Fprop)?;
        let how = GemmOptions { product: LinearGemm::Fprop, bias: None, accumulate: false, fast };
        a.grouped_gemm(p.rank, &w, segments, how, &y)?;
        let down_adapter = match &self.adapters[1] {
            Some(adapter) => Some(adapter.forward(p, &unquantized, segments, &y)?),
            None => None,
        };
        let down_unscaled = self.rescale(p, 1, &mut y, segments)?;
        if let Some(bias) = self.bias(p, self.down_bias, self.width)?.filter(|_| p.rank.etp.rank() == 0) {
            k.grouped_bias(s, &GroupedBias { segments, bias: &bias, weights: Some(&probs) }, &y)?;
        }
        let saved = ExpertsSaved {
            a: (!recompute).then(|| SavedOperand::of(&cols)),
            amax: amax.filter(|_| recompute).as_ref().map(SavedTensor::small),
            h: SavedTensor::activation(&h),
            x: SavedOperand::of(&kept.operand),
            sorted: kept.sorted,
            probs: SavedTensor::small(&probs),
            map,
            adapters: [up_adapter, down_adapter].map(|h| h.as_ref().map(SavedTensor::activation)),
            unscaled: [up_unscaled, down_unscaled].map(|t| t.as_ref().map(SavedTensor::activation)),
        };
        Ok((y, saved))
    }

    /// Whether the output of a projection (0 up, 1 down) is scaled by DoRA.
    fn is_dora(&self, which: usize) -> bool {
        self.adapters[which].as_ref().is_some_and(|a| a.is_dora())
    }

    /// Scales the output of a projection where it has DoRA, and returns it unscaled.
    fn rescale(
        &self,
        p: &StepContext,
        which: usize,
        y: &mut Tensor,
        segments: Segments,
    ) -> Result<Option<Tensor>> {
        let Some(adapter) = &self.adapters[which] else { return Ok(None) };
        Ok(adapter.rescale(p, y, segments)?.map(|scaled| std::mem::replace(y, scaled)))
    }

    /// Gradient of the unscaled output of a projection, where it has DoRA, from the sorted one of its output, with amax where it
    /// is quantized with `e`.
    fn rescale_backward(
        &self,
        p: &StepContext,
        (which, e): (usize, Option<LinearQuant>),
        (unscaled, dy, map): (Option<SavedTensor>, &Tensor, &RowMap),
    ) -> Result<Option<(WithAmax, WeightGrad)>> {
        let (Some(adapter), Some(unscaled)) = (&self.adapters[which], unscaled) else { return Ok(None) };
        let (values, grad) = adapter.rescale_backward(p, &unscaled, dy, map)?;
        let mut scaled = WithAmax::from(&values);
        if e.is_some_and(|e| e.recipe.measures() && (e.dgrad || e.wgrad)) {
            scaled.amax = Some(p.reduced_amax_over(&p.rank.etp, &scaled)?);
        }
        Ok(Some((scaled, grad)))
    }

    /// Gradients of the sorted rows and of the probabilities f32 `[N]`, from output gradients in arrival order.
    pub(crate) fn backward(
        &self,
        p: &StepContext,
        saved: ExpertsSaved,
        (dy, scales): (Tensor, RowScales),
    ) -> Result<(Tensor, Tensor, WeightGrad)> {
        let (k, s, [up, down]) = (&p.rank.kernels, &p.rank.compute, self.quant(p));
        let ExpertsSaved { a, amax, h, x, sorted, probs, map, adapters, unscaled } = saved;
        let ([up_hidden, down_hidden], [up_unscaled, down_unscaled]) = (adapters, unscaled);
        let (n, segments) = (map.source.numel(), segments(&map));
        let orientations = |e: Option<LinearQuant>| Orientations {
            rows: e.is_some_and(|e| e.dgrad),
            cols: e.is_some_and(|e| e.wgrad),
        };
        let at_once = if self.is_dora(1) { Orientations::NONE } else { orientations(down) };
        let (mut rows, mut dy_cols, dy) =
            self.sorted(p, (self.down, Role::Gradient), (dy, &scales, &map), at_once)?;
        let mut grads = WeightGrad::default();
        let mut unscaled_dy = dy.clone();
        if let Some((scaled, grad)) = self.rescale_backward(p, (1, down), (down_unscaled, &dy, &map))? {
            let input = QuantInput::with_amax(&scaled.values, scaled.amax.as_ref());
            let quantized = p.quantize(self.down, Role::Gradient, input, orientations(down))?;
            rows = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&scaled.values));
            let operand = quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&scaled.values));
            dy_cols = WgradOperand { operand, sorted: true };
            (unscaled_dy, grads) = (scaled.values, grad);
        }
        // Needed for the gradients of a bias and of adapters only.
        let dy = Some(dy).filter(|_| self.down_bias.is_some());
        let unscaled_dy = Some(unscaled_dy).filter(|_| self.adapters[1].is_some());
        let a = match a {
            Some(a) => a.operand(),
            None => {
                let a = self.activate(p, &h, &probs, false)?.values;
                let orientations = Orientations { rows: false, ..orientations(down) };
                let quantized = p.quantize(
                    self.down,
                    Role::Input,
                    QuantInput::with_amax(&a, amax.as_deref()),
                    orientations,
                )?;
                quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&a))
            }
        };
        let how = GemmOptions { product: LinearGemm::Dgrad, bias: None, accumulate: false, fast: false };
        let da = p.empty(&[n, self.ffn])?;
        let (w, _) = self.factor(p, (self.down, down), [self.width, self.ffn], LinearGemm::Dgrad)?;
        rows.grouped_gemm(p.rank, &w, segments, how, &da)?;
        drop((rows, w));
        if let (Some(adapter), Some(hidden), Some(dy)) = (&self.adapters[1], &down_hidden, &unscaled_dy) {
            let x = WgradOperand { operand: a.clone(), sorted: true };
            grads = grads.and(adapter.backward(p, (x, hidden, &map), dy, &da)?);
        }
        let (dh, dp) = (p.empty(h.shape())?, p.rank.activation(&[n], DType::F32)?);
        let amax = match up.is_some_and(|e| e.recipe.measures() && (e.dgrad || e.wgrad)) {
            false => {
                k.weighted_act_backward(
                    s,
                    &WeightedActBackward {
                        act: self.act,
                        gated: self.gated,
                        x: &h,
                        probs: &probs,
                        source: &map.source,
                        dy: &da,
                        dx: &dh,
                        dprobs: &dp,
                    },
                )?;
                None
            }
            true => {
                let amax = p.zero_amax()?;
                let live = &map.source;
                k.weighted_act_backward_amax(
                    s,
                    &WeightedActBackward {
                        act: self.act,
                        gated: self.gated,
                        x: &h,
                        probs: &probs,
                        source: live,
                        dy: &da,
                        dx: &dh,
                        dprobs: &dp,
                    },
                    &amax,
                )?;
                let dh = WithAmax { values: dh.clone(), amax: Some(amax), sums: None };
                Some(p.reduced_amax_over(&p.rank.etp, &dh)?)
            }
        };
        drop((da, h));
        let a = WgradOperand { operand: a, sorted: true };
        grads = grads.and(self.weight_grad(p, self.down, [self.width, self.ffn], (dy_cols, a), &map));
        let bias = self.bias(p, self.down_bias, self.width)?.filter(|_| p.rank.etp.rank() == 0);
        if let Some((bias, dy)) = bias.zip(dy) {
            // The bias gradient is stored later, that of the probabilities is needed now.
            let sums = Tensor::empty(s, &[self.count, self.width], DType::F32, Category::Workspace)?;
            let b = GroupedBias { segments, bias: &bias, weights: Some(&probs) };
            k.grouped_bias_backward(s, &b, &dy, (&sums, false), Some(&dp))?;
            grads = grads.and(self.down_bias.map(|id| WeightGrad::computed(id, sums)).unwrap_or_default());
        } else if let Some(id) = self.down_bias {
            grads = grads.and(WeightGrad::deferred(id, |rank, grad, accumulate| {
                if accumulate { Ok(()) } else { rank.compute.zero(grad) }
            }));
        }
        if let Some(bias) = self.bias(p, self.up_bias, self.inner())? {
            let sums = Tensor::empty(s, &[self.count, self.inner()], DType::F32, Category::Workspace)?;
            let b = GroupedBias { segments, bias: &bias, weights: None };
            k.grouped_bias_backward(s, &b, &dh, (&sums, false), None)?;
            grads = grads.and(self.up_bias.map(|id| WeightGrad::computed(id, sums)).unwrap_or_default());
        }
        let (mut dh, mut amax) = (dh, amax);
        if let Some((scaled, grad)) = self.rescale_backward(p, (0, up), (up_unscaled, &dh, &map))? {
            (dh, amax, grads) = (scaled.values, scaled.amax, grads.and(grad));
        }
        p.calibrates(self.up, Role::Gradient, &dh)?;
        let quantized =
            p.quantize(self.up, Role::Gradient, QuantInput::with_amax(&dh, amax.as_ref()), orientations(up))?;
        let rows = quantized.rows.unwrap_or_else(|| GemmOperand::rowwise(&dh));
        let dx = p.empty(&[n, self.width])?;
        let (w, _) = self.factor(p, (self.up, up), [self.inner(), self.width], LinearGemm::Dgrad)?;
        rows.grouped_gemm(p.rank, &w, segments, how, &dx)?;
        let x = WgradOperand { operand: x.operand(), sorted };
        if let (Some(adapter), Some(hidden)) = (&self.adapters[0], &up_hidden) {
            grads = grads.and(adapter.backward(p, (x.clone(), hidden, &map), &dh, &dx)?);
        }
        let dh = WgradOperand {
            operand: quantized.cols.unwrap_or_else(|| GemmOperand::columnwise(&dh)),
            sorted: true,
        };
        grads = grads.and(self.weight_grad(p, self.up, [self.inner(), self.width], (dh, x), &map));
        Ok((dx, dp, grads))
    }

    /// `dW_e = Σ dyᵀ·x` over the rows of each expert; `shape` is that of one expert's W.
    fn weight_grad(
        &self,
        p: &StepContext,
        id: ParamId,
        shape: [usize; 2],
        (dy, x): (WgradOperand, WgradOperand),
        map: &RowMap,
    ) -> WeightGrad {
        if p.is_frozen(id) {
            return WeightGrad::default();
        }
        let (count, map) = (self.count, map.clone());
        WeightGrad::deferred(id, move |rank, grad, accumulate| {
            let dw = grad.view(&[count, shape[0], shape[1]])?;
            dy.gradient(rank, &x, &map, (&dw, accumulate))
        })
    }
}
