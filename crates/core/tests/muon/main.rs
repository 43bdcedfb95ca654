//! Muon: one step against an f64 twin under every kind of parallelism, FP8 parameters, ranks that own nothing, checkpoints.
//! Collectives have a short timeout, so that ranks that wait for each other fail instead of hanging.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod layouts;
mod memory;
mod twin;

use ferrotron_core::Result;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::ranks::on_threads_with;
use ferrotron_core::train::{LogicalValues, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use std::time::Duration;

/// GQA and matrices of several shapes and costs.
const MODEL: &str = "
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 259
max_positions = 64
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 20
global_batch = 12
micro_batch = 1
[optimizer]
kind = \"muon\"
lr = 1e-2
weight_decay = 0.0
muon = { products = \"f32\" }
[schedule]
warmup = 0
decay = \"constant\"
[precision]
dtype = \"f32\"
[generate]
tokens = 0
[parallel]
comm_unit = 24000
[checkpoint]
keep = 0
every = 0
";

/// A dense layer and one of experts.
const MOE: [&str; 4] = ["moe.experts=4", "moe.topk=2", "moe.ffn=24", "moe.dense_layers=[0]"];

fn recipe(layout: &RankLayout, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap_or_else(|e| panic!("{s}: {e}")));
    let dp = Grid::of(layout.clone()).unwrap().dp();
    let sizes = [("tp", layout.tp), ("pp", layout.pp), ("ep", layout.ep), ("etp", layout.etp()), ("dp", dp)];
    for (key, n) in sizes {
        recipe.set(&format!("parallel.{key}={n}")).unwrap();
    }
    recipe.resolve(None).unwrap_or_else(|e| panic!("{layout} {set:?}: {e}"))
}

/// The results of `work` on every rank, with the race checker on.
fn run<T: Send>(layout: &str, set: &[&str], work: impl Fn(Rank, Resolved) -> Result<T> + Sync) -> Vec<T> {
    let layout: RankLayout = layout.parse().unwrap();
    let resolved = recipe(&RankLayout { dp: layout.dp.or(Some(1)), ..layout }, set);
    let layout = resolved.config.parallel.layout();
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let make = || Ok(Rank::cpu_instrumented(1, 1234, watch)?);
    on_threads_with(&layout, Duration::from_secs(20), Default::default(), make, |rank| {
        work(rank, resolved.clone())
    })
    .unwrap_or_else(|e| panic!("{layout} {set:?}: {e}"))
}

/// Losses of a few steps, and the weights after them.
fn trained(layout: &str, set: &[&str], steps: usize) -> (Vec<f64>, Vec<LogicalValues>) {
    let mut all = run(layout, set, |rank, resolved| {
        let data = source::open(&resolved)?.train;
        let mut t = Trainer::new(rank, &resolved)?;
        let losses = (0..steps).map(|_| Ok(t.train_step(&*data)?.loss)).collect::<Result<Vec<_>>>()?;
        Ok((losses, t.weights()?))
    });
    let first = all.swap_remove(0);
    all.iter().for_each(|other| assert!(*other == first, "{layout} {set:?}: ranks differ"));
    first
}
