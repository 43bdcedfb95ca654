//! Errors are detected in time, on every rank, and name the ranks and calls involved.

use crate::support::*;
use ferrotron_comm::{Error, OpStatus, ReduceOp, Result, SplitSizes, World};
use ferrotron_tensor::Stream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Long enough for a loaded machine, short enough for a test.
const SHORT: u64 = 1000;

fn text(e: &Error) -> String {
    e.to_string()
}

/// Runs ranks that must all fail before the timeout.
fn all_fail(n: usize, f: impl Fn(World, Stream) -> Result<()> + Sync) -> Vec<Error> {
    all_fail_within(n, LONG, LONG / 4, f)
}

fn all_fail_within(
    n: usize,
    timeout: u64,
    limit: u64,
    f: impl Fn(World, Stream) -> Result<()> + Sync,
) -> Vec<Error> {
    let start = Instant::now();
    let results = on_ranks(n, timeout, f);
    assert!(start.elapsed() < Duration::from_millis(limit), "took {:?}", start.elapsed());
    results.into_iter().map(Result::unwrap_err).collect()
}

/// Every error names rank 2 as the other rank, and both calls.
fn names(errors: &[Error], call: &str, other_call: &str) {
    for e in errors {
        let Error::Mismatch { rank: 0, call: a, other: 2, other_call: b } = e else { panic!("{e}") };
        assert!(a.contains(call) && b.contains(other_call), "{e}");
    }
}

#[test]
fn a_different_shape() {
    let errors = all_fail(4, |world, s| {
        let t = blank::<f32>(&s, if world.rank() == 2 { 6 } else { 5 });
        world.all().all_reduce(&s, &t, ReduceOp::Sum, "loss")
    });
    names(&errors, "all-reduce 'loss' (group world, seq 0, f32 [5], sum)", "f32 [6]");
}

#[test]
fn a_different_shape_among_coalesced_calls() {
    let errors = all_fail(4, |world, s| {
        let [a, b] = [5, if world.rank() == 2 { 7 } else { 6 }].map(|n| blank::<f32>(&s, n));
        world.all().all_reduce_coalesced(&s, &[(&a, "loss"), (&b, "zeros")], ReduceOp::Sum)
    });
    names(&errors, "all-reduce 'zeros' (group world, seq 1, f32 [6], sum)", "f32 [7]");
    // Calls that are launched together must not overlap, whatever the backend.
    let errors = all_fail(2, |world, s| {
        let t = blank::<f32>(&s, 6);
        let part = t.narrow(0, 2, 3).unwrap();
        world.all().all_reduce_coalesced(&s, &[(&t, "loss"), (&part, "loss")], ReduceOp::Sum)
    });
    assert!(errors.iter().any(|e| text(e).contains("overlap")), "{errors:?}");
}

#[test]
fn a_different_dtype_reduction_or_root() {
    let errors = all_fail(4, |world, s| {
        let odd = world.rank() == 2;
        let t = if odd { blank::<i32>(&s, 5) } else { blank::<f32>(&s, 5) };
        world.all().broadcast(&s, &t, 1, "weights")
    });
    names(&errors, "f32 [5], from 1", "i32 [5], from 1");
    let errors = all_fail(4, |world, s| {
        let op = if world.rank() == 2 { ReduceOp::Max } else { ReduceOp::Sum };
        world.all().all_reduce(&s, &blank::<f32>(&s, 5), op, "loss")
    });
    names(&errors, "sum", "max");
    let errors = all_fail(4, |world, s| {
        let root = if world.rank() == 2 { 3 } else { 1 };
        world.all().broadcast(&s, &blank::<f32>(&s, 5), root, "weights")
    });
    names(&errors, "from 1", "from 3");
}

#[test]
fn a_different_operation() {
    let errors = all_fail(5, |world, s| {
        let (g, t) = (world.all(), blank::<f32>(&s, 5));
        g.barrier("start")?;
        match g.rank() {
            2 => g.broadcast(&s, &t, 0, "weights"),
            _ => g.all_reduce(&s, &t, ReduceOp::Sum, "weights"),
        }
    });
    names(&errors, "all-reduce 'weights' (group world, seq 1", "broadcast 'weights' (group world, seq 1");
}

#[test]
fn labels_in_a_different_order() {
    let errors = all_fail(3, |world, s| {
        let (g, t) = (world.all(), blank::<f32>(&s, 5));
        let labels = if g.rank() == 2 { ["b", "a"] } else { ["a", "b"] };
        labels.into_iter().try_for_each(|l| g.all_reduce(&s, &t, ReduceOp::Sum, l))
    });
    names(&errors, "'a'", "'b'");
}

