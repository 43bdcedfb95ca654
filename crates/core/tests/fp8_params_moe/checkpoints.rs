//! FP8-resident experts: which weights, their memory and communication volume, and layout-free checkpoints.

use super::*;
use ferrotron_core::checkpoint;
use ferrotron_core::cost::Traffic;
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::train::{CHECKPOINTS, Observer, Run, Trainer};
use ferrotron_engine::ParamSpec;
use ferrotron_tensor::Category;
use std::path::{Path, PathBuf};

/// Experts with a skipped GEMM stay in bf16; others are FP8-resident.
#[test]
fn only_experts_with_fp8_gemms_are_fp8_resident() {
    for (except, wanted) in [
        ("[]", &["up", "down"][..]),
        ("[\"experts.down:input_grad\"]", &["up"]),
        ("[\"experts.gate:output\"]", &["down"]),
        ("[\"experts.up:weight_grad\"]", &["up", "down"]),
        ("\"experts\"", &[]),
    ] {
        let set = [SCALINGS[0], "precision.fp8_params=true", &format!("precision.skip={except}")];
        let found = run("tp=1", &set, |rank, resolved| {
            let t = Trainer::new(rank, &resolved)?;
            let kept = t.model.params.specs().iter().filter(|s| s.experts && s.fp8_resident());
            let last = |s: &ParamSpec| s.parts.last().unwrap().name.clone();
            Ok(kept.map(last).collect::<Vec<_>>())
        });
        let wanted: Vec<_> = wanted.iter().map(|w| format!("layers.1.moe.experts.3.{w}.weight")).collect();
        assert_eq!(found[0], wanted, "{except}");
    }
}

/// Parameter bytes of a rank after a step, bytes sent in the step, and FP8-resident elements.
fn taken(layout: &str, scaling: &str, zero: usize, fp8_params: bool) -> Vec<[usize; 3]> {
    let set = [
        scaling,
        &format!("parallel.zero={zero}"),
        &format!("precision.fp8_params={fp8_params}"),
        // Nothing else is FP8-resident.
        "precision.skip=[\"attn\", \"mlp\"]",
        "moe.experts=8",
    ];
    // A history that is small beside the weights.
    let history: &[&str] = if scaling == SCALINGS[1] { &["precision.amax_history=4"] } else { &[] };
    run(layout, &[&set[..], history].concat(), |rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut t = Trainer::new(rank.clone(), &resolved)?;
        let experts = t.model.params.specs().iter().filter(|s| s.experts);
        let stored = experts.filter(|s| s.fp8_resident()).map(ParamSpec::numel).sum();
        let before = Traffic::of(&rank);
        t.train_step(&*sources.train)?;
        let sent = Traffic::of(&rank).since(&before).total() as usize;
        Ok([rank.device().memory().now[Category::Parameters as usize], sent, stored])
    })
}

#[test]
fn fp8_expert_weights_take_and_send_one_byte_per_element() {
    for scaling in SCALINGS {
        // Ranks on one GPU share its memory.
        let layouts = [("tp=1", 0), ("ep=2", 0), ("dp=2", 1)];
        for (layout, zero) in layouts.into_iter().filter(|(l, _)| *l == "tp=1" || !test_on_gpu()) {
            let all = [true, false].map(|fp8_params| taken(layout, scaling, zero, fp8_params));
            for ([bytes, sent, stored], [numbers, before, _]) in all[0].iter().zip(&all[1]) {
                // Scales, amax, and allocation rounding.
                let near = |found: usize, wanted: usize| found.abs_diff(wanted) < wanted / 50 + 2048;
                let saved = numbers - bytes;
                assert!(near(saved, *stored), "{scaling} {layout}: {saved} of {stored}");
                // A rank sends its half to the other. Block scaling quantizes gathered bf16 values.
                let less = if zero > 0 && scaling != SCALINGS[2] { stored / 2 } else { 0 };
                let found = before.saturating_sub(*sent);
                assert!(near(found, less), "{scaling} {layout}: {found} instead of {less} less sent");
            }
        }
    }
}

struct StopAfter(u64, u64);

impl Observer for StopAfter {
    fn event(&mut self, event: &Event) {
        if let Event::Step(s) = event {
            self.1 = s.step;
        }
    }
    fn stop(&self) -> bool {
        self.1 >= self.0
    }
}

/// Continues the run of a folder until step `stop`; returns the newest checkpoint.
fn train(layout: &str, set: &[&str], dir: &Path, stop: u64) -> PathBuf {
    run(layout, set, |rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved, dir, None)?;
        run.train(&*sources.train, None, &mut StopAfter(stop, 0))
    });
    checkpoint::latest(&dir.join(CHECKPOINTS)).unwrap().unwrap()
}

/// Checkpoints hold masters, so both resume from either, under any layout.
#[test]
fn checkpoints_are_interchangeable() {
    for scaling in SCALINGS {
        for (layout, zero) in [("ep=2", "parallel.zero=0"), ("dp=2", "parallel.zero=1")] {
            let bf16 = [scaling, zero, "train.steps=8", "precision.fp8_params=false"];
            let fp8 = [scaling, zero, "train.steps=8", "precision.fp8_params=true"];
            let runs: Vec<_> = [(&bf16, &bf16), (&bf16, &fp8), (&fp8, &bf16), (&fp8, &fp8)]
                .into_iter()
                .map(|(first, then)| {
                    let dir = tempfile::tempdir().unwrap();
                    let stopped = train(layout, first, dir.path(), 4);
                    assert_eq!(checkpoint::load(&stopped).unwrap().step(), 4);
                    let end = train(layout, then, dir.path(), 100);
                    assert_eq!(checkpoint::load(&end).unwrap().step(), 8);
                    (dir, [stopped, end])
                })
                .collect();
            for (_, [stopped, end]) in &runs {
                for (ours, wanted) in [(stopped, &runs[0].1[0]), (end, &runs[0].1[1])] {
                    let found = checkpoint::compare(ours, wanted).unwrap();
                    // A checkpoint names the configuration of its run; nothing else may differ.
                    let only_config = found.state.iter().all(|key| key == "/run/config/precision.fp8_params");
                    assert!(found.tensors.is_empty() && only_config, "{scaling} {layout}: {found:?}");
                }
            }
        }
    }
}
