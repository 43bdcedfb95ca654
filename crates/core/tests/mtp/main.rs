//! Multi-token prediction (MTP): against f64, equal under every layout, through checkpoints, with MoE.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod layouts;
mod reference;
mod runs;

#[path = "../../../../tests/support/device.rs"]
mod device;

use device::test_on_gpu;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::grid::RankLayout;

/// GQA, some biases, a vocabulary that no layout divides.
const MODEL: &str = "
[model]
layers = 3
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 259
max_positions = 64
qkv_bias = true
tied = false
[mtp]
layers = 2
loss_weight = 0.3
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 6
global_batch = 8
micro_batch = 1
[optimizer]
lr = 1e-3
[precision]
dtype = \"f32\"
[generate]
tokens = 0
";

fn build(layout: &RankLayout, set: &[&str]) -> Recipe {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    let sizes =
        [("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp), ("vp", layout.vp), ("ep", layout.ep)];
    for (key, n) in sizes.into_iter().chain([("dp", layout.dp.unwrap_or(1))]) {
        recipe.set(&format!("parallel.{key}={n}")).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe
}

fn recipe(layout: &RankLayout, set: &[&str]) -> Resolved {
    build(layout, set).resolve(None).unwrap()
}

fn layout(text: &str) -> RankLayout {
    let layout: RankLayout = text.parse().unwrap();
    RankLayout { dp: layout.dp.or(Some(1)), ..layout }
}

fn one() -> RankLayout {
    layout("tp=1")
}
