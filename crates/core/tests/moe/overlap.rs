//! Paired forward and backward passes (EP overlap): bit-equal to 1F1B, and each pass computes while the other's exchange is
//! in flight.

use super::*;
use ferrotron_core::cost::Traffic;
use ferrotron_core::ranks::{DEFAULT_TIMEOUT, on_one_device};
use ferrotron_core::train::{StepMetrics, StepReport, Trainer};
use ferrotron_tensor::trace::{ActivityKind, Trace};
use ferrotron_tensor::{Device, Instrumentation};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Reports and MoE metrics of two steps, then gradients, weights and expert biases; and bytes sent by group and collective.
#[derive(Debug, PartialEq)]
struct Made {
    reports: Vec<StepReport>,
    loads: Vec<StepMetrics>,
    tensors: Vec<LogicalValues>,
    sent: BTreeMap<String, BTreeMap<String, u64>>,
}

fn make(text: &str, schedule: &str, set: &[&str]) -> Vec<Made> {
    let mut keys = keys(set);
    keys.push(format!("parallel.schedule={schedule}"));
    keys.push("moe.log=all".into());
    let (resolved, at) = recipe(&layout(text), &keys);
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let work = |rank| {
        let data = Numbers::of(&resolved);
        let mut trainer = Trainer::new(rank, &resolved)?;
        let (mut reports, mut loads) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            reports.push(trainer.train_step(&data)?);
            loads.push(trainer.take_moe_metrics()?);
        }
        let sent = Traffic::of(&trainer.rank).by_kind();
        let mut tensors = trainer.gradients()?;
        tensors.extend(trainer.weights()?);
        tensors.extend(trainer.expert_tables()?);
        Ok(Made { reports, loads, tensors, sent })
    };
    if test_on_gpu() {
        let rank = Rank::cuda(0, 1, 1234, watch).unwrap().0;
        return on_one_device(&at, DEFAULT_TIMEOUT, &rank, work).unwrap();
    }
    let timeout = std::time::Duration::from_secs(30);
    on_threads_with(&at, timeout, Default::default(), || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work)
        .unwrap()
}

/// Bit patterns, so that -0 differs from 0 and NaN equals itself.
fn bits(t: &LogicalValues) -> Vec<u32> {
    t.values.iter().map(|x| x.to_bits()).collect()
}

fn equal(text: &str, set: &[&str]) {
    let (plain, paired) = (make(text, "1f1b", set), make(text, "paired", set));
    let exchanged = |m: &Made| m.sent.values().any(|group| group.contains_key("all-to-all"));
    assert!(plain.iter().any(exchanged), "{text} {set:?}: {:?}", plain[0].sent);
    for (rank, (plain, paired)) in plain.iter().zip(&paired).enumerate() {
        let what = format!("{text} {set:?} rank {rank}");
        assert!(
            plain.reports.iter().all(|r| r.loss > 1.0 && r.grad_norm > 0.0),
            "{what}: {:?}",
            plain.reports
        );
        assert_eq!(plain.reports, paired.reports, "{what}");
        assert_eq!(plain.loads, paired.loads, "{what}");
        // Sharded weights are not gathered again where they still are, which depends on the order of passes.
        if !set.contains(&"parallel.zero=3") {
            assert_eq!(plain.sent, paired.sent, "{what}");
        }
        assert_eq!(plain.tensors.len(), paired.tensors.len(), "{what}");
        for (a, b) in plain.tensors.iter().zip(&paired.tensors) {
            assert_eq!((&a.name, bits(a)), (&b.name, bits(b)), "{what}");
        }
    }
}

