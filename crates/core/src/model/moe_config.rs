//! Mixture-of-experts layers of an architecture, as plain data.

use super::config::{Activation, ModelConfig};
use ferrotron_engine::moe::MoeShape;
use ferrotron_kernels::{Act, GroupLimit, MAX_EXPERTS, MAX_TOPK, RouterParams, ScoreFunction};
use ferrotron_tensor::DType;
use serde::{Deserialize, Serialize};

/// MoE layers in place of MLPs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Experts of a layer (E).
    pub experts: usize,
    /// Experts per token (k).
    pub topk: usize,
    /// Width of an expert (f); of one of gate and up where gated.
    pub ffn: usize,
    /// Which layers are MoE layers; empty when all are. Otherwise one entry per layer.
    #[serde(default)]
    pub layers: Vec<bool>,
    /// Score function of the router.
    pub score: ScoreKind,
    /// Softmax over all experts before top-k, instead of over the top-k logits.
    #[serde(default)]
    pub pre_softmax: bool,
    /// Group-limited routing: experts are divided into groups, and only the best groups are routed to: [groups, top
    /// groups].
    #[serde(default)]
    pub groups: Option<[usize; 2]>,
    /// Experts whose scores rank a group (DeepSeek-V3: 2); none: topk / kept groups, as Megatron Core does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_rank_topk: Option<usize>,
    /// Divide sigmoid and sqrt-softplus scores of the chosen experts by their sum; none: where topk is above 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalize: Option<bool>,
    /// Scaling factor of the routing probabilities.
    pub scale: f32,
    /// Add an expert bias to the scores for top-k, updated from the load (auxiliary-loss-free balancing).
    #[serde(default)]
    pub expert_bias: bool,
    /// Router bias.
    #[serde(default)]
    pub router_bias: bool,
    /// Biases of the experts.
    #[serde(default)]
    pub bias: bool,
    /// Clamped SwiGLU of the experts (GPT-OSS).
    #[serde(default)]
    pub clamp: Option<Clamp>,
    /// Width that experts work in, if it differs from the hidden size.
    #[serde(default)]
    pub latent: Option<usize>,
    /// Width of the shared expert, which every token goes to.
    #[serde(default)]
    pub shared_ffn: Option<usize>,
    /// Weight the shared expert's output by a sigmoid gate.
    #[serde(default)]
    pub shared_gate: bool,
}

/// Score function of the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreKind {
    /// Softmax.
    Softmax,
    /// 1 / (1 + exp(-x))
    Sigmoid,
    /// √log(1 + exp(x))
    SqrtSoftplus,
}

/// `min(g, limit)·σ(alpha·min(g, limit))·(clamp(u, ±limit) + offset)`
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clamp {
    /// Bound of gate and up.
    pub limit: f32,
    /// Steepness of the sigmoid.
    pub alpha: f32,
    /// Added to the clamped up branch.
    pub offset: f32,
}

impl MoeConfig {
    /// Whether every token's only expert has probability 1, so that the loss sends the router no gradient.
    pub fn router_is_constant(&self) -> bool {
        self.topk == 1 && self.score == ScoreKind::Softmax && !self.pre_softmax
    }

    /// All layers MoE layers, with a softmax over the top-k logits.
    pub fn plain(experts: usize, topk: usize, ffn: usize) -> MoeConfig {
        MoeConfig {
            experts,
            topk,
            ffn,
            layers: Vec::new(),
            score: ScoreKind::Softmax,
            pre_softmax: false,
            groups: None,
            group_rank_topk: None,
            normalize: None,
            scale: 1.0,
            expert_bias: false,
            router_bias: false,
            bias: false,
            clamp: None,
            latent: None,
            shared_ffn: None,
            shared_gate: false,
        }
    }

    /// Whether layer `i` is an MoE layer.
    pub fn is_moe_layer(&self, i: usize) -> bool {
        self.layers.is_empty() || self.layers.get(i).copied().unwrap_or(false)
    }

    /// The router's parameters as kernels take them.
    pub fn routing(&self) -> RouterParams {
        let score = match self.score {
            ScoreKind::Softmax if self.pre_softmax => ScoreFunction::Softmax,
            ScoreKind::Softmax => ScoreFunction::SoftmaxAfterTopK,
            ScoreKind::Sigmoid => ScoreFunction::Sigmoid,
            ScoreKind::SqrtSoftplus => ScoreFunction::SqrtSoftplus,
        };
        let best = |keep: usize| self.group_rank_topk.unwrap_or(self.topk / keep.max(1));
        let groups = self.groups.map(|[count, keep]| GroupLimit { count, keep, best: best(keep) });
        let normalize = self.normalize.unwrap_or(self.topk > 1);
        RouterParams { score, normalize, groups, scale: self.scale }
    }
}

/// The activation function of a model's MLPs.
pub(super) fn act_of(c: &ModelConfig) -> Act {
    match c.activation {
        Activation::GeluTanh => Act::GeluTanh,
        Activation::GeluErf => Act::GeluErf,
        Activation::SquaredRelu => Act::SquaredRelu,
        Activation::Silu => Act::Silu,
    }
}

