//! One process of a multi-process job: failure reports, questions to other ranks, waiting, and leaving the job.
//! [`crate::monitor`] runs beside it.

use crate::Result;
use crate::backend::{FailureReport, OpError};
use crate::call_digest::CallDigest;
use crate::control::{ControlTransport, Topic};
use crate::diagnosis::RankState;
use crate::flight_recorder::{FlightRecorder, OpRecord, OpState, OpStatus};
use crate::monitor;
use crate::op_descriptor::OpDescriptor;
use crate::snapshot;
use crate::timeout::Timeout;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Timeout of a question: a stopped process never answers.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// After a failure, time for every rank to report before the first process exits.
const REPORT_TIME: Duration = Duration::from_millis(1500);

/// What a process does after a rank has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterFailure {
    /// It ends, soon.
    Exit,
    /// It leaves its communication and joins the next generation; if it has not after this time, it ends.
    Restart(Duration),
}

/// Before a failed generation is left, time for reports to be written.
const LAST_REPORT: Duration = Duration::from_millis(50);

/// One rank that is a process.
pub(crate) struct Process {
    pub(crate) shared: Arc<ProcessState>,
    monitor: Option<std::thread::JoinHandle<()>>,
}

/// What the process shares with its monitor.
pub(crate) struct ProcessState {
    pub(crate) control: Arc<dyn ControlTransport>,
    pub(crate) recorder: Arc<FlightRecorder>,
    pub(crate) digest: CallDigest,
    pub(crate) timeout: Timeout,
    pub(crate) after_failure: AfterFailure,
    /// True if operations are enqueued on a GPU without waiting for other ranks, so that the monitor must watch them.
    pub(crate) watches_device: AtomicBool,
    /// Members of every group of the job.
    pub(crate) groups: Mutex<HashMap<u64, Vec<usize>>>,
    failure: Mutex<Option<(FailureReport, Instant)>>,
    /// The last operation known of each rank, and when it was.
    last_seen: Mutex<Vec<Option<(OpRecord, Instant)>>>,
    /// Held by whoever asks other ranks for their snapshots: there is one answer to a question.
    asking: Mutex<()>,
    /// This rank has no more work; other ranks may exit.
    pub(crate) leaving: AtomicBool,
    pub(crate) finished: AtomicBool,
}

impl Process {
    pub(crate) fn new(
        control: Arc<dyn ControlTransport>,
        timeout: Duration,
        after_failure: AfterFailure,
    ) -> Result<Process> {
        let last_seen = Mutex::new(vec![None; control.size()]);
        let shared = Arc::new(ProcessState {
            control,
            recorder: Arc::default(),
            digest: CallDigest::default(),
            timeout: Timeout::new(timeout),
            after_failure,
            watches_device: AtomicBool::new(false),
            groups: Mutex::default(),
            failure: Mutex::default(),
            last_seen,
            asking: Mutex::default(),
            leaving: AtomicBool::new(false),
            finished: AtomicBool::new(false),
        });
        let monitor = monitor::start(shared.clone())?;
        Ok(Process { shared, monitor: Some(monitor) })
    }

    pub(crate) fn control(&self) -> &dyn ControlTransport {
        &*self.shared.control
    }

    pub(crate) fn flight_recorder(&self) -> &Arc<FlightRecorder> {
        &self.shared.recorder
    }

    /// Whether this process goes on after a failure, so that nothing may be left behind.
    pub(crate) fn restarts(&self) -> bool {
        self.shared.after_failure != AfterFailure::Exit
    }

    /// The first failure known to this rank.
    pub(crate) fn failure(&self) -> Option<FailureReport> {
        self.shared.failed().map(|(failure, _)| failure)
    }

    /// Fails if a rank has failed.
    pub(crate) fn check_alive(&self) -> Result<(), OpError> {
        match self.failure() {
            None => Ok(()),
            failure => Err(OpError::RanksMissing { missing: vec![], ended: vec![], failure }),
        }
    }

    /// Reports a failure to all other ranks.
    pub(crate) fn fail(&self, failure: FailureReport) {
        self.shared.fail(failure);
    }

    /// Records that `rank` of the job has made this call.
    pub(crate) fn note_call(&self, rank: usize, descriptor: &OpDescriptor) {
        let call = format!("{descriptor}, then stopped responding; last seen");
        self.shared.saw(rank, OpRecord { call, status: OpStatus::Done, age: Duration::ZERO });
    }

