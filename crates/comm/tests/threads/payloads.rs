//! Digests of what ranks send, and a lost collective.

use crate::support::*;
use ferrotron_comm::{DigestKernel, Error, OpKind, PayloadCall, ReduceOp, World};
use ferrotron_tensor::{Stream, Tensor};
use std::sync::Arc;

/// A digest that this crate does not have: the mixed sum of the bytes, on the host.
fn kernel() -> DigestKernel {
    Arc::new(|s: &Stream, x: &Tensor, out: &Tensor| {
        let bytes = s.download::<u8>(&x.as_bytes()?)?;
        let sum = bytes.iter().enumerate().map(|(i, b)| hash((i as u64) << 8 | u64::from(*b)));
        s.upload_into(out, &[sum.fold(0, u64::wrapping_add) as i64])
    })
}

/// Calls of every kind on two streams, of which rank 2 may send another value in the third.
fn calls(world: &World, s: &Stream, changed: bool) -> Vec<(PayloadCall, Option<u64>)> {
    let (g, me) = (world.all(), world.rank());
    let side = s.device().stream("comm").unwrap();
    let mine = tensor(s, &values::<f32>(me, 6));
    let all = blank::<f32>(s, 24);
    world.record_payloads(s, kernel());
    g.all_reduce(s, &mine, ReduceOp::Sum, "first").unwrap();
    g.all_gather(s, &mine, &all, "second").unwrap();
    let sent = tensor(s, &[if changed && me == 2 { 2.5f32 } else { 1.5 }]);
    side.wait(&s.record().unwrap()).unwrap();
    g.broadcast(&side, &sent, 2, "third").unwrap();
    // More than one allocation of digests.
    (0..700).for_each(|_| g.all_reduce(&side, &sent, ReduceOp::Max, "many").unwrap());
    let (next, before) = ((me + 1) % 4, (me + 3) % 4);
    let got = blank::<f32>(s, 6);
    side.wait(&s.record().unwrap()).unwrap();
    g.send_recv(&side, &[(next, &mine)], &[(before, &got)], "ring").unwrap();
    s.wait(&side.record().unwrap()).unwrap();
    let payloads = world.take_payloads().unwrap();
    g.all_reduce(s, &mine, ReduceOp::Sum, "not recorded").unwrap();
    let readback = s.device().stream("readback").unwrap();
    let read = payloads.read(&readback).unwrap();
    s.wait(&readback.record().unwrap()).unwrap();
    read
}

#[test]
fn what_a_rank_sends_is_hashed_call_by_call() {
    let runs = on_ranks(4, LONG, |world, s| [false, false, true].map(|changed| calls(&world, &s, changed)));
    for (me, [first, second, changed]) in runs.iter().enumerate() {
        let digests = |run: &[(PayloadCall, Option<u64>)]| run.iter().map(|(_, d)| *d).collect::<Vec<_>>();
        assert_eq!(digests(first), digests(second), "rank {me}");
        let labels: Vec<&str> = first.iter().map(|(c, _)| c.label.as_str()).collect();
        assert_eq!(labels[..4], ["first", "second", "third", "many"]);
        assert_eq!(labels[703..], ["ring", "ring"]);
        assert_eq!(first[2].1.is_some(), me == 2, "only the root of a broadcast sends");
        assert!(first[703].1.is_some() && first[704].1.is_none(), "sent, then received");
        assert_eq!(first[704].0.route, Some(((me as u64 + 3) % 4, me as u64)));
        assert_eq!((first[704].0.kind, first[0].0.sequence + 1), (OpKind::SendRecv, first[1].0.sequence));
        let differs = digests(first).iter().zip(digests(changed)).position(|(a, b)| *a != b);
        // The others send on what they have received.
        assert_eq!(differs, Some(if me == 2 { 2 } else { 3 }), "rank {me}");
    }
}

#[test]
fn a_lost_collective_is_missed_by_the_others() {
    let errors = on_ranks(3, 1000, |world, s| {
        let t = blank::<f32>(&s, 4);
        world.all().all_reduce(&s, &t, ReduceOp::Sum, "before").unwrap();
        if world.rank() == 1 {
            world.lose_next_collective();
            world.all().all_reduce(&s, &t, ReduceOp::Sum, "lost").unwrap();
            std::thread::sleep(std::time::Duration::from_millis(1500));
            return None;
        }
        Some(world.all().all_reduce(&s, &t, ReduceOp::Sum, "lost").unwrap_err())
    });
    for e in errors.into_iter().flatten() {
        assert!(matches!(&e, Error::Stall { .. }) && e.to_string().contains("rank 1"), "{e}");
    }
}
