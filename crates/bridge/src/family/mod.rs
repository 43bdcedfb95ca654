//! The supported Hugging Face families, as declarative two-way tables: keys of `config.json` ↔ fields of the model,
//! tensor names ↔ logical names.

mod deepseek;
mod gemma;
mod gpt2;
mod gpt_oss;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen;
mod smollm3;

pub use deepseek::DEEPSEEK_V3;
pub use gemma::{GEMMA2, GEMMA3};
pub use gpt_oss::GPT_OSS;
pub use gpt2::GPT2;
pub use llama::LLAMA;
pub use mistral::MISTRAL;
pub use mixtral::MIXTRAL;
pub use olmo2::OLMO2;
pub use phi3::PHI3;
pub use qwen::{QWEN2, QWEN3, QWEN3_MOE};
pub use smollm3::SMOLLM3;

use crate::view::FusedLayout;
use ferrotron_core::model::config::ModelConfig;

/// Every family, in the order in which they are tried for a natively trained model.
pub const FAMILIES: &[&Family] = &[
    &LLAMA,
    &MISTRAL,
    &QWEN2,
    &QWEN3,
    &GEMMA2,
    &GEMMA3,
    &GPT2,
    &PHI3,
    &OLMO2,
    &SMOLLM3,
    &MIXTRAL,
    &QWEN3_MOE,
    &DEEPSEEK_V3,
    &GPT_OSS,
];

/// One Hugging Face family.
pub struct Family {
    /// Its name in messages.
    pub name: &'static str,
    /// The class in `architectures`.
    pub architecture: &'static str,
    /// `model_type` of `config.json`.
    pub model_type: &'static str,
    /// Keys that set one field each, in reading order (later ones may depend on earlier ones).
    pub(crate) keys: &'static [&'static [Key]],
    /// How RoPE is described.
    pub(crate) rope: RopeStyle,
    /// How sliding windows are described.
    pub(crate) windows: SlidingWindows,
    /// Keys that must be off, because what they enable is not supported.
    pub(crate) refused: &'static [Refused],
    /// Sets the fields that are the same for the whole family and have no key.
    pub(crate) fixed: fn(&mut ModelConfig),
    /// Prefix of every tensor name except the head's. Files saved from the base model lack it.
    pub(crate) prefix: &'static str,
    /// Tensor names.
    pub(crate) tensors: &'static [&'static [Rule]],
    /// Where the tensors of MTP modules go, beside those of their decoder layer, which `tensors` names. `{i}` counts
    /// on after the decoder's layers, `{j}` counts the modules from 0. Empty: the family has no MTP.
    pub(crate) mtp: &'static [Rule],
    /// Tensors in published files that the model does not use (without the prefix): kept for export unchanged.
    pub(crate) unused: &'static [&'static str],
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.architecture == other.architecture
    }
}

/// A key of `config.json` and the field it sets.
pub(crate) struct Key {
    /// Names of the key: the first present one is read, the first one is written. Empty: always derived.
    pub names: &'static [&'static str],
    pub field: Field,
    pub absent: Absent,
}

