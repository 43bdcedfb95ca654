//! DeepSeek-V3: MLA, dense layers followed by MoE layers with group-limited sigmoid routing and a shared expert, MTP.

use super::{
    Absent, COMMON_KEYS, COMMON_TENSORS, EXPERT_TENSORS, Family, Field, Key, LLAMA_NORMS, MoeField,
    PARTIAL_ROTARY, Refused, RopeStyle, Rule, SlidingWindows, UNUSED_ROTARY, key, same,
};
use crate::config::moe_config;
use ferrotron_core::model::moe_config::ScoreKind;

/// MLA; sigmoid routing with an expert bias for load balancing (`noaux_tc`); MTP modules after the decoder.
pub static DEEPSEEK_V3: Family = Family {
    name: "DeepSeek-V3",
    architecture: "DeepseekV3ForCausalLM",
    model_type: "deepseek_v3",
    keys: &[COMMON_KEYS, KEYS],
    rope: RopeStyle::Mla { theta: 1e4 },
    windows: SlidingWindows::Never,
    refused: &[PARTIAL_ROTARY, SOME_LAYERS],
    fixed: |c| {
        let m = moe_config(c);
        (m.score, m.expert_bias) = (ScoreKind::Sigmoid, true);
    },
    prefix: "model.",
    tensors: &[COMMON_TENSORS, LLAMA_NORMS, MLA_TENSORS, EXPERT_TENSORS, SHARED],
    mtp: MTP_TENSORS,
    unused: UNUSED_ROTARY,
};

const KEYS: &[Key] = &[
    key(&["q_lora_rank"], Field::QueryRank, Absent::Rank(Some(1536))),
    key(&["kv_lora_rank"], Field::KeyRank, Absent::Size(512)),
    key(&["qk_nope_head_dim"], Field::NopeDim, Absent::Size(128)),
    key(&["qk_rope_head_dim"], Field::RopeDim, Absent::Size(64)),
    key(&["v_head_dim"], Field::ValueDim, Absent::Size(128)),
    // The configuration class derives these from the others, whatever the file says.
    key(&["qk_head_dim"], Field::QueryWidth, Absent::Derived),
    key(&["head_dim"], Field::RotaryWidth, Absent::Derived),
    key(&["max_position_embeddings"], Field::MaxPositions, Absent::Size(4096)),
    key(&["hidden_act"], Field::Activation("gelu_pytorch_tanh"), Absent::Word("silu")),
    key(&["attention_bias"], Field::AttentionBias, Absent::Flag(false)),
    key(&["tie_word_embeddings"], Field::Tied, Absent::Flag(false)),
    key(&["n_routed_experts"], Field::Moe(MoeField::Experts), Absent::Size(256)),
    key(&["num_experts_per_tok"], Field::Moe(MoeField::TopK), Absent::Size(8)),
    key(&["moe_intermediate_size"], Field::Moe(MoeField::ExpertFfn), Absent::Size(2048)),
    key(&["n_shared_experts"], Field::Moe(MoeField::SharedExperts), Absent::Size(1)),
    key(&["n_group"], Field::Moe(MoeField::Groups), Absent::Size(8)),
    key(&["topk_group"], Field::Moe(MoeField::TopkGroup), Absent::Size(4)),
    key(&["routed_scaling_factor"], Field::Moe(MoeField::RouteScale), Absent::Real(2.5)),
    key(&["norm_topk_prob"], Field::Moe(MoeField::NormalizeSigmoid), Absent::Flag(true)),
    key(&["scoring_func"], Field::Moe(MoeField::MustBe("sigmoid")), Absent::Derived),
    key(&["topk_method"], Field::Moe(MoeField::MustBe("noaux_tc")), Absent::Derived),
    key(&["first_k_dense_replace"], Field::Moe(MoeField::FirstKDense), Absent::Size(3)),
];

const MLA_TENSORS: &[Rule] = &[
    same("layers.{i}.self_attn.q_a_proj.weight", &["layers.{i}.attn.q_a.weight"]),
    same("layers.{i}.self_attn.q_a_proj.bias", &["layers.{i}.attn.q_a.bias"]),
    same("layers.{i}.self_attn.q_a_layernorm.weight", &["layers.{i}.attn.q_a_norm.weight"]),
    same("layers.{i}.self_attn.q_b_proj.weight", &["layers.{i}.attn.q_b.weight"]),
    same("layers.{i}.self_attn.kv_a_proj_with_mqa.weight", &["layers.{i}.attn.kv_a.weight"]),
    same("layers.{i}.self_attn.kv_a_proj_with_mqa.bias", &["layers.{i}.attn.kv_a.bias"]),
    same("layers.{i}.self_attn.kv_a_layernorm.weight", &["layers.{i}.attn.kv_a_norm.weight"]),
    same("layers.{i}.self_attn.kv_b_proj.weight", &["layers.{i}.attn.kv_b.weight"]),
    same("layers.{i}.self_attn.o_proj.weight", &["layers.{i}.attn.o.weight"]),
    same("layers.{i}.self_attn.o_proj.bias", &["layers.{i}.attn.o.bias"]),
];

const SHARED: &[Rule] = &[
    same("layers.{i}.mlp.gate.e_score_correction_bias", &["layers.{i}.moe.expert_bias"]),
    same("layers.{i}.mlp.shared_experts.gate_proj.weight", &["layers.{i}.moe.shared.gate.weight"]),
    same("layers.{i}.mlp.shared_experts.up_proj.weight", &["layers.{i}.moe.shared.up.weight"]),
    same("layers.{i}.mlp.shared_experts.down_proj.weight", &["layers.{i}.moe.shared.down.weight"]),
];

/// An MTP module. Its `embed_tokens` and `shared_head.head` are the model's own embedding and head.
const MTP_TENSORS: &[Rule] = &[
    same("layers.{i}.enorm.weight", &["mtp.{j}.enorm.weight"]),
    same("layers.{i}.hnorm.weight", &["mtp.{j}.hnorm.weight"]),
    same("layers.{i}.eh_proj.weight", &["mtp.{j}.eh.weight"]),
    same("layers.{i}.shared_head.norm.weight", &["mtp.{j}.norm.weight"]),
];

const SOME_LAYERS: Refused = Refused {
    key: "moe_layer_freq",
    or_one: true,
    what: "MoE in every n-th layer only, which transformers ignores for this family",
};
