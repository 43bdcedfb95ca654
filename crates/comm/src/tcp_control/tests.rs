//! Ranks as threads that communicate over the loopback interface.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::backend::{Descriptors, FailureReport, OpError};
use crate::op_descriptor::{OpDescriptor, OpKind};
use crate::process::Process;
use crate::process_group::ProcessGroup;

/// An address with a free port.
fn rendezvous() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn join(rank: usize, size: usize, at: &str, timeout: Duration) -> Arc<Process> {
    let control = TcpControl::connect(rank, size, at, Duration::from_secs(20)).unwrap();
    Arc::new(Process::new(Arc::new(control), timeout).unwrap())
}

fn on_ranks<T: Send>(n: usize, timeout: Duration, f: impl Fn(&Arc<Process>) -> T + Sync) -> Vec<T> {
    let at = rendezvous();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..n)
            .map(|r| (r, at.clone()))
            .map(|(r, at)| {
                scope.spawn({
                    let f = &f;
                    move || f(&join(r, n, &at, timeout))
                })
            })
            .collect();
        ranks.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn processes_meet_and_agree_or_hear_what_differs() {
    on_ranks(4, Duration::from_secs(20), |p| {
        let me = p.control().rank();
        let all = ProcessGroup::new(p, 0, "world", &[0, 1, 2, 3], soon()).unwrap().unwrap();
        let some = ProcessGroup::new(p, 1, "some", &[3, 1], soon()).unwrap();
        assert_eq!(some.as_ref().map(|c| c.me), [None, Some(1), None, Some(0)][me]);
        for round in 0..50 {
            let mut descriptor = OpDescriptor::new("world", OpKind::Barrier, "step");
            descriptor.sequence = round;
            assert!(matches!(all.exchange_descriptors(&descriptor, soon()), Ok(Descriptors::AllEqual)));
            let bytes = all.all_gather_bytes(&vec![me as u8; me * 10], soon()).unwrap();
            assert!(bytes.iter().enumerate().all(|(r, b)| *b == vec![r as u8; r * 10]));
        }
        let descriptor = OpDescriptor::new("world", OpKind::Barrier, if me == 2 { "left" } else { "right" });
        let Ok(Descriptors::PerRank(descriptors)) = all.exchange_descriptors(&descriptor, soon()) else {
            panic!("they differ")
        };
        let labels: Vec<&str> = descriptors.iter().map(|n| &*n.label).collect();
        assert_eq!(labels, ["right", "right", "left", "right"]);
        // Queries are answered while the rank does something else.
        p.flight_recorder().begin(Arc::new(descriptor));
        all.all_gather_bytes(&[], soon()).unwrap();
        let records = p.last_ops((me + 1) % 4).unwrap();
        assert!(records[0].call.contains(if me == 1 { "left" } else { "right" }), "{records:?}");
        all.all_gather_bytes(&[], soon()).unwrap();
    });
}

#[test]
fn who_does_not_come_is_named_and_failures_are_heard() {
    on_ranks(3, Duration::from_secs(1), |p| {
        let me = p.control().rank();
        let all = ProcessGroup::new(p, 0, "world", &[0, 1, 2], soon()).unwrap().unwrap();
        let descriptor = OpDescriptor::new("world", OpKind::Barrier, "step");
        if me == 1 {
            std::thread::sleep(Duration::from_millis(600));
            return;
        }
        let deadline = Instant::now() + Duration::from_millis(if me == 0 { 200 } else { 20_000 });
        let Err(OpError::RanksMissing { missing, failure, .. }) =
            all.exchange_descriptors(&descriptor, deadline)
        else {
            panic!()
        };
        assert_eq!(missing, [1]);
        assert_eq!(failure.map(|f| f.rank), (me == 2).then_some(0), "reported by rank 0");
        if me == 0 {
            p.fail(FailureReport { rank: 0, stall: true, reason: "tired".into() });
        }
        assert!(all.exchange_descriptors(&descriptor, soon()).is_err(), "fails at once after a failure");
    });
}

#[test]
fn a_process_that_went_is_noticed() {
    let at = rendezvous();
    std::thread::scope(|scope| {
        // A rank that connects and exits without a message.
        scope.spawn(|| drop(connect_to_rank0(1, 3, &at, soon()).unwrap()));
        for rank in [0, 2] {
            let at = &at;
            scope.spawn(move || {
                let p = join(rank, 3, at, Duration::from_millis(100));
                let gone = p.wait(soon(), || Ok(p.control().try_receive(1, Topic(5))), || vec![(1, 1)]);
                let Err(OpError::RanksMissing { ended, .. }) = gone else { panic!() };
                assert_eq!(ended, [(1, false)]);
                p.fail(FailureReport { rank, stall: false, reason: "alone".into() });
            });
        }
    });
}

#[test]
fn those_who_do_not_come_are_named_on_all_who_did() {
    let at = rendezvous();
    let timeout = Duration::from_millis(500);
    std::thread::scope(|scope| {
        for rank in [0, 1] {
            let at = &at;
            scope.spawn(move || {
                let error = TcpControl::connect(rank, 4, at, timeout).err().unwrap().to_string();
                assert!(error.contains("[2, 3]"), "rank {rank}: {error}");
            });
        }
    });
    let error = TcpControl::connect(1, 2, &rendezvous(), timeout).err().unwrap().to_string();
    assert!(error.contains("cannot reach rank 0") && error.contains("MASTER_ADDR"), "{error}");
    let error = TcpControl::connect(1, 2, "no.such.host.invalid:1", timeout).err().unwrap().to_string();
    assert!(error.contains("no.such.host.invalid"), "{error}");
}

#[test]
fn strangers_twins_and_other_jobs_are_not_let_in() {
    let at = rendezvous();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| TcpControl::connect(0, 2, &at, Duration::from_secs(20)).map(drop));
        let stranger = || -> std::io::Result<()> {
            let mut s = TcpStream::connect(&at)?;
            s.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        };
        while stranger().is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let error = TcpControl::connect(1, 3, &at, Duration::from_secs(10)).err().unwrap().to_string();
        assert!(error.contains("rank 1 of 3"), "{error}");
        assert!(zero.join().unwrap().is_err());
    });
}
