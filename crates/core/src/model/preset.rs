//! Published and yardstick architectures by name.

use super::config::{Activation, ModelConfig, NormConfig, NormKind, Positions, RopeConfig, RopeScaling};
use super::moe_config::MoeConfig;

/// Every name that [`ModelConfig::preset`] knows.
pub const PRESETS: &[&str] = &[
    "tiny",
    "gpt2-124m",
    "gpt2-1558m",
    "llama-1b",
    "llama-8b",
    "llama-70b",
    "llama-405b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "qwen3-14b",
    "gemma2-2b",
    "gemma3-1b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
];

impl ModelConfig {
    /// The architecture of that name, or nothing; [`PRESETS`] lists the names.
    pub fn preset(name: &str) -> Option<ModelConfig> {
        Some(match name {
            // The default of `train`: small enough for one CPU, trained on bytes.
            "tiny" => {
                let sizes = [256, 768, 4, 4, 4, 64, 256, 256];
                ModelConfig { tied: true, ..llama_like(sizes, 1e-5, 1e4) }
            }
            "gpt2-124m" => gpt2(768, 12, 12),
            "gpt2-1558m" => gpt2(1600, 48, 25),
            // Shape of Llama 3.2 1B, without its stretching to long contexts.
            "llama-1b" => {
                let sizes = [2048, 8192, 16, 32, 8, 64, 128_256, 8192];
                ModelConfig { tied: true, ..llama_like(sizes, 1e-5, 5e5) }
            }
            "llama-8b" => llama_like([4096, 14_336, 32, 32, 8, 128, 128_256, 8192], 1e-5, 5e5),
            "llama-70b" => llama_like([8192, 28_672, 80, 64, 8, 128, 128_256, 8192], 1e-5, 5e5),
            "llama-405b" => {
                let mut c = llama_like([16_384, 53_248, 126, 128, 8, 128, 128_256, 131_072], 1e-5, 5e5);
                let scaling = RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_positions: 8192,
                };
                c.positions = Positions::Rope(RopeConfig { scaling, ..rope(5e5, 128) });
                c
            }
            "qwen2.5-0.5b" => {
                let sizes = [896, 4864, 24, 14, 2, 64, 151_936, 32_768];
                ModelConfig { qkv_bias: true, tied: true, ..llama_like(sizes, 1e-6, 1e6) }
            }
            "qwen3-0.6b" => {
                let sizes = [1024, 3072, 28, 16, 8, 128, 151_936, 40_960];
                ModelConfig { qk_norm: true, tied: true, ..llama_like(sizes, 1e-6, 1e6) }
            }
            "qwen3-14b" => {
                let sizes = [5120, 17_408, 40, 40, 8, 128, 151_936, 40_960];
                ModelConfig { qk_norm: true, ..llama_like(sizes, 1e-6, 1e6) }
            }
            "gemma2-2b" => {
                let c = gemma([2304, 9216, 26, 8, 4, 256, 256_000, 8192], 4096, 1e4);
                ModelConfig {
                    local_layers: (0..c.layers).map(|i| i % 2 == 0).collect(),
                    attn_softcap: Some(50.0),
                    final_softcap: Some(30.0),
                    ..c
                }
            }
            "gemma3-1b" => {
                let c = gemma([1152, 6912, 26, 4, 1, 256, 262_144, 32_768], 512, 1e6);
                ModelConfig {
                    local_layers: (0..c.layers).map(|i| i % 6 < 5).collect(),
                    rope_local: Some(rope(1e4, 256)),
                    qk_norm: true,
                    ..c
                }
            }
            "mixtral-8x7b" => {
                let c = llama_like([4096, 14_336, 32, 32, 8, 128, 32_000, 32_768], 1e-5, 1e6);
                ModelConfig { moe: Some(MoeConfig::plain(8, 2, 14_336)), ..c }
            }
            "qwen3-30b-a3b" => {
                let sizes = [2048, 6144, 48, 32, 4, 128, 151_936, 40_960];
                let moe = Some(MoeConfig::plain(128, 8, 768));
                ModelConfig { qk_norm: true, moe, ..llama_like(sizes, 1e-6, 1e6) }
            }
            _ => return None,
        })
    }
}

fn rope(theta: f64, rotary_dim: usize) -> RopeConfig {
    RopeConfig { theta, rotary_dim, interleaved: false, scaling: RopeScaling::None }
}

fn inverse_sqrt(x: usize) -> f32 {
    (1.0 / (x as f64).sqrt()) as f32
}

/// `sizes`: hidden, ffn, layers, heads, kv_heads, head_dim, vocab, max_positions.
fn llama_like(sizes: [usize; 8], eps: f32, theta: f64) -> ModelConfig {
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
        qk_norm_all_heads: false,
        pre_norms: true,
        post_norms: false,
        positions: Positions::Rope(rope(theta, head_dim)),
        rope_local: None,
        window: None,
        local_layers: Vec::new(),
        attn_scale: inverse_sqrt(head_dim),
        attn_scale_by_layer: false,
        attn_softcap: None,
        attn_sink: false,
        no_rope_layers: Vec::new(),
        mla: None,
        final_softcap: None,
        embed_scale: 1.0,
        tied: false,
        init_std: 0.02,
        moe: None,
        mtp: None,
    }
}

/// Vocabulary 50257 padded to 50304, as everybody trains it.
fn gpt2(hidden: usize, layers: usize, heads: usize) -> ModelConfig {
    let sizes = [hidden, 4 * hidden, layers, heads, heads, hidden / heads, 50_304, 1024];
    ModelConfig {
        norm: NormConfig { kind: NormKind::LayerNorm, eps: 1e-5, zero_centred: false },
        activation: Activation::GeluTanh,
        gated: false,
        qkv_bias: true,
        proj_bias: true,
        mlp_bias: true,
        positions: Positions::Learned,
        tied: true,
        ..llama_like(sizes, 1e-5, 1e4)
    }
}

fn gemma(sizes: [usize; 8], window: usize, theta: f64) -> ModelConfig {
    let c = llama_like(sizes, 1e-6, theta);
    ModelConfig {
        norm: NormConfig { zero_centred: true, ..c.norm },
        activation: Activation::GeluTanh,
        post_norms: true,
        window: Some(window),
        embed_scale: (c.hidden as f64).sqrt() as f32,
        tied: true,
        ..c
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid_and_has_its_published_size() {
        // Millions of parameters, from the model cards (GPT-2 with the padded vocabulary).
        let sizes = [
            ("tiny", 3.48),
            ("gpt2-124m", 124.48),
            ("gpt2-1558m", 1557.69),
            ("llama-1b", 1235.81),
            ("llama-8b", 8030.26),
            ("llama-70b", 70_553.71),
            ("llama-405b", 405_853.39),
            ("qwen2.5-0.5b", 494.03),
            ("qwen3-0.6b", 596.05),
            ("qwen3-14b", 14_768.31),
            ("gemma2-2b", 2614.34),
            ("gemma3-1b", 999.89),
            ("mixtral-8x7b", 46_702.79),
            ("qwen3-30b-a3b", 30_532.12),
        ];
        assert_eq!(sizes.map(|(name, _)| name), PRESETS);
        for (name, millions) in sizes {
            let c = ModelConfig::preset(name).unwrap();
            c.validate().unwrap();
            let got = c.parameters() as f64 / 1e6;
            assert!((got - millions).abs() < 0.006, "{name}: {got} instead of {millions}");
        }
        assert_eq!(ModelConfig::preset("gpt-5"), None);
    }
}
