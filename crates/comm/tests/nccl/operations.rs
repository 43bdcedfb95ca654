//! Every operation against its definition. Values are small integers, whose sums are exact in every order.

use crate::data_movement::{coalesced, data_movement, maxima_keep_nan, two_rings, uneven, up};
use ferrotron_comm::{Communicator, ReduceOp, World};
use ferrotron_tensor::{Category, Element, Stream, bf16, f16};

fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7 + i * 3) % 13) as f32 - 6.0
}

trait Number: Element + PartialEq + std::fmt::Debug {
    fn make(x: f32) -> Self;
}
macro_rules! number {
    ($($t:ty, $make:expr;)*) => { $(impl Number for $t { fn make(x: f32) -> $t { $make(x) } })* };
}
number! {
    f32, |x| x;
    f64, f64::from;
    bf16, bf16::from_f32;
    f16, f16::from_f32;
    i32, |x| x as i32;
    i64, |x| x as i64;
}

fn of<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::make(value(rank, i))).collect()
}

/// All operations, on the world and on many groups of it.
pub fn all(world: &World, s: &Stream) {
    on(&world.all(), s);
    let n = world.size();
    let odd: Vec<usize> = (0..n).filter(|r| r % 2 == 1).collect();
    let even: Vec<usize> = (0..n).filter(|r| r % 2 == 0).collect();
    let back: Vec<usize> = (0..n).rev().collect();
    // Groups of one, of pairs and overlapping ones, in one order on every rank.
    let mut lists = vec![odd, even, back];
    lists.extend((0..n).map(|r| vec![r]));
    lists.extend((0..n / 2).map(|r| vec![r, r + n / 2]));
    lists.extend((0..n / 2).map(|r| vec![2 * r + 1, 2 * r]));
    let groups: Vec<Option<Communicator>> =
        lists.iter().map(|ranks| world.group("some", ranks).unwrap()).collect();
    for (group, ranks) in groups.iter().zip(&lists) {
        assert_eq!(group.is_some(), ranks.contains(&world.rank()));
        if let Some(group) = group {
            assert_eq!(group.ranks(), &ranks[..]);
            on(group, s);
        }
    }
    two_rings(world, s);
    world.all().barrier("end").unwrap();
}

fn on(g: &Communicator, s: &Stream) {
    for len in [0, 1, 3, 5003] {
        reductions::<f32>(g, s, len);
        reductions::<bf16>(g, s, len);
        reductions::<f16>(g, s, len);
        reductions::<f64>(g, s, len);
        reductions::<i32>(g, s, len);
        reductions::<i64>(g, s, len);
        data_movement(g, s, len);
    }
    uneven(g, s);
    coalesced(g, s);
    maxima_keep_nan(g, s);
    let mine = vec![g.rank() as u8; g.rank() * 1000];
    let all = g.all_gather_bytes(&mine, "bytes").unwrap();
    assert!(all.iter().enumerate().all(|(r, x)| *x == vec![r as u8; r * 1000]));
    g.barrier("done").unwrap();
}

fn reductions<T: Number>(g: &Communicator, s: &Stream, len: usize) {
    let n = g.size();
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let expect = |len: usize| -> Vec<T> {
            let column = |i: usize| (0..n).map(move |r| value(r, i));
            let reduce = |i: usize| match op {
                ReduceOp::Sum => column(i).sum::<f32>(),
                ReduceOp::Max => column(i).fold(f32::MIN, f32::max),
            };
            (0..len).map(|i| T::make(reduce(i))).collect()
        };
        let t = up(s, &of::<T>(g.rank(), len));
        g.all_reduce(s, &t, op, "reduce").unwrap();
        assert_eq!(s.download::<T>(&t).unwrap(), expect(len), "all-reduce of {len} {}", T::DTYPE);

        let whole = expect(len * n);
        let part = &whole[g.rank() * len..(g.rank() + 1) * len];
        let all = up(s, &of::<T>(g.rank(), len * n));
        let mine = s.zeros(&[len], T::DTYPE, Category::Communication).unwrap();
        g.reduce_scatter(s, &all, &mine, op, "scatter").unwrap();
        assert_eq!(s.download::<T>(&mine).unwrap(), part, "reduce-scatter of {len} {}", T::DTYPE);
        let inside = all.narrow(0, g.rank() * len, len).unwrap();
        g.reduce_scatter(s, &all, &inside, op, "scatter").unwrap();
        assert_eq!(s.download::<T>(&inside).unwrap(), part, "reduce-scatter in place of {len}");
    }
}
