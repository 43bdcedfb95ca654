//! Errors of operations that could not complete: which ranks are missing, and what they did last.

use crate::Error;
use crate::backend::{FailureReport, JobBackend, OpError};
use crate::flight_recorder::{OpRecord, OpStatus};
use crate::op_descriptor::OpDescriptor;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Now plus `timeout`, capped at 30 days, well within the range of `Instant`.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(30 * 24 * 3600))
}

/// Says why the job ends, on standard error and in the log: these may be the last words of this process, so that they need
/// no subscriber. Nothing else is printed by this crate.
pub(crate) fn say(what: std::fmt::Arguments) {
    tracing::error!(shown = true, "{what}");
    // In one piece: several processes may share the terminal.
    let _ = std::io::stderr().write_all(format!("ferrotron: {what}\n").as_bytes());
}

/// Turns an [`OpError`] into this rank's error, prints it if ranks are missing, and reports it to the other ranks.
pub(crate) fn fail_op(
    job_backend: &dyn JobBackend,
    ranks: &[usize],
    call: &OpDescriptor,
    waited: Duration,
    error: OpError,
) -> Error {
    let error = explain(job_backend, ranks, call, waited, error);
    if matches!(error, Error::Stall { .. } | Error::Ended { .. }) {
        // The thread that gets the error may itself be stuck, or be one of many.
        say(format_args!("{error}"));
    }
    report(job_backend, &error);
    error
}

/// Reports this rank's failure, so that the others fail too.
pub(crate) fn report(job_backend: &dyn JobBackend, error: &Error) {
    let stall = matches!(error, Error::Stall { .. } | Error::Ended { .. });
    job_backend.fail(FailureReport {
        rank: job_backend.rank(),
        stall,
        diagnosis: false,
        is_final: matches!(error, Error::Mismatch { .. } | Error::Argument { .. } | Error::Group { .. }),
        reason: error.to_string(),
    });
}

fn explain(
    job_backend: &dyn JobBackend,
    ranks: &[usize],
    call: &OpDescriptor,
    waited: Duration,
    error: OpError,
) -> Error {
    let rank = job_backend.rank();
    let global = |r: usize| ranks.get(r).copied().unwrap_or(r);
    match error {
        OpError::RanksMissing { missing, ended, failure } => {
            let missing: Vec<usize> = missing.into_iter().map(global).collect();
            // The report of a failure that is not a stall is the cause; so is that of a rank missing here, and any
            // report if no rank is missing here.
            if let Some(FailureReport { rank: by, reason, .. }) =
                failure.filter(|f| !f.stall || missing.is_empty() || missing.contains(&f.rank))
            {
                return Error::Abandoned { rank, call: call.to_string(), by, reason };
            }
            if ended.is_empty() {
                // Ranks that wait for each other's messages do so because nobody forwards them.
                let relay = job_backend.silent_relay().filter(|r| !missing.contains(r));
                let missing = relay.map_or(missing, |r| vec![r]);
                let missing: Vec<_> = missing.into_iter().map(|r| (r, job_backend.last_ops(r))).collect();
                if let Some(FailureReport { rank: by, reason, .. }) = reported_cause(job_backend, &missing) {
                    return Error::Abandoned { rank, call: call.to_string(), by, reason };
                }
                let missing = missing.into_iter().map(|(r, records)| (r, describe_last(records))).collect();
                return Error::Stall { rank, call: call.to_string(), seconds: waited.as_secs_f64(), missing };
            }
            let how = |panicked: bool| if panicked { "it panicked" } else { "it has exited" };
            let ended = ended
                .into_iter()
                .map(|(r, panicked)| {
                    (
                        global(r),
                        format!("{}; {}", how(panicked), describe_last(job_backend.last_ops(global(r)))),
                    )
                })
                .collect();
            Error::Ended { rank, call: call.to_string(), ended }
        }
        OpError::Mismatch { peer, mine, theirs } => Error::Mismatch {
            rank,
            call: mine.to_string(),
            other: global(peer),
            other_call: theirs.to_string(),
        },
        OpError::Backend { what } => Error::Backend { call: call.to_string(), what },
        OpError::Tensor(e) => Error::Tensor(e),
    }
}

/// How long a rank that waits for another waiting rank lets that one report first: enough for a flight-recorder query
/// to time out.
const REPORT_GRACE: Duration = Duration::from_millis(2000);

/// If the missing ranks are themselves waiting, waits for the report of the rank closest to the cause.
fn reported_cause(
    job_backend: &dyn JobBackend,
    missing: &[(usize, Option<Vec<OpRecord>>)],
) -> Option<FailureReport> {
    let waits = |records: &Option<Vec<OpRecord>>| {
        let last = records.as_ref().and_then(|records| records.last().map(|n| n.status));
        matches!(last, Some(OpStatus::Waiting | OpStatus::Running | OpStatus::Failed))
    };
    if !missing.iter().any(|(_, records)| waits(records)) {
        return None;
    }
    let until = Instant::now() + REPORT_GRACE;
    loop {
        let reported = job_backend.failure().filter(|f| f.rank != job_backend.rank());
        if reported.is_some() || Instant::now() >= until {
            return reported;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn describe_last(records: Option<Vec<OpRecord>>) -> String {
    match records {
        None => "its last operation is unknown".to_string(),
        Some(records) => records.last().map_or("it has made no call yet".to_string(), |n| format!("it {n}")),
    }
}

/// Compares the descriptors of all ranks. The error names the same two ranks on every rank: one that agrees with most
/// others, and the first that conflicts with it.
pub(crate) fn compare(ranks: &[usize], descriptors: &[Arc<OpDescriptor>]) -> Result<(), Error> {
    let conflict = |a: usize, b: usize| descriptors[a].conflicts_with(a, &descriptors[b], b);
    let n = descriptors.len();
    let fits = |a: usize| (0..n).filter(|b| !conflict(a, *b)).count();
    // Usually all equal the first, or match in pairs: then one pass (or all pairs) is enough.
    let pairwise = descriptors.iter().any(|b| b.is_pairwise());
    let clean = if pairwise { (0..n).all(|a| fits(a) == n) } else { fits(0) == n };
    if clean {
        return Ok(());
    }
    // Only ranks with a conflict: in pairs, majority may match everyone. `max_by_key` returns the last maximum.
    let majority = (0..n).rev().filter(|a| fits(*a) < n).max_by_key(|a| fits(*a)).unwrap_or(0);
    // A call that does not match itself (it sends itself another count than it receives) is its own counterpart.
    let other = (0..n).filter(|b| *b != majority).find(|b| conflict(majority, *b)).unwrap_or(majority);
    Err(Error::Mismatch {
        rank: ranks[majority],
        call: descriptors[majority].to_string(),
        other: ranks[other],
        other_call: descriptors[other].to_string(),
    })
}
