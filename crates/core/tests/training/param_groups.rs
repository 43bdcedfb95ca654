//! Parameter groups: what each key of a group does to the weights of a step.

use super::support::*;
use ferrotron_core::train::{LogicalValues, Trainer};

/// Weights by name after `steps` steps, and the norms of their gradients.
fn weights(changes: &[&str], steps: usize) -> (Vec<LogicalValues>, Vec<f64>) {
    let r = recipe(&[changes, &["train.steps=20"]].concat());
    let mut t = trainer(&r);
    let norms = (0..steps).map(|_| t.train_step(&RULE).unwrap().grad_norm).collect();
    (t.weights().unwrap(), norms)
}

fn bits(v: &LogicalValues) -> Vec<u32> {
    v.values.iter().map(|x| x.to_bits()).collect()
}

fn is_norm(name: &str) -> bool {
    name.contains("norm")
}

/// Groups that change nothing, by any way of writing them, give the bits of no groups.
#[test]
fn groups_that_change_nothing_give_the_same_bits() {
    for base in [&[][..], &["optimizer.kind=sgd", "optimizer.lr=0.1"], &["precision.dtype=bf16"]] {
        let plain = weights(base, 3);
        for groups in [
            "optimizer.groups=[{ params = \"norm\" }]",
            "optimizer.groups=[{ params = \"*\", lr_factor = 1.0 }]",
            "optimizer.groups=[{ params = [\"matrix\", \"embedding\"], weight_decay_factor = 1.0 }]",
        ] {
            assert!(weights(&[base, &[groups]].concat(), 3) == plain, "{base:?} {groups}");
        }
    }
}

/// A frozen group keeps its initial bits and has no part in the gradient norm; others train on.
#[test]
fn frozen_parameters_stay() {
    let (start, _) = weights(&[], 0);
    for (kind, frozen) in
        [("norm", is_norm as fn(&str) -> bool), ("matrix", |n| n.contains("attn.") || n.contains("mlp."))]
    {
        let group = format!("optimizer.groups=[{{ params = \"{kind}\", frozen = true }}]");
        let (end, norms) = weights(&[&group], 3);
        for (a, b) in start.iter().zip(&end) {
            assert_eq!(bits(a) == bits(b), frozen(&a.name), "{}", a.name);
        }
        let (_, all) = weights(&[], 1);
        assert!(norms[0] < all[0], "{kind}: {} and {}", norms[0], all[0]);
    }
}

/// One step of SGD without decay is linear in the learning rate.
#[test]
fn factors_scale_the_step() {
    let sgd = [
        "optimizer.kind=sgd",
        "optimizer.lr=0.1",
        "optimizer.weight_decay=0",
        "schedule.warmup=0",
        "schedule.decay=constant",
        "optimizer.clip=0",
    ];
    let (start, _) = weights(&sgd, 0);
    let (plain, _) = weights(&sgd, 1);
    let group = "optimizer.groups=[{ params = \"norm\", lr_factor = 0.25 }, { params = \"layers.1.*\", lr_factor = 0.0 }]";
    let (end, _) = weights(&[&sgd[..], &[group]].concat(), 1);
    for ((a, b), p) in start.iter().zip(&end).zip(&plain) {
        let factor = if is_norm(&a.name) {
            0.25
        } else if a.name.starts_with("layers.1.") {
            0.0
        } else {
            1.0
        };
        for ((a, b), p) in a.values.iter().zip(&b.values).zip(&p.values) {
            let (ours, full) = (f64::from(b - a), f64::from(p - a));
            assert!((ours - factor * full).abs() <= 3e-7 * f64::from(a.abs()).max(1.0), "{ours} of {full}");
        }
    }
}

/// Weight decay alone: without a gradient step every decayed weight shrinks by one factor.
#[test]
fn weight_decay_factors_reach_norms_only_by_name() {
    let base = [
        "optimizer.kind=sgd",
        "optimizer.lr=0.5",
        "optimizer.weight_decay=0.2",
        "schedule.warmup=0",
        "schedule.decay=constant",
    ];
    let (plain, _) = weights(&base, 1);
    let group = "optimizer.groups=[{ params = \"norm\", weight_decay_factor = 1.0 }]";
    let (end, _) = weights(&[&base[..], &[group]].concat(), 1);
    for (p, e) in plain.iter().zip(&end) {
        // Norm weights begin at 1: lr·wd·1 less than without decay.
        let less = if is_norm(&p.name) { 0.1 } else { 0.0 };
        for (p, e) in p.values.iter().zip(&e.values) {
            assert!((p - e - less).abs() < 1e-5, "{p} {e}");
        }
    }
}

/// Every rule learns, and a run of another rule refuses its checkpoint.
#[test]
fn every_rule_learns_and_its_state_is_its_own() {
    let losses = |changes: &[&str]| {
        let r = recipe(&[changes, &["train.steps=60"]].concat());
        let mut t = trainer(&r);
        let all: Vec<f64> = (0..60).map(|_| t.train_step(&RULE).unwrap().loss).collect();
        (all, t.snapshot().unwrap())
    };
    let mut names = Vec::new();
    for changes in [
        &["optimizer.kind=lion", "optimizer.lr=1e-3"][..],
        &["optimizer.kind=sgd", "optimizer.lr=0.3", "optimizer.nesterov=true"],
        &["optimizer.kind=muon", "optimizer.lr=1e-2"],
        &[
            "optimizer.kind=muon",
            "optimizer.lr=1e-2",
            "optimizer.muon={ adaptive = \"normuon\", scale = \"unit_rms_norm\" }",
        ],
        &[
            "optimizer.kind=muon",
            "optimizer.lr=1e-2",
            "optimizer.muon={ adaptive = \"adamuon\", coefficients = \"polar_express\", steps = 8 }",
        ],
    ] {
        let (all, snapshot) = losses(changes);
        assert!(all[59] < 0.8 * all[0], "{changes:?}: {} to {}", all[0], all[59]);
        let mut states: Vec<String> =
            snapshot.items.iter().filter_map(|i| Some(i.name.split_once('/')?.0.to_string())).collect();
        states.sort();
        states.dedup();
        names.push(states.join(" "));
    }
    let rest = "adam.m adam.v model muon.momentum";
    assert_eq!(
        names,
        [
            "lion.m model",
            "model sgd.momentum",
            rest,
            "adam.m adam.v model muon.momentum normuon.v",
            "adam.m adam.v model muon.momentum muon.v",
        ]
    );
}

/// Second moments of a group keep the dtype of the group.
#[test]
fn groups_have_state_dtypes_of_their_own() {
    let r = recipe(&["optimizer.groups=[{ params = \"matrix\", state_dtype = \"bf16\" }]"]);
    let mut t: Trainer = trainer(&r);
    t.train_step(&RULE).unwrap();
    for item in t.snapshot().unwrap().items.iter().filter(|i| i.name.starts_with("adam.")) {
        let matrix = item.name.contains("attn.") || item.name.contains("mlp.");
        let wanted = if matrix { ferrotron_tensor::DType::BF16 } else { ferrotron_tensor::DType::F32 };
        assert_eq!(item.dtype, wanted, "{}", item.name);
    }
}
