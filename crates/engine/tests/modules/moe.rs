//! MoE passes: which tokens a capacity drops; one that ends early, whose buffers of a running all-to-all are not reused before it
//! has ended.

use super::support::*;
use ferrotron_comm::World;
use ferrotron_engine::attention::Layout;
use ferrotron_engine::moe::{Capacity, Moe, MoeBatch, MoeInput, MoeShape, MoeTraining};
use ferrotron_engine::{Declarations, Params, Rank, StepContext, StepNumber, StepState};
use ferrotron_kernels::{Act, RouterParams, ScoreFunction};
use ferrotron_tensor::{DType, Instrumentation, Result, Tensor};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
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

/// Of two sequences whose tokens all go to one expert, with room for half of them, the first tokens of both stay, as in Megatron
/// Core; of packed documents the first rows do.
#[test]
fn capacity_by_position_keeps_the_first_tokens_of_every_sequence() {
    let cases = [
        (Layout::Rows { count: 2, len: 4 }, [0, 1, 4, 5]),
        (Layout::Rows { count: 4, len: 2 }, [0, 2, 4, 6]),
        (Layout::Rows { count: 1, len: 8 }, [0, 1, 2, 3]),
        (Layout::Packed { offsets: vec![0, 4, 8] }, [0, 1, 2, 3]),
    ];
    for (layout, kept) in cases {
        for per_rank in [false, true] {
            let rank = Rank::cpu(1, 1).unwrap();
            let capacity = Capacity { factor: 1.0, by_probability: false, pad: false, per_rank };
            let training = MoeTraining { capacity: Some(capacity), ..MoeTraining::default() };
            let mut d = Declarations::of(&rank).with_moe_training(&Arc::new(training.clone()));
            let moe = Moe::declare(&mut d, "moe", 0, &MoeShape { experts: 2, topk: 1, ..shape() }).unwrap();
            let layers = d.moe_layers().to_vec();
            let params = Params::allocate(&rank, d.finish(), DType::F32).unwrap();
            let state = StepState::new(&rank, &params, &layers).unwrap();
            for (i, (spec, t)) in params.specs().iter().zip(params.values()).enumerate() {
                let mut values = numbers(i as u64 + 1, t.numel());
                if spec.parts[0].name == "moe.router.weight" {
                    // All logits of the second expert are the larger ones.
                    values = (0..t.numel()).map(|i| if i < HIDDEN { -1.0 } else { 1.0 }).collect();
                }
                write(&rank, t, &values);
            }
            let x = rank.activation(&[8, HIDDEN], DType::F32).unwrap();
            write(&rank, &x, &(0..8 * HIDDEN).map(|i| 1.0 + i as f64 / 100.0).collect::<Vec<_>>());
            let tokens = rank.tokens(&layout).unwrap();
            let input = MoeInput::new(&rank, &layout, &tokens, None, &training).unwrap();
            let batch = MoeBatch {
                input: &input,
                step: StepNumber::Known(0),
                rows: &input.token_index,
                micro_batch_weight: 1.0,
            };
            let p = StepContext { moe: Some(batch), ..StepContext::new(&rank, &params, &state) };
            let (y, _) = ferrotron_engine::run_to_completion(moe.forward(&p, &x)).unwrap();
            let y = host(&rank, &y);
            let stay: Vec<usize> =
                (0..8).filter(|t| y[t * HIDDEN..][..HIDDEN].iter().any(|y| *y != 0.0)).collect();
            assert_eq!(stay, kept, "{layout:?}, per rank: {per_rank}");
        }
    }
}
