//! FP8-resident expert weights (`precision.fp8_params`): bit-equal to bf16-resident ones, one byte per parameter, and
//! interchangeable checkpoints. With `FERROTRON_TEST_DEVICE=cuda` on the first GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bits;
mod checkpoints;

#[path = "../../../../tests/support/device.rs"]
mod device;

use device::test_on_gpu;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::grid::{Grid, RankLayout};
use ferrotron_core::ranks::{on_one_device, on_threads};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use std::time::Duration;

/// A dense and an MoE layer, with widths that are multiples of the block size.
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
dense_layers = [0]
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
comm_unit = 160000
[checkpoint]
keep = 0
";

const SCALINGS: [&str; 3] =
    ["precision.recipe=fp8-current", "precision.recipe=fp8-delayed", "precision.recipe=fp8-block"];

fn recipe(layout: &RankLayout, set: &[&str]) -> Resolved {
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

/// The results of `work` on every rank; on the CPU with the race checker.
fn run<T: Send>(
    layout: &str,
    set: &[&str],
    work: impl Fn(Rank, Resolved) -> ferrotron_core::Result<T> + Sync,
) -> Vec<T> {
    let layout: RankLayout = layout.parse().unwrap();
    let layout = RankLayout { dp: layout.dp.or(Some(1)), ..layout };
    let resolved = recipe(&layout, set);
    let layout = resolved.config.parallel.layout();
    let work = |rank| work(rank, resolved.clone());
    let all = match test_on_gpu() {
        true => {
            let card = Rank::cuda(0, 1, 1234, Instrumentation::default()).unwrap().0;
            on_one_device(&layout, Duration::from_secs(60), &card, work)
        }
        false => {
            let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
            on_threads(&layout, || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work)
        }
    };
    all.unwrap_or_else(|e| panic!("{layout} {set:?}: {e}"))
}
