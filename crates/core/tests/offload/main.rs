//! Offloading changes no bit: losses, gradients and weights of five steps with and without it, under the race checker.
//!
//! The matrix of cases is generated. By default a seeded sample of it runs; `FERROTRON_MATRIX=whole` runs all of it,
//! `FERROTRON_MATRIX=N` a sample of N cases, `FERROTRON_MATRIX_SEED` another sample, `FERROTRON_MATRIX_ONLY` those whose name
//! contains a text. `FERROTRON_TEST_DEVICE=cuda` runs all ranks on one GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod matrix;
mod memory;
mod optimizer;
mod shards;

#[path = "../../../../tests/support/device.rs"]
mod device;

#[path = "../support/matrix.rs"]
mod matrix_support;

use device::test_on_gpu;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::ranks::{DEFAULT_TIMEOUT, on_one_device, on_threads};
use ferrotron_core::train::Trainer;
use ferrotron_engine::Rank;
use ferrotron_tensor::{Instrumentation, MemoryReport};
use matrix_support::selected;

const MODEL: &str = "
[model]
layers = 6
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
global_batch = 4
micro_batch = 1
[optimizer]
lr = 1e-3
[offload]
min_bytes = 1
[generate]
tokens = 0
";

fn recipe(set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

/// What a rank has computed.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    /// Bits of the losses.
    losses: Vec<u64>,
    /// Bits of the last step's gradients, then of the weights, by name.
    tensors: Vec<(String, Vec<u32>)>,
}

/// Runs steps on all ranks; the outcome of the first rank, and the memory of every rank's device.
fn run(resolved: &Resolved, steps: usize) -> ferrotron_core::Result<(Outcome, Vec<MemoryReport>)> {
    let layout = resolved.config.parallel.layout();
    let work = |rank: Rank| {
        let sources = source::open(resolved)?;
        let mut trainer = Trainer::new(rank, resolved)?;
        let mut losses = Vec::new();
        for step in 0..steps {
            losses.push(trainer.train_step(&*sources.train)?.loss.to_bits());
            // An evaluation between steps saves nothing and moves nothing.
            if step == 1 {
                losses.push(trainer.evaluate(&*sources.train, 2)?.to_bits());
            }
        }
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
        let all = trainer.gradients()?.into_iter().chain(trainer.weights()?);
        let tensors = all.map(|t| (t.name, bits(&t.values))).collect();
        // Ranks may share the device: nobody is still in a step, and nobody has dropped its state.
        let all = trainer.rank.world.all();
        all.barrier("steps are done")?;
        let memory = trainer.rank.device().memory();
        all.barrier("memory was read")?;
        Ok((Outcome { losses, tensors }, memory))
    };
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let all = if test_on_gpu() {
        on_one_device(&layout, DEFAULT_TIMEOUT, &Rank::cuda(0, 1, 1234, watch)?.0, work)?
    } else {
        on_threads(&layout, || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work)?
    };
    let (outcomes, memory): (Vec<Outcome>, Vec<MemoryReport>) = all.into_iter().unzip();
    Ok((outcomes.into_iter().next().unwrap(), memory))
}
