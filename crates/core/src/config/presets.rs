//! The architectures the recipes inside the program name. One function, [`preset`], is all the rest knows of it.

use crate::model::config::*;

/// The names of the presets.
pub(super) const PRESETS: &[&str] = &["tiny", "gpt2-124m", "llama-1b", "llama-8b", "qwen3-0.6b"];

/// The architecture of that name.
pub(super) fn preset(name: &str) -> Option<ModelConfig> {
    Some(match name {
        "tiny" => ModelConfig { tied: true, ..llama([256, 768, 4, 4, 4, 64, 256, 256], 1e-5, 1e4) },
        "gpt2-124m" => ModelConfig {
            norm: NormConfig { kind: NormKind::LayerNorm, eps: 1e-5, zero_centred: false },
            activation: Activation::GeluTanh,
            gated: false,
            qkv_bias: true,
            proj_bias: true,
            mlp_bias: true,
            positions: Positions::Learned,
            tied: true,
            ..llama([768, 3072, 12, 12, 12, 64, 50304, 1024], 1e-5, 1e4)
        },
        "llama-1b" => {
            ModelConfig { tied: true, ..llama([2048, 8192, 16, 32, 8, 64, 128_256, 8192], 1e-5, 5e5) }
        }
        "llama-8b" => llama([4096, 14336, 32, 32, 8, 128, 128_256, 8192], 1e-5, 5e5),
        "qwen3-0.6b" => ModelConfig {
            qk_norm: true,
            tied: true,
            ..llama([1024, 3072, 28, 16, 8, 128, 151_936, 40_960], 1e-6, 1e6)
        },
        _ => return None,
    })
}

/// `sizes`: hidden, ffn, layers, heads, kv_heads, head_dim, vocab, max_positions.
pub(super) fn llama(sizes: [usize; 8], eps: f32, theta: f64) -> ModelConfig {
    let [hidden, ffn, layers, heads, kv_heads, head_dim, vocab, max_positions] = sizes;
    ModelConfig {
        layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim,
        vocab,
        max_positions,
        norm: NormConfig { kind: NormKind::RmsNorm, eps, zero_centred: false },
        activation: Activation::Silu,
        gated: true,
        qkv_bias: false,
        proj_bias: false,
        mlp_bias: false,
        qk_norm: false,
        post_norms: false,
        positions: Positions::Rope(RopeConfig {
            theta,
            rotary_dim: head_dim,
            interleaved: false,
            scaling: RopeScaling::None,
        }),
        rope_local: None,
        window: None,
        local_layers: Vec::new(),
        attn_scale: (1.0 / (head_dim as f64).sqrt()) as f32,
        attn_softcap: None,
        final_softcap: None,
        embed_scale: 1.0,
        tied: false,
        init_std: 0.02,
    }
}
