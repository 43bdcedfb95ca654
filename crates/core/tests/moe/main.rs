//! MoE: every layout gives the one-rank result under every load-balancing method.
//!
//! The matrix of layouts is generated. By default a seeded sample of it runs; `FERROTRON_MATRIX=whole` runs all of it,
//! `FERROTRON_MATRIX=N` a sample of N cases, `FERROTRON_MATRIX_SEED` another sample, `FERROTRON_MATRIX_ONLY=TEXT` cases whose
//! name contains a text.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod balance;
mod checkpoints;
mod deadlock;
mod lora;
mod matrix;
mod metrics;
mod overlap;
mod pad_to_capacity;
mod recompute;
mod routing_replay;

#[path = "../../../../tests/support/device.rs"]
mod device;

use device::test_on_gpu;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::{Batches, Row};
use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::ranks::on_threads_with;
use ferrotron_core::train::LogicalValues;
use ferrotron_engine::Rank;

/// GQA, a dense first layer, an expert count that every layout of the matrix divides.
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
dense_layers = [0]
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

/// The recipe of a layout, and the resolved layout.
fn recipe(layout: &RankLayout, set: &[String]) -> (Resolved, RankLayout) {
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

/// Parses a layout.
fn layout(text: &str) -> RankLayout {
    let layout: RankLayout = text.parse().unwrap();
    RankLayout { dp: layout.dp.or(Some(1)), ..layout }
}

/// The results of `work` on every rank, under a short collective timeout.
fn run<T: Send>(
    layout: &RankLayout,
    work: impl Fn(Rank) -> ferrotron_core::Result<T> + Sync,
) -> ferrotron_core::Result<Vec<T>> {
    let timeout = std::time::Duration::from_secs(20);
    on_threads_with(layout, timeout, Default::default(), || Ok(Rank::cpu(1, 1234)?), work)
}

/// Recipe keys as pairs.
fn keys(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| s.to_string()).collect()
}

/// One rank.
fn one() -> RankLayout {
    RankLayout { dp: Some(1), ..RankLayout::default() }
}

/// Stacks the matrices of a layer's experts: with a few tokens per expert, single experts have large relative rounding.
fn stacked(all: &[LogicalValues]) -> Vec<LogicalValues> {
    let mut out: Vec<LogicalValues> = Vec::new();
    for v in all {
        let mut name = v.name.clone();
        if let Some((layer, rest)) = v.name.split_once(".experts.") {
            name = format!("{layer}.experts.{}", rest.split_once('.').map_or("", |(_, kind)| kind));
        }
        match out.iter_mut().find(|o| o.name == name) {
            Some(o) => o.values.extend(&v.values),
            None => out.push(LogicalValues { name, shape: v.shape.clone(), values: v.values.clone() }),
        }
    }
    out
}

fn largest(x: &[f32]) -> f64 {
    x.iter().fold(0.0, |m, v| m.max(f64::from(v.abs())))
}

/// The first tensor out of tolerance: f32 elementwise within 1e-5 of the largest value, bf16 within 1e-2 in l2 norm.
fn difference(ours: &[LogicalValues], wanted: &[LogicalValues], bf16: bool) -> Option<String> {
    if ours.len() != wanted.len() {
        return Some(format!("{} tensors instead of {}", ours.len(), wanted.len()));
    }
    let (ours, wanted) =
        if bf16 { (stacked(ours), stacked(wanted)) } else { (ours.to_vec(), wanted.to_vec()) };
    for (o, w) in ours.iter().zip(&wanted) {
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

/// Fixed token ids: routing may depend on the last bit of a logit, so compared runs use data of their own.
struct Numbers {
    seq: usize,
    packed: bool,
}

impl Numbers {
    fn of(r: &Resolved) -> Numbers {
        Numbers { seq: r.plan.seq_len, packed: r.config.data.reset_at_documents }
    }
}

impl Batches for Numbers {
    fn seq(&self) -> usize {
        self.seq
    }

    fn samples(&self) -> u64 {
        1 << 20
    }

    fn resets(&self) -> bool {
        self.packed
    }

    fn row(&self, n: u64, row: &mut Row) -> ferrotron_core::Result<()> {
        let token = |i: usize| {
            let x = (n * 1000 + i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as i32 % 259
        };
        // Documents of different lengths in every row.
        let cut = 3 + n as usize % 9;
        row.starts.extend(if self.packed { vec![0, cut] } else { vec![0] });
        for i in 0..self.seq {
            row.tokens.push(token(i));
            row.labels.push(token(i + 1));
            row.positions.push(if self.packed && i >= cut { i - cut } else { i } as i32);
        }
        Ok(())
    }
}
