//! Upcycling: MoE models from dense ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_core::model::config::Activation;
use ferrotron_core::model::generate::to_host;
use ferrotron_core::model::upcycle::{UpcycleConfig, Upcycled};
use ferrotron_core::model::{Model, ModelConfig, PipelineLayout, logical_parts};
use ferrotron_core::pipeline::{PipelinePlan, ScheduleKind};
use ferrotron_core::train::{MicroBatch, StepMode, execute};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::{Rank, initial_values};
use ferrotron_tensor::DType;

fn dense(gated: bool) -> ModelConfig {
    let mut c = ModelConfig::preset("tiny").unwrap();
    (c.layers, c.hidden, c.ffn, c.heads, c.kv_heads, c.head_dim, c.vocab) = (2, 32, 48, 4, 2, 8, 64);
    c.attn_scale = (1.0 / 8f64.sqrt()) as f32;
    if let ferrotron_core::model::config::Positions::Rope(rope) = &mut c.positions {
        rope.rotary_dim = 8;
    }
    c.gated = gated;
    c
}

/// Initial weights of the dense model.
fn weights(c: &ModelConfig, name: &str) -> Vec<f32> {
    let part = logical_parts(c).unwrap().into_iter().find(|p| p.name == name).unwrap();
    initial_values(7, &part, 0..part.shape.iter().product())
}

fn logits(c: &ModelConfig, source: &dyn Fn(&str) -> Vec<f32>) -> Vec<f32> {
    let bytes = |name: &str| Ok(source(name).iter().flat_map(|x| x.to_le_bytes()).collect());
    let model =
        Model::load(Rank::cpu(1, 1).unwrap(), c, 16, DType::F32, &PipelineLayout::default(), &bytes).unwrap();
    let ids: Vec<i32> = (0..32).map(|i| i * 7 % 64).collect();
    let schedule =
        PipelinePlan { kind: ScheduleKind::ForwardOnly, ..PipelinePlan::new(1, 1, 1) }.schedule().unwrap();
    let mut load = |_| {
        let input = model.decoder.input(&model.rank, &ids, None, Layout::Rows { count: 2, len: 16 })?;
        Ok(MicroBatch { input, targets: None, position: None })
    };
    let out = execute(model.pass(), &model.decoder, &schedule, &mut load, StepMode::Logits).unwrap();
    to_host(&model.pass(), &out[0]).unwrap()
}

fn upcycled(text: &str, gated: bool) -> Upcycled {
    text.parse::<UpcycleConfig>().unwrap().apply(&dense(gated)).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// f64 references of the MLP and of the MoE layer: with α = 1 they agree to f64 rounding, whatever the routing.
#[test]
fn copied_experts_match_the_dense_model() {
    for (text, gated) in
        [("experts=8", true), ("experts=4,topk=3", false), ("experts=2,topk=2,pre_softmax=true", true)]
    {
        let (u, c) = (upcycled(text, gated), dense(gated));
        assert_eq!(u.scale(), 1.0);
        let source = |name: &str| Ok(weights(&c, name));
        for part in logical_parts(u.model()).unwrap().iter().filter(|p| p.name.contains(".experts.")) {
            assert_eq!(
                u.values(&part.name, &source).unwrap(),
                weights(&c, &u.source_name(&part.name).unwrap())
            );
        }
        let ours = logits(u.model(), &|name| u.values(name, &source).unwrap());
        let theirs = logits(&c, &|name| weights(&c, name));
        let most = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most <= 1e-5, "{text}: {most}");
    }
}

/// With split experts the scale passes through the gate's activation, so outputs are only close.
#[test]
fn split_experts_are_close_to_the_dense_model() {
    for (text, gated) in [
        ("experts=8,granularity=2", true),
        ("experts=8,granularity=4,topk=4", true),
        ("experts=8,granularity=2,topk=4,pre_softmax=true", true),
        ("experts=6,granularity=3,topk=3", false),
    ] {
        let (u, c) = (upcycled(text, gated), dense(gated));
        let source = |name: &str| Ok(weights(&c, name));
        let ours = logits(u.model(), &|name| u.values(name, &source).unwrap());
        let theirs = logits(&c, &|name| weights(&c, name));
        let most = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most <= 1e-1, "{text}: {most}");
        // The check can fail: with all experts equal to the first, outputs differ.
        let wrong = logits(u.model(), &|name| {
            let first = name.find(".experts.").map(|i| {
                let rest = name[i + 9..].split_once('.').unwrap().1;
                format!("{}.experts.0.{rest}", &name[..i])
            });
            u.values(first.as_deref().unwrap_or(name), &source).unwrap()
        });
        let apart = |x: &[f32]| x.iter().zip(&theirs).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        assert!(apart(&wrong) > 4.0 * apart(&ours), "{text}: {} {}", apart(&wrong), apart(&ours));
    }
}

