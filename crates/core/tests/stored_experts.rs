//! Weights of experts that are bytes between steps: the same bits of everything as with bf16 ones, one byte a parameter, and
//! checkpoints that either resumes. With `FERROTRON_TEST_DEVICE=cuda` on the first card.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::checkpoint;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::grid::{Grid, Layout};
use ferrotron_core::ranks::{on_one_device, on_threads};
use ferrotron_core::train::{CHECKPOINTS, LogicalValues, Observer, Run, Trainer};
use ferrotron_engine::{ParamSpec, Rank};
use ferrotron_tensor::{Category, Watch};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A dense layer and a mixture, in widths that blocks divide.
const MODEL: &str = "
[model]
layers = 2
hidden = 128
heads = 4
kv_heads = 2
ffn = 128
vocab = 259
max_positions = 64
[moe]
experts = 4
topk = 2
ffn = 128
dense = [0]
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 20
global_batch = 12
micro_batch = 2
[optimizer]
lr = 5e-3
clip = 0.5
[precision]
dtype = \"bf16\"
[generate]
tokens = 0
[parallel]
bucket = 20000
[checkpoint]
keep = 0
";

const SCALINGS: [&str; 3] =
    ["precision.scaling=current", "precision.scaling=delayed", "precision.scaling=block"];

