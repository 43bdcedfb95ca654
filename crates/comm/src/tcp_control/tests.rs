//! Ranks as threads that communicate over the loopback interface.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::backend::{Descriptors, FailureReport, OpError};
use crate::control::MAX_WAITING;
use crate::op_descriptor::{OpDescriptor, OpKind};
use crate::process::{AfterFailure, Process};
use crate::process_group::ProcessGroup;
use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::Ordering;

/// An address with a free port.
fn rendezvous() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn join(rank: usize, size: usize, at: &str, timeout: Duration) -> Arc<Process> {
    let job = LaunchEnv::for_test(rank, size, at);
    let control = TcpControl::connect(&job, Duration::from_secs(20)).unwrap();
    Arc::new(Process::new(Arc::new(control), timeout, AfterFailure::Exit).unwrap())
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

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
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
        p.flight_recorder().begin(0, Arc::new(descriptor));
        all.all_gather_bytes(&[], soon()).unwrap();
        let records = p.last_ops((me + 1) % 4).unwrap();
        assert!(records[0].call.contains(if me == 1 { "left" } else { "right" }), "{records:?}");
        all.all_gather_bytes(&[], soon()).unwrap();
    });
}

#[test]
fn bytes_of_any_length_are_gathered() {
    on_ranks(3, Duration::from_secs(20), |p| {
        let all = ProcessGroup::new(p, 0, "world", &[0, 1, 2], soon()).unwrap().unwrap();
        // A root through which no messages are forwarded.
        let some = ProcessGroup::new(p, 1, "some", &[2, 0], soon()).unwrap();
        let bytes = |rank: usize, n: usize| -> Vec<u8> { (0..n).map(|i| (i * 7 + rank) as u8).collect() };
        for (group, lens) in [(Some(&all), [35, 0, 21]), (Some(&all), [0; 3]), (some.as_ref(), [9, 0, 10])] {
            let Some(group) = group else { continue };
            let mine = bytes(p.control().rank(), lens[p.control().rank()]);
            let wanted: Vec<_> = group.ranks.iter().map(|r| bytes(*r, lens[*r])).collect();
            let gather = |mine: &[u8]| group.gather_through_root(Topic::bytes(group.index), mine, soon());
            assert_eq!(group.gather_in_rounds(10, &mine, gather).unwrap(), wanted);
            assert_eq!(group.gather_bytes_through_root(&mine, soon()).unwrap(), wanted);
            assert_eq!(group.all_gather_bytes(&mine, soon()).unwrap(), wanted);
        }
        // More than a frame may have, and than the parts of all ranks may have together.
        let Some(some) = some else { return };
        let mine = vec![some.me as u8; [MAX_PAYLOAD + 1, MAX_PAYLOAD / 2][some.me]];
        let gathered = some.gather_bytes_through_root(&mine, soon()).unwrap();
        let lens: Vec<_> = gathered.iter().map(Vec::len).collect();
        assert_eq!(lens, [MAX_PAYLOAD + 1, MAX_PAYLOAD / 2]);
        assert!(gathered[some.me] == mine && gathered[1 - some.me][MAX_PAYLOAD / 4] == 1 - some.me as u8);
    });
}

#[test]
fn missing_ranks_are_named_and_failures_broadcast() {
    on_ranks(3, Duration::from_secs(1), |p| {
        let me = p.control().rank();
        // Otherwise the monitor ends this process, with all its tests, some seconds after the failure.
        let _ended = OnDrop(|| p.shared.finished.store(true, Ordering::Release));
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
            p.fail(FailureReport {
                rank: 0,
                stall: true,
                diagnosis: false,
                is_final: false,
                reason: "tired".into(),
            });
        }
        assert!(all.exchange_descriptors(&descriptor, soon()).is_err(), "fails at once after a failure");
    });
}

/// The connections of a job of `size` ranks, as `(those of rank 0, those to rank 0)`.
fn connected(size: usize) -> (HashMap<usize, TcpStream>, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let pairs = (1..size).map(|r| {
        let there = TcpStream::connect(at).unwrap();
        ((r, listener.accept().unwrap().0), there)
    });
    pairs.unzip()
}

