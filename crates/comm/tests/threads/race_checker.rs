//! Collectives under the race checker: ordered streams pass, a missing wait is reported.

use crate::support::*;
use ferrotron_comm::{Communicator, ReduceOp, Result, World};
use ferrotron_tensor::{Category, DType, Stream, Tensor};

/// Which wait is left out.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Missing {
    Nothing,
    Before,
    After,
}

/// A step with communication on its own stream: compute writes, communication transfers, compute reads.
fn step(world: &World, compute: &Stream, missing: Missing, op: usize) -> Result<()> {
    let g = world.all();
    let comm = compute.device().stream("comm")?;
    for round in 0..4 {
        let n = g.size();
        let t = compute.zeros(&[1024 * n], DType::F32, Category::Communication)?;
        let other = compute.zeros(&[1024 * n], DType::F32, Category::Communication)?;
        if missing != Missing::Before || round < 2 {
            comm.wait(&compute.record()?)?;
        }
        collective(&g, &comm, &t, &other, op)?;
        if missing != Missing::After || round < 2 {
            compute.wait(&comm.record()?)?;
        }
        // Both are used again on the compute stream, and their memory in the next round.
        compute.zero(&other)?;
        compute.zero(&t)?;
    }
    Ok(())
}

fn collective(g: &Communicator, s: &Stream, t: &Tensor, other: &Tensor, op: usize) -> Result<()> {
    let (n, me) = (g.size(), g.rank());
    let part = |t: &Tensor| t.narrow(0, me * 1024, 1024);
    match op {
        0 => g.all_reduce(s, t, ReduceOp::Sum, "t"),
        1 => g.all_gather(s, &part(t)?, t, "t"),
        2 => g.reduce_scatter(s, t, &part(t)?, ReduceOp::Sum, "t"),
        3 => g.all_to_all(s, t, other, "t"),
        4 => g.broadcast(s, t, 0, "t"),
        _ => g.send_recv(s, &[((me + 1) % n, t)], &[((me + n - 1) % n, other)], "t"),
    }
}

#[test]
fn communication_on_its_own_stream_passes_the_race_checker() {
    for op in 0..6 {
        on_ranks(4, LONG, |world, s| step(&world, &s, Missing::Nothing, op).unwrap());
    }
}

#[test]
fn a_missing_wait_is_reported() {
    for op in 0..6 {
        for missing in [Missing::Before, Missing::After] {
            let results = on_ranks(4, LONG, |world, s| step(&world, &s, missing, op));
            let races =
                results.iter().filter(|r| r.as_ref().is_err_and(|e| e.to_string().contains("unordered")));
            assert!(races.count() > 0, "{op} {missing:?}: {results:?}");
        }
    }
}
