//! The event log of a run: one JSON object per line in `events.jsonl`, the only source every view reads.
//!
//! The writer appends whole lines. After an interruption [`EventLog::resume`] drops what lies beyond the resumed
//! step, so that the log of an interrupted and resumed run reads like that of one run.

use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The name of the log in a run folder.
pub const FILE_NAME: &str = "events.jsonl";

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// A run began.
    RunStart(RunStart),
    /// An optimizer step was made.
    Step(Step),
    /// Validation data was looked at.
    Eval(Eval),
    /// Operands of 8-bit products were looked at.
    Precision(Precision),
    /// A checkpoint was taken; its folder appears when it is completely written.
    Checkpoint(Checkpoint),
    /// Text was drawn from the model.
    Sample(Sample),
    /// The run ended.
    RunEnd(RunEnd),
}

/// A run began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// The recipe or file.
    pub recipe: String,
    /// Program version.
    pub version: String,
    /// Steps the run will make.
    pub steps: u64,
    /// Trainable numbers in the model.
    pub parameters: u64,
    /// The device, in words.
    pub device: String,
    /// Compute threads.
    pub threads: u64,
    /// Element type of compute.
    pub dtype: String,
    /// Model FLOPs per token.
    pub flops_per_token: f64,
}

/// An optimizer step was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss over the step's tokens, in nats. Not a number is written as null.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Tokens trained on since the run began, this step included.
    pub tokens: u64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "or_nan")]
    pub grad_norm: f64,
    /// Factor that was on the loss of f16 training; loss and norm are without it. Where the norm is not finite the step was
    /// left out, and the scale may fall.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Sequences in the step.
    #[serde(default)]
    pub batch: u64,
    /// Wall-clock seconds of the step.
    #[serde(default)]
    pub seconds: f64,
    /// Tokens per second.
    #[serde(default)]
    pub tokens_per_s: f64,
    /// Model TFLOP per second.
    #[serde(default)]
    pub tflops: f64,
    /// Peak bytes of tensors so far.
    #[serde(default)]
    pub memory: u64,
    /// Bytes that the first rank sent in the step, by group and kind of operation: `{"tp": {"all-gather": 4096}}`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sent: BTreeMap<String, BTreeMap<String, u64>>,
    /// Further numbers by name, which stand beside the others: loads of experts (`imbalance`), energy (`energy_j`).
    #[serde(flatten)]
    pub more: BTreeMap<String, Value>,
    /// Other mean losses of the step, in nats: `{"mtp_1 loss": 5.2}` of predictions one token further ahead.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "all_or_nan")]
    pub losses: BTreeMap<String, f64>,
}

/// Validation data was looked at.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// Steps made before.
    pub step: u64,
    /// Mean loss over its tokens, in nats.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Tokens looked at.
    pub tokens: u64,
}

/// Operands of 8-bit products were looked at, in all micro-batches of a step and on all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Precision {
    /// The step, from 1.
    pub step: u64,
    /// Every one, in the order of the model.
    pub operands: Vec<Operand>,
}

/// How well an operand fits its format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Operand {
    /// The linear map, by its stacked outputs: `layers.0.attn.q+k+v`.
    pub module: String,
    /// `input`, `weight` or `gradient` (of the output).
    pub role: String,
    /// Percent of values beyond the largest number of the format.
    pub saturation: f64,
    /// Percent of values, other than zero, that became zero.
    pub underflow: f64,
    /// The largest magnitude.
    pub amax: f64,
    /// What values were multiplied by: the smallest and the largest of all blocks, equal where a tensor has one scale.
    /// Absent where scales belong to the format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<[f64; 2]>,
    /// Relative error against the values before: `|narrowed - x| / |x|` in the Euclidean norm.
    #[serde(deserialize_with = "or_nan")]
    pub error: f64,
}

/// A checkpoint was taken; its folder appears when it is completely written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Steps made before.
    pub step: u64,
    /// Where it is, relative to the run folder.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Wall-clock seconds that training stood still for it.
    pub seconds: f64,
}

/// Text was drawn from the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Steps made before.
    pub step: u64,
    /// What was continued.
    pub prompt: String,
    /// The continuation.
    pub text: String,
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// Every step was made.
    #[default]
    Finished,
    /// It was asked to stop; the same command resumes.
    Interrupted,
    /// An error stopped it.
    Failed,
}

/// The run ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunEnd {
    /// Steps made.
    pub step: u64,
    /// Why it ended.
    pub ending: Ending,
    /// Wall-clock seconds of this process.
    pub seconds: f64,
    /// Tokens per second over this process, all included.
    pub tokens_per_s: f64,
}

