//! Every operation against its definition, on any backend: each rank can compute what all of them contribute.

use crate::data_movement::{coalesced, data_movement, maxima_keep_nan, two_rings, uneven, up};
use ferrotron_comm::{Communicator, ReduceOp, World};
use ferrotron_tensor::{Category, DType, Element, Float, Stream, bf16};

/// Values whose sums depend on the order of addition and on where they are rounded.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 31 + i * 7 + 3) as f32 * 0.37).sin() * 10f32.powi((rank as i32 * 5 + i as i32) % 7 - 3)
}

/// A dtype that can be reduced, with its sum by definition: in rank order, rounded once.
trait Reduced: Element {
    fn make(x: f32) -> Self;
    fn sum(values: &[Self]) -> Self;
    fn max(values: &[Self]) -> Self;
}

macro_rules! reduced {
    ($($t:ty, $make:expr, $wide:ty, $to:expr, $from:expr;)*) => { $(impl Reduced for $t {
        fn make(x: f32) -> $t { $make(x) }
        fn sum(values: &[$t]) -> $t {
            let mut wide = values.iter().map(|x| -> $wide { $to(*x) });
            let first = wide.next().unwrap();
            $from(wide.fold(first, |a, b| a + b))
        }
        fn max(values: &[$t]) -> $t {
            *values.iter().max_by(|a, b| a.partial_cmp(b).unwrap()).unwrap()
        }
    })* };
}
reduced! {
    f32, |x| x, f32, |x| x, |x| x;
    f64, f64::from, f64, |x| x, |x| x;
    bf16, bf16::from_f32, f32, |x: bf16| x.to_f32(), <bf16 as Float>::from_f32;
    i32, |x: f32| (x * 100.0) as i32, i32, |x| x, |x| x;
    i64, |x: f32| (x * 1e6) as i64, i64, |x| x, |x| x;
}

fn of<T: Reduced>(rank: usize, len: usize) -> Vec<T> {
    let some: Vec<T> = (0..len.min(4099)).map(|i| T::make(value(rank, i))).collect();
    some.iter().copied().cycle().take(len).collect()
}

/// All operations, on the world and on some groups of it.
pub fn all(world: &World, s: &Stream) {
    on(&world.all(), s);
    let n = world.size();
    let odd: Vec<usize> = (0..n).filter(|r| r % 2 == 1).collect();
    let even: Vec<usize> = (0..n).filter(|r| r % 2 == 0).collect();
    let back: Vec<usize> = (1..n).rev().collect();
    for (name, ranks) in [("odd", &odd), ("even", &even), ("backwards", &back)] {
        let group = world.group(name, ranks).unwrap();
        assert_eq!(group.is_some(), ranks.contains(&world.rank()));
        if let Some(group) = group {
            assert_eq!(group.ranks(), &ranks[..]);
            on(&group, s);
        }
    }
    two_rings(world, s);
    world.all().barrier("end").unwrap();
}

fn on(g: &Communicator, s: &Stream) {
    // Empty, one element, fewer than ranks, one round, two rounds, several segments.
    for len in [0, 1, 3, 257, 5003] {
        reductions::<f32>(g, s, len);
        reductions::<bf16>(g, s, len);
        reductions::<f64>(g, s, len);
        reductions::<i32>(g, s, len);
        reductions::<i64>(g, s, len);
        data_movement(g, s, len);
    }
    uneven(g, s);
    coalesced(g, s);
    messages(g, s);
    maxima_keep_nan(g, s);
    let mine = vec![g.rank() as u8; g.rank() * 1000];
    let all = g.all_gather_bytes(&mine, "bytes").unwrap();
    assert!(all.iter().enumerate().all(|(r, x)| *x == vec![r as u8; r * 1000]));
    g.barrier("done").unwrap();
}

