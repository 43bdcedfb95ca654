//! Operations that only move data, against their definition, on any backend: each rank can compute what all of them
//! contribute.

use ferrotron_comm::{Communicator, OpKind, ReduceOp, SendRecv, SplitSizes, World};
use ferrotron_tensor::{Category, DType, Element, Stream, Tensor, bf16};

fn f32s(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((rank * 31 + i * 7 + 3) as f32 * 0.37).sin()).collect()
}

fn bf16s(rank: usize, len: usize) -> Vec<bf16> {
    f32s(rank, len).into_iter().map(bf16::from_f32).collect()
}

pub fn up<T: Element>(s: &Stream, values: &[T]) -> Tensor {
    s.upload(values, &[values.len()], Category::Communication).unwrap()
}

/// Two groups of all ranks, each a ring in its own direction, listed in another order by every other rank.
pub fn two_rings(world: &World, s: &Stream) {
    let (n, me) = (world.size(), world.rank());
    let everyone: Vec<usize> = (0..n).collect();
    let [right, left] = ["right", "left"].map(|name| world.group(name, &everyone).unwrap().unwrap());
    let (next, last) = ((me + 1) % n, (me + n - 1) % n);
    for len in [1, 100_000] {
        let mine = up(s, &f32s(me, len));
        let [a, b] = [0, 1].map(|_| s.zeros(&[len], DType::F32, Category::Communication).unwrap());
        let mut batch = [
            SendRecv { group: &right, stream: s, sends: &[(next, &mine)], receives: &[(last, &a)] },
            SendRecv { group: &left, stream: s, sends: &[(last, &mine)], receives: &[(next, &b)] },
        ];
        if me % 2 == 1 {
            batch.reverse();
        }
        Communicator::send_recv_batch(&batch, "both rings").unwrap();
        assert_eq!(s.download::<f32>(&a).unwrap(), f32s(last, len));
        assert_eq!(s.download::<f32>(&b).unwrap(), f32s(next, len));
    }
}

/// Coalesced collectives have the results, calls and bytes of single ones, in one launch.
pub fn coalesced(g: &Communicator, s: &Stream) {
    let (n, me) = (g.size(), g.rank());
    for empty in [0, 5] {
        let make = || {
            let whole: Vec<i64> = (0..70).map(|i| (me * 100 + i) as i64).collect();
            let wide: Vec<f64> = f32s(me, 3).into_iter().map(f64::from).collect();
            [up(s, &f32s(me, 1000)), up(s, &whole), up(s, &wide), up(s, &f32s(me, empty))]
        };
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            let (single, joined) = (make(), make());
            let before = g.volume();
            single.iter().for_each(|t| g.all_reduce(s, t, op, "small").unwrap());
            let (middle, labelled) = (g.volume(), joined.each_ref().map(|t| (t, "small")));
            g.all_reduce_coalesced(s, &labelled, op).unwrap();
            let (one_by_one, together) = (middle.since(&before), g.volume().since(&middle));
            assert_eq!((one_by_one.launches(), together.launches()), (4, 1));
            assert_eq!((one_by_one.total(), together.calls(OpKind::AllReduce)), (together.total(), 4));
            for (a, b) in single.iter().zip(&joined) {
                let bytes = |t: &Tensor| s.download::<u8>(&t.as_bytes().unwrap()).unwrap();
                assert_eq!(bytes(a), bytes(b), "{op:?} of {a:?}");
            }
        }
    }
    let all = [0, 1].map(|_| s.zeros(&[n * 100], DType::F32, Category::Communication).unwrap());
    let inside = all[1].narrow(0, me * 100, 100).unwrap();
    let mine = up(s, &f32s(me, 100));
    s.copy(&mine, &inside).unwrap();
    g.all_gather_coalesced(s, &[(&mine, &all[0], "values"), (&inside, &all[1], "in place")]).unwrap();
    let everything: Vec<f32> = (0..n).flat_map(|r| f32s(r, 100)).collect();
    all.iter().for_each(|t| assert_eq!(s.download::<f32>(t).unwrap(), everything));
    g.all_gather_coalesced(s, &[]).unwrap();
}

pub fn data_movement(g: &Communicator, s: &Stream, len: usize) {
    let (n, me) = (g.size(), g.rank());
    let everything: Vec<f32> = (0..n).flat_map(|r| f32s(r, len)).collect();
    let mine = up(s, &f32s(me, len));
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
        let t = up(s, &bf16s(me, len));
        g.broadcast(s, &t, root, "broadcast").unwrap();
        assert_eq!(s.download::<bf16>(&t).unwrap(), bf16s(root, len));
    }

    if n > 1 {
        let (next, last) = ((me + 1) % n, (me + n - 1) % n);
        let [a, b] = [0, 1].map(|_| s.zeros(&[len], DType::F32, Category::Communication).unwrap());
        g.send_recv(s, &[(next, &mine), (last, &mine)], &[(next, &b), (last, &a)], "ring").unwrap();
        assert_eq!(s.download::<f32>(&a).unwrap(), f32s(last, len));
        assert_eq!(s.download::<f32>(&b).unwrap(), f32s(next, len));
    }
}

/// Counts that differ by rank, including zero.
pub fn uneven(g: &Communicator, s: &Stream) {
    let (n, me) = (g.size(), g.rank());
    let counts: Vec<usize> = (0..n).map(|r| r * 1500).collect();
    let everything: Vec<f32> = (0..n).flat_map(|r| f32s(r, counts[r])).collect();
    let all = s.zeros(&[everything.len()], DType::F32, Category::Communication).unwrap();
    g.all_gather_v(s, &up(s, &f32s(me, counts[me])), &all, &counts, "uneven").unwrap();
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

pub fn maxima_keep_nan(g: &Communicator, s: &Stream) {
    let mine = if g.rank() == g.size() - 1 { [f32::NAN, 1.0] } else { [2.0, f32::NEG_INFINITY] };
    let t = up(s, &mine);
    g.all_reduce(s, &t, ReduceOp::Max, "nan").unwrap();
    let got = s.download::<f32>(&t).unwrap();
    assert!(got[0].is_nan() && got[1] == 1.0, "{got:?}");
}