impl Event {
    /// The number of steps made when it happened; 0 for the start.
    pub fn step(&self) -> u64 {
        match self {
            Event::RunStart(_) => 0,
            Event::Step(e) => e.step,
            Event::Eval(e) => e.step,
            Event::Precision(e) => e.step,
            Event::Checkpoint(e) => e.step,
            Event::Sample(e) => e.step,
            Event::RunEnd(e) => e.step,
        }
    }
}

/// JSON has no not-a-number and no infinity; both are written as null.
fn or_nan<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::NAN))
}

fn all_or_nan<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<BTreeMap<String, f64>, D::Error> {
    let all = BTreeMap::<String, Option<f64>>::deserialize(d)?;
    Ok(all.into_iter().map(|(name, x)| (name, x.unwrap_or(f64::NAN))).collect())
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
    /// When, in seconds since 1970.
    #[serde(default)]
    pub time: f64,
}

/// The writer. Each event is one line, written at once.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
}

impl EventLog {
    /// Starts a new log, emptying an old one. `path` is the log or the run folder it lies in.
    pub fn create(path: &Path) -> Result<EventLog> {
        let path = &in_folder(path);
        let file = File::create(path).map_err(|source| io(path, source))?;
        Ok(EventLog { path: path.into(), file })
    }

    /// Continues a log at the state after `step` steps: what was logged of later steps is dropped, and so is the
    /// end of the interrupted run and a half-written last line. Nothing else is touched; the start stays the only
    /// start. A missing log begins empty, and so does one resumed at step 0.
    pub fn resume(path: &Path, step: u64) -> Result<EventLog> {
        let path = &in_folder(path);
        if step == 0 || !path.exists() {
            return EventLog::create(path);
        }
        let old = std::fs::read(path).map_err(|source| io(path, source))?;
        let mut kept = Vec::with_capacity(old.len());
        for line in old.split_inclusive(|b| *b == b'\n') {
            let keep = match serde_json::from_slice::<Line>(line) {
                Ok(line) => line.event.step() <= step && !matches!(line.event, Event::RunEnd(_)),
                Err(_) => false,
            };
            if keep {
                kept.extend_from_slice(line);
                if !line.ends_with(b"\n") {
                    kept.push(b'\n');
                }
            }
        }
        if kept != old {
            // A new file in its place: an interruption here leaves the old log or the new one.
            let new = path.with_extension("jsonl.new");
            let written = File::create(&new).and_then(|mut f| {
                f.write_all(&kept)?;
                f.sync_all()
            });
            written.and_then(|()| std::fs::rename(&new, path)).map_err(|source| io(&new, source))?;
        }
        let file = OpenOptions::new().append(true).open(path).map_err(|source| io(path, source))?;
        Ok(EventLog { path: path.into(), file })
    }

    /// Appends an event, stamped with the time.
    pub fn write(&mut self, event: &Event) -> Result<()> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_millis() as f64 / 1e3);
        let line = Line { event: event.clone(), time };
        let mut text = serde_json::to_vec(&line).map_err(|e| io(&self.path, e.into()))?;
        text.push(b'\n');
        self.file.write_all(&text).map_err(|source| io(&self.path, source))
    }

    /// Waits until everything written is on the disk; a checkpoint does this before it counts as complete.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| io(&self.path, source))
    }
}

/// Reads a log, given itself or its run folder. A half-written last line is left out; any other damage is an error.
pub fn read(path: &Path) -> Result<Vec<Line>> {
    let path = &in_folder(path);
    parse(path, &std::fs::read(path).map_err(|source| io(path, source))?)
}

/// Reads the text of a log; `path` is what errors call it.
pub fn parse(path: &Path, text: &[u8]) -> Result<Vec<Line>> {
    let mut out = Vec::new();
    let lines: Vec<&[u8]> = text.split_inclusive(|b| *b == b'\n').collect();
    for (i, line) in lines.iter().enumerate() {
        match serde_json::from_slice(line) {
            Ok(line) => out.push(line),
            Err(_) if i + 1 == lines.len() => {}
            Err(_) if line.trim_ascii().is_empty() => {}
            Err(e) => {
                let what = format!("line {} is not an event ({e}); remove it to read the rest", i + 1);
                return Err(Error::damaged(path, what));
            }
        }
    }
    Ok(out)
}

fn in_folder(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(FILE_NAME) } else { path.into() }
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { path: path.into(), source }
}
