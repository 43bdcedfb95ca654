//! A mixture of experts in place of an MLP: a router sends each token to k of E experts, and their results come back,
//! weighted by the probabilities of the choices.

mod capacity;
mod dispatch;
mod exchange;
mod experts;
mod input;
mod losses;
mod own;
mod replay;
mod router;
mod settings;
mod shared;
mod state;

pub use input::{Mix, MixInput, Order};
pub use own::{OwnLinear, OwnSaved};
pub use replay::{Choices, Use};
pub use settings::{Balancing, Capacity, Chooser, Dispatcher, Forced, GateType, MoeShape, MoeTraining};
pub use state::{Counters, MixtureId, MixtureSpec, Mixtures};

use crate::{Declarations, Measured, Pass, Saved, SavedTensor, WeightGrad, turn};
use dispatch::{Arriving, Dispatch, Room};
use experts::{Experts, ExpertsSaved, Sent};
use ferrotron_tensor::{Result, Tensor};
use router::{Router, RouterSaved};
use shared::{Shared, SharedSaved};
use std::sync::Arc;

/// Router, experts, and what all tokens share.
pub struct Moe {
    router: Router,
    experts: Experts,
    latent: Option<(OwnLinear, OwnLinear)>,
    shared: Option<Shared>,
    room: Room,
    training: Arc<MoeTraining>,
}

/// What backward needs.
pub struct MoeSaved {
    shared: Option<SharedSaved>,
    latent: Option<(OwnSaved, OwnSaved)>,
    experts: ExpertsSaved,
    dispatch: Dispatch,
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
struct Leaving {
    x: (Arriving, Sent),
    probs: Arriving,
    dispatch: Dispatch,
    router: RouterSaved,
    down: Option<OwnSaved>,
    shared: Option<(Tensor, SharedSaved)>,
}

/// A forward pass whose results are on their way back.
struct Returning {
    y: Arriving,
    experts: ExpertsSaved,
    dispatch: Dispatch,
    router: RouterSaved,
    down: Option<OwnSaved>,
    shared: Option<(Tensor, SharedSaved)>,
}

/// A backward pass whose gradients are on their way to experts.
struct LeavingBack {
    dy: (Arriving, Sent),
    experts: ExpertsSaved,
    dispatch: Dispatch,
    router: RouterSaved,
    down: Option<OwnSaved>,
    shared: Option<Tensor>,
    grads: WeightGrad,
}

/// A backward pass whose gradients are on their way back.
struct ReturningBack {
    dx: Arriving,
    dprobs: Arriving,
    dispatch: Dispatch,
    router: RouterSaved,
    down: Option<OwnSaved>,
    shared: Option<Tensor>,
    grads: WeightGrad,
}

impl Moe {
    /// Declares `<name>.router`, `<name>.experts.<e>`, and perhaps `<name>.shared` and the maps of a latent width.
    pub fn declare(d: &mut Declarations, name: &str, layer: u32, c: &MoeShape) -> Result<Moe> {
        let training = d.mixing().clone();
        let id = d.mixture(MixtureSpec {
            name: name.into(),
            experts: c.experts,
            correction: c.correction,
            quantiles: matches!(training.chooser, Chooser::Quantiles { .. }),
        });
        let router = Router::declare(d, &format!("{name}.router"), layer, c, id, &training)?;
        let latent = match c.latent {
            None => None,
            Some(l) => Some((
                OwnLinear::declare(d, &format!("{name}.latent_down"), c.hidden, l, c.std.0)?,
                OwnLinear::declare(d, &format!("{name}.latent_up"), l, c.hidden, c.std.1)?,
            )),
        };
        let experts = Experts::declare(d, &format!("{name}.experts"), c)?;
        let shared = match c.shared {
            None => None,
            Some(ffn) => Some(Shared::declare(d, &format!("{name}.shared"), c, ffn)?),
        };
        let room = Room::of(d, c, experts.align());
        Ok(Moe { router, experts, latent, shared, room, training })
    }

