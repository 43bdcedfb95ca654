//! DeepSeek-V3: what its dense layers are, and the attention of all of them.
//!
//! Not in the list of families that are opened until the layers with experts are: a configuration is read as this family
//! by name ([`crate::HfConfig::parse_as`]), if all its layers are dense.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, PARTIAL_ROTARY, ROTARY_STRAYS,
    RopeStyle, Rule, Windows, key, same,
};

/// Latent attention: keys and values from a narrow row, rotary channels that all heads share.
pub static DEEPSEEK_V3: Family = Family {
    name: "DeepSeek-V3",
    architecture: "DeepseekV3ForCausalLM",
    model_type: "deepseek_v3",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Latent { theta: 1e4 },
    windows: Windows::Never,
    refused: &[PARTIAL_ROTARY],
    facts: |_| {},
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, LATENT],
    strays: ROTARY_STRAYS,
};

const KEYS: &[Key] = &[
    key(&["q_lora_rank"], Field::QueryRank, Absent::Rank(Some(1536))),
    key(&["kv_lora_rank"], Field::KeyRank, Absent::Size(512)),
    key(&["qk_nope_head_dim"], Field::NopeDim, Absent::Size(128)),
    key(&["qk_rope_head_dim"], Field::RopeDim, Absent::Size(64)),
    key(&["v_head_dim"], Field::ValueDim, Absent::Size(128)),
    // The class makes these of the others, whatever a file says.
    key(&["qk_head_dim"], Field::QueryWidth, Absent::Derived),
    key(&["head_dim"], Field::RotaryWidth, Absent::Derived),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(4096)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
    key(&["first_k_dense_replace"], Field::DenseLayers, Absent::Size(3)),
];

const LATENT: &[Rule] = &[
    same("layers.{i}.self_attn.q_a_proj.weight", &["layers.{i}.attn.q_a.weight"]),
    same("layers.{i}.self_attn.q_a_proj.bias", &["layers.{i}.attn.q_a.bias"]),
    same("layers.{i}.self_attn.q_a_layernorm.weight", &["layers.{i}.attn.q_a_norm.weight"]),
    same("layers.{i}.self_attn.q_b_proj.weight", &["layers.{i}.attn.q_b.weight"]),
    same("layers.{i}.self_attn.kv_a_proj_with_mqa.weight", &["layers.{i}.attn.kv_a.weight"]),
    same("layers.{i}.self_attn.kv_a_proj_with_mqa.bias", &["layers.{i}.attn.kv_a.bias"]),
    same("layers.{i}.self_attn.kv_a_layernorm.weight", &["layers.{i}.attn.kv_a_norm.weight"]),
    same("layers.{i}.self_attn.kv_b_proj.weight", &["layers.{i}.attn.kv_b.weight"]),
    same("layers.{i}.self_attn.o_proj.weight", &["layers.{i}.attn.o.weight"]),
    same("layers.{i}.self_attn.o_proj.bias", &["layers.{i}.attn.o.bias"]),
];
