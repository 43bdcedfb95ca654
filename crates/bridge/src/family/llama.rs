//! Llama 3 and 3.x, and every model published under its class.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, PARTIAL_ROTARY, RopeStyle,
    SlidingWindows, UNUSED_ROTARY, key,
};

/// RMSNorm, SwiGLU, RoPE; biases only where the configuration enables them.
pub static LLAMA: Family = Family {
    name: "Llama",
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: SlidingWindows::Never,
    refused: &[PARTIAL_ROTARY],
    fixed: |_| {},
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

const KEYS: &[Key] = &[
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(2048)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["mlp_bias"], Field::MlpBias, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];
