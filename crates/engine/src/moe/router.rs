//! The router: logits, top-k selection and probabilities of each token, and their gradient.

use super::state::{MoeLayerId, MoeState};
use super::{ForcedRouting, MoeShape, MoeTraining, RouterDtype, RoutingMethod, aux_loss};
use crate::{Declarations, Init, ParamId, Part, Saved, SavedTensor, Split, StepContext, WeightGrad};
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{
    ExpertSelection, GateBackward, Gemm, Jitter, NormalFill, Route, RouteBackward, RouterParams,
    ScoreFunction,
};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};
use std::sync::Arc;

/// Sites of the router's random numbers, beside those of the layer's dropout.
const JITTER: u32 = 16;
const FORCED: u32 = 17;

/// Router: logits `x·Wᵀ (+ b)`, from which the top-k experts of each token and their probabilities follow.
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

/// The selected experts of each token.
#[derive(Clone)]
pub(crate) struct TopK {
    /// i32 `[T, k]`: expert ids, -1 for none.
    pub(crate) index: Tensor,
    /// f32 `[T, k]`: probabilities.
    pub(crate) probs: Tensor,
}

/// What a forward pass decided and a recomputation of it must repeat.
///
/// Selecting experts again could give another result: with Sinkhorn or quantile balancing it depends on state that has
/// moved on, and rounding may break ties differently. It belongs to the saved activations of its micro-batch, so that
/// backward passes may run in any order.
#[derive(Clone, Debug)]
pub struct SavedRouting {
    /// i32 `[T, k]`: selected experts, before any token is dropped.
    pub(super) index: SavedTensor,
    /// f32 `[segments, E]` for each auxiliary loss: the weight of every expert's score in its gradient.
    pub(super) aux_weights: Vec<SavedTensor>,
    /// f64 `[2]` of the z-loss: sum of squared logsumexp, and number of tokens.
    pub(super) z_sums: Option<SavedTensor>,
}

impl Saved for SavedRouting {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.index);
        self.aux_weights.iter_mut().for_each(&mut *f);
        self.z_sums.tensors(f);
    }
}

/// What [`Router::backward`] needs.
pub struct RouterSaved {
    /// `[T, h]`: the router's input, jittered where jitter is on.
    x: SavedTensor,
    /// `[T, E]`
    logits: SavedTensor,
    routing: SavedRouting,
}

impl RouterSaved {
    /// The part that recomputation needs.
    pub(super) fn routing(&self) -> &SavedRouting {
        &self.routing
    }
}

impl Saved for RouterSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(&mut self.logits);
        self.routing.tensors(f);
        f(&mut self.x);
    }
}

impl Router {
    /// Declares `<name>.weight` `[E, h]` and, where configured, `<name>.bias`. `layer` keys its random numbers.
    pub(super) fn declare(
        d: &mut Declarations,
        (name, layer): (&str, u32),
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

    /// Selects experts for the rows `x [T, h]`. A recomputation takes the selection of the pass it repeats, and counts
    /// nothing a second time.
    pub(crate) fn forward(&self, p: &StepContext, x: &Tensor) -> Result<(TopK, RouterSaved)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let state = p.moe_state()?;
        let x = self.jitter(p, x)?;
        let logits = self.force_routing(p, self.gate(p, &x)?)?;
        let t = x.shape()[0];
        let probs = p.rank.activation(&[t, self.topk], DType::F32)?;
        let routing = match (p.recomputing, p.saved_routing) {
            (true, None) => {
                return shape_error("router", "recomputation needs the routing of the forward pass");
            }
            (true, Some(routing)) => {
                self.select_experts(p, state, &logits, true, (&routing.index, &probs))?;
                routing.clone()
            }
            (false, _) => {
                let index = p.rank.activation(&[t, self.topk], DType::I32)?;
                let replayed = state.replayed_routing(p, self.id, &index)?;
                self.select_experts(p, state, &logits, replayed, (&index, &probs))?;
                k.mask_padding(s, &p.segments(t)?, &index, &probs)?;
                let (aux_weights, z_sums) = match p.train {
                    true => aux_loss::forward(p, (state, self.id), &self.training, self.dims(p), &logits)?,
                    false => Default::default(),
                };
                SavedRouting { index: SavedTensor::small(&index), aux_weights, z_sums }
            }
        };
        let topk = self.drop_over_capacity(p, state, TopK { index: (*routing.index).clone(), probs })?;
        if p.train && !p.recomputing {
            state.record(p, self.id, &routing.index);
            let counts = state.row(&state.tokens_per_expert, self.id)?;
            k.count_tokens(s, &topk.index, &p.segments(t)?, &counts)?;
        }
        let saved =
            RouterSaved { x: SavedTensor::activation(&x), logits: SavedTensor::small(&logits), routing };
        Ok((topk, saved))
    }

