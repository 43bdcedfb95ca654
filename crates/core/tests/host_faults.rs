//! What a system may refuse while host memory is used: pinned memory, which pageable memory replaces with the same bits, and
//! copies, whose failure ends a run with one clear error and loses nothing that was saved.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use ferrotron_core::checkpoint;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::train::{Observer, Run};
use ferrotron_engine::Rank;
use ferrotron_tensor::{HostFault, Instrumentation};
use std::path::Path;

struct Quiet;

impl Observer for Quiet {
    fn event(&mut self, _: &Event) {}
    fn stop(&self) -> bool {
        false
    }
}

fn recipe() -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    let set = [
        "data.seq_len=32",
        "train.steps=5",
        "train.global_batch=2",
        "train.micro_batch=1",
        "generate.tokens=0",
        "checkpoint.every=1",
        "parallel.zero=3",
        "offload.activations=1",
        "offload.min_bytes=1",
        "offload.weights=true",
        "offload.gradients=true",
        "offload.optimizer=1",
        "precision.dtype=bf16",
    ];
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

fn train(dir: &Path, faults: &[HostFault]) -> ferrotron_core::Result<()> {
    let r = recipe();
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let rank = Rank::cpu_instrumented(1, 1234, watch)?;
    faults.iter().for_each(|fault| rank.device().inject(*fault));
    let data = source::open(&r)?;
    Run::open(rank, r, dir, None)?.train(&*data.train, None, &mut Quiet).map(drop)
}

/// Files of the last checkpoint, which is that of step 5.
fn end(dir: &Path) -> Vec<Vec<u8>> {
    let last = checkpoint::latest(&dir.join("checkpoints")).unwrap().unwrap();
    assert!(last.ends_with(checkpoint::folder_name(5)), "{}", last.display());
    ["model.safetensors", "optimizer.safetensors"].map(|f| std::fs::read(last.join(f)).unwrap()).to_vec()
}

#[test]
fn bits_do_not_depend_on_pinned_memory() {
    let [with, without] = [0; 2].map(|_| tempfile::tempdir().unwrap());
    train(with.path(), &[]).unwrap();
    train(without.path(), &[HostFault::PinnedRefused]).unwrap();
    assert!(end(with.path()) == end(without.path()));
}

#[test]
fn a_copy_that_fails_ends_the_run_and_loses_nothing() {
    let whole = tempfile::tempdir().unwrap();
    train(whole.path(), &[]).unwrap();
    let mut steps = Vec::new();
    // In forward, backward and update of early and late steps, to the host and from it.
    for after in [0, 3, 41, 173, 301, 402, 700, 901] {
        let dir = tempfile::tempdir().unwrap();
        let fault = HostFault::CopyFails { after };
        let e = train(dir.path(), &[fault]).unwrap_err().to_string();
        assert!(e.contains("copy to host") || e.contains("copy from host"), "{after}: {e}");
        // Every checkpoint that is there is complete.
        let all = checkpoint::list(&dir.path().join("checkpoints")).unwrap_or_default();
        steps.push(all.len());
        for (step, path) in &all {
            assert_eq!(checkpoint::verify(path).unwrap().step, *step);
        }
        train(dir.path(), &[]).unwrap();
        assert!(end(dir.path()) == end(whole.path()), "{after}: other bits after the run went on");
    }
    assert!(steps.contains(&0) && steps.iter().any(|n| *n > 1), "{steps:?}: choose other copies");
    println!("checkpoints at the failures: {steps:?}");
}
