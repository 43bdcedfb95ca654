//! On a GPU: every FP8 Hopper kernel, not only the one that would be chosen, gives what the generic kernel gives.

use super::hopper::GroupedOp;
use super::hopper_fp8::FP8_VARIANTS;
use super::tests::{free, numbers, spread};
use crate::cuda::occupy::Occupied;
use crate::cuda::test_support::{gpu, gpu_alone, host, poisoned, skipped};
use crate::{ALIGN, Fp8GroupedGemm, Fp8GroupedWgrad, Fp8Tensor, ScalingMode, Segments};
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{Category, DType, Stream};

/// Format of the first operand.
fn first(e5m2: bool) -> DType {
    if e5m2 { DType::E5M2 } else { DType::E4M3 }
}

/// Small integers `[r, c]` in FP8, zeros in columns outside all segments; scales are powers of two. With
/// per-tensor scaling there is one scale for each of `stacked` matrices.
fn fp8_tensor(
    s: &Stream,
    seed: u64,
    [r, c]: [usize; 2],
    format: DType,
    (scaling, stacked): (ScalingMode, usize),
    owned: impl Fn(usize) -> bool,
) -> Fp8Tensor {
    let width = c.next_multiple_of(ALIGN);
    let x = numbers(seed, r, width, |_| true);
    let value = |i: usize| if i % width < c && owned(i % width) { x[i] } else { 0.0 };
    let data = if format == DType::E5M2 {
        let v: Vec<E5m2> = (0..r * width).map(|i| E5m2::encode(value(i))).collect();
        s.upload(&v, &[r, width], Category::Workspace).unwrap()
    } else {
        let v: Vec<E4m3> = (0..r * width).map(|i| E4m3::encode(value(i))).collect();
        s.upload(&v, &[r, width], Category::Workspace).unwrap()
    };
    assert_eq!(data.dtype(), format);
    let shape = if scaling == ScalingMode::PerTensor { vec![stacked] } else { scaling.scales(r, c) };
    let n: usize = shape.iter().product();
    let scales: Vec<f32> = (0..n).map(|i| 2f32.powi((i * 7 % 5) as i32 - 2)).collect();
    let scale_inv = s.upload(&scales, &shape, Category::Workspace).unwrap();
    Fp8Tensor { data, scale_inv, scaling, cols: c, pow2: false }
}

#[test]
fn every_fp8_variant_matches_the_generic_kernel() {
    let Some((k, s)) = gpu() else { return };
    if !k.has("grouped/hopper_fp8") {
        return skipped("no Hopper GPU");
    }
    let layouts = [
        (vec![1], 1, 0),
        (vec![127, 0, 129, 128, 3], 1, 5),
        (vec![300, 0, 0, 1, 700], 128, 140),
        (vec![2000, 5, 0, 3000], 1, 1),
    ];
    for (counts, align, behind) in layouts {
        let (at, owned) = spread(&s, &counts, align, behind);
        let (rows, e) = (owned.len(), counts.len());
        let segments = Segments { offsets: &at[0], counts: &at[1] };
        for [depth, width] in [[16, 64], [100, 192], [640, 320], [1040, 128]] {
            for variant in FP8_VARIANTS.iter().filter(|k| k.variant.op == GroupedOp::FpropFp8) {
                for (sx, sw) in [
                    (ScalingMode::PerTensor, ScalingMode::PerTensor),
                    (ScalingMode::Block1x128, ScalingMode::Block128x128),
                ] {
                    if variant.fast && sx != ScalingMode::PerTensor {
                        continue;
                    }
                    let x = fp8_tensor(&s, 1, [rows, depth], first(variant.e5), (sx, 1), |_| true);
                    let w = fp8_tensor(&s, 2, [e * width, depth], DType::E4M3, (sw, e), |_| true);
                    let run = |variant| {
                        let y = poisoned(&s, DType::BF16, &[rows, width]);
                        let (fast, name) = (true, "fp8_grouped_gemm");
                        let g = Fp8GroupedGemm { x: &x, w: &w, segments, y: &y, fast, name };
                        let z = g.sizes().unwrap();
                        assert!(g.suits(&k, &z));
                        k.launch_grouped_fp8(&s, &g, &z, variant).unwrap();
                        host(&s, &y)
                    };
                    let what = format!("{variant:?} {sx:?} {counts:?} {depth} x {width}");
                    assert!(run(Some(variant)) == run(None), "{what}");
                }
            }
        }
    }
}