    /// The last operations of `rank`: from its own flight recorder, or the last one known of it.
    pub(crate) fn last_ops(&self, rank: usize) -> Option<Vec<OpRecord>> {
        if rank == self.control().rank() {
            return Some(self.flight_recorder().last_ops());
        }
        match self.shared.ask(&[rank], ANSWER_TIMEOUT).pop() {
            Some(RankState::Answered(snapshot)) => Some(snapshot.ops.iter().map(OpState::record).collect()),
            Some(RankState::Exited(last) | RankState::Silent(last)) => Some(vec![last?]),
            None => None,
        }
    }

    /// The rank that forwards messages between the others, if it does not respond.
    pub(crate) fn silent_relay(&self) -> Option<usize> {
        let relay = self.control().relay()?;
        let state = self.shared.ask(&[relay], ANSWER_TIMEOUT).pop();
        matches!(state, Some(RankState::Silent(_))).then_some(relay)
    }

    /// Waits until `ready` returns a value. `missing` lists the ranks it waits for, as (rank in the group, rank in
    /// the job).
    pub(crate) fn wait<T>(
        &self,
        deadline: Instant,
        mut ready: impl FnMut() -> Result<Option<T>, OpError>,
        missing: impl Fn() -> Vec<(usize, usize)>,
    ) -> Result<T, OpError> {
        let mut idle = 0;
        loop {
            if let Some(found) = ready()? {
                return Ok(found);
            }
            let late = Instant::now() >= deadline;
            let failure = self.failure();
            let waiting = if late || failure.is_some() || idle % 64 == 63 { missing() } else { Vec::new() };
            let ended: Vec<(usize, bool)> = waiting
                .iter()
                .filter(|(_, r)| self.control().has_exited(*r))
                .map(|(g, _)| (*g, false))
                .collect();
            if late || failure.is_some() || !ended.is_empty() {
                let missing = waiting.into_iter().map(|(group, _)| group).collect();
                return Err(OpError::RanksMissing { missing, ended, failure });
            }
            self.control().back_off(idle);
            idle += 1;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let control = &*self.shared.control;
        if std::thread::panicking() {
            let reason = "it panicked".to_string();
            self.fail(FailureReport {
                rank: control.rank(),
                stall: false,
                diagnosis: false,
                is_final: false,
                reason,
            });
        }
        if self.failure().is_none() {
            self.shared.leaving.store(true, Ordering::Release);
            for to in (0..control.size()).filter(|r| *r != control.rank()) {
                let _ = control.send(to, Topic::GOODBYE, Vec::new());
            }
            let mut left: Vec<usize> = (0..control.size()).filter(|r| *r != control.rank()).collect();
            let ready = || {
                left.retain(|r| control.try_receive(*r, Topic::GOODBYE).is_none() && !control.has_exited(*r));
                Ok(left.is_empty().then_some(()))
            };
            // Ranks that still wait for this one name it first.
            let deadline = Instant::now() + self.shared.timeout.get() + REPORT_TIME;
            if self.wait(deadline, ready, Vec::new).is_ok() {
                self.shared.finished.store(true, Ordering::Release);
                if let Some(monitor) = self.monitor.take() {
                    let _ = monitor.join();
                }
                return control.close();
            }
            let reason = "the other ranks did not finish in time".to_string();
            self.fail(FailureReport {
                rank: control.rank(),
                stall: true,
                diagnosis: false,
                is_final: false,
                reason,
            });
        }
        if let AfterFailure::Restart(_) = self.shared.after_failure {
            // The process goes on; a moment for what it has to say.
            self.shared.finished.store(true, Ordering::Release);
            std::thread::sleep(LAST_REPORT);
            control.abort();
            return self.monitor.take().into_iter().for_each(|monitor| drop(monitor.join()));
        }
        // A launcher kills the job when the first process exits; give the others time to report first.
        if let Some((_, at)) = self.shared.failed() {
            std::thread::sleep((at + REPORT_TIME).saturating_duration_since(Instant::now()));
        }
    }
}

impl ProcessState {
    pub(crate) fn failed(&self) -> Option<(FailureReport, Instant)> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stores the first failure; returns whether this is it.
    pub(crate) fn set_failure(&self, failure: FailureReport) -> bool {
        let mut first = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let new = first.is_none();
        first.get_or_insert((failure, Instant::now()));
        new
    }

