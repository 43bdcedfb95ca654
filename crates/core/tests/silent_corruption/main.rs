//! Silent data corruption: bits that are inverted on one rank are found by the end of their interval, attributed to that rank, and
//! undone; NaN is handled by policy.
//!
//! `FERROTRON_FLIPS=N` sets the flips of each layout, and the ignored test runs many clean steps.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bad_steps;
mod culprit;
mod flips;
mod inject;

use ferrotron_core::Result;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::events::{self, Event, Fault, Rerun, RerunOutcome};
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Observer, Outcome, Run};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use std::path::Path;

const MODEL: &str = "
[model]
layers = 2
hidden = 16
heads = 2
kv_heads = 2
ffn = 24
vocab = 259
max_positions = 16
[data]
path = \"embedded\"
seq_len = 8
[train]
global_batch = 8
micro_batch = 1
[optimizer]
lr = 1e-2
clip = 0.5
[precision]
dtype = \"f32\"
[generate]
tokens = 0
[eval]
every = 0
[checkpoint]
every = 0
at_end = false
";

const MOE: &str = "
[moe]
experts = 4
topk = 2
ffn = 8
score_function = \"sigmoid\"
expert_bias = true
";

/// A recipe of the tests with some keys set.
fn recipe(moe: bool, set: &[String]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    if moe {
        recipe.add("moe.toml", MOE).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap_or_else(|e| panic!("{s}: {e}")));
    recipe.resolve(None).unwrap()
}

fn strings(set: &[&str]) -> Vec<String> {
    set.iter().map(|s| s.to_string()).collect()
}

struct Quiet;

impl Observer for Quiet {
    fn event(&mut self, _: &Event) {}
    fn stop(&self) -> bool {
        false
    }
}

/// Weights of the whole model after the last step.
type Weights = Vec<LogicalValues>;

/// Runs `work` on every rank of a recipe, with the race checker on; the result of rank 0.
fn on_ranks<T: Send>(resolved: &Resolved, work: impl Fn(Rank) -> Result<T> + Sync) -> Result<T> {
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let make = || Ok(Rank::cpu_instrumented(1, 1234, watch)?);
    Ok(on_threads(&resolved.config.parallel.layout(), make, work)?.swap_remove(0))
}

/// Trains a recipe in `dir`: how it ended, and the weights.
fn train(dir: &Path, resolved: &Resolved) -> Result<(Outcome, Weights)> {
    on_ranks(resolved, |rank| {
        let sources = source::open(resolved)?;
        let mut run = Run::open(rank, resolved.clone(), dir, None)?;
        let outcome = run.train(&*sources.train, None, &mut Quiet)?;
        Ok((outcome, run.trainer.weights()?))
    })
}

/// The reruns and faults in the log of a run.
fn logged(dir: &Path) -> (Vec<Rerun>, Vec<Fault>) {
    let (mut reruns, mut faults) = (Vec::new(), Vec::new());
    for line in events::read(dir).unwrap() {
        match line.event {
            Event::Rerun(e) => reruns.push(e),
            Event::Fault(e) => faults.push(e),
            _ => {}
        }
    }
    (reruns, faults)
}

/// The last logged loss of every step.
fn losses(dir: &Path) -> std::collections::BTreeMap<u64, u64> {
    let steps = events::read(dir).unwrap().into_iter().filter_map(|line| match line.event {
        Event::Step(s) => Some((s.step, s.loss.to_bits())),
        _ => None,
    });
    steps.collect()
}

fn equal(what: &str, a: &Weights, b: &Weights) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        let bits = |v: &LogicalValues| v.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(a.name == b.name && bits(a) == bits(b), "{what}: {} differs", a.name);
    }
}
