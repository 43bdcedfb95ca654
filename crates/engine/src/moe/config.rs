//! What a mixture is, and how it is trained: plain data.

use ferrotron_kernels::{Act, RouterParams};

/// The architecture of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeShape {
    /// Width of the residual stream (h).
    pub hidden: usize,
    /// Width inside an expert (f), of one half when gated.
    pub ffn: usize,
    /// Experts (E).
    pub experts: usize,
    /// Experts of each token (k).
    pub topk: usize,
    /// From logits to choices and probabilities.
    pub routing: RouterParams,
    /// Does the router have a bias?
    pub router_bias: bool,
    /// Do experts have biases?
    pub bias: bool,
    /// Is a bias learned by counting added to scores for the choice?
    pub expert_bias: bool,
    /// The non-linearity of experts.
    pub act: Act,
    /// Do they have a gate?
    pub gated: bool,
    /// Experts work in this width instead of h, between two maps that all of them share.
    pub latent: Option<usize>,
    /// Width inside the expert that every token goes to.
    pub shared: Option<usize>,
    /// Is that expert's output weighted by a learned gate?
    pub shared_gate: bool,
    /// Deviation of initial weights, and of those that write into the residual stream.
    pub std: (f32, f32),
}

/// How the load is evened out by the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuxLossKind {
    /// Over the tokens of a micro-batch.
    Batch,
    /// Over the tokens of each sequence.
    Sequence,
    /// Over the tokens of the step so far, of all ranks.
    Global,
}

impl AuxLossKind {
    /// All of them, in the order in which they are logged.
    pub const ALL: [AuxLossKind; 3] = [AuxLossKind::Batch, AuxLossKind::Sequence, AuxLossKind::Global];

    /// Its name among the numbers of a step.
    pub fn name(self) -> &'static str {
        match self {
            AuxLossKind::Batch => "load_balancing_loss",
            AuxLossKind::Sequence => "seq_load_balancing_loss",
            AuxLossKind::Global => "global_load_balancing_loss",
        }
    }
}

/// Who chooses in training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RoutingMethod {
    /// The best scores.
    Scores,
    /// The best of Sinkhorn's balanced matrix.
    Sinkhorn,
    /// The best logits above each expert's quantile, which moves by `1 - keep` of what a step finds.
    Quantiles {
        /// Part of the old quantile that stays.
        keep: f32,
    },
}

/// Type in which the router makes its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterDtype {
    /// That of the model.
    Model,
    /// f32.
    F32,
    /// Sums in f64.
    F64,
}

/// A bound on the tokens of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Times the mean load.
    pub factor: f64,
    /// The most probable stay; otherwise the first.
    pub by_probability: bool,
    /// Every expert gets exactly so many rows, of zeros where it has fewer tokens.
    pub pad: bool,
    /// Bound the tokens of each rank, and not those of the micro-batch: results then depend on the layout.
    pub per_rank: bool,
}

/// Logits that are not the router's, for measurements. Its weights still get gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ForcedRouting {
    /// Normal numbers: nearly even loads.
    Even,
    /// The same plus a normal number of this deviation for each expert: uneven ones.
    Biased(f32),
}

/// How tokens come to experts on other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatcher {
    /// Every rank gets all tokens. Nobody waits for the host.
    AllGather,
    /// Every rank gets the tokens of its experts.
    AllToAll,
}

/// How a mixture is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeTraining {
    /// Losses that even out the load, with their coefficients.
    pub balance: Vec<(AuxLossKind, f32)>,
    /// The global one counts 1/dp, as in Megatron Core.
    pub global_over_dp: bool,
    /// Who chooses.
    pub routing_method: RoutingMethod,
    /// Coefficient of the mean square of logsumexp(logits).
    pub z_loss: f32,
    /// The router's input is multiplied by numbers from 1 - jitter to 1 + jitter.
    pub jitter: f32,
    /// Type of logits.
    pub router_dtype: RouterDtype,
    /// Bound on loads.
    pub capacity: Option<Capacity>,
    /// Step of the correction bias, once a step of the run.
    pub bias_rate: f32,
    /// Logits for measurements.
    pub forced_routing: Option<ForcedRouting>,
    /// How tokens travel.
    pub dispatcher: Dispatcher,
}

impl Default for MoeTraining {
    fn default() -> MoeTraining {
        MoeTraining {
            balance: Vec::new(),
            global_over_dp: false,
            routing_method: RoutingMethod::Scores,
            z_loss: 0.0,
            jitter: 0.0,
            router_dtype: RouterDtype::F32,
            capacity: None,
            bias_rate: 1e-3,
            forced_routing: None,
            dispatcher: Dispatcher::AllToAll,
        }
    }
}
