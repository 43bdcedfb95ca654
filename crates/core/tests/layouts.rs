//! Every layout gives the one-rank result: loss, every gradient, ten steps, checkpoints.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::grid::Layout;
use ferrotron_core::model::generate::{Sampling, generate};
use ferrotron_core::parity::first_step;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Observer, Run, Trainer};
use ferrotron_engine::{Pass, Rank};
use ferrotron_tensor::Watch;

/// Grouped heads, biases somewhere, a vocabulary that no layout divides.
const MODEL: &str = "
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 259
max_positions = 64
qkv_bias = true
proj_bias = true
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 10
global_batch = 8
micro_batch = 1
[optimizer]
lr = 1e-3
[precision]
dtype = \"f32\"
[generate]
tokens = 0
";

fn recipe(layout: &Layout, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.set(&format!("parallel.tp={}", layout.tp)).unwrap();
    recipe.set(&format!("parallel.dp={}", layout.dp.unwrap_or(1))).unwrap();
    recipe.resolve(None).unwrap()
}

fn layouts() -> Vec<Layout> {
    let sizes = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)];
    sizes.iter().map(|(tp, dp)| Layout { tp: *tp, dp: Some(*dp), ..Layout::default() }).collect()
}

/// What `work` makes on the first rank.
fn run<T: Send>(layout: &Layout, work: impl Fn(Rank) -> ferrotron_core::Result<T> + Sync) -> T {
    on_threads(layout, || Ok(Rank::cpu(1, 1234)?), work).unwrap().swap_remove(0)
}

fn largest(x: &[f32]) -> f64 {
    x.iter().fold(0.0, |m, v| m.max(f64::from(v.abs())))
}

fn same(what: &str, ours: &[LogicalValues], wanted: &[LogicalValues]) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (o, w) in ours.iter().zip(wanted) {
        assert_eq!((&o.name, &o.shape), (&w.name, &w.shape), "{what}");
        let room = 1e-5 * largest(&w.values) + 1e-7;
        for (i, (a, b)) in o.values.iter().zip(&w.values).enumerate() {
            let apart = f64::from((a - b).abs());
            assert!(apart <= room, "{what} {} [{i}]: {a} instead of {b}, allowed {room:.1e}", o.name);
        }
    }
}

#[test]
fn loss_and_gradients_are_those_of_one_rank() {
    let one = Layout { dp: Some(1), ..Layout::default() };
    for set in [
        &["model.tied=true"][..],
        &["model.tied=false"],
        &["data.reset_at_documents=true"],
        &["model.qk_norm=true"],
    ] {
        let wanted = run(&one, |rank| first_step(rank, &recipe(&one, set), None));
        for layout in layouts() {
            let resolved = recipe(&layout, set);
            let ours = run(&layout, |rank| first_step(rank, &resolved, None));
            let (a, b) = (ours.loss.unwrap(), wanted.loss.unwrap());
            assert!((a / b - 1.0).abs() < 1e-6, "{layout} {set:?}: loss {a} instead of {b}");
            for (o, w) in ours.tensors.iter().zip(&wanted.tensors).filter(|(o, _)| o.0.name() == "gradient") {
                same(&format!("{layout} {set:?}"), &o.1, &w.1);
            }
        }
    }
}

/// What is dropped depends on the token, not on where or with how many others it is computed.
#[test]
fn dropout_is_that_of_one_rank_for_any_micro_batch() {
    let one = Layout { dp: Some(1), ..Layout::default() };
    let sizes = ["train.micro_batch=1", "train.micro_batch=2"];
    let set = |size| ["dropout.hidden=0.1", size];
    let wanted = run(&one, |rank| first_step(rank, &recipe(&one, &set(sizes[0])), None));
    let without = run(&one, |rank| first_step(rank, &recipe(&one, &[]), None));
    assert!((wanted.loss.unwrap() - without.loss.unwrap()).abs() > 1e-4, "nothing was dropped");
    for layout in [one].into_iter().chain(layouts()) {
        for size in sizes {
            let resolved = recipe(&layout, &set(size));
            let ours = run(&layout, |rank| first_step(rank, &resolved, None));
            let (a, b) = (ours.loss.unwrap(), wanted.loss.unwrap());
            assert!((a / b - 1.0).abs() < 1e-6, "{layout} {size}: loss {a} instead of {b}");
            for (o, w) in ours.tensors.iter().zip(&wanted.tensors).filter(|(o, _)| o.0.name() == "gradient") {
                same(&format!("{layout} {size}"), &o.1, &w.1);
            }
        }
    }
}

/// Communication beside computation changes no bit, and nothing is read or freed before its time.
#[test]
fn overlap_changes_nothing_and_is_ordered() {
    for (tp, set) in [
        (2, &["precision.dtype=bf16", "dropout.hidden=0.1"][..]),
        (4, &["train.recompute=full", "model.tied=true"]),
        (2, &["train.recompute=[\"norm\", \"activation\"]", "data.reset_at_documents=true"]),
    ] {
        let layout = Layout { tp, dp: Some(2), ..Layout::default() };
        let resolved = recipe(&layout, set);
        let step = |overlap| {
            let make = || Ok(Rank::cpu_watched(1, 1234, Watch { order: true, ..Watch::default() })?);
            let work = |rank| first_step(Rank { overlap, ..rank }, &resolved, None);
            on_threads(&layout, make, work).unwrap().swap_remove(0)
        };
        let (with, without) = (step(true), step(false));
        assert_eq!(with.loss, without.loss, "{layout} {set:?}");
        for (o, w) in with.tensors.iter().zip(&without.tensors) {
            assert_eq!(o.1, w.1, "{layout} {set:?} {}", o.0.name());
        }
    }
}

