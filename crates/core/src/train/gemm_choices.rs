//! The GEMM algorithms of a run: one table for all ranks, stored in the run folder and in checkpoints.
//!
//! Algorithms are chosen by timing and round differently. A rank that is alone uses a choice at once. With several ranks
//! each proposes what it chose during a step, and the ranks merge their proposals between two steps: a GEMM that was
//! first seen in step n runs by the first algorithm of the library's heuristic in that step, and by the shared choice
//! from step n + 1 on. The table records that step, so that a run resumed before it computes the same bits again.

use super::Trainer;
use crate::{Error, Result};
use ferrotron_comm::Communicator;
use ferrotron_engine::Rank;
use ferrotron_kernels::{GemmChoice, GemmLibrary, NewChoices};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The choices of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GemmTable {
    library: GemmLibrary,
    /// By GEMM.
    choices: BTreeMap<String, TableChoice>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TableChoice {
    algorithm: String,
    /// The first step that uses it.
    since: u64,
}

impl GemmTable {
    fn new(library: GemmLibrary) -> GemmTable {
        GemmTable { library, choices: BTreeMap::new() }
    }

    /// The empty table of a rank, and its kernels set to fill it; none where there is nothing to choose.
    pub(super) fn begin(rank: &Rank) -> Option<GemmTable> {
        let table = GemmTable::new(rank.kernels.gemm_library()?);
        table.apply(rank, 0);
        Some(table)
    }

    /// Adds choices that are used from step `since` on; a GEMM that has one keeps it. True if any is new.
    fn add(&mut self, new: Vec<GemmChoice>, since: u64) -> bool {
        let before = self.choices.len();
        for GemmChoice { gemm, algorithm } in new {
            self.choices.entry(gemm).or_insert(TableChoice { algorithm, since });
        }
        self.choices.len() > before
    }

    /// The choices that `step` uses.
    fn at(&self, step: u64) -> Vec<GemmChoice> {
        let used = self.choices.iter().filter(|(_, c)| c.since <= step);
        used.map(|(gemm, c)| GemmChoice { gemm: gemm.clone(), algorithm: c.algorithm.clone() }).collect()
    }

    fn changes_at(&self, step: u64) -> bool {
        self.choices.values().any(|c| c.since == step)
    }

    /// Has the rank's kernels use the choices of `step`.
    fn apply(&self, rank: &Rank, step: u64) {
        let new = if rank.world.size() > 1 { NewChoices::Proposed } else { NewChoices::Used };
        rank.kernels.use_gemm_choices(&self.at(step), new);
    }

    /// The table with which a run goes on: the checkpoint's, then the run folder's, as far as they were chosen with the
    /// library of `self`; and what to tell the user if the checkpoint's was not.
    fn resume(
        mut self,
        checkpoint: Option<GemmTable>,
        folder: Option<GemmTable>,
    ) -> (GemmTable, Option<String>) {
        let mut note = None;
        for (i, old) in [checkpoint, folder].into_iter().enumerate() {
            let Some(old) = old else { continue };
            let differences = old.library.differences(&self.library);
            if differences.is_empty() {
                old.choices.into_iter().for_each(|(gemm, c)| _ = self.choices.entry(gemm).or_insert(c));
            } else if i == 0 {
                note = Some(format!(
                    "the GEMM algorithms of this run were chosen with another library or GPU ({}): they are chosen anew, and \
                     results may differ in the last bits from those of the run before",
                    differences.join(", ")
                ));
            }
        }
        (self, note)
    }

    /// As a file of the run folder.
    pub(super) fn to_json(&self) -> Result<Vec<u8>> {
        let mut text = encode_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// From a file of the run folder.
    pub(super) fn from_json(bytes: &[u8]) -> Result<GemmTable, String> {
        serde_json::from_slice(bytes).map_err(|e| format!("is no table of GEMM algorithms: {e}"))
    }
}

/// What the ranks tell each other when a run begins.
#[derive(Serialize, Deserialize)]
struct Greeting {
    library: GemmLibrary,
    /// The run folder's table, from rank 0.
    folder: Option<GemmTable>,
}

/// The choices of all ranks in rank order.
fn all_gather_choices(ranks: &Communicator, mine: &[GemmChoice]) -> Result<Vec<GemmChoice>> {
    let all = ranks.all_gather_bytes(&encode(&mine)?, "GEMM algorithms")?;
    Ok(all.iter().map(|bytes| decode(bytes)).collect::<Result<Vec<Vec<GemmChoice>>>>()?.concat())
}

/// The run folder's table, and how the library of each rank differs from that of rank 0.
fn greet(
    ranks: &Communicator,
    library: &GemmLibrary,
    folder: Option<GemmTable>,
) -> Result<(Option<GemmTable>, Vec<String>)> {
    let mine = Greeting { library: library.clone(), folder };
    let all = ranks.all_gather_bytes(&encode(&mine)?, "libraries of GEMM algorithms")?;
    let mut all = all.iter().map(|bytes| decode::<Greeting>(bytes)).collect::<Result<Vec<_>>>()?.into_iter();
    let Some(first) = all.next() else { return Ok((None, Vec::new())) };
    let others = all.zip(1..).filter_map(|(other, rank)| {
        let differences = first.library.differences(&other.library);
        (!differences.is_empty()).then(|| {
            format!(
                "rank {rank} computes GEMMs with another library or GPU than rank 0 ({}): replicas may differ in the last \
                 bits",
                differences.join(", ")
            )
        })
    });
    let notes = others.collect();
    Ok((first.folder, notes))
}

impl Trainer {
    /// Takes over the GEMM algorithms of the checkpoint and, on rank 0, of the run folder; returns notes for the user.
    /// Collective.
    pub(super) fn resume_gemm_choices(
        &mut self,
        checkpoint: Option<GemmTable>,
        folder: Option<GemmTable>,
    ) -> Result<Vec<String>> {
        let Some(table) = self.gemms.take() else { return Ok(Vec::new()) };
        let (folder, mut notes) = greet(&self.rank.world.all(), &table.library, folder)?;
        let (table, note) = table.resume(checkpoint, folder);
        table.apply(&self.rank, self.step() + 1);
        self.gemms = Some(table);
        notes.splice(0..0, note);
        Ok(notes)
    }

    /// Adds the choices of a snapshot of this run, and uses those of the next step.
    pub(super) fn merge_gemm_choices(&mut self, of_snapshot: Option<GemmTable>) {
        let next = self.step() + 1;
        if let Some(table) = &mut self.gemms {
            for (gemm, choice) in of_snapshot.into_iter().flat_map(|t| t.choices) {
                table.choices.entry(gemm).or_insert(choice);
            }
            table.apply(&self.rank, next);
        }
    }

    /// Whether this rank's kernels have chosen algorithms that are not in the table.
    pub(super) fn has_new_gemm_choices(&self) -> bool {
        self.gemms.is_some() && self.rank.kernels.has_new_gemm_choices()
    }

    /// Adds what all ranks chose since the last call to the table, and uses it from the next step on. True if anything is
    /// new. Collective.
    pub fn share_gemm_choices(&mut self) -> Result<bool> {
        let (rank, next) = (&self.rank, self.runner.progress.step + 1);
        let Some(table) = &mut self.gemms else { return Ok(false) };
        let mine = rank.kernels.take_gemm_choices();
        if rank.world.size() == 1 {
            // In use since they were made: a run resumed before that makes or reads them when it needs them.
            return Ok(table.add(mine, 0));
        }
        let is_new = table.add(all_gather_choices(&rank.world.all(), &mine)?, next);
        if is_new {
            table.apply(rank, next);
        }
        Ok(is_new)
    }

    /// Before a step is launched: uses the choices that begin with it, where a resumed run knows them before they were made.
    pub(super) fn begin_gemm_choices(&self) {
        let next = self.runner.progress.step + 1;
        if let Some(table) = self.gemms.as_ref().filter(|t| t.changes_at(next)) {
            table.apply(&self.rank, next);
        }
    }

    /// Uses the GEMM algorithms of the next step, although those of a later one may be in use.
    pub(super) fn return_to_gemm_choices(&self) {
        if let Some(table) = &self.gemms {
            table.apply(&self.rank, self.runner.progress.step + 1);
        }
    }
}

fn encode(x: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(x).map_err(|e| Error::Invalid(format!("GEMM algorithms: {e}")))
}

fn encode_pretty(x: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(x).map_err(|e| Error::Invalid(format!("GEMM algorithms: {e}")))
}

fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| Error::Invalid(format!("GEMM algorithms of a rank: {e}")))
}

#[cfg(test)]
mod tests;
