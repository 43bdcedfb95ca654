//! Inverted bits.

use super::*;

/// Steps of an interval between verifications.
const EVERY: u64 = 3;

/// A reproducible random number.
fn draw(seed: u64, n: u64) -> u64 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) % n
}

const LAYOUTS: [&[&str]; 5] = [
    &["parallel.dp=4", "parallel.zero=0"],
    &["parallel.dp=4", "parallel.zero=1"],
    &["parallel.dp=4", "parallel.zero=3"],
    &["parallel.tp=2", "parallel.dp=2", "parallel.zero=1"],
    &["parallel.pp=2", "parallel.dp=2", "parallel.zero=1"],
];

/// An injected flip: its rank and step, and the entry.
struct Flip {
    rank: u64,
    step: u64,
    entry: String,
}

/// One flip in each of `count` intervals.
fn flips(seed: u64, count: u64, set: &[&str]) -> Vec<Flip> {
    let targets = ["weight", "gradient", "activation", "optimizer"];
    let flip = |i: u64| {
        let pick = |k: u64, n: u64| draw(seed * 1000 + i * 10 + k, n);
        let target = targets[(i % 4) as usize];
        let (rank, step) = (pick(0, 4), i * EVERY + 1 + pick(1, EVERY));
        // Sign, exponent and mantissa.
        let bit = [31, 30, 29, 27, 24, 22, 20, 15, 10, 5, 0][pick(2, 11) as usize];
        let element = pick(3, 1 << 40);
        let mut entry = format!("flip:target={target},rank={rank},step={step},bit={bit},element={element}");
        // The sum after the first of the micro-batches, where it is whole.
        if target == "gradient" && pick(4, 2) == 0 && !set.contains(&"parallel.zero=3") {
            entry += ",micro_batch=0";
        }
        Flip { rank, step, entry }
    };
    (0..count).map(flip).collect()
}

/// Runs a layout with flips. Returns how many were found; those that were not have changed nothing.
fn found(seed: u64, count: u64, set: &[&str]) -> usize {
    let flips = flips(seed, count, set);
    let steps = format!("train.steps={}", count * EVERY);
    let keys = [set, &[steps.as_str()]].concat();
    let plain = recipe(false, &strings(&keys));
    let folder = tempfile::tempdir().unwrap();
    let clean = folder.path().join("clean");
    let (_, wanted) = train(&clean, &plain).unwrap();
    let entries: Vec<String> = flips.iter().map(|f| format!("{:?}", f.entry)).collect();
    let mut keys = strings(&keys);
    keys.extend(strings(&["fault.snapshot_every=2", "fault.rank_failures=1000000"]));
    keys.push(format!("fault.verify_every={EVERY}"));
    keys.push(format!("fault.inject=[{}]", entries.join(",")));
    let dir = folder.path().join("flips");
    let (outcome, weights) = train(&dir, &recipe(false, &keys)).unwrap_or_else(|e| panic!("{set:?}: {e}"));
    assert!(outcome.finished);
    equal(&format!("{set:?} seed {seed}"), &weights, &wanted);
    assert_eq!(losses(&dir), losses(&clean), "{set:?}: corrected steps are logged again");
    let (reruns, faults) = logged(&dir);
    for f in &faults {
        let interval = (f.step - 1) / EVERY;
        let flip = &flips[interval as usize];
        assert!(f.step >= flip.step && f.step <= (interval + 1) * EVERY, "{f:?} of {}", flip.entry);
        assert_eq!(f.rank, flip.rank, "{set:?}: {f:?} of {}", flip.entry);
        assert!(f.first_run && !f.tensor.is_empty() && !f.host.is_empty(), "{f:?}");
        assert!(f.at_step.is_none_or(|at| at >= flip.step), "{f:?} of {}", flip.entry);
    }
    assert!(reruns.len() as u64 >= count, "every interval is verified");
    faults.len()
}