fn recipe(layout: &Layout, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    let dp = Grid::of(layout.clone()).unwrap().dp();
    let sizes = [("tp", layout.tp), ("pp", layout.pp), ("ep", layout.ep), ("etp", layout.etp()), ("dp", dp)];
    for (key, n) in sizes {
        recipe.set(&format!("parallel.{key}={n}")).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

/// What `work` makes on every rank; on the host every access is checked for its order.
fn run<T: Send>(
    layout: &str,
    set: &[&str],
    work: impl Fn(Rank, Resolved) -> ferrotron_core::Result<T> + Sync,
) -> Vec<T> {
    let layout: Layout = layout.parse().unwrap();
    let layout = Layout { dp: layout.dp.or(Some(1)), ..layout };
    let resolved = recipe(&layout, set);
    let layout = resolved.config.parallel.layout();
    let work = |rank| work(rank, resolved.clone());
    let all = match std::env::var("FERROTRON_TEST_DEVICE").is_ok_and(|d| d == "cuda") {
        true => {
            let card = Rank::cuda(0, 1, 1234, Watch::default()).unwrap().0;
            on_one_device(&layout, Duration::from_secs(60), &card, work)
        }
        false => {
            let watch = Watch { order: true, ..Watch::default() };
            on_threads(&layout, || Ok(Rank::cpu_watched(1, 1234, watch)?), work)
        }
    };
    all.unwrap_or_else(|e| panic!("{layout} {set:?}: {e}"))
}

/// Everything some steps make.
#[derive(Debug, PartialEq)]
struct Made {
    losses: Vec<(f64, f64, f64)>,
    gradients: Vec<LogicalValues>,
    weights: Vec<LogicalValues>,
}

fn stored_experts(specs: &[ParamSpec]) -> usize {
    specs.iter().filter(|s| s.experts && s.stored()).count()
}

fn made(layout: &str, steps: usize, set: &[&str]) -> Made {
    let fp8 = set.contains(&"precision.weights=fp8");
    let mut all = run(layout, set, |rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut t = Trainer::new(rank, &resolved)?;
        let experts = t.params.specs().iter().filter(|s| s.experts && s.decays()).count();
        assert_eq!(stored_experts(t.params.specs()), if fp8 { experts } else { 0 }, "{layout} {set:?}");
        let mut losses = Vec::new();
        for step in 0..steps {
            let report = t.train_step(&*sources.train)?;
            // Passes without a backward in between leave no trace.
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
    let [bytes, numbers] =
        ["fp8", "bf16"].map(|w| made(layout, steps, &[set, &[&format!("precision.weights={w}")]].concat()));
    assert_eq!(bytes.losses, numbers.losses, "{layout} {set:?}");
    assert!(bytes.losses[steps - 1].0 < bytes.losses[0].0 - 0.1, "{layout} {set:?}: learns nothing");
    assert!(bytes == numbers, "{layout} {set:?}: gradients or masters differ");
    assert!(bytes.gradients.iter().any(|g| g.name.contains(".experts.")));
}

#[test]
fn steps_of_one_rank_are_the_same_bits() {
    for scaling in SCALINGS {
        equal("tp=1", 10, &[scaling]);
        // One micro-batch, for which nothing of a weight is kept, and biases.
        equal("tp=1", 6, &[scaling, "train.micro_batch=12", "moe.bias=true", "model.gated=false"]);
        equal("tp=1", 4, &[scaling, "train.recompute=full", "moe.shared_ffn=128"]);
        // Bytes that no step of the optimizer leaves, and looks at them.
        let sgd = ["optimizer.kind=sgd", "optimizer.lr=0.2", "precision.stats_every=2"];
        equal("tp=1", 4, &[&[scaling][..], &sgd].concat());
    }
    equal("tp=1", 6, &[SCALINGS[0], "precision.power_of_two=true"]);
    equal("tp=1", 6, &[SCALINGS[1], "precision.history=3", "precision.margin=1"]);
}

/// Experts over ranks, ranks that share experts, and optimizers that have a part of them, cut in the middle of matrices.
#[test]
fn every_layout_has_the_same_bits() {
    for scaling in SCALINGS {
        for layout in ["ep=2", "pp=2,ep=2"] {
            equal(layout, 6, &[scaling]);
        }
        for (layout, zero) in [("dp=2", 0), ("dp=2", 1), ("dp=2", 2), ("dp=3", 1), ("dp=2,ep=2", 1)] {
            equal(layout, 6, &[scaling, "train.micro_batch=1", &format!("parallel.zero={zero}")]);
        }
        equal("dp=3", 4, &[scaling, "train.micro_batch=1", "parallel.zero=1", "parallel.overlap=false"]);
        equal("dp=3", 4, &[scaling, "train.micro_batch=1", "parallel.zero=1", "precision.stats_every=2"]);
    }
    // Ranks that share experts have half of their width.
    for scaling in SCALINGS {
        for (layout, zero) in [("ep=2,etp=2", 1), ("tp=2,ep=2,etp=1", 0), ("dp=2,etp=2", 1)] {
            let zero = format!("parallel.zero={zero}");
            equal(layout, 4, &[scaling, "moe.ffn=256", "train.micro_batch=1", &zero]);
        }
    }
}

/// Experts of which a product is left alone keep their numbers; others are bytes.
#[test]
fn only_experts_of_narrow_products_are_bytes() {
    for (except, wanted) in [
        ("[]", &["up", "down"][..]),
        ("[\"experts.down:input_grad\"]", &["up"]),
        ("[\"experts.gate:output\"]", &["down"]),
        ("[\"experts.up:weight_grad\"]", &["up", "down"]),
        ("\"experts\"", &[]),
    ] {
        let set = [SCALINGS[0], "precision.weights=fp8", &format!("precision.except={except}")];
        let found = run("tp=1", &set, |rank, resolved| {
            let t = Trainer::new(rank, &resolved)?;
            let kept = t.params.specs().iter().filter(|s| s.experts && s.stored());
            let last = |s: &ParamSpec| s.parts.last().unwrap().name.clone();
            Ok(kept.map(last).collect::<Vec<_>>())
        });
        let wanted: Vec<_> = wanted.iter().map(|w| format!("layers.1.moe.experts.3.{w}.weight")).collect();
        assert_eq!(found[0], wanted, "{except}");
    }
}

#[test]
fn an_expert_s_weight_takes_one_byte() {
    for scaling in SCALINGS {
        for (layout, zero) in [("tp=1", 0), ("ep=2", 0), ("dp=2", 1)] {
            let now = |weights: &str| {
                let set = [
                    scaling,
                    &format!("parallel.zero={zero}"),
                    &format!("precision.weights={weights}"),
                    "precision.history=4",
                    // Of the dense maps nothing is bytes, and experts are nearly all there is.
                    "precision.except=[\"attn\", \"mlp\"]",
                    "moe.experts=8",
                    "parallel.bucket=0",
                ];
                run(layout, &set, |rank, resolved| {
                    let sources = source::open(&resolved)?;
                    let mut t = Trainer::new(rank.clone(), &resolved)?;
                    let experts: usize =
                        t.params.specs().iter().filter(|s| s.experts).map(ParamSpec::numel).sum();
                    t.train_step(&*sources.train)?;
                    Ok((rank.device().memory().now[Category::Parameters as usize], experts))
                })
            };
            let (bytes, numbers) = (now("fp8"), now("bf16"));
            for ((bytes, experts), (numbers, _)) in bytes.into_iter().zip(numbers) {
                // Scales, magnitudes, and what an allocation is rounded up to.
                let saved = numbers - bytes;
                let least = experts - experts / 50 - 8192;
                assert!((least..=experts).contains(&saved), "{scaling} {layout}: {saved} of {experts}");
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

/// Goes on in a folder until `stop`: the newest checkpoint.
fn train(layout: &str, set: &[&str], dir: &Path, stop: u64) -> PathBuf {
    run(layout, set, |rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved, dir, None)?;
        run.train(&*sources.train, None, &mut StopAfter(stop, 0))
    });
    checkpoint::latest(&dir.join(CHECKPOINTS)).unwrap().unwrap()
}

/// Checkpoints hold masters: neither way of keeping weights knows which one wrote them, whatever the layout.
#[test]
fn either_resumes_what_the_other_saved() {
    for scaling in SCALINGS {
        for (layout, zero) in [("ep=2", "parallel.zero=0"), ("dp=2", "parallel.zero=1")] {
            let bf16 = [scaling, zero, "train.steps=8", "precision.weights=bf16"];
            let fp8 = [scaling, zero, "train.steps=8", "precision.weights=fp8"];
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
                    assert!(found.same(), "{scaling} {layout}: {found:?}");
                }
            }
        }
    }
}
