//! The coordinator's decisions, and generations of real members in threads of this process.

use super::coordinator::{Action, Coordinator};
use super::messages::{Assign, Join, ToMember};
use super::*;
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

fn policy(size: usize) -> RestartPolicy {
    RestartPolicy {
        size,
        restarts: 3,
        rank_failures: 2,
        soft: Duration::from_secs(10),
        heartbeat: Duration::from_secs(5),
        backoff: Duration::from_secs(1),
        shrink: Vec::new(),
    }
}

fn address(slot: usize) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 1000 + slot as u16))
}

fn join(slot: usize, seat: Option<(u64, usize)>, waiting: bool) -> Join {
    Join {
        process: slot as u64,
        pid: 1,
        host: "node a b".into(),
        slot,
        seat,
        waiting: waiting.then(|| address(slot)),
        steps: 5,
        reason: String::new(),
        rotate: false,
        restarts: 0,
        failures: Vec::new(),
    }
}

/// Ranks by member.
fn seats(actions: &[Action]) -> BTreeMap<u64, usize> {
    let seat = |a: &Action| match a {
        Action::Send(id, ToMember::Assign(Assign { rank, .. })) => Some((*id, *rank)),
        _ => None,
    };
    actions.iter().filter_map(seat).collect()
}

struct Job {
    c: Coordinator,
    now: Instant,
}

impl Job {
    /// `members` processes of a job of `size`, the first generation formed.
    fn running(policy: RestartPolicy, members: usize) -> Job {
        let now = Instant::now();
        let mut job = Job { c: Coordinator::new(policy.clone(), now), now };
        for slot in 0..members {
            assert!(job.c.joined(slot as u64, join(slot, None, true), now).is_empty());
        }
        let given = seats(&job.tick(0.0));
        assert_eq!(given, (0..policy.size).map(|r| (r as u64, r)).collect());
        job
    }

    fn tick(&mut self, seconds: f64) -> Vec<Action> {
        self.now += Duration::from_secs_f64(seconds);
        self.c.tick(self.now, || [7; 32])
    }

    /// The members of these ranks wait for the next generation.
    fn wait(&mut self, generation: u64, ranks: &[usize]) {
        for r in ranks {
            self.c.joined(*r as u64, join(*r, Some((generation, *r)), true), self.now);
        }
    }

    fn beat(&mut self, ids: impl IntoIterator<Item = u64>) {
        ids.into_iter().for_each(|id| self.c.heard(id, self.now));
    }
}

#[test]
fn a_spare_takes_the_rank_of_a_lost_process_at_once() {
    let mut job = Job::running(policy(3), 4);
    let told = job.c.closed(1, job.now);
    assert_eq!(told.len(), 2, "the two survivors are told: {told:?}");
    assert!(seats(&job.tick(0.1)).is_empty(), "survivors have not left yet");
    job.wait(1, &[0, 2]);
    assert_eq!(seats(&job.tick(0.1)), [(0, 0), (2, 2), (3, 1)].into());
}

#[test]
fn without_a_spare_the_restarted_process_is_waited_for() {
    let mut job = Job::running(policy(3), 3);
    job.c.closed(0, job.now);
    job.wait(1, &[1, 2]);
    assert!(seats(&job.tick(3.0)).is_empty());
    job.c.joined(9, join(0, None, true), job.now);
    let actions = job.tick(0.1);
    assert_eq!(seats(&actions), [(9, 0), (1, 1), (2, 2)].into());
    let Action::Send(_, ToMember::Assign(assign)) = &actions[0] else { panic!("{actions:?}") };
    assert_eq!((assign.generation, &assign.replaced[..], assign.rank0), (2, &[0][..], address(0)));
    assert!(assign.reason.contains("rank 0 on node is lost"), "{}", assign.reason);
    // The third loss of slot 0: its process is refused by name.
    job.c.closed(9, job.now);
    let refused = job.c.joined(10, join(0, None, true), job.now);
    let [Action::Send(10, ToMember::Refuse { reason, ended: Ended::Excluded })] = &refused[..] else {
        panic!("{refused:?}")
    };
    assert!(reason.contains("rank 0 on node") && reason.contains("2 failures"), "{reason}");
}

#[test]
fn waits_end_at_the_timeout() {
    // A process that is silent, or that does not leave its failed communication, is ended and replaced.
    let mut job = Job::running(policy(2), 3);
    job.now += Duration::from_secs(4);
    job.beat([0, 2]);
    let actions = job.tick(2.0);
    assert!(actions.iter().any(|a| matches!(a, Action::Evict(1, _))), "{actions:?}");
    job.wait(1, &[0]);
    assert_eq!(seats(&job.tick(0.0)), [(0, 0), (2, 1)].into());
    // Nobody replaces rank 0: after the soft limit the job ends.
    job.c.closed(0, job.now);
    job.c.joined(2, join(2, Some((2, 1)), true), job.now);
    assert!(job.tick(3.0).is_empty());
    job.beat([2]);
    job.tick(4.0);
    job.beat([2]);
    let actions = job.tick(4.0);
    let [Action::Send(2, ToMember::Refuse { reason, ended: Ended::Failed })] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(reason.contains("--spares") && reason.contains("10 s"), "{reason}");
}