#[test]
fn flips_are_found_in_their_interval_attributed_and_undone() {
    let count = std::env::var("FERROTRON_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(8);
    let mut all = 0;
    for (seed, set) in LAYOUTS.iter().enumerate() {
        let n = found(seed as u64 + 1, count, set);
        println!("{set:?}: {n} of {count} flips changed something and were found");
        all += n;
    }
    println!("{all} of {} flips were found; the others changed no parameter", count * LAYOUTS.len() as u64);
    assert!(all as u64 * 2 > count * LAYOUTS.len() as u64, "most flips change something: {all}");
}

/// Without verification the same flips change the run: the test above could fail.
#[test]
fn flips_change_a_run_that_does_not_verify() {
    let set = ["parallel.dp=4", "parallel.zero=1", "train.steps=4"];
    let folder = tempfile::tempdir().unwrap();
    let (_, wanted) = train(&folder.path().join("clean"), &recipe(false, &strings(&set))).unwrap();
    for target in ["weight", "gradient", "activation", "optimizer"] {
        let mut keys = strings(&set);
        keys.push(format!("fault.inject=[\"flip:target={target},rank=1,step=2,bit=29,element=12345\"]"));
        let (_, weights) = train(&folder.path().join(target), &recipe(false, &keys)).unwrap();
        let same = weights.iter().zip(&wanted).all(|(a, b)| a.values == b.values);
        assert!(!same, "a flipped {target} changed nothing");
    }
}

#[test]
fn a_replica_whose_parameters_differ_is_found_by_their_hashes() {
    let set = ["parallel.dp=4", "parallel.zero=0", "train.steps=8"];
    let folder = tempfile::tempdir().unwrap();
    let (_, wanted) = train(&folder.path().join("clean"), &recipe(false, &strings(&set))).unwrap();
    let mut keys = strings(&set);
    keys.extend(strings(&["fault.snapshot_every=4", "fault.hash_every=4"]));
    keys.push("fault.inject=[\"flip:target=optimizer,tensor=model,rank=2,step=6,bit=22,element=77\"]".into());
    let dir = folder.path().join("flip");
    let (_, weights) = train(&dir, &recipe(false, &keys)).unwrap();
    equal("hashes of replicas", &weights, &wanted);
    let (reruns, faults) = logged(&dir);
    assert_eq!(faults.iter().map(|f| (f.rank, f.step)).collect::<Vec<_>>(), [(2, 8)]);
    assert_eq!(reruns[0].reason, "parameters of replicas differ");
}

#[test]
fn a_rank_that_fails_again_and_again_ends_the_job_by_name() {
    let set = ["parallel.dp=2", "train.steps=8", "fault.snapshot_every=2", "fault.verify_every=2"];
    let mut keys = strings(&set);
    keys.push("fault.rank_failures=2".into());
    keys.push(
        "fault.inject=[\"flip:target=optimizer,rank=1,step=1\", \"flip:target=optimizer,rank=1,step=5\"]"
            .into(),
    );
    let folder = tempfile::tempdir().unwrap();
    let e = train(folder.path(), &recipe(false, &keys)).unwrap_err();
    assert_eq!(e.exit_code(), Some(16), "{e}");
    assert!(e.to_string().contains("rank 1 (") && e.to_string().contains("2 times"), "{e}");
}

/// Clean steps report nothing. `FERROTRON_CLEAN_STEPS` of them; the ignored test has 10,000.
fn clean(steps: u64) {
    for (set, moe) in [(LAYOUTS[1], false), (&["parallel.dp=2", "parallel.ep=2"][..], true)] {
        let mut keys = strings(set);
        keys.extend(strings(&["fault.snapshot_every=10", "fault.verify_every=10", "fault.hash_every=5"]));
        keys.extend(strings(&["fault.rerun=true", "fault.spike=10"]));
        keys.push(format!("train.steps={steps}"));
        let folder = tempfile::tempdir().unwrap();
        let (outcome, _) = train(folder.path(), &recipe(moe, &keys)).unwrap();
        let (reruns, faults) = logged(folder.path());
        assert!(outcome.finished && faults.is_empty(), "{faults:?}");
        assert_eq!(reruns.len() as u64, steps / 10);
        assert!(reruns.iter().all(|r| r.outcome == RerunOutcome::Same && r.steps == 10), "{reruns:?}");
        let seconds: f64 = reruns.iter().map(|r| r.seconds).sum();
        println!("{set:?}: {steps} clean steps, {} verifications of {seconds:.1} s, no fault", reruns.len());
    }
}

#[test]
fn clean_steps_report_nothing() {
    clean(60);
}

#[test]
#[ignore = "minutes: 10,000 steps"]
fn ten_thousand_clean_steps_report_nothing() {
    clean(10_000);
}
