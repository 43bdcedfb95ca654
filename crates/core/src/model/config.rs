//! The architecture of a decoder-only transformer as plain data. Every supported model family is a setting of these
//! fields.

use super::moe_config::MoeConfig;
use super::mtp_config::MtpConfig;
pub use ferrotron_kernels::rope_tables::RopeScaling;
use serde::{Deserialize, Serialize};

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Decoder layers (L).
    pub layers: usize,
    /// Width of the residual stream (h).
    pub hidden: usize,
    /// MLP width (f); of one of gate and up where gated.
    pub ffn: usize,
    /// Query heads (n).
    pub heads: usize,
    /// Key/value heads (g); divides `heads`.
    pub kv_heads: usize,
    /// Channels per head (d); not always hidden / heads.
    pub head_dim: usize,
    /// Vocabulary (V): rows of the embedding.
    pub vocab: usize,
    /// Longest sequence the model supports.
    pub max_positions: usize,
    /// The norm used everywhere in the model.
    pub norm: NormConfig,
    /// Activation function of the MLP.
    pub activation: Activation,
    /// Gated MLP: `act(gate) * up`.
    pub gated: bool,
    /// Biases on the q, k, v projections.
    pub qkv_bias: bool,
    /// Bias on the attention output projection.
    pub proj_bias: bool,
    /// Biases on the MLP projections.
    pub mlp_bias: bool,
    /// Norm over each head of q and k before RoPE.
    pub qk_norm: bool,
    /// The norms of q and k run over all their heads at once instead of each head (OLMo-2).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub qk_norm_all_heads: bool,
    /// Norms before attention and before the MLP; every family has them but OLMo-2.
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub pre_norms: bool,
    /// Norms after attention and after the MLP, before the residual addition (Gemma 2 and 3, OLMo-2).
    pub post_norms: bool,
    /// Position encoding.
    pub positions: Positions,
    /// RoPE of the sliding-window layers where it differs (Gemma 3).
    pub rope_local: Option<RopeConfig>,
    /// Layers without rotary embedding; empty when all have it. Otherwise one entry per layer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_rope_layers: Vec<bool>,
    /// Sliding window: a token sees itself and the `window - 1` before it, on local layers only.
    pub window: Option<usize>,
    /// Which layers are local (use `window`); empty when none is. Otherwise one entry per layer.
    pub local_layers: Vec<bool>,
    /// Factor on q·k; 1/sqrt(head_dim) unless the family says otherwise.
    pub attn_scale: f32,
    /// Divide `attn_scale` by the number of the layer, counted from 1 (GPT-2's `scale_attn_by_inverse_layer_idx`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub attn_scale_by_layer: bool,
    /// `c * tanh(score / c)` on attention scores.
    pub attn_softcap: Option<f32>,
    /// A learned attention sink: one more logit per head in the softmax's denominator (GPT-OSS).
    #[serde(default)]
    pub attn_sink: bool,
    /// Multi-head latent attention (DeepSeek). Every head then has its own keys (`kv_heads` equals `heads`),
    /// `head_dim` is the width of a query and key, and `qkv_bias` applies to the down-projections.
    #[serde(default)]
    pub mla: Option<MlaConfig>,
    /// `c * tanh(logit / c)` on the output logits.
    pub final_softcap: Option<f32>,
    /// Factor on embeddings after lookup (Gemma: sqrt(hidden)).
    pub embed_scale: f32,
    /// The LM head shares the token embedding.
    pub tied: bool,
    /// Standard deviation of initial weights.
    pub init_std: f32,
    /// Mixture-of-experts layers in place of MLPs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe: Option<MoeConfig>,
    /// Multi-token prediction layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtp: Option<MtpConfig>,
}

/// Sizes of a decoder: the fields of [`ModelConfig`] of the same names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelSizes {
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// MLP width.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Longest sequence.
    pub max_positions: usize,
}

/// `x^-½`, computed in f64.
pub(crate) fn inverse_sqrt(x: usize) -> f32 {
    (1.0 / (x as f64).sqrt()) as f32
}

fn yes() -> bool {
    true
}

/// Kind and constants of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormConfig {
    /// LayerNorm or RMSNorm.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
    /// Gain is `1 + weight` (weights stored around zero).
    pub zero_centred: bool,
}

/// Multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlaConfig {
    /// Rank of the query down-projection; none: queries are projected from the hidden states.
    pub q_lora_rank: Option<usize>,
    /// Rank of the key/value down-projection.
    pub kv_lora_rank: usize,
    /// Channels of a query or key without RoPE.
    pub nope_dim: usize,
    /// Channels with RoPE; a token's keys share them.
    pub rope_dim: usize,
    /// Channels of a value.
    pub v_dim: usize,
    /// Added to the mean square in the norms of the compressed rows.
    pub norm_eps: f32,
}

