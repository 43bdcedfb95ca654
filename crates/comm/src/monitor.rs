//! The monitor of a process: a thread that answers other ranks and looks for failures while the rank computes.
//!
//! It passes on failure reports and answers questions. Where operations are enqueued on a GPU without waiting for other
//! ranks (NCCL), it also
//! - follows every operation by its events,
//! - sends a heartbeat with this rank's marks to rank 0, and rank 0 sends one to everybody,
//! - reports a rank that exited before the job's end,
//! - reports to rank 0 when no operation completes for the timeout; rank 0 then asks every rank and tells all of them
//!   the cause ([`crate::diagnosis`]).
//!
//! So the frames that a rank sends do not depend on the number of its operations, and only rank 0's on the number of
//! ranks. After a failure the monitor makes sure that the process ends.

use crate::backend::FailureReport;
use crate::call_digest::{Difference, Mark, MarkComparer};
use crate::control::Topic;
use crate::diagnosis::{self, Diagnosis, RankState, diagnose};
use crate::flight_recorder::{OpRecord, OpStatus};
use crate::membership::TEMPORARY_FAILURE;
use crate::process::{AfterFailure, ProcessState, decode_failure};
use crate::{Error, Result, snapshot, watchdog};
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Poll interval; bounds the delay until a failure is noticed.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Interval of heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// How long all ranks together may take to answer when rank 0 looks for a cause.
const COLLECT_TIMEOUT: Duration = Duration::from_millis(1000);
/// How long a stalled rank waits for rank 0 to name the cause.
const DIAGNOSIS_TIMEOUT: Duration = Duration::from_millis(2000);
/// A host that waits has a deadline of its own; the monitor comes after it.
const HOST_GRACE: Duration = Duration::from_secs(1);
/// After a failure, time until the process is ended by force.
const FORCE_EXIT: Duration = Duration::from_secs(2);

/// Starts the monitor of a process.
pub(crate) fn start(state: Arc<ProcessState>) -> Result<std::thread::JoinHandle<()>> {
    let mut monitor =
        Monitor { state, comparer: MarkComparer::default(), beat: Instant::now(), stalled: None };
    let failed = |e: std::io::Error| Error::Launch(format!("cannot start the monitor thread: {e}"));
    let state = monitor.state.clone();
    // Of its own: the monitor asks the GPU's driver, which may not answer after a failure.
    let end = move || end_by_force(&state);
    std::thread::Builder::new().name("comm time limit".into()).spawn(end).map_err(failed)?;
    std::thread::Builder::new().name("comm monitor".into()).spawn(move || monitor.run()).map_err(failed)
}

struct Monitor {
    state: Arc<ProcessState>,
    /// Rank 0's.
    comparer: MarkComparer,
    /// Time of the last heartbeat.
    beat: Instant,
    /// When this rank reported a stall to rank 0.
    stalled: Option<Instant>,
}

