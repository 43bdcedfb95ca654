//! Gemma 2 and Gemma 3 (text).

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, PARTIAL_ROTARY, QK_NORMS, Refused, RopeStyle,
    Rule, SlidingWindows, UNUSED_ROTARY, key, same,
};
use ferrotron_core::model::config::ModelConfig;

/// Logit soft caps, post-norms, a sliding window on every other layer.
pub static GEMMA2: Family = Family {
    name: "Gemma 2",
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    keys: &[COMMON_KEYS, GEMMA2_KEYS],
    rope: RopeStyle::Global { theta: 1e4 },
    windows: SlidingWindows::Alternate { window: 4096 },
    refused: &[PARTIAL_ROTARY, BIDIRECTIONAL],
    fixed: gemma_fixed,
    prefix: "model.",
    tensors: &[COMMON_TENSORS, GEMMA_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

/// QK norms, five sliding-window layers per global layer, each kind with its own RoPE base.
pub static GEMMA3: Family = Family {
    name: "Gemma 3",
    architecture: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    keys: &[COMMON_KEYS, GEMMA3_KEYS],
    rope: RopeStyle::GlobalAndLocal { theta: 1e6, local_theta: 1e4 },
    windows: SlidingWindows::AllBut,
    refused: &[PARTIAL_ROTARY, BIDIRECTIONAL],
    fixed: |c| {
        gemma_fixed(c);
        c.qk_norm = true;
    },
    prefix: "model.",
    tensors: &[COMMON_TENSORS, GEMMA_NORMS, QK_NORMS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

fn gemma_fixed(c: &mut ModelConfig) {
    c.norm.zero_centred = true;
    c.post_norms = true;
    c.embed_scale = (c.hidden as f64).sqrt() as f32;
}

const BIDIRECTIONAL: Refused = Refused {
    key: "use_bidirectional_attention",
    or_one: false,
    what: "bidirectional attention, which a causal language model cannot be trained with",
};

const GEMMA2_KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(4)),
    key(&["head_dim"], Field::HeadDim, Absent::Size(256)),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(8192)),
    key(&["hidden_activation"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("gelu_pytorch_tanh")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["query_pre_attn_scalar"], Field::QueryScalar, Absent::Real(256.0)),
    key(&["attn_logit_softcapping"], Field::AttnSoftcap, Absent::Cap(Some(50.0))),
    key(&["final_logit_softcapping"], Field::FinalSoftcap, Absent::Cap(Some(30.0))),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(true)),
];

/// `attn_logit_softcapping` is in its configuration class, too, but its attention does not use it.
const GEMMA3_KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(4)),
    key(&["head_dim"], Field::HeadDim, Absent::Size(256)),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(131_072)),
    key(&["hidden_activation"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("gelu_pytorch_tanh")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["query_pre_attn_scalar"], Field::QueryScalar, Absent::Real(256.0)),
    key(&["final_logit_softcapping"], Field::FinalSoftcap, Absent::Cap(None)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(true)),
];

/// Here `post_attention_layernorm` is a norm after attention; in Llama that name is the pre-MLP norm.
const GEMMA_NORMS: &[Rule] = &[
    same("layers.{i}.post_attention_layernorm.weight", &["layers.{i}.attn_post_norm.weight"]),
    same("layers.{i}.pre_feedforward_layernorm.weight", &["layers.{i}.mlp_norm.weight"]),
    same("layers.{i}.post_feedforward_layernorm.weight", &["layers.{i}.mlp_post_norm.weight"]),
];