#[test]
fn every_layout_is_bit_equal_to_1f1b() {
    for text in [
        "ep=2",
        "ep=4",
        "ep=2,etp=2",
        "tp=2,etp=1,ep=2",
        "tp=2",
        "cp=2,ep=2",
        "pp=2,ep=2",
        "pp=4,ep=2",
        "pp=2,ep=2,etp=2",
        "pp=2,vp=2,ep=2",
        "tp=2,pp=2,vp=2,ep=2,etp=1",
        "tp=2,pp=2,vp=2,ep=2",
        "ep=2,dp=2",
    ] {
        equal(text, &["moe.balance=[\"aux\",\"global_aux\"]", "moe.z_loss=0.01", "dropout.hidden=0.1"]);
    }
}

#[test]
fn every_moe_option_is_bit_equal_to_1f1b() {
    for set in [
        &["moe.dense_layers=[0,2]"][..],
        &["moe.layer_freq=2"],
        &["moe.capacity=0.75", "moe.balance=aux", "moe.bias=true", "moe.router_bias=true"],
        &["moe.capacity=1.0", "moe.pad_to_capacity=true", "moe.latent=24", "data.reset_at_documents=true"],
        &["moe.score_function=sigmoid", "moe.expert_bias=true", "moe.groups=[4,2]", "moe.shared_gate=true"],
        &["moe.balance=quantile"],
        &["moe.balance=sinkhorn", "moe.jitter=0.1"],
        &["mtp.layers=2", "moe.balance=global_aux"],
        &["mtp.layers=2", "mtp.shared_layer=true", "train.recompute=full"],
        &["train.recompute=full", "moe.balance=aux", "moe.jitter=0.1", "moe.capacity=1.0"],
        &["train.recompute=[\"mlp\"]", "moe.balance=global_aux"],
        &["train.recompute=[\"attention\",\"norm\",\"activation\"]"],
        &["parallel.zero=2", "parallel.comm_unit=16000"],
        &["parallel.zero=3", "train.recompute=full"],
        &["parallel.zero=3", "parallel.comm_unit=1"],
        &["parallel.zero=0", "parallel.overlap=false"],
        &["precision.dtype=bf16"],
        &["precision.dtype=bf16", "precision.recipe=fp8-delayed", "moe.shared_ffn=32"],
        &[
            "precision.dtype=bf16",
            "precision.recipe=fp8-current",
            "precision.fp8_params=true",
            "moe.shared_ffn=32",
        ],
    ] {
        for text in ["ep=2", "pp=2,ep=2"] {
            equal(text, set);
        }
    }
    for set in [&["parallel.zero=3"][..], &["parallel.zero=3", "mtp.layers=1", "parallel.comm_unit=1MB"]] {
        for text in ["ep=2,dp=4", "pp=2,ep=2,dp=4"] {
            equal(text, set);
        }
    }
}

/// As many micro-batches as stages, fewer, and one.
#[test]
fn any_number_of_micro_batches_is_bit_equal() {
    for text in ["ep=2", "pp=2,ep=2", "pp=4,ep=2", "pp=2,vp=2,ep=2"] {
        let dp = Grid::of(recipe(&layout(text), &[]).1).unwrap().dp();
        for count in [1, 2, 3, 5] {
            equal(text, &[&format!("train.global_batch={}", count * dp), "moe.dense_layers=[]"]);
        }
    }
}

/// Launches of each rank in a step, in order.
fn trace(text: &str, schedule: &str, set: &[&str]) -> Vec<Vec<(ActivityKind, String)>> {
    let mut keys = keys(set);
    keys.extend([format!("parallel.schedule={schedule}"), "train.global_batch=8".into()]);
    let (resolved, at) = recipe(&layout(text), &keys);
    let devices: Mutex<Vec<Device>> = Mutex::default();
    let watch = Instrumentation { trace: true, ..Instrumentation::default() };
    let make = || {
        let rank = Rank::cpu_instrumented(1, 1234, watch)?;
        rank.device().start_trace()?;
        devices.lock().unwrap().push(rank.device().clone());
        Ok(rank)
    };
    let timeout = std::time::Duration::from_secs(30);
    let ranks = on_threads_with(&at, timeout, Default::default(), make, |rank| {
        let mut trainer = Trainer::new(rank, &resolved)?;
        trainer.train_step(&Numbers::of(&resolved))
    });
    let count = ranks.unwrap().len();
    let all = Trace::merge(devices.lock().unwrap().iter().map(|d| d.take_trace().unwrap()));
    let of = |rank| {
        let mine = all.activities.iter().filter(|a| a.rank == rank && !a.in_collective);
        mine.map(|a| {
            (a.kind, if a.kind == ActivityKind::Collective { a.detail.clone() } else { a.name.clone() })
        })
        .collect()
    };
    (0..count).map(of).collect()
}

