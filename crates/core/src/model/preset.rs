//! Published and yardstick architectures by name.

use super::config::{
    Activation, ModelConfig, ModelSizes, NormConfig, NormKind, Positions, RopeConfig, RopeScaling,
    inverse_sqrt,
};
mod moe;

/// Every name that [`ModelConfig::preset`] knows.
pub const PRESETS: &[&str] = &[
    "tiny",
    "gpt2-124m",
    "gpt2-1558m",
    "llama-1b",
    "llama-3b",
    "llama-8b",
    "llama-70b",
    "llama-405b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "gemma2-2b",
    "gemma2-9b",
    "gemma2-27b",
    "gemma3-1b",
    "gemma3-4b",
    "gemma3-12b",
    "gemma3-27b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "deepseek-v3",
    "kimi-k2",
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
            "llama-3b" => {
                let sizes = [3072, 8192, 28, 24, 8, 128, 128_256, 131_072];
                ModelConfig { tied: true, ..stretched(llama_like(sizes, 1e-5, 5e5), 32.0) }
            }
            "llama-8b" => llama_like([4096, 14_336, 32, 32, 8, 128, 128_256, 8192], 1e-5, 5e5),
            "llama-70b" => llama_like([8192, 28_672, 80, 64, 8, 128, 128_256, 8192], 1e-5, 5e5),
            "llama-405b" => {
                let sizes = [16_384, 53_248, 126, 128, 8, 128, 128_256, 131_072];
                stretched(llama_like(sizes, 1e-5, 5e5), 8.0)
            }
            "qwen2.5-0.5b" => {
                let sizes = [896, 4864, 24, 14, 2, 64, 151_936, 32_768];
                ModelConfig { qkv_bias: true, tied: true, ..llama_like(sizes, 1e-6, 1e6) }
            }
            "qwen3-0.6b" => ModelConfig { tied: true, ..qwen3([1024, 3072, 28, 16]) },
            "qwen3-1.7b" => ModelConfig { tied: true, ..qwen3([2048, 6144, 28, 16]) },
            "qwen3-4b" => ModelConfig { tied: true, ..qwen3([2560, 9728, 36, 32]) },
            "qwen3-8b" => qwen3([4096, 12_288, 36, 32]),
            "qwen3-14b" => qwen3([5120, 17_408, 40, 40]),
            "qwen3-32b" => qwen3([5120, 25_600, 64, 64]),
            "gemma2-2b" => gemma2([2304, 9216, 26, 8, 4, 256], 256),
            "gemma2-9b" => gemma2([3584, 14_336, 42, 16, 8, 256], 256),
            "gemma2-27b" => gemma2([4608, 36_864, 46, 32, 16, 128], 144),
            "gemma3-1b" => gemma3([1152, 6912, 26, 4, 1, 256, 262_144, 32_768], 512, 256),
            "gemma3-4b" => interpolated(gemma3([2560, 10_240, 34, 8, 4, 256, 262_208, 131_072], 1024, 256)),
            "gemma3-12b" => interpolated(gemma3([3840, 15_360, 48, 16, 8, 256, 262_208, 131_072], 1024, 256)),
            "gemma3-27b" => {
                interpolated(gemma3([5376, 21_504, 62, 32, 16, 128, 262_208, 131_072], 1024, 168))
            }
            _ => return moe::preset(name),
        })
    }
}