#[test]
fn a_job_shrinks_where_that_is_allowed() {
    let mut job = Job::running(RestartPolicy { shrink: vec![4, 2], ..policy(4) }, 4);
    job.c.closed(1, job.now);
    job.wait(1, &[0, 2, 3]);
    for _ in 0..4 {
        job.beat([0, 2, 3]);
        assert!(seats(&job.tick(2.5)).is_empty());
    }
    job.beat([0, 2, 3]);
    job.tick(0.1);
    assert_eq!(seats(&job.tick(0.1)), [(0, 0), (2, 1)].into());
}

#[test]
fn restarts_are_counted_and_slow_down_without_progress() {
    let mut job = Job::running(RestartPolicy { rank_failures: 99, ..policy(2) }, 2);
    let mut id = 1;
    for generation in 1..=4 {
        job.c.closed(id, job.now);
        job.c.joined(0, Join { steps: 0, ..join(0, Some((generation, 0)), true) }, job.now);
        id += 10;
        job.c.joined(id, Join { steps: 0, ..join(1, None, true) }, job.now);
        let wait = [0.0, 1.0, 2.0, 0.0][generation as usize - 1];
        if wait > 0.0 {
            assert!(seats(&job.tick(wait * 0.9)).is_empty(), "generation {generation}");
        }
        let actions = job.tick(wait);
        match generation {
            4 => assert!(format!("{actions:?}").contains("fault.restarts"), "{actions:?}"),
            _ => assert_eq!(seats(&actions), [(0, 0), (id, 1)].into(), "generation {generation}"),
        }
        job.beat([0, id]);
    }
}

#[test]
fn processes_change_places_when_all_ask_for_it() {
    let mut job = Job::running(policy(3), 4);
    let asks = |rank: usize, generation, id: usize| Join {
        rotate: true,
        ..join(id, Some((generation, rank)), true)
    };
    for rank in [0, 1] {
        job.c.joined(rank as u64, asks(rank, 1, rank), job.now);
    }
    assert!(job.tick(0.1).is_empty(), "rank 2 has not left yet");
    job.c.joined(2, asks(2, 1, 2), job.now);
    let actions = job.tick(0.1);
    assert_eq!(seats(&actions), [(0, 1), (1, 2), (2, 0)].into());
    let Action::Send(_, ToMember::Assign(a)) = &actions[0] else { panic!("{actions:?}") };
    assert_eq!((a.rotated, a.restarts, &a.replaced[..]), (true, 0, &[][..]));
    // One of them dies instead: a restart like any other, and the others keep their ranks.
    job.c.joined(0, asks(1, 2, 0), job.now);
    job.c.closed(1, job.now);
    job.c.joined(2, asks(0, 2, 2), job.now);
    let actions = job.tick(0.1);
    assert_eq!(seats(&actions), [(0, 1), (3, 2), (2, 0)].into());
    let Action::Send(_, ToMember::Assign(a)) = &actions[0] else { panic!("{actions:?}") };
    assert_eq!((a.rotated, a.restarts, &a.replaced[..]), (false, 1, &[2][..]));
}

#[test]
fn a_new_coordinator_learns_from_the_members() {
    let now = Instant::now();
    let mut c = Coordinator::new(policy(2), now);
    // The process of rank 0, which coordinated, has died in generation 5; rank 1 and a spare come.
    c.joined(1, Join { restarts: 3, ..join(1, Some((5, 1)), true) }, now);
    c.joined(2, join(2, None, true), now);
    let mut c = Job { c, now };
    let actions = c.tick(2.1);
    assert!(format!("{actions:?}").contains("fault.restarts"), "3 of 3 restarts: {actions:?}");
    let mut c = Job { c: Coordinator::new(RestartPolicy { restarts: 9, ..policy(2) }, now), now };
    c.c.joined(1, join(1, Some((5, 1)), true), now);
    c.c.joined(2, join(2, None, true), now);
    assert!(seats(&c.tick(1.0)).is_empty(), "rank 0 may be about to find it");
    c.c.joined(3, join(0, None, true), now);
    assert_eq!(seats(&c.tick(1.1)), [(3, 0), (1, 1)].into());
    // A member of an earlier generation, which was taken for dead, is a spare now.
    c.c.joined(4, join(0, Some((5, 0)), true), c.now);
    c.beat([1, 2, 3, 4]);
    assert!(c.tick(1.0).is_empty());
    c.c.closed(3, c.now);
    c.c.closed(2, c.now);
    c.c.joined(1, join(1, Some((6, 1)), true), c.now);
    assert_eq!(seats(&c.tick(0.1)), [(4, 0), (1, 1)].into());
    // Members that still run are left alone, and a spare is told when they finish.
    let mut c = Job { c: Coordinator::new(policy(2), now), now };
    c.c.joined(1, join(0, Some((2, 0)), false), now);
    c.c.joined(2, join(1, Some((2, 1)), false), now);
    c.c.joined(3, join(2, None, true), now);
    assert!(c.tick(1.0).is_empty());
    c.c.finished(1);
    c.c.closed(1, now);
    assert!(!c.c.is_over());
    c.c.finished(2);
    let actions = c.tick(0.1);
    assert!(matches!(&actions[..], [Action::Send(3, ToMember::Refuse { ended: Ended::Finished, .. })]));
    assert!(c.c.is_over() && !c.c.is_deserted());
    assert!(c.tick(1.0).is_empty());
    let actions = c.tick(1.1);
    assert!(matches!(&actions[..], [Action::Evict(3, _)]) && c.c.is_deserted(), "{actions:?}");
}

