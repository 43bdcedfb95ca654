//! Collectives between threads.
#![allow(clippy::unwrap_used)]

use ferrotron_comm::{Error, Group, Result};
use ferrotron_tensor::{Category, Device, Stream, Threads};
use std::time::Duration;

fn on_ranks<T: Send>(n: usize, patience: u64, f: impl Fn(Group, Stream) -> T + Sync) -> Vec<T> {
    let device = Device::cpu(Threads::new(1).unwrap());
    std::thread::scope(|scope| {
        let handles: Vec<_> = Group::threads(n, Duration::from_millis(patience))
            .into_iter()
            .map(|g| {
                let (f, stream) = (&f, device.stream("compute").unwrap());
                scope.spawn(move || f(g, stream))
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

#[test]
fn sums_are_the_same_bits_on_every_rank_and_every_time() {
    // Values whose f32 sum depends on the order of addition.
    let value =
        |rank: usize, i: usize| ((rank * 7 + i) as f32 * 0.37).sin() * 10f32.powi(rank as i32 * 3 - 4);
    let expect: Vec<f32> = (0..33).map(|i| (0..5).fold(0f32, |s, r| s + value(r, i))).collect();
    for _ in 0..20 {
        let all = on_ranks(5, 10_000, |g, s| {
            let mine: Vec<f32> = (0..33).map(|i| value(g.rank(), i)).collect();
            let t = s.upload(&mine, &[33], Category::Communication).unwrap();
            g.all_reduce(&s, &t, "test").unwrap();
            s.download::<f32>(&t).unwrap()
        });
        assert!(all.iter().all(|x| *x == expect));
    }
}

#[test]
fn many_rounds_in_a_row_do_not_mix() {
    on_ranks(4, 10_000, |g, s| {
        let t = s.upload(&[0f32], &[1], Category::Communication).unwrap();
        for round in 0..200 {
            s.write_to(&t, &[(g.rank() + round) as f32]).unwrap();
            g.broadcast(&s, &t, round % 4, "round").unwrap();
            assert_eq!(s.download::<f32>(&t).unwrap(), [(round % 4 + round) as f32]);
            g.barrier("end of round").unwrap();
        }
    });
}

#[test]
fn different_calls_and_missing_ranks_are_named() {
    let results: Vec<Result<()>> =
        on_ranks(2, 10_000, |g, _| g.barrier(if g.rank() == 0 { "left" } else { "right" }));
    assert!(results.iter().any(|r| matches!(r, Err(Error::Mismatch { .. }))), "{results:?}");
    assert!(results.iter().all(Result::is_err), "nobody hangs");
    let results: Vec<Result<()>> =
        on_ranks(3, 50, |g, _| if g.rank() == 1 { Ok(()) } else { g.barrier("meet") });
    let Err(Error::Stall { missing, .. }) = &results[0] else { panic!("{results:?}") };
    assert_eq!(missing, &[1]);
}
