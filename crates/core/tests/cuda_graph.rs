//! Steps replayed as a CUDA graph are bit-equal to launched steps. With `FERROTRON_TEST_DEVICE=cuda` on the first GPU;
//! otherwise only what the CPU refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::Result;
use ferrotron_core::checkpoint::Item;
use ferrotron_core::config::{CudaGraphMode, Recipe, Resolved};
use ferrotron_core::data::{Batches, Row};
use ferrotron_core::train::{StepReport, Trainer};
use ferrotron_engine::Rank;
use ferrotron_kernels::IGNORE;
use ferrotron_tensor::{Category, DType, Instrumentation, Tensor};
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
static CARD: Mutex<()> = Mutex::new(());

/// The first GPU, where tests use one.
fn card() -> Option<(Rank, MutexGuard<'static, ()>)> {
    match std::env::var("FERROTRON_TEST_DEVICE") {
        Ok(home) if home == "cuda" => {
            let alone = CARD.lock().unwrap_or_else(PoisonError::into_inner);
            Some((Rank::cuda(0, 1, 1234, Instrumentation::default()).unwrap().0, alone))
        }
        _ => None,
    }
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

/// Documents that lie elsewhere in every row: three or four of them, 9 to 16 in a micro-batch; or nine in the rows that `crowded`
/// names, whose micro-batches need a larger graph. With `padded`, rows end in padding, a sequence of its own.
struct Documents {
    crowded: fn(u64) -> bool,
    padded: bool,
}

impl Batches for Documents {
    fn seq(&self) -> usize {
        64
    }
    fn samples(&self) -> u64 {
        u64::MAX
    }
    fn resets(&self) -> bool {
        true
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        Changing.row(n, row)?;
        let documents = if (self.crowded)(n) { 9 } else { 3 + n % 2 * u64::from(!self.padded) };
        let width = 64 / documents;
        row.starts.extend((1..documents).map(|i| (i * width + (n * 13 + i * 5) % width) as usize));
        if self.padded {
            row.padding = (n * 5 % 7) as usize;
            let first = 64 - row.padding;
            row.starts.retain(|start| *start < first);
            row.starts.extend((row.padding > 0).then_some(first));
            row.labels[first..].fill(IGNORE);
        }
        for (start, end) in row.starts.iter().zip(row.starts[1..].iter().chain(&[64])) {
            row.positions[*start..*end].iter_mut().zip(0..).for_each(|(p, i)| *p = i);
            row.labels[end - 1] = IGNORE;
        }
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
            if let Some(last) = last.replace(queued) {
                reports.push(t.end_step(last).unwrap());
            }
        } else {
            reports.push(t.end_step(queued).unwrap());
        }
    }
    reports.extend(last.map(|q| t.end_step(q).unwrap()));
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

#[test]
fn replayed_steps_are_bit_equal_to_launched_ones() {
    let bf16: &[&str] = &["precision.dtype=bf16", "optimizer.state_dtype=bf16"];
    let cases: &[(&str, Vec<&str>)] = &[
        ("fp8, current", [bf16, &["precision.recipe=fp8-current"]].concat()),
        ("f16", vec!["precision.dtype=f16", "precision.loss_scale=[256, 7]"]),
        ("mxfp8", [bf16, &["precision.recipe=mxfp8"]].concat()),
        ("fp8 attention", [bf16, &["precision.fp8_attention=true"]].concat()),
        (
            "fp8 head",
            [bf16, &["precision.recipe=fp8-current", "precision.fp8_lm_head=true", "train.micro_batch=2"]]
                .concat(),
        ),
        ("fp8, delayed", [bf16, &["precision.recipe=fp8-delayed", "train.micro_batch=2"]].concat()),
        ("fp8, block", [bf16, &["precision.recipe=fp8-block"]].concat()),
        ("FP8 parameters", [bf16, &["precision.recipe=fp8-current", "precision.fp8_params=true"]].concat()),
        (
            "FP8 parameters, delayed scaling",
            [bf16, &["precision.recipe=fp8-delayed", "precision.fp8_params=true", "train.micro_batch=2"]]
                .concat(),
        ),
        (
            "fp8 moments",
            vec!["precision.dtype=bf16", "optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"],
        ),
        ("llama f32", vec![]),
        ("llama bf16", bf16.to_vec()),
        ("gpt2 f32", GPT2.to_vec()),
        ("gpt2 bf16", [GPT2, bf16].concat()),
        ("one micro-batch, sgd", vec!["train.micro_batch=8", "optimizer.kind=sgd", "optimizer.clip=0"]),
        ("moe, dropless, f32", MOE.to_vec()),
        ("moe, dropless, bf16", [MOE, bf16].concat()),
        ("moe, fp8, block", [MOE, bf16, &["precision.recipe=fp8-block"]].concat()),
        (
            "moe, padded",
            [MOE, bf16, &["moe.capacity=1.25", "moe.pad_to_capacity=true", "moe.z_loss=1e-3"]].concat(),
        ),
        ("dropout", [bf16, &["dropout.hidden=0.1", "train.micro_batch=2"]].concat()),
        ("MTP", [bf16, &["mtp.layers=2", "train.micro_batch=2"]].concat()),
        (
            "moe, MTP with dropout, jitter",
            [MOE, bf16, &["mtp.layers=1", "dropout.hidden=0.1", "moe.jitter=0.01"]].concat(),
        ),
        ("moe, forced balance", [MOE, bf16, &["moe.force_balance=0"]].concat()),
        ("recomputed, dropout", vec!["train.recompute=full", "dropout.hidden=0.2"]),
        ("recomputed", vec!["train.recompute=full", "model.window=24", "model.qk_norm=true"]),
        ("LoRA", [bf16, &["lora.rank=8"]].concat()),
        ("DoRA", [bf16, &["lora.rank=8", "lora.dora=true", "lora.fused=true"]].concat()),
        (
            "DoRA, FP8 base",
            [bf16, &["lora.rank=8", "lora.dora=true", "precision.recipe=fp8-current"]].concat(),
        ),
        ("offloaded layers", [bf16, OFFLOAD, &["offload.activations=2", "train.micro_batch=2"]].concat()),
        ("offloaded modules", [OFFLOAD, &["offload.activations=[\"core_attn\", \"fc1\"]"]].concat()),
        ("offloaded automatically", [bf16, OFFLOAD, &["offload.activations=auto"]].concat()),
        (
            "fp8, offloaded and recomputed",
            [
                bf16,
                OFFLOAD,
                &["precision.recipe=fp8-current", "offload.activations=3", "train.recompute=[\"norm\"]"],
            ]
            .concat(),
        ),
        (
            "moe, padded, offloaded",
            [MOE, bf16, OFFLOAD, &["moe.capacity=1.25", "moe.pad_to_capacity=true", "offload.activations=3"]]
                .concat(),
        ),
    ];
    let Some((rank, _alone)) = card() else {
        // Without a GPU, check that the recipes are valid.
        cases.iter().for_each(|(_, changes)| drop(recipe("on", changes)));
        return;
    };
    for (name, changes) in cases {
        let plain = train(&rank, "off", changes, false);
        assert_eq!((plain.replayed, plain.reports.len()), (0, 30), "{name}");
        let rates: Vec<f64> = plain.reports.iter().map(|r| r.lr).collect();
        assert!(rates.windows(2).all(|w| w[0] != w[1]), "{name}: the learning rate changes: {rates:?}");
        for ahead in [false, true] {
            let graph = train(&rank, "on", changes, ahead);
            // With offloading, a step is measured before one is captured.
            let offloads = changes.iter().any(|c| c.starts_with("offload"));
            let expected = if offloads { 10..=26 } else { 27..=27 };
            assert!(expected.contains(&graph.replayed), "{name}, ahead {ahead}: {}", graph.replayed);
            assert_eq!(graph.reports, plain.reports, "{name}, ahead {ahead}");
            assert!(graph.saved == plain.saved, "{name}, ahead {ahead}: weights or optimizer state differ");
        }
    }
}

/// Documents begin elsewhere in every replay.
#[test]
fn replayed_steps_of_packed_sequences_are_bit_equal_to_launched_ones() {
    const RESET: &str = "data.reset_at_documents=true";
    let bf16 = ["precision.dtype=bf16", "optimizer.state_dtype=bf16"];
    let mtp = ["mtp.layers=1", "dropout.hidden=0.1", "moe.z_loss=1e-3"];
    let cases: &[(&str, Vec<&str>)] = &[
        ("f32", vec![RESET]),
        ("bf16", [&bf16[..], &[RESET]].concat()),
        ("heads of 128", [&bf16[..], &[RESET, "model.head_dim=128"]].concat()),
        ("window, recomputed", [&bf16[..], &[RESET, "model.window=24", "train.recompute=full"]].concat()),
        (
            "fp8",
            [&bf16[..], &[RESET, "precision.recipe=fp8-current", "precision.fp8_attention=true"]].concat(),
        ),
        ("moe", [MOE, &[RESET]].concat()),
        ("moe, MTP", [MOE, &bf16, &mtp, &[RESET]].concat()),
        ("moe, MTP, padded", [MOE, &bf16, &mtp, &["data.packing=documents"]].concat()),
        (
            "moe, padded to a capacity of each rank",
            [
                MOE,
                &bf16,
                &["data.packing=documents", "moe.capacity=1.25", "moe.pad_to_capacity=true"],
                &["moe.capacity_per_rank=true"],
            ]
            .concat(),
        ),
    ];
    let Some((rank, _alone)) = card() else {
        return cases.iter().for_each(|(_, changes)| drop(recipe("on", changes)));
    };
    for (name, changes) in cases {
        let data = Documents { crowded: |_| false, padded: !changes.contains(&RESET) };
        let plain = train_on(&data, &rank, "off", changes, false);
        assert_eq!((plain.replayed, plain.reports.len()), (0, 30), "{name}");
        for ahead in [false, true] {
            let graph = train_on(&data, &rank, "on", changes, ahead);
            assert_eq!(graph.replayed, 27, "{name}, ahead {ahead}");
            assert_eq!(graph.reports, plain.reports, "{name}, ahead {ahead}");
            assert!(graph.saved == plain.saved, "{name}, ahead {ahead}: weights or optimizer state differ");
        }
    }
}

/// Steps with more sequences than the graph has room for are launched; after three of them there is a larger graph.
#[test]
fn steps_of_many_packed_sequences_are_another_graph() {
    let changes = ["precision.dtype=bf16", "data.reset_at_documents=true"];
    recipe("on", &changes);
    let Some((rank, _alone)) = card() else { return };
    // Steps of eight samples: the 11th and 12th, and from the 21st on every other.
    let crowded = |n: u64| (10..12).contains(&(n / 8)) || (n / 8 >= 20 && (n / 8).is_multiple_of(2));
    let data = Documents { crowded, padded: false };
    let plain = train_on(&data, &rank, "off", &changes, true);
    let graph = train_on(&data, &rank, "on", &changes, true);
    // Three to warm up, then three that do not fit.
    assert_eq!(graph.replayed, 24);
    assert_eq!(graph.reports, plain.reports);
    assert!(graph.saved == plain.saved);
}

/// Steps with operand statistics and calibration steps are launched, not replayed; the graph stays valid.
#[test]
fn statistics_and_calibration_steps_are_not_replayed() {
    let current = ["precision.dtype=bf16", "precision.recipe=fp8-current"];
    let delayed = ["precision.dtype=bf16", "precision.recipe=fp8-delayed"];
    let cases = [
        ([current[0], current[1], "precision.stats_every=10"], current.to_vec(), 24),
        ([delayed[0], delayed[1], "precision.stats_every=10"], delayed.to_vec(), 24),
        (
            [delayed[0], delayed[1], "precision.calibrate=5"],
            [&delayed[..], &["precision.calibrate=5"]].concat(),
            22,
        ),
    ];
    let Some((rank, _alone)) = card() else {
        return cases.iter().for_each(|(changes, ..)| drop(recipe("on", changes)));
    };
    for (changes, plain, replayed) in cases {
        let plain = train(&rank, "off", &plain, false);
        for ahead in [false, true] {
            let graph = train(&rank, "on", &changes, ahead);
            assert_eq!(graph.replayed, replayed, "{changes:?}, ahead {ahead}");
            assert_eq!(graph.reports, plain.reports, "{changes:?}, ahead {ahead}");
            assert!(graph.saved == plain.saved, "{changes:?}, ahead {ahead}: weights differ");
        }
    }
}

#[test]
fn another_number_of_micro_batches_is_another_graph() {
    // 2, 4, 6 and 8 sequences per step.
    let changes = ["train.ramp=[2, 2, 80]", "train.micro_batch=2"];
    recipe("on", &changes);
    let Some((rank, _alone)) = card() else { return };
    let plain = train(&rank, "off", &changes, true);
    let graph = train(&rank, "on", &changes, true);
    assert_eq!(graph.reports, plain.reports);
    assert!(graph.saved == plain.saved);
    let sizes: std::collections::BTreeSet<u64> = plain.reports.iter().map(|r| r.samples).collect();
    assert!(sizes.len() > 2, "{sizes:?}");
    assert!(graph.replayed > 0 && graph.replayed < 30 - 3 * sizes.len() as u64 + 3, "{}", graph.replayed);
}

#[test]
fn memory_is_constant_and_equal_to_launched_steps() {
    // Large enough that an evaluation borrows a graph's memory.
    let sizes = ["model.hidden=256", "model.ffn=512", "train.micro_batch=16", "train.global_batch=32"];
    let changes = [&sizes[..], &["optimizer.lr=1e-3"]].concat();
    let Some((warm, _alone)) = card() else { return drop(recipe("on", &changes)) };
    let free = |r: &Rank| r.device().gpu_memory().unwrap().unwrap().0;
    // Lazy driver allocations are not counted.
    train(&warm, "on", &changes, true);
    let used = ["off", "on"].map(|graph| {
        let (rank, _) = Rank::cuda(0, 1, 1234, Instrumentation::default()).unwrap();
        let before = free(&rank);
        let mut t = Trainer::new(rank.clone(), &recipe(graph, &changes)).unwrap();
        steps(&mut t, 15, true);
        t.evaluate(&Changing, 3).unwrap();
        steps(&mut t, 15, true);
        let (now, left) = (rank.device().memory(), free(&rank));
        for _ in 0..9 {
            steps(&mut t, 30, true);
            t.evaluate(&Changing, 3).unwrap();
        }
        assert_eq!(rank.device().memory(), now, "{graph}");
        assert_eq!(free(&rank), left, "{graph}");
        assert_eq!(t.steps_replayed(), if graph == "on" { 297 } else { 0 });
        println!(
            "{graph}: {} live, {} at most, {} of the card",
            now.total_now,
            now.total_peak,
            before - left
        );
        (now.total_now, now.total_peak, before - left)
    });
    // A graph owns its inputs and outputs, plus what the driver needs.
    let inputs = 2 * 4 * 4 * 1024 + 1024;
    let [off, on] = used;
    assert!(on.0 <= off.0 + inputs && on.1 <= off.1 + inputs, "{used:?}");
    assert!(on.2 <= off.2 + (8 << 20), "{used:?}");
}

#[test]
fn auto_decides_and_says_why() {
    let r = recipe("auto", &[]);
    let Some((rank, _alone)) = card() else {
        let t = Trainer::new(Rank::cpu(1, 1).unwrap(), &r).unwrap();
        assert_eq!(t.cuda_graph_decision().value, CudaGraphMode::Off);
        assert!(!t.cuda_graph_undecided());
        let refused = Trainer::new(Rank::cpu(1, 1).unwrap(), &recipe("on", &[])).err().unwrap().to_string();
        assert!(refused.contains("train.cuda_graph") && refused.contains("CPU") && !refused.contains('\n'));
        return;
    };
    for ahead in [false, true] {
        let mut t = Trainer::new(rank.clone(), &r).unwrap();
        assert_eq!(t.cuda_graph_decision().value, CudaGraphMode::Auto);
        steps(&mut t, 8, ahead);
        let choice = t.cuda_graph_decision();
        println!("ahead {ahead}: {:?}, {} replayed", choice, t.steps_replayed());
        assert!(choice.value != CudaGraphMode::Auto && choice.reason.contains('%'), "{choice:?}");
        assert_eq!(t.steps_replayed() > 0, choice.value == CudaGraphMode::On);
    }
    // Instrumented steps are launched.
    let (watched, _) =
        Rank::cuda(0, 1, 1234, Instrumentation { race_check: true, ..Instrumentation::default() }).unwrap();
    let mut t = Trainer::new(watched.clone(), &r).unwrap();
    steps(&mut t, 6, true);
    assert_eq!((t.steps_replayed(), t.cuda_graph_decision().value), (0, CudaGraphMode::Off));
    assert!(Trainer::new(watched, &recipe("on", &[])).is_err());
}

#[test]
fn failed_captures_are_errors_and_leave_the_stream_usable() {
    let Some((rank, _alone)) = card() else { return };
    let s = &rank.compute;
    let t = s.upload(&[1f32, 2.0], &[2], Category::Workspace).unwrap();
    let mut kept = None;
    let (other, before) = (rank.device().stream("other").unwrap(), s.record().unwrap());
    let refused = [
        s.capture(|| s.upload_into(&t, &[3f32, 4.0])).err(),
        s.capture(|| s.download::<f32>(&t).map(drop)).err(),
        s.capture(|| other.wait(&s.record()?)).err(),
        s.capture(|| s.wait(&before)).err(),
        s.capture(|| s.synchronize()).err(),
        s.capture(|| {
            kept = Some(Tensor::empty(s, &[4], DType::F32, Category::Workspace)?);
            Ok::<_, ferrotron_tensor::Error>(())
        })
        .err(),
    ];
    for (i, e) in refused.iter().enumerate() {
        let e = e.as_ref().unwrap_or_else(|| panic!("case {i} was captured")).to_string();
        assert!(e.contains("captured") || e.contains("keeps memory"), "{e}");
    }
    assert_eq!(s.download::<f32>(&t).unwrap(), [1.0, 2.0]);
    // A successful capture executes nothing before its replay.
    let graph = s
        .capture(|| {
            let inside = Tensor::empty(s, &[2], DType::F32, Category::Workspace)?;
            s.zero(&inside)?;
            s.copy(&inside, &t)
        })
        .unwrap();
    assert_eq!(graph.nodes(), 2);
    assert_eq!(s.download::<f32>(&t).unwrap(), [1.0, 2.0]);
    graph.replay().unwrap();
    assert_eq!(s.download::<f32>(&t).unwrap(), [0.0, 0.0]);
    // The graph keeps constants of the host.
    let constant = || s.copy(&s.constant(&[5f32, 6.0], &[2], Category::Workspace)?, &t);
    let graph = s.capture(constant).unwrap();
    for _ in 0..2 {
        s.zero(&t).unwrap();
        graph.replay().unwrap();
        assert_eq!(s.download::<f32>(&t).unwrap(), [5.0, 6.0]);
    }
}
