//! Published mixture-of-experts architectures.

use super::{llama_like, qwen3};
use crate::model::config::{MlaConfig, ModelConfig, Positions, RopeConfig, RopeScaling};
use crate::model::moe_config::{Clamp, MoeConfig, ScoreKind};
use ferrotron_kernels::rope_tables::yarn_mscale;

/// The MoE architecture of that name, or nothing.
pub(super) fn preset(name: &str) -> Option<ModelConfig> {
    Some(match name {
        "mixtral-8x7b" => {
            let c = llama_like([4096, 14_336, 32, 32, 8, 128, 32_000, 32_768], 1e-5, 1e6);
            ModelConfig { moe: Some(MoeConfig::plain(8, 2, 14_336)), ..c }
        }
        "mixtral-8x22b" => {
            let c = llama_like([6144, 16_384, 56, 48, 8, 128, 32_000, 65_536], 1e-5, 1e6);
            ModelConfig { moe: Some(MoeConfig::plain(8, 2, 16_384)), ..c }
        }
        "qwen3-30b-a3b" => {
            let moe = Some(MoeConfig::plain(128, 8, 768));
            ModelConfig { kv_heads: 4, moe, ..qwen3([2048, 6144, 48, 32]) }
        }
        "qwen3-235b-a22b" => {
            let moe = Some(MoeConfig::plain(128, 8, 1536));
            ModelConfig { kv_heads: 4, moe, ..qwen3([4096, 12_288, 94, 64]) }
        }
        "gpt-oss-20b" => gpt_oss(24, 32),
        "gpt-oss-120b" => gpt_oss(36, 128),
        "deepseek-v3" => {
            let moe = MoeConfig { groups: Some([8, 4]), scale: 2.5, ..latent_moe(61, 3, 256) };
            latent_attention([7168, 18_432, 61, 128, 129_280, 163_840], 1e4, 40.0, moe)
        }
        // Of DeepSeek-V3 with fewer heads, more experts and no groups of them.
        "kimi-k2" => {
            let moe = MoeConfig { scale: 2.827, ..latent_moe(61, 1, 384) };
            latent_attention([7168, 18_432, 61, 64, 163_840, 131_072], 5e4, 32.0, moe)
        }
        _ => return None,
    })
}

/// Eight of `experts` of width 2048 and a shared one, after `dense` dense layers.
fn latent_moe(layers: usize, dense: usize, experts: usize) -> MoeConfig {
    MoeConfig {
        layers: (0..layers).map(|i| i >= dense).collect(),
        score: ScoreKind::Sigmoid,
        expert_bias: true,
        shared_ffn: Some(2048),
        ..MoeConfig::plain(experts, 8, 2048)
    }
}

/// `sizes`: hidden, ffn, layers, heads, vocab, max_positions.
fn latent_attention(sizes: [usize; 6], theta: f64, factor: f64, moe: MoeConfig) -> ModelConfig {
    let [hidden, ffn, layers, heads, vocab, max_positions] = sizes;
    let mla = MlaConfig {
        q_lora_rank: Some(1536),
        kv_lora_rank: 512,
        nope_dim: 128,
        rope_dim: 64,
        v_dim: 128,
        norm_eps: 1e-6,
    };
    let c = llama_like([hidden, ffn, layers, heads, heads, 192, vocab, max_positions], 1e-6, theta);
    let c = c.with_mla(mla);
    let scaling = RopeScaling::Yarn {
        factor,
        original_max_positions: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
        truncate: true,
        attention_factor: None,
    };
    let rope = RopeConfig { scaling, interleaved: true, ..RopeConfig::plain(theta, mla.rope_dim) };
    // YaRN's factor on scores, squared because it applies to queries and keys.
    let mscale = yarn_mscale(factor, 1.0);
    let attn_scale = (mscale * mscale / (c.head_dim as f64).sqrt()) as f32;
    ModelConfig { positions: Positions::Rope(rope), attn_scale, moe: Some(moe), ..c }
}

/// A window of 128 on every other layer, attention sinks, biases everywhere, a clamped SwiGLU.
fn gpt_oss(layers: usize, experts: usize) -> ModelConfig {
    let c = llama_like([2880, 2880, layers, 64, 8, 64, 201_088, 131_072], 1e-5, 1.5e5);
    let scaling = RopeScaling::Yarn {
        factor: 32.0,
        original_max_positions: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        truncate: false,
        attention_factor: None,
    };
    ModelConfig {
        qkv_bias: true,
        proj_bias: true,
        attn_sink: true,
        window: Some(128),
        local_layers: (0..layers).map(|i| i % 2 == 0).collect(),
        positions: Positions::Rope(RopeConfig { scaling, ..RopeConfig::plain(1.5e5, 64) }),
        moe: Some(MoeConfig {
            router_bias: true,
            bias: true,
            clamp: Some(Clamp { limit: 7.0, alpha: 1.702, offset: 1.0 }),
            ..MoeConfig::plain(experts, 4, 2880)
        }),
        ..c
    }
}
