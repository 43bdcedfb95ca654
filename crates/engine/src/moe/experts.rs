//! This rank's routed experts: two grouped GEMMs over rows sorted by expert, with the activation function between
//! them.

mod backward;
mod dispatch;
mod dora;
mod saved;

use super::MoeShape;
use crate::lora::{ExpertAdapter, Projection};
use crate::quant::{
    GemmOperand, GemmOptions, LinearGemm, LinearQuant, Orientations, QuantInput, Role, SavedOperand,
};
use crate::{Declarations, Init, ParamId, Part, SavedTensor, Split, StepContext, WithAmax};
pub(super) use dispatch::{DispatchRows, ExpertRows, RowScales};
use ferrotron_kernels::{Act, BLOCK, GroupedBias, RowMap, Segments, WeightedAct};
use ferrotron_tensor::{Result, Tensor};
pub(super) use saved::ExpertsSaved;

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

fn segments(map: &RowMap) -> Segments<'_> {
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
}
