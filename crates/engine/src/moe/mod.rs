//! Mixture of experts in place of an MLP: a router sends each token to its top-k of E experts, and the experts' outputs
//! are combined, weighted by the routing probabilities.
//!
//! | file | what |
//! |---|---|
//! | `router.rs` | logits, top-k selection, router gradient; `capacity.rs` drops tokens over capacity, `aux_loss.rs` balances |
//! | `token_dispatcher.rs`, `all_to_all.rs` | permutation and communication of tokens to experts and back |
//! | `experts.rs`, `experts/` | grouped GEMMs of this rank's experts |
//! | `shared_expert.rs` | the expert that every token goes to |
//! | `split_sizes.rs` | sizes of all-to-all messages that are known before tokens are routed |
//! | `state.rs`, `replay.rs` | expert bias and counters of a step; recorded and replayed routing |
//! | `batch.rs`, `config.rs` | which rows are tokens; architecture and training options |

mod all_to_all;
mod aux_loss;
mod batch;
mod capacity;
mod config;
mod experts;
mod replay;
mod router;
mod shared_expert;
mod split_sizes;
mod state;
mod token_dispatcher;

pub use batch::{MoeBatch, MoeInput, MoeRows, TokenOrder};
pub use config::{
    AuxLossKind, Capacity, Dispatcher, ForcedRouting, MoeShape, MoeTraining, RouterDtype, RoutingMethod,
};
pub use replay::{LayerUse, RoutingTrace};
pub use router::SavedRouting;
pub use split_sizes::{SplitHeadroom, SplitSizes, StepCounts};
pub use state::{MoeCounters, MoeLayerId, MoeLayerSpec, MoeState};

use crate::{
    Declarations, Linear, LinearSaved, Module, Saved, SavedTensor, StepContext, UpdateGroup, WeightGrad,
    WithAmax, yield_now,
};
use experts::{DispatchRows, Experts, ExpertsSaved};
use ferrotron_tensor::{Result, Tensor};
use router::{Router, RouterSaved};
use shared_expert::{SharedExpert, SharedExpertSaved};
use std::sync::Arc;
use token_dispatcher::{ExpertLayout, TokenDispatch};

/// A mixture-of-experts block: router, routed experts, and optionally a shared expert.
///
/// With `latent`, routed experts work in a smaller width: `latent_down` maps hidden states to it before dispatch,
/// `latent_up` maps the combined output back.
pub struct Moe {
    router: Router,
    experts: Experts,
    latent: Option<(Linear, Linear)>,
    shared: Option<SharedExpert>,
    layout: ExpertLayout,
    training: Arc<MoeTraining>,
}

/// What [`Moe::backward`] needs from [`Moe::forward`].
pub struct MoeSaved {
    shared: Option<SharedExpertSaved>,
    latent: Option<(LinearSaved, LinearSaved)>,
    experts: ExpertsSaved,
    dispatch: TokenDispatch,
    router: RouterSaved,
}

impl Saved for MoeSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.shared.modules(f);
        if let Some((_, up)) = &mut self.latent {
            up.tensors(&mut |t| f(Module::ExpertFc2, t));
        }
        self.experts.modules(f);
        if let Some((down, _)) = &mut self.latent {
            down.tensors(&mut |t| f(Module::ExpertFc1, t));
        }
        self.router.tensors(&mut |t| f(Module::Router, t));
    }

    fn routing(&self) -> Option<&SavedRouting> {
        Some(self.router.routing())
    }
}

impl Moe {
    /// Declares `<name>.router`, `<name>.experts.<e>` and, where configured, `<name>.shared` and `<name>.latent_{down,up}`.
    pub fn declare(d: &mut Declarations, name: &str, layer: u32, c: &MoeShape) -> Result<Moe> {
        let training = d.moe_training().clone();
        let id = d.moe_layer(MoeLayerSpec {
            name: name.into(),
            experts: c.experts,
            expert_bias: c.expert_bias,
            quantiles: matches!(training.routing_method, RoutingMethod::Quantiles { .. }),
            router: UpdateGroup::default(),
        });
        let router = Router::declare(d, (&format!("{name}.router"), layer), c, id, &training)?;
        let latent = match c.latent {
            None => None,
            Some(l) => Some((
                Linear::declare_replicated(d, &format!("{name}.latent_down"), c.hidden, l, c.std.0)?,
                Linear::declare_replicated(d, &format!("{name}.latent_up"), l, c.hidden, c.std.1)?,
            )),
        };
        let experts = Experts::declare(d, &format!("{name}.experts"), c)?;
        let shared = match c.shared {
            None => None,
            Some(ffn) => Some(SharedExpert::declare(d, &format!("{name}.shared"), c, ffn)?),
        };
        let layout = ExpertLayout::of(d, c, id, experts.align());
        Ok(Moe { router, experts, latent, shared, layout, training })
    }

