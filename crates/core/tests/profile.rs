//! Profiles: their parts add up, and the expected gain of every change is what its formula gives by hand.
#![allow(clippy::unwrap_used)] // all of it is test

use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::cost::roofline::{Ceilings, KernelCategory};
use ferrotron_core::profile::{DeviceRates, Measurement, Price, Profile};
use ferrotron_tensor::MemoryReport;
use ferrotron_tensor::trace::{Activity, ActivityKind, STEP, Trace};

const CEILINGS: Ceilings = Ceilings { gemm: 1.0, fp8_gemm: None, attention: (1.0, 1.0), memory: 100.0 };
const TOKENS: u64 = 32 * 128;

fn resolved(set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.set_all(&["data.seq_len=128", "train.global_batch=32", "train.micro_batch=32"]).unwrap();
    recipe.set_all(set).unwrap();
    recipe.resolve(None).unwrap()
}

/// One step of a rank: kernels one after the other, in milliseconds, then nothing until its end.
fn step(rank: usize, kernels: &[(&str, u64)], end: u64) -> Vec<Activity> {
    let activity = |name: &str, kind, [start, end]: [u64; 2]| Activity {
        name: name.into(),
        detail: "dp: 'gradients'".into(),
        kind,
        in_collective: false,
        rank,
        stream: 0,
        stream_name: "compute".into(),
        start: start * 1_000_000,
        end: end * 1_000_000,
    };
    let mut out = vec![activity(STEP, ActivityKind::Region, [0, end])];
    let mut at = 0;
    for (name, ms) in kernels {
        let kind = if *name == "all-reduce" { ActivityKind::Collective } else { ActivityKind::Kernel };
        out.push(activity(name, kind, [at, at + ms]));
        at += ms;
    }
    out
}

fn measurement<'a>(r: &'a Resolved, trace: &'a Trace) -> Measurement<'a> {
    Measurement {
        resolved: r,
        trace,
        step_s: None,
        tokens: TOKENS,
        context: 128,
        rates: Some(DeviceRates { ceilings: CEILINGS, bf16_gemm: None, fp8_gemm: None }),
        capacity: Some(64 << 30),
        on_gpu: false,
        memory: MemoryReport::default(),
    }
}

fn trace(kernels: &[(&str, u64)], end: u64) -> Trace {
    Trace { activities: step(0, kernels, end), ..Trace::default() }
}

/// Settings and expected gain in milliseconds.
fn advice(m: &Measurement) -> Vec<(String, f64)> {
    let p = Profile::new(m).unwrap();
    p.advice.iter().map(|a| (a.settings.join(" "), a.gain_s * 1e3)).collect()
}

fn gain(m: &Measurement, settings: &str) -> Option<f64> {
    advice(m).into_iter().find(|(s, _)| s == settings).map(|(_, gain)| gain)
}

fn close(a: Option<f64>, b: f64) {
    assert!(a.is_some_and(|a| (a - b).abs() < 1e-6 * b.abs().max(1.0)), "{a:?} instead of {b}");
}

#[test]
fn nothing_stands_out_of_a_step_of_attention() {
    let (r, t) = (resolved(&[]), trace(&[("attention_forward", 40), ("attention_backward", 60)], 100));
    let p = Profile::new(&measurement(&r, &t)).unwrap();
    assert_eq!(p.advice, []);
    assert_eq!((p.ranks, p.steps, p.step_s), (1, 1, 0.1));
    let [family] = &p.families[..] else { panic!("{:?}", p.families) };
    assert_eq!(
        (family.category, family.measured_s, family.kernels.len()),
        (KernelCategory::Attention, 0.1, 2)
    );
    assert!(family.floor_s.unwrap() > 0.0);
    // Without a step there is nothing to advise.
    let empty = Trace::default();
    assert_eq!(Profile::new(&measurement(&r, &empty)).unwrap().advice, []);
}

#[test]
fn a_larger_batch_shares_the_optimizer() {
    let (r, t) = (resolved(&[]), trace(&[("attention_forward", 60), ("adam", 40)], 100));
    close(gain(&measurement(&r, &t), "train.global_batch=64"), 20.0);
    let p = Profile::new(&measurement(&r, &t)).unwrap();
    assert_eq!(p.advice.last().unwrap().price, Price::Batch);
    // Also where the length of the run is given in tokens.
    let r = resolved(&["train.tokens=10000000"]);
    close(gain(&measurement(&r, &t), "train.global_batch=64"), 20.0);
}

#[test]
fn bf16_gains_what_its_gemms_are_faster() {
    let (r, t) = (resolved(&["precision.dtype=f32"]), trace(&[("gemm (output)", 60), ("rope", 40)], 100));
    let mut m = measurement(&r, &t);
    assert_eq!(advice(&m), []);
    m.rates = Some(DeviceRates { bf16_gemm: Some(4.0), ..m.rates.unwrap() });
    close(gain(&m, "precision.dtype=bf16"), 45.0);
    // Traced kernels were half as fast as those of the other steps.
    close(gain(&Measurement { step_s: Some(0.05), ..m.clone() }, "precision.dtype=bf16"), 22.5);
    // On a CPU whose bf16 is slower there is none to gain.
    m.rates = Some(DeviceRates { bf16_gemm: Some(0.9), ..m.rates.unwrap() });
    assert_eq!(advice(&m), []);
}

