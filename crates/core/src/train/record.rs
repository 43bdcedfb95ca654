//! What a checkpoint records of the run that wrote it, and what a resumed run does differently.

use crate::config::{self, ChangeEffect, DATA_CONTENT, DATA_ORDER, Resolved, change_effect};
use crate::data::Batches;
use crate::data::digest::{DataDigest, order_digest};
use crate::events::Change;
use crate::schedule::LrSchedule;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Configuration and data of a run, as far as they decide what is learned. It names no path, time or layout: equal runs
/// give equal checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RunRecord {
    /// Key → value in TOML.
    config: BTreeMap<String, String>,
    /// Of each dataset of the blend.
    data: Vec<DataDigest>,
    /// Digest of some of the samples consumed so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    order: Option<String>,
}

impl RunRecord {
    /// The record of a run that is about to begin or resume.
    pub(super) fn new(r: &Resolved, data: Vec<DataDigest>) -> RunRecord {
        RunRecord { config: r.config.recorded(), data, order: None }
    }

    /// Samples `..samples` of `data` have been consumed.
    pub(super) fn set_order(&mut self, data: &dyn Batches, samples: u64) {
        self.order = order_digest(data, samples);
    }

    /// Takes over the digest of the samples consumed from the record of the checkpoint that is resumed.
    pub(super) fn continue_from(&mut self, old: &RunRecord) {
        self.order.clone_from(&old.order);
    }

    /// What changes from this record to `new`.
    pub(super) fn changes(&self, new: &RunRecord) -> Vec<Change> {
        let keys = config::differences(&self.config, &new.config);
        let mut changes: Vec<Change> =
            keys.into_iter().map(|(key, old, new)| Change { key: key.into(), old, new }).collect();
        let shown = |d: Option<&DataDigest>| d.map_or("none".into(), DataDigest::to_string);
        // Only the rank that writes the folder knows its data, and only where the recipe names it.
        let unknown = self.data.is_empty() || new.data.is_empty();
        let members = if unknown { 0 } else { self.data.len().max(new.data.len()) };
        for i in 0..members {
            let [old, new] = [self, new].map(|r| r.data.get(i));
            if old != new {
                changes.push(Change { key: DATA_CONTENT.into(), old: shown(old), new: shown(new) });
            }
        }
        changes
    }

    /// The change of order, if the samples consumed so far are others in `data`. A change of the data explains itself.
    pub(super) fn order_change(&self, data: &dyn Batches, samples: u64) -> Option<Change> {
        let (old, new) = (self.order.clone()?, order_digest(data, samples)?);
        (old != new).then(|| Change { key: DATA_ORDER.into(), old, new })
    }
}

/// Must this change be allowed by name?
pub(super) fn breaks_position(change: &Change) -> bool {
    [DATA_CONTENT, DATA_ORDER].contains(&change.key.as_str())
        || change_effect(&change.key) == ChangeEffect::DataPosition
}

/// An error if a change that breaks the data position is not among those allowed.
pub(super) fn refuse(checkpoint: &Path, changes: &[Change], allowed: &[String]) -> Result<()> {
    let refused: Vec<&Change> =
        changes.iter().filter(|c| breaks_position(c) && !allowed.contains(&c.key)).collect();
    if refused.is_empty() {
        return Ok(());
    }
    let mut keys: Vec<&str> = refused.iter().map(|c| c.key.as_str()).collect();
    keys.dedup();
    let why = match keys[..] {
        [DATA_ORDER] => {
            "; the same samples come in another order, as when another number of steps needs another number of epochs, which \
             are shuffled together"
        }
        _ => "",
    };
    let list: Vec<String> = refused.iter().map(|c| c.to_string()).collect();
    Err(Error::Invalid(format!(
        "{}: the samples before its data position are no longer those it was trained on ({}){why}; go back to the old values, \
         choose another --out, or go on all the same with --allow-changes {}",
        checkpoint.display(),
        list.join(", "),
        keys.join(",")
    )))
}

/// How the learning rate goes on under another schedule, in one sentence; none if it is the same.
pub(super) fn schedule_note(old: &LrSchedule, new: &LrSchedule, at: ScheduleSpan) -> Option<String> {
    let ScheduleSpan { step, samples, batch, steps, end } = at;
    if old == new || step >= steps {
        return None;
    }
    let (before, after) = (old.at(samples), new.at(samples + batch));
    let jump = match after / before.max(f64::MIN_POSITIVE) {
        x if x > 1.5 => "; it rises again: the schedule is that of a run of this length from its beginning",
        _ => "",
    };
    Some(format!(
        "learning rate: {before:.3e} at step {step} under the old schedule, {after:.3e} at step {} under the new one, {:.3e} \
         at the last step {steps}{jump}",
        step + 1,
        new.at(end)
    ))
}

/// Where in a run a schedule changes. Schedules count samples.
#[derive(Clone, Copy)]
pub(super) struct ScheduleSpan {
    /// Steps done.
    pub(super) step: u64,
    /// Samples consumed, without those of skipped steps.
    pub(super) samples: u64,
    /// Samples of the next step.
    pub(super) batch: u64,
    /// Steps of the run.
    pub(super) steps: u64,
    /// Samples of the run, without those of skipped steps so far.
    pub(super) end: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seed: &str, content: &str) -> RunRecord {
        let config = [("data.seed", seed), ("optimizer.lr", "0.001")];
        let digest = DataDigest { bytes: 9, index: "1".into(), content: content.into() };
        RunRecord {
            config: config.map(|(k, v)| (k.to_string(), v.to_string())).into(),
            data: vec![digest],
            order: None,
        }
    }

    #[test]
    fn changes_that_break_the_position_must_be_allowed_by_name() {
        let (old, mut new) = (record("1", "a"), record("2", "b"));
        new.config.insert("optimizer.lr".into(), "0.1".into());
        let changes = old.changes(&new);
        let keys: Vec<&str> = changes.iter().map(|c| c.key.as_str()).collect();
        assert_eq!(keys, ["data.seed", "optimizer.lr", "data.path"]);
        assert_eq!(changes[0].to_string(), "data.seed 1 -> 2");
        let refused = |allowed: &[&str]| {
            let allowed: Vec<String> = allowed.iter().map(|a| a.to_string()).collect();
            refuse(Path::new("step-1"), &changes, &allowed).err().map(|e| e.to_string())
        };
        let e = refused(&[]).unwrap();
        assert!(e.contains("data.seed 1 -> 2") && !e.contains("optimizer.lr"), "{e}");
        assert!(e.ends_with("--allow-changes data.seed,data.path"), "{e}");
        assert!(refused(&["data.seed"]).unwrap().ends_with("--allow-changes data.path"));
        assert_eq!(refused(&["data.seed", "data.path"]), None);
        assert_eq!(old.changes(&old), []);
    }
}
