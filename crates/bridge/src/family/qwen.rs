//! Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, EXPERT_TENSORS, Family, Field, Key, LLAMA_NORMS, MoeField,
    PARTIAL_ROTARY, QK_NORMS, RopeStyle, SlidingWindows, UNUSED_ROTARY, key,
};

/// Llama with biases on q, k and v.
pub static QWEN2: Family = Family {
    name: "Qwen2",
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    keys: &[COMMON_KEYS, QWEN2_KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: SlidingWindows::FromLayer,
    refused: &[PARTIAL_ROTARY],
    fixed: |c| c.qkv_bias = true,
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

/// Llama with per-head norms of q and k.
pub static QWEN3: Family = Family {
    name: "Qwen3",
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    keys: &[COMMON_KEYS, QWEN3_KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: SlidingWindows::FromLayer,
    refused: &[PARTIAL_ROTARY],
    fixed: |c| c.qk_norm = true,
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, QK_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

/// Qwen3 with fine-grained experts in place of the MLP of all or some layers.
pub static QWEN3_MOE: Family = Family {
    name: "Qwen3-MoE",
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    keys: &[COMMON_KEYS, QWEN3_MOE_KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: SlidingWindows::Every { switch: true, absent: Some(4096) },
    refused: &[PARTIAL_ROTARY],
    fixed: |c| c.qk_norm = true,
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, QK_NORMS, EXPERT_TENSORS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

const QWEN2_KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(32)),
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(32_768)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];

const QWEN3_KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(32)),
    // The configuration class defaults to 128, not to hidden / heads.
    key(&["head_dim"], Field::HeadDim, Absent::Size(128)),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(32_768)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];

const QWEN3_MOE_KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(4)),
    key(&["intermediate_size"], Field::Ffn, Absent::Size(6144)),
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(32_768)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
    key(&["num_experts", "num_local_experts"], Field::Moe(MoeField::Experts), Absent::Size(128)),
    key(&["num_experts_per_tok"], Field::Moe(MoeField::TopK), Absent::Size(8)),
    key(&["moe_intermediate_size"], Field::Moe(MoeField::ExpertFfn), Absent::Size(768)),
    key(&["norm_topk_prob"], Field::Moe(MoeField::NormTopkProb), Absent::Flag(false)),
    key(&["decoder_sparse_step"], Field::Moe(MoeField::SparseStep), Absent::Size(1)),
    key(&["mlp_only_layers"], Field::Moe(MoeField::MlpOnlyLayers), Absent::Derived),
];
