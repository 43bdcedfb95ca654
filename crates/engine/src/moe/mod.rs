//! A mixture of experts in place of an MLP: a router sends each token to k of E experts, and their results come back,
//! weighted by the probabilities of the choices.

mod all_to_all;
mod aux_loss;
mod batch;
mod capacity;
mod config;
mod experts;
mod replay;
mod replicated_linear;
mod router;
mod shared_expert;
mod state;
mod token_dispatcher;

pub use batch::{MoeBatch, MoeInput, TokenOrder};
pub use config::{
    AuxLossKind, Capacity, Dispatcher, ForcedRouting, MoeShape, MoeTraining, RouterDtype, RoutingMethod,
};
pub use replay::{LayerUse, RoutingTrace};
pub use replicated_linear::{ReplicatedLinear, ReplicatedSaved};
pub use state::{MoeCounters, MoeLayerId, MoeLayerSpec, MoeState};

use crate::{Declarations, Saved, SavedTensor, StepContext, WeightGrad, WithAmax, yield_now};
use experts::{Experts, ExpertsSaved, RowScales};
use ferrotron_tensor::{Result, Tensor};
use router::{Router, RouterSaved};
use shared_expert::{SharedExpert, SharedExpertSaved};
use std::sync::Arc;
use token_dispatcher::{ExpertLayout, InFlight, TokenDispatch};

/// Router, experts, and what all tokens share.
pub struct Moe {
    router: Router,
    experts: Experts,
    latent: Option<(ReplicatedLinear, ReplicatedLinear)>,
    shared: Option<SharedExpert>,
    layout: ExpertLayout,
    training: Arc<MoeTraining>,
}

/// What backward needs.
pub struct MoeSaved {
    shared: Option<SharedExpertSaved>,
    latent: Option<(ReplicatedSaved, ReplicatedSaved)>,
    experts: ExpertsSaved,
    dispatch: TokenDispatch,
    router: RouterSaved,
}

impl Saved for MoeSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.shared.tensors(f);
        if let Some((_, up)) = &mut self.latent {
            up.tensors(f);
        }
        self.experts.tensors(f);
        if let Some((down, _)) = &mut self.latent {
            down.tensors(f);
        }
        self.router.tensors(f);
    }
}

/// A forward pass whose tokens are on their way to experts.
struct Dispatched {
    x: (InFlight, RowScales),
    probs: InFlight,
    dispatch: TokenDispatch,
    router: RouterSaved,
    down: Option<ReplicatedSaved>,
    shared: Option<(Tensor, SharedExpertSaved)>,
}

/// A forward pass whose results are on their way back.
struct ExpertsDone {
    y: InFlight,
    experts: ExpertsSaved,
    dispatch: TokenDispatch,
    router: RouterSaved,
    down: Option<ReplicatedSaved>,
    shared: Option<(Tensor, SharedExpertSaved)>,
}

/// A backward pass whose gradients are on their way to experts.
struct DispatchedBackward {
    dy: (InFlight, RowScales),
    experts: ExpertsSaved,
    dispatch: TokenDispatch,
    router: RouterSaved,
    down: Option<ReplicatedSaved>,
    shared: Option<Tensor>,
    grads: WeightGrad,
}

/// A backward pass whose gradients are on their way back.
struct ExpertsDoneBackward {
    dx: InFlight,
    dprobs: InFlight,
    dispatch: TokenDispatch,
    router: RouterSaved,
    down: Option<ReplicatedSaved>,
    shared: Option<Tensor>,
    grads: WeightGrad,
}

impl Moe {
    /// Declares `<name>.router`, `<name>.experts.<e>`, and perhaps `<name>.shared` and the maps of a latent width.
    pub fn declare(d: &mut Declarations, name: &str, layer: u32, c: &MoeShape) -> Result<Moe> {
        let training = d.moe_training().clone();
        let id = d.moe_layer(MoeLayerSpec {
            name: name.into(),
            experts: c.experts,
            expert_bias: c.expert_bias,
            quantiles: matches!(training.routing_method, RoutingMethod::Quantiles { .. }),
        });
        let router = Router::declare(d, &format!("{name}.router"), layer, c, id, &training)?;
        let latent = match c.latent {
            None => None,
            Some(l) => Some((
                ReplicatedLinear::declare(d, &format!("{name}.latent_down"), c.hidden, l, c.std.0)?,
                ReplicatedLinear::declare(d, &format!("{name}.latent_up"), l, c.hidden, c.std.1)?,
            )),
        };
        let experts = Experts::declare(d, &format!("{name}.experts"), c)?;
        let shared = match c.shared {
            None => None,
            Some(ffn) => Some(SharedExpert::declare(d, &format!("{name}.shared"), c, ffn)?),
        };
        let layout = ExpertLayout::of(d, c, experts.align());
        Ok(Moe { router, experts, latent, shared, layout, training })
    }

    /// Does it need the largest magnitude of its input?
    pub fn needs_input_amax(&self, p: &StepContext) -> bool {
        let experts = self.latent.is_none() && self.experts.needs_input_amax(p);
        experts || self.shared.as_ref().is_some_and(|s| s.needs_input_amax(p))
    }

