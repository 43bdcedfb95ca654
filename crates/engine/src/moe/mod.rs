//! A mixture of experts in place of an MLP: a router sends each token to k of E experts, and their results come back,
//! weighted by the probabilities of the choices.

mod capacity;
mod dispatch;
mod exchange;
mod experts;
mod input;
mod losses;
mod own;
mod router;
mod settings;
mod shared;
mod state;

pub use input::{Mix, MixInput, Order};
pub use settings::{Balancing, Capacity, Chooser, Dispatcher, Forced, GateType, MoeShape, MoeTraining};
pub use state::{Counters, MixtureId, MixtureSpec, Mixtures};

use crate::{Declarations, Measured, Pass, Saved, SavedTensor, WeightGrad};
use dispatch::{Dispatched, Room};
use experts::{Experts, ExpertsSaved};
use ferrotron_tensor::{Result, Tensor};
use own::{OwnLinear, OwnSaved};
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
    dispatched: Dispatched,
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
        Ok(Moe { router, experts, latent, shared, room: Room::of(d, c), training })
    }

    /// Does it need the largest magnitude of its input?
    pub fn measures_input(&self, p: &Pass) -> bool {
        self.shared.as_ref().is_some_and(|s| s.measures_input(p))
    }

    /// `[rows, hidden] → [rows, hidden]`
    pub fn forward(&self, p: &Pass, x: impl Into<Measured>) -> Result<(Tensor, MoeSaved)> {
        let x = x.into();
        let (routes, router) = self.router.forward(p, &x.values)?;
        let (inner, down) = match &self.latent {
            None => (x.values.clone(), None),
            Some((down, _)) => down.forward(p, &x.values).map(|(y, s)| (y, Some(s)))?,
        };
        let (rows, dispatched) = dispatch::there(p, &self.training, self.room, &routes, &inner)?;
        let (y, experts) = self.experts.forward(p, &rows)?;
        drop(rows);
        let y = dispatched.back(p, &y)?;
        let (y, up) = match &self.latent {
            None => (y, None),
            Some((_, up)) => up.forward(p, &y).map(|(y, s)| (y, Some(s)))?,
        };
        let (y, shared) = match &self.shared {
            None => (y, None),
            Some(shared) => {
                let (z, saved) = shared.forward(p, &x)?;
                let sum = p.empty(y.shape())?;
                p.rank.kernels.add(&p.rank.compute, &y, &z, &sum)?;
                (sum, Some(saved))
            }
        };
        Ok((y, MoeSaved { shared, latent: down.zip(up), experts, dispatched, router }))
    }

    /// Gradient of the input.
    pub fn backward(&self, p: &Pass, saved: MoeSaved, dy: &Tensor) -> Result<(Tensor, WeightGrad)> {
        let (k, s) = (&p.rank.kernels, &p.rank.compute);
        let MoeSaved { shared, latent, experts, dispatched, router } = saved;
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
        let rows = dispatched.there_again(p, &inner)?;
        let (dx, dp, g) = self.experts.backward(p, experts, &rows)?;
        drop(rows);
        grads = grads.and(g);
        let dprobs = dispatched.probs_back(p, &dp)?;
        let mut dx = dispatched.back(p, &dx)?;
        if let (Some((map, _)), Some(down)) = (&self.latent, down) {
            let (d, g) = map.backward(p, down, &dx)?;
            grads = grads.and(g);
            dx = d;
        }
        let (from_router, g) = self.router.backward(p, router, &dprobs)?;
        grads = grads.and(g);
        k.add_assign(s, &dx, &from_router)?;
        if let (Some(shared), Some(saved)) = (&self.shared, shared) {
            let (d, g) = shared.backward(p, saved, dy)?;
            grads = grads.and(g);
            k.add_assign(s, &dx, &d)?;
        }
        Ok((dx, grads))
    }
}
