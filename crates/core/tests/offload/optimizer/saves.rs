//! Checkpoints that a run writes while it trains, from host memory where state is there: the same files, in order with
//! updates by the race checker.

use super::*;
use ferrotron_core::events::Event;
use ferrotron_core::train::{Observer, Run};
use std::collections::BTreeMap;
use std::path::Path;

struct Quiet;

impl Observer for Quiet {
    fn event(&mut self, _: &Event) {}
    fn stop(&self) -> bool {
        false
    }
}

/// Data files of all checkpoints of a run with a save after every step, by name.
fn files(set: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let saves = ["train.steps=4", "checkpoint.every=1", "checkpoint.keep=0", "parallel.comm_unit=65536"];
    let r = recipe(&[&saves, set].concat());
    let dir = tempfile::tempdir().unwrap();
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let layout = r.config.parallel.layout();
    let work = |rank: Rank| {
        let data = source::open(&r)?;
        Run::open(rank, r.clone(), dir.path(), None)?.train(&*data.train, None, &mut Quiet)?;
        Ok(())
    };
    on_threads(&layout, || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work).unwrap();
    let mut all = BTreeMap::new();
    let list = |dir: &Path| std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>();
    for checkpoint in list(&dir.path().join("checkpoints")).iter().filter(|p| p.is_dir()) {
        for file in list(checkpoint).iter().filter(|f| f.extension().is_some_and(|e| e == "safetensors")) {
            let name = file.strip_prefix(dir.path()).unwrap().display().to_string();
            all.insert(name, std::fs::read(file).unwrap());
        }
    }
    assert_eq!(all.len(), 4 * 2 * layout.world().unwrap(), "{:?}", all.keys());
    all
}

#[test]
fn files_do_not_depend_on_where_state_is() {
    let states: [&[&str]; 5] = [
        &["precision.dtype=f32"],
        &["precision.dtype=bf16", "optimizer.state_dtype=bf16"],
        &["precision.dtype=bf16", "optimizer.state_dtype=f16"],
        &["precision.dtype=bf16", "optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"],
        &["precision.dtype=bf16", "optimizer.kind=muon"],
    ];
    let places: [&[&str]; 4] = [
        &["offload.optimizer=0.4"],
        &["offload.optimizer=1"],
        &["offload.optimizer=1", "offload.optimizer_compute=cpu"],
        &["offload.optimizer=1", "offload.weights=true", "offload.gradients=true"],
    ];
    for state in states {
        for layout in [&["parallel.zero=3"][..], &["parallel.zero=3", "parallel.dp=2"]] {
            let wanted = files(&[state, layout].concat());
            for place in places {
                assert!(
                    wanted == files(&[state, layout, place].concat()),
                    "{state:?}, {layout:?}, {place:?}"
                );
            }
        }
    }
}
