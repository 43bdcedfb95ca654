//! Architecture and training options of an MoE layer: plain data.

use ferrotron_kernels::{Act, RouterParams};

/// Architecture of an MoE layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeShape {
    /// Hidden size (h).
    pub hidden: usize,
    /// Intermediate size of an expert (f); of each half where gated.
    pub ffn: usize,
    /// Number of experts (E).
    pub experts: usize,
    /// Experts per token (k).
    pub topk: usize,
    /// Score function, group limit and scaling of the router.
    pub routing: RouterParams,
    /// Router bias.
    pub router_bias: bool,
    /// Biases in the experts.
    pub bias: bool,
    /// A learned-by-counting bias added to the scores before selection (aux-loss-free balancing).
    pub expert_bias: bool,
    /// Activation function of the experts.
    pub act: Act,
    /// Gated (GLU) experts.
    pub gated: bool,
    /// Routed experts work in this width instead of h, between a down- and an up-projection that all of them share.
    pub latent: Option<usize>,
    /// Intermediate size of the shared expert.
    pub shared: Option<usize>,
    /// Whether a learned sigmoid gate weights the shared expert's output.
    pub shared_gate: bool,
    /// Standard deviation of initial weights, and of the output projections'.
    pub std: (f32, f32),
}

/// Auxiliary load-balancing losses, by the set of tokens they balance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuxLossKind {
    /// The tokens of a micro-batch.
    Batch,
    /// The tokens of each sequence.
    Sequence,
    /// The tokens of the step so far, over all ranks.
    Global,
}

impl AuxLossKind {
    /// All kinds, in the order in which they are logged.
    pub const ALL: [AuxLossKind; 3] = [AuxLossKind::Batch, AuxLossKind::Sequence, AuxLossKind::Global];

    /// Name of its metric.
    pub fn name(self) -> &'static str {
        match self {
            AuxLossKind::Batch => "load_balancing_loss",
            AuxLossKind::Sequence => "seq_load_balancing_loss",
            AuxLossKind::Global => "global_load_balancing_loss",
        }
    }
}

/// How experts are selected in training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RoutingMethod {
    /// Top-k of the scores.
    Scores,
    /// Top-k after Sinkhorn balancing.
    Sinkhorn,
    /// Top-k of the logits minus each expert's quantile, a running mean over steps.
    Quantiles {
        /// Weight of the old quantile in the running mean; with 1 quantiles stay, and none are estimated.
        keep: f32,
    },
}

/// Dtype in which the router computes its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterDtype {
    /// The model's dtype.
    Model,
    /// f32.
    F32,
    /// f64 accumulation, f32 logits.
    F64,
}

/// Capacity of an expert: at most `factor` times the mean number of tokens per expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Capacity factor.
    pub factor: f64,
    /// Drop the least probable tokens; otherwise the last ones.
    pub by_probability: bool,
    /// Pad every expert's rows to its capacity with zeros.
    pub pad: bool,
    /// Bound each rank's tokens instead of the micro-batch's; results then depend on the layout.
    pub per_rank: bool,
}

/// Random logits in place of the router's, for benchmarks. The router's weights still get gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ForcedRouting {
    /// Standard normal logits: nearly balanced.
    Even,
    /// The same plus a normal offset of this standard deviation per expert: imbalanced.
    Biased(f32),
}

/// How tokens reach experts on other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatcher {
    /// Every rank gathers all tokens; the host never waits.
    AllGather,
    /// Every rank receives the tokens of its experts.
    AllToAll,
}

/// Training options of an MoE layer.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeTraining {
    /// Auxiliary losses and their coefficients.
    pub balance: Vec<(AuxLossKind, f32)>,
    /// Divide the global auxiliary loss by dp, as Megatron Core does.
    pub global_over_dp: bool,
    /// How experts are selected.
    pub routing_method: RoutingMethod,
    /// Coefficient of the z-loss, the mean of logsumexp(logits)².
    pub z_loss: f32,
    /// Input jitter: the router's input is multiplied by uniform factors in `1 ± jitter`.
    pub jitter: f32,
    /// Dtype of the logits.
    pub router_dtype: RouterDtype,
    /// Expert capacity; None drops no tokens.
    pub capacity: Option<Capacity>,
    /// Update rate of the expert bias, applied once per step.
    pub bias_rate: f32,
    /// Random logits for benchmarks.
    pub forced_routing: Option<ForcedRouting>,
    /// Token dispatcher.
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
