//! On a GPU: every tensor-core kernel, not only the one that would be chosen, gives what the generic kernel gives.

use super::Chosen;
use super::hopper::{GroupedOp, VARIANTS};
use super::mma;
use crate::cuda::CudaKernels;
use crate::cuda::occupy::Occupied;
use crate::cuda::test_support::{gpu, gpu_alone, host, poisoned, random_bits, upload};
use crate::{GroupedGemm, GroupedWgrad, Segments};
use ferrotron_tensor::{Category, DType, Stream, Tensor};

/// Small integers, whose products and sums are exact in any order; NaN in rows of `[rows, width]` outside all
/// segments.
pub(super) fn numbers(seed: u64, rows: usize, width: usize, owned: impl Fn(usize) -> bool) -> Vec<f32> {
    let mut bits = random_bits(seed);
    let mut draw = |i: usize| {
        let value = (bits() % 5) as f32 - 2.0;
        if owned(i / width.max(1)) { value } else { f32::NAN }
    };
    (0..rows * width).map(&mut draw).collect()
}

/// Counts, alignment of segments, rows behind them.
fn layouts() -> Vec<(Vec<usize>, usize, usize)> {
    vec![
        (vec![1], 1, 0),
        (vec![127, 0, 129, 128, 3], 1, 5),
        (vec![300, 0, 0, 1, 700], 128, 140),
        ((0..130).map(|i| i * 7 % 40).collect(), 8, 0),
        // Longer than a slice; more tiles than blocks.
        (vec![5, 7000, 0, 2500, 64, 4096], 16, 33),
    ]
}

/// Offsets and counts on the GPU, and whether each row belongs to a segment.
pub(super) fn spread(s: &Stream, counts: &[usize], align: usize, behind: usize) -> ([Tensor; 2], Vec<bool>) {
    let (mut at, mut offsets, mut owners) = (0, Vec::new(), Vec::new());
    for n in counts {
        offsets.push(at as i32);
        owners.extend(at..at + n);
        at = (at + n).next_multiple_of(align);
    }
    offsets.push(at as i32);
    let mut owned = vec![false; at + behind];
    owners.iter().for_each(|r| owned[*r] = true);
    let lengths: Vec<i32> = counts.iter().map(|n| *n as i32).collect();
    let up = |v: &[i32]| s.upload(v, &[v.len()], Category::Workspace).unwrap();
    ([up(&offsets), up(&lengths)], owned)
}

/// Every tensor-core kernel of this GPU with its GEMM.
fn kernels(k: &CudaKernels) -> Vec<(GroupedOp, Chosen)> {
    let hopper = VARIANTS.iter().filter(|_| k.has("grouped/hopper")).map(|v| (v.op, Chosen::Hopper(v)));
    let mma = [
        (GroupedOp::Fprop, &mma::FPROP[..]),
        (GroupedOp::Dgrad, &mma::DGRAD),
        (GroupedOp::Wgrad, &mma::WGRAD),
    ];
    let mma = mma.into_iter().flat_map(|(op, all)| all.iter().map(move |v| (op, Chosen::Mma(v))));
    hopper.chain(mma).collect()
}

#[test]
fn every_variant_matches_the_generic_kernel() {
    let Some((k, s)) = gpu() else { return };
    for (counts, align, behind) in layouts() {
        let (at, owned) = spread(&s, &counts, align, behind);
        let (rows, e) = (owned.len(), counts.len());
        let segments = Segments { offsets: &at[0], counts: &at[1] };
        // Short and long sums.
        for [depth, width] in [[8, 8], [64, 264], [200, 128], [1096, 392], [520, 1032]] {
            if e > 100 && depth * width > 100_000 {
                continue;
            }
            let x = upload(&s, &numbers(1, rows, depth, |r| owned[r]), &[rows, depth]);
            let dy = upload(&s, &numbers(2, rows, width, |r| owned[r]), &[rows, width]);
            let w = numbers(3, e * width, depth, |_| true);
            let bias = upload(&s, &numbers(4, e, width, |_| true), &[e, width]);
            let old = numbers(5, e * width, depth, |_| true);
            for (op, chosen) in kernels(&k) {
                let what = format!("{chosen:?} {counts:?} {rows} rows, {depth} x {width}");
                if op == GroupedOp::Wgrad {
                    for accumulate in [false, true] {
                        let run = |chosen| {
                            let shape = [e, width, depth];
                            let dw = match accumulate {
                                true => s.upload(&old, &shape, Category::Workspace).unwrap(),
                                false => poisoned(&s, DType::F32, &shape),
                            };
                            let g = GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw, accumulate) };
                            k.launch_grouped_wgrad(&s, &g, &g.sizes().unwrap(), chosen).unwrap();
                            host(&s, &dw)
                        };
                        assert!(run(chosen) == run(Chosen::Generic), "{what} accumulate {accumulate}");
                    }
                    continue;
                }
                let as_stored = op == GroupedOp::Dgrad;
                let w = upload(&s, &w, &if as_stored { [e, depth, width] } else { [e, width, depth] });
                for bias in [None, Some(&bias)] {
                    let run = |chosen| {
                        let y = poisoned(&s, DType::BF16, &[rows, width]);
                        let g = GroupedGemm { x: &x, w: &w, as_stored, segments, bias, y: &y };
                        k.launch_grouped(&s, &g, &g.sizes().unwrap(), chosen).unwrap();
                        host(&s, &y)
                    };
                    assert!(run(chosen) == run(Chosen::Generic), "{what} bias {}", bias.is_some());
                }
            }
        }
    }
}

