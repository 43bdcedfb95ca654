//! FP8-resident weights (`precision.fp8_params`) change only memory and communication volume: losses, gradients, evaluations
//! and masters are bit-equal to bf16-resident weights quantized in every step.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::Result;
use ferrotron_core::checkpoint;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Observer, Run, Trainer};
use ferrotron_engine::{ParamId, ParamSpec, Rank, StepContext};
use ferrotron_tensor::{Category, Instrumentation};
use std::path::Path;

/// Biases, widths that are not multiples of a tile, and small buckets.
const MODEL: &str = "
[model]
layers = 2
hidden = 64
heads = 4
kv_heads = 2
ffn = 160
vocab = 259
max_positions = 64
qkv_bias = true
proj_bias = true
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 20
global_batch = 12
micro_batch = 1
[optimizer]
lr = 1e-2
clip = 0.5
[precision]
dtype = \"bf16\"
[generate]
tokens = 0
[parallel]
comm_unit = 160000
[checkpoint]
keep = 0
";

fn recipe(layout: &RankLayout, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    let sizes = [("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp), ("vp", layout.vp)];
    for (key, n) in sizes.into_iter().chain([("dp", layout.dp.unwrap_or(1))]) {
        recipe.set(&format!("parallel.{key}={n}")).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

/// The results of `work` on every rank, with the race checker on.
fn run<T: Send>(layout: &str, set: &[&str], work: impl Fn(Rank, Resolved) -> Result<T> + Sync) -> Vec<T> {
    let layout: RankLayout = layout.parse().unwrap();
    let layout = RankLayout { dp: layout.dp.or(Some(1)), ..layout };
    let resolved = recipe(&layout, set);
    let make = || {
        Ok(Rank::cpu_instrumented(
            1,
            1234,
            Instrumentation { race_check: true, ..Instrumentation::default() },
        )?)
    };
    on_threads(&layout, make, |rank| work(rank, resolved.clone()))
        .unwrap_or_else(|e| panic!("{layout} {set:?}: {e}"))
}

/// Results of a few steps.
#[derive(Debug, PartialEq)]
struct Made {
    losses: Vec<(f64, f64, f64)>,
    gradients: Vec<LogicalValues>,
    weights: Vec<LogicalValues>,
}

fn made(layout: &str, steps: usize, set: &[&str]) -> Made {
    let mut all = run(layout, set, |rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut t = Trainer::new(rank, &resolved)?;
        assert_eq!(
            t.model.params.specs().iter().any(ParamSpec::fp8_resident),
            set.contains(&"precision.fp8_params=true")
        );
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

fn equal(layout: &str, steps: usize, set: &[&str]) -> Made {
    let [bytes, numbers] =
        [true, false].map(|w| made(layout, steps, &[set, &[&format!("precision.fp8_params={w}")]].concat()));
    assert_eq!(bytes.losses, numbers.losses, "{layout} {set:?}");
    assert!(bytes.losses[steps - 1].0 < bytes.losses[0].0 - 0.3, "{layout} {set:?}: learns nothing");
    assert!(bytes == numbers, "{layout} {set:?}: gradients or masters differ");
    bytes
}

const SCALINGS: [&str; 3] =
    ["precision.recipe=fp8-current", "precision.recipe=fp8-delayed", "precision.recipe=fp8-block"];

/// An amax history that is small beside the weights.
fn history(scaling: &str) -> &'static [&'static str] {
    if scaling == SCALINGS[1] { &["precision.amax_history=16"] } else { &[] }
}

#[test]
fn twenty_steps_are_bit_equal() {
    for scaling in SCALINGS {
        equal("tp=1", 20, &[scaling]);
        equal("tp=1", 20, &[scaling, "train.micro_batch=12", "train.recompute=full"]);
    }
    equal("tp=1", 20, &[SCALINGS[0], "precision.pow2_scales=true"]);
    equal("tp=1", 20, &[SCALINGS[1], "precision.amax_history=3", "precision.margin=1"]);
    equal("tp=1", 20, &[SCALINGS[0], "optimizer.kind=sgd", "optimizer.lr=0.5"]);
}

/// The LM head too: an untied one is FP8-resident, a tied embedding is not.
#[test]
fn an_fp8_resident_lm_head_is_bit_equal() {
    const HEAD: [&str; 2] = ["precision.fp8_lm_head=true", "model.vocab=288"];
    for scaling in SCALINGS {
        for tied in ["model.tied=false", "model.tied=true"] {
            let set = [&HEAD[..], &[scaling, tied]].concat();
            equal("tp=1", 6, &set);
            equal("dp=2", 6, &[&set[..], &["parallel.zero=1"]].concat());
            equal("tp=2,pp=2", 6, &set);
            let set = [&set[..], &["precision.fp8_params=true"]].concat();
            let stored = run("tp=1", &set, |rank, resolved| {
                let t = Trainer::new(rank, &resolved)?;
                let specs = t.model.params.specs();
                Ok(specs
                    .iter()
                    .filter(|s| s.fp8_resident())
                    .map(|s| s.parts[0].name.clone())
                    .collect::<Vec<_>>())
            });
            assert_eq!(stored[0].contains(&"head.weight".to_string()), tied == "model.tied=false", "{set:?}");
            assert!(!stored[0].contains(&"embed.tokens".to_string()));
        }
    }
    equal("tp=1", 6, &[SCALINGS[0], "precision.fp8_lm_head=true"]);
}

#[test]
fn every_layout_is_bit_equal() {
    for scaling in SCALINGS {
        for zero in ["parallel.zero=0", "parallel.zero=1", "parallel.zero=2", "parallel.zero=3"] {
            equal("dp=2", 20, &[scaling, zero]);
        }
        for layout in ["dp=3", "tp=2,dp=2", "cp=2,dp=2", "pp=2,dp=2"] {
            equal(layout, 6, &[scaling, "parallel.zero=1"]);
            equal(layout, 6, &[scaling, "parallel.zero=3", "train.recompute=full"]);
        }
        for layout in ["tp=2", "pp=2"] {
            equal(layout, 20, &[scaling]);
        }
        equal("dp=2", 6, &[scaling, "parallel.zero=1", "parallel.overlap=false"]);
    }
}

/// Linear layers with a skipped GEMM stay in bf16.
#[test]
fn only_weights_of_fp8_gemms_are_fp8_resident() {
    let set = ["precision.skip=[\"mlp.down:input_grad\", \"attn.out:weight_grad\", \"layers.1.attn\"]"];
    let set = [SCALINGS[0], set[0]];
    equal("tp=1", 6, &set);
    let all = [&set[..], &["precision.fp8_params=true"]].concat();
    let names = run("tp=1", &all, |rank, resolved| {
        let t = Trainer::new(rank, &resolved)?;
        let stored =
            t.model.params.specs().iter().filter(|s| s.fp8_resident()).map(|s| s.parts[0].name.clone());
        // Asking for the bf16 weight is an error.
        for (i, spec) in t.model.params.specs().iter().enumerate() {
            let asked = StepContext::new(&t.rank, &t.model.params, &t.model.step_state)
                .weight(ParamId(i))
                .map(|t| t.shape().to_vec());
            assert_eq!(asked.ok(), (!spec.fp8_resident()).then(|| spec.shape.clone()), "{spec:?}");
        }
        Ok(stored.collect::<Vec<_>>())
    });
    let wanted = [
        "layers.0.attn.q.weight",
        "layers.0.attn.out.weight",
        "layers.0.mlp.gate.weight",
        "layers.1.mlp.gate.weight",
    ];
    assert_eq!(names[0], wanted);
}

/// A skipped step leaves masters unchanged while delayed scales still advance.
#[test]
fn skipped_steps_are_bit_equal() {
    for scaling in SCALINGS {
        let results = [true, false].map(|weights| {
            let set = [scaling, &format!("precision.fp8_params={weights}"), "optimizer.skip_nonfinite=true"];
            run("tp=1", &set, |rank, resolved| {
                let sources = source::open(&resolved)?;
                let mut t = Trainer::new(rank, &resolved)?;
                t.train_step(&*sources.train)?;
                let good = t.weights()?;
                let broken = |name: &str| {
                    let found = good.iter().find(|v| v.name == name).unwrap();
                    let mut values = found.values.clone();
                    if name.contains("norm") {
                        values[0] = f32::NAN;
                    }
                    Ok(values)
                };
                t.import(&broken)?;
                let left_out = t.train_step(&*sources.train)?;
                assert!(!left_out.grad_norm.is_finite(), "{left_out:?}");
                t.import(&|name| Ok(good.iter().find(|v| v.name == name).unwrap().values.clone()))?;
                let after = [t.train_step(&*sources.train)?, t.train_step(&*sources.train)?];
                Ok((after.map(|r| (r.loss, r.grad_norm)), t.weights()?))
            })
        });
        assert!(results[0] == results[1], "{scaling}: {:?} {:?}", results[0][0].0, results[1][0].0);
    }
}

#[test]
fn an_fp8_weight_takes_one_byte_per_element() {
    for scaling in SCALINGS {
        for (layout, zero) in [("tp=1", "parallel.zero=0"), ("dp=2", "parallel.zero=1")] {
            let set = [scaling, zero, "precision.fp8_params=true", "train.global_batch=2"];
            let set = [&set[..], history(scaling)].concat();
            run(layout, &set, |rank, resolved| {
                let sources = source::open(&resolved)?;
                let mut t = Trainer::new(rank.clone(), &resolved)?;
                let sum = |stored: bool| -> usize {
                    t.model
                        .params
                        .specs()
                        .iter()
                        .filter(|s| s.fp8_resident() == stored)
                        .map(ParamSpec::numel)
                        .sum()
                };
                let (bytes, numbers) = (sum(true), sum(false));
                assert!(bytes > 2 * numbers, "{bytes} {numbers}");
                let expected = bytes + 2 * numbers;
                let now = |c: Category| rank.device().memory().now[c as usize];
                // Padding, scales, amax histories, and allocation rounding.
                let near = |what: &str| {
                    let measured = now(Category::Parameters);
                    assert!(
                        (expected..expected + expected / 8 + 20_000).contains(&measured),
                        "{what} {set:?}: {measured} instead of {expected}"
                    );
                };
                near("new");
                // At most one weight exists in bf16 at a time.
                let largest = t
                    .model
                    .params
                    .specs()
                    .iter()
                    .filter(|s| s.fp8_resident())
                    .map(ParamSpec::numel)
                    .max()
                    .unwrap();
                let peak = rank.device().memory().peak[Category::Workspace as usize];
                assert!(peak <= 2 * largest + 8192, "{set:?}: {peak} beside {largest}");
                t.train_step(&*sources.train)?;
                near("after a step");
                // Nothing of the step stays allocated.
                let rest = now(Category::Workspace) + now(Category::Activations);
                assert!(rest < bytes / 8, "{set:?}: {rest} bytes stay");
                Ok(())
            });
        }
    }
}

struct StopAfter(u64, u64);

impl Observer for StopAfter {
    fn event(&mut self, event: &ferrotron_core::events::Event) {
        if let ferrotron_core::events::Event::Step(s) = event {
            self.1 = s.step;
        }
    }
    fn stop(&self) -> bool {
        self.1 >= self.0
    }
}

fn train(layout: &str, set: &[&str], dir: &Path, stop: u64) -> Vec<LogicalValues> {
    run(layout, set, |rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved, dir, None)?;
        run.train(&*sources.train, None, &mut StopAfter(stop, 0))?;
        run.trainer.weights()
    })
    .swap_remove(0)
}

/// Checkpoints hold masters, so both resume from either.
#[test]
fn checkpoints_are_interchangeable() {
    for scaling in SCALINGS {
        let bf16 = [scaling, "train.steps=8", "precision.fp8_params=false"];
        let fp8 = [scaling, "train.steps=8", "precision.fp8_params=true", "parallel.zero=1"];
        let ends: Vec<_> = [(bf16.as_slice(), bf16.as_slice()), (&bf16, &fp8), (&fp8, &bf16), (&fp8, &fp8)]
            .into_iter()
            .map(|(first, then)| {
                let dir = tempfile::tempdir().unwrap();
                train("dp=2", first, dir.path(), 4);
                let saved = checkpoint::latest(&dir.path().join("checkpoints")).unwrap().unwrap();
                assert_eq!(checkpoint::load(&saved).unwrap().step(), 4);
                train("dp=2", then, dir.path(), 100)
            })
            .collect();
        ends.iter().for_each(|end| assert!(*end == ends[0], "{scaling}"));
    }
}