/// A field of [`ModelConfig`], or two that Hugging Face sets together.
#[derive(Clone, Copy)]
pub(crate) enum Field {
    Layers,
    Hidden,
    Ffn,
    Heads,
    KvHeads,
    HeadDim,
    Vocab,
    MaxPositions,
    NormEps,
    InitStd,
    Tied,
    /// With the family's name for the tanh approximation of GELU.
    Activation(&'static str),
    /// Biases on q, k, v and on the output projection.
    AttentionBias,
    MlpBias,
    AttnSoftcap,
    FinalSoftcap,
    /// `attn_scale = value^-1/2`
    QueryScalar,
    /// `attn_scale = 1` when false.
    ScaleScores,
    /// `attn_scale` divided by the number of the layer, counted from 1.
    ScaleByLayer,
    /// MLA: ranks of the compressed q and kv, and head dimensions.
    QueryRank,
    KeyRank,
    NopeDim,
    RopeDim,
    ValueDim,
    /// Written but not read: head dimension of a query, and its rotary part.
    QueryWidth,
    RotaryWidth,
    /// A field of the MoE configuration.
    Moe(MoeField),
}

/// A field of the MoE configuration.
#[derive(Clone, Copy)]
pub(crate) enum MoeField {
    Experts,
    TopK,
    /// Intermediate size of an expert.
    ExpertFfn,
    /// Softmax probabilities over the top-k experts only (true) or over all (false).
    NormTopkProb,
    /// Sigmoid scores of the top-k experts are divided by their sum.
    NormalizeSigmoid,
    /// Group-limited routing: the number of groups, and of those the top-k is taken from.
    Groups,
    TopkGroup,
    RouteScale,
    /// Number of shared experts, which are computed as one of their total width.
    SharedExperts,
    /// Dense layers before the first MoE layer.
    FirstKDense,
    /// Every n-th layer is an MoE layer.
    SparseStep,
    /// Dense layers by number.
    MlpOnlyLayers,
    /// Clamp of both halves of GPT-OSS's SwiGLU, and the factor inside its sigmoid.
    SwigluLimit,
    SwigluAlpha,
    /// A string with one supported value.
    MustBe(&'static str),
}

/// The value of a missing or null key: the default of the family's configuration class.
#[derive(Clone, Copy)]
pub(crate) enum Absent {
    Required,
    Size(usize),
    Real(f64),
    Flag(bool),
    Word(&'static str),
    /// A soft cap: this one if absent, none if null.
    Cap(Option<f64>),
    /// An optional size: this one if absent, none if null.
    Rank(Option<usize>),
    /// Never read.
    Derived,
    /// As many as query heads.
    Heads,
    /// hidden / heads
    HiddenPerHead,
    /// 4 × hidden
    FourHidden,
}

/// How `config.json` describes RoPE, with the default base.
pub(crate) enum RopeStyle {
    Learned,
    Global {
        theta: f64,
    },
    /// The same, with GPT-OSS's YaRN where none is described.
    GptOss {
        theta: f64,
    },
    /// On MLA's rotary channels, in interleaved pairs unless `rope_interleave` is false; `mscale_all_dim` scales
    /// attention scores, too.
    Mla {
        theta: f64,
    },
    GlobalAndLocal {
        theta: f64,
        local_theta: f64,
    },
    /// LongRoPE under its older names, too, on `partial_rotary_factor` of each head.
    Phi3 {
        theta: f64,
    },
    /// All layers but those that `no_rope_layers` marks with 0, or every `no_rope_layer_interval`-th.
    SomeLayers {
        theta: f64,
        interval: usize,
    },
}

/// Which layers have a sliding window where `layer_types` does not list them.
pub(crate) enum SlidingWindows {
    Never,
    /// Only with `use_sliding_window`, on layers from `max_window_layers` on.
    FromLayer,
    /// All layers, if `sliding_window` is set and, for families with that flag, `use_sliding_window`; `absent`: the
    /// window without the key.
    Every {
        switch: bool,
        absent: Option<usize>,
    },
    /// Only with `use_sliding_window` and `sliding_window`, on layers without RoPE.
    WithoutRope,
    /// Even layers, with a default window.
    Alternate {
        window: usize,
    },
    /// All but every sixth (`sliding_window_pattern`).
    AllBut,
}

/// A key that must be absent, null, false, zero (or one, where `or_one`).
pub(crate) struct Refused {
    pub key: &'static str,
    pub or_one: bool,
    pub what: &'static str,
}

/// The Hugging Face tensor `hf` holds the rows of `parts`, concatenated or interleaved, and transposed if
/// `transposed` (GPT-2 stores `[in, out]`). `{i}` is the layer, `{e}` the expert; where only the parts have an `{e}`,
/// the tensor stacks those of all experts. A rule applies to models that have all its parts.
pub(crate) struct Rule {
    pub hf: &'static str,
    pub parts: &'static [&'static str],
    pub layout: FusedLayout,
}

pub(crate) const fn key(names: &'static [&'static str], field: Field, absent: Absent) -> Key {
    Key { names, field, absent }
}

pub(crate) const fn same(hf: &'static str, parts: &'static [&'static str]) -> Rule {
    Rule { hf, parts, layout: FusedLayout { transposed: false, interleaved: false } }
}

pub(crate) const fn transposed(hf: &'static str, parts: &'static [&'static str]) -> Rule {
    Rule { hf, parts, layout: FusedLayout { transposed: true, interleaved: false } }
}

/// Keys of all families but GPT-2.
pub(crate) const COMMON_KEYS: &[Key] = &[
    key(&["num_hidden_layers"], Field::Layers, Absent::Required),
    key(&["hidden_size"], Field::Hidden, Absent::Required),
    key(&["intermediate_size"], Field::Ffn, Absent::Required),
    key(&["num_attention_heads"], Field::Heads, Absent::Required),
    key(&["num_key_value_heads"], Field::KvHeads, Absent::Heads),
    key(&["vocab_size"], Field::Vocab, Absent::Required),
    key(&["rms_norm_eps"], Field::NormEps, Absent::Real(1e-6)),
    key(&["initializer_range"], Field::InitStd, Absent::Real(0.02)),
];

/// Tensors of all families but GPT-2 (without the prefix).
pub(crate) const COMMON_TENSORS: &[Rule] = &[
    same("embed_tokens.weight", &["embed.tokens"]),
    same("layers.{i}.input_layernorm.weight", &["layers.{i}.attn_norm.weight"]),
    same("layers.{i}.self_attn.q_proj.weight", &["layers.{i}.attn.q.weight"]),
    same("layers.{i}.self_attn.k_proj.weight", &["layers.{i}.attn.k.weight"]),
    same("layers.{i}.self_attn.v_proj.weight", &["layers.{i}.attn.v.weight"]),
    same("layers.{i}.self_attn.q_proj.bias", &["layers.{i}.attn.q.bias"]),
    same("layers.{i}.self_attn.k_proj.bias", &["layers.{i}.attn.k.bias"]),
    same("layers.{i}.self_attn.v_proj.bias", &["layers.{i}.attn.v.bias"]),
    same("layers.{i}.self_attn.o_proj.weight", &["layers.{i}.attn.out.weight"]),
    same("layers.{i}.self_attn.o_proj.bias", &["layers.{i}.attn.out.bias"]),
    same("layers.{i}.mlp.gate_proj.weight", &["layers.{i}.mlp.gate.weight"]),
    same("layers.{i}.mlp.gate_proj.bias", &["layers.{i}.mlp.gate.bias"]),
    same("layers.{i}.mlp.up_proj.weight", &["layers.{i}.mlp.up.weight"]),
    same("layers.{i}.mlp.up_proj.bias", &["layers.{i}.mlp.up.bias"]),
    same("layers.{i}.mlp.down_proj.weight", &["layers.{i}.mlp.down.weight"]),
    same("layers.{i}.mlp.down_proj.bias", &["layers.{i}.mlp.down.bias"]),
    same("norm.weight", &["final_norm.weight"]),
];

/// The pre-MLP norm under Llama's name.
pub(crate) const LLAMA_NORMS: &[Rule] =
    &[same("layers.{i}.post_attention_layernorm.weight", &["layers.{i}.mlp_norm.weight"])];

/// Per-head norms of q and k.
pub(crate) const QK_NORMS: &[Rule] = &[
    same("layers.{i}.self_attn.q_norm.weight", &["layers.{i}.attn.q_norm.weight"]),
    same("layers.{i}.self_attn.k_norm.weight", &["layers.{i}.attn.k_norm.weight"]),
];

/// Router and experts under Qwen's and DeepSeek's names.
pub(crate) const EXPERT_TENSORS: &[Rule] = &[
    same("layers.{i}.mlp.gate.weight", &["layers.{i}.moe.router.weight"]),
    same("layers.{i}.mlp.experts.{e}.gate_proj.weight", &["layers.{i}.moe.experts.{e}.gate.weight"]),
    same("layers.{i}.mlp.experts.{e}.up_proj.weight", &["layers.{i}.moe.experts.{e}.up.weight"]),
    same("layers.{i}.mlp.experts.{e}.down_proj.weight", &["layers.{i}.moe.experts.{e}.down.weight"]),
];

/// The LM head, which is outside the base model and so has no prefix.
pub(crate) const HEAD: Rule = same("lm_head.weight", &["head.weight"]);

/// RoPE frequencies that old versions of transformers stored.
pub(crate) const UNUSED_ROTARY: &[&str] =
    &["layers.{i}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"];

pub(crate) const PARTIAL_ROTARY: Refused = Refused {
    key: "partial_rotary_factor",
    or_one: true,
    what: "RoPE on a part of each head, which transformers does not implement for this family",
};
