//! Verification by other processes: `fault.verify_on_partner`.
//!
//! Hardware that computes the same wrong bits every time passes a second run in place. So the second run is made by others:
//! at a verification every process leaves its rank and takes the next one, with that rank's snapshot from memory, and runs the
//! steps since the base as that rank. Groups keep the order of their ranks, so that sums are taken in the same order and a
//! right result has the same bits. If the digests of any rank differ, processes change places once more:
//!
//! | runs that agree | what it means |
//! |---|---|
//! | the third and another | the odd one was wrong: a transient fault of the process whose payload differed first in it |
//! | none | a process computes wrongly whatever its rank: the one that every difference between two runs leads to |
//!
//! The run goes on with the ranks as they are then. A process that fails in between ends the verification; steps are then
//! verified in the next one.

use super::StepReport;
use super::run::{Observer, Run};
use super::state_digests::exchange;
use crate::events::{self, Event, FaultPersistence, RerunOutcome};
use crate::fault::culprit::{Record, StepCalls, culprit};
use crate::{Error, Result, fs};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Instant;

/// Steps that wait for another run. Every process of the job has one, and it outlives the ranks.
pub(super) struct Verification {
    /// The steps after this one, up to `step`.
    base: u64,
    pub(super) step: u64,
    since: Instant,
    runs: Vec<Verified>,
}

/// Results of one run of the steps.
struct Verified {
    /// Of each rank: digests of what it sent in each step, and of its state after the last.
    digests: Vec<Vec<u64>>,
    /// Who computed each rank.
    processes: Vec<Process>,
    /// The rank that this process computed, and what it sent.
    rank: usize,
    own: Record,
}

/// A process of the job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Process {
    host: String,
    device: String,
    id: u32,
}

/// Faults of each process so far.
pub(super) type FaultCounts = BTreeMap<Process, u64>;

/// Where two runs differ first: the rank, and what it sent.
struct Root {
    rank: usize,
    what: String,
    at_step: Option<u64>,
}

impl Verification {
    /// Whether it goes on in a run that begins at this step.
    pub(super) fn begins_at(&self, step: u64) -> bool {
        self.base == step
    }
}

impl Run {
    /// Whether verifications are made by other processes: those of a job that restarts.
    pub(super) fn verifies_on_partner(&self) -> bool {
        let t = &self.trainer;
        self.resolved.config.fault.verify_on_partner
            && t.rank.world.size() > 1
            && self.snapshots.are_mirrored()
    }

    /// Verifies the steps from `base` to `step`, whose results are `own`: returns when two runs agree, and
    /// [`Error::ChangeRanks`] where other processes must run them first. Collective.
    pub(super) fn verify_on_partner(
        &mut self,
        (base, step): (u64, u64),
        own: Record,
        report: &StepReport,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        // What processes need in other places is complete before the exchange below ends.
        self.snapshots.finish_mirroring();
        self.wait_for_save(observer)?;
        let device = self.trainer.rank.device();
        let process = Process {
            host: fs::host_name().trim_start_matches(" on ").to_string(),
            device: device.gpu().map_or_else(|| "CPU".into(), |gpu| gpu.name.clone()),
            id: std::process::id(),
        };
        let said = exchange(&self.trainer.rank.control, &(own.digests(), process), "verified steps")?;
        let (digests, processes) = said.into_iter().unzip();
        let rank = self.trainer.rank.world.rank();
        let same = |v: &Verification| (v.base, v.step) == (base, step);
        let new = || Verification { base, step, since: Instant::now(), runs: Vec::new() };
        let mut v = self.snapshots.take_verification().filter(same).unwrap_or_else(new);
        v.runs.push(Verified { digests, processes, rank, own });
        let agree = |a: usize, b: usize| v.runs[a].digests == v.runs[b].digests;
        let outcome = match v.runs.len() {
            1 => None,
            2 if agree(0, 1) => Some(RerunOutcome::Same),
            2 => None,
            _ => Some(RerunOutcome::Different),
        };
        let Some(outcome) = outcome else {
            self.snapshots.set_verification(Some(v));
            return Err(Error::ChangeRanks);
        };
        let event = events::Rerun {
            step,
            steps: step - base,
            reason: "verification by other processes".into(),
            outcome,
            seconds: v.since.elapsed().as_secs_f64(),
        };
        let odd = match v.runs.len() {
            3 if agree(1, 2) => Some((0, 2)),
            3 if agree(0, 2) => Some((1, 2)),
            _ => None,
        };
        self.emit(Event::Rerun(event), observer)?;
        if v.runs.len() == 3 {
            self.name_fault(&v, odd, observer)?;
        }
        // The lines of the first run stay in the log if it was right.
        let again = std::mem::take(&mut self.verified);
        if odd.is_some_and(|(wrong, _)| wrong == 0) {
            self.report_again(&[&again[..], std::slice::from_ref(report)].concat(), true, observer)?;
        }
        self.verifying = None;
        Ok(())
    }