/// LayerNorm has a mean and a bias, RMSNorm neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// `(x - mean) / sqrt(var + eps) * gain + bias`
    LayerNorm,
    /// `x / sqrt(mean(x²) + eps) * gain`
    RmsNorm,
}

/// Activation function of the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// GELU, tanh approximation.
    GeluTanh,
    /// GELU with the error function.
    GeluErf,
    /// x·sigmoid(x)
    Silu,
    /// max(x, 0)²
    SquaredRelu,
}

/// Position encoding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// A learned vector per position, added to the token embedding (GPT-2).
    Learned,
    /// Rotary embedding of q and k.
    Rope(RopeConfig),
}

/// Rotary embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeConfig {
    /// Base of the wavelengths (θ).
    pub theta: f64,
    /// Channels of each head that are rotated: the first ones, or with MLA the last.
    pub rotary_dim: usize,
    /// Pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2).
    pub interleaved: bool,
    /// Scaling of the wavelengths for long contexts.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// Unscaled RoPE that pairs channels i and i + rotary_dim/2.
    pub fn plain(theta: f64, rotary_dim: usize) -> RopeConfig {
        RopeConfig { theta, rotary_dim, interleaved: false, scaling: RopeScaling::None }
    }
}

impl ModelConfig {
    /// A pre-norm decoder with RMSNorm, SwiGLU and RoPE, without biases (Llama): norms with ε = 1e-5, RoPE over all
    /// channels of a head with θ = 10,000, attention scores scaled by head_dim^-½, untied embeddings.
    pub fn plain(sizes: ModelSizes) -> ModelConfig {
        let ModelSizes { layers, hidden, ffn, heads, kv_heads, head_dim, vocab, max_positions } = sizes;
        ModelConfig {
            layers,
            hidden,
            ffn,
            heads,
            kv_heads,
            head_dim,
            vocab,
            max_positions,
            norm: NormConfig { kind: NormKind::RmsNorm, eps: 1e-5, zero_centred: false },
            activation: Activation::Silu,
            gated: true,
            qkv_bias: false,
            proj_bias: false,
            mlp_bias: false,
            qk_norm: false,
            qk_norm_all_heads: false,
            pre_norms: true,
            post_norms: false,
            positions: Positions::Rope(RopeConfig::plain(1e4, head_dim)),
            rope_local: None,
            no_rope_layers: Vec::new(),
            window: None,
            local_layers: Vec::new(),
            attn_scale: inverse_sqrt(head_dim),
            attn_scale_by_layer: false,
            attn_softcap: None,
            attn_sink: false,
            mla: None,
            final_softcap: None,
            embed_scale: 1.0,
            tied: false,
            init_std: 0.02,
            moe: None,
            mtp: None,
        }
    }

    /// The same model with MLA: `head_dim`, `attn_scale` and RoPE follow from its dimensions, and RoPE pairs
    /// neighbouring channels.
    pub fn with_mla(mut self, mla: MlaConfig) -> ModelConfig {
        self.head_dim = mla.nope_dim.saturating_add(mla.rope_dim);
        self.kv_heads = self.heads;
        self.attn_scale = inverse_sqrt(self.head_dim);
        let global = match &mut self.positions {
            Positions::Rope(rope) => Some(rope),
            Positions::Learned => None,
        };
        for rope in global.into_iter().chain(&mut self.rope_local) {
            (rope.rotary_dim, rope.interleaved) = (mla.rope_dim, true);
        }
        ModelConfig { mla: Some(mla), ..self }
    }

    /// Channels per head of the values.
    pub fn value_dim(&self) -> usize {
        self.mla.as_ref().map_or(self.head_dim, |m| m.v_dim)
    }

    /// Factor on q·k in layer `i`.
    pub fn layer_attn_scale(&self, i: usize) -> f32 {
        if self.attn_scale_by_layer { self.attn_scale / (i + 1) as f32 } else { self.attn_scale }
    }

    /// Whether layer `i` has the sliding window.
    pub fn is_local(&self, i: usize) -> bool {
        self.window.is_some() && self.local_layers.get(self.template_layer(i)).copied().unwrap_or(false)
    }

    /// RoPE of layer `i`, if it has one.
    pub fn rope(&self, i: usize) -> Option<&RopeConfig> {
        if self.no_rope_layers.get(self.template_layer(i)).copied().unwrap_or(false) {
            return None;
        }
        match (&self.positions, &self.rope_local) {
            (Positions::Learned, _) => None,
            (_, Some(local)) if self.is_local(i) => Some(local),
            (Positions::Rope(global), _) => Some(global),
        }
    }
}
