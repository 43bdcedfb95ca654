//! ZeRO changes only memory: losses, gradients, weights and checkpoints equal plain DDP, bit for bit where the order of
//! additions is the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod checkpoints;
mod ddp;
mod hybrid;
mod memory;
mod optimizers;

use ferrotron_core::Result;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;

/// GQA, biases, an odd vocabulary, active gradient clipping, and many small buckets.
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
steps = 4
global_batch = 8
micro_batch = 1
[optimizer]
lr = 1e-2
clip = 0.5
[precision]
dtype = \"f32\"
[generate]
tokens = 0
[checkpoint]
keep = 0
";

#[derive(Clone, Copy, Debug)]
struct Case {
    tp: usize,
    cp: usize,
    pp: usize,
    dp: usize,
    zero: usize,
    overlap: bool,
    set: &'static [&'static str],
}

impl Case {
    fn layout(&self) -> RankLayout {
        self.recipe().config.parallel.layout()
    }

    fn recipe(&self) -> Resolved {
        let mut recipe = Recipe::named("tiny").unwrap();
        recipe.add("model.toml", MODEL).unwrap();
        recipe.set("parallel.comm_unit=24000").unwrap();
        self.set.iter().for_each(|s| recipe.set(s).unwrap());
        let axes = [("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("dp", self.dp)];
        let sizes = axes.into_iter().chain([("zero", self.zero)]);
        sizes.for_each(|(k, v)| recipe.set(&format!("parallel.{k}={v}")).unwrap());
        recipe.resolve(None).unwrap()
    }

    /// The results of `work` on every rank, with the race checker on.
    fn run<T: Send>(&self, work: impl Fn(Rank, Resolved) -> Result<T> + Sync) -> Vec<T> {
        let resolved = self.recipe();
        let make = || {
            let rank = Rank::cpu_instrumented(
                1,
                1234,
                Instrumentation { race_check: true, ..Instrumentation::default() },
            )?;
            Ok(Rank { overlap: self.overlap, ..rank })
        };
        on_threads(&self.layout(), make, |rank| work(rank, resolved.clone()))
            .unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }
}

/// Results of a few steps.
#[derive(Clone, Debug, PartialEq)]
struct Made {
    losses: Vec<(f64, f64)>,
    eval: f64,
    first: Vec<LogicalValues>,
    gradients: Vec<LogicalValues>,
    weights: Vec<LogicalValues>,
}

fn made(case: &Case) -> Made {
    let mut all = case.run(|rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut trainer = Trainer::new(rank, &resolved)?;
        let (mut losses, mut first) = (Vec::new(), None);
        for _ in 0..3 {
            let report = trainer.train_step(&*sources.train)?;
            losses.push((report.loss, report.grad_norm));
            first = Some(first.map_or_else(|| trainer.gradients(), Ok)?);
        }
        let first = first.unwrap_or_default();
        let eval = trainer.evaluate(&*sources.train, 4)?;
        let gradients = trainer.gradients()?;
        let zeros = gradients.iter().flat_map(|g| &g.values).filter(|x| **x == 0.0).count();
        assert_eq!(trainer.count_zero_grads()?, zeros as u64, "{case:?}: zeros are counted once");
        // An untied embedding has no gradient for tokens that do not occur.
        assert!(zeros > 32 || !case.set.contains(&"model.tied=false"), "{case:?}: {zeros} zeros");
        Ok(Made { losses, eval, first, gradients, weights: trainer.weights()? })
    });
    let first = all.swap_remove(0);
    all.iter().for_each(|other| assert!(*other == first, "{case:?}: ranks differ"));
    first
}

fn equal(what: &str, a: &Made, b: &Made) {
    assert_eq!((&a.losses, a.eval), (&b.losses, b.eval), "{what}");
    for (kind, a, b) in [("gradient", &a.gradients, &b.gradients), ("weight", &a.weights, &b.weights)] {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            let bits = |v: &LogicalValues| v.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(a.name == b.name && bits(a) == bits(b), "{what}: {kind} {} differs", a.name);
        }
    }
}

fn near(what: &str, a: &Made, b: &Made, room: f64) {
    // Adam and Muon turn rounding noise around 0 into full steps, so later steps differ by more than sums do.
    for (i, ((x, _), (y, _))) in a.losses.iter().zip(&b.losses).enumerate() {
        let room = if i == 0 { 1e-6 } else { 1e-5 };
        assert!((x / y - 1.0).abs() < room, "{what}: loss {x} instead of {y} in step {i}");
    }
    for (a, b) in a.first.iter().zip(&b.first) {
        let most = b.values.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
        for (x, y) in a.values.iter().zip(&b.values) {
            let apart = f64::from((x - y).abs());
            assert!(apart <= room * most + 1e-7, "{what}: {} {x} instead of {y}", a.name);
        }
    }
}
