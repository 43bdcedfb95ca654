//! Every architecture option, alone and as the model families combine them: the model learns, and recomputation is
//! bit-equal.

use super::support::*;
use ferrotron_core::config::{Recompute, RecomputeModule, Resolved};
use ferrotron_core::model::config::{
    Activation, MlaConfig, ModelConfig, NormKind, Positions, RopeConfig, RopeScaling,
};

fn base() -> ModelConfig {
    recipe(&[]).model
}

fn rope(theta: f64, rotary_dim: usize, interleaved: bool, scaling: RopeScaling) -> RopeConfig {
    RopeConfig { theta, rotary_dim, interleaved, scaling }
}

fn latent(q_lora_rank: Option<usize>) -> MlaConfig {
    MlaConfig { q_lora_rank, kv_lora_rank: 12, nope_dim: 8, rope_dim: 4, v_dim: 6, norm_eps: 1e-6 }
}

/// Tiny models with the options of the supported families.
pub fn families() -> Vec<(&'static str, ModelConfig)> {
    let llama = base();
    let mut gpt2 = ModelConfig {
        activation: Activation::GeluTanh,
        gated: false,
        qkv_bias: true,
        proj_bias: true,
        mlp_bias: true,
        positions: Positions::Learned,
        kv_heads: 4,
        tied: true,
        ..base()
    };
    gpt2.norm.kind = NormKind::LayerNorm;
    let qwen2 = ModelConfig { qkv_bias: true, tied: true, ..base() };
    let qwen3 = ModelConfig {
        qk_norm: true,
        head_dim: 12,
        positions: Positions::Rope(rope(1e6, 12, false, RopeScaling::None)),
        ..base()
    };
    let mut gemma2 = ModelConfig {
        activation: Activation::GeluTanh,
        post_norms: true,
        window: Some(5),
        local_layers: vec![true, false],
        attn_softcap: Some(50.0),
        final_softcap: Some(30.0),
        embed_scale: 32f32.sqrt(),
        tied: true,
        ..base()
    };
    gemma2.norm.zero_centred = true;
    let mut gemma3 = ModelConfig {
        qk_norm: true,
        attn_softcap: None,
        final_softcap: None,
        rope_local: Some(rope(1e4, 8, false, RopeScaling::None)),
        positions: Positions::Rope(rope(1e6, 8, false, RopeScaling::Linear { factor: 8.0 })),
        ..gemma2.clone()
    };
    gemma3.attn_scale = 0.25;
    let yarn = RopeScaling::Yarn {
        factor: 8.0,
        original_max_positions: 16,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        truncate: false,
        attention_factor: None,
    };
    // Attention sinks (GPT-OSS) and MLA (DeepSeek).
    let gpt_oss = ModelConfig {
        qkv_bias: true,
        proj_bias: true,
        attn_sink: true,
        window: Some(5),
        local_layers: vec![true, false],
        positions: Positions::Rope(rope(1.5e5, 8, false, yarn)),
        ..base()
    };
    let deepseek = base().with_mla(latent(Some(20)));
    let olmo2 =
        ModelConfig { pre_norms: false, post_norms: true, qk_norm: true, qk_norm_all_heads: true, ..base() };
    let smollm3 = ModelConfig { no_rope_layers: vec![false, true], tied: true, ..base() };
    let long = RopeScaling::LongRope {
        short_factor: vec![1.0, 1.5],
        long_factor: vec![2.0, 3.0],
        original_max_positions: 8,
        factor: 4.0,
        attention_factor: None,
    };
    let phi3 = ModelConfig { positions: Positions::Rope(rope(1e4, 4, false, long)), ..base() };
    vec![
        ("gpt-oss", gpt_oss),
        ("deepseek", deepseek),
        ("olmo2", olmo2),
        ("smollm3", smollm3),
        ("phi3", phi3),
        ("llama", llama),
        ("gpt2", gpt2),
        ("qwen2", qwen2),
        ("qwen3", qwen3),
        ("gemma2", gemma2),
        ("gemma3", gemma3),
    ]
}

