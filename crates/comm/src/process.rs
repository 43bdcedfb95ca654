//! One process of a multi-process job: failure reports, flight-recorder queries, and shutdown.
//!
//! A background thread answers the queries of other ranks and receives failure reports while the rank computes. After
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
const LOOK: Duration = Duration::from_millis(10);
/// Timeout of a flight-recorder query: a stopped process never answers.
const ANSWER: Duration = Duration::from_millis(500);
/// After a failure, time for every rank to report before the first process exits.
const LINGER: Duration = Duration::from_millis(1500);
/// After a failure, time until the job is terminated by force.
const FORCE: Duration = Duration::from_secs(6);

/// One rank that is a process.
pub(crate) struct Process {
    shared: Arc<Shared>,
    timeout: Duration,
    answers: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    post: Arc<dyn ControlTransport>,
    recorder: Arc<FlightRecorder>,
    failure: Mutex<Option<(FailureReport, Instant)>>,
    /// The last call seen from each rank.
    heard: Mutex<Vec<Option<(String, Instant)>>>,
    over: AtomicBool,
}

impl Process {
    pub(crate) fn new(post: Arc<dyn ControlTransport>, timeout: Duration) -> Result<Process> {
        let heard = Mutex::new(vec![None; post.size()]);
        let shared = Arc::new(Shared {
            post,
            recorder: Arc::default(),
            failure: Mutex::default(),
            heard,
            over: AtomicBool::new(false),
        });
        let other = shared.clone();
        let spawned =
            std::thread::Builder::new().name("comm answers".into()).spawn(move || other.answer_questions());
        let answers = spawned.map_err(|e| crate::Error::Launch(format!("no thread for answers: {e}")))?;
        Ok(Process { shared, timeout, answers: Some(answers) })
    }

    pub(crate) fn post(&self) -> &dyn ControlTransport {
        &*self.shared.post
    }

    pub(crate) fn recorder(&self) -> &Arc<FlightRecorder> {
        &self.shared.recorder
    }

    /// The first failure known to this rank.
    pub(crate) fn failure(&self) -> Option<FailureReport> {
        self.shared.failed().map(|(failure, _)| failure)
    }

    /// Fails if a rank has failed.
    pub(crate) fn alive(&self) -> Result<(), OpError> {
        match self.failure() {
            None => Ok(()),
            failure => Err(OpError::RanksMissing { missing: vec![], ended: vec![], failure }),
        }
    }

    /// Reports this rank's failure to all others.
    pub(crate) fn fail(&self, failure: FailureReport) {
        if self.shared.note(failure.clone()) {
            let text = encode_failure(&failure);
            let post = self.post();
            for to in (0..post.size()).filter(|r| *r != post.rank()) {
                // A rank that cannot be reached detects it by itself.
                let _ = post.send(to, Topic::FAILURE, text.clone());
            }
        }
    }

    /// Records that `rank` of the job has made this call.
    pub(crate) fn hear(&self, rank: usize, descriptor: &OpDescriptor) {
        let mut heard = self.shared.heard.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = heard.get_mut(rank) {
            *place = Some((descriptor.to_string(), Instant::now()));
        }
    }

    /// The last operations of `rank`: from its own flight recorder, or the last call seen from it.
    pub(crate) fn notes(&self, rank: usize) -> Option<Vec<OpRecord>> {
        let post = self.post();
        if rank == post.rank() {
            return Some(self.recorder().notes());
        }
        let deadline = Instant::now() + ANSWER;
        let mut idle = 0;
        if !post.gone(rank) && post.send(rank, Topic::QUESTION, Vec::new()).is_ok() {
            while Instant::now() < deadline && !post.gone(rank) {
                if let Some(answer) = post.take(rank, Topic::ANSWER) {
                    return decode_notes(&answer);
                }
                post.pause(idle);
                idle += 1;
            }
        }
        let heard = self.shared.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let (call, at) = heard.get(rank)?.clone()?;
        let call = format!("{call}, then did not answer any more: last heard of");
        Some(vec![OpRecord { call, progress: OpStatus::Done, age: at.elapsed() }])
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
            let ended: Vec<(usize, bool)> =
                waiting.iter().filter(|(_, r)| self.post().gone(*r)).map(|(g, _)| (*g, false)).collect();
            if late || failure.is_some() || !ended.is_empty() {
                let missing = waiting.into_iter().map(|(group, _)| group).collect();
                return Err(OpError::RanksMissing { missing, ended, failure });
            }
            self.post().pause(idle);
            idle += 1;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let post = &*self.shared.post;
        if std::thread::panicking() {
            let reason = "it panicked".to_string();
            self.fail(FailureReport { rank: post.rank(), stall: false, reason });
        }
        if self.failure().is_none() {
            for to in (0..post.size()).filter(|r| *r != post.rank()) {
                let _ = post.send(to, Topic::GOODBYE, Vec::new());
            }
            let mut left: Vec<usize> = (0..post.size()).filter(|r| *r != post.rank()).collect();
            let ready = || {
                left.retain(|r| post.take(*r, Topic::GOODBYE).is_none() && !post.gone(*r));
                Ok(left.is_empty().then_some(()))
            };
            if self.wait(Instant::now() + self.timeout, ready, Vec::new).is_ok() {
                self.shared.over.store(true, Ordering::Release);
                if let Some(answers) = self.answers.take() {
                    let _ = answers.join();
                }
                return post.close();
            }
            let reason = "the other ranks did not come to the end of the job".to_string();
            self.fail(FailureReport { rank: post.rank(), stall: true, reason });
        }
        // A launcher kills the job when the first process exits; give the others time to report first.
        if let Some((_, at)) = self.shared.failed() {
            std::thread::sleep((at + LINGER).saturating_duration_since(Instant::now()));
        }
    }
}

