//! Bytes sent, against the ring formulas.

use crate::support::*;
use ferrotron_comm::{OpKind, ReduceOp};
use ferrotron_tensor::bf16;

#[test]
fn volumes_follow_the_ring_formulas() {
    for n in 1..=6usize {
        let sent = on_ranks(n, LONG, |world, s| {
            let g = world.all();
            let me = g.rank();
            let before = g.volume();
            let t = blank::<bf16>(&s, 60 * n);
            g.all_reduce(&s, &t, ReduceOp::Sum, "x").unwrap();
            g.all_reduce(&s, &t, ReduceOp::Sum, "x").unwrap();
            let part = blank::<bf16>(&s, 60);
            g.all_gather(&s, &part, &t, "x").unwrap();
            g.reduce_scatter(&s, &t, &part, ReduceOp::Sum, "x").unwrap();
            let to = blank::<bf16>(&s, 60 * n);
            g.all_to_all(&s, &t, &to, "x").unwrap();
            g.broadcast(&s, &t, n - 1, "x").unwrap();
            g.barrier("x").unwrap();
            g.send_recv(&s, &[((me + 1) % n, &t)], &[((me + n - 1) % n, &to)], "x").unwrap();
            let counts: Vec<usize> = (0..n).map(|r| r * 10).collect();
            let all = blank::<u8>(&s, counts.iter().sum());
            g.all_gather_v(&s, &blank::<u8>(&s, counts[me]), &all, &counts, "x").unwrap();
            g.all_gather_bytes(&vec![0; counts[me]], "x").unwrap();
            assert_eq!(world.volume(), g.volume());
            g.volume().since(&before)
        });
        let whole = 60 * n as u64 * 2;
        let ring = whole * (n as u64 - 1) / n as u64;
        for (r, v) in sent.iter().enumerate() {
            let uneven: usize = (0..n).map(|r| r * 10).sum::<usize>() - (r + 1) % n * 10;
            assert_eq!(v.bytes(OpKind::AllReduce), 2 * 2 * ring);
            assert_eq!(v.calls(OpKind::AllReduce), 2);
            assert_eq!(v.bytes(OpKind::AllGather), ring + uneven as u64);
            assert_eq!(v.bytes(OpKind::ReduceScatter), ring);
            assert_eq!(v.bytes(OpKind::AllToAll), ring);
            assert_eq!(v.bytes(OpKind::SendRecv), if n == 1 { 0 } else { whole });
            assert_eq!(v.bytes(OpKind::AllGatherBytes), uneven as u64);
            assert_eq!((v.bytes(OpKind::Barrier), v.calls(OpKind::Barrier)), (0, 1));
            let parts = OpKind::ALL.iter().map(|k| v.bytes(*k)).sum::<u64>();
            assert_eq!(v.total(), parts);
        }
        let broadcast: u64 = sent.iter().map(|v| v.bytes(OpKind::Broadcast)).sum();
        assert_eq!(broadcast, (n as u64 - 1) * whole);
    }
}
