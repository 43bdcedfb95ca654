//! Every operation against its definition.

use crate::support::*;
use ferrotron_comm::{Communicator, Error, ReduceKernels, ReduceOp, SplitSizes, World};
use ferrotron_tensor::{Category, Device, Float, Stream, Tensor, Threads, bf16};

/// The bits of a tensor.
fn bits(s: &Stream, t: &Tensor) -> Vec<u8> {
    s.download::<u8>(&t.as_bytes().unwrap()).unwrap()
}

fn raw<T: Sample>(values: &[T]) -> Vec<u8> {
    let s = Device::cpu(Threads::new(1).unwrap()).stream("oracle").unwrap();
    bits(&s, &tensor(&s, values))
}

/// Sum and maximum of one element over ranks, by definition.
trait Reduced: Sample {
    fn sum(all: &[Self]) -> Self;
    fn max(all: &[Self]) -> Self;
}

impl Reduced for f32 {
    fn sum(all: &[f32]) -> f32 {
        all[1..].iter().fold(all[0], |a, x| a + x)
    }
    fn max(all: &[f32]) -> f32 {
        all.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }
}

impl Reduced for f64 {
    fn sum(all: &[f64]) -> f64 {
        all[1..].iter().fold(all[0], |a, x| a + x)
    }
    fn max(all: &[f64]) -> f64 {
        all.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
}

impl Reduced for bf16 {
    fn sum(all: &[bf16]) -> bf16 {
        <bf16 as Float>::from_f32(all[1..].iter().fold(Float::to_f32(all[0]), |a, x| a + Float::to_f32(*x)))
    }
    fn max(all: &[bf16]) -> bf16 {
        <bf16 as Float>::from_f32(all.iter().fold(f32::NEG_INFINITY, |a, x| a.max(Float::to_f32(*x))))
    }
}

macro_rules! integers {
    ($($t:ty),*) => { $(impl Reduced for $t {
        fn sum(all: &[$t]) -> $t {
            all.iter().fold(0, |a, x| a.wrapping_add(*x))
        }
        fn max(all: &[$t]) -> $t {
            *all.iter().max().unwrap()
        }
    })* };
}
integers!(i32, i64);

fn reduced<T: Reduced>(n: usize, len: usize, op: ReduceOp) -> Vec<T> {
    let all: Vec<Vec<T>> = (0..n).map(|r| values(r, len)).collect();
    (0..len)
        .map(|i| {
            let column: Vec<T> = all.iter().map(|v| v[i]).collect();
            if op == ReduceOp::Sum { T::sum(&column) } else { T::max(&column) }
        })
        .collect()
}

fn reductions<T: Reduced>(g: &Communicator, s: &Stream) {
    let (n, me) = (g.size(), g.rank());
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        for len in [0, 1, 5, 1000, 512 * n, 512 * n + 3] {
            let t = tensor(s, &values::<T>(me, len));
            g.all_reduce(s, &t, op, "all").unwrap();
            assert!(bits(s, &t) == raw(&reduced::<T>(n, len, op)), "all-reduce {op:?} {len} of {n}");
            let whole = reduced::<T>(n, n * len, op);
            let expect = raw(&whole[me * len..(me + 1) * len]);
            let all = tensor(s, &values::<T>(me, n * len));
            let mine = blank::<T>(s, len);
            g.reduce_scatter(s, &all, &mine, op, "part").unwrap();
            assert!(bits(s, &mine) == expect, "reduce-scatter {op:?} {len} of {n}");
            let place = all.narrow(0, me * len, len).unwrap();
            g.reduce_scatter(s, &all, &place, op, "part in place").unwrap();
            assert!(bits(s, &place) == expect, "reduce-scatter in place {op:?} {len} of {n}");
        }
    }
}

