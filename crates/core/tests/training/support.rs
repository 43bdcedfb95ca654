//! Small recipes, data and runs.

use ferrotron_core::checkpoint::{self, Item, Saver, Snapshot};
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::{Batches, Row};
use ferrotron_core::events::Event;
use ferrotron_core::train::{Observer, Outcome, Run, Trainer};
use ferrotron_core::{Error, Result};
use ferrotron_engine::{Rank, Shard};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const BASE: &str = r#"
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 16
[data]
path = "never opened"
seq_len = 16
[train]
steps = 6
global_batch = 4
micro_batch = 2
[optimizer]
lr = 1e-2
[schedule]
warmup = 1
[precision]
dtype = "f32"
"#;

/// The base recipe with some keys changed.
pub fn recipe(changes: &[&str]) -> Resolved {
    let mut r = Recipe::default();
    r.add("test", BASE).unwrap();
    changes.iter().for_each(|c| r.set(c).unwrap_or_else(|e| panic!("{c}: {e}")));
    r.resolve(None).unwrap_or_else(|e| panic!("{changes:?}: {e}"))
}

pub fn rank(threads: usize, r: &Resolved) -> Rank {
    Rank::cpu(threads, r.config.train.seed).unwrap()
}

pub fn trainer(r: &Resolved) -> Trainer {
    Trainer::new(rank(2, r), r).unwrap()
}

/// A toy language: the next token is `3·token + 1` modulo the vocabulary. Sample n starts at n.
pub struct Rule {
    pub seq: usize,
    pub vocab: i32,
}

impl Batches for Rule {
    fn seq(&self) -> usize {
        self.seq
    }
    fn samples(&self) -> u64 {
        self.vocab as u64
    }
    fn resets(&self) -> bool {
        false
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        let mut token = (n % self.samples()) as i32;
        for i in 0..self.seq {
            row.tokens.push(token);
            token = (3 * token + 1) % self.vocab;
            row.labels.push(token);
            row.positions.push(i as i32);
        }
        row.starts.push(0);
        Ok(())
    }
}

pub const RULE: Rule = Rule { seq: 16, vocab: 16 };

/// The rule, with a sample that cannot be read.
pub struct Broken(pub u64);

impl Batches for Broken {
    fn seq(&self) -> usize {
        RULE.seq
    }
    fn samples(&self) -> u64 {
        RULE.samples()
    }
    fn resets(&self) -> bool {
        false
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        if n == self.0 {
            return Err(Error::Invalid(format!("sample {n} cannot be read")));
        }
        RULE.row(n, row)
    }
}

/// An observer that stops a run after a step and records its events.
#[derive(Default)]
pub struct Stopper {
    pub after: Option<u64>,
    pub events: Vec<Event>,
}

impl Observer for Stopper {
    fn event(&mut self, event: &Event) {
        self.events.push(event.clone());
    }
    fn stop(&self) -> bool {
        let last = self.events.iter().rev().find_map(|e| match e {
            Event::Step(s) => Some(s.step),
            _ => None,
        });
        self.after.is_some_and(|n| last.is_some_and(|s| s >= n))
    }
}

/// Runs in `dir` until the end or until `stop` steps are done.
pub fn run(
    dir: &Path,
    r: &Resolved,
    threads: usize,
    data: &dyn Batches,
    eval: Option<&dyn Batches>,
    stop: Option<u64>,
) -> (Outcome, Vec<Event>) {
    let mut run = Run::open(rank(threads, r), r.clone(), dir, None).unwrap();
    let mut observer = Stopper { after: stop, ..Stopper::default() };
    let outcome = run.train(data, eval, &mut observer).unwrap();
    (outcome, observer.events)
}

/// The files of the newest checkpoint of a run, by name.
pub fn newest(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    files(dir, &checkpoint::latest(&dir.join("checkpoints")).unwrap().expect("no checkpoint"))
}

/// The files of a run's checkpoint of a step, by name.
pub fn saved_at(dir: &Path, step: u64) -> BTreeMap<PathBuf, Vec<u8>> {
    files(dir, &dir.join("checkpoints").join(checkpoint::folder_name(step)))
}

fn files(dir: &Path, path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let file = entry.unwrap().path();
        out.insert(file.strip_prefix(dir).unwrap().to_path_buf(), std::fs::read(&file).unwrap());
    }
    assert!(out.len() >= 3);
    out
}

/// A snapshot as it is read back once it is saved in `dir`.
pub fn saved(dir: &Path, snapshot: Snapshot) -> checkpoint::Loaded {
    let step = snapshot.step;
    let mut saver = Saver::new(dir, None).unwrap();
    saver.save(snapshot).unwrap();
    saver.finish().unwrap();
    checkpoint::load(&dir.join(checkpoint::folder_name(step))).unwrap()
}

/// The keys of a layout such as `tp=2,dp=2`.
pub fn layout_keys(layout: &str) -> Vec<String> {
    layout.split(',').map(|k| format!("parallel.{k}")).collect()
}

/// Losses of the steps among some events.
pub fn losses(events: &[Event]) -> Vec<f64> {
    events
        .iter()
        .filter_map(|e| match e {
            Event::Step(s) => Some(s.loss),
            _ => None,
        })
        .collect()
}

/// A pair of data files of `documents`.
pub fn write_data(prefix: &Path, documents: &[Vec<i64>]) {
    use ferrotron_core::data::{IndexedWriter, TokenType};
    let mut writer = IndexedWriter::create(prefix, TokenType::for_vocab(256), false).unwrap();
    for d in documents {
        writer.push(d.iter().copied(), 0).unwrap();
        writer.end_document().unwrap();
    }
    writer.finish().unwrap();
}

/// The error message of a failure.
pub fn refusal<T>(result: Result<T, Error>) -> String {
    let e = result.err().expect("it worked").to_string();
    assert!(!e.contains('\n'), "{e}");
    e
}

/// The whole tensors of a snapshot from the parts of all ranks.
pub fn join(parts: Vec<Snapshot>) -> Snapshot {
    let (step, state) = (parts[0].step, parts[0].state.clone());
    let mut whole: BTreeMap<String, Item> = BTreeMap::new();
    for item in parts.into_iter().flat_map(|s| s.items) {
        let (width, numel) = (item.dtype.size(), item.shape.iter().product::<usize>());
        let all = whole.entry(item.name.clone()).or_insert_with(|| {
            Item::whole(&item.name, item.dtype, item.shape.clone(), vec![0; numel * width])
        });
        let range = |r: (u64, u64)| r.0 as usize..r.1 as usize;
        let shard = Shard { axis: item.slice.axis, range: range(item.slice.range) };
        let mut rest = &item.bytes[..];
        for run in shard.runs_within(&item.shape, range(item.slice.elements)) {
            let (own, more) = rest.split_at(run.len() * width);
            all.bytes[run.start * width..run.end * width].copy_from_slice(own);
            rest = more;
        }
    }
    Snapshot { step, state, items: whole.into_values().collect() }
}
