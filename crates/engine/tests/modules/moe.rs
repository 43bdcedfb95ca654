//! An MoE pass that ends early: buffers of a running all-to-all are not reused before it has ended.

use super::support::*;
use ferrotron_comm::World;
use ferrotron_engine::moe::{Moe, MoeShape};
use ferrotron_engine::{Declarations, Params, Rank, StepContext, StepState};
use ferrotron_kernels::{Act, RouterParams, ScoreFunction};
use ferrotron_tensor::{DType, Instrumentation, Result, Tensor};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const HIDDEN: usize = 8;
const TOKENS: usize = 6;

fn shape() -> MoeShape {
    MoeShape {
        hidden: HIDDEN,
        ffn: 8,
        experts: 4,
        topk: 2,
        routing: RouterParams { score: ScoreFunction::Softmax, normalize: false, groups: None, scale: 1.0 },
        router_bias: false,
        bias: false,
        expert_bias: false,
        act: Act::Silu,
        gated: true,
        latent: None,
        shared: None,
        shared_gate: false,
        std: (0.1, 0.1),
    }
}

/// Runs a pass until it has yielded `yields` times, then drops it, as an error at that point does.
fn abandon<T>(pass: impl Future<Output = Result<T>>, yields: usize) {
    let mut pass = pin!(pass);
    for _ in 0..yields {
        let state = pass.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(state, Poll::Pending));
    }
}

/// Allocates and writes buffers of every size that a pass uses: memory it freed too early is overwritten here, which the
/// race checker reports.
fn reuse_memory(rank: &Rank) {
    let buffers: Vec<Tensor> = (1..=4 * TOKENS)
        .flat_map(|rows| [1, HIDDEN].map(|width| rank.activation(&[rows, width], DType::F32).unwrap()))
        .collect();
    buffers.iter().for_each(|t| rank.compute.zero(t).unwrap());
}

#[test]
fn abandoned_all_to_all_is_waited_for_before_its_buffers_are_reused() {
    let run = |world: World| {
        let checked = Instrumentation { race_check: true, ..Instrumentation::default() };
        let rank = Rank::cpu_instrumented(1, 1, checked).unwrap();
        let rank = Rank { etp_ep_group: world.all(), world, overlap: true, ..rank };
        let mut d = Declarations::of(&rank);
        let moe = Moe::declare(&mut d, "moe", 0, &shape()).unwrap();
        let layers = d.moe_layers().to_vec();
        let params = Params::allocate(&rank, d.finish(), DType::F32).unwrap();
        let state = StepState::new(&rank, &params, &layers).unwrap();
        for (i, t) in params.values().iter().enumerate() {
            write(&rank, t, &numbers(i as u64 + 1, t.numel()));
        }
        let p = StepContext::new(&rank, &params, &state);
        let x = rank.activation(&[TOKENS, HIDDEN], DType::F32).unwrap();
        write(&rank, &x, &numbers(7 + rank.world.rank() as u64, TOKENS * HIDDEN));
        let forward = || ferrotron_engine::run_to_completion(moe.forward(&p, &x)).unwrap();
        let complete = host(&rank, &forward().0);
        for yields in [1, 2] {
            abandon(moe.forward(&p, &x), yields);
            reuse_memory(&rank);
            let (y, saved) = forward();
            assert_eq!(host(&rank, &y), complete, "forward after {yields} yields");
            abandon(moe.backward(&p, saved, &x), yields);
            reuse_memory(&rank);
        }
        assert_eq!(host(&rank, &forward().0), complete);
    };
    let worlds = World::threads(2, Duration::from_secs(60));
    std::thread::scope(|scope| {
        worlds.into_iter().for_each(|world| {
            scope.spawn(|| run(world));
        });
    });
}