/// One option at a time.
fn switches() -> Vec<(&'static str, ModelConfig)> {
    let with = |f: &dyn Fn(&mut ModelConfig)| {
        let mut c = base();
        f(&mut c);
        c
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 4.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8,
    };
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_max_positions: 8,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        truncate: true,
        attention_factor: None,
    };
    vec![
        ("layernorm", with(&|c| c.norm.kind = NormKind::LayerNorm)),
        ("zero-centred", with(&|c| c.norm.zero_centred = true)),
        ("gelu (erf)", with(&|c| c.activation = Activation::GeluErf)),
        ("not gated", with(&|c| c.gated = false)),
        ("mlp bias", with(&|c| c.mlp_bias = true)),
        ("output bias", with(&|c| c.proj_bias = true)),
        ("one kv head", with(&|c| c.kv_heads = 1)),
        (
            "interleaved, half rotated",
            with(&|c| c.positions = Positions::Rope(rope(1e4, 4, true, RopeScaling::None))),
        ),
        ("llama3 rope", with(&|c| c.positions = Positions::Rope(rope(1e4, 8, false, llama3.clone())))),
        ("yarn rope", with(&|c| c.positions = Positions::Rope(rope(1e4, 8, false, yarn.clone())))),
        ("window 1", with(&|c| (c.window, c.local_layers) = (Some(1), vec![true, false]))),
        ("sinks", with(&|c| c.attn_sink = true)),
        ("latent, queries from the stream", base().with_mla(latent(None))),
        (
            "latent, biases, sinks",
            ModelConfig { qkv_bias: true, proj_bias: true, attn_sink: true, ..base() }
                .with_mla(latent(Some(20))),
        ),
        ("no norms in layers", with(&|c| c.pre_norms = false)),
        ("post norms", with(&|c| c.post_norms = true)),
        ("softcaps", with(&|c| (c.attn_softcap, c.final_softcap) = (Some(2.0), Some(5.0)))),
        ("one layer, one head", with(&|c| (c.layers, c.heads, c.kv_heads, c.head_dim) = (1, 1, 1, 8))),
        ("odd width", with(&|c| (c.hidden, c.ffn, c.init_std) = (27, 35, 0.1))),
    ]
}

fn with_model(changes: &[&str], model: &ModelConfig) -> Resolved {
    Resolved { model: model.clone(), ..recipe(changes) }
}

#[test]
fn every_architecture_learns() {
    for dtype in ["f32", "bf16"] {
        for (name, model) in families().into_iter().chain(switches()) {
            let dtype_key = format!("precision.dtype={dtype}");
            let mut t = trainer(&with_model(&["train.steps=40", &dtype_key], &model));
            let first = t.train_step(&RULE).unwrap().loss;
            let last = (1..40).map(|_| t.train_step(&RULE).unwrap().loss).last().unwrap();
            assert!(first > 2.3, "{name} in {dtype} begins at {first}");
            assert!(last < 0.5 * first, "{name} in {dtype}: from {first} to {last}");
            // Evaluation changes nothing and agrees with the next step's loss.
            let seen = t.evaluate(&RULE, 1).unwrap();
            assert_eq!(seen, t.evaluate(&RULE, 1).unwrap());
        }
    }
}

#[test]
fn every_optimizer_learns() {
    for (kind, lr) in [("adamw", 1e-2), ("adam", 1e-2), ("sgd", 0.2)] {
        let r = recipe(&["train.steps=60", &format!("optimizer.kind={kind}"), &format!("optimizer.lr={lr}")]);
        let mut t = trainer(&r);
        let first = t.train_step(&RULE).unwrap().loss;
        let last = (1..60).map(|_| t.train_step(&RULE).unwrap().loss).last().unwrap();
        assert!(last < 0.6 * first, "{kind}: from {first} to {last}");
    }
}

/// Two steps without and with every recomputation setting.
#[test]
fn recomputation_is_bit_equal() {
    let mut choices = vec![Recompute::Full];
    for bits in 1..16 {
        let list =
            RecomputeModule::ALL.iter().enumerate().filter(|(i, _)| bits >> i & 1 == 1).map(|(_, m)| *m);
        choices.push(Recompute::Modules(list.collect()));
    }
    assert_eq!(RecomputeModule::ALL.len(), 4);
    for (name, model) in families() {
        for dtype in ["f32", "bf16"] {
            let state = |recompute: Recompute| {
                let dtype_key = format!("precision.dtype={dtype}");
                let mut r = with_model(&["dropout.hidden=0.1", &dtype_key], &model);
                r.config.train.recompute = recompute;
                let mut t = trainer(&r);
                let reports = [t.train_step(&RULE).unwrap(), t.train_step(&RULE).unwrap()];
                (reports, t.snapshot().unwrap(), t.rank.device().memory().peak)
            };
            let kept = state(Recompute::None);
            for choice in &choices {
                let again = state(choice.clone());
                assert_eq!(kept.0, again.0, "{name} {dtype} {choice:?}");
                assert!(kept.1 == again.1, "{name} {dtype} {choice:?}: the bits differ");
                if *choice == Recompute::Full {
                    let activations = |p: &[usize; 6]| p[ferrotron_tensor::Category::Activations as usize];
                    assert!(activations(&again.2) < activations(&kept.2), "{name}: nothing was saved");
                }
            }
        }
    }
}
