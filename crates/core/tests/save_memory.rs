//! A save takes host memory for what is on the device, and next to none for what is in host memory. In a test executable of
//! its own, because the peak is the process's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too
#![cfg(target_os = "linux")]

use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::train::{Observer, Run};
use ferrotron_engine::Rank;

const MODEL: &str = "
[model]
layers = 2
hidden = 512
heads = 8
kv_heads = 4
ffn = 1024
vocab = 32768
max_positions = 64
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 3
global_batch = 1
micro_batch = 1
[checkpoint]
every = 1
[generate]
tokens = 0
";

const OFFLOADED: [&str; 4] =
    ["parallel.zero=3", "offload.weights=true", "offload.gradients=true", "offload.optimizer=1"];

fn recipe(set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

/// A line of the process's status, in bytes.
fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// By how much resident memory has grown since the first step when a checkpoint is on disk, at its peak, and the size of that
/// checkpoint.
#[derive(Default)]
struct Growth {
    before: Option<usize>,
    saves: Vec<(usize, usize)>,
}

impl Observer for Growth {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Step(_) if self.before.is_none() => {
                // The peak begins anew.
                std::fs::write("/proc/self/clear_refs", "5").unwrap();
                self.before = Some(status("VmRSS:"));
            }
            Event::Checkpoint(c) => {
                let grown = status("VmHWM:").saturating_sub(self.before.unwrap());
                self.saves.push((grown, c.bytes as usize));
            }
            _ => {}
        }
    }
    fn stop(&self) -> bool {
        false
    }
}

/// Growth by all saves, and bytes of a checkpoint.
fn growth(set: &[&str]) -> (usize, usize) {
    let r = recipe(&[&["precision.dtype=bf16"], set].concat());
    let dir = tempfile::tempdir().unwrap();
    let mut growth = Growth::default();
    let data = source::open(&r).unwrap();
    let mut run = Run::open(Rank::cpu(1, 1).unwrap(), r, dir.path(), None).unwrap();
    run.train(&*data.train, None, &mut growth).unwrap();
    println!("{set:?}: growth and size of saves {:?}", growth.saves);
    assert_eq!(growth.saves.len(), 3);
    growth.saves[2]
}

#[test]
fn a_save_of_state_in_host_memory_takes_bounded_memory() {
    // A chunk of 16 MiB and its conversion on what is the device here, the writer's buffers, and what steps allocate.
    const BOUND: usize = 72 << 20;
    let (without, size) = growth(&[]);
    assert!(size > 200 << 20, "{size}");
    assert!(without > size * 3 / 4, "{without} of {size}: the measurement shows nothing");
    for state in [
        &["optimizer.state_dtype=f32"][..],
        &["optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"],
    ] {
        let (with, size) = growth(&[&OFFLOADED, state].concat());
        assert!(with < BOUND && size > 150 << 20, "{state:?}: {with} bytes for a checkpoint of {size}");
    }
}
