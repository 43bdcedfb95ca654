//! A peer's `config.json` as our architecture. Keys that are absent keep Megatron Core's defaults.

use super::golden::{as_count, count, counts, flag, list, number, only_keys, text};
use ferrotron_core::model::config::*;
use ferrotron_core::model::{ModelConfig, MoeConfig, MtpConfig, moe_config::ScoreKind};
use ferrotron_engine::moe::{AuxLossKind, Capacity, MoeTraining};
use serde_json::Value;

/// Keys of `transformer_config`.
const TRANSFORMER: [&str; 41] = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "gated_linear_unit",
    "activation_func",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "softmax_scale",
    "softmax_type",
    "window_size",
    "no_rope_freq",
    "rotary_interleaved",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
    "moe_token_dispatcher_type",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "layernorm_epsilon",
    "vocab_size",
    "share_embeddings_and_output_weights",
];

/// Keys of `model`, the arguments of `GPTModel`.
const MODEL: [&str; 9] = [
    "vocab_size",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rotary_interleaved",
    "seq_len_interpolation_factor",
    "rope_scaling",
    "rope_scaling_factor",
    "share_embeddings_and_output_weights",
];

/// What the two sections of a `config.json` say together.
struct Keys<'a>(&'a Value);

impl Keys<'_> {
    fn section(&self, key: &str) -> &Value {
        let transformer = &self.0["transformer_config"];
        if transformer[key].is_null() { &self.0["model"] } else { transformer }
    }

    fn has(&self, key: &str) -> bool {
        !self.section(key)[key].is_null()
    }

    fn size(&self, key: &str) -> usize {
        count(self.section(key), key)
    }

    fn size_or(&self, key: &str, otherwise: usize) -> usize {
        if self.has(key) { self.size(key) } else { otherwise }
    }

    fn optional(&self, key: &str) -> Option<usize> {
        self.has(key).then(|| self.size(key))
    }

    fn real_or(&self, key: &str, otherwise: f64) -> f64 {
        if self.has(key) { number(self.section(key), key) } else { otherwise }
    }

    fn flag(&self, key: &str) -> bool {
        flag(self.section(key), key)
    }

    fn text_or<'a>(&'a self, key: &str, otherwise: &'a str) -> &'a str {
        if self.has(key) { text(self.section(key), key) } else { otherwise }
    }

    /// One number per layer: a list as it is, a number n as "every n-th layer".
    fn per_layer(&self, key: &str, layers: usize, every: impl Fn(usize, usize) -> bool) -> Vec<bool> {
        match &self.section(key)[key] {
            Value::Null => Vec::new(),
            Value::Array(_) => counts(self.section(key), key).into_iter().map(|x| x == 1).collect(),
            one => {
                let n = as_count(one).unwrap_or_else(|| panic!("{key} is {one}"));
                (0..layers).map(|i| every(i, n)).collect()
            }
        }
    }
}

/// Architecture, MoE losses, and the weight of the MTP loss. `positions` is the size of a learned position table.
pub fn read(json: &Value, positions: Option<usize>) -> (ModelConfig, MoeTraining, f64) {
    only_keys("config.json", json, &["transformer_config", "model", "layernorm_epsilon", "total_loss"]);
    only_keys("transformer_config", &json["transformer_config"], &TRANSFORMER);
    only_keys("model", &json["model"], &MODEL);
    let k = Keys(json);
    let mut c = ModelConfig::preset("tiny").unwrap();
    (c.layers, c.hidden, c.heads) =
        (k.size("num_layers"), k.size("hidden_size"), k.size("num_attention_heads"));
    c.ffn = k.size_or("ffn_hidden_size", 4 * c.hidden);
    c.kv_heads = k.size_or("num_query_groups", c.heads);
    c.head_dim = k.size_or("kv_channels", c.hidden / c.heads);
    c.vocab = k.size("vocab_size");
    c.norm = NormConfig {
        kind: match k.text_or("normalization", "LayerNorm") {
            "LayerNorm" => NormKind::LayerNorm,
            "RMSNorm" => NormKind::RmsNorm,
            other => panic!("the format has no normalization {other}"),
        },
        eps: number(json, "layernorm_epsilon") as f32,
        zero_centred: false,
    };
    c.activation = match k.text_or("activation_func", "gelu") {
        "gelu" => Activation::GeluErf,
        "silu" => Activation::Silu,
        "squared_relu" => Activation::SquaredRelu,
        other => panic!("the format has no activation_func {other}"),
    };
    c.gated = k.flag("gated_linear_unit");
    let bias = !k.has("add_bias_linear") || k.flag("add_bias_linear");
    (c.qkv_bias, c.proj_bias, c.mlp_bias) = (bias || k.flag("add_qkv_bias"), bias, bias);
    c.qk_norm = k.flag("qk_layernorm");
    c.attn_scale = k.real_or("softmax_scale", 1.0 / (c.head_dim as f64).sqrt()) as f32;
    c.attn_sink = match k.text_or("softmax_type", "vanilla") {
        "vanilla" => false,
        "learnable" => true,
        other => panic!("the format has no softmax_type {other}"),
    };
    (c.window, c.rope_local) = (None, None);
    c.local_layers.clear();
    if k.has("window_size") {
        let both: Vec<i64> =
            list(k.section("window_size"), "window_size").iter().map(|x| x.as_i64().unwrap()).collect();
        let &[left, right] = &both[..] else { panic!("window_size is {both:?}") };
        assert_eq!(right, 0, "a causal window ends at the token itself");
        // -1 is unbounded; the peer counts keys besides the token's own.
        if left >= 0 {
            (c.window, c.local_layers) = (Some(left as usize + 1), vec![true; c.layers]);
        }
    }
    c.tied = k.flag("share_embeddings_and_output_weights");
    c.max_positions = positions.unwrap_or(1024);
    c.positions = match k.text_or("position_embedding_type", "learned_absolute") {
        "learned_absolute" => Positions::Learned,
        "rope" => Positions::Rope(RopeConfig {
            theta: k.real_or("rotary_base", 1e4),
            rotary_dim: (c.head_dim as f64 * k.real_or("rotary_percent", 1.0)) as usize,
            interleaved: k.flag("rotary_interleaved"),
            scaling: rope_scaling(&k),
        }),
        other => panic!("the format has no position_embedding_type {other}"),
    };
    // One layer in n is without rotation, the last of each n.
    c.no_rope_layers = k.per_layer("no_rope_freq", c.layers, |i, n| (i + 1) % n == 0);
    c.mtp = k.optional("mtp_num_layers").map(|layers| MtpConfig { layers, shared_layer: false });
    c.moe = k.has("num_moe_experts").then(|| moe(&k, &c, bias));
    c.validate().unwrap();
    (c, training(&k), k.real_or("mtp_loss_scaling_factor", 0.1))
}