/// Exchanges in order, as letters: dispatch (t), combine (r), combine backward (g), dispatch backward (d).
fn exchanges(trace: &[(ActivityKind, String)]) -> String {
    let letter = |(kind, name): &(ActivityKind, String)| {
        let rows =
            [("tokens for", 't'), ("results of", 'r'), ("gradients for", 'g'), ("gradients of tokens", 'd')];
        let found = rows.iter().find(|(label, _)| name.contains(&format!("'{label}")));
        found.filter(|_| *kind == ActivityKind::Collective).map(|(_, letter)| *letter)
    };
    trace.iter().filter_map(letter).collect()
}

/// Two MoE layers, four micro-batches: in a pair each exchange begins before the other pass finishes its expert compute, and
/// compute lies between any two exchanges.
#[test]
fn exchanges_of_one_pass_overlap_compute_of_the_other() {
    let set = ["model.layers=2", "moe.dense_layers=[]"];
    let (forward, backward, pair) = ("trtr", "gdgd", "gtdrgtdr");
    let repeat = |text: &str, n| text.repeat(n);
    for plain in trace("ep=2", "1f1b", &set) {
        assert_eq!(exchanges(&plain), repeat(&format!("{forward}{backward}"), 4));
    }
    for paired in trace("ep=2", "paired", &set) {
        assert_eq!(exchanges(&paired), format!("{forward}{}{backward}", repeat(pair, 3)));
        let rows: Vec<usize> =
            (0..paired.len()).filter(|i| !exchanges(&paired[*i..=*i]).is_empty()).collect();
        for between in rows.windows(2).map(|w| &paired[w[0]..w[1]]) {
            let products = between.iter().filter(|(kind, name)| {
                *kind == ActivityKind::Kernel && ["gemm", "grouped"].iter().any(|p| name.contains(p))
            });
            assert!(products.count() > 0, "{between:?}");
        }
    }
    // Four layers on two stages with vp = 2; on the last stage the first pair is of different chunks.
    let set = ["moe.dense_layers=[]"];
    for paired in trace("pp=2,vp=2,ep=2", "paired", &set) {
        assert!(exchanges(&paired).contains("gtdr"), "{}", exchanges(&paired));
    }
    // Where only one of the two passes has MoE layers, the other still overlaps with it.
    for (dense, mixed) in [("moe.dense_layers=[0]", "tr"), ("moe.dense_layers=[1]", "tr")] {
        for paired in trace("ep=2", "paired", &["model.layers=2", dense]) {
            assert_eq!(exchanges(&paired), format!("{mixed}{}gd", repeat("gtdr", 3)));
        }
    }
}

#[test]
fn pairing_without_expert_parallelism_is_refused() {
    for (set, way) in [
        (&["parallel.schedule=paired"][..], "parallel.ep"),
        (
            &["parallel.schedule=paired", "parallel.dp=2", "parallel.ep=2", "moe.dispatcher=all_gather"],
            "moe.dispatcher",
        ),
    ] {
        let mut recipe = Recipe::named("tiny").unwrap();
        recipe.add("model.toml", MODEL).unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        let e = recipe.resolve(None).err().unwrap().to_string();
        assert!(e.contains("parallel.schedule") && e.contains(way), "{e}");
    }
    let mut dense = Recipe::named("tiny").unwrap();
    dense.set("parallel.schedule=paired").unwrap();
    assert!(dense.resolve(None).is_err());
}
