use super::*;
use crate::{Declarations, GroupRank, Init, ParamId, ParamSpec, Part, Rank, Split, UpdateGroup};
use ferrotron_comm::{Communicator, World};
use ferrotron_tensor::{Category, DType, Instrumentation, bf16};
use std::sync::Arc;
use std::time::Duration;

fn specs(sizes: &[usize]) -> Vec<ParamSpec> {
    let mut d = Declarations::default();
    for (i, n) in sizes.iter().enumerate() {
        let (name, shape) = (format!("p{i}"), vec![*n]);
        d.declare(vec![Part { name, shape, init: Init::Constant(0.0), split: Split::Replicated }]).unwrap();
    }
    d.finish()
}

/// Parameters a, b, c of 1000, 50 and 100 elements over four ranks, buckets of 120.
#[test]
fn the_worked_example() {
    let plan = BucketPlan::new(&specs(&[1000, 50, 100]), [4; 2], 120);
    let [first, second] = plan.buckets() else { panic!("{plan:?}") };
    assert_eq!((first.len, second.len), (256, 1024));
    let spans = |b: &Bucket| b.spans.iter().map(|s| (s.param.0, s.range.clone())).collect::<Vec<_>>();
    assert_eq!(spans(first), [(2, 0..100), (1, 128..178)]);
    assert_eq!(spans(second), [(0, 0..1000)]);
    assert_eq!(first.gaps().collect::<Vec<_>>(), [100..128, 178..256]);
    // Rank 1 owns elements 64..99 of c and 256..511 of a, and nothing of b.
    let one = GroupRank { rank: 1, size: 4 };
    assert_eq!(first.held(Placement::Flat, one), 64..128);
    assert_eq!(second.held(Placement::Flat, one), 256..512);
    let piece = |i| plan.piece(ParamId(i), Placement::Flat, one);
    assert_eq!(piece(2), ParamShard { bucket: 0, param_range: 64..100, local_range: 0..36 });
    assert_eq!(piece(0), ParamShard { bucket: 1, param_range: 256..512, local_range: 0..256 });
    assert!(piece(1).param_range.is_empty());
}

#[test]
fn pieces_of_all_ranks_make_every_parameter_once() {
    let specs = specs(&[1000, 50, 100, 1, 0, 640, 7]);
    for size in [1, 2, 3, 4, 7] {
        for target in [1, 120, 1 << 20] {
            let plan = BucketPlan::new(&specs, [size; 2], target);
            for placement in [Placement::Flat, Placement::TensorAtomic] {
                for (i, spec) in specs.iter().enumerate() {
                    let pieces =
                        (0..size).map(|rank| plan.piece(ParamId(i), placement, GroupRank { rank, size }));
                    let held: Vec<_> = pieces.map(|p| p.param_range).filter(|r| !r.is_empty()).collect();
                    let all: Vec<usize> = held.iter().cloned().flatten().collect();
                    assert_eq!(all, (0..spec.numel()).collect::<Vec<_>>(), "{placement:?} over {size}");
                    assert!(placement == Placement::Flat || held.len() <= 1, "{i} is cut");
                }
            }
            assert!(
                plan.buckets().iter().all(|b| b.len.is_multiple_of(128) && b.len.is_multiple_of(32 * size))
            );
            assert!(plan.buckets().iter().flat_map(|b| &b.spans).all(|s| s.range.start.is_multiple_of(64)));
        }
    }
}

#[test]
fn a_parameter_of_both_ends_is_alone() {
    let mut d = Declarations::default();
    let part = |name: &str| Part {
        name: name.into(),
        shape: vec![10, 2],
        init: Init::Constant(0.0),
        split: Split::Replicated,
    };
    let ids: Vec<ParamId> = ["a", "b", "c"].iter().map(|n| d.declare(vec![part(n)]).unwrap()).collect();
    d.mark_tied_across_stages(ids[1], true);
    let plan = BucketPlan::new(&d.finish(), [2; 2], 1 << 20);
    let params: Vec<Vec<usize>> =
        plan.buckets().iter().map(|b| b.spans.iter().map(|s| s.param.0).collect()).collect();
    assert_eq!(params, [vec![2], vec![1], vec![0]]);
    assert_eq!(plan.buckets().iter().map(|b| b.tied_across_stages).collect::<Vec<_>>(), [false, true, false]);
}

