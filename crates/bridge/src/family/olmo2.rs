//! OLMo-2.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, PARTIAL_ROTARY, QK_NORMS, RopeStyle, Rule,
    SlidingWindows, UNUSED_ROTARY, key, same,
};

/// Norms after attention and MLP instead of before, and norms of q and k over all heads at once.
pub static OLMO2: Family = Family {
    name: "OLMo-2",
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: SlidingWindows::Never,
    refused: &[PARTIAL_ROTARY],
    fixed: |c| {
        (c.pre_norms, c.post_norms) = (false, true);
        (c.qk_norm, c.qk_norm_all_heads) = (true, true);
    },
    prefix: "model.",
    tensors: &[COMMON_TENSORS, POST_NORMS, QK_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

const KEYS: &[Key] = &[
    key(&["head_dim"], Field::HeadDim, Absent::HiddenPerHead),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(2048)),
    key(&["rms_norm_eps"], Field::NormEps, Absent::Real(1e-5)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
];

const POST_NORMS: &[Rule] = &[
    same("layers.{i}.post_attention_layernorm.weight", &["layers.{i}.attn_post_norm.weight"]),
    same("layers.{i}.post_feedforward_layernorm.weight", &["layers.{i}.mlp_post_norm.weight"]),
];
