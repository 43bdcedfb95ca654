//! The router: which experts each token goes to.

use super::state::{MoeLayerId, MoeState, SavedRouting};
use super::{ForcedRouting, MoeShape, MoeTraining, RouterDtype, RoutingMethod, aux_loss};
use crate::{Declarations, Init, ParamId, Part, Saved, SavedTensor, Split, StepContext, WeightGrad};
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{
    ExpertChoice, GateBackward, Gemm, Jitter, NormalFill, RngKey, Route, RouteBackward, RouterParams,
    ScoreFunction,
};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};
use std::sync::Arc;

/// GroupRank of the router's random numbers among those of a layer.
const JITTER: u32 = 16;
const FORCED: u32 = 17;

/// `x·Wᵀ (+ b)` to logits, and from those to choices.
pub struct Router {
    weight: ParamId,
    bias: Option<ParamId>,
    layer: u32,
    experts: usize,
    topk: usize,
    routing: RouterParams,
    expert_bias: bool,
    id: MoeLayerId,
    training: Arc<MoeTraining>,
}

/// The choices of each token.
#[derive(Clone)]
pub(crate) struct TopK {
    /// i32 `[T, k]`: experts, -1 for none.
    pub(crate) index: Tensor,
    /// f32 `[T, k]`
    pub(crate) probs: Tensor,
}

/// What backward needs.
pub struct RouterSaved {
    /// What the gate was applied to.
    x: SavedTensor,
    logits: SavedTensor,
    /// RoutingTrace before any were dropped.
    index: SavedTensor,
    balance: aux_loss::BalanceSaved,
}

impl Saved for RouterSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.logits);
        f(&mut self.index);
        f(&mut self.x);
    }
}

impl Router {
    /// Declares `<name>.weight` `[E, h]` and perhaps `<name>.bias`.
    pub(super) fn declare(
        d: &mut Declarations,
        name: &str,
        layer: u32,
        c: &MoeShape,
        id: MoeLayerId,
        training: &Arc<MoeTraining>,
    ) -> Result<Router> {
        let part = |kind: &str, shape: Vec<usize>, init| Part {
            name: format!("{name}.{kind}"),
            shape,
            init,
            split: Split::Replicated,
        };
        let weight = d.declare(vec![part("weight", vec![c.experts, c.hidden], Init::Normal(c.std.0))])?;
        let bias = c.router_bias.then(|| d.declare(vec![part("bias", vec![c.experts], Init::Constant(0.0))]));
        Ok(Router {
            weight,
            bias: bias.transpose()?,
            layer,
            experts: c.experts,
            topk: c.topk,
            routing: c.routing,
            expert_bias: c.expert_bias,
            id,
            training: training.clone(),
        })
    }

    /// RoutingTrace of the rows `x [T, h]`.
    pub(crate) fn forward(&self, p: &StepContext, x: &Tensor) -> Result<(TopK, RouterSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let state = p.moe_state()?;
        let x = self.jitter(p, x)?;
        let logits = self.force_routing(p, self.gate(p, &x)?)?;
        let t = x.shape()[0];
        let index = p.rank.activation(&[t, self.topk], DType::I32)?;
        let probs = p.rank.activation(&[t, self.topk], DType::F32)?;
        let again = if p.recomputing { state.recall(self.id, p.repeat) } else { None };
        if p.recomputing && again.is_none() {
            return shape_error("router", "a pass is computed again that was not remembered");
        }
        let given = match &again {
            Some(decided) => s.copy(&decided.index, &index).map(|()| true)?,
            None => state.replayed_routing(p, self.id, &index)?,
        };
        self.select_experts(p, state, &logits, given, &index, &probs)?;
        if again.is_none() {
            k.mask_padding(s, &p.segments(t)?, &index, &probs)?;
        }
        let balance = match again {
            Some(SavedRouting { weights, z, .. }) => aux_loss::BalanceSaved { weights, z },
            None if p.train => self.balance(p, state, &logits)?,
            None => aux_loss::BalanceSaved::default(),
        };
        if p.train && !p.recomputing && (p.recompute.layer || p.recompute.mlp) {
            let (weights, z) = (balance.weights.clone(), balance.z.clone());
            let repeat = p.repeat;
            state.remember(self.id, SavedRouting { index: index.clone(), weights, z, repeat });
        }
        let topk_routes = self.drop_over_capacity(p, state, TopK { index: index.clone(), probs })?;
        if p.train && !p.recomputing {
            state.record(p, self.id, &index);
            k.count_tokens(
                s,
                &topk_routes.index,
                &p.segments(t)?,
                &state.row(&state.tokens_per_expert, self.id)?,
            )?;
        }
        let saved = RouterSaved {
            x: SavedTensor::activation(&x),
            logits: SavedTensor::small(&logits),
            index: SavedTensor::small(&index),
            balance,
        };
        Ok((topk_routes, saved))
    }