fn data_movement<T: Sample>(g: &Communicator, s: &Stream) {
    let (n, me) = (g.size(), g.rank());
    let all_of = |counts: &[usize]| -> Vec<T> {
        counts.iter().enumerate().flat_map(|(r, c)| values::<T>(r, *c)).collect()
    };
    for len in [0, 1, 7, 300] {
        let counts = vec![len; n];
        let (mine, all) = (tensor(s, &values::<T>(me, len)), blank::<T>(s, n * len));
        g.all_gather(s, &mine, &all, "gather").unwrap();
        assert_eq!(s.download::<T>(&all).unwrap(), all_of(&counts));
        let all = blank::<T>(s, n * len);
        let place = all.narrow(0, me * len, len).unwrap();
        s.upload_into(&place, &values::<T>(me, len)).unwrap();
        g.all_gather(s, &place, &all, "gather in place").unwrap();
        assert_eq!(s.download::<T>(&all).unwrap(), all_of(&counts));

        let (from, to) = (tensor(s, &values::<T>(me, n * len)), blank::<T>(s, n * len));
        g.all_to_all(s, &from, &to, "all-to-all").unwrap();
        let expect: Vec<T> =
            (0..n).flat_map(|r| values::<T>(r, n * len)[me * len..(me + 1) * len].to_vec()).collect();
        assert_eq!(s.download::<T>(&to).unwrap(), expect);

        for root in 0..n {
            let t = tensor(s, &values::<T>(me, len));
            g.broadcast(s, &t, root, "copy").unwrap();
            assert_eq!(s.download::<T>(&t).unwrap(), values::<T>(root, len));
        }
    }
    for salt in 0..4 {
        // Uneven counts, including zeros; all zero in the last round.
        let count = |from: usize, to: usize| if salt == 3 { 0 } else { (from * 5 + to * 3 + salt) % 4 * 3 };
        let counts: Vec<usize> = (0..n).map(|r| count(r, r)).collect();
        let total: usize = counts.iter().sum();
        let (mine, all) = (tensor(s, &values::<T>(me, counts[me])), blank::<T>(s, total));
        g.all_gather_v(s, &mine, &all, &counts, "gather uneven").unwrap();
        assert_eq!(s.download::<T>(&all).unwrap(), all_of(&counts));
        let place = all.narrow(0, counts[..me].iter().sum(), counts[me]).unwrap();
        g.all_gather_v(s, &place, &all, &counts, "gather uneven in place").unwrap();
        assert_eq!(s.download::<T>(&all).unwrap(), all_of(&counts));

        let sent: Vec<usize> = (0..n).map(|p| count(me, p)).collect();
        let received: Vec<usize> = (0..n).map(|p| count(p, me)).collect();
        let from = tensor(s, &values::<T>(me, sent.iter().sum()));
        let to = blank::<T>(s, received.iter().sum());
        let splits = SplitSizes { sent: &sent, received: &received };
        g.all_to_all_v(s, &from, &to, splits, "uneven all-to-all").unwrap();
        let expect: Vec<T> = (0..n)
            .flat_map(|r| {
                let start: usize = (0..me).map(|p| count(r, p)).sum();
                let total: usize = (0..n).map(|p| count(r, p)).sum();
                values::<T>(r, total)[start..start + count(r, me)].to_vec()
            })
            .collect();
        assert_eq!(s.download::<T>(&to).unwrap(), expect);
    }
}

fn everything(world: World, s: Stream) {
    let g = world.all();
    reductions::<f32>(&g, &s);
    reductions::<bf16>(&g, &s);
    reductions::<i32>(&g, &s);
    data_movement::<f32>(&g, &s);
    data_movement::<bf16>(&g, &s);
    data_movement::<i32>(&g, &s);
    data_movement::<u8>(&g, &s);
    for round in 0..3u8 {
        let bytes = |r: usize| vec![r as u8 + round; r * usize::from(round) * 100];
        let all = g.all_gather_bytes(&bytes(g.rank()), "notes").unwrap();
        assert_eq!(all, (0..g.size()).map(bytes).collect::<Vec<_>>());
        g.barrier("round").unwrap();
    }
}

#[test]
fn every_operation_equals_its_definition_for_one_to_eight_ranks() {
    (1..=8).for_each(|n| drop(on_ranks(n, LONG, everything)));
}

#[test]
fn f64_and_i64_reduce_and_ranks_may_have_a_device_each() {
    let devices: Vec<Device> = (0..3).map(|_| Device::cpu(Threads::new(1).unwrap())).collect();
    on_devices(&devices, LONG, ReduceKernels::default(), |world, s| {
        reductions::<f64>(&world.all(), &s);
        reductions::<i64>(&world.all(), &s);
        everything(world, s);
    });
}

#[test]
fn a_gpu_without_kernels_reduces_on_the_host() {
    on_devices(&vec![device(); 3], LONG, ReduceKernels::default(), everything);
}

#[test]
fn a_single_rank_needs_no_job() {
    let device = device();
    everything(World::solo(), device.stream("compute").unwrap());
    let (g, s) = (Communicator::solo(), device.stream("compute").unwrap());
    let (a, b) = (tensor(&s, &[1f32, 2.0]), blank::<f32>(&s, 2));
    g.send_recv(&s, &[(0, &a)], &[(0, &b)], "to itself").unwrap();
    assert_eq!(s.download::<f32>(&b).unwrap(), [1.0, 2.0]);
    assert!(matches!(g.receive(&s, &b, 0, "never sent"), Err(Error::Argument { .. })));
}

