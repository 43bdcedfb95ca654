//! Expected split sizes (`moe.split_headroom`): steps have the bits of steps whose host reads the counts, also where messages do
//! not hold the tokens, and nothing is read from or written to the device while passes are launched.

use super::*;
use ferrotron_core::ranks::{DEFAULT_TIMEOUT, on_one_device};
use ferrotron_core::train::{InFlightStep, StepMetrics, StepReport, Trainer};
use ferrotron_engine::moe::SplitHeadroom;
use ferrotron_tensor::Instrumentation;
use ferrotron_tensor::trace::{Activity, Trace};

const STEPS: usize = 5;

/// No room at all: sizes are the largest counts so far, so that messages overflow in most steps.
const NONE: SplitHeadroom = SplitHeadroom { share: 0.0, rows: 0, multiple: 1, calm: 0 };

/// Sizes with this headroom, from the second step on.
fn at_once(share: f64) -> SplitHeadroom {
    SplitHeadroom { calm: 0, ..SplitHeadroom::new(share) }
}

/// Reports and MoE metrics of some steps, then gradients, weights, optimizer state and expert tables.
#[derive(Debug, PartialEq)]
struct Made {
    reports: Vec<StepReport>,
    loads: Vec<StepMetrics>,
    tensors: Vec<LogicalValues>,
    /// Persistent tensors as they are stored.
    saved: Vec<(String, Vec<u8>)>,
}

/// Trains on every rank; with `ahead` as in a run on a GPU, where a step is launched before the one before it is read. Returns the
/// number of overflows too.
fn train(text: &str, set: &[&str], headroom: Option<SplitHeadroom>, ahead: bool) -> Vec<(Made, u64)> {
    let mut keys = keys(set);
    keys.push("moe.log=all".into());
    let (resolved, at) = recipe(&layout(text), &keys);
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let work = |rank| {
        let data = Numbers::of(&resolved);
        let mut t = Trainer::new(rank, &resolved)?;
        if let Some(headroom) = headroom {
            t.expect_split_sizes(headroom)?;
        }
        let (mut reports, mut loads) = (Vec::new(), Vec::new());
        let mut last: Option<InFlightStep> = None;
        for i in 0..=STEPS {
            let new = (i < STEPS).then(|| t.begin_step(&data)).transpose()?;
            let ended = match ahead {
                true => std::mem::replace(&mut last, new),
                false => new,
            };
            if let Some(step) = ended {
                reports.push(t.end_step(step, &mut last)?);
                loads.push(t.take_moe_metrics()?);
            }
        }
        let mut tensors = t.gradients()?;
        tensors.extend(t.weights()?);
        tensors.extend(t.expert_tables()?);
        let items = t.snapshot()?.items;
        let saved = items.into_iter().map(|i| (i.name.clone(), i.bytes.to_vec())).collect();
        Ok((Made { reports, loads, tensors, saved }, t.split_overflows()))
    };
    if test_on_gpu() {
        let rank = Rank::cuda(0, 1, 1234, watch).unwrap().0;
        return on_one_device(&at, DEFAULT_TIMEOUT, &rank, work).unwrap();
    }
    let timeout = std::time::Duration::from_secs(60);
    on_threads_with(&at, timeout, Default::default(), || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work)
        .unwrap()
}

/// Bit patterns, so that -0 differs from 0 and NaN equals itself.
fn bits(t: &LogicalValues) -> Vec<u32> {
    t.values.iter().map(|x| x.to_bits()).collect()
}

/// Compares with `exact`, steps whose host reads the counts. Returns the number of overflows.
fn equal((text, set): (&str, &[&str]), exact: &[(Made, u64)], headroom: SplitHeadroom, ahead: bool) -> u64 {
    let expected = train(text, set, Some(headroom), ahead);
    let overflows = expected[0].1;
    for (rank, ((exact, none), (expected, n))) in exact.iter().zip(&expected).enumerate() {
        let what = format!("{text} {set:?} {headroom:?} ahead {ahead} rank {rank}");
        assert_eq!((*none, *n), (0, overflows), "{what}: ranks differ in what they ran again");
        assert!(exact.reports.iter().all(|r| r.loss > 1.0 && r.grad_norm > 0.0), "{what}");
        assert_eq!(exact.reports, expected.reports, "{what}");
        assert_eq!(exact.loads, expected.loads, "{what}");
        assert_eq!(exact.tensors.len(), expected.tensors.len(), "{what}");
        for (a, b) in exact.tensors.iter().zip(&expected.tensors) {
            assert_eq!((&a.name, bits(a)), (&b.name, bits(b)), "{what}");
        }
        for (a, b) in exact.saved.iter().zip(&expected.saved) {
            assert!(a == b, "{what}: {} differs", a.0);
        }
        assert_eq!(exact.saved.len(), expected.saved.len(), "{what}");
    }
    overflows
}

