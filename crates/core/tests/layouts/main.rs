//! Every layout gives the one-rank result: loss, every gradient, evaluation, ten steps, checkpoints.
//!
//! The matrix of layouts is generated. By default a seeded sample of it runs; `FERROTRON_MATRIX=whole` runs all of it,
//! `FERROTRON_MATRIX=N` a sample of N cases, `FERROTRON_MATRIX_SEED` another sample.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod checkpoints;
mod details;
mod matrix;
mod steps;

#[path = "../../../../tests/support/device.rs"]
mod device;

use device::test_on_gpu;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::{DEFAULT_TIMEOUT, on_one_device, on_threads};
use ferrotron_core::train::LogicalValues;
use ferrotron_engine::Rank;

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

fn one() -> RankLayout {
    RankLayout { dp: Some(1), ..RankLayout::default() }
}

fn layout(text: &str) -> RankLayout {
    let layout: RankLayout = text.parse().unwrap();
    RankLayout { dp: layout.dp.or(Some(1)), ..layout }
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

fn largest(x: &[f32]) -> f64 {
    x.iter().fold(0.0, |m, v| m.max(f64::from(v.abs())))
}

/// The first tensor out of tolerance: f32 elementwise within 1e-5 of the largest value, bf16 within 1e-2 in l2 norm.
fn difference(ours: &[LogicalValues], wanted: &[LogicalValues], bf16: bool) -> Option<String> {
    if ours.len() != wanted.len() {
        return Some(format!("{} tensors instead of {}", ours.len(), wanted.len()));
    }
    for (o, w) in ours.iter().zip(wanted) {
        if (&o.name, &o.shape) != (&w.name, &w.shape) || o.values.len() != w.values.len() {
            return Some(format!("{} {:?} where {} {:?} belongs", o.name, o.shape, w.name, w.shape));
        }
        let pairs = || o.values.iter().zip(&w.values).map(|(a, b)| f64::from(a - b));
        if bf16 {
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
            let (apart, size) = (norm(&mut pairs()), norm(&mut w.values.iter().map(|v| f64::from(*v))));
            if apart.is_nan() || apart > 1e-2 * size + 1e-6 {
                return Some(format!("{}: {apart:.2e} of {size:.2e} apart", o.name));
            }
        } else {
            let room = 1e-5 * largest(&w.values) + 1e-7;
            if let Some((i, d)) = pairs().enumerate().find(|(_, d)| d.is_nan() || d.abs() > room) {
                let (a, b) = (o.values[i], w.values[i]);
                return Some(format!(
                    "{} [{i}]: {a} instead of {b}, {d:.1e} where {room:.1e} is allowed",
                    o.name
                ));
            }
        }
    }
    None
}
