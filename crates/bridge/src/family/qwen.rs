//! Qwen2, Qwen2.5 and dense Qwen3.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, PARTIAL_ROTARY, QK_NORMS,
    ROTARY_STRAYS, RopeStyle, Windows, key,
};

/// As Llama with biases on q, k, v, always.
pub static QWEN2: Family = Family {
    name: "Qwen2",
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    keys: &[COMMON_KEYS, QWEN2_KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: Windows::FromLayer,
    refused: &[PARTIAL_ROTARY],
    facts: |c| c.qkv_bias = true,
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS],
    strays: ROTARY_STRAYS,
};

/// As Llama with norms on each head of q and k.
pub static QWEN3: Family = Family {
    name: "Qwen3",
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    keys: &[COMMON_KEYS, QWEN3_KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: Windows::FromLayer,
    refused: &[PARTIAL_ROTARY],
    facts: |c| c.qk_norm = true,
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, QK_NORMS],
    strays: ROTARY_STRAYS,
};

const QWEN2_KEYS: &[Key] = &[
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(32_768)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];

const QWEN3_KEYS: &[Key] = &[
    // The class has a size of its own here; hidden / heads would be wrong for most of the family.
    key(&["head_dim"], Field::HeadDim, Absent::Size(128)),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(32_768)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];
