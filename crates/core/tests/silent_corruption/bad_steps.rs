//! NaN in one micro-batch: once it is a fault of the hardware, again and again it is the data's, and the policy decides.

use super::*;
use ferrotron_core::config::BadStepPolicy;
use ferrotron_core::train::{Progress, SavedBatch, Trainer, replay_folder};

const STEPS: u64 = 8;
/// The step whose loss is NaN; steps are run again from the snapshot of step 4.
const BAD: u64 = 6;

const LAYOUTS: [(&[&str], bool); 6] = [
    (&["parallel.dp=1"], false),
    (&["parallel.dp=2", "parallel.zero=1"], false),
    (&["parallel.dp=4", "parallel.zero=0"], false),
    (&["parallel.tp=2", "parallel.dp=2"], false),
    (&["parallel.dp=1"], true),
    (&["parallel.dp=4", "parallel.ep=2"], true),
];

/// A run with NaN in the second micro-batch of the last rank. Twice is as often as the step is run before the policy acts.
fn with_nan(set: &[&str], moe: bool, times: u64, policy: &str) -> Resolved {
    let ranks =
        recipe(moe, &keys(set)).config.parallel.layout().tp * recipe(moe, &keys(set)).config.parallel.dp;
    let mut keys = keys(set);
    keys.extend(strings(&["fault.rerun=true", "fault.snapshot_every=4"]));
    keys.push(format!("fault.on_bad_step={policy}"));
    keys.push(format!("fault.inject=[\"nan:rank={},step={BAD},micro_batch=1,times={times}\"]", ranks - 1));
    recipe(moe, &keys)
}

fn keys(set: &[&str]) -> Vec<String> {
    let mut keys = strings(set);
    keys.push(format!("train.steps={STEPS}"));
    keys
}

/// Weights of a run that makes `kept` steps, drops those up to the bad one, and goes on.
fn dropping(set: &[&str], moe: bool, kept: u64) -> Weights {
    let resolved = recipe(moe, &keys(set));
    let work = |rank| {
        let sources = source::open(&resolved)?;
        let mut trainer = Trainer::new(rank, &resolved)?;
        while trainer.step() < STEPS {
            if trainer.step() == kept {
                let (samples, tokens) = (trainer.samples() / kept * BAD, trainer.tokens() / kept * BAD);
                trainer.drop_until(Progress { step: BAD, samples, tokens });
            }
            trainer.train_step(&*sources.train)?;
        }
        trainer.weights()
    };
    on_ranks(&resolved, work).unwrap()
}

#[test]
fn every_policy_does_what_it_says() {
    for (set, moe) in LAYOUTS {
        let folder = tempfile::tempdir().unwrap();
        for (policy, kept) in [("skip", BAD - 1), ("rollback", 4)] {
            let dir = folder.path().join(policy);
            let what = format!("{set:?} moe {moe} {policy}");
            let (outcome, weights) =
                train(&dir, &with_nan(set, moe, 2, policy)).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(outcome.finished && outcome.steps == STEPS, "{what}: {outcome:?}");
            equal(&what, &weights, &dropping(set, moe, kept));
            let (reruns, faults) = logged(&dir);
            assert_eq!((reruns.len(), faults.len()), (1, 0), "{what}: {reruns:?} {faults:?}");
            assert_eq!(reruns[0].outcome, RerunOutcome::Rejected(policy.parse().unwrap()));
            assert!(norms(&dir)[&BAD].is_nan(), "{what}");
        }
        let dir = folder.path().join("stop");
        let e = train(&dir, &with_nan(set, moe, 2, "stop")).unwrap_err();
        assert_eq!(e.exit_code(), Some(17), "{e}");
        let text = e.to_string();
        assert!(text.contains("step 6") && text.contains("NaN") && text.contains("replay"), "{text}");
        assert_eq!(logged(&dir).0[0].outcome, RerunOutcome::Rejected(BadStepPolicy::Stop));
        let saved = replay_folder(&dir, BAD);
        let batch = SavedBatch::read(&saved).unwrap();
        replays(set, moe, &saved, &batch);
    }
}

/// The logged gradient norm of every step.
fn norms(dir: &Path) -> std::collections::BTreeMap<u64, f64> {
    let steps = events::read(dir).unwrap().into_iter().filter_map(|line| match line.event {
        Event::Step(s) => Some((s.step, s.grad_norm)),
        _ => None,
    });
    steps.collect()
}

/// The saved step has the state before it and its batch: without the NaN it gives the loss of a clean run.
fn replays(set: &[&str], moe: bool, saved: &Path, batch: &SavedBatch) {
    let resolved = recipe(moe, &keys(set));
    let work = |rank: Rank| {
        let newest = ferrotron_core::checkpoint::latest(&saved.join("checkpoints"))?.unwrap();
        let loaded = ferrotron_core::checkpoint::load(&newest)?;
        let mut trainer = Trainer::new(rank.clone(), &resolved)?;
        trainer.restore(&loaded)?;
        assert_eq!(trainer.step(), BAD - 1);
        let again = trainer.train_step(batch)?;
        let sources = source::open(&resolved)?;
        let mut clean = Trainer::new(rank, &resolved)?;
        let last = (0..BAD).map(|_| clean.train_step(&*sources.train)).last().unwrap()?;
        assert_eq!((again.loss, again.grad_norm), (last.loss, last.grad_norm));
        Ok(())
    };
    on_ranks(&resolved, work).unwrap();
}

#[test]
fn nan_that_does_not_come_again_is_a_fault_of_its_rank() {
    for (set, moe) in LAYOUTS {
        let folder = tempfile::tempdir().unwrap();
        let (_, wanted) = train(&folder.path().join("clean"), &recipe(moe, &keys(set))).unwrap();
        let dir = folder.path().join("nan");
        let resolved = with_nan(set, moe, 1, "stop");
        let (_, weights) = train(&dir, &resolved).unwrap_or_else(|e| panic!("{set:?} {moe}: {e}"));
        equal(&format!("{set:?} {moe}"), &weights, &wanted);
        let (_, faults) = logged(&dir);
        let ranks = resolved.config.parallel.layout().tp * resolved.config.parallel.dp;
        assert_eq!(faults.iter().map(|f| (f.rank, f.step)).collect::<Vec<_>>(), [(ranks as u64 - 1, BAD)]);
        assert!(faults[0].first_run, "{faults:?}");
    }
}