/// A factor on the weights comes out of squared ReLU as its cube, so that outputs are exact, as they are not for other activations.
#[test]
fn split_experts_of_squared_relu_match_the_dense_model() {
    let mut c = dense(false);
    c.activation = Activation::SquaredRelu;
    for (text, cube) in [("experts=8,granularity=4,topk=4", 4.0), ("experts=6,granularity=3,topk=3", 3.0)] {
        let u = text.parse::<UpcycleConfig>().unwrap().apply(&c).unwrap();
        assert!((u.scale().powi(3) - cube).abs() < 1e-12, "{text}: {}", u.scale());
        // Larger than initial ones, whose MLPs hardly reach the logits.
        let weight = |name: &str| -> Vec<f32> {
            let factor = if name.contains(".mlp.") { 10.0 } else { 1.0 };
            weights(&c, name).iter().map(|x| x * factor).collect()
        };
        let source = |name: &str| Ok(weight(name));
        let ours = logits(u.model(), &|name| u.values(name, &source).unwrap());
        let theirs = logits(&c, &weight);
        let most = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let largest = theirs.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
        assert!(most <= 1e-5 * largest, "{text}: {most} of {largest}");
    }
}

/// Expert slices and router copies, element by element.
#[test]
fn experts_are_slices_of_the_mlp() {
    let (u, c) = (upcycled("experts=8,granularity=2,topk=4,seed=3", true), dense(true));
    let source = |name: &str| Ok(weights(&c, name));
    let s = 2f64.cbrt();
    assert_eq!(u.scale(), s);
    let (up, down) = (weights(&c, "layers.1.mlp.up.weight"), weights(&c, "layers.1.mlp.down.weight"));
    let scaled = |x: f32| (f64::from(x) * s) as f32;
    for e in 0..8 {
        let of = |kind: &str| u.values(&format!("layers.1.moe.experts.{e}.{kind}.weight"), &source).unwrap();
        let first = e % 2 * 24;
        let (ours, theirs) = (of("up"), of("down"));
        for r in 0..24 {
            for h in 0..32 {
                assert_eq!(ours[r * 32 + h], scaled(up[(first + r) * 32 + h]));
                assert_eq!(theirs[h * 24 + r], scaled(down[h * 48 + first + r]));
            }
        }
    }
    let router = u.values("layers.1.moe.router.weight", &source).unwrap();
    let rows: Vec<&[f32]> = router.chunks(32).collect();
    for pair in rows.chunks(2) {
        assert_eq!(pair[0], pair[1]);
    }
    assert_ne!(rows[0], rows[2]);
    assert_ne!(router, u.values("layers.0.moe.router.weight", &source).unwrap());
    let r = "experts=8,granularity=2,topk=4,pre_softmax=true"
        .parse::<UpcycleConfig>()
        .unwrap()
        .apply(&c)
        .unwrap();
    assert_eq!(r.scale(), 4f64.cbrt(), "4 groups · 2² / 4 choices");
}

#[test]
fn invalid_upcycling_is_refused() {
    let refused = |text: &str, c: &ModelConfig| match text.parse::<UpcycleConfig>() {
        Err(e) => e,
        Ok(u) => u.apply(c).unwrap_err().to_string(),
    };
    let c = dense(true);
    for (text, want) in [
        ("", "experts is missing"),
        ("experts=x", "whole number"),
        ("expert=8", "unknown key"),
        ("experts=8,granularity=5", "does not divide the width 48"),
        ("experts=9,granularity=2", "no multiple of granularity"),
        ("experts=8,granularity=2,topk=3", "use 4"),
        ("experts=8,granularity=0", "does not divide"),
        ("experts=2,topk=4", "topk"),
        ("experts=8,topk=1", "pre_softmax"),
    ] {
        let e = refused(text, &c);
        assert!(e.contains(want), "{text}: {e}");
    }
    let moe = "experts=4".parse::<UpcycleConfig>().unwrap().apply(&c).unwrap().model().clone();
    assert!(refused("experts=4", &moe).contains("experts already"));
    assert!(refused("experts=4", &ModelConfig { mlp_bias: true, ..c }).contains("biases"));
}