    /// `[rows, hidden] → [rows, hidden]`. A turn ends whenever rows are on their way.
    pub async fn forward(&self, p: &StepContext<'_>, x: impl Into<WithAmax>) -> Result<(Tensor, MoeSaved)> {
        let leaving = self.dispatch(p, x)?;
        yield_now().await;
        let returning = self.expert_forward(p, leaving)?;
        yield_now().await;
        self.combine(p, returning)
    }

    /// The first third of [`Moe::forward`]: tokens are sent. What they all share is computed meanwhile.
    fn dispatch(&self, p: &StepContext, x: impl Into<WithAmax>) -> Result<Dispatched> {
        let x = x.into();
        let (topk_routes, router) = self.router.forward(p, &x.values)?;
        let (inner, down) = match &self.latent {
            None => (x.clone(), None),
            Some((down, _)) => down.forward(p, &x.values).map(|(y, s)| (WithAmax::from(&y), Some(s)))?,
        };
        let (dispatch, topk_routes) = TokenDispatch::plan(p, &self.training, self.layout, &topk_routes)?;
        let out = self.experts.send(p, &inner)?;
        let sent = (dispatch.send(p, &out.rows, "tokens for experts")?, out.sent);
        let probs = dispatch.send_probs(p, &topk_routes)?;
        let shared = self.shared.as_ref().map(|s| s.forward(p, &x)).transpose()?;
        Ok(Dispatched { x: sent, probs, dispatch, router, down, shared })
    }

    /// The second third: experts work, and results are sent back.
    fn expert_forward(&self, p: &StepContext, l: Dispatched) -> Result<ExpertsDone> {
        let Dispatched { x, probs, dispatch, router, down, shared } = l;
        let rows = dispatch.take_rows(p, x, probs)?;
        let (y, experts) = self.experts.forward(p, rows)?;
        let y = dispatch.send_combine(p, &y, "results of experts")?;
        Ok(ExpertsDone { y, experts, dispatch, router, down, shared })
    }

    /// The last third: results are summed.
    fn combine(&self, p: &StepContext, r: ExpertsDone) -> Result<(Tensor, MoeSaved)> {
        let ExpertsDone { y, experts, dispatch, router, down, shared } = r;
        let y = dispatch.take_combined(p, y)?;
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

    /// Gradient of the input. A turn ends whenever rows are on their way.
    pub async fn backward(
        &self,
        p: &StepContext<'_>,
        saved: MoeSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let leaving = self.dispatch_backward(p, saved, dy)?;
        yield_now().await;
        let returning = self.expert_backward(p, leaving)?;
        yield_now().await;
        self.combine_backward(p, returning)
    }

    /// The first third of [`Moe::backward`]: gradients of results are sent.
    fn dispatch_backward(&self, p: &StepContext, saved: MoeSaved, dy: &Tensor) -> Result<DispatchedBackward> {
        let MoeSaved { shared, latent, experts, dispatch, router } = saved;
        let mut grads = WeightGrad::default();
        let (down, up) = latent.unzip();
        let inner = match (&self.latent, up) {
            (Some((_, map)), Some(up)) => {
                let (d, g) = map.backward(p, up, dy)?;
                grads = grads.and(g);
                d
            }
            _ => dy.clone(),
        };
        let out = self.experts.send_gradient(p, &inner)?;
        let sent = (dispatch.send(p, &out.rows, "gradients for experts")?, out.sent);
        let shared = match (&self.shared, shared) {
            (Some(shared), Some(saved)) => {
                let (d, g) = shared.backward(p, saved, dy)?;
                grads = grads.and(g);
                Some(d)
            }
            _ => None,
        };
        Ok(DispatchedBackward { dy: sent, experts, dispatch, router, down, shared, grads })
    }

    /// The second third: back through the experts.
    fn expert_backward(&self, p: &StepContext, l: DispatchedBackward) -> Result<ExpertsDoneBackward> {
        let DispatchedBackward { dy, experts, dispatch, router, down, shared, grads } = l;
        let (dx, dp, g) = self.experts.backward(p, experts, (dy.0.take(p)?, dy.1))?;
        let dprobs = dispatch.send_dprobs(p, &dp)?;
        let dx = dispatch.send_combine(p, &dx, "gradients of tokens")?;
        Ok(ExpertsDoneBackward { dx, dprobs, dispatch, router, down, shared, grads: grads.and(g) })
    }

    /// The last third: back through the router.
    fn combine_backward(&self, p: &StepContext, r: ExpertsDoneBackward) -> Result<(Tensor, WeightGrad)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let ExpertsDoneBackward { dx, dprobs, dispatch, router, down, shared, mut grads } = r;
        let dprobs = dispatch.take_dprobs(p, dprobs)?;
        let (from_router, g) = self.router.backward(p, router, &dprobs)?;
        grads = grads.and(g);
        let mut dx = dispatch.take_combined(p, dx)?;
        if let (Some((map, _)), Some(down)) = (&self.latent, down) {
            let (d, g) = map.backward(p, down, &dx)?;
            grads = grads.and(g);
            dx = d;
        }
        k.add_assign(s, &dx, &from_router)?;
        if let Some(d) = &shared {
            k.add_assign(s, &dx, d)?;
        }
        Ok((dx, grads))
    }
}