#[test]
fn bf16_follows_within_its_precision() {
    let one = Layout { dp: Some(1), ..Layout::default() };
    let set = ["precision.dtype=bf16"];
    let wanted = run(&one, |rank| first_step(rank, &recipe(&one, &set), None));
    for layout in layouts() {
        let resolved = recipe(&layout, &set);
        let ours = run(&layout, |rank| first_step(rank, &resolved, None));
        for (o, w) in ours.tensors[0].1.iter().zip(&wanted.tensors[0].1) {
            let square = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
            let apart = square(&mut o.values.iter().zip(&w.values).map(|(a, b)| f64::from(a - b)));
            let size = square(&mut w.values.iter().map(|v| f64::from(*v)));
            assert!(apart <= 1e-2 * size + 1e-6, "{layout} {}: {apart:.2e} of {size:.2e}", o.name);
        }
    }
}

#[test]
fn ten_steps_follow_the_loss_of_one_rank() {
    let steps = |layout: &Layout| {
        let resolved = recipe(layout, &[]);
        run(layout, |rank| {
            let sources = source::open(&resolved)?;
            let mut trainer = Trainer::new(rank, &resolved)?;
            (0..10)
                .map(|_| Ok(trainer.train_step(&*sources.train)?.loss))
                .collect::<ferrotron_core::Result<Vec<f64>>>()
        })
    };
    let wanted = steps(&Layout { dp: Some(1), ..Layout::default() });
    for layout in layouts() {
        for (i, (a, b)) in steps(&layout).iter().zip(&wanted).enumerate() {
            assert!((a / b - 1.0).abs() < 1e-5, "{layout} step {}: {a} instead of {b}", i + 1);
        }
    }
}

/// Prompts of lengths that no number of ranks divides, key heads shared by neighbours, columns of logits apart.
#[test]
fn text_is_that_of_one_rank() {
    let text = |layout: &Layout, set: &[&str]| {
        let resolved = recipe(layout, set);
        let all = on_threads(
            layout,
            || Ok(Rank::cpu_watched(1, 1234, Watch { order: true, ..Watch::default() })?),
            |rank| {
                let trainer = Trainer::new(rank, &resolved)?;
                let pass = Pass::new(&trainer.rank, &trainer.params);
                let cold = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 3 };
                let warm = Sampling { temperature: 1.0, ..cold };
                let first = trainer.rank.world.rank() == 0;
                let mut texts = Vec::new();
                for (prompt, sampling) in [(&[7][..], cold), (&[1, 2, 3, 4, 250], cold), (&[9, 8, 7], warm)] {
                    texts.push(generate(&trainer.decoder, &pass, prompt, 9, sampling, &[], &mut |_| true)?);
                }
                // One that has heard enough ends it for all.
                let mut heard = 0;
                let mut enough = |_| {
                    heard += 1;
                    !first || heard < 3
                };
                let cut = generate(&trainer.decoder, &pass, &[7], 9, cold, &[], &mut enough)?;
                assert_eq!(cut, texts[0][..3]);
                Ok(texts)
            },
        )
        .unwrap();
        assert!(all.windows(2).all(|w| w[0] == w[1]), "{layout}: ranks draw different text");
        all
    };
    for set in
        [&["model.init_std=0.3"][..], &["model.init_std=0.3", "model.tied=false", "model.qk_norm=true"]]
    {
        let one = Layout { dp: Some(1), ..Layout::default() };
        let wanted = text(&one, set);
        assert!(wanted[0][1].windows(2).any(|w| w[0] != w[1]), "one token for ever: {wanted:?}");
        for tp in [2, 4] {
            let layout = Layout { tp, ..one.clone() };
            assert_eq!(text(&layout, set)[0], wanted[0], "{layout}");
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

/// Trains in a folder until `stop`, and gives back all weights.
fn train(layout: &Layout, dir: &std::path::Path, stop: u64) -> Vec<LogicalValues> {
    let resolved = recipe(layout, &["checkpoint.keep=0"]);
    run(layout, |rank| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved.clone(), dir, None)?;
        run.train(&*sources.train, sources.eval.as_deref(), &mut StopAfter(stop, 0))?;
        run.trainer.weights()
    })
}

#[test]
fn a_checkpoint_is_the_same_under_every_layout_and_resumes_under_any() {
    let (a, b) = (
        Layout { tp: 2, dp: Some(2), ..Layout::default() },
        Layout { tp: 4, dp: Some(1), ..Layout::default() },
    );
    let one = Layout { dp: Some(1), ..Layout::default() };
    let dir = tempfile::tempdir().unwrap();
    let saved = train(&a, dir.path(), 5);
    // What was saved is what any other layout reads, bit for bit.
    for layout in [&b, &one, &a] {
        let resolved = recipe(layout, &[]);
        let read = run(layout, |rank| Run::open(rank, resolved.clone(), dir.path(), None)?.trainer.weights());
        assert_eq!(read, saved, "{layout}");
    }
    // Resumed under another layout, it ends where one rank ends; Adam turns rounding into a part of a step of 1e-3.
    let whole = tempfile::tempdir().unwrap();
    let wanted = train(&one, whole.path(), 100);
    let resumed = train(&b, dir.path(), 100);
    for (o, w) in resumed.iter().zip(&wanted) {
        let apart = o.values.iter().zip(&w.values).fold(0f64, |m, (a, b)| m.max(f64::from((a - b).abs())));
        assert!(apart < 2e-4, "{}: {apart} after ten steps", o.name);
    }
}