/// Tensor-parallel ranks have the same parameters in the same buckets, though their shards differ in size.
#[test]
fn buckets_are_alike_on_ranks_that_share_layers() {
    let plan = |rank: usize| {
        let mut d = Declarations::at(GroupRank { rank, size: 4 });
        for (i, rows) in [10, 5, 9, 1000].into_iter().enumerate() {
            let (name, shape) = (format!("p{i}"), vec![rows, 40]);
            let init = Init::Constant(0.0);
            d.declare(vec![Part { name, shape, init, split: Split::Rows { unit: 1 } }]).unwrap();
        }
        let plan = BucketPlan::new(&d.finish(), [2; 2], 100);
        plan.buckets().iter().map(|b| b.spans.iter().map(|s| s.param.0).collect()).collect::<Vec<Vec<_>>>()
    };
    assert_eq!(plan(0).len(), 3);
    (1..4).for_each(|rank| assert_eq!(plan(rank), plan(0)));
}

/// Matrices that one rank updates whole, and vectors beside them.
fn owned_specs(shapes: &[[usize; 2]]) -> Vec<ParamSpec> {
    let mut d = Declarations::default();
    for (i, shape) in shapes.iter().enumerate() {
        let part = |name, shape| Part { name, shape, init: Init::Constant(0.0), split: Split::Replicated };
        d.declare(vec![part(format!("m{i}"), shape.to_vec())]).unwrap();
        d.declare(vec![part(format!("v{i}"), vec![shape[0]])]).unwrap();
    }
    let mut specs = d.finish();
    for spec in specs.iter_mut().filter(|s| s.shape.len() == 2) {
        spec.group = UpdateGroup { index: 1, storage: 1, frozen: false, base: false, whole: true };
    }
    specs
}

/// Whole matrices are dealt by the cost of their updates: nothing is cut, everything is owned once, vectors stay in equal
/// shards, and no rank has more than its share and one matrix.
#[test]
fn matrices_are_dealt_whole_by_cost() {
    let shapes: Vec<[usize; 2]> =
        (0..4).flat_map(|_| [[64, 64], [64, 160], [160, 64], [16, 64], [5, 7]]).collect();
    let cost = |[m, n]: [usize; 2]| (m.max(n) * m.min(n) * m.min(n)) as f64;
    for shapes in [&shapes[..], &shapes[..1], &[]] {
        let specs = owned_specs(shapes);
        for size in [1, 2, 3, 4, 7] {
            for target in [1, 20_000, 1 << 30] {
                let plan = BucketPlan::new(&specs, [size; 2], target);
                let mut costs = vec![0.0; size];
                for (i, spec) in specs.iter().enumerate() {
                    let bucket = &plan.buckets()[plan.slot(ParamId(i)).0];
                    assert_eq!(bucket.storage, spec.group.storage, "storages share no bucket");
                    if !spec.group.whole {
                        assert_eq!(bucket.placed(Placement::Flat), Placement::Flat);
                        continue;
                    }
                    let pieces = (0..size)
                        .map(|rank| plan.piece(ParamId(i), Placement::Flat, GroupRank { rank, size }));
                    let owners: Vec<usize> = pieces
                        .enumerate()
                        .filter(|(_, p)| !p.param_range.is_empty())
                        .map(|(r, p)| {
                            assert_eq!(p.param_range, 0..spec.numel());
                            assert!(p.local_range.start.is_multiple_of(64));
                            r
                        })
                        .collect();
                    let [owner] = owners[..] else { panic!("{i} has owners {owners:?}") };
                    costs[owner] += cost([spec.shape[0], spec.shape[1]]);
                }
                for b in plan.buckets() {
                    let ends: Vec<usize> =
                        (0..size).map(|rank| b.held(Placement::Flat, GroupRank { rank, size }).end).collect();
                    assert!(ends.is_sorted() && ends.last() == Some(&b.len), "{ends:?} of {}", b.len);
                }
                let (total, largest) =
                    shapes.iter().map(|s| cost(*s)).fold((0.0, 0f64), |(t, m), c| (t + c, m.max(c)));
                let most = costs.iter().fold(0f64, |a, c| a.max(*c));
                assert!(most <= total / size as f64 + largest, "{costs:?}");
            }
        }
    }
}

/// Owners get the sums and give them back, whoever owns nothing included.
#[test]
fn owned_buckets_are_reduced_to_owners_and_gathered() {
    for size in [2, 3, 5] {
        each_rank(size, |rank| {
            let plan = Arc::new(BucketPlan::new(&owned_specs(&[[8, 8], [8, 24]]), [size; 2], 1 << 20));
            let me = group_rank(&rank.dp_cp_group);
            let (s, kind) = (&rank.compute, (DType::F32, Category::Workspace));
            for bucket in 0..plan.buckets().len() {
                let layout = &plan.buckets()[bucket];
                let new = |p| FlatBuffer::empty(&plan, bucket, p, me, kind, s).unwrap();
                let (own, mine, all) =
                    (new(Placement::Partial), new(Placement::Flat), new(Placement::Replicate));
                fill(rank, &own, &(0..layout.len).map(|i| value(me.rank, i)).collect::<Vec<_>>());
                own.redistribute(rank, &rank.dp_cp_group, &mine, s, "to owners").unwrap();
                assert_eq!(read(rank, &mine), expected(layout, Placement::Flat, me));
                mine.redistribute(rank, &rank.dp_cp_group, &all, s, "from owners").unwrap();
                assert_eq!(read(rank, &all), expected(layout, Placement::Replicate, me));
            }
        });
    }
}