/// Waits until `ready` is true.
fn until(what: &str, ready: impl Fn() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_process_that_went_is_noticed_and_rank_0_by_all() {
    let (zero, mut others) = connected(3);
    let two = TcpControl::over(2, 3, HashMap::from([(0, others.pop().unwrap())])).unwrap();
    let zero = TcpControl::over(0, 3, zero).unwrap();
    drop(others);
    until("rank 1 has gone", || zero.has_exited(1) && two.has_exited(1));
    assert!(!zero.has_exited(2) && !two.has_exited(0) && two.broken().is_none() && zero.broken().is_none());
    zero.abort();
    until("rank 0 has gone", || two.has_exited(0));
    assert_eq!(two.broken(), Some((0, None)));
}

/// Who broke the protocol, and how.
fn violation(control: &TcpControl) -> (usize, String) {
    let (rank, what) = control.broken().unwrap();
    (rank, what.unwrap())
}

#[test]
fn a_rank_that_speaks_for_another_is_named() {
    let (zero, mut others) = connected(3);
    let zero = TcpControl::over(0, 3, zero).unwrap();
    let good = Frame { from: 1, to: 0, topic: Topic(5), payload: b"x".to_vec() };
    others[0].write_all(&good.encode()).unwrap();
    until("rank 1 is heard", || zero.try_receive(1, Topic(5)).is_some());
    others[1].write_all(&good.encode()).unwrap();
    until("rank 2 is found out", || zero.broken().is_some());
    let (rank, what) = violation(&zero);
    assert!(rank == 2 && what.contains("as rank 1"), "rank {rank}: {what}");
    assert!(zero.try_receive(1, Topic(5)).is_none(), "the frame does not count");
}

#[test]
fn a_mailbox_takes_so_much_and_no_more() {
    let (zero, mut others) = connected(2);
    let zero = TcpControl::over(0, 2, zero).unwrap();
    let frame = Frame { from: 1, to: 0, topic: Topic(5), payload: vec![0; 1 << 26] }.encode();
    let mut sent = 0;
    // The attack was six gigabytes.
    while sent < 6 << 30 && others[0].write_all(&frame).is_ok() {
        sent += frame.len();
    }
    assert!(sent < 2 * MAX_WAITING, "{sent} bytes were taken");
    let (rank, what) = violation(&zero);
    assert!(rank == 1 && what.contains("512 MiB"), "rank {rank}: {what}");
}

#[test]
fn a_stalled_reader_neither_blocks_senders_nor_counts_as_dead() {
    let (zero, others) = connected(3);
    let kept: Vec<TcpStream> = [1, 2].map(|r| zero[&r].try_clone().unwrap()).into();
    let zero = TcpControl::over(0, 3, zero).unwrap();
    // Rank 1 is stopped: its kernel answers, but nobody reads.
    let start = Instant::now();
    (0..64).for_each(|_| zero.send(1, Topic(5), vec![0; 1 << 20]).unwrap());
    zero.send(2, Topic(5), b"x".to_vec()).unwrap();
    assert!(start.elapsed() < Duration::from_secs(2), "sends do not wait");
    let mut frame = [0; 21];
    std::io::Read::read_exact(&mut &others[1], &mut frame).unwrap();
    // Longer than a dead host would be given, with its buffers full.
    std::thread::sleep(outgoing::DEAD_HOST + Duration::from_secs(3));
    assert!(!zero.has_exited(1) && zero.broken().is_none());
    // It goes on, and from then on the death of its host would be noticed again.
    let off = |s: &TcpStream| rustix::net::sockopt::tcp_user_timeout(s).unwrap() == 0;
    assert!(off(&kept[0]) && !off(&kept[1]));
    let mut reading = BufReader::new(&others[0]);
    let end = End { here: 1, peer: 0, size: 3 };
    (0..64).for_each(|_| assert_eq!(Frame::read(&mut reading, end).unwrap().unwrap().payload.len(), 1 << 20));
    let answer = Frame { from: 1, to: 0, topic: Topic(6), payload: Vec::new() };
    (&others[0]).write_all(&answer.encode()).unwrap();
    until("rank 1 is heard", || zero.try_receive(1, Topic(6)).is_some());
    assert!(!off(&kept[0]));
}

#[test]
fn a_dead_host_is_noticed_by_its_silence() {
    let (zero, others) = connected(2);
    for stream in zero.values().chain(&others) {
        prepare(stream).unwrap();
    }
    let value = |s: &TcpStream| {
        use rustix::net::sockopt;
        (
            sockopt::socket_keepalive(s).unwrap(),
            sockopt::tcp_keepidle(s).unwrap() + sockopt::tcp_keepintvl(s).unwrap() * 3,
            sockopt::tcp_user_timeout(s).unwrap(),
        )
    };
    assert_eq!(value(&others[0]), (true, outgoing::DEAD_HOST, 5000));
}