/// A free port of this host.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map(|a| a.port()).unwrap_or(0)
}

#[test]
fn generations_of_real_members() {
    let at = format!("127.0.0.1:{}", port());
    let timeout = Duration::from_secs(20);
    let policy = RestartPolicy { heartbeat: Duration::from_secs(10), ..policy(2) };
    let new = |slot: usize| {
        let job = LaunchEnv::for_test(slot, 3, &at);
        (Membership::join(&job, policy.clone()).unwrap(), job)
    };
    std::thread::scope(|scope| {
        let spare = scope.spawn(|| {
            let (membership, job) = new(2);
            let seat = membership.take_seat(&Left::default(), timeout).unwrap().unwrap();
            assert_eq!((seat.generation, seat.rank, seat.size), (2, 0, 2));
            assert_eq!(seat.meet(&job, timeout).unwrap().len(), 1);
        });
        let survivor = scope.spawn(|| {
            let (membership, job) = new(1);
            let seat = membership.take_seat(&Left::default(), timeout).unwrap().unwrap();
            assert_eq!((seat.generation, seat.rank), (1, 1));
            seat.meet(&job, timeout).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            let left = Left { steps: 7, reason: "rank 0 vanished".into(), rotate: false };
            let seat = membership.take_seat(&left, timeout).unwrap().unwrap();
            assert_eq!((seat.generation, seat.rank, &seat.replaced[..]), (2, 1, &[0][..]));
            assert_eq!(seat.meet(&job, timeout).unwrap().len(), 1);
        });
        scope.spawn(|| {
            let (membership, job) = new(0);
            let seat = membership.take_seat(&Left::default(), timeout).unwrap().unwrap();
            assert_eq!((seat.generation, seat.rank), (1, 0));
            seat.meet(&job, timeout).unwrap();
            membership.vanish();
        });
        survivor.join().unwrap();
        spare.join().unwrap();
    });
}

/// A rank that is lost before it has connected to rank 0 frees the others at once: the coordinator gives up those that do not
/// leave their generation in time.
#[test]
fn a_rank_lost_before_the_ranks_have_met_frees_the_others() {
    let at = format!("127.0.0.1:{}", port());
    let timeout = Duration::from_secs(20);
    let policy = RestartPolicy { heartbeat: Duration::from_secs(10), ..policy(3) };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|slot| {
                let (at, policy) = (at.clone(), policy.clone());
                scope.spawn(move || {
                    let job = LaunchEnv::for_test(slot, 3, &at);
                    let membership = Membership::join(&job, policy).unwrap();
                    let seat = membership.take_seat(&Left::default(), timeout).unwrap().unwrap();
                    assert_eq!((seat.generation, seat.rank), (1, slot));
                    if slot == 2 {
                        std::thread::sleep(Duration::from_millis(300));
                        membership.vanish();
                        return String::new();
                    }
                    let since = Instant::now();
                    let error = seat.meet(&job, timeout).unwrap_err().to_string();
                    assert!(since.elapsed() < timeout / 2, "{error}");
                    // The coordinator is in one of these processes: the other hears of the loss before it leaves.
                    std::thread::sleep(Duration::from_millis(500));
                    membership.vanish();
                    error
                })
            })
            .collect();
        for error in ranks.into_iter().take(2).map(|r| r.join().unwrap()) {
            assert!(error.contains("rank 2") && error.contains("is lost"), "{error}");
        }
    });
}

/// A process on the coordinator's host may reach it by loopback only (Debian resolves a host's own name to 127.0.1.1), where
/// processes of other hosts do not reach it.
#[test]
fn loopback_is_no_address_for_other_hosts() {
    for one_host in [true, false] {
        // The coordinator stays behind.
        let at = format!("127.0.0.1:{}", port());
        let job = LaunchEnv { one_host, ..LaunchEnv::for_test(0, 1, &at) };
        let membership = Membership::join(&job, policy(1)).unwrap();
        let seat = membership.take_seat(&Left::default(), Duration::from_secs(20)).unwrap().unwrap();
        assert_eq!(seat.rank, 0);
        assert_eq!(membership.address().is_unspecified(), !one_host);
        assert_eq!(membership.address().is_loopback(), one_host);
        assert!(membership.coordinator().unwrap().is_loopback());
        membership.vanish();
    }
}
