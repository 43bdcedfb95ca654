//! Ten steps follow the losses of one rank.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::train::Trainer;

fn losses(layout: &RankLayout, set: &[&str]) -> Vec<f64> {
    let resolved = recipe(layout, set);
    run(layout, |rank| {
        let sources = source::open(&resolved)?;
        let mut trainer = Trainer::new(rank, &resolved)?;
        (0..10).map(|_| Ok(trainer.train_step(&*sources.train)?.loss)).collect()
    })
    .unwrap()
}

fn follow(set: &[&str], layouts: &[&str]) {
    let wanted = losses(&one(), set);
    for text in layouts {
        for (i, (a, b)) in losses(&layout(text), set).iter().zip(&wanted).enumerate() {
            assert!((a / b - 1.0).abs() < 1e-5, "{text} {set:?} step {}: {a} instead of {b}", i + 1);
        }
    }
}

#[test]
fn ten_steps_follow_the_losses_of_one_rank() {
    follow(
        &[],
        &[
            "dp=4",
            "tp=2,dp=2",
            "tp=4",
            "cp=2",
            "cp=4,dp=2",
            "pp=2",
            "pp=4",
            "pp=2,vp=2,dp=2",
            "tp=2,pp=2,dp=2",
            "tp=2,cp=2,pp=2",
            "cp=2,pp=2,vp=2,dp=2",
        ],
    );
}

#[test]
fn ten_steps_of_a_zero_bubble_pipeline_too() {
    follow(&["parallel.schedule=zero-bubble"], &["pp=2", "pp=4,dp=2", "tp=2,pp=2,vp=2"]);
}

#[test]
fn explicit_pipeline_layouts_match_one_rank() {
    let wanted = losses(&one(), &[]);
    for text in ["pp=4", "pp=2,vp=2"] {
        let ours = losses(&layout(text), &["parallel.stages=E|ttt|t|tL"]);
        let near = ours.iter().zip(&wanted).all(|(a, b)| (a / b - 1.0).abs() < 1e-5);
        assert!(near, "{text}: {ours:?} instead of {wanted:?}");
    }
}

#[test]
fn ten_steps_of_adapters_follow_the_losses_of_one_rank() {
    for more in [
        &[][..],
        &["lora.fused=true", "lora.targets=[\"linear_qkv\", \"down_proj\"]", "parallel.zero=3"],
        &["lora.dora=true", "train.recompute=[\"mlp\"]"],
        &["lora.dora=true", "lora.fused=true", "lora.exclude=\"v_proj\"", "parallel.zero=3"],
    ] {
        let set = [&["lora.rank=3", "lora.alpha=6", "optimizer.lr=3e-2"][..], more].concat();
        follow(&set, &["dp=2", "tp=2,dp=2", "tp=4", "cp=2", "pp=2,vp=2,dp=2", "tp=2,cp=2,pp=2"]);
    }
}