impl Monitor {
    fn run(&mut self) {
        while !self.state.finished.load(Ordering::Acquire) {
            self.serve();
            if self.state.failed().is_none() && self.state.watches_device.load(Ordering::Acquire) {
                self.watch();
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Answers questions and takes failure reports.
    fn serve(&self) {
        let (state, control) = (&*self.state, &*self.state.control);
        for rank in (0..control.size()).filter(|r| *r != control.rank()) {
            while control.try_receive(rank, Topic::QUESTION).is_some() {
                state.recorder.poll();
                let _ = control.send(rank, Topic::ANSWER, snapshot::encode(&state.recorder.snapshot()));
            }
            if let Some(text) = control.try_receive(rank, Topic::FAILURE) {
                let failure = decode_failure(rank, &text);
                if state.set_failure(failure.clone()) && failure.diagnosis {
                    self.print(&failure);
                }
            }
        }
        if let Some((rank, what)) = control.broken() {
            self.report(match what {
                None => self.exited(rank),
                Some(what) => Diagnosis { rank, text: format!("rank {rank} broke the protocol: {what}") },
            });
        }
    }

    /// Looks after operations that nobody waits for.
    fn watch(&mut self) {
        let state = self.state.clone();
        let here = state.control.rank();
        state.recorder.poll();
        self.heartbeats();
        let others = (0..state.control.size()).filter(|r| *r != here);
        let exited = others.clone().find(|r| state.control.has_exited(*r));
        if let Some(rank) = exited.filter(|_| !state.leaving.load(Ordering::Acquire)) {
            return self.report(self.exited(rank));
        }
        let asked =
            here == 0 && others.clone().any(|r| state.control.try_receive(r, Topic::STALLED).is_some());
        match self.stalled {
            Some(at) if here != 0 && at.elapsed() > DIAGNOSIS_TIMEOUT => {
                let now = state.recorder.current().map_or(String::new(), |r| format!("; rank {here} {r}"));
                let last = diagnosis::last_deed(state.seen(0).as_ref());
                let text =
                    format!("stalled: rank 0 ({last}) does not respond: stopped, or the host hangs{now}");
                self.report(Diagnosis { rank: 0, text });
            }
            Some(_) => {}
            None if asked || self.is_stalled() => {
                self.stalled = Some(Instant::now());
                match here {
                    0 => self.find_cause(),
                    _ => drop(state.control.send(0, Topic::STALLED, Vec::new())),
                }
            }
            None => {}
        }
    }

    fn exited(&self, rank: usize) -> Diagnosis {
        let (state, here) = (&self.state, self.state.control.rank());
        let now = state.recorder.current().map_or(String::new(), |r| format!("; rank {here} {r}"));
        let last = diagnosis::last_deed(state.seen(rank).as_ref());
        Diagnosis { rank, text: format!("rank {rank} has exited ({last}){now}") }
    }

    fn is_stalled(&self) -> bool {
        let grace = |status| if status == OpStatus::Waiting { HOST_GRACE } else { Duration::ZERO };
        let (recorder, timeout) = (&self.state.recorder, self.state.timeout.get());
        recorder.stalled(timeout).is_some_and(|op| op.age >= timeout + grace(op.status))
    }

    /// Rank 0: asks every rank and reports the cause.
    fn find_cause(&self) {
        let groups = self.state.groups.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.report(diagnose(&self.collect(), &groups));
    }

    /// What every rank has done.
    fn collect(&self) -> Vec<RankState> {
        let others: Vec<usize> = (1..self.state.control.size()).collect();
        let mut states = vec![RankState::Answered(self.state.recorder.snapshot())];
        states.extend(self.state.ask(&others, COLLECT_TIMEOUT));
        states
    }

    /// Sends this rank's heartbeat if it is due; rank 0 also reads those of others and compares marks.
    fn heartbeats(&mut self) {
        let state = self.state.clone();
        let control = &*state.control;
        let here = control.rank();
        if self.beat.elapsed() >= HEARTBEAT {
            self.beat = Instant::now();
            let marks = state.digest.take_marks();
            if here == 0 {
                self.compare(0, &marks);
                let text = encode_heartbeat(state.recorder.current().as_ref(), &[]);
                (1..control.size()).for_each(|to| drop(control.send(to, Topic::HEARTBEAT, text.clone())));
            } else {
                let text = encode_heartbeat(state.recorder.current().as_ref(), &marks);
                let _ = control.send(0, Topic::HEARTBEAT, text);
            }
        }
        let senders = if here == 0 { 1..control.size() } else { 0..1 };
        for rank in senders {
            while let Some(text) = control.try_receive(rank, Topic::HEARTBEAT) {
                let Some((record, marks)) = decode_heartbeat(&text) else { continue };
                record.into_iter().for_each(|r| state.saw(rank, r));
                self.compare(rank, &marks);
            }
        }
    }

    /// Rank 0: compares the marks of `rank` with those of the others.
    fn compare(&mut self, rank: usize, marks: &[Mark]) {
        for mark in marks {
            let groups = self.state.groups.lock().unwrap_or_else(PoisonError::into_inner);
            let members = groups.get(&mark.channel.group).cloned().unwrap_or_default();
            drop(groups);
            // A rank speaks only for groups that it is a member of.
            if !members.contains(&rank) {
                continue;
            }
            if let Some(difference) = self.comparer.add(rank, *mark, members.len()) {
                return self.report_difference(difference, &members);
            }
        }
    }

    /// Reports different calls: by their descriptors where ranks still have them.
    fn report_difference(&self, difference: Difference, members: &[usize]) {
        let groups = self.state.groups.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let found = diagnosis::different_calls(&self.collect(), &groups);
        self.report(found.unwrap_or_else(|| {
            let Difference { channel, sequence, ranks: (a, b) } = difference;
            let who = match a == b {
                true => format!("the splits of ranks {members:?}"),
                false => format!("the calls of ranks {a} and {b}"),
            };
            let text = format!(
                "ranks differ: {who} up to sequence number {sequence} of group {}; all ranks of a group must make the \
                 same calls in the same order (--check compares every call and names the first that differs)",
                channel.group
            );
            Diagnosis { rank: b, text }
        }));
    }

    /// Tells all ranks why the job ends.
    fn report(&self, Diagnosis { rank, text: reason }: Diagnosis) {
        let failure = FailureReport { rank, stall: false, diagnosis: true, is_final: false, reason };
        if self.state.fail(failure.clone()) {
            self.print(&failure);
        }
    }

    /// The main thread may be stuck on its GPU and never print the error it gets.
    fn print(&self, failure: &FailureReport) {
        watchdog::say(format_args!("rank {}: {}", self.state.control.rank(), failure.reason));
    }
}

/// Makes sure that a process ends, or leaves its failed communication, within a time limit.
fn end_by_force(state: &ProcessState) {
    let (limit, code) = match state.after_failure {
        AfterFailure::Exit => (FORCE_EXIT, 1),
        AfterFailure::Restart(hard) => (hard, TEMPORARY_FAILURE),
    };
    while !state.finished.load(Ordering::Acquire) {
        if state.failed().is_some_and(|(_, at)| at.elapsed() > limit) {
            let here = state.control.rank();
            watchdog::say(format_args!(
                "rank {here}: a rank has failed and the job did not exit by itself; terminating it"
            ));
            state.control.abort();
            exit_now(code);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Ends the process without its exit handlers: the GPU driver's would wait for a kernel that never ends.
fn exit_now(code: i32) -> ! {
    signal_hook::low_level::exit(code)
}

/// Encodes the current operation (length, status, age, text), then marks.
fn encode_heartbeat(current: Option<&OpRecord>, marks: &[Mark]) -> Vec<u8> {
    let mut out = Vec::new();
    let call = current.map_or("", |r| r.call.as_str());
    out.extend((call.len() as u32).to_le_bytes());
    let status = current.and_then(|r| OpStatus::ALL.iter().position(|s| *s == r.status));
    out.push(status.map_or(u8::MAX, |s| s as u8));
    out.extend((current.map_or(0, |r| r.age.as_millis() as u64)).to_le_bytes());
    out.extend(call.as_bytes());
    marks.iter().for_each(|m| m.encode(&mut out));
    out
}

fn decode_heartbeat(bytes: &[u8]) -> Option<(Option<OpRecord>, Vec<Mark>)> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let (status, rest) = rest.split_first()?;
    let (age, rest) = rest.split_first_chunk::<8>()?;
    let (call, marks) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let record = OpStatus::ALL.get(usize::from(*status)).map(|status| OpRecord {
        call: String::from_utf8_lossy(call).into_owned(),
        status: *status,
        age: Duration::from_millis(u64::from_le_bytes(*age)),
    });
    let (marks, []) = marks.as_chunks::<{ Mark::BYTES }>() else { return None };
    Some((record, marks.iter().map(Mark::decode).collect()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::flight_recorder::Channel;

    #[test]
    fn heartbeats_travel_and_rubbish_is_refused() {
        let record = OpRecord {
            call: "all-reduce 'ü'".into(),
            status: OpStatus::Running,
            age: Duration::from_millis(1234),
        };
        let mark = |sequence| Mark {
            channel: Channel { group: 3, route: Some((1, 2)) },
            sequence,
            chain: 5,
            balance: 6,
        };
        let marks = [mark(7), mark(15)];
        let bytes = encode_heartbeat(Some(&record), &marks);
        let (back, back_marks) = decode_heartbeat(&bytes).unwrap();
        assert_eq!((format!("{:?}", back.unwrap()), back_marks), (format!("{record:?}"), marks.to_vec()));
        for cut in 0..bytes.len() {
            assert!(decode_heartbeat(&bytes[..cut]).is_none_or(|(_, marks)| marks.len() < 2), "{cut}");
        }
        assert!(decode_heartbeat(&encode_heartbeat(None, &[])).unwrap().0.is_none());
    }
}
