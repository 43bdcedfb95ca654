//! The supported families: what their `config.json` says and where their tensors go, as tables that work in
//! both directions.

mod deepseek;
mod gemma;
mod gpt2;
mod gpt_oss;
mod llama;
mod mixtral;
mod qwen;

pub use deepseek::DEEPSEEK_V3;
pub use gemma::{GEMMA2, GEMMA3};
pub use gpt_oss::GPT_OSS;
pub use gpt2::GPT2;
pub use llama::LLAMA;
pub use mixtral::MIXTRAL;
pub use qwen::{QWEN2, QWEN3, QWEN3_MOE};

use crate::view::FusedLayout;
use ferrotron_core::model::config::ModelConfig;

/// Every family, in the order in which one is chosen for a natively trained model.
pub const FAMILIES: &[&Family] =
    &[&LLAMA, &QWEN2, &QWEN3, &GEMMA2, &GEMMA3, &GPT2, &MIXTRAL, &QWEN3_MOE, &DEEPSEEK_V3, &GPT_OSS];

/// One Hugging Face family.
pub struct Family {
    /// Its name in messages.
    pub name: &'static str,
    /// The class in `architectures`.
    pub architecture: &'static str,
    /// `model_type` of `config.json`.
    pub model_type: &'static str,
    /// Keys that set a switch each, in reading order (later ones may depend on earlier ones).
    pub(crate) keys: &'static [&'static [Key]],
    /// Where RoPE is described.
    pub(crate) rope: RopeStyle,
    /// Where sliding windows are described.
    pub(crate) windows: SlidingWindows,
    /// Keys that must say "no", because we do not have what they switch on.
    pub(crate) refused: &'static [Refused],
    /// What no key says because it is true of the whole family.
    pub(crate) fixed: fn(&mut ModelConfig),
    /// What stands before every tensor name except the head's. Files of the bare decoder lack it.
    pub(crate) prefix: &'static str,
    /// Where the tensors go.
    pub(crate) tensors: &'static [&'static [Rule]],
    /// Tensors that old files carry and nobody needs (without the prefix): kept for export as they are.
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

/// A key of `config.json` and the switch it sets.
pub(crate) struct Key {
    /// Spellings; the first present one counts, the first one is written. None: always derived.
    pub names: &'static [&'static str],
    pub field: Field,
    pub absent: Absent,
}

/// A switch of [`ModelConfig`], or two that Hugging Face ties together.
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
    /// With the family's word for the tanh form of GELU.
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
    /// Widths of latent attention.
    QueryRank,
    KeyRank,
    NopeDim,
    RopeDim,
    ValueDim,
    /// Written for readers that want them: channels of a query, and those of them with positions.
    QueryWidth,
    RotaryWidth,
    /// Something about experts.
    Moe(MoeField),
}

/// What a key says about mixtures of experts.
#[derive(Clone, Copy)]
pub(crate) enum MoeField {
    Experts,
    TopK,
    /// Inside an expert.
    ExpertFfn,
    /// Softmax scores over the chosen experts only, or over all.
    NormTopkProb,
    /// Sigmoid scores divided by the sum of the chosen.
    NormalizeSigmoid,
    /// Groups of experts, and how many of them are chosen from.
    Groups,
    TopkGroup,
    RouteScale,
    /// Experts that all tokens go to; one as wide as all of them.
    SharedExperts,
    /// Layers before the first mixture.
    FirstKDense,
    /// Every n-th layer is a mixture.
    SparseStep,
    /// Layers that are none.
    MlpOnlyLayers,
    /// Bounds of both halves of an expert, and steepness of its sigmoid.
    SwigluLimit,
    SwigluAlpha,
    /// A word that must be this one.
    MustBe(&'static str),
}

/// What a missing (or null) key means: the default of the family's class.
#[derive(Clone, Copy)]
pub(crate) enum Absent {
    Required,
    Size(usize),
    Real(f64),
    Flag(bool),
    Word(&'static str),
    /// A soft cap: absent means this one, null means none.
    Cap(Option<f64>),
    /// A width that may be none: absent means this one, null means none.
    Rank(Option<usize>),
    /// Nothing is read.
    Derived,
    /// As many as query heads.
    Heads,
    /// hidden / heads
    HiddenPerHead,
    /// 4 × hidden
    FourHidden,
}

/// Where RoPE is described in `config.json`, and the base when it is not.
pub(crate) enum RopeStyle {
    Learned,
    Global {
        theta: f64,
    },
    /// The same, with a stretching that must be there: no version of the reference goes without.
    RequiredScaling {
        theta: f64,
    },
    /// On the channels of latent attention, in pairs side by side unless `rope_interleave` says otherwise; `mscale_all_dim`
    /// scales scores too.
    Mla {
        theta: f64,
    },
    GlobalAndLocal {
        theta: f64,
        local_theta: f64,
    },
}

/// How layers with a sliding window are described when `layer_types` does not list them.
pub(crate) enum SlidingWindows {
    Never,
    /// Only with `use_sliding_window`, on layers from `max_window_layers` on.
    FromLayer,
    /// All layers have the window of `sliding_window`, if there is one and, where there is a switch, `use_sliding_window`.
    Every {
        switch: bool,
    },
    /// Even layers, of so many tokens when that is not said.
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

/// The Hugging Face tensor `hf` is the rows of `parts` one after the other, or taking turns where `woven`, then
/// transposed if `transposed` (GPT-2 stores `[in, out]`). `{i}` is the layer, `{e}` the expert; where only the parts
/// have an `{e}`, the tensor holds those of all experts, one after the other. A rule holds for a model that has all its
/// parts.
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

/// The keys all families but GPT-2 share.
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

/// The tensors all families but GPT-2 share (without the prefix).
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

/// Norm before the MLP under Llama's name for it.
pub(crate) const LLAMA_NORMS: &[Rule] =
    &[same("layers.{i}.post_attention_layernorm.weight", &["layers.{i}.mlp_norm.weight"])];

/// Per-head norms of q and k.
pub(crate) const QK_NORMS: &[Rule] = &[
    same("layers.{i}.self_attn.q_norm.weight", &["layers.{i}.attn.q_norm.weight"]),
    same("layers.{i}.self_attn.k_norm.weight", &["layers.{i}.attn.k_norm.weight"]),
];

/// The router and an MLP for each expert, under Qwen's and DeepSeek's names.
pub(crate) const EXPERT_TENSORS: &[Rule] = &[
    same("layers.{i}.mlp.gate.weight", &["layers.{i}.moe.router.weight"]),
    same("layers.{i}.mlp.experts.{e}.gate_proj.weight", &["layers.{i}.moe.experts.{e}.gate.weight"]),
    same("layers.{i}.mlp.experts.{e}.up_proj.weight", &["layers.{i}.moe.experts.{e}.up.weight"]),
    same("layers.{i}.mlp.experts.{e}.down_proj.weight", &["layers.{i}.moe.experts.{e}.down.weight"]),
];

/// The head, which stands outside the decoder and so has no prefix.
pub(crate) const HEAD: Rule = same("lm_head.weight", &["head.weight"]);

/// Frequencies that old exporters stored as if they were weights.
pub(crate) const UNUSED_ROTARY: &[&str] =
    &["layers.{i}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"];

pub(crate) const PARTIAL_ROTARY: Refused = Refused {
    key: "partial_rotary_factor",
    or_one: true,
    what: "RoPE on a part of each head, which this family's reference code does not have",
};

pub(crate) const NO_JITTER: Refused = Refused {
    key: "router_jitter_noise",
    or_one: false,
    what: "noise before the router; set it to 0 (moe.jitter is the key of training)",
};
