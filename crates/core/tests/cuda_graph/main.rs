//! Steps replayed as a CUDA graph are bit-equal to launched steps. With `FERROTRON_TEST_DEVICE=cuda` on the first GPU;
//! otherwise only what the CPU refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod capture;
mod decision;
mod packed;
mod replay;

#[path = "../../../../tests/support/device.rs"]
mod device;

use device::{skipped, test_on_gpu};
use ferrotron_core::Result;
use ferrotron_core::checkpoint::Item;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::{Batches, Row};
use ferrotron_core::train::{StepReport, Trainer};
use ferrotron_engine::Rank;
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::Instrumentation;
use std::sync::{Mutex, MutexGuard, PoisonError};

const BASE: &str = r#"
[model]
layers = 2
hidden = 128
heads = 4
kv_heads = 2
ffn = 192
vocab = 259
max_positions = 64
[data]
path = "never opened"
seq_len = 64
[train]
steps = 30
global_batch = 8
micro_batch = 4
[optimizer]
lr = 1e-2
[schedule]
warmup = 8
[precision]
dtype = "f32"
"#;

const GPT2: &[&str] = &[
    "model.norm=layernorm",
    "model.activation=gelu_tanh",
    "model.gated=false",
    "model.positions=learned",
    "model.kv_heads=4",
    "model.qkv_bias=true",
    "model.proj_bias=true",
    "model.mlp_bias=true",
    "model.tied=true",
];

const MOE: &[&str] = &[
    "moe.experts=4",
    "moe.topk=2",
    "moe.ffn=128",
    "moe.shared_ffn=128",
    "moe.shared_gate=true",
    "moe.expert_bias=true",
    "moe.score_function=sigmoid",
    "moe.balance=seq_aux",
    "moe.log=all",
];

/// All saved tensors are large enough to be offloaded.
const OFFLOAD: &[&str] = &["model.layers=4", "offload.min_bytes=1"];

fn recipe(graph: &str, changes: &[&str]) -> Resolved {
    let mut r = Recipe::default();
    r.add("test", BASE).unwrap();
    changes.iter().for_each(|c| r.set(c).unwrap_or_else(|e| panic!("{c}: {e}")));
    r.set(&format!("train.cuda_graph={graph}")).unwrap();
    r.resolve(None).unwrap_or_else(|e| panic!("{changes:?}: {e}"))
}

/// Serializes tests: they measure free GPU memory.
static GPU: Mutex<()> = Mutex::new(());

/// The first GPU, where tests use one.
fn card() -> Option<(Rank, MutexGuard<'static, ()>)> {
    if !test_on_gpu() {
        skipped("what needs a GPU");
        return None;
    }
    let alone = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    Some((Rank::cuda(0, 1, 1234, Instrumentation::default()).unwrap().0, alone))
}

/// Samples differ in tokens and in their number of labels.
struct Changing;

impl Batches for Changing {
    fn seq(&self) -> usize {
        64
    }
    fn samples(&self) -> u64 {
        u64::MAX
    }
    fn resets(&self) -> bool {
        false
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let token = |i: u64| ((n * 7919 + i * i * 31 + (n + 3) * i) % 259) as i32;
        for i in 0..64 {
            row.tokens.push(token(i));
            row.labels.push(if i < n % 5 { IGNORE } else { token(i + 1) });
            row.positions.push(i as i32);
        }
        row.starts.push(0);
        Ok(())
    }
}

struct Made {
    reports: Vec<StepReport>,
    /// Weights and optimizer state; of adapters, theirs.
    saved: Vec<Item>,
    replayed: u64,
}

/// Steps as in a run: with `ahead`, each is launched before the previous one is read back.
fn steps(t: &mut Trainer, n: usize, ahead: bool) -> Vec<StepReport> {
    steps_of(&Changing, t, n, ahead)
}

fn steps_of(data: &dyn Batches, t: &mut Trainer, n: usize, ahead: bool) -> Vec<StepReport> {
    let mut reports = Vec::new();
    let mut last = None;
    for _ in 0..n {
        let queued = t.begin_step(data).unwrap();
        if ahead {
            if let Some(before) = last.replace(queued) {
                reports.push(t.end_step(before, &mut last).unwrap());
            }
        } else {
            reports.push(t.end_step(queued, &mut None).unwrap());
        }
    }
    reports.extend(last.map(|q| t.end_step(q, &mut None).unwrap()));
    reports
}

fn train(rank: &Rank, graph: &str, changes: &[&str], ahead: bool) -> Made {
    train_on(&Changing, rank, graph, changes, ahead)
}

fn train_on(data: &dyn Batches, rank: &Rank, graph: &str, changes: &[&str], ahead: bool) -> Made {
    let r = recipe(graph, changes);
    let mut t = Trainer::new(rank.clone(), &r).unwrap();
    let mut reports = steps_of(data, &mut t, 15, ahead);
    // With an evaluation and a checkpoint in between.
    assert!(t.evaluate(data, 3).unwrap().is_finite());
    assert!(!t.snapshot().unwrap().items.is_empty());
    reports.extend(steps_of(data, &mut t, 15, ahead));
    Made { reports, saved: t.snapshot().unwrap().items, replayed: t.steps_replayed() }
}
