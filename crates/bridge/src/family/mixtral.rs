//! Mixtral.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, MoeField, PARTIAL_ROTARY,
    RopeStyle, Rule, SlidingWindows, UNUSED_ROTARY, key, same,
};

/// Llama with an MoE layer in place of every MLP; softmax over the top-k experts.
pub static MIXTRAL: Family = Family {
    name: "Mixtral",
    architecture: "MixtralForCausalLM",
    model_type: "mixtral",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Global { theta: 1e6 },
    windows: SlidingWindows::Every { switch: false, absent: None },
    refused: &[PARTIAL_ROTARY],
    fixed: |_| {},
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, EXPERTS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

const KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(8)),
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(131_072)),
    key(&["rms_norm_eps"], Field::NormEps, Absent::Real(1e-5)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
    key(&["num_local_experts", "num_experts"], Field::Moe(MoeField::Experts), Absent::Size(8)),
    key(&["num_experts_per_tok"], Field::Moe(MoeField::TopK), Absent::Size(2)),
    key(&["intermediate_size"], Field::Moe(MoeField::ExpertFfn), Absent::Required),
];

const EXPERTS: &[Rule] = &[
    same("layers.{i}.block_sparse_moe.gate.weight", &["layers.{i}.moe.router.weight"]),
    same("layers.{i}.block_sparse_moe.experts.{e}.w1.weight", &["layers.{i}.moe.experts.{e}.gate.weight"]),
    same("layers.{i}.block_sparse_moe.experts.{e}.w3.weight", &["layers.{i}.moe.experts.{e}.up.weight"]),
    same("layers.{i}.block_sparse_moe.experts.{e}.w2.weight", &["layers.{i}.moe.experts.{e}.down.weight"]),
];