#[test]
fn a_skipped_collective() {
    let errors = all_fail(4, |world, s| {
        let (g, t) = (world.all(), blank::<f32>(&s, 5));
        g.all_reduce(&s, &t, ReduceOp::Sum, "first")?;
        if g.rank() != 2 {
            g.all_reduce(&s, &t, ReduceOp::Sum, "second")?;
        }
        g.all_reduce(&s, &t, ReduceOp::Sum, "third")
    });
    names(&errors, "'second' (group world, seq 1", "'third' (group world, seq 1");
}

#[test]
fn counts_that_do_not_match_pairwise() {
    let errors = all_fail(3, |world, s| {
        let (sent, mut received) = ([1, 1, 1], [1, 1, 1]);
        if world.rank() == 2 {
            received[0] = 2;
        }
        let to = blank::<f32>(&s, received.iter().sum());
        let splits = SplitSizes { sent: &sent, received: &received };
        world.all().all_to_all_v(&s, &blank::<f32>(&s, 3), &to, splits, "tokens")
    });
    for e in &errors {
        assert!(matches!(e, Error::Mismatch { rank: 0, other: 2, .. }), "{e}");
        assert!(text(e).contains("receives [2, 1, 1]"), "{e}");
        assert_eq!(text(e), text(&errors[0]));
    }
}

#[test]
fn different_groups() {
    let errors = all_fail(2, |world, _| {
        let ranks = if world.rank() == 0 { [0, 1] } else { [1, 0] };
        let g = world.group("tp", &ranks)?;
        g.map_or(Ok(()), |g| g.barrier("meet"))
    });
    assert!(
        errors.iter().all(|e| text(e).contains("tp of [0, 1]") && text(e).contains("[1, 0]")),
        "{errors:?}"
    );
    for (ranks, word) in [(vec![0, 2], "rank 2 does not exist"), (vec![1, 1], "listed twice")] {
        let e = World::threads(2, Duration::ZERO)[0].group("tp", &ranks).unwrap_err();
        assert!(matches!(&e, Error::Group { .. }) && text(&e).contains(word), "{e}");
    }
}

#[test]
fn a_stalled_rank_is_named_on_every_other_with_its_last_operation() {
    let gate = Mutex::new(());
    let held = gate.lock().unwrap();
    let late = Mutex::new(None);
    std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            on_ranks(4, SHORT, |world, s| {
                let (g, t) = (world.all(), blank::<f32>(&s, 5));
                g.all_reduce(&s, &t, ReduceOp::Sum, "gradients").unwrap();
                if g.rank() == 1 {
                    drop(gate.lock());
                    *late.lock().unwrap() = Some(g.barrier("too late").unwrap_err());
                    return;
                }
                let start = Instant::now();
                let e = g.all_gather(&s, &t, &blank::<f32>(&s, 20), "weights").unwrap_err();
                assert!(start.elapsed() < Duration::from_millis(SHORT * 5), "{:?}", start.elapsed());
                let Error::Stall { rank, call, missing, seconds } = &e else { panic!("{e}") };
                assert!(*seconds >= 0.0 && *rank == g.rank(), "{e}");
                assert!(call.contains("all-gather 'weights' (group world, seq 1, f32 [5])"), "{e}");
                let [(1, last)] = &missing[..] else { panic!("{e}") };
                assert!(
                    last.contains("completed all-reduce 'gradients' (group world, seq 0, f32 [5], sum)"),
                    "{e}"
                );
                let notes = world.flight_recorder();
                let notes = notes[g.rank()].as_ref().unwrap();
                assert_eq!(
                    notes.iter().map(|n| n.status).collect::<Vec<_>>(),
                    [OpStatus::Done, OpStatus::Failed]
                );
            })
        });
        // The stalled rank resumes only after the others have failed.
        std::thread::sleep(Duration::from_millis(SHORT * 3));
        drop(held);
        job.join().unwrap();
    });
    // A rank that comes back is told that the job is over.
    let late = late.into_inner().unwrap().unwrap();
    assert!(matches!(&late, Error::Abandoned { rank: 1, .. }) && text(&late).contains("stalled"), "{late}");
}

#[test]
fn a_stall_in_another_group_is_traced_to_its_cause() {
    // Rank 0 waits for 1 in one group, 1 waits for 2 in another, and 2 does nothing; also if 0 times out first.
    for early in [false, true] {
        traced(early);
    }
}

