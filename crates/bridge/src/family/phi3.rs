//! Phi-3, Phi-3.5, Phi-4 and Phi-4-mini.

use super::{
    Absent, COMMON_KEYS, Family, Field, Key, LLAMA_NORMS, RopeStyle, Rule, SlidingWindows, UNUSED_ROTARY,
    key, same,
};

/// Llama with fused projections on disk, LongRoPE, and RoPE on a part of each head where the configuration says so.
pub static PHI3: Family = Family {
    name: "Phi-3",
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Phi3 { theta: 1e4 },
    windows: SlidingWindows::Every { switch: false, absent: None },
    refused: &[],
    fixed: |_| {},
    prefix: "model.",
    tensors: &[TENSORS, LLAMA_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

const KEYS: &[Key] = &[
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(4096)),
    key(&["rms_norm_eps"], Field::NormEps, Absent::Real(1e-5)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];

/// The projections of q, k and v are one tensor, and so are gate and up.
const TENSORS: &[Rule] = &[
    same("embed_tokens.weight", &["embed.tokens"]),
    same("layers.{i}.input_layernorm.weight", &["layers.{i}.attn_norm.weight"]),
    same(
        "layers.{i}.self_attn.qkv_proj.weight",
        &["layers.{i}.attn.q.weight", "layers.{i}.attn.k.weight", "layers.{i}.attn.v.weight"],
    ),
    same("layers.{i}.self_attn.o_proj.weight", &["layers.{i}.attn.out.weight"]),
    same("layers.{i}.mlp.gate_up_proj.weight", &["layers.{i}.mlp.gate.weight", "layers.{i}.mlp.up.weight"]),
    same("layers.{i}.mlp.down_proj.weight", &["layers.{i}.mlp.down.weight"]),
    same("norm.weight", &["final_norm.weight"]),
];
