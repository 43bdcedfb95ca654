//! Memory with offloading: what leaves the device, what the host holds, and that neither grows.

use super::*;
use ferrotron_core::cost::MemoryEstimate;
use ferrotron_tensor::Category;

const ACTIVATIONS: usize = Category::Activations as usize;

#[test]
fn activations_fall_by_the_layers_that_are_offloaded() {
    let peak = |offload: &str| {
        let (_, memory) = run(&recipe(&[offload, "precision.dtype=f32", "data.seq_len=64"]), 2).unwrap();
        (memory[0].peak[ACTIVATIONS], memory[0].host.peak)
    };
    let (all, none) = peak("offload.activations=off");
    assert_eq!(none, 0);
    let mut last = all;
    for k in 1..6 {
        let (device, host) = peak(&format!("offload.activations={k}"));
        // A layer keeps its statistics; besides, the peak need not be where all layers are resident.
        assert!(device < last, "{k} layers: {device} bytes, {last} with one less");
        assert!(all - device <= host, "{k} layers: {device} of {all} bytes, {host} on the host");
        assert!(
            (all - device) as f64 > 0.85 * host as f64,
            "{k} layers: {device} of {all} bytes, {host} on the host"
        );
        last = device;
    }
}

#[test]
fn host_memory_does_not_grow() {
    let settings =
        ["offload.activations=4", "moe.experts=4", "moe.topk=2", "moe.ffn=64", "precision.dtype=f32"];
    let reserved = |steps| {
        let (_, memory) = run(&recipe(&settings), steps).unwrap();
        assert_eq!(memory[0].host.now, 0);
        memory[0].host.reserved
    };
    assert_eq!(reserved(2), reserved(12));
}

#[test]
fn a_budget_that_is_too_small_is_an_error_that_names_it() {
    let e =
        run(&recipe(&["offload.activations=4", "offload.host_budget=\"16KiB\""]), 1).unwrap_err().to_string();
    assert!(e.contains("out of host memory") && e.contains("offload.host_budget"), "{e}");
}

/// What is optional ends no run: "auto" moves what fits in host memory, whatever it would choose without a budget.
#[test]
fn an_automatic_choice_keeps_to_the_budget() {
    for layout in ["parallel.pp=1", "parallel.pp=2"] {
        let run = |offload: &[&str]| {
            let set = [&["precision.dtype=f32", "parallel.schedule=1f1b", layout], offload].concat();
            run(&recipe(&set), 9).unwrap_or_else(|e| panic!("{set:?}: {e}"))
        };
        let (wanted, _) = run(&["offload.activations=off"]);
        let most = run(&["offload.activations=5"]).1.iter().map(|m| m.host.reserved).max().unwrap();
        for budget in (0..12).map(|n| (n * most / 10).max(1)) {
            let limit = format!("offload.host_budget={budget}");
            let (found, memory) = run(&["offload.activations=auto", &limit]);
            assert!(found == wanted, "{layout}, {budget} bytes");
            for m in memory {
                assert!(m.host.reserved <= budget, "{layout}: {} bytes of {budget}", m.host.reserved);
            }
        }
    }
}

/// The estimate of a step counts what moves: by how much the peak falls, and what the host holds.
#[test]
fn the_estimate_counts_what_is_offloaded() {
    const MOE: [&str; 4] = ["moe.experts=4", "moe.topk=4", "moe.ffn=64", "moe.shared_ffn=64"];
    let sets: [&[&str]; 8] = [
        &["offload.activations=1"],
        &["offload.activations=4"],
        &["offload.activations=[\"core_attn\",\"attn_proj\"]"],
        &["offload.activations=[\"mlp_act\",\"fc2\",\"fc1\",\"qkv_linear\"]"],
        &["offload.activations=3", "train.recompute=full"],
        &["offload.activations=2", "precision.recipe=fp8-current"],
        &["offload.activations=3", "offload.optimizer=1", "optimizer.state_dtype=bf16"],
        &["offload.optimizer=0.5"],
    ];
    for (moe, set) in [false, true].into_iter().flat_map(|moe| sets.iter().map(move |set| (moe, set))) {
        let mut all = vec!["precision.dtype=bf16", "data.seq_len=64", "train.micro_batch=2"];
        all.extend(MOE.iter().filter(|_| moe));
        all.extend(*set);
        let of = |more: &[&str]| {
            let r = recipe(&[&all[..], more].concat());
            let (_, memory) = run(&r, 2).unwrap();
            (memory[0].clone(), MemoryEstimate::of(&r).unwrap().largest().unwrap())
        };
        let (without, estimated_without) = of(&["offload.activations=off", "offload.optimizer=0"]);
        let (with, estimated) = of(&[]);
        let near = |what: &str, guess: usize, measured: usize| {
            let error = guess as f64 / measured.max(1) as f64 - 1.0;
            assert!(
                error.abs() <= 0.03 || guess == measured,
                "{what}, moe {moe}, {set:?}: {guess} estimated, {measured}"
            );
        };
        let lower = estimated_without.activations - estimated.activations;
        near("activations", without.peak[ACTIVATIONS] - lower, with.peak[ACTIVATIONS]);
        near("host", estimated.host, with.host.peak);
    }
}

/// After four steps the choice is made, and two steps later its effect is measured, which may change it.
#[test]
fn an_automatic_choice_is_made_and_reported() {
    let reports = |offload: &str| {
        let r = recipe(&[offload, "precision.dtype=f32"]);
        let sources = source::open(&r).unwrap();
        let mut trainer = Trainer::new(Rank::cpu(1, 0).unwrap(), &r).unwrap();
        let mut all = Vec::new();
        for _ in 0..16 {
            trainer.train_step(&*sources.train).unwrap();
            all.push(trainer.offload_report());
        }
        all
    };
    let all = reports("offload.activations=auto");
    assert!(all[3].is_none(), "{all:?}");
    let chosen = all[4].unwrap();
    // How much that is depends on how busy the machine is; never what the last layer saves.
    assert!(chosen.moved < chosen.movable && chosen.measured_stall.is_none(), "{chosen:?}");
    // Times are sums of measured ones: a stall below a nanosecond is rounding.
    assert!(chosen.peak_reduction == chosen.moved && chosen.expected_stall < 1e-9, "{chosen:?}");
    let ran = all[15].unwrap();
    assert!(ran.measured_stall.is_some_and(|stall| stall >= 0.0) && ran.link.from_host > 0.0, "{ran:?}");
    let fixed = reports("offload.activations=2");
    let report = fixed[4].unwrap();
    assert!(report.measured_stall.is_some() && report.moved * 3 == report.movable, "{report:?}");
    assert!(reports("offload.activations=off").iter().all(Option::is_none));
}

/// Several passes of a chunk are in flight in a pipeline; the report is of one micro-batch.
#[test]
fn a_report_is_of_one_micro_batch() {
    let movable = |more: &str| {
        let r = recipe(&["offload.activations=1", "precision.dtype=f32", more]);
        let work = |rank: Rank| {
            let sources = source::open(&r)?;
            let mut trainer = Trainer::new(rank, &r)?;
            for _ in 0..6 {
                trainer.train_step(&*sources.train)?;
            }
            Ok(trainer.offload_report().map(|report| report.movable))
        };
        on_threads(&r.config.parallel.layout(), || Ok(Rank::cpu(1, 0)?), work).unwrap()
    };
    let [Some(all)] = movable("parallel.pp=1")[..] else { panic!("no report") };
    // Three of six layers on each stage.
    assert_eq!(movable("parallel.pp=2"), [Some(all / 2); 2]);
}
