//! GPT-2.

use super::{Absent, Family, Field, Key, Refused, RopeStyle, Rule, SlidingWindows, key, same, transposed};
use ferrotron_core::model::config::NormKind;

/// LayerNorm, learned positions, biases everywhere, matrices stored `[in, out]` and q, k, v in one.
pub static GPT2: Family = Family {
    name: "GPT-2",
    architecture: "GPT2LMHeadModel",
    model_type: "gpt2",
    keys: &[KEYS],
    rope: RopeStyle::Learned,
    windows: SlidingWindows::Never,
    refused: &[
        Refused { key: "add_cross_attention", or_one: false, what: "cross-attention" },
        Refused {
            key: "scale_attn_by_inverse_layer_idx",
            or_one: false,
            what: "another attention scale in every layer",
        },
    ],
    fixed: |c| {
        c.norm.kind = NormKind::LayerNorm;
        c.gated = false;
        (c.qkv_bias, c.proj_bias, c.mlp_bias) = (true, true, true);
    },
    prefix: "transformer.",
    tensors: &[TENSORS],
    unused: &["h.{i}.attn.bias", "h.{i}.attn.masked_bias"],
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
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(true)),
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