    /// Stores a failure and sends it to all other ranks; returns whether it is the first.
    pub(crate) fn fail(&self, failure: FailureReport) -> bool {
        let new = self.set_failure(failure.clone());
        if new {
            let (text, control) = (encode_failure(&failure), &self.control);
            for to in (0..control.size()).filter(|r| *r != control.rank()) {
                // A rank that cannot be reached detects it by itself.
                let _ = control.send(to, Topic::FAILURE, text.clone());
            }
        }
        new
    }

    fn last_seen(&self) -> MutexGuard<'_, Vec<Option<(OpRecord, Instant)>>> {
        self.last_seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what `rank` of the job is doing now.
    pub(crate) fn saw(&self, rank: usize, record: OpRecord) {
        if let Some(place) = self.last_seen().get_mut(rank) {
            *place = Some((record, Instant::now()));
        }
    }

    /// The last operation known of `rank`, as old as it is by now.
    pub(crate) fn seen(&self, rank: usize) -> Option<OpRecord> {
        let (record, at) = self.last_seen().get(rank)?.clone()?;
        Some(OpRecord { age: record.age + at.elapsed(), ..record })
    }

    /// Asks other ranks what they have done; all have `timeout` together to answer.
    pub(crate) fn ask(&self, ranks: &[usize], timeout: Duration) -> Vec<RankState> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let control = &*self.control;
        let asked: Vec<bool> = ranks
            .iter()
            .map(|rank| {
                // An answer to an earlier question that came too late.
                while control.try_receive(*rank, Topic::ANSWER).is_some() {}
                !control.has_exited(*rank) && control.send(*rank, Topic::QUESTION, Vec::new()).is_ok()
            })
            .collect();
        let mut answers: Vec<Option<RankState>> = vec![None; ranks.len()];
        let (deadline, mut idle) = (Instant::now() + timeout, 0);
        loop {
            for ((answer, rank), asked) in answers.iter_mut().zip(ranks).zip(&asked) {
                if answer.is_none() && control.has_exited(*rank) {
                    *answer = Some(RankState::Exited(self.seen(*rank)));
                } else if answer.is_none() && *asked {
                    let text = control.try_receive(*rank, Topic::ANSWER);
                    *answer = text.and_then(|t| snapshot::decode(&t)).map(RankState::Answered);
                }
            }
            if answers.iter().all(Option::is_some) || Instant::now() >= deadline {
                break;
            }
            control.back_off(idle);
            idle += 1;
        }
        let known = |(answer, rank): (Option<RankState>, &usize)| {
            answer.unwrap_or_else(|| RankState::Silent(self.seen(*rank)))
        };
        answers.into_iter().zip(ranks).map(known).collect()
    }
}

/// Encodes a failure: flags, the rank that failed, and the reason.
fn encode_failure(failure: &FailureReport) -> Vec<u8> {
    let flags = [failure.stall, failure.diagnosis, failure.is_final];
    let mut text = vec![flags.iter().rev().fold(0, |bits, flag| bits << 1 | u8::from(*flag))];
    text.extend((failure.rank as u32).to_le_bytes());
    text.extend(failure.reason.as_bytes());
    text
}

/// Decodes a failure that `from` has sent. Only a diagnosis may speak of another rank.
pub(crate) fn decode_failure(from: usize, text: &[u8]) -> FailureReport {
    let flags = text.first().copied().unwrap_or(0);
    let diagnosis = flags & 2 != 0;
    let named =
        text.get(1..5).and_then(|b| b.try_into().ok()).map_or(from, |b| u32::from_le_bytes(b) as usize);
    FailureReport {
        rank: if diagnosis { named } else { from },
        stall: flags & 1 != 0,
        diagnosis,
        is_final: flags & 4 != 0,
        reason: String::from_utf8_lossy(text.get(5..).unwrap_or_default()).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_travel_and_speak_for_their_sender() {
        let failure = |rank, diagnosis| FailureReport {
            rank,
            stall: true,
            diagnosis,
            is_final: false,
            reason: "ü".into(),
        };
        let back = decode_failure(3, &encode_failure(&failure(7, true)));
        assert_eq!((back.rank, back.stall, back.diagnosis, back.reason.as_str()), (7, true, true, "ü"));
        assert_eq!(decode_failure(3, &encode_failure(&failure(7, false))).rank, 3);
        assert_eq!(decode_failure(3, &[]).rank, 3);
        assert_eq!(decode_failure(3, &[2, 1]).rank, 3);
    }
}