impl ModelConfig {
    /// The MoE settings of layer `i`, if it is an MoE layer.
    pub fn moe_layer(&self, i: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|m| m.is_moe_layer(self.template_layer(i)))
    }

    /// Decoder layers that are MoE layers.
    pub fn moe_layer_count(&self) -> usize {
        (0..self.layers).filter(|i| self.moe_layer(*i).is_some()).count()
    }

    /// The MoE block as the engine takes it; `std`: of initial weights, and of those that write into the residual
    /// stream.
    pub(super) fn moe_shape(&self, m: &MoeConfig, std: (f32, f32)) -> MoeShape {
        let clamped = |c: Clamp| Act::ClampedSilu { limit: c.limit, alpha: c.alpha, offset: c.offset };
        MoeShape {
            hidden: self.hidden,
            ffn: m.ffn,
            experts: m.experts,
            topk: m.topk,
            routing: m.routing(),
            router_bias: m.router_bias,
            bias: m.bias,
            expert_bias: m.expert_bias,
            act: m.clamp.map_or_else(|| act_of(self), clamped),
            gated: self.gated,
            latent: m.latent,
            shared: m.shared_ffn,
            shared_gate: m.shared_gate,
            std,
        }
    }

    /// Why the model cannot compute in a dtype, if it cannot.
    pub fn refused_dtype(&self, dtype: DType) -> Option<&'static str> {
        let why = "f16 does not support MoE models: their grouped GEMMs take f32 or bf16, and the loss scale is not applied to \
                   auxiliary losses; use bf16";
        (dtype == DType::F16 && self.moe.is_some()).then_some(why)
    }

    /// Appends what is wrong with the MoE settings, one sentence each.
    pub(super) fn check_moe(&self, bad: &mut Vec<String>) {
        const MAX_SIZE: usize = 1 << 20;
        let Some(m) = &self.moe else { return };
        // What the router's kernels take.
        let sizes = [
            ("moe.experts", m.experts, MAX_EXPERTS),
            ("moe.topk", m.topk, MAX_TOPK),
            ("moe.ffn", m.ffn, MAX_SIZE),
        ];
        for (name, size, most) in sizes {
            if size == 0 || size > most {
                bad.push(format!("{name} is {size}, it must be 1 to {most}"));
            }
        }
        for (name, size) in [("moe.latent", m.latent), ("moe.shared_ffn", m.shared_ffn)] {
            match size {
                Some(0) => bad.push(format!("{name} is 0; leave it out where there is none")),
                Some(size) if size > super::validate::MAX_SIZE => {
                    bad.push(format!("{name} is {size}, it must be 1 to {}", super::validate::MAX_SIZE));
                }
                _ => {}
            }
        }
        if m.topk > m.experts {
            bad.push(format!("moe.topk ({}) is more than the {} experts there are", m.topk, m.experts));
        }
        if !m.layers.is_empty() && m.layers.len() != self.layers {
            let (found, layers) = (m.layers.len(), self.layers);
            bad.push(format!(
                "moe.layers has {found} entries for {layers} layers; give one per layer, or none"
            ));
        }
        if m.expert_bias && m.score == ScoreKind::Softmax {
            bad.push("moe.expert_bias needs moe.score_function = \"sigmoid\" or \"sqrt_softplus\"".into());
        }
        if !(m.scale.is_finite() && m.scale > 0.0) {
            bad.push(format!("moe.route_scale is {}, it must be a positive number", m.scale));
        }
        if let Some([groups, keep]) = m.groups {
            let divides = groups > 0 && (1..=groups).contains(&keep) && m.experts.is_multiple_of(groups);
            let size = if divides { m.experts / groups } else { 0 };
            let fits = match m.group_rank_topk {
                Some(best) => (1..=size).contains(&best) && m.topk <= keep * size,
                None => divides && m.topk.is_multiple_of(keep) && m.topk / keep <= size,
            };
            if !fits {
                bad.push(format!(
                    "moe.groups = [{groups}, {keep}]: {groups} must divide the {} experts, {keep} must divide topk = {}, and a \
                     group must hold topk / {keep} experts",
                    m.experts, m.topk
                ));
            }
        }
        if m.clamp.is_some() && !self.gated {
            bad.push("the activation clamp needs gated experts; set model.gated = true".into());
        }
        if m.shared_gate && m.shared_ffn.is_none() {
            bad.push("moe.shared_gate weights a shared expert; set moe.shared_ffn".into());
        }
    }
}

/// The index of an MoE layer by its name: 3 for `layers.3.moe`, `decoder_layers + 1` for `mtp.1.layer.moe`.
pub(crate) fn moe_layer_index(name: &str, decoder_layers: usize) -> usize {
    let number = name.split('.').find_map(|part| part.parse().ok()).unwrap_or(0);
    if name.starts_with("mtp.") { decoder_layers + number } else { number }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtp_layers_are_numbered_after_the_decoder() {
        let index = |name| moe_layer_index(name, 24);
        assert_eq!((index("layers.12.moe"), index("moe")), (12, 0));
        assert_eq!((index("mtp.0.layer.moe"), index("mtp.1.layer.moe")), (24, 25));
    }
}