    /// Whether the caller should pass the amax of the input along with it.
    pub fn needs_input_amax(&self, p: &StepContext) -> bool {
        let experts = self.latent.is_none() && self.experts.needs_input_amax(p);
        experts || self.shared.as_ref().is_some_and(|s| s.needs_input_amax(p))
    }

    /// `[tokens, hidden] → [tokens, hidden]`. Yields while tokens are in flight to the experts and while expert outputs
    /// are in flight back, so that another pass can compute meanwhile.
    pub async fn forward(&self, p: &StepContext<'_>, x: impl Into<WithAmax>) -> Result<(Tensor, MoeSaved)> {
        let x = x.into();

        // Route.
        let (topk, router) = self.router.forward(p, &x.values)?;
        let (inner, down) = match &self.latent {
            None => (x.clone(), None),
            Some((down, _)) => down.forward(p, &x.values).map(|(y, s)| (WithAmax::from(&y), Some(s)))?,
        };

        // Dispatch tokens to the ranks of their experts; the shared expert computes while they are in flight.
        let (dispatch, topk) = TokenDispatch::plan(p, &self.training, self.layout, &topk)?;
        let DispatchRows { rows, scales } = self.experts.dispatch_input(p, &inner)?;
        let tokens = dispatch.send(p, &rows, "tokens for experts")?;
        let probs = dispatch.send_probs(p, &topk)?;
        let shared = self.shared.as_ref().map(|s| s.forward(p, &x)).transpose()?;
        yield_now().await;

        // Expert compute, then send the outputs back.
        let rows = dispatch.expert_rows(p, (tokens, scales), probs)?;
        let (y, experts) = self.experts.forward(p, rows)?;
        let y = dispatch.send_back(p, &y, "results of experts")?;
        yield_now().await;

        // Combine: sum each token's k expert outputs and add the shared expert's.
        let y = dispatch.combine(p, y)?;
        let (y, up) = match &self.latent {
            None => (y, None),
            Some((_, up)) => up.forward(p, &y).map(|(y, s)| (y, Some(s)))?,
        };
        let (y, shared) = match shared {
            None => (y, None),
            Some((z, saved)) => {
                let sum = p.empty(y.shape())?;
                p.rank.kernels.add(&p.rank.compute, &y, &z, &sum)?;
                (sum, Some(saved))
            }
        };
        Ok((y, MoeSaved { shared, latent: down.zip(up), experts, dispatch, router }))
    }

    /// Gradient of the input. Yields while gradients are in flight to the experts and back.
    pub async fn backward(
        &self,
        p: &StepContext<'_>,
        saved: MoeSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let MoeSaved { shared, latent, experts, dispatch, router } = saved;
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let (down, up) = latent.unzip();
        let mut grads = WeightGrad::default();

        // Dispatch output gradients to the experts; the shared expert's backward runs while they are in flight.
        let inner = match (&self.latent, up) {
            (Some((_, linear)), Some(up)) => {
                let (d, g) = linear.backward(p, up, dy)?;
                grads = grads.and(g);
                d
            }
            _ => dy.clone(),
        };
        let DispatchRows { rows, scales } = self.experts.dispatch_grad(p, &inner)?;
        let dout = dispatch.send(p, &rows, "gradients for experts")?;
        let dshared = match (&self.shared, shared) {
            (Some(shared), Some(saved)) => {
                let (d, g) = shared.backward(p, saved, dy)?;
                grads = grads.and(g);
                Some(d)
            }
            _ => None,
        };
        yield_now().await;

        // Expert backward, then send the input gradients and those of the probabilities back.
        let (dx, dprobs, g) = self.experts.backward(p, experts, (dout.wait(s)?, scales))?;
        grads = grads.and(g);
        let dprobs = dispatch.send_dprobs(p, &dprobs)?;
        let dx = dispatch.send_back(p, &dx, "gradients of tokens")?;
        yield_now().await;

        // Router backward, and the sum of all gradients of the input.
        let dprobs = dispatch.combine_dprobs(p, dprobs)?;
        let (drouter, g) = self.router.backward(p, router, &dprobs)?;
        grads = grads.and(g);
        let mut dx = dispatch.combine(p, dx)?;
        if let (Some((linear, _)), Some(down)) = (&self.latent, down) {
            let (d, g) = linear.backward(p, down, &dx)?;
            grads = grads.and(g);
            dx = d;
        }
        k.add_assign(s, &dx, &drouter)?;
        if let Some(d) = &dshared {
            k.add_assign(s, &dx, d)?;
        }
        Ok((dx, grads))
    }
}
