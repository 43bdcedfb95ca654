//! GPT-OSS: sinks, windows and biases in attention; experts with bounds, all of them in one tensor.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, Family, Field, Key, LLAMA_NORMS, Mix, PARTIAL_ROTARY, ROTARY_STRAYS,
    RopeStyle, Rule, Windows, key, same, transposed,
};
use crate::config::mixture;
use crate::view::Weave;

/// Sinks, biases, a window on every other layer, YaRN; experts weighted by a softmax over the chosen.
pub static GPT_OSS: Family = Family {
    name: "GPT-OSS",
    architecture: "GptOssForCausalLM",
    model_type: "gpt_oss",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Described { theta: 1.5e5 },
    windows: Windows::Alternate { window: 128 },
    refused: &[PARTIAL_ROTARY],
    facts: |c| {
        c.attn_sink = true;
        let m = mixture(c);
        (m.router_bias, m.bias) = (true, true);
    },
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, SINKS, EXPERTS],
    strays: ROTARY_STRAYS,
};

const KEYS: &[Key] = &[
    key(&["head_dim"], Field::HeadDim, Absent::Size(64)),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(131_072)),
    key(&["rms_norm_eps"], Field::NormEps, Absent::Real(1e-5)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(true)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
    key(&["num_local_experts", "num_experts"], Field::Mixture(Mix::Experts), Absent::Size(128)),
    key(&["num_experts_per_tok", "experts_per_token"], Field::Mixture(Mix::TopK), Absent::Size(4)),
    key(&["intermediate_size"], Field::Mixture(Mix::Width), Absent::Required),
    key(&["swiglu_limit"], Field::Mixture(Mix::Limit), Absent::Real(7.0)),
    key(&["swiglu_alpha"], Field::Mixture(Mix::Alpha), Absent::Real(1.702)),
];

const SINKS: &[Rule] = &[same("layers.{i}.self_attn.sinks", &["layers.{i}.attn.sink"])];

/// `[E, in, out]`, where the columns of gate and up take turns.
const EXPERTS: &[Rule] = &[
    same("layers.{i}.mlp.router.weight", &["layers.{i}.moe.router.weight"]),
    same("layers.{i}.mlp.router.bias", &["layers.{i}.moe.router.bias"]),
    Rule {
        hf: "layers.{i}.mlp.experts.gate_up_proj",
        parts: &["layers.{i}.moe.experts.{e}.gate.weight", "layers.{i}.moe.experts.{e}.up.weight"],
        weave: Weave { transposed: true, woven: true },
    },
    Rule {
        hf: "layers.{i}.mlp.experts.gate_up_proj_bias",
        parts: &["layers.{i}.moe.experts.{e}.gate.bias", "layers.{i}.moe.experts.{e}.up.bias"],
        weave: Weave { transposed: false, woven: true },
    },
    transposed("layers.{i}.mlp.experts.down_proj", &["layers.{i}.moe.experts.{e}.down.weight"]),
    same("layers.{i}.mlp.experts.down_proj_bias", &["layers.{i}.moe.experts.{e}.down.bias"]),
];
