//! MoE checkpoints: equal under every layout, expert biases included, and resumed bit for bit.

use super::*;
use ferrotron_core::checkpoint::{self, Saver};
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::train::{CHECKPOINTS, Observer, Run};
use std::path::Path;

/// Recipes that differ in the state kept besides weights.
const KINDS: [(&str, &[&str]); 3] = [
    ("expert_bias", &["moe.score_function=sigmoid", "moe.expert_bias=true", "moe.groups=[4,2]"]),
    ("quantiles", &["moe.balance=quantile", "moe.quantile_keep=0.5"]),
    // FP8 scales of expert operands, which all ranks share whichever experts they hold.
    (
        "expert_bias",
        &[
            "moe.score_function=sigmoid",
            "moe.expert_bias=true",
            "precision.dtype=bf16",
            "precision.recipe=fp8-delayed",
            "precision.amax_history=4",
            "moe.ffn=32",
            "moe.shared_ffn=32",
        ],
    ),
];

struct StopAfter(u64, u64);

impl Observer for StopAfter {
    fn event(&mut self, event: &Event) {
        if let Event::Step(s) = event {
            self.1 = s.step;
        }
    }
    fn stop(&self) -> bool {
        self.1 >= self.0
    }
}

/// The state of a run: weights, expert biases, quantiles.
type State = [Vec<LogicalValues>; 2];

fn resolved(at: &RankLayout, set: &[&str]) -> (Resolved, RankLayout) {
    recipe(at, &[keys(set), keys(&["checkpoint.keep=0", "checkpoint.every=0"])].concat())
}

/// Continues the run of a folder until step `stop`.
fn train(at: &RankLayout, set: &[&str], dir: &Path, stop: u64) -> State {
    let (resolved, at) = resolved(at, set);
    let states = run(&at, |rank| {
        let data = source::open(&resolved)?.train;
        let mut run = Run::open(rank, resolved.clone(), dir, None)?;
        run.train(&*data, None, &mut StopAfter(stop, 0))?;
        Ok([run.trainer.weights()?, run.trainer.expert_tables()?])
    });
    states.unwrap().remove(0)
}

/// Loads a run's checkpoint and saves it again elsewhere; returns its state.
fn open(at: &RankLayout, set: &[&str], dir: &Path, to: &Path) -> State {
    let (resolved, at) = resolved(at, set);
    let found = run(&at, |rank| {
        let mut saver = Saver::on(to, None, &rank.world.all())?;
        let run = Run::open(rank, resolved.clone(), dir, None)?;
        let state = [run.trainer.weights()?, run.trainer.expert_tables()?];
        saver.save(run.trainer.snapshot()?)?;
        saver.finish()?;
        Ok(state)
    });
    found.unwrap().remove(0)
}

/// The newest checkpoint.
fn newest(dir: &Path) -> std::path::PathBuf {
    checkpoint::latest(dir).unwrap().expect("no checkpoint")
}

#[test]
fn expert_parallel_checkpoints_load_under_any_layout() {
    for (table, set) in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let saved = train(&layout("ep=4"), set, dir.path(), 3);
        let checkpoints = dir.path().join(CHECKPOINTS);
        let loaded = checkpoint::load(&checkpoint::latest(&checkpoints).unwrap().unwrap()).unwrap();
        let names: Vec<&str> = loaded.tensors().map(|t| t.name.as_str()).collect();
        let tables: Vec<_> = names.iter().filter(|n| n.ends_with(&format!(".moe.{table}"))).collect();
        assert_eq!(tables.len(), 3, "{tables:?}");
        let of_an_expert: Vec<_> =
            names.iter().filter(|n| n.ends_with("layers.3.moe.experts.7.down.weight")).collect();
        assert_eq!(of_an_expert.len(), 3, "master and two moments: {of_an_expert:?}");
        // Biases have left zero by now.
        assert!(saved[1].iter().all(|t| t.values.iter().any(|x| *x != 0.0)), "{:?}", saved[1]);
        for other in ["ep=2,etp=2", "ep=1", "pp=2,ep=2", "ep=4"] {
            let again = tempfile::tempdir().unwrap();
            let read = open(&layout(other), set, dir.path(), again.path());
            assert!(read == saved, "{table}, saved under ep=4, read under {other}: other weights or tables");
            let different = checkpoint::compare(&newest(again.path()), &newest(&checkpoints)).unwrap();
            assert!(different.same(), "{table}, {other}, saved again: {different:?}");
        }
    }
}

#[test]
fn an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one() {
    for (table, set) in KINDS {
        for at in ["ep=1", "ep=4", "ep=2,etp=2", "pp=2,ep=2"].map(layout) {
            let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
            let wanted = train(&at, set, whole.path(), 7);
            let stopped = train(&at, set, parts.path(), 4);
            assert!(stopped != wanted);
            let ours = train(&at, set, parts.path(), 7);
            assert!(ours[0] == wanted[0], "{table}, {at}: other weights");
            assert_eq!(ours[1], wanted[1], "{table}, {at}");
            let [a, b] = [&parts, &whole].map(|d| newest(&d.path().join(CHECKPOINTS)));
            let different = checkpoint::compare(&a, &b).unwrap();
            assert!(different.same(), "{table}, {at}, last checkpoint: {different:?}");
        }
    }
}
