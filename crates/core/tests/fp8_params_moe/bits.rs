//! FP8-resident expert weights: losses, gradients and masters are bit-equal to bf16-resident ones.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::train::{LogicalValues, Trainer};
use ferrotron_engine::ParamSpec;

/// Results of a few steps.
#[derive(Debug, PartialEq)]
struct Made {
    losses: Vec<(f64, f64, f64)>,
    gradients: Vec<LogicalValues>,
    weights: Vec<LogicalValues>,
}

fn stored_experts(specs: &[ParamSpec]) -> usize {
    specs.iter().filter(|s| s.experts && s.fp8_resident()).count()
}

fn made(layout: &str, steps: usize, set: &[&str]) -> Made {
    let fp8 = set.contains(&"precision.fp8_params=true");
    let mut all = run(layout, set, |rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut t = Trainer::new(rank, &resolved)?;
        let experts = t.model.params.specs().iter().filter(|s| s.experts && s.decays()).count();
        assert_eq!(stored_experts(t.model.params.specs()), if fp8 { experts } else { 0 }, "{layout} {set:?}");
        let mut losses = Vec::new();
        for step in 0..steps {
            let report = t.train_step(&*sources.train)?;
            // Forward-only passes in between leave no trace.
            let eval = if step % 4 == 1 { t.evaluate(&*sources.train, 3)? } else { 0.0 };
            losses.push((report.loss, report.grad_norm, eval));
        }
        Ok(Made { losses, gradients: t.gradients()?, weights: t.weights()? })
    });
    let first = all.swap_remove(0);
    all.iter().for_each(|other| assert!(*other == first, "{layout} {set:?}: ranks differ"));
    first
}

fn equal(layout: &str, steps: usize, set: &[&str]) {
    let [fp8, bf16] =
        [true, false].map(|w| made(layout, steps, &[set, &[&format!("precision.fp8_params={w}")]].concat()));
    assert_eq!(fp8.losses, bf16.losses, "{layout} {set:?}");
    assert!(fp8.losses[steps - 1].0 < fp8.losses[0].0 - 0.1, "{layout} {set:?}: learns nothing");
    assert!(fp8 == bf16, "{layout} {set:?}: gradients or masters differ");
    assert!(fp8.gradients.iter().any(|g| g.name.contains(".experts.")));
}

#[test]
fn one_rank_is_bit_equal() {
    for scaling in SCALINGS {
        equal("tp=1", 10, &[scaling]);
        // One micro-batch (no cached weight orientation), and biases.
        equal("tp=1", 6, &[scaling, "train.micro_batch=12", "moe.bias=true", "model.gated=false"]);
        equal("tp=1", 4, &[scaling, "train.recompute=full", "moe.shared_ffn=128"]);
        // FP8 values not written by the optimizer step, and operand statistics.
        let sgd = ["optimizer.kind=sgd", "optimizer.lr=0.2", "precision.stats_every=2"];
        equal("tp=1", 4, &[&[scaling][..], &sgd].concat());
    }
    equal("tp=1", 6, &[SCALINGS[0], "precision.pow2_scales=true"]);
    equal("tp=1", 6, &[SCALINGS[1], "precision.amax_history=3", "precision.margin=1"]);
}

/// Expert parallelism, expert tensor parallelism, and ZeRO shards that end inside a matrix.
#[test]
fn every_layout_is_bit_equal() {
    for scaling in SCALINGS {
        for layout in ["ep=2", "pp=2,ep=2"] {
            equal(layout, 6, &[scaling]);
        }
        for (layout, zero) in [
            ("dp=2", 0),
            ("dp=2", 1),
            ("dp=2", 2),
            ("dp=3", 1),
            ("dp=2,ep=2", 1),
            ("dp=3", 3),
            ("dp=2,ep=2", 3),
        ] {
            equal(layout, 6, &[scaling, "train.micro_batch=1", &format!("parallel.zero={zero}")]);
        }
        equal("dp=3", 4, &[scaling, "train.micro_batch=1", "parallel.zero=1", "parallel.overlap=false"]);
        equal("dp=3", 4, &[scaling, "train.micro_batch=1", "parallel.zero=1", "precision.stats_every=2"]);
    }
    // With etp = 2 a rank holds half of an expert's width.
    for scaling in SCALINGS {
        for (layout, zero) in
            [("ep=2,etp=2", 1), ("tp=2,ep=2,etp=1", 0), ("dp=2,etp=2", 1), ("dp=2,etp=2", 3)]
        {
            let zero = format!("parallel.zero={zero}");
            equal(layout, 4, &[scaling, "moe.ffn=256", "train.micro_batch=1", &zero]);
        }
    }
}

/// A skipped step leaves masters unchanged while delayed scales still advance. Statistics cover expert weights.
#[test]
fn skipped_steps_are_bit_equal() {
    for scaling in SCALINGS {
        for layout in ["tp=1", "dp=3"] {
            let results = [true, false].map(|weights| {
                let weights = format!("precision.fp8_params={weights}");
                let set = [scaling, &weights, "train.micro_batch=1", "parallel.zero=1"];
                let more = ["optimizer.skip_nonfinite=true", "precision.stats_every=1"];
                run(layout, &[&set[..], &more].concat(), |rank, resolved| {
                    let sources = source::open(&resolved)?;
                    let mut t = Trainer::new(rank, &resolved)?;
                    t.train_step(&*sources.train)?;
                    let seen = t.take_statistics().unwrap().operands;
                    let told = |m: &str| seen.iter().any(|o| o.module == m && o.role == "weight");
                    assert!(["gate+up", "down"].iter().all(|m| told(&format!("layers.1.moe.experts.{m}"))));
                    let good = t.weights()?;
                    let of = |name: &str| good.iter().find(|v| v.name == name).unwrap().values.clone();
                    t.import(&|name| {
                        let mut values = of(name);
                        if name.contains("norm") {
                            values[0] = f32::NAN;
                        }
                        Ok(values)
                    })?;
                    let left_out = t.train_step(&*sources.train)?;
                    assert!(!left_out.grad_norm.is_finite(), "{left_out:?}");
                    t.import(&|name| Ok(of(name)))?;
                    let after = [t.train_step(&*sources.train)?, t.train_step(&*sources.train)?];
                    Ok((after.map(|r| (r.loss, r.grad_norm)), t.weights()?))
                })
            });
            assert!(results[0] == results[1], "{scaling} {layout}");
        }
    }
}