fn traced(early: bool) {
    let errors = all_fail_within(3, SHORT, SHORT * 10, |world, _| {
        let a = world.group("a", &[0, 1])?;
        let b = world.group("b", &[1, 2])?;
        match (world.rank(), a, b) {
            (0, Some(a), _) => {
                std::thread::sleep(Duration::from_millis(if early { 0 } else { SHORT / 2 }));
                a.barrier("first")
            }
            (1, _, Some(b)) => {
                std::thread::sleep(Duration::from_millis(if early { SHORT / 2 } else { 0 }));
                b.barrier("second")
            }
            (_, _, b) => {
                std::thread::sleep(Duration::from_millis(SHORT * 2));
                b.map_or(Ok(()), |b| b.barrier("too late"))
            }
        }
    });
    assert!(matches!(&errors[1], Error::Stall { missing, .. } if missing[0].0 == 2), "{errors:?}");
    let Error::Abandoned { by: 1, call, reason, .. } = &errors[0] else { panic!("{errors:?}") };
    assert!(call.contains("'first' (group a") && reason.contains("'second' (group b"), "{errors:?}");
    assert!(reason.contains("rank 2 (it has made no call yet)"), "{errors:?}");
}

#[test]
fn a_rank_that_exits_is_named_at_once() {
    let start = Instant::now();
    let results = on_ranks(3, LONG, |world, s| {
        let (g, t) = (world.all(), blank::<f32>(&s, 5));
        g.all_reduce(&s, &t, ReduceOp::Sum, "last call").unwrap();
        if g.rank() == 0 { Ok(()) } else { g.barrier("meet") }
    });
    assert!(start.elapsed() < Duration::from_millis(LONG / 4));
    for e in results.into_iter().skip(1).map(Result::unwrap_err) {
        let Error::Ended { call, ended, .. } = &e else { panic!("{e}") };
        assert!(call.contains("barrier 'meet'"), "{e}");
        let [(0, last)] = &ended[..] else { panic!("{e}") };
        assert!(last.contains("has exited") && last.contains("completed all-reduce 'last call'"), "{e}");
    }
}

#[test]
fn a_rank_that_panics_is_named_at_once() {
    let start = Instant::now();
    let results = on_ranks(4, LONG, |world, s| {
        let (g, t) = (world.all(), blank::<f32>(&s, 5));
        let rank = g.rank();
        // The world and its groups are dropped by the panic.
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let (_world, g) = (world, g);
            assert!(g.rank() != 3, "injected panic");
            if g.rank() == 2 { g.receive(&s, &t, 3, "from the exited rank") } else { g.barrier("meet") }
        }));
        (rank, unwound.ok())
    });
    assert!(start.elapsed() < Duration::from_millis(LONG / 4));
    for (rank, result) in results {
        match result {
            None => assert_eq!(rank, 3),
            Some(result) => {
                let e = result.unwrap_err();
                let all = text(&e);
                assert!(all.contains("rank 3 (it panicked"), "rank {rank}: {all}");
            }
        }
    }
}

#[test]
fn operations_complete_before_a_rank_exited_succeed() {
    for round in 0..200 {
        on_ranks(4, LONG, |world, s| {
            let (g, t) = (world.all(), tensor(&s, &[1i32]));
            if g.rank() == round % 4 {
                random_delay(round as u64);
            }
            g.send(&s, &t, (g.rank() + 1) % 4, "before exit").unwrap();
            g.all_reduce(&s, &t, ReduceOp::Sum, "last").unwrap();
            assert_eq!(s.download::<i32>(&t).unwrap(), [4]);
            if g.rank().is_multiple_of(2) {
                g.receive(&s, &t, (g.rank() + 3) % 4, "before exit").unwrap();
            }
        });
    }
}

#[test]
fn a_failure_reaches_ranks_that_wait_in_other_groups() {
    let errors = all_fail(4, |world, s| {
        let left = world.group("left", &[0, 1])?;
        let right = world.group("right", &[2, 3])?;
        let (g, t) = (left.or(right), blank::<f32>(&s, 5));
        match (world.rank(), g) {
            (0, Some(g)) => g.broadcast(&s, &t, 9, "wrong"),
            (2, Some(g)) => g.receive(&s, &t, 1, "never sent"),
            (_, Some(g)) => g.barrier("meet").and_then(|()| g.barrier("again")),
            _ => Ok(()),
        }
    });
    assert!(matches!(&errors[0], Error::Argument { .. }), "{errors:?}");
    for e in &errors[1..] {
        assert!(
            matches!(e, Error::Abandoned { by: 0, .. }) && text(e).contains("rank 9 does not exist"),
            "{e}"
        );
    }
}
