//! Every layout gives the one-rank result.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::ranks::{DEFAULT_TIMEOUT, on_one_device, on_threads};
use ferrotron_core::train::{LogicalValues, StepReport, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;

struct Made {
    report: StepReport,
    gradients: Vec<LogicalValues>,
    evaluation: f64,
}

fn step(layout: &RankLayout, set: &[&str]) -> Made {
    let resolved = recipe(layout, set);
    let work = |rank| {
        let sources = source::open(&resolved)?;
        let mut trainer = Trainer::new(rank, &resolved)?;
        let evaluation = trainer.evaluate(&*sources.train, 3)?;
        let report = trainer.train_step(&*sources.train)?;
        Ok(Made { report, gradients: trainer.gradients()?, evaluation })
    };
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let all = match test_on_gpu() {
        true => on_one_device(layout, DEFAULT_TIMEOUT, &Rank::cuda(0, 1, 1234, watch).unwrap().0, work),
        false => on_threads(layout, || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work),
    };
    all.unwrap().swap_remove(0)
}

fn same(what: &str, ours: &Made, wanted: &Made) {
    let near =
        |kind: &str, a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-6, "{what}: {kind} {a} instead of {b}");
    near("loss", ours.report.loss, wanted.report.loss);
    near("evaluation", ours.evaluation, wanted.evaluation);
    assert_eq!(ours.report.mtp_losses.len(), wanted.report.mtp_losses.len(), "{what}");
    for (a, b) in ours.report.mtp_losses.iter().zip(&wanted.report.mtp_losses) {
        near("further loss", *a, *b);
    }
    assert_eq!(ours.gradients.len(), wanted.gradients.len(), "{what}");
    for (o, w) in ours.gradients.iter().zip(&wanted.gradients) {
        assert_eq!((&o.name, &o.shape, o.values.len()), (&w.name, &w.shape, w.values.len()), "{what}");
        let largest = w.values.iter().fold(0f32, |m, x| m.max(x.abs()));
        let room = 1e-5 * largest + 1e-7;
        for (i, (a, b)) in o.values.iter().zip(&w.values).enumerate() {
            assert!((a - b).abs() <= room, "{what}: {} [{i}] is {a} instead of {b}", o.name);
        }
    }
}

#[test]
fn losses_and_gradients_match_one_rank() {
    let variants: [&[&str]; 6] = [
        &["data.reset_at_documents=true"],
        &["model.tied=true"],
        &["mtp.shared_layer=true", "data.reset_at_documents=true", "model.tied=false"],
        &["mtp.detach=true"],
        &["dropout.hidden=0.1", "mtp.shared_layer=true"],
        &["model.positions=learned", "model.tied=true", "train.recompute=full"],
    ];
    for set in variants {
        let wanted = step(&one(), set);
        assert_eq!(wanted.report.mtp_losses.len(), 2);
        for text in ["tp=2", "cp=2", "dp=2", "pp=2", "pp=2,vp=2", "tp=2,cp=2", "tp=2,pp=2,dp=2"] {
            same(&format!("{text} {set:?}"), &step(&layout(text), set), &wanted);
        }
    }
}

/// ZeRO-2 (gradients reduce-scattered per micro-batch), deferred weight gradients, explicit pipeline layouts.
#[test]
fn zero_and_other_schedules_match_one_rank() {
    for tied in ["model.tied=false", "model.tied=true"] {
        let wanted = step(&one(), &[tied]);
        for (text, set) in [
            ("pp=2,dp=2", &["parallel.zero=2", "parallel.comm_unit=24000"][..]),
            ("pp=2,dp=2", &["parallel.zero=3", "parallel.schedule=zero-bubble"]),
            ("dp=4", &["parallel.zero=3"]),
            ("pp=2,dp=2", &["parallel.zero=1", "parallel.schedule=zero-bubble"]),
            ("pp=2", &["parallel.stages=Ettt|mmL", "parallel.schedule=zero-bubble"]),
            ("pp=2", &["mtp.detach=false", "parallel.overlap=false"]),
        ] {
            let set = [&[tied], set].concat();
            same(&format!("{text} {set:?}"), &step(&layout(text), &set), &wanted);
        }
        let detached = step(&one(), &[tied, "mtp.detach=true"]);
        let set = [tied, "mtp.detach=true", "parallel.zero=2", "parallel.comm_unit=24000"];
        same(&format!("pp=2,dp=2 {set:?}"), &step(&layout("pp=2,dp=2"), &set), &detached);
    }
}

/// Detached MTP layers leave the decoder's gradients unchanged, and get the gradients of attached ones.
#[test]
fn detached_mtp_sends_no_gradient_into_the_decoder() {
    let with = step(&one(), &[]);
    let detached = step(&one(), &["mtp.detach=true"]);
    let without = step(&one(), &["mtp.layers=0", "mtp.loss_weight=0.1"]);
    assert_eq!(detached.report.loss, without.report.loss);
    assert_eq!(detached.report.mtp_losses, with.report.mtp_losses);
    let mut heads = 0;
    for g in &detached.gradients {
        let wanted = match g.name.starts_with("mtp.") {
            true => &with.gradients,
            false => &without.gradients,
        };
        let wanted = wanted.iter().find(|w| w.name == g.name).unwrap();
        assert_eq!(g.values, wanted.values, "{}", g.name);
        heads += usize::from(g.name.starts_with("mtp."));
    }
    assert_eq!(heads + without.gradients.len(), detached.gradients.len());
    let differ = |name: &str| {
        let of = |made: &Made| made.gradients.iter().find(|g| g.name == name).unwrap().values.clone();
        assert_ne!(of(&with), of(&without), "{name}");
    };
    ["embed.tokens", "head.weight", "final_norm.weight", "layers.0.mlp.up.weight"]
        .into_iter()
        .for_each(differ);
}

/// A shared MTP layer routes identically at each depth when it is recomputed.
#[test]
fn recomputation_is_bit_equal() {
    let set = ["moe.experts=4", "moe.ffn=16", "mtp.shared_layer=true", "moe.balance=aux"];
    let wanted = step(&one(), &set);
    for recompute in ["train.recompute=full", "train.recompute=[\"mlp\", \"attention\"]"] {
        let ours = step(&one(), &[&set[..], &[recompute]].concat());
        assert_eq!(ours.report.mtp_losses, wanted.report.mtp_losses);
        for (o, w) in ours.gradients.iter().zip(&wanted.gradients) {
            assert_eq!(o, w, "{recompute}");
        }
    }
}
