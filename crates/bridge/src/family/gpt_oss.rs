//! GPT-OSS: attention sinks, sliding windows and biases; experts with a clamped SwiGLU, stacked in one tensor.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, MoeField, PARTIAL_ROTARY,
    RopeStyle, Rule, SlidingWindows, UNUSED_ROTARY, key, same, transposed,
};
use crate::config::moe_config;
use crate::view::FusedLayout;

/// Attention sinks, biases, a sliding window on every other layer, YaRN; softmax over the top-k experts.
pub static GPT_OSS: Family = Family {
    name: "GPT-OSS",
    architecture: "GptOssForCausalLM",
    model_type: "gpt_oss",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::GptOss { theta: 1.5e5 },
    windows: SlidingWindows::Alternate { window: 128 },
    refused: &[PARTIAL_ROTARY],
    fixed: |c| {
        c.attn_sink = true;
        let m = moe_config(c);
        (m.router_bias, m.bias) = (true, true);
    },
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, SINKS, EXPERTS],
    mtp: &[],
    unused: UNUSED_ROTARY,
};

const KEYS: &[Key] = &[
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Size(8)),
    key(&["head_dim"], Field::HeadDim, Absent::Size(64)),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(131_072)),
    key(&["rms_norm_eps"], Field::NormEps, Absent::Real(1e-5)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(true)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
    key(&["num_local_experts", "num_experts"], Field::Moe(MoeField::Experts), Absent::Size(128)),
    key(&["num_experts_per_tok", "experts_per_token"], Field::Moe(MoeField::TopK), Absent::Size(4)),
    key(&["intermediate_size"], Field::Moe(MoeField::ExpertFfn), Absent::Required),
    key(&["swiglu_limit"], Field::Moe(MoeField::SwigluLimit), Absent::Real(7.0)),
    key(&["swiglu_alpha"], Field::Moe(MoeField::SwigluAlpha), Absent::Real(1.702)),
];

const SINKS: &[Rule] = &[same("layers.{i}.self_attn.sinks", &["layers.{i}.attn.sink"])];

/// `[E, in, out]`, with the columns of gate and up interleaved.
const EXPERTS: &[Rule] = &[
    same("layers.{i}.mlp.router.weight", &["layers.{i}.moe.router.weight"]),
    same("layers.{i}.mlp.router.bias", &["layers.{i}.moe.router.bias"]),
    Rule {
        hf: "layers.{i}.mlp.experts.gate_up_proj",
        parts: &["layers.{i}.moe.experts.{e}.gate.weight", "layers.{i}.moe.experts.{e}.up.weight"],
        layout: FusedLayout { transposed: true, interleaved: true },
    },
    Rule {
        hf: "layers.{i}.mlp.experts.gate_up_proj_bias",
        parts: &["layers.{i}.moe.experts.{e}.gate.bias", "layers.{i}.moe.experts.{e}.up.bias"],
        layout: FusedLayout { transposed: false, interleaved: true },
    },
    transposed("layers.{i}.mlp.experts.down_proj", &["layers.{i}.moe.experts.{e}.down.weight"]),
    same("layers.{i}.mlp.experts.down_proj_bias", &["layers.{i}.moe.experts.{e}.down.bias"]),
];