#[test]
fn every_fp8_wgrad_variant_matches_the_generic_kernel() {
    let Some((k, s)) = gpu() else { return };
    if !k.has("grouped/hopper_wgrad_fp8") {
        return skipped("no Hopper GPU");
    }
    for counts in [vec![1], vec![127, 0, 129, 128, 3], vec![5, 7000, 0, 2500, 64]] {
        let (at, owned) = spread(&s, &counts, 128, 256);
        let (rows, e) = (owned.len(), counts.len());
        let segments = Segments { offsets: &at[0], counts: &at[1] };
        for [k_, n] in [[4, 1], [136, 128], [520, 300], [192, 520]] {
            for variant in FP8_VARIANTS.iter().filter(|k| k.variant.op == GroupedOp::WgradFp8) {
                for scaling in [ScalingMode::PerTensor, ScalingMode::Block1x128] {
                    for accumulate in [false, true] {
                        let dy = fp8_tensor(&s, 1, [n, rows], first(variant.e5), (scaling, 1), |c| owned[c]);
                        let x = fp8_tensor(&s, 2, [k_, rows], DType::E4M3, (scaling, 1), |c| owned[c]);
                        let old = numbers(3, e * n, k_, |_| true);
                        let run = |variant| {
                            let dw = match accumulate {
                                true => s.upload(&old, &[e, n, k_], Category::Workspace).unwrap(),
                                false => poisoned(&s, DType::F32, &[e, n, k_]),
                            };
                            let g = Fp8GroupedWgrad {
                                dy: &dy,
                                x: &x,
                                segments,
                                dw: (&dw, accumulate),
                                fast: false,
                            };
                            let z = g.sizes().unwrap();
                            assert!(g.suits(&k, &z));
                            k.launch_grouped_wgrad_fp8(&s, &g, &z, variant).unwrap();
                            host(&s, &dw)
                        };
                        let what =
                            format!("{variant:?} {scaling:?} {counts:?} {k_} x {n} accumulate {accumulate}");
                        assert!(run(Some(variant)) == run(None), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn fp8_wgrad_ends_with_few_resident_blocks_and_gives_the_same_bits() {
    let Some((k, s)) = gpu_alone() else { return };
    if !k.has("grouped/hopper_wgrad_fp8") {
        return skipped("no Hopper GPU");
    }
    let counts = [5, 20_000, 0, 2500];
    let (at, owned) = spread(&s, &counts, 128, 0);
    let (rows, [depth, width]) = (owned.len(), [264, 520]);
    let segments = Segments { offsets: &at[0], counts: &at[1] };
    for variant in FP8_VARIANTS.iter().filter(|k| k.variant.op == GroupedOp::WgradFp8) {
        let scaling = ScalingMode::Block1x128;
        let dy = fp8_tensor(&s, 1, [width, rows], first(variant.e5), (scaling, 1), |c| owned[c]);
        let x = fp8_tensor(&s, 2, [depth, rows], DType::E4M3, (scaling, 1), |c| owned[c]);
        let run = || {
            let dw = poisoned(&s, DType::F32, &[counts.len(), width, depth]);
            let g = Fp8GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw, false), fast: false };
            k.launch_grouped_wgrad_fp8(&s, &g, &g.sizes().unwrap(), Some(variant)).unwrap();
            host(&s, &dw)
        };
        let alone = run();
        let occupied = Occupied::all_but(&k, &s, free(variant.variant.pair));
        let beside = run();
        assert!(occupied.release(), "{variant:?} did not end");
        assert!(beside == alone, "{variant:?}");
    }
}