#[test]
fn maxima_keep_nans() {
    for at in 0..3 {
        let all = on_ranks(3, LONG, |world, s| {
            let t = tensor(&s, &[if world.rank() == at { f32::NAN } else { 1.0 }]);
            world.all().all_reduce(&s, &t, ReduceOp::Max, "max").unwrap();
            s.download::<f32>(&t).unwrap()[0]
        });
        assert!(all.iter().all(|x| x.is_nan()));
    }
}

#[test]
fn results_do_not_depend_on_which_rank_is_first() {
    let run = |seed: u64| {
        on_ranks(6, LONG, |world, s| {
            let g = world.all();
            let me = g.rank();
            let mut out = Vec::new();
            for step in 0..4 {
                let t = tensor(&s, &values::<f32>(me + step, 512 * 6 + 1 + step));
                random_delay(seed * 100 + (me * 7 + step) as u64);
                g.all_reduce(&s, &t, ReduceOp::Sum, "sum").unwrap();
                let (all, mine) = (tensor(&s, &values::<bf16>(me + step, 600)), blank::<bf16>(&s, 100));
                random_delay(seed * 200 + (me * 5 + step) as u64);
                g.reduce_scatter(&s, &all, &mine, ReduceOp::Sum, "part").unwrap();
                out.extend([bits(&s, &t), bits(&s, &mine)]);
            }
            out
        })
    };
    let first = run(0);
    for r in 1..6 {
        assert!((0..4).all(|i| first[0][2 * i] == first[r][2 * i]), "a sum is the same on all ranks");
    }
    (1..12).for_each(|seed| assert!(run(seed) == first, "run {seed}"));
}

#[test]
fn invalid_arguments_are_refused_with_a_fix() {
    let refused = |f: &(dyn Fn(&Communicator, &Stream) -> ferrotron_comm::Result<()> + Sync), word: &str| {
        let all = on_ranks(2, LONG, |world, s| f(&world.all(), &s).unwrap_err().to_string());
        assert!(all.iter().any(|e| e.contains(word)), "{word}: {all:?}");
    };
    let strided = |s: &Stream| {
        s.zeros(&[4, 6], ferrotron_tensor::DType::F32, Category::Communication)
            .unwrap()
            .transpose(0, 1)
            .unwrap()
    };
    let flat = |s: &Stream, n: usize| blank::<f32>(s, n);
    refused(&|g, s| g.all_reduce(s, &strided(s), ReduceOp::Sum, "x"), "not contiguous; copy it first");
    refused(&|g, s| g.broadcast(s, &strided(s), 0, "x"), "not contiguous");
    refused(&|g, s| g.all_gather(s, &strided(s), &flat(s, 48), "x"), "not contiguous");
    refused(&|g, s| g.all_gather(s, &flat(s, 24), &strided(s), "x"), "not contiguous");
    refused(&|g, s| g.reduce_scatter(s, &strided(s), &flat(s, 12), ReduceOp::Sum, "x"), "not contiguous");
    refused(&|g, s| g.all_to_all(s, &strided(s), &flat(s, 24), "x"), "not contiguous");
    refused(&|g, s| g.send(s, &strided(s), 1, "x"), "not contiguous");
    refused(&|g, s| g.all_gather(s, &flat(s, 5), &flat(s, 9), "x"), "2 times");
    refused(&|g, s| g.all_to_all(s, &flat(s, 5), &flat(s, 5), "x"), "equal parts");
    refused(&|g, s| g.all_gather_v(s, &flat(s, 2), &flat(s, 5), &[2, 2], "x"), "do not add up");
    refused(&|g, s| g.all_gather_v(s, &flat(s, 2), &flat(s, 2), &[2], "x"), "1 counts for 2 ranks");
    refused(&|g, s| g.broadcast(s, &flat(s, 2), 2, "x"), "rank 2 does not exist");
    refused(&|g, s| g.all_reduce(s, &blank::<u8>(s, 2), ReduceOp::Sum, "x"), "u8 cannot be reduced");
    refused(&|g, s| g.all_gather(s, &blank::<i32>(s, 2), &flat(s, 4), "x"), "different dtypes");
    let one = |s: &Stream| flat(s, 8);
    refused(
        &|g, s| {
            let t = one(s);
            g.all_to_all(s, &t, &t, "x")
        },
        "overlap",
    );
    refused(
        &|g, s| {
            let t = one(s);
            g.all_gather(s, &t.narrow(0, 2, 4).unwrap(), &t, "x")
        },
        "own slot",
    );
    let other = Device::cpu(Threads::new(1).unwrap()).stream("elsewhere").unwrap();
    refused(&|g, s| g.all_reduce(&other, &flat(s, 2), ReduceOp::Sum, "x"), "another device");
}
