//! Every edge of the order between streams is needed.

use super::super::executor::ExecutorChoice;
use super::*;
use crate::checkpoint::Item;
use crate::config::Recipe;
use crate::data::source;
use crate::train::Trainer;
use ferrotron_tensor::Instrumentation;

const MODEL: &str = "
[model]
layers = 2
hidden = 64
heads = 4
kv_heads = 2
ffn = 96
vocab = 256
max_positions = 64
[data]
path = \"embedded\"
seq_len = 32
[train]
steps = 10
global_batch = 2
micro_batch = 1
[precision]
dtype = \"bf16\"
[offload]
optimizer = 1.0
optimizer_compute = \"cpu\"
[generate]
tokens = 0
";

/// Weights and state after some steps.
fn train(change: &dyn Fn(&mut StateStream), steps: usize) -> Result<Vec<Item>> {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    let resolved = recipe.resolve(None).unwrap();
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let mut trainer = Trainer::new(Rank::cpu_instrumented(1, 1, watch)?, &resolved)?;
    trainer.optimizer.stream.iter_mut().for_each(change);
    let data = source::open(&resolved)?;
    (0..steps).try_for_each(|_| trainer.train_step(&*data.train).map(drop))?;
    Ok(trainer.snapshot()?.items)
}

/// The race checker finds every edge that is left out.
#[test]
fn every_edge_is_needed() {
    for edge in [Edge::Produced, Edge::Staged, Edge::Updated, Edge::Arrived, Edge::Emptied] {
        let leave_out = |s: &mut StateStream| s.host.iter_mut().for_each(|h| h.without = Some(edge));
        let found = train(&leave_out, 3).err();
        let found = found.unwrap_or_else(|| panic!("{edge:?} can be left out")).to_string();
        assert!(found.contains("unordered access"), "{edge:?}: {found}");
    }
}

/// Both executors in turn, then the one that was faster: the bits of either.
#[test]
fn executors_may_change_between_steps() {
    let wanted = train(&|_| {}, 7).unwrap();
    assert!(wanted == train(&|s: &mut StateStream| s.choice = ExecutorChoice::trial(), 7).unwrap());
}
