//! A step kept for `ferrotron replay`: its batch, and the state before it as a checkpoint.
//!
//! `<run>/replay/step-N/` has `checkpoints/`, and for every data-parallel rank `batch-R.json` with its micro-batches by the number
//! of their first sample. Any layout can replay it.

use super::run::Run;
use super::run_folder::CHECKPOINTS;
use crate::checkpoint::Saver;
use crate::data::{Batch, Batches, Row};
use crate::{Error, Result, fs};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folder of steps that were kept, in a run folder.
pub const REPLAY: &str = "replay";
/// Bytes of a batch file that are read at most.
const MAX_BYTES: u64 = 4 << 30;

/// The folder of step `step` in the run folder `run`.
pub fn replay_folder(run: &Path, step: u64) -> PathBuf {
    run.join(REPLAY).join(format!("step-{step}"))
}

/// The micro-batches of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SavedBatch {
    seq: usize,
    samples: u64,
    resets: bool,
    micro_batches: BTreeMap<u64, SavedMicroBatch>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct SavedMicroBatch {
    /// Number of samples.
    count: usize,
    tokens: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    #[serde(default)]
    cu_seqlens: Option<Vec<i32>>,
    #[serde(default)]
    padding: Option<Vec<bool>>,
    #[serde(default)]
    varies: bool,
}

impl SavedBatch {
    /// Reads the batch files of a folder.
    pub fn read(folder: &Path) -> Result<SavedBatch> {
        let mut all = SavedBatch::default();
        let mut found = false;
        for rank in 0.. {
            let path = folder.join(format!("batch-{rank}.json"));
            if !path.is_file() {
                break;
            }
            let text = fs::read_limited(&path, MAX_BYTES)?;
            let own: SavedBatch =
                serde_json::from_slice(&text).map_err(|e| Error::damaged(&path, e.to_string()))?;
            let mut micro_batches = std::mem::take(&mut all.micro_batches);
            micro_batches.extend(own.micro_batches);
            all = SavedBatch { micro_batches, ..own };
            found = true;
        }
        match found {
            true => Ok(all),
            false => Err(Error::Missing {
                path: folder.to_path_buf(),
                what: "no step was kept here; steps are kept when their result is rejected (fault.rerun)"
                    .into(),
            }),
        }
    }
}

impl Batches for SavedBatch {
    fn seq(&self) -> usize {
        self.seq
    }

    fn tokens(&self, first: u64, count: u64) -> Result<u64> {
        Ok(self.batch(first, count as usize)?.tokens.len() as u64)
    }

    fn samples(&self) -> u64 {
        self.samples
    }

    fn resets(&self) -> bool {
        self.resets
    }

    fn row(&self, n: u64, _: &mut Row) -> Result<()> {
        Err(Error::Invalid(format!("sample {n} of a saved step is part of a micro-batch")))
    }

    fn batch(&self, first: u64, count: usize) -> Result<Batch> {
        match self.micro_batches.get(&first).filter(|m| m.count == count) {
            Some(m) => Ok(Batch {
                tokens: m.tokens.clone(),
                labels: m.labels.clone(),
                positions: m.positions.clone(),
                cu_seqlens: m.cu_seqlens.clone(),
                padding: m.padding.clone(),
                varies: m.varies,
            }),
            None => Err(Error::Invalid(format!(
                "samples {first} to {} are no micro-batch of the saved step; replay it with its own train.micro_batch",
                first + count as u64
            ))),
        }
    }
}

impl Run {
    /// Keeps the next step, `step`, and the state before it. Collective.
    pub(super) fn save_for_replay(&mut self, step: u64, data: &dyn Batches) -> Result<PathBuf> {
        let folder = replay_folder(self.dir(), step);
        let t = &self.trainer;
        let rank = &t.rank;
        let mut saver = Saver::on(&folder.join(CHECKPOINTS), None, &rank.world.all())?;
        saver.save(t.snapshot()?)?;
        saver.finish()?;
        let leads = [rank.tp.rank(), rank.cp.rank(), rank.pp.rank()] == [0; 3];
        if leads {
            let (schedule, consumed) = (&t.runner.schedules.batch, t.samples());
            let (here, ranks) = (rank.dp.rank() as u64, rank.dp.size() as u64);
            let mut own = SavedBatch {
                seq: data.seq(),
                samples: data.samples(),
                resets: data.resets(),
                ..SavedBatch::default()
            };
            for i in 0..schedule.at(consumed, ranks)?.count {
                let first = consumed + (i * ranks + here) * schedule.micro;
                let count = schedule.micro as usize;
                let Batch { tokens, labels, positions, cu_seqlens, padding, varies } =
                    data.batch(first, count)?;
                let batch = SavedMicroBatch { count, tokens, labels, positions, cu_seqlens, padding, varies };
                own.micro_batches.insert(first, batch);
            }
            let text = serde_json::to_vec(&own).map_err(|e| Error::Invalid(format!("a batch: {e}")))?;
            fs::write_atomic(&folder.join(format!("batch-{here}.json")), &text)?;
        }
        Ok(folder)
    }
}