/// With headroom and without, each step launched before the one before it is read.
fn always_equal(text: &str, set: &[&str]) {
    let exact = train(text, set, None, false);
    assert_eq!(equal((text, set), &exact, at_once(2.0), true), 0, "{text} {set:?}");
    let overflows = equal((text, set), &exact, NONE, true);
    assert!(overflows > 0, "{text} {set:?}: nothing was run again");
}

#[test]
fn every_layout_keeps_its_bits() {
    for text in
        ["ep=2", "ep=4", "ep=2,etp=2", "tp=2,ep=2,etp=1", "tp=2,ep=2", "cp=2,ep=2", "pp=2,ep=2", "ep=2,dp=4"]
    {
        always_equal(
            text,
            &["moe.balance=[\"aux\",\"global_aux\"]", "moe.z_loss=0.01", "dropout.hidden=0.1"],
        );
    }
    let exact = train("ep=2", &[], None, false);
    assert!(equal(("ep=2", &[]), &exact, NONE, false) > 0, "not launched ahead");
}

#[test]
fn the_paired_schedule_and_recomputation_keep_their_bits() {
    for set in [
        &["parallel.schedule=paired"][..],
        &["train.recompute=full"],
        &["train.recompute=[\"mlp\",\"activation\",\"norm\"]", "parallel.schedule=paired"],
        &["mtp.layers=2", "mtp.shared_layer=true", "train.recompute=full"],
        &["parallel.zero=3", "moe.latent=24", "moe.shared_gate=true"],
        &["moe.capacity=1.0", "moe.balance=aux", "moe.bias=true"],
    ] {
        always_equal("ep=2", set);
    }
    always_equal("pp=2,ep=2", &["parallel.schedule=paired"]);
}

/// What changes before the optimizer's part of a step is put back before it runs again.
#[test]
fn biases_and_quantiles_move_once() {
    for set in [
        &["moe.score_function=sigmoid", "moe.expert_bias=true", "moe.bias_rate=0.01"][..],
        &["moe.balance=quantile", "moe.quantile_keep=0.9"],
    ] {
        always_equal("ep=2", set);
        always_equal("pp=2,ep=2", set);
    }
}

#[test]
fn fp8_recipes_keep_their_bits() {
    let (dtype, shared) = ("precision.dtype=bf16", "moe.shared_ffn=32");
    for recipe in ["fp8-current", "fp8-delayed"] {
        always_equal("ep=2", &[dtype, shared, &format!("precision.recipe={recipe}")]);
    }
    let sizes = ["precision.recipe=fp8-block", "moe.ffn=128", "model.hidden=128"];
    always_equal("ep=2", &[&[dtype, shared], &sizes[..]].concat());
    let params = ["precision.recipe=fp8-delayed", "precision.fp8_params=true"];
    always_equal("pp=2,ep=2", &[&[dtype, shared], &params[..]].concat());
}

/// A step with known sizes reads nothing from the device, and writes what a step without MoE layers writes.
#[test]
fn the_host_reads_and_writes_nothing_in_a_steady_step() {
    let copies = |expects: bool| {
        let set = keys(&["train.global_batch=4", "moe.dense_layers=[]"]);
        let (resolved, at) = recipe(&layout("ep=2"), &set);
        let watch = Instrumentation { trace: true, ..Instrumentation::default() };
        let make = || Ok(Rank::cpu_instrumented(1, 1234, watch)?);
        on_threads_with(&at, DEFAULT_TIMEOUT, Default::default(), make, |rank| {
            let mut t = Trainer::new(rank.clone(), &resolved)?;
            if expects {
                t.expect_split_sizes(at_once(8.0))?;
            }
            for _ in 0..2 {
                t.train_step(&Numbers::of(&resolved))?;
            }
            rank.world.all().barrier("traced")?;
            rank.device().start_trace()?;
            let step = t.begin_step(&Numbers::of(&resolved))?;
            let trace = rank.device().take_trace()?;
            t.end_step(step, &mut None)?;
            Ok(trace)
        })
        .unwrap()
        .into_iter()
        .map(|trace: Trace| {
            let own = |a: &&Activity| a.stream_name == "compute" && !a.in_collective;
            assert!(trace.activities.iter().filter(own).count() > 100, "{trace:?}");
            ["download", "upload"]
                .map(|n| trace.activities.iter().filter(own).filter(|a| a.name == n).count())
        })
        .collect::<Vec<_>>()
    };
    for (exact, expected) in copies(false).into_iter().zip(copies(true)) {
        // Four layers and two micro-batches: each reads the counts and writes the experts of received rows.
        assert_eq!([exact[0] - expected[0], exact[1] - expected[1]], [8, 8], "{exact:?} {expected:?}");
        assert_eq!(expected[0], 0, "{expected:?}");
    }
}