#[test]
fn recomputation_costs_its_share_of_the_work() {
    let (r, t) = (resolved(&["train.recompute=full"]), trace(&[("gemm (output)", 100)], 100));
    let m = measurement(&r, &t);
    let c = &r.model;
    let (h, heads, kv) = (c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let layer = h * heads + 2 * h * kv + heads * h + h * c.ffn * if c.gated { 3 } else { 2 };
    // The output of the last linear of a layer is not needed again.
    let (all, again) = (c.layers * layer + h * c.vocab, c.layers * (layer - h * c.ffn));
    let share = again as f64 / (3 * all + again) as f64;
    close(gain(&m, "train.recompute=none"), 100.0 * share);
    // With no memory for it, nothing is said.
    assert_eq!(advice(&Measurement { capacity: Some(1 << 20), ..m.clone() }), []);
    assert_eq!(advice(&Measurement { capacity: None, ..m }), []);
}

#[test]
fn fewer_micro_batches_have_fewer_gaps() {
    let (r, t) = (resolved(&["train.micro_batch=8"]), trace(&[("attention_forward", 70)], 100));
    let m = measurement(&r, &t);
    close(gain(&m, "train.micro_batch=16"), 15.0);
    // Tracing makes gaps longer: a step that was not traced has gaps of 10 ms.
    close(gain(&Measurement { step_s: Some(0.08), ..m.clone() }, "train.micro_batch=16"), 5.0);
    assert_eq!(advice(&Measurement { step_s: Some(0.07), ..m }), []);
}

#[test]
fn replicas_share_the_optimizer_and_hide_communication() {
    let r = resolved(&["parallel.dp=2", "parallel.zero=0", "parallel.overlap=false", "train.micro_batch=16"]);
    let kernels = [("attention_forward", 50), ("all-reduce", 30), ("adam", 20)];
    let activities = [step(0, &kernels, 100), step(1, &kernels, 100)].concat();
    let t = Trace { activities, ..Trace::default() };
    let m = measurement(&r, &t);
    close(gain(&m, "parallel.zero=1"), 10.0);
    close(gain(&m, "parallel.overlap=true"), 30.0);
    close(gain(&m, "train.global_batch=64"), 25.0);
    let p = Profile::new(&m).unwrap();
    // The cheapest first.
    assert!(p.advice.is_sorted_by_key(|a| a.price), "{:?}", p.advice);
    assert_eq!((p.breakdown[1].exposed_communication, p.breakdown[1].compute), (0.03, 0.07));
    assert_eq!((p.communication[0].calls, p.communication[0].exposed), (2, 0.03));
    // The work of a rank is half of the step's, but for the optimizer, which every replica has.
    let alone = resolved(&["train.micro_batch=16"]);
    let floors = |r: &Resolved| Profile::new(&measurement(r, &t)).unwrap();
    let floor = |p: &Profile, c| p.family(c).unwrap().floor_s.unwrap();
    let (two, one) = (floors(&r), floors(&alone));
    let ratio = |c| floor(&two, c) / floor(&one, c);
    assert!((ratio(KernelCategory::Attention) - 0.5).abs() < 1e-9);
    assert!((ratio(KernelCategory::Optimizer) - 1.0).abs() < 1e-9);
}

#[test]
fn a_pipeline_gains_what_its_bubble_loses() {
    let r = resolved(&["parallel.pp=2", "train.micro_batch=8"]);
    let kernels = [("attention_forward", 60)];
    let activities = [step(0, &kernels, 100), step(1, &kernels, 100)].concat();
    let t = Trace { activities, ..Trace::default() };
    let found = advice(&measurement(&r, &t));
    // Four micro-batches on two stages: a bubble of 1/5; with twice as many, of 1/9; the zero-bubble schedule has less.
    let (settings, gain) = found.first().unwrap();
    assert!(settings.starts_with("parallel.") || settings.starts_with("train.micro_batch="), "{found:?}");
    assert!(*gain >= 100.0 * (1.0 - 0.8 / (8.0 / 9.0)) - 1e-9 && *gain < 20.0, "{found:?}");
}

#[test]
fn at_most_five_changes_and_none_that_is_refused() {
    let set = [
        "train.recompute=full",
        "train.micro_batch=4",
        "precision.dtype=f32",
        "parallel.dp=2",
        "parallel.zero=3",
    ];
    let r = resolved(&[&set[..], &["parallel.overlap=false"]].concat());
    let kernels = [("gemm (output)", 40), ("all-reduce", 20), ("adam", 20)];
    let activities = [step(0, &kernels, 100), step(1, &kernels, 100)].concat();
    let t = Trace { activities, ..Trace::default() };
    let mut m = measurement(&r, &t);
    m.rates = Some(DeviceRates { bf16_gemm: Some(4.0), ..m.rates.unwrap() });
    let p = Profile::new(&m).unwrap();
    assert_eq!(p.advice.len(), 5, "{:?}", p.advice);
    for a in &p.advice {
        let mut recipe = Recipe::of_config(r.config.clone());
        recipe.set_all(&a.settings).unwrap();
        recipe.resolve(None).unwrap();
        assert!(a.gain_s > 0.001 && a.gain_s < 0.1, "{a:?}");
    }
}