/// `sizes`: hidden, ffn, layers, heads, kv_heads, head_dim, vocab, max_positions.
fn llama_like(sizes: [usize; 8], eps: f32, theta: f64) -> ModelConfig {
    let [hidden, ffn, layers, heads, kv_heads, head_dim, vocab, max_positions] = sizes;
    ModelConfig {
        norm: NormConfig { kind: NormKind::RmsNorm, eps, zero_centred: false },
        positions: Positions::Rope(RopeConfig::plain(theta, head_dim)),
        ..ModelConfig::plain(ModelSizes {
            layers,
            hidden,
            ffn,
            heads,
            kv_heads,
            head_dim,
            vocab,
            max_positions,
        })
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

/// Frequencies below those of 8,192 tokens of context divided by `factor`, as Llama 3.1 and 3.2 do.
fn stretched(c: ModelConfig, factor: f64) -> ModelConfig {
    let scaling = RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    ModelConfig {
        positions: Positions::Rope(RopeConfig { scaling, ..RopeConfig::plain(5e5, c.head_dim) }),
        ..c
    }
}

/// `sizes`: hidden, ffn, layers, heads.
fn qwen3([hidden, ffn, layers, heads]: [usize; 4]) -> ModelConfig {
    let sizes = [hidden, ffn, layers, heads, 8, 128, 151_936, 40_960];
    ModelConfig { qk_norm: true, ..llama_like(sizes, 1e-6, 1e6) }
}

/// `sizes`: hidden, ffn, layers, heads, kv_heads, head_dim; scores are scaled by `scalar`^-½.
fn gemma2(sizes: [usize; 6], scalar: usize) -> ModelConfig {
    let [hidden, ffn, layers, heads, kv_heads, head_dim] = sizes;
    let c = gemma([hidden, ffn, layers, heads, kv_heads, head_dim, 256_000, 8192], 4096, 1e4);
    ModelConfig {
        local_layers: (0..layers).map(|i| i % 2 == 0).collect(),
        attn_scale: inverse_sqrt(scalar),
        attn_softcap: Some(50.0),
        final_softcap: Some(30.0),
        ..c
    }
}

/// Every sixth layer sees the whole sequence.
fn gemma3(sizes: [usize; 8], window: usize, scalar: usize) -> ModelConfig {
    let c = gemma(sizes, window, 1e6);
    ModelConfig {
        local_layers: (0..c.layers).map(|i| i % 6 < 5).collect(),
        rope_local: Some(RopeConfig::plain(1e4, c.head_dim)),
        attn_scale: inverse_sqrt(scalar),
        qk_norm: true,
        ..c
    }
}

/// Global layers of the longer Gemma 3 models divide positions by 8.
fn interpolated(c: ModelConfig) -> ModelConfig {
    let scaling = RopeScaling::Linear { factor: 8.0 };
    ModelConfig {
        positions: Positions::Rope(RopeConfig { scaling, ..RopeConfig::plain(1e6, c.head_dim) }),
        ..c
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
        // As counted in the published weights (GPT-2 with the padded vocabulary, Gemma 3 without its vision tower).
        let sizes = [
            ("tiny", 3_475_712),
            ("gpt2-124m", 124_475_904),
            ("gpt2-1558m", 1_557_686_400),
            ("llama-1b", 1_235_814_400),
            ("llama-3b", 3_212_749_824),
            ("llama-8b", 8_030_261_248),
            ("llama-70b", 70_553_706_496),
            ("llama-405b", 405_853_388_800),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-14b", 14_768_307_200),
            ("qwen3-32b", 32_762_123_264),
            ("gemma2-2b", 2_614_341_888),
            ("gemma2-9b", 9_241_705_984),
            ("gemma2-27b", 27_227_128_320),
            ("gemma3-1b", 999_885_952),
            ("gemma3-4b", 3_880_263_168),
            ("gemma3-12b", 11_766_034_176),
            ("gemma3-27b", 27_009_346_304),
            ("mixtral-8x7b", 46_702_792_704),
            ("mixtral-8x22b", 140_620_634_112),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("qwen3-235b-a22b", 235_093_634_560),
            ("gpt-oss-20b", 20_914_757_184),
            ("gpt-oss-120b", 116_829_156_672),
            // The 58 expert biases, 14,848 numbers more, are state and not parameters.
            ("deepseek-v3", 671_026_404_352),
            ("kimi-k2", 1_026_408_209_408),
        ];
        assert_eq!(sizes.map(|(name, _)| name), PRESETS);
        let wrong: Vec<String> = sizes
            .iter()
            .filter_map(|(name, count)| {
                let c = ModelConfig::preset(name).unwrap();
                c.validate().unwrap();
                (c.parameters() != *count).then(|| format!("{name}: {} instead of {count}", c.parameters()))
            })
            .collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert_eq!(ModelConfig::preset("gpt-5"), None);
    }
}