fn rope_scaling(k: &Keys) -> RopeScaling {
    match (k.flag("rope_scaling"), k.has("seq_len_interpolation_factor")) {
        (false, false) => RopeScaling::None,
        (false, true) => RopeScaling::Linear { factor: k.real_or("seq_len_interpolation_factor", 1.0) },
        (true, false) => RopeScaling::Llama3 {
            factor: k.real_or("rope_scaling_factor", 8.0),
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        },
        (true, true) => {
            panic!("rope_scaling with seq_len_interpolation_factor: this version has one of them")
        }
    }
}

fn moe(k: &Keys, c: &ModelConfig, bias: bool) -> MoeConfig {
    let groups = k.optional("moe_router_num_groups");
    MoeConfig {
        layers: k.per_layer("moe_layer_freq", c.layers, |i, n| i % n == 0),
        score: match k.text_or("moe_router_score_function", "softmax") {
            "softmax" => ScoreKind::Softmax,
            "sigmoid" => ScoreKind::Sigmoid,
            "sqrtsoftplus" => ScoreKind::SqrtSoftplus,
            other => panic!("the format has no moe_router_score_function {other}"),
        },
        pre_softmax: k.flag("moe_router_pre_softmax"),
        groups: groups.map(|groups| [groups, k.size("moe_router_group_topk")]),
        scale: k.real_or("moe_router_topk_scaling_factor", 1.0) as f32,
        expert_bias: k.flag("moe_router_enable_expert_bias"),
        router_bias: bias,
        bias,
        shared_ffn: k.optional("moe_shared_expert_intermediate_size"),
        shared_gate: k.flag("moe_shared_expert_gate"),
        ..MoeConfig::plain(
            k.size("num_moe_experts"),
            k.size_or("moe_router_topk", 2),
            k.size_or("moe_ffn_hidden_size", c.ffn),
        )
    }
}

fn training(k: &Keys) -> MoeTraining {
    let balancing = |name: &str| match name {
        "aux_loss" => Some(AuxLossKind::Batch),
        "seq_aux_loss" => Some(AuxLossKind::Sequence),
        "global_aux_loss" => Some(AuxLossKind::Global),
        "none" => None,
        other => panic!("the format has no moe_router_load_balancing_type {other}"),
    };
    let both =
        ["moe_router_load_balancing_type", "moe_aux_loss_coeff"].map(|key| match &k.section(key)[key] {
            Value::Null => Vec::new(),
            Value::Array(all) => all.clone(),
            one => vec![one.clone()],
        });
    let kinds: Vec<&str> = match &both[0][..] {
        [] => vec!["aux_loss"],
        names => names.iter().map(|n| n.as_str().unwrap()).collect(),
    };
    let coefficients: Vec<f64> = both[1].iter().map(|x| x.as_f64().unwrap()).collect();
    assert!(coefficients.is_empty() || coefficients.len() == kinds.len(), "moe_aux_loss_coeff of {kinds:?}");
    let balance = kinds.iter().zip(&coefficients).filter(|(_, c)| **c != 0.0);
    let balance = balance.filter_map(|(name, c)| Some((balancing(name)?, *c as f32))).collect();
    let capacity = k.has("moe_expert_capacity_factor").then(|| Capacity {
        factor: k.real_or("moe_expert_capacity_factor", 1.0),
        by_probability: match k.text_or("moe_token_drop_policy", "probs") {
            "probs" => true,
            "position" => false,
            other => panic!("the format has no moe_token_drop_policy {other}"),
        },
        pad: k.flag("moe_pad_expert_input_to_capacity"),
        per_rank: false,
    });
    MoeTraining {
        balance,
        z_loss: k.real_or("moe_z_loss_coeff", 0.0) as f32,
        capacity,
        ..MoeTraining::default()
    }
}
