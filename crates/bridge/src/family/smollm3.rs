//! SmolLM3.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, PARTIAL_ROTARY, RopeStyle,
    SlidingWindows, UNUSED_ROTARY, key,
};

/// Llama with some layers without RoPE (NoPE), every fourth unless the configuration lists them.
pub static SMOLLM3: Family = Family {
    name: "SmolLM3",
    architecture: "SmolLM3ForCausalLM",
    model_type: "smollm3",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::SomeLayers { theta: 2e6, interval: 4 },
    windows: SlidingWindows::WithoutRope,
    refused: &[PARTIAL_ROTARY],
    fixed: |_| {},
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

const KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(4)),
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(32_768)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["mlp_bias"], Field::MlpBias, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(true)),
];
