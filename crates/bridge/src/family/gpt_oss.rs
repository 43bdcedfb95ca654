//! GPT-OSS: its attention. All its layers have experts, so it is not in the list of families that are opened until those
//! are; a configuration is read as this family by name ([`crate::HfConfig::parse_as`]).

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, PARTIAL_ROTARY, ROTARY_STRAYS,
    RopeStyle, Rule, Windows, key, same,
};

/// Sinks, biases, a window on every other layer, YaRN.
pub static GPT_OSS: Family = Family {
    name: "GPT-OSS",
    architecture: "GptOssForCausalLM",
    model_type: "gpt_oss",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Described { theta: 1.5e5 },
    windows: Windows::Alternate { window: 128 },
    refused: &[PARTIAL_ROTARY],
    facts: |c| c.attn_sink = true,
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, SINKS],
    strays: ROTARY_STRAYS,
};

const KEYS: &[Key] = &[
    key(&["head_dim"], Field::HeadDim, Absent::Size(64)),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(131_072)),
    key(&["rms_norm_eps"], Field::NormEps, Absent::Real(1e-5)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(true)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];

const SINKS: &[Rule] = &[same("layers.{i}.self_attn.sinks", &["layers.{i}.attn.sink"])];
