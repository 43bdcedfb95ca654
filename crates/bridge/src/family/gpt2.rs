//! GPT-2.

use super::{Absent, Family, Field, Key, RopeStyle, Rule, SlidingWindows, key, same, transposed};
use ferrotron_core::model::config::NormKind;

/// LayerNorm, learned positions, biases everywhere; matrices stored `[in, out]`, q, k and v fused.
pub static GPT2: Family = Family {
    name: "GPT-2",
    architecture: "GPT2LMHeadModel",
    model_type: "gpt2",
    keys: &[KEYS],
    rope: RopeStyle::Learned,
    windows: SlidingWindows::Never,
    refused: &[],
    fixed: |c| {
        c.norm.kind = NormKind::LayerNorm;
        c.gated = false;
        (c.qkv_bias, c.proj_bias, c.mlp_bias) = (true, true, true);
    },
    prefix: "transformer.",
    tensors: &[TENSORS],
    mtp: &[],
    unused: UNUSED,
};

const KEYS: &[Key] = &[
    key(&["n_layer", "num_hidden_layers"], Field::Layers, Absent::Required),
    key(&["n_embd", "hidden_size"], Field::Hidden, Absent::Required),
    key(&["n_inner"], Field::Ffn, Absent::FourHidden),
    key(&["n_head", "num_attention_heads"], Field::Heads, Absent::Required),
    key(&[], Field::KvHeads, Absent::Heads),
    key(&[], Field::HeadDim, Absent::HiddenPerHead),
    key(&["n_positions", "max_position_embeddings"], Field::MaxPositions, Absent::Size(1024)),
    key(&["vocab_size"], Field::Vocab, Absent::Required),
    key(&["layer_norm_epsilon"], Field::NormEps, Absent::Real(1e-5)),
    key(&["initializer_range"], Field::InitStd, Absent::Real(0.02)),
    key(&["activation_function"], Field::Activation("gelu_new"), Absent::Word("gelu_new")),
    key(&["scale_attn_weights"], Field::ScaleScores, Absent::Flag(true)),
    key(&["scale_attn_by_inverse_layer_idx"], Field::ScaleByLayer, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(true)),
];

/// Masks of old files, and cross-attention, which a decoder without an encoder never runs.
const UNUSED: &[&str] = &[
    "h.{i}.attn.bias",
    "h.{i}.attn.masked_bias",
    "h.{i}.crossattention.c_attn.weight",
    "h.{i}.crossattention.c_attn.bias",
    "h.{i}.crossattention.q_attn.weight",
    "h.{i}.crossattention.q_attn.bias",
    "h.{i}.crossattention.c_proj.weight",
    "h.{i}.crossattention.c_proj.bias",
    "h.{i}.ln_cross_attn.weight",
    "h.{i}.ln_cross_attn.bias",
];

const TENSORS: &[Rule] = &[
    same("wte.weight", &["embed.tokens"]),
    same("wpe.weight", &["embed.positions"]),
    same("h.{i}.ln_1.weight", &["layers.{i}.attn_norm.weight"]),
    same("h.{i}.ln_1.bias", &["layers.{i}.attn_norm.bias"]),
    transposed(
        "h.{i}.attn.c_attn.weight",
        &["layers.{i}.attn.q.weight", "layers.{i}.attn.k.weight", "layers.{i}.attn.v.weight"],
    ),
    same(
        "h.{i}.attn.c_attn.bias",
        &["layers.{i}.attn.q.bias", "layers.{i}.attn.k.bias", "layers.{i}.attn.v.bias"],
    ),
    transposed("h.{i}.attn.c_proj.weight", &["layers.{i}.attn.out.weight"]),
    same("h.{i}.attn.c_proj.bias", &["layers.{i}.attn.out.bias"]),
    same("h.{i}.ln_2.weight", &["layers.{i}.mlp_norm.weight"]),
    same("h.{i}.ln_2.bias", &["layers.{i}.mlp_norm.bias"]),
    transposed("h.{i}.mlp.c_fc.weight", &["layers.{i}.mlp.up.weight"]),
    same("h.{i}.mlp.c_fc.bias", &["layers.{i}.mlp.up.bias"]),
    transposed("h.{i}.mlp.c_proj.weight", &["layers.{i}.mlp.down.weight"]),
    same("h.{i}.mlp.c_proj.bias", &["layers.{i}.mlp.down.bias"]),
    same("ln_f.weight", &["final_norm.weight"]),
    same("ln_f.bias", &["final_norm.bias"]),
];