    /// Writes `probs` and, unless it is `given`, `index`.
    fn select_experts(
        &self,
        p: &StepContext,
        state: &MoeState,
        logits: &Tensor,
        given: bool,
        (index, probs): (&Tensor, &Tensor),
    ) -> Result<()> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let mut how = self.routing;
        let mut selection = if given { ExpertSelection::Given } else { ExpertSelection::TopK { bias: None } };
        let bias = state.row(&state.expert_bias, self.id)?;
        match self.training.routing_method {
            RoutingMethod::Scores if self.expert_bias && !given => {
                selection = ExpertSelection::TopK { bias: Some(&bias) }
            }
            RoutingMethod::Scores => {}
            RoutingMethod::Sinkhorn => {
                how.score = if self.topk == 1 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
                if p.train && !given {
                    let balanced = p.rank.activation(logits.shape(), DType::F32)?;
                    k.sinkhorn(s, logits, &balanced)?;
                    k.top_k(s, &balanced, None, index)?;
                    selection = ExpertSelection::Given;
                }
            }
            RoutingMethod::Quantiles { .. } if !given => {
                let beta = state.row(&state.quantiles, self.id)?;
                k.top_k(s, logits, Some(&beta), index)?;
                selection = ExpertSelection::Given;
            }
            RoutingMethod::Quantiles { .. } => {}
        }
        k.route(s, &Route { params: how, selection, logits, index, probs })
    }

    /// Router parameters with the score function that the probabilities come from.
    fn score_routing(&self) -> RouterParams {
        match self.training.routing_method {
            RoutingMethod::Sinkhorn if self.topk == 1 => {
                RouterParams { score: ScoreFunction::Sigmoid, ..self.routing }
            }
            RoutingMethod::Sinkhorn => RouterParams { score: ScoreFunction::Softmax, ..self.routing },
            _ => self.routing,
        }
    }

    /// Logits `[T, E]`, in the dtype that `router_dtype` asks for.
    fn gate(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        let (k, s, t) = (&p.rank.kernels, &p.rank.compute, x.shape()[0]);
        let (w, bias) = (p.weight(self.weight)?, self.bias.map(|b| p.weight(b)).transpose()?);
        let dtype = if self.training.router_dtype == RouterDtype::Model { p.dtype() } else { DType::F32 };
        let logits = p.rank.activation(&[t, self.experts], dtype)?;
        if self.training.router_dtype == RouterDtype::F64 {
            k.gate_f64(s, x, &w, &logits)?;
            if let Some(bias) = bias {
                k.add_router_bias(s, &bias, &logits)?;
            }
            return Ok(logits);
        }
        let g =
            Gemm { a: x, trans_a: false, b: &w, trans_b: true, bias: None, accumulate: false, c: &logits };
        k.gemm(s, &Gemm { bias: bias.as_deref(), ..g })?;
        Ok(logits)
    }

    /// Replaces the logits by random ones, for benchmarks with a known balance.
    fn force_routing(&self, p: &StepContext, logits: Tensor) -> Result<Tensor> {
        let (Some(forced), Some(moe)) = (self.training.forced_routing, p.moe) else { return Ok(logits) };
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let key = p.random_key(moe.step, self.layer, FORCED);
        let random = p.rank.activation(logits.shape(), DType::F32)?;
        k.fill_normal_logits(s, key, moe.rows, &random)?;
        if let ForcedRouting::Biased(std) = forced {
            // One offset per expert, the same in every step.
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

    /// Input jitter: `x` times factors in `1 ± jitter`, or `x` itself where jitter is off.
    fn jitter(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        let (true, Some(moe)) = (self.training.jitter > 0.0 && p.train, p.moe) else { return Ok(x.clone()) };
        let key = p.random_key(moe.step, self.layer, JITTER);
        let y = p.empty(x.shape())?;
        p.rank
            .kernels
            .jitter(&p.rank.compute, &Jitter { eps: self.training.jitter, key, rows: moe.rows, x, y: &y })?;
        Ok(y)
    }

    fn dims(&self, p: &StepContext) -> aux_loss::RouterDims {
        aux_loss::RouterDims {
            score: self.score_routing().score,
            topk: self.topk,
            experts: self.experts,
            uses: p.params.specs()[self.weight.0].uses.max(1),
        }
    }

    /// Drops tokens over the capacity of their expert.
    fn drop_over_capacity(&self, p: &StepContext, state: &MoeState, topk: TopK) -> Result<TopK> {
        let Some(c) = self.training.capacity.filter(|_| p.train) else { return Ok(topk) };
        super::capacity::apply(p, (state, self.id), c, self.experts, topk)
    }

    /// Gradient of the input from `dprobs` f32 `[T, k]`; the gradients of auxiliary losses are added to the logits'.
    pub(crate) fn backward(
        &self,
        p: &StepContext,
        saved: RouterSaved,
        dprobs: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let RouterSaved { x, logits, routing } = saved;
        let dlogits = p.rank.activation(logits.shape(), logits.dtype())?;
        k.route_backward(
            s,
            &RouteBackward {
                params: self.score_routing(),
                logits: &logits,
                index: &routing.index,
                dprobs,
                dlogits: &dlogits,
            },
        )?;
        aux_loss::backward(p, &self.training, self.dims(p), &routing, (&logits, &dlogits))?;
        let w = p.weight(self.weight)?;
        let dx = p.empty(x.shape())?;
        let gemm = |a: &Tensor, b: &Tensor, c: &Tensor| {
            k.gemm(s, &Gemm { a, trans_a: false, b, trans_b: false, bias: None, accumulate: false, c })
        };
        let mut grads = match (self.training.router_dtype, dlogits.dtype() == p.dtype()) {
            (RouterDtype::F64, _) => {
                let sums = table(p, w.shape(), DType::F32)?;
                k.gate_f64_backward(
                    s,
                    &GateBackward { x: &x, w: &w, dlogits: &dlogits, dx: &dx, dw: &sums, accumulate: false },
                )?;
                WeightGrad::computed(self.weight, sums)
            }
            (_, true) => {
                gemm(&dlogits, &w, &dx)?;
                WeightGrad::gemm(self.weight, &dlogits, &x)
            }
            (_, false) => {
                // f32 gradients as a sum of two bf16 values: bf16 GEMMs then keep 16 bits of their mantissa.
                let [t, e] = [dlogits.shape()[0], self.experts];
                let halves = p.empty(&[t, 2 * e])?;
                k.split_bf16x2(s, &dlogits, &halves)?;
                let twice = p.empty(&[2 * e, w.shape()[1]])?;
                s.copy(&w, &twice.narrow(0, 0, e)?)?;
                s.copy(&w, &twice.narrow(0, e, e)?)?;
                gemm(&halves, &twice, &dx)?;
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

/// Workspace memory for a small table.
pub(super) fn table(p: &StepContext, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::empty(&p.rank.compute, shape, dtype, Category::Workspace)
}
