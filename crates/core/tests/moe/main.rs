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
mod served;
mod split_sizes;

#[path = "../../../../tests/support/device.rs"]
mod device;

#[path = "../support/matrix.rs"]
mod matrix_support;

use device::test_on_gpu;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::{Batches, Row};
use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::ranks::on_threads_with;
use ferrotron_core::train::LogicalValues;
use ferrotron_engine::Rank;
use matrix_support::{layout, one, selected};

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

/// The first tensor out of tolerance; in bf16 the experts of a layer count as one tensor.
fn difference(ours: &[LogicalValues], wanted: &[LogicalValues], bf16: bool) -> Option<String> {
    match bf16 {
        true => matrix_support::difference(&stacked(ours), &stacked(wanted), true),
        false => matrix_support::difference(ours, wanted, false),
    }
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
