//! Mixtures of experts: every layout gives the one-rank result, whatever balances the load.
//!
//! The matrix of layouts is generated. By default a seeded sample of it runs; `FERROTRON_MATRIX=whole` runs all of it,
//! `FERROTRON_MATRIX=N` a sample of N cases, `FERROTRON_MATRIX_SEED` another sample.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod balance;
mod checkpoints;
mod hangs;
mod matrix;
mod seen;

use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::grid::{Grid, Layout};
use ferrotron_core::ranks::on_threads_with;
use ferrotron_core::train::LogicalValues;
use ferrotron_engine::Rank;

/// Grouped heads, a dense layer first, experts that every layout of the matrix divides.
const MODEL: &str = "
[model]
layers = 4
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 259
max_positions = 64
[moe]
experts = 8
topk = 2
ffn = 16
dense = [0]
shared_ffn = 24
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 10
global_batch = 16
micro_batch = 1
[optimizer]
lr = 1e-3
[precision]
dtype = \"f32\"
[generate]
tokens = 0
";

/// The recipe of a layout, and the layout as it is run.
pub fn recipe(layout: &Layout, set: &[String]) -> (Resolved, Layout) {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    let dp = Grid::of(layout.clone()).unwrap().dp();
    let sizes = [
        ("tp", layout.tp),
        ("cp", layout.cp),
        ("pp", layout.pp),
        ("vp", layout.vp),
        ("ep", layout.ep),
        ("etp", layout.etp()),
        ("dp", dp),
    ];
    for (key, n) in sizes {
        recipe.set(&format!("parallel.{key}={n}")).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    let resolved = recipe.resolve(None).unwrap();
    let layout = resolved.config.parallel.layout();
    (resolved, layout)
}

/// The layout of a text.
pub fn layout(text: &str) -> Layout {
    let layout: Layout = text.parse().unwrap();
    Layout { dp: layout.dp.or(Some(1)), ..layout }
}

/// What `work` makes on every rank, none of which waits long for another.
pub fn run<T: Send>(
    layout: &Layout,
    work: impl Fn(Rank) -> ferrotron_core::Result<T> + Sync,
) -> ferrotron_core::Result<Vec<T>> {
    let patience = std::time::Duration::from_secs(20);
    on_threads_with(layout, patience, Default::default(), || Ok(Rank::cpu(1, 1234)?), work)
}

/// Keys of a recipe.
pub fn keys(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| s.to_string()).collect()
}

/// One rank.
pub fn one() -> Layout {
    Layout { dp: Some(1), ..Layout::default() }
}

fn largest(x: &[f32]) -> f64 {
    x.iter().fold(0.0, |m, v| m.max(f64::from(v.abs())))
}

/// The first tensor that is not as wanted: in f32 every element within 1e-5 of the largest, in bf16 1e-2 in norm.
pub fn difference(ours: &[LogicalValues], wanted: &[LogicalValues], bf16: bool) -> Option<String> {
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