/// Expected split sizes leave room behind the segments, which changes from step to step.
#[test]
fn room_behind_the_segments_changes_no_bits_of_wgrad() {
    let Some((k, s)) = gpu_alone() else { return };
    let counts = [40_000, 0, 5, 33_000];
    let [depth, width] = [136, 264];
    let run = |chosen, room| {
        let (at, owned) = spread(&s, &counts, 1, room);
        let segments = Segments { offsets: &at[0], counts: &at[1] };
        // Sums that are rounded, so that their order shows; NaN outside the segments.
        let values = |seed, width| {
            let thirds = |x: &f32| (x + 0.1) / 3.0;
            let all = numbers(seed, owned.len(), width, |r| owned[r]);
            upload(&s, &all.iter().map(thirds).collect::<Vec<_>>(), &[owned.len(), width])
        };
        let (x, dy) = (values(1, depth), values(2, width));
        let dw = poisoned(&s, DType::F32, &[counts.len(), width, depth]);
        let g = GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw, false) };
        k.launch_grouped_wgrad(&s, &g, &g.sizes().unwrap(), chosen).unwrap();
        host(&s, &dw)
    };
    for (_, chosen) in kernels(&k).into_iter().filter(|(op, _)| *op == GroupedOp::Wgrad) {
        let exact = run(chosen, 0);
        for room in [300, 20_000, 200_000] {
            assert!(run(chosen, room) == exact, "{chosen:?} {room}");
        }
    }
}

/// Free multiprocessors beside which a kernel must end: one block, or enough that two of them share a GPC for a cluster.
pub(super) fn free(pair: bool) -> u32 {
    if pair { 16 } else { 1 }
}

#[test]
fn wgrad_ends_with_few_resident_blocks_and_gives_the_same_bits() {
    let Some((k, s)) = gpu_alone() else { return };
    // About twenty slices of a segment, and more tiles than blocks.
    let counts = [5, 20_000, 0, 2500];
    let (at, owned) = spread(&s, &counts, 16, 0);
    let (rows, [depth, width]) = (owned.len(), [264, 520]);
    let segments = Segments { offsets: &at[0], counts: &at[1] };
    // Sums that are rounded, so that their order shows.
    let values = |seed, width| {
        let thirds: Vec<f32> = numbers(seed, rows, width, |_| true).iter().map(|x| (x + 0.1) / 3.0).collect();
        upload(&s, &thirds, &[rows, width])
    };
    let (x, dy) = (values(1, depth), values(2, width));
    let run = |chosen| {
        let dw = poisoned(&s, DType::F32, &[counts.len(), width, depth]);
        let g = GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw, false) };
        k.launch_grouped_wgrad(&s, &g, &g.sizes().unwrap(), chosen).unwrap();
        host(&s, &dw)
    };
    for (_, chosen) in kernels(&k).into_iter().filter(|(op, _)| *op == GroupedOp::Wgrad) {
        let alone = run(chosen);
        let pair = matches!(chosen, Chosen::Hopper(variant) if variant.pair);
        let occupied = Occupied::all_but(&k, &s, free(pair));
        let beside = run(chosen);
        assert!(occupied.release(), "{chosen:?} did not end");
        assert!(beside == alone, "{chosen:?}");
    }
}