    /// Fills `index`, unless it is given, and `probs`.
    fn select_experts(
        &self,
        p: &StepContext,
        state: &MoeState,
        logits: &Tensor,
        given: bool,
        index: &Tensor,
        probs: &Tensor,
    ) -> Result<()> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let mut how = self.routing;
        let mut choice = if given { ExpertChoice::Given } else { ExpertChoice::TopK { bias: None } };
        let bias = state.row(&state.expert_bias, self.id)?;
        match self.training.routing_method {
            RoutingMethod::Scores if self.expert_bias && !given => {
                choice = ExpertChoice::TopK { bias: Some(&bias) }
            }
            RoutingMethod::Scores => {}
            RoutingMethod::Sinkhorn => {
                how.score = if self.topk == 1 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
                if p.train && !given {
                    let even = p.rank.activation(logits.shape(), DType::F32)?;
                    k.sinkhorn(s, logits, &even)?;
                    k.top_k(s, &even, None, index)?;
                    choice = ExpertChoice::Given;
                }
            }
            RoutingMethod::Quantiles { .. } if !given => {
                let beta = state.row(&state.quantiles, self.id)?;
                k.top_k(s, logits, Some(&beta), index)?;
                choice = ExpertChoice::Given;
            }
            RoutingMethod::Quantiles { .. } => {}
        }
        k.route(s, &Route { params: how, choice, logits, index, probs })
    }

    /// The routing with the scores that probabilities come from.
    fn score_routing(&self) -> RouterParams {
        match self.training.routing_method {
            RoutingMethod::Sinkhorn if self.topk == 1 => {
                RouterParams { score: ScoreFunction::Sigmoid, ..self.routing }
            }
            RoutingMethod::Sinkhorn => RouterParams { score: ScoreFunction::Softmax, ..self.routing },
            _ => self.routing,
        }
    }

    /// Logits `[T, E]`.
    fn gate(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        let (k, s, t) = (&p.rank.kernels, &p.rank.compute, x.shape()[0]);
        let (w, bias) = (p.weight(self.weight)?, self.bias.map(|b| p.weight(b)).transpose()?);
        let dtype = if self.training.router_dtype == RouterDtype::Model { p.dtype() } else { DType::F32 };
        let logits = p.rank.activation(&[t, self.experts], dtype)?;
        if self.training.router_dtype == RouterDtype::F64 {
            k.gate_f64(s, x, w, &logits)?;
            if let Some(bias) = bias {
                k.add_router_bias(s, bias, &logits)?;
            }
            return Ok(logits);
        }
        let g = Gemm { a: x, trans_a: false, b: w, trans_b: true, bias: None, accumulate: false, c: &logits };
        k.gemm(s, &Gemm { bias, ..g })?;
        Ok(logits)
    }

    /// Other logits in place of the router's, for measurements.
    fn force_routing(&self, p: &StepContext, logits: Tensor) -> Result<Tensor> {
        let (Some(forced), Some(moe)) = (self.training.forced_routing, p.moe) else { return Ok(logits) };
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let key = RngKey { seed: p.rank.seed, step: moe.step, layer: self.layer + p.repeat, site: FORCED };
        let random = p.rank.activation(logits.shape(), DType::F32)?;
        k.fill_normal_logits(s, key, moe.rows, &random)?;
        if let ForcedRouting::Biased(std) = forced {
            // One number an expert, the same in all steps.
            let stream = RandomStream::named(p.rank.seed, &format!("layers.{}.forced", self.layer));
            let bias = table(p, &[1, self.experts], DType::F32)?;
            let runs = NormalFill { stream, first: 0, stride: 0, std: f64::from(std) };
            k.normal(s, runs, &bias)?;
            k.add_router_bias(s, &bias.view(&[self.experts])?, &random)?;
        }
        if logits.dtype() == DType::F32 {
            return Ok(random);
        }
        k.copy(s, &random, &logits)?;
        Ok(logits)
    }

    /// `x` times numbers near 1, or `x` itself.
    fn jitter(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        let (true, Some(moe)) = (self.training.jitter > 0.0 && p.train, p.moe) else { return Ok(x.clone()) };
        let key = RngKey { seed: p.rank.seed, step: moe.step, layer: self.layer + p.repeat, site: JITTER };
        let y = p.empty(x.shape())?;
        p.rank
            .kernels
            .jitter(&p.rank.compute, &Jitter { eps: self.training.jitter, key, rows: moe.rows, x, y: &y })?;
        Ok(y)
    }

    /// Statistics of the balancing losses and the z-loss.
    fn balance(&self, p: &StepContext, state: &MoeState, logits: &Tensor) -> Result<aux_loss::BalanceSaved> {
        let of = aux_loss::RouterDims {
            score: self.score_routing().score,
            topk: self.topk,
            experts: self.experts,
        };
        aux_loss::forward(p, state, self.id, &self.training, of, logits)
    }

    /// Drops choices beyond the capacity.
    fn drop_over_capacity(&self, p: &StepContext, state: &MoeState, topk_routes: TopK) -> Result<TopK> {
        let Some(c) = self.training.capacity.filter(|_| p.train) else { return Ok(topk_routes) };
        super::capacity::apply(p, state, self.id, c, self.experts, topk_routes)
    }

    /// Gradient of the input from that of the probabilities, f32 `[T, k]`.
    pub(crate) fn backward(
        &self,
        p: &StepContext,
        saved: RouterSaved,
        dprobs: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let RouterSaved { x, logits, index, balance } = saved;
        let dlogits = p.rank.activation(logits.shape(), logits.dtype())?;
        k.route_backward(
            s,
            &RouteBackward {
                params: self.score_routing(),
                logits: &logits,
                index: &index,
                dprobs,
                dlogits: &dlogits,
            },
        )?;
        let of = aux_loss::RouterDims {
            score: self.score_routing().score,
            topk: self.topk,
            experts: self.experts,
        };
        aux_loss::backward(p, &self.training, of, balance, &logits, &dlogits)?;
        let w = p.weight(self.weight)?;
        let dx = p.empty(x.shape())?;
        let plain = |a: &Tensor, b: &Tensor, c: &Tensor| {
            k.gemm(s, &Gemm { a, trans_a: false, b, trans_b: false, bias: None, accumulate: false, c })
        };
        let mut grads = match (self.training.router_dtype, dlogits.dtype() == p.dtype()) {
            (RouterDtype::F64, _) => {
                let sums = table(p, w.shape(), DType::F32)?;
                k.gate_f64_backward(
                    s,
                    &GateBackward { x: &x, w, dlogits: &dlogits, dx: &dx, dw: &sums, accumulate: false },
                )?;
                WeightGrad::computed(self.weight, sums)
            }
            (_, true) => {
                plain(&dlogits, w, &dx)?;
                WeightGrad::gemm(self.weight, &dlogits, &x)
            }
            (_, false) => {
                // f32 gradients as the sum of two bf16 numbers: products of bf16 then keep 16 bits of them.
                let [t, e] = [dlogits.shape()[0], self.experts];
                let halves = p.empty(&[t, 2 * e])?;
                k.split_bf16x2(s, &dlogits, &halves)?;
                let twice = p.empty(&[2 * e, w.shape()[1]])?;
                s.copy(w, &twice.narrow(0, 0, e)?)?;
                s.copy(w, &twice.narrow(0, e, e)?)?;
                plain(&halves, &twice, &dx)?;
                let half = |i| halves.narrow(1, i * e, e);
                let (high, low, x) = (half(0)?, half(1)?, (*x).clone());
                WeightGrad::deferred(self.weight, move |rank, grad, accumulate| {
                    let product = |dy: &Tensor, accumulate| {
                        let g = Gemm {
                            a: dy,
                            trans_a: true,
                            b: &x,
                            trans_b: false,
                            bias: None,
                            accumulate,
                            c: grad,
                        };
                        rank.kernels.gemm(&rank.compute, &g)
                    };
                    product(&high, accumulate)?;
                    product(&low, true)
                })
            }
        };
        if let Some(bias) = self.bias {
            grads = grads.and(WeightGrad::column_sums(bias, &dlogits));
        }
        let dx = self.jitter(p, &dx)?;
        Ok((dx, grads))
    }
}

/// New memory for a table of numbers of a step.
pub(super) fn table(p: &StepContext, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::empty(&p.rank.compute, shape, dtype, Category::Workspace)
}