const ALL: [Placement; 4] =
    [Placement::Replicate, Placement::Partial, Placement::Flat, Placement::TensorAtomic];

/// Contribution of rank `r` to element `i`: small integers, exact in every dtype.
fn value(r: usize, i: usize) -> f32 {
    ((i * 7 + r * 3) % 11) as f32 - 5.0
}

/// A rank's memory of a bucket with elements `whole`, or partial sums of [`value`]s.
fn expected(bucket: &Bucket, placement: Placement, place: GroupRank) -> Vec<f32> {
    let sum = |i| (0..place.size).map(|r| value(r, i)).sum::<f32>();
    bucket.held(placement, place).map(sum).collect()
}

fn each_rank(size: usize, work: impl Fn(&Rank) + Sync) {
    let worlds = World::threads(size, Duration::from_secs(60));
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
                let ranks: Vec<usize> = (0..size).collect();
                let copies = world.group("copies", &ranks).unwrap().unwrap();
                let shard_groups = [copies.clone(), Communicator::solo()];
                work(&Rank { dp_cp_group: copies, shard_groups, ..rank });
            });
        }
    });
}

fn fill(rank: &Rank, b: &FlatBuffer, values: &[f32]) {
    match b.memory().dtype() {
        DType::F32 => rank.compute.upload_into(b.memory(), values).unwrap(),
        _ => {
            let values: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            rank.compute.upload_into(b.memory(), &values).unwrap();
        }
    }
}

fn read(rank: &Rank, b: &FlatBuffer) -> Vec<f32> {
    match b.memory().dtype() {
        DType::F32 => rank.compute.download(b.memory()).unwrap(),
        _ => rank.compute.download::<bf16>(b.memory()).unwrap().iter().map(|x| x.to_f32()).collect(),
    }
}

/// Redistributes between all pairs of placements, into separate memory and, where possible, in place.
#[test]
fn every_placement_goes_to_every_other() {
    for size in [1, 2, 3, 4] {
        for dtype in [DType::F32, DType::BF16] {
            each_rank(size, |rank| {
                let plan = Arc::new(BucketPlan::new(&specs(&[1000, 50, 100, 3, 65]), [size; 2], 120));
                let me = group_rank(&rank.dp_cp_group);
                let (s, kind) = (&rank.compute, (dtype, Category::Workspace));
                for bucket in 0..plan.buckets().len() {
                    let layout = &plan.buckets()[bucket];
                    for from in ALL {
                        for to in ALL {
                            for in_place in [false, true] {
                                let whole =
                                    FlatBuffer::empty(&plan, bucket, Placement::Replicate, me, kind, s)
                                        .unwrap();
                                let part_of_whole = |p| whole.view_as(p, me).unwrap();
                                let apart = |p| FlatBuffer::empty(&plan, bucket, p, me, kind, s).unwrap();
                                let (a, b) =
                                    if in_place && (from.is_full_size() || to.is_full_size() || from == to) {
                                        (part_of_whole(from), part_of_whole(to))
                                    } else {
                                        (apart(from), apart(to))
                                    };
                                let mine = match from {
                                    Placement::Partial => {
                                        (0..layout.len).map(|i| value(me.rank, i)).collect()
                                    }
                                    _ => expected(layout, from, me),
                                };
                                fill(rank, &a, &mine);
                                a.redistribute(rank, &rank.dp_cp_group, &b, s, "test").unwrap();
                                if to == Placement::Partial {
                                    // Only the sum over ranks is defined.
                                    let all = apart(Placement::Replicate);
                                    b.redistribute(rank, &rank.dp_cp_group, &all, s, "sum").unwrap();
                                    assert_eq!(read(rank, &all), expected(layout, Placement::Replicate, me));
                                } else {
                                    let what = format!("{from:?} to {to:?} over {size} in place {in_place}");
                                    assert_eq!(read(rank, &b), expected(layout, to, me), "{what}");
                                }
                            }
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn memory_of_another_length_is_refused() {
    each_rank(1, |rank| {
        let plan = Arc::new(BucketPlan::new(&specs(&[100]), [1; 2], 1));
        let t = rank.compute.zeros(&[3], DType::F32, Category::Workspace).unwrap();
        let (a, b) = ((Placement::Partial, &t), (Placement::Replicate, &t));
        let [a, b] = [a, b].map(|(p, t)| FlatBuffer::of(&plan, 0, p, t));
        assert!(a.redistribute(rank, &rank.dp_cp_group, &b, &rank.compute, "test").is_err());
    });
}
