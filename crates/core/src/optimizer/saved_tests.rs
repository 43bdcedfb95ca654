//! An update waits for the thread that reads state in host memory for a checkpoint.

use crate::config::{Recipe, Resolved};
use crate::data::source;
use crate::train::Trainer;
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

fn recipe() -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    let set = ["offload.optimizer=1", "precision.dtype=bf16", "data.seq_len=32", "generate.tokens=0"];
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

/// A step beside a thread that reads the state of the first bucket; whether the thread had ended when the step had.
fn step(waits: bool) -> crate::Result<bool> {
    let r = recipe();
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let mut trainer = Trainer::new(Rank::cpu_instrumented(1, 1234, watch)?, &r)?;
    let data = source::open(&r)?;
    let stream = trainer.rank.device().stream("checkpoint")?;
    stream.wait(&trainer.rank.compute.record()?)?;
    let state = trainer.optimizer.masters.bucket(0).clone();
    assert!(state.is_on_host());
    let read = trainer.optimizer.begin_read(&stream);
    if !waits {
        trainer.optimizer.reads.0.lock().unwrap().clear();
    }
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (ended, stream, state) = (&ended, &stream, &state);
        scope.spawn(move || {
            let long = |_: &[u8]| {
                begun.send(()).unwrap();
                std::thread::sleep(Duration::from_secs(1));
            };
            stream.read_host(state, long).unwrap();
            ended.store(true, SeqCst);
            drop(read);
        });
        has_begun.recv().unwrap();
        trainer.train_step(&*data.train)?;
        Ok(ended.load(SeqCst))
    })
}

#[test]
fn an_update_waits_for_a_reader_of_its_state() {
    assert!(step(true).unwrap());
    let e = step(false).unwrap_err().to_string();
    assert!(e.contains("race") && e.contains("state") || e.contains("no event between"), "{e}");
}
