use crate::data_parallel::{BucketLimit, HostShards, Placement, ShardingStrategy};
use crate::{
    Declarations, GradBuffer, Init, ParamId, ParamLayout, ParamSpec, Params, Part, Rank, Split, WeightGrad,
};
use ferrotron_comm::{Communicator, World};
use ferrotron_tensor::{Category, DType, Instrumentation};
use std::time::Duration;

const SIZES: [usize; 4] = [70, 5, 130, 64];
const SCHEMES: [ShardingStrategy; 3] = {
    let host = HostShards { weights: false, gradients: false };
    use Placement::{Flat, Partial, Replicate, TensorAtomic};
    [
        ShardingStrategy {
            param: Replicate,
            grad: Partial,
            optimizer: Flat,
            outer_optimizer: Replicate,
            host,
        },
        ShardingStrategy { param: Replicate, grad: Flat, optimizer: Flat, outer_optimizer: Replicate, host },
        ShardingStrategy {
            param: Replicate,
            grad: TensorAtomic,
            optimizer: TensorAtomic,
            outer_optimizer: Replicate,
            host,
        },
    ]
};

/// Parameters of [`SIZES`]; with `tied`, the first one is on both pipeline ends.
fn specs(tied: Option<bool>) -> Vec<ParamSpec> {
    let mut d = Declarations::default();
    for (i, n) in SIZES.into_iter().enumerate() {
        let (name, shape) = (format!("p{i}"), vec![n]);
        d.declare(vec![Part { name, shape, init: Init::Constant(0.0), split: Split::Replicated }]).unwrap();
    }
    if let Some(mirror) = tied {
        d.mark_tied_across_stages(ParamId(0), mirror);
    }
    d.finish()
}

const GRADIENTS: HostShards = HostShards { weights: false, gradients: true };

/// In buckets of 100 elements.
fn params(rank: &Rank, tied: Option<bool>, scheme: &ShardingStrategy) -> Params {
    let (placement, bucket) = (Placement::Replicate, BucketLimit::Elements(100));
    let layout = ParamLayout { placement, bucket, comm_unit: 800, outer_pieces: 1, host: scheme.host };
    Params::new(rank, specs(tied), DType::F32, layout).unwrap()
}

/// Ranks as threads: `ends` pipeline stages of `copies` data-parallel ranks each.
fn each_rank(copies: usize, ends: usize, work: impl Fn(&Rank) + Sync) {
    let worlds = World::threads(copies * ends, Duration::from_secs(60));
    std::thread::scope(|scope| {
        for world in worlds {
            let work = &work;
            scope.spawn(move || {
                let rank = Rank::cpu_instrumented(
                    1,
                    0,
                    Instrumentation { race_check: true, ..Instrumentation::default() },
                )
                .unwrap();
                let mine = |name, groups: Vec<Vec<usize>>| {
                    let joined = groups.iter().filter_map(|g| world.group(name, g).unwrap());
                    joined.collect::<Vec<_>>().swap_remove(0)
                };
                let stages = (0..ends).map(|e| (0..copies).map(|c| e * copies + c).collect()).collect();
                let pairs = (0..copies).map(|c| (0..ends).map(|e| e * copies + c).collect()).collect();
                let (copies, ends) = (mine("copies", stages), mine("ends", pairs));
                for overlap in [false, true] {
                    work(&Rank {
                        overlap,
                        dp_cp_group: copies.clone(),
                        shard_groups: [copies.clone(), Communicator::solo()],
                        embedding_group: ends.clone(),
                        ..rank.clone()
                    });
                }
            });
        }
    });
}

/// A contribution: small integers, so that the order of additions does not matter.
fn value(param: usize, micro: usize, who: usize, i: usize) -> f32 {
    ((i * 5 + param * 3 + micro * 7 + who * 2) % 13) as f32 - 6.0
}

fn contribute(rank: &Rank, grads: &mut GradBuffer, param: usize, micro: usize, who: usize) {
    let values: Vec<f32> = (0..SIZES[param]).map(|i| value(param, micro, who, i)).collect();
    let t = rank.compute.upload(&values, &[1, values.len()], Category::Activations).unwrap();
    WeightGrad::column_sums(ParamId(param), &t).run(rank, grads).unwrap();
}