    /// Does it need the largest magnitude of its input?
    pub fn measures_input(&self, p: &Pass) -> bool {
        let experts = self.latent.is_none() && self.experts.measures_input(p);
        experts || self.shared.as_ref().is_some_and(|s| s.measures_input(p))
    }

    /// `[rows, hidden] → [rows, hidden]`. A turn ends whenever rows are on their way.
    pub async fn forward(&self, p: &Pass<'_>, x: impl Into<Measured>) -> Result<(Tensor, MoeSaved)> {
        let leaving = self.leave(p, x)?;
        turn().await;
        let returning = self.work(p, leaving)?;
        turn().await;
        self.come_back(p, returning)
    }

    /// The first third of [`Moe::forward`]: tokens are sent. What they all share is computed meanwhile.
    fn leave(&self, p: &Pass, x: impl Into<Measured>) -> Result<Leaving> {
        let x = x.into();
        let (routes, router) = self.router.forward(p, &x.values)?;
        let (inner, down) = match &self.latent {
            None => (x.clone(), None),
            Some((down, _)) => down.forward(p, &x.values).map(|(y, s)| (Measured::from(&y), Some(s)))?,
        };
        let (dispatch, routes) = Dispatch::plan(p, &self.training, self.room, &routes)?;
        let out = self.experts.send(p, &inner)?;
        let sent = (dispatch.send(p, &out.rows, "tokens for experts")?, out.sent);
        let probs = dispatch.send_probs(p, &routes)?;
        let shared = self.shared.as_ref().map(|s| s.forward(p, &x)).transpose()?;
        Ok(Leaving { x: sent, probs, dispatch, router, down, shared })
    }

    /// The second third: experts work, and results are sent back.
    fn work(&self, p: &Pass, l: Leaving) -> Result<Returning> {
        let Leaving { x, probs, dispatch, router, down, shared } = l;
        let rows = dispatch.take_rows(p, x, probs)?;
        let (y, experts) = self.experts.forward(p, rows)?;
        let y = dispatch.send_back(p, &y, "results of experts")?;
        Ok(Returning { y, experts, dispatch, router, down, shared })
    }

    /// The last third: results are summed.
    fn come_back(&self, p: &Pass, r: Returning) -> Result<(Tensor, MoeSaved)> {
        let Returning { y, experts, dispatch, router, down, shared } = r;
        let y = dispatch.take_back(p, y)?;
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
    pub async fn backward(&self, p: &Pass<'_>, saved: MoeSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        let leaving = self.leave_back(p, saved, dy)?;
        turn().await;
        let returning = self.work_back(p, leaving)?;
        turn().await;
        self.come_back_back(p, returning)
    }

    /// The first third of [`Moe::backward`]: gradients of results are sent.
    fn leave_back(&self, p: &Pass, saved: MoeSaved, dy: &Tensor) -> Result<LeavingBack> {
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
        Ok(LeavingBack { dy: sent, experts, dispatch, router, down, shared, grads })
    }

    /// The second third: back through the experts.
    fn work_back(&self, p: &Pass, l: LeavingBack) -> Result<ReturningBack> {
        let LeavingBack { dy, experts, dispatch, router, down, shared, grads } = l;
        let (dx, dp, g) = self.experts.backward(p, experts, (dy.0.take(p)?, dy.1))?;
        let dprobs = dispatch.send_probs_back(p, &dp)?;
        let dx = dispatch.send_back(p, &dx, "gradients of tokens")?;
        Ok(ReturningBack { dx, dprobs, dispatch, router, down, shared, grads: grads.and(g) })
    }

    /// The last third: back through the router.
    fn come_back_back(&self, p: &Pass, r: ReturningBack) -> Result<(Tensor, WeightGrad)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let ReturningBack { dx, dprobs, dispatch, router, down, shared, mut grads } = r;
        let dprobs = dispatch.take_probs_back(p, dprobs)?;
        let (from_router, g) = self.router.backward(p, router, &dprobs)?;
        grads = grads.and(g);
        let mut dx = dispatch.take_back(p, dx)?;
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
