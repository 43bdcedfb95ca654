//! One process of a multi-process job: failure reports, flight-recorder queries, and shutdown.
//!
//! A background thread background the queries of other ranks and receives failure reports while the rank computes. After
//! a failure it also makes sure that the job ends: if the process has not exited by itself within [`FORCE_EXIT`], the
//! thread terminates the job.

use crate::Result;
use crate::backend::{FailureReport, OpError};
use crate::control::{ControlTransport, Topic};
use crate::flight_recorder::{FlightRecorder, OpRecord, OpStatus};
use crate::op_descriptor::OpDescriptor;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Poll interval of the background thread; bounds the delay until a failure is noticed.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Timeout of a flight-recorder query: a stopped process never background.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// After a failure, time for every rank to report before the first process exits.
const REPORT_TIME: Duration = Duration::from_millis(1500);
/// After a failure, time until the job is terminated by force.
const FORCE_EXIT: Duration = Duration::from_secs(6);

/// One rank that is a process.
pub(crate) struct Process {
    shared: Arc<Shared>,
    timeout: Duration,
    background: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    control: Arc<dyn ControlTransport>,
    recorder: Arc<FlightRecorder>,
    failure: Mutex<Option<(FailureReport, Instant)>>,
    /// The last call seen from each rank.
    last_calls: Mutex<Vec<Option<(String, Instant)>>>,
    finished: AtomicBool,
}

impl Process {
    pub(crate) fn new(control: Arc<dyn ControlTransport>, timeout: Duration) -> Result<Process> {
        let last_calls = Mutex::new(vec![None; control.size()]);
        let shared = Arc::new(Shared {
            control,
            recorder: Arc::default(),
            failure: Mutex::default(),
            last_calls,
            finished: AtomicBool::new(false),
        });
        let other = shared.clone();
        let spawned = std::thread::Builder::new().name("comm background".into()).spawn(move || other.serve());
        let background =
            spawned.map_err(|e| crate::Error::Launch(format!("cannot start the background thread: {e}")))?;
        Ok(Process { shared, timeout, background: Some(background) })
    }

    pub(crate) fn control(&self) -> &dyn ControlTransport {
        &*self.shared.control
    }

    pub(crate) fn flight_recorder(&self) -> &Arc<FlightRecorder> {
        &self.shared.recorder
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

    /// Reports this rank's failure to all others.
    pub(crate) fn fail(&self, failure: FailureReport) {
        self.shared.fail(failure);
    }

    /// Records that `rank` of the job has made this call.
    pub(crate) fn note_call(&self, rank: usize, descriptor: &OpDescriptor) {
        let mut last_calls = self.shared.last_calls.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = last_calls.get_mut(rank) {
            *place = Some((descriptor.to_string(), Instant::now()));
        }
    }

    /// The last operations of `rank`: from its own flight recorder, or the last call seen from it.
    pub(crate) fn last_ops(&self, rank: usize) -> Option<Vec<OpRecord>> {
        let control = self.control();
        if rank == control.rank() {
            return Some(self.flight_recorder().last_ops());
        }
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut idle = 0;
        if !control.has_exited(rank) && control.send(rank, Topic::QUESTION, Vec::new()).is_ok() {
            while Instant::now() < deadline && !control.has_exited(rank) {
                if let Some(answer) = control.try_receive(rank, Topic::ANSWER) {
                    return decode_records(&answer);
                }
                control.back_off(idle);
                idle += 1;
            }
        }
        let last_calls = self.shared.last_calls.lock().unwrap_or_else(PoisonError::into_inner);
        let (call, at) = last_calls.get(rank)?.clone()?;
        let call = format!("{call}, then stopped responding; last seen");
        Some(vec![OpRecord { call, status: OpStatus::Done, age: at.elapsed() }])
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
            self.fail(FailureReport { rank: control.rank(), stall: false, reason });
        }
        if self.failure().is_none() {
            for to in (0..control.size()).filter(|r| *r != control.rank()) {
                let _ = control.send(to, Topic::GOODBYE, Vec::new());
            }
            let mut left: Vec<usize> = (0..control.size()).filter(|r| *r != control.rank()).collect();
            let ready = || {
                left.retain(|r| control.try_receive(*r, Topic::GOODBYE).is_none() && !control.has_exited(*r));
                Ok(left.is_empty().then_some(()))
            };
            if self.wait(Instant::now() + self.timeout, ready, Vec::new).is_ok() {
                self.shared.finished.store(true, Ordering::Release);
                if let Some(background) = self.background.take() {
                    let _ = background.join();
                }
                return control.close();
            }
            let reason = "the other ranks did not finish in time".to_string();
            self.fail(FailureReport { rank: control.rank(), stall: true, reason });
        }
        // A launcher kills the job when the first process exits; give the others time to report first.
        if let Some((_, at)) = self.shared.failed() {
            std::thread::sleep((at + REPORT_TIME).saturating_duration_since(Instant::now()));
        }
    }
}

