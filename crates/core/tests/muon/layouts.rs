//! Owners of matrices under every layout, FP8 parameters, and checkpoints.

use super::*;
use ferrotron_core::checkpoint::{self, Saver};
use ferrotron_core::events::Event;
use ferrotron_core::train::{CHECKPOINTS, Observer, Run};
use std::path::Path;

/// Ranks that own a different number of matrices, one, or none at all step together, with the bits of ranks that own all.
#[test]
fn unequal_owners_never_wait_for_each_other() {
    const ONE: &str = "optimizer.groups=[{ params = \"layers.1.attn.out.weight\", optimizer = \"muon\" }, { params = [\"matrix\", \"expert\", \"router\"], optimizer = \"lion\" }]";
    const NONE: &str =
        "optimizer.groups=[{ params = [\"matrix\", \"expert\", \"router\"], optimizer = \"lion\" }]";
    for layout in ["dp=3", "pp=2,dp=2", "tp=2,dp=2", "ep=2,dp=2"] {
        for groups in [None, Some(ONE), Some(NONE)] {
            let mut set: Vec<&str> = groups.into_iter().collect();
            // Three replicas hold no equal share of four experts.
            if layout.contains("ep") {
                set.extend(MOE);
            }
            let [plain, owned] = ["parallel.zero=0", "parallel.zero=1"]
                .map(|zero| trained(layout, &[&set[..], &[zero]].concat(), 3));
            assert!(plain == owned, "{layout} {groups:?}: other bits than plain data parallelism");
            assert!(plain.0[2] < plain.0[0], "{layout} {groups:?}: {:?}", plain.0);
            if layout == "dp=3" {
                trained(layout, &[&set[..], &["parallel.zero=2"]].concat(), 2);
            }
        }
    }
}

/// First and last stage hold a tied table and sum its gradient: one rank of each owns it, the same whatever else they hold.
#[test]
fn both_stages_of_a_tied_table_have_the_same_owner() {
    const TABLE: &str = "optimizer.groups=[{ params = \"embedding\", optimizer = \"muon\" }]";
    let [plain, owned] = ["parallel.zero=0", "parallel.zero=1"]
        .map(|zero| trained("pp=2,dp=2", &["model.tied=true", TABLE, zero], 3));
    assert!(plain == owned, "other bits than plain data parallelism");
}

/// FP8-resident weights have the bits of bf16 weights that are quantized in every step.
#[test]
fn fp8_parameters() {
    const WIDE: [&str; 5] = [
        "precision.dtype=bf16",
        "model.hidden=128",
        "model.ffn=128",
        "optimizer.muon={ steps = 2 }",
        "train.global_batch=4",
    ];
    for scaling in ["fp8-current", "fp8-delayed", "fp8-block"] {
        let scaling = format!("precision.recipe={scaling}");
        for (layout, more) in [("dp=2", &[][..]), ("ep=2", &["moe.ffn=128"])] {
            let moe: &[&str] = if layout.contains("ep") { &MOE } else { &[] };
            let set = [&WIDE[..], moe, more, &[&scaling, "parallel.zero=1"]].concat();
            let [fp8, bf16] = ["precision.fp8_params=true", "precision.fp8_params=false"]
                .map(|params| trained(layout, &[&set[..], &[params]].concat(), 3));
            assert!(fp8.0[2] < fp8.0[0], "{layout} {scaling}: {:?}", fp8.0);
            assert!(fp8 == bf16, "{layout} {scaling}: other bits than bf16-resident weights");
        }
    }
}

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

/// Continues the run of a folder until step `stop`; returns the weights.
fn train(layout: &str, set: &[&str], dir: &Path, stop: u64) -> Vec<LogicalValues> {
    run(layout, set, |rank, resolved| {
        let data = source::open(&resolved)?.train;
        let mut run = Run::open(rank, resolved, dir, None)?;
        run.train(&*data, None, &mut StopAfter(stop, 0))?;
        run.trainer.weights()
    })
    .swap_remove(0)
}

/// Loads a run's checkpoint and saves it again elsewhere.
fn save_again(layout: &str, set: &[&str], dir: &Path, to: &Path) {
    run(layout, set, |rank, resolved| {
        let mut saver = Saver::on(to, None, &rank.world.all())?;
        let run = Run::open(rank, resolved, dir, None)?;
        saver.save(run.trainer.snapshot()?)?;
        saver.finish()
    });
}

fn newest(dir: &Path) -> std::path::PathBuf {
    checkpoint::latest(dir).unwrap().expect("no checkpoint")
}

/// Momenta and second moments are saved by logical tensor: every layout reads the bits that another wrote, and a run that was
/// interrupted ends with the bits of one that was not.
#[test]
fn checkpoints_are_free_of_the_layout() {
    for adaptive in ["adamuon", "normuon"] {
        let muon = format!("optimizer.muon={{ products = \"f32\", adaptive = \"{adaptive}\" }}");
        let set = [&MOE[..], &[&muon, "parallel.zero=1"]].concat();
        let (dir, straight) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        train("tp=2,dp=2", &set, dir.path(), 2);
        let saved = newest(&dir.path().join(CHECKPOINTS));
        for layout in ["tp=1", "dp=3", "tp=4", "pp=2,ep=2"] {
            let again = tempfile::tempdir().unwrap();
            save_again(layout, &set, dir.path(), again.path());
            let different = checkpoint::compare(&newest(again.path()), &saved).unwrap();
            assert!(different.same(), "{adaptive} {layout}: {different:?}");
        }
        let whole = train("tp=2,dp=2", &set, straight.path(), 4);
        assert!(train("tp=2,dp=2", &set, dir.path(), 4) == whole, "{adaptive}: resumed to other bits");
    }
}