fn check(rank: &Rank, grads: &GradBuffer, what: &str, want: impl Fn(usize, usize) -> f32) {
    for (param, t) in grads.gathered(rank).unwrap().iter().enumerate() {
        let got: Vec<f32> = rank.compute.download(t).unwrap();
        let want: Vec<f32> = (0..SIZES[param]).map(|i| want(param, i)).collect();
        assert_eq!(got, want, "{what}: parameter {param}");
    }
}

/// Micro-batches that overtake each other, as in pipelines, and a parameter without gradient: two steps in a row, also
/// on one rank, where a sum must not alias its input.
#[test]
fn interleaved_micro_batches_add_up() {
    const MICRO: usize = 3;
    for copies in [1, 2, 3] {
        each_rank(copies, 1, |rank| {
            let on_host = if copies == 1 { ShardingStrategy::REPLICATED } else { SCHEMES[1] };
            let on_host = [on_host, SCHEMES[2]].map(|s| s.with_host(GRADIENTS));
            for scheme in [ShardingStrategy::REPLICATED].into_iter().chain(SCHEMES).chain(on_host) {
                let params = params(rank, None, &scheme);
                let mut grads = GradBuffer::of(&params, scheme);
                let me = rank.dp_cp_group.rank();
                for step in 0..2 {
                    grads.begin_step(MICRO);
                    // The last parameter is two micro-batches ahead; the second is unused.
                    for (param, micro) in
                        [(3, 0), (3, 1), (2, 0), (0, 0), (3, 2), (2, 1), (2, 2), (0, 1), (0, 2)]
                    {
                        contribute(rank, &mut grads, param, micro, me + step);
                    }
                    grads.reduce(rank).unwrap();
                    let sum = |param, i| {
                        let all = (0..MICRO).flat_map(|m| (0..copies).map(move |c| (m, c)));
                        if param == 1 { 0.0 } else { all.map(|(m, c)| value(param, m, c + step, i)).sum() }
                    };
                    check(rank, &grads, &format!("{scheme:?} over {copies} step {step}"), sum);
                    // A contribution too many is an error.
                    let t = rank.compute.zeros(&[1, SIZES[3]], DType::F32, Category::Activations).unwrap();
                    assert!(WeightGrad::column_sums(ParamId(3), &t).run(rank, &mut grads).is_err());
                }
            }
        });
    }
}

/// The sum over data-parallel ranks, then over both pipeline ends; the norm counts it on one of them.
#[test]
fn tied_gradients_are_those_of_both_ends() {
    each_rank(2, 2, |rank| {
        let (me, end) = (rank.dp_cp_group.rank(), rank.embedding_group.rank());
        let on_host = [1, 2].map(|i| SCHEMES[i].with_host(GRADIENTS));
        for scheme in [ShardingStrategy::REPLICATED].into_iter().chain(SCHEMES).chain(on_host) {
            let params = params(rank, Some(end == 1), &scheme);
            let mut grads = GradBuffer::of(&params, scheme);
            grads.begin_step(1);
            (0..SIZES.len()).rev().for_each(|p| contribute(rank, &mut grads, p, 0, 2 * end + me));
            grads.reduce(rank).unwrap();
            let over_copies = |p, end, i| value(p, 0, 2 * end, i) + value(p, 0, 2 * end + 1, i);
            let sum = |p, i| {
                if p == 0 { over_copies(p, 0, i) + over_copies(p, 1, i) } else { over_copies(p, end, i) }
            };
            check(rank, &grads, &format!("{scheme:?}"), sum);
            let counted: usize = grads.norm_shards(rank).unwrap().iter().map(|t| t.numel()).sum();
            let all = rank.dp_cp_group.all_gather_bytes(&counted.to_le_bytes(), "counted").unwrap();
            let all =
                all.iter().map(|b| usize::from_le_bytes(b[..8].try_into().unwrap())).collect::<Vec<_>>();
            let total: usize = SIZES.iter().skip(end).sum();
            assert_eq!(all.iter().sum::<usize>(), total, "{scheme:?} {all:?}");
        }
    });
}