    /// Says which process was at fault: in run `odd.0`, if run `odd.1` and the other one agree. An error if none agree, or if
    /// the process has failed too often.
    fn name_fault(
        &mut self,
        v: &Verification,
        odd: Option<(usize, usize)>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let seconds = v.since.elapsed().as_secs_f64();
        let (root, process, fault) = match odd {
            Some((wrong, right)) => {
                let root = self.root(v, wrong, right)?;
                let process = v.runs[wrong].processes.get(root.rank).cloned();
                (root, process, FaultPersistence::Transient)
            }
            None => {
                let mut common: Option<Vec<Process>> = None;
                let mut root = None;
                for (a, b) in [(0, 1), (0, 2), (1, 2)] {
                    let found = self.root(v, a, b)?;
                    let of = |run: usize| v.runs[run].processes.get(found.rank).cloned();
                    let suspects: Vec<Process> = [of(a), of(b)].into_iter().flatten().collect();
                    common = Some(match common {
                        None => suspects,
                        Some(before) => before.into_iter().filter(|p| suspects.contains(p)).collect(),
                    });
                    root.get_or_insert(found);
                }
                let process = common.and_then(|suspects| suspects.into_iter().next());
                let unknown = Root { rank: 0, what: String::new(), at_step: None };
                (root.unwrap_or(unknown), process, FaultPersistence::Persistent)
            }
        };
        let Some(process) = process else {
            let why = "three runs of the same steps by different processes gave three results".to_string();
            return Err(Error::FaultyHardware { rank: root.rank, place: "an unknown process".into(), why });
        };
        let place = format!("{}, {}, process {}", process.host, process.device, process.id);
        let event = events::Fault {
            step: v.step,
            fault,
            rank: root.rank as u64,
            host: process.host.clone(),
            device: process.device.clone(),
            tensor: root.what,
            at_step: root.at_step,
            first_run: odd.is_none_or(|(wrong, _)| wrong == 0),
            seconds,
        };
        self.emit(Event::Fault(event), observer)?;
        let last = v.runs.last().map_or(&[][..], |run| &run.processes);
        let rank = last.iter().position(|p| *p == process).unwrap_or(root.rank);
        let count = self.snapshots.count_fault(process);
        let why = match odd {
            None => "it computes something else than other processes, whatever its rank".to_string(),
            Some(_) if count < self.resolved.config.fault.rank_failures => return Ok(()),
            Some(_) => format!("it computed something else {count} times (fault.rank_failures)"),
        };
        Err(Error::FaultyHardware { rank, place, why })
    }

    /// Where two runs differ first, in the order of cause and effect. Collective; the same on all ranks.
    fn root(&self, v: &Verification, a: usize, b: usize) -> Result<Root> {
        let (a, b) = (&v.runs[a], &v.runs[b]);
        let differs = |i: usize| {
            let of = |run: &Verified, rank: usize| run.digests[rank].get(i).copied();
            (0..a.digests.len().min(b.digests.len())).find(|rank| of(a, *rank) != of(b, *rank))
        };
        let steps = usize::try_from(v.step - v.base).unwrap_or(0);
        let Some(index) = (0..steps).find(|i| differs(*i).is_some()) else {
            let rank = differs(steps).unwrap_or(0);
            return Ok(Root { rank, what: "the state after the last step".into(), at_step: None });
        };
        let step = v.base + 1 + index as u64;
        let (calls_a, calls_b) = (self.calls(a, step)?, self.calls(b, step)?);
        let record = |calls: &StepCalls| Record { steps: vec![calls.clone()], state: Vec::new() };
        let differences: Vec<_> =
            calls_a.iter().zip(&calls_b).map(|(a, b)| record(a).difference(&record(b))).collect();
        let rank = culprit(&differences, &calls_a).unwrap_or(0);
        let what = differences.into_iter().nth(rank).flatten().map_or(String::new(), |d| d.what());
        Ok(Root { rank, what, at_step: Some(step) })
    }

    /// What each rank sent in a step of a run, from the processes that were these ranks then. Collective.
    fn calls(&self, run: &Verified, step: u64) -> Result<Vec<StepCalls>> {
        let own = run.own.steps.iter().find(|s| s.step == step).cloned().unwrap_or_default();
        let mut said: Vec<(usize, StepCalls)> =
            exchange(&self.trainer.rank.control, &(run.rank, own), "calls of a step")?;
        said.sort_by_key(|(rank, _)| *rank);
        Ok(said.into_iter().map(|(_, calls)| calls).collect())
    }
}