impl Shared {
    fn failed(&self) -> Option<(FailureReport, Instant)> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stores the first failure; returns whether this is it.
    fn note(&self, failure: FailureReport) -> bool {
        let mut first = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let new = first.is_none();
        first.get_or_insert((failure, Instant::now()));
        new
    }

    fn answer_questions(&self) {
        let here = self.post.rank();
        while !self.over.load(Ordering::Acquire) {
            for rank in (0..self.post.size()).filter(|r| *r != here) {
                while self.post.take(rank, Topic::QUESTION).is_some() {
                    let _ = self.post.send(rank, Topic::ANSWER, encode_notes(&self.recorder.notes()));
                }
                if let Some(text) = self.post.take(rank, Topic::FAILURE) {
                    self.note(decode_failure(rank, &text));
                }
            }
            if self.failed().is_some_and(|(_, at)| at.elapsed() > FORCE) {
                eprintln!("rank {here}: a rank has failed and the job did not end by itself: ending it");
                self.post.abort();
                std::process::exit(1);
            }
            std::thread::sleep(LOOK);
        }
    }
}

fn encode_failure(failure: &FailureReport) -> Vec<u8> {
    let mut text = vec![u8::from(failure.stall)];
    text.extend(failure.reason.as_bytes());
    text
}

fn decode_failure(rank: usize, text: &[u8]) -> FailureReport {
    let stall = text.first() == Some(&1);
    FailureReport {
        rank,
        stall,
        reason: String::from_utf8_lossy(text.get(1..).unwrap_or_default()).into_owned(),
    }
}

const STATUSES: [OpStatus; 4] = [OpStatus::Waiting, OpStatus::Running, OpStatus::Done, OpStatus::Failed];

/// Encodes records as (status, age in milliseconds, length, text) each.
fn encode_notes(notes: &[OpRecord]) -> Vec<u8> {
    let mut out = Vec::new();
    for n in notes {
        out.push(STATUSES.iter().position(|p| *p == n.progress).unwrap_or(0) as u8);
        out.extend((n.age.as_millis() as u64).to_le_bytes());
        out.extend((n.call.len() as u64).to_le_bytes());
        out.extend(n.call.as_bytes());
    }
    out
}

fn decode_notes(mut bytes: &[u8]) -> Option<Vec<OpRecord>> {
    let mut notes = Vec::new();
    while !bytes.is_empty() {
        let (head, rest) = bytes.split_at_checked(17)?;
        let number = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
        let (text, rest) = rest.split_at_checked(usize::try_from(number(9)?).ok()?)?;
        let progress = *STATUSES.get(usize::from(head[0]))?;
        let call = String::from_utf8_lossy(text).into_owned();
        notes.push(OpRecord { call, progress, age: Duration::from_millis(number(1)?) });
        bytes = rest;
    }
    Some(notes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn notes_travel_and_rubbish_is_refused() {
        let notes: Vec<OpRecord> = STATUSES
            .iter()
            .map(|p| OpRecord {
                call: format!("a call ü {p:?}"),
                progress: *p,
                age: Duration::from_millis(1234),
            })
            .collect();
        let bytes = encode_notes(&notes);
        assert_eq!(format!("{:?}", decode_notes(&bytes).unwrap()), format!("{notes:?}"));
        (1..bytes.len()).for_each(|cut| {
            if let Some(some) = decode_notes(&bytes[..cut]) {
                assert!(some.len() < notes.len());
            }
        });
        assert!(decode_notes(&[9; 40]).is_none());
    }
}