/// Sums of several segments, the last of which is short.
pub fn long(g: &Communicator, s: &Stream) {
    let (n, len) = (g.size(), (1 << 20) * g.size() + 77);
    let expect: Vec<bf16> = (0..4099)
        .map(|i| {
            let column: Vec<bf16> = (0..n).map(|r| bf16::make(value(r, i))).collect();
            bf16::sum(&column)
        })
        .collect();
    let t = up(s, &of::<bf16>(g.rank(), len));
    g.all_reduce(s, &t, ReduceOp::Sum, "long").unwrap();
    let got = s.download::<bf16>(&t).unwrap();
    assert!(got.iter().enumerate().all(|(i, x)| *x == expect[i % 4099]));

    let len = (1 << 20) + 77;
    let all = up(s, &of::<bf16>(g.rank(), len * n));
    let mine = s.zeros(&[len], DType::BF16, Category::Communication).unwrap();
    g.reduce_scatter(s, &all, &mine, ReduceOp::Sum, "long").unwrap();
    let got = s.download::<bf16>(&mine).unwrap();
    assert!(got.iter().enumerate().all(|(i, x)| *x == expect[(g.rank() * len + i) % 4099]));
}

/// The expected sum is in the order of the group's ranks.
fn reductions<T: Reduced>(g: &Communicator, s: &Stream, len: usize) {
    let n = g.size();
    let rounds = [(ReduceOp::Sum, "sum"), (ReduceOp::Max, "max")];
    for (op, label) in rounds {
        let expect = |len: usize| -> Vec<T> {
            let all: Vec<Vec<T>> = (0..n).map(|r| of::<T>(r, len)).collect();
            let column = |i: usize| all.iter().map(|x| x[i]).collect::<Vec<T>>();
            let reduce = |c: Vec<T>| if op == ReduceOp::Sum { T::sum(&c) } else { T::max(&c) };
            (0..len).map(|i| reduce(column(i))).collect()
        };
        let t = up(s, &of::<T>(g.rank(), len));
        g.all_reduce(s, &t, op, label).unwrap();
        assert_eq!(s.download::<T>(&t).unwrap(), expect(len), "all-reduce of {len} {}", T::DTYPE);

        let whole = expect(len * n);
        let part = &whole[g.rank() * len..(g.rank() + 1) * len];
        let all = up(s, &of::<T>(g.rank(), len * n));
        let mine = s.zeros(&[len], T::DTYPE, Category::Communication).unwrap();
        g.reduce_scatter(s, &all, &mine, op, label).unwrap();
        assert_eq!(s.download::<T>(&mine).unwrap(), part, "reduce-scatter of {len} {}", T::DTYPE);
        let inside = all.narrow(0, g.rank() * len, len).unwrap();
        g.reduce_scatter(s, &all, &inside, op, label).unwrap();
        assert_eq!(s.download::<T>(&inside).unwrap(), part, "reduce-scatter in place of {len}");
    }
}

/// Rings in both directions, too long for MPI to buffer, and sends before any receive.
fn messages(g: &Communicator, s: &Stream) {
    let (n, me) = (g.size(), g.rank());
    let (next, last) = ((me + 1) % n, (me + n - 1) % n);
    for len in [1, 100_000] {
        let mine = up(s, &of::<f32>(me, len));
        let [a, b] = [0, 1].map(|_| s.zeros(&[len], DType::F32, Category::Communication).unwrap());
        g.send_recv(s, &[(next, &mine), (last, &mine)], &[(next, &b), (last, &a)], "ring").unwrap();
        assert_eq!(s.download::<f32>(&a).unwrap(), of::<f32>(last, len));
        assert_eq!(s.download::<f32>(&b).unwrap(), of::<f32>(next, len));
        for k in 0..3 {
            g.send(s, &up(s, &of::<f32>(me + k, len)), next, "line").unwrap();
        }
        // Sent memory may be overwritten at once.
        s.zero(&mine).unwrap();
        for k in 0..3 {
            g.receive(s, &a, last, "line").unwrap();
            assert_eq!(s.download::<f32>(&a).unwrap(), of::<f32>(last + k, len));
        }
    }
}
