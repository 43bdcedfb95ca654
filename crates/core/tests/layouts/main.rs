//! Every layout gives the one-rank result: loss, every gradient, evaluation, ten steps, checkpoints.
//!
//! The matrix of layouts is generated. By default a seeded sample of it runs; `FERROTRON_MATRIX=whole` runs all of it,
//! `FERROTRON_MATRIX=N` a sample of N cases, `FERROTRON_MATRIX_SEED` another sample, `FERROTRON_MATRIX_ONLY=TEXT` cases whose
//! name contains a text.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod checkpoints;
mod details;
mod matrix;
mod steps;

#[path = "../../../../tests/support/device.rs"]
mod device;

#[path = "../support/matrix.rs"]
mod matrix_support;

use device::test_on_gpu;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::{DEFAULT_TIMEOUT, on_one_device, on_threads};
use ferrotron_core::train::LogicalValues;
use ferrotron_engine::Rank;
use matrix_support::{difference, layout, one, selected};

/// GQA, some biases, a vocabulary and a layer count that no layout divides.
const MODEL: &str = "
[model]
layers = 5
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

fn recipe(layout: &RankLayout, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    let sizes = [("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp), ("vp", layout.vp)];
    for (key, n) in sizes.into_iter().chain([("dp", layout.dp.unwrap_or(1))]) {
        recipe.set(&format!("parallel.{key}={n}")).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

/// The result of `work` on the first rank.
fn run<T: Send>(
    layout: &RankLayout,
    work: impl Fn(Rank) -> ferrotron_core::Result<T> + Sync,
) -> ferrotron_core::Result<T> {
    let all = match test_on_gpu() {
        true => on_one_device(layout, DEFAULT_TIMEOUT, &Rank::cuda(0, 1, 1234, Default::default())?.0, work)?,
        false => on_threads(layout, || Ok(Rank::cpu(1, 1234)?), work)?,
    };
    Ok(all.into_iter().next().unwrap())
}
