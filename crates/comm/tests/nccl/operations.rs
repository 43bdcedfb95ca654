//! Every operation against its definition. Values are small integers, whose sums are exact in every order.

use ferrotron_comm::{Communicator, ReduceOp, SendRecv, SplitSizes, World};
use ferrotron_tensor::{Category, DType, Element, Stream, Tensor, bf16, f16};

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

fn up<T: Element>(s: &Stream, values: &[T]) -> Tensor {
    s.upload(values, &[values.len()], Category::Communication).unwrap()
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

fn data_movement(g: &Communicator, s: &Stream, len: usize) {
    let (n, me) = (g.size(), g.rank());
    let everything: Vec<f32> = (0..n).flat_map(|r| of::<f32>(r, len)).collect();
    let mine = up(s, &of::<f32>(me, len));
    let all = s.zeros(&[n * len], DType::F32, Category::Communication).unwrap();
    g.all_gather(s, &mine, &all, "gather").unwrap();
    assert_eq!(s.download::<f32>(&all).unwrap(), everything);
    s.zero(&all).unwrap();
    let inside = all.narrow(0, me * len, len).unwrap();
    s.copy(&mine, &inside).unwrap();
    g.all_gather(s, &inside, &all, "gather in place").unwrap();
    assert_eq!(s.download::<f32>(&all).unwrap(), everything);

    // Rank r sends the value r · n + p to rank p.
    let from: Vec<u8> = (0..n).flat_map(|p| vec![(me * n + p) as u8; len]).collect();
    let to = s.zeros(&[n * len], DType::U8, Category::Communication).unwrap();
    g.all_to_all(s, &up(s, &from), &to, "all to all").unwrap();
    let expect: Vec<u8> = (0..n).flat_map(|r| vec![(r * n + me) as u8; len]).collect();
    assert_eq!(s.download::<u8>(&to).unwrap(), expect);

    for root in 0..n {
        let t = up(s, &of::<bf16>(me, len));
        g.broadcast(s, &t, root, "broadcast").unwrap();
        assert_eq!(s.download::<bf16>(&t).unwrap(), of::<bf16>(root, len));
    }
    if n > 1 {
        let (next, last) = ((me + 1) % n, (me + n - 1) % n);
        let [a, b] = [0, 1].map(|_| s.zeros(&[len], DType::F32, Category::Communication).unwrap());
        g.send_recv(s, &[(next, &mine), (last, &mine)], &[(next, &b), (last, &a)], "ring").unwrap();
        assert_eq!(s.download::<f32>(&a).unwrap(), of::<f32>(last, len));
        assert_eq!(s.download::<f32>(&b).unwrap(), of::<f32>(next, len));
    }
}

/// Counts that differ by rank, including zero.
fn uneven(g: &Communicator, s: &Stream) {
    let (n, me) = (g.size(), g.rank());
    let counts: Vec<usize> = (0..n).map(|r| r * 1500).collect();
    let everything: Vec<f32> = (0..n).flat_map(|r| of::<f32>(r, counts[r])).collect();
    let all = s.zeros(&[everything.len()], DType::F32, Category::Communication).unwrap();
    g.all_gather_v(s, &up(s, &of::<f32>(me, counts[me])), &all, &counts, "uneven").unwrap();
    assert_eq!(s.download::<f32>(&all).unwrap(), everything);

    let count = |from: usize, to: usize| (from * 3 + to * 5) % 7 * 400;
    let sent: Vec<usize> = (0..n).map(|p| count(me, p)).collect();
    let received: Vec<usize> = (0..n).map(|p| count(p, me)).collect();
    let values = |from: usize, to: usize| -> Vec<i32> {
        (0..count(from, to)).map(|i| (from * 1000 + to * 100_000 + i) as i32).collect()
    };
    let from: Vec<i32> = (0..n).flat_map(|p| values(me, p)).collect();
    let to = s.zeros(&[received.iter().sum()], DType::I32, Category::Communication).unwrap();
    let splits = SplitSizes { sent: &sent, received: &received };
    g.all_to_all_v(s, &up(s, &from), &to, splits, "uneven").unwrap();
    assert_eq!(s.download::<i32>(&to).unwrap(), (0..n).flat_map(|p| values(p, me)).collect::<Vec<_>>());
}

/// Two groups of all ranks, each a ring in its own direction, listed in another order by every other rank.
fn two_rings(world: &World, s: &Stream) {
    let (n, me) = (world.size(), world.rank());
    let everyone: Vec<usize> = (0..n).collect();
    let [right, left] = ["right", "left"].map(|name| world.group(name, &everyone).unwrap().unwrap());
    let (next, last) = ((me + 1) % n, (me + n - 1) % n);
    for len in [1, 100_000] {
        let mine = up(s, &of::<f32>(me, len));
        let [a, b] = [0, 1].map(|_| s.zeros(&[len], DType::F32, Category::Communication).unwrap());
        let mut batch = [
            SendRecv { group: &right, stream: s, sends: &[(next, &mine)], receives: &[(last, &a)] },
            SendRecv { group: &left, stream: s, sends: &[(last, &mine)], receives: &[(next, &b)] },
        ];
        if me % 2 == 1 {
            batch.reverse();
        }
        Communicator::send_recv_batch(&batch, "both rings").unwrap();
        assert_eq!(s.download::<f32>(&a).unwrap(), of::<f32>(last, len));
        assert_eq!(s.download::<f32>(&b).unwrap(), of::<f32>(next, len));
    }
}

fn maxima_keep_nan(g: &Communicator, s: &Stream) {
    let mine = if g.rank() == g.size() - 1 { [f32::NAN, 1.0] } else { [2.0, f32::NEG_INFINITY] };
    let t = up(s, &mine);
    g.all_reduce(s, &t, ReduceOp::Max, "nan").unwrap();
    let got = s.download::<f32>(&t).unwrap();
    assert!(got[0].is_nan() && got[1] == 1.0, "{got:?}");
}
