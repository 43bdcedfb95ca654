//! Mistral 7B and its successors under that class.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, PARTIAL_ROTARY, RopeStyle,
    SlidingWindows, UNUSED_ROTARY, key,
};

/// Llama with a sliding window on all layers, where the configuration has one.
pub static MISTRAL: Family = Family {
    name: "Mistral",
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: SlidingWindows::Every { switch: false, absent: Some(4096) },
    refused: &[PARTIAL_ROTARY],
    fixed: |_| {},
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

const KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(8)),
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(131_072)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];