impl Shared {
    fn failed(&self) -> Option<(FailureReport, Instant)> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reports a failure to all others, unless there was one before.
    fn fail(&self, failure: FailureReport) {
        if self.set_failure(failure.clone()) {
            let text = encode_failure(&failure);
            let control = &*self.control;
            for to in (0..control.size()).filter(|r| *r != control.rank()) {
                // A rank that cannot be reached detects it by itself.
                let _ = control.send(to, Topic::FAILURE, text.clone());
            }
        }
    }

    /// Stores the first failure; returns whether this is it.
    fn set_failure(&self, failure: FailureReport) -> bool {
        let mut first = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let new = first.is_none();
        first.get_or_insert((failure, Instant::now()));
        new
    }

    fn serve(&self) {
        let here = self.control.rank();
        while !self.finished.load(Ordering::Acquire) {
            for rank in (0..self.control.size()).filter(|r| *r != here) {
                while self.control.try_receive(rank, Topic::QUESTION).is_some() {
                    let _ = self.control.send(rank, Topic::ANSWER, encode_records(&self.recorder.last_ops()));
                }
                if let Some(text) = self.control.try_receive(rank, Topic::FAILURE) {
                    self.set_failure(decode_failure(rank, &text));
                }
            }
            if let Some((rank, reason)) = self.control.broken() {
                self.fail(FailureReport { rank, stall: false, reason });
            }
            if self.failed().is_some_and(|(_, at)| at.elapsed() > FORCE_EXIT) {
                eprintln!(
                    "rank {here}: a rank has failed and the job did not exit by itself; terminating it"
                );
                self.control.abort();
                std::process::exit(1);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Encodes a report as whether it is a stall, the rank that failed (which need not be the one that reports it), and
/// the reason.
fn encode_failure(failure: &FailureReport) -> Vec<u8> {
    let mut text = vec![u8::from(failure.stall)];
    text.extend((failure.rank as u32).to_le_bytes());
    text.extend(failure.reason.as_bytes());
    text
}

/// Decodes a report from rank `from`.
fn decode_failure(from: usize, text: &[u8]) -> FailureReport {
    let stall = text.first() == Some(&1);
    let rank = text.get(1..5).and_then(|b| b.try_into().ok()).map(|b| u32::from_le_bytes(b) as usize);
    let reason = String::from_utf8_lossy(text.get(5..).unwrap_or_default()).into_owned();
    FailureReport { rank: rank.unwrap_or(from), stall, reason }
}

const STATUSES: [OpStatus; 4] = [OpStatus::Waiting, OpStatus::Running, OpStatus::Done, OpStatus::Failed];

/// Encodes records as (status, age in milliseconds, length, text) each.
fn encode_records(records: &[OpRecord]) -> Vec<u8> {
    let mut out = Vec::new();
    for n in records {
        out.push(STATUSES.iter().position(|p| *p == n.status).unwrap_or(0) as u8);
        out.extend((n.age.as_millis() as u64).to_le_bytes());
        out.extend((n.call.len() as u64).to_le_bytes());
        out.extend(n.call.as_bytes());
    }
    out
}

fn decode_records(mut bytes: &[u8]) -> Option<Vec<OpRecord>> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let (head, rest) = bytes.split_at_checked(17)?;
        let number = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
        let (text, rest) = rest.split_at_checked(usize::try_from(number(9)?).ok()?)?;
        let status = *STATUSES.get(usize::from(head[0]))?;
        let call = String::from_utf8_lossy(text).into_owned();
        records.push(OpRecord { call, status, age: Duration::from_millis(number(1)?) });
        bytes = rest;
    }
    Some(records)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn notes_travel_and_rubbish_is_refused() {
        let records: Vec<OpRecord> = STATUSES
            .iter()
            .map(|p| OpRecord {
                call: format!("a call ü {p:?}"),
                status: *p,
                age: Duration::from_millis(1234),
            })
            .collect();
        let bytes = encode_records(&records);
        assert_eq!(format!("{:?}", decode_records(&bytes).unwrap()), format!("{records:?}"));
        (1..bytes.len()).for_each(|cut| {
            if let Some(some) = decode_records(&bytes[..cut]) {
                assert!(some.len() < records.len());
            }
        });
        assert!(decode_records(&[9; 40]).is_none());
    }
}
