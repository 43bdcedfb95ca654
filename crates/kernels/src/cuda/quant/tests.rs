//! Every algorithm that the library offers must compute the FP8 GEMM; and a benchmark of a layer's FP8 GEMMs.

use crate::cuda::CudaKernels;
use crate::cuda::cublaslt::{GemmPointers, MatmulDesc};
use crate::cuda::test_support::{gpu, uniform};
use crate::quant::check::matrix;
use crate::{Fp8Gemm, Fp8Tensor, Gemm, GemmKernels, QuantKernels, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{Category, DType, Stream, Tensor, bf16, read, write};

/// Nearly normal values, some rows larger than others.
pub(super) fn numbers(seed: u64, rows: usize, cols: usize) -> Vec<bf16> {
    let mut draw = uniform(seed);
    let mut one = |i: usize| bf16::from_f32((draw() + draw() + draw()) * 2f32.powi((i / cols % 7) as i32));
    (0..rows * cols).map(&mut one).collect()
}

pub(super) fn empty_fp8(s: &Stream, shape: [usize; 2], format: DType, scaling: ScalingMode) -> Fp8Tensor {
    Fp8Tensor::empty(s, shape, format, scaling, Category::Workspace).unwrap()
}

fn filled(s: &Stream, dtype: DType, shape: &[usize]) -> Tensor {
    s.zeros(shape, dtype, Category::Workspace).unwrap()
}

fn quantized(k: &CudaKernels, s: &Stream, x: &Tensor, format: DType, scaling: ScalingMode) -> Fp8Tensor {
    let shape = [x.shape()[0], x.shape()[1]];
    let out = empty_fp8(s, shape, format, scaling);
    let amax = filled(s, DType::F32, &[1]);
    k.amax(s, x, &amax).unwrap();
    let range = match scaling {
        ScalingMode::PerTensor => ScaleSource::Amax { amax: &amax, pow2: false },
        _ => ScaleSource::Blocks { pow2: false },
    };
    k.quantize(s, &Quantize { x, range, rows: Some(&out), cols: None, sums: None }).unwrap();
    out
}

/// Dequantized by definition.
fn decoded(s: &Stream, b: &Fp8Tensor) -> Vec<f64> {
    let values: Vec<f64> = match b.data.dtype() {
        DType::E4M3 => s.download::<E4m3>(&b.data).unwrap().iter().map(|x| f64::from(x.decode())).collect(),
        _ => s.download::<E5m2>(&b.data).unwrap().iter().map(|x| f64::from(x.decode())).collect(),
    };
    let scales = s.download::<f32>(&b.scale_inv).unwrap();
    let (pitch, width) = (b.data.shape()[1], b.scale_inv.shape().last().copied().unwrap());
    let scale = |r: usize, c: usize| match b.scaling {
        ScalingMode::PerTensor => scales[0],
        ScalingMode::Block1x128 => scales[c / 128 * width + r],
        ScalingMode::Block128x128 => scales[r / 128 * width + c / 128],
    };
    (0..b.rows() * b.cols)
        .map(|i| {
            let (r, c) = (i / b.cols, i % b.cols);
            values[r * pitch + c] * f64::from(scale(r, c))
        })
        .collect()
}

/// Runs each algorithm twice and compares it with the exact sum; `fast` accumulation is less accurate.
fn check(k: &CudaKernels, s: &Stream, g: &Fp8Gemm, name: &str) {
    let (a, b) = (decoded(s, g.a), decoded(s, g.b));
    let [m, n, deep] = g.check("fp8_gemm").unwrap();
    let bias: Vec<f64> =
        g.bias.map_or(vec![0.0; n], |t| s.download::<bf16>(t).unwrap().iter().map(|x| x.to_f64()).collect());
    let host = |t: &Tensor| -> Vec<f64> {
        match t.dtype() {
            DType::BF16 => s.download::<bf16>(t).unwrap().iter().map(|x| x.to_f64()).collect(),
            _ => s.download::<f32>(t).unwrap().into_iter().map(f64::from).collect(),
        }
    };
    let modes = [g.a.scaling.into(), g.b.scaling.into()];
    let key = g.key([m, n, deep], matrix("fp8_gemm", g.c).unwrap().outer_stride, modes);
    let desc = MatmulDesc::new(&key).unwrap();
    let all = k.gemm_cache.library().algorithms(&key, &desc).unwrap();
    assert!(!all.is_empty(), "{name}: the library refuses");
    let (mut worst, mut failed) = (0f64, 0);
    for algorithm in &all {
        let scratch =
            Tensor::empty(s, &[algorithm.workspace.max(1)], DType::U8, Category::Workspace).unwrap();
        let run = || {
            s.zero(g.c).unwrap();
            let mut args = vec![
                read(&g.a.data),
                read(&g.b.data),
                write(g.c),
                write(&scratch),
                read(&g.a.scale_inv),
                read(&g.b.scale_inv),
            ];
            args.extend(g.bias.map(read));
            let done = s.launch("gemm", &args, |l| {
                let [a, b, c, workspace, sa, sb] = [0, 1, 2, 3, 4, 5].map(|i| l.address(i).unwrap());
                let bias = g.bias.map_or(0, |_| l.address(6).unwrap());
                let at = GemmPointers { a, b, c, bias, aux: 0, scales: [sa, sb], factors: 0, workspace };
                k.gemm_cache.library().run(l, &desc, algorithm, &at, g.accumulate)
            });
            done.map(|()| host(g.c))
        };
        let Ok(once) = run() else {
            failed += 1;
            continue;
        };
        assert!(once == run().unwrap(), "{name}: two runs of one algorithm differ");
        for (i, ours) in once.iter().enumerate() {
            let (row, column) = (&a[i / n * deep..][..deep], &b[i % n * deep..][..deep]);
            let wanted: f64 = row.iter().zip(column).map(|(x, y)| x * y).sum::<f64>() + bias[i % n];
            let size: f64 = row.iter().zip(column).map(|(x, y)| (x * y).abs()).sum();
            let last = if g.c.dtype() == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-24) };
            // The tensor core keeps 14 bits of the larger summand; promoted sums keep f32's.
            let room = 1.01 * last * wanted.abs() + size * 2f64.powi(-11);
            worst = worst.max(if ours.is_finite() { (ours - wanted).abs() / room } else { f64::INFINITY });
        }
    }
    println!("{name}: {} algorithms, {failed} fail, at most {worst:.3} of the room", all.len());
    assert!(worst <= 1.0 && failed < all.len(), "{name}: {worst}");
}

#[test]
fn every_algorithm_multiplies_fp8() {
    let Some((k, s)) = gpu() else { return };
    use DType::{BF16, E4M3, E5M2, F32};
    use ScalingMode::{Block1x128 as Rows, Block128x128 as Tiles, PerTensor as Whole};
    let (m, n, deep) = (272, 400, 528);
    let x = s.upload(&numbers(1, m, deep), &[m, deep], Category::Workspace).unwrap();
    let y = s.upload(&numbers(2, n, deep), &[n, deep], Category::Workspace).unwrap();
    let bias = s.upload(&numbers(3, 1, n), &[n], Category::Workspace).unwrap();
    for (fa, fb, sa, sb, out, with, accumulate, fast) in [
        (E4M3, E4M3, Whole, Whole, BF16, true, false, true),
        (E4M3, E4M3, Whole, Whole, BF16, false, false, false),
        (E5M2, E4M3, Whole, Whole, BF16, false, false, false),
        (E4M3, E5M2, Whole, Whole, F32, false, true, false),
        (E4M3, E4M3, Rows, Tiles, BF16, true, false, false),
        (E4M3, E4M3, Tiles, Rows, BF16, false, false, false),
        (E5M2, E4M3, Rows, Tiles, BF16, false, false, false),
        (E4M3, E4M3, Rows, Rows, F32, false, true, false),
        (E5M2, E4M3, Rows, Rows, F32, false, false, false),
    ] {
        let (a, b) = (quantized(&k, &s, &x, fa, sa), quantized(&k, &s, &y, fb, sb));
        let c = filled(&s, out, &[m, n]);
        let bias = with.then_some(&bias);
        let g = Fp8Gemm { a: &a, b: &b, bias, accumulate, fast, name: "gemm", c: &c };
        check(
            &k,
            &s,
            &g,
            &format!("{fa} {fb} {sa:?} {sb:?} {out} bias {with} onto {accumulate} fast {fast}"),
        );
    }
}

/// Scaling recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Recipe {
    Current,
    Delayed,
    Block,
}

/// Operands of a linear layer.
struct LinearLayer {
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    y: Tensor,
    dx: Tensor,
    dw: Tensor,
}

struct Pair {
    rows: Fp8Tensor,
    cols: Fp8Tensor,
}

/// Prints the times of the linear layers of a 5B GPT layer: hidden size 4096, 15872 tokens.
#[test]
#[ignore = "prints times"]
fn bench_fp8_layer() {
    let Some((k, s)) = gpu() else { return };
    let tokens = 15872;
    let maps = [("qkv", 4096, 12288), ("proj", 4096, 4096), ("fc1", 4096, 16384), ("fc2", 16384, 4096)];
    let make = |seed, r: usize, c: usize| {
        let part = numbers(seed, 1, 1 << 20);
        let all = Tensor::empty(&s, &[r, c], DType::BF16, Category::Workspace).unwrap();
        let flat = all.view(&[r * c]).unwrap();
        let small = s.upload(&part, &[1 << 20], Category::Workspace).unwrap();
        for at in (0..r * c).step_by(1 << 20) {
            let len = (r * c - at).min(1 << 20);
            s.copy(&small.narrow(0, 0, len).unwrap(), &flat.narrow(0, at, len).unwrap()).unwrap();
        }
        all
    };
    let all: Vec<LinearLayer> = maps
        .iter()
        .map(|(_, i, o)| LinearLayer {
            x: make(1, tokens, *i),
            w: make(2, *o, *i),
            dy: make(3, tokens, *o),
            y: filled(&s, DType::BF16, &[tokens, *o]),
            dx: filled(&s, DType::BF16, &[tokens, *i]),
            dw: filled(&s, DType::F32, &[*o, *i]),
        })
        .collect();
    let amax = filled(&s, DType::F32, &[1]);
    let scale = s.upload(&[100f32], &[1], Category::Workspace).unwrap();
    let time = |f: &dyn Fn()| {
        let start = s.record().unwrap();
        f();
        s.record().unwrap().since(&start).unwrap().as_secs_f64() * 1e3
    };
    let best = |f: &dyn Fn()| {
        f();
        let mut all: Vec<f64> = (0..7).map(|_| time(f)).collect();
        all.sort_by(f64::total_cmp);
        all[3]
    };
    let plain = |m: &LinearLayer, which: usize| {
        let (a, trans_a, b, trans_b, c) = [
            (&m.x, false, &m.w, true, &m.y),
            (&m.dy, false, &m.w, false, &m.dx),
            (&m.dy, true, &m.x, false, &m.dw),
        ][which];
        k.gemm(&s, &Gemm { a, trans_a, b, trans_b, bias: None, accumulate: false, c }).unwrap();
    };
    let pair = |t: &Tensor, format, scaling| {
        let [r, c] = [t.shape()[0], t.shape()[1]];
        Pair { rows: empty_fp8(&s, [r, c], format, scaling), cols: empty_fp8(&s, [c, r], format, scaling) }
    };
    let cast = |recipe: Recipe, x: &Tensor, p: &Pair| {
        let range = match recipe {
            Recipe::Current => {
                s.zero(&amax).unwrap();
                k.amax(&s, x, &amax).unwrap();
                ScaleSource::Amax { amax: &amax, pow2: false }
            }
            Recipe::Delayed => ScaleSource::Given { scale: &scale, amax: &amax },
            Recipe::Block => ScaleSource::Blocks { pow2: true },
        };
        let q = Quantize { x, range, rows: Some(&p.rows), cols: Some(&p.cols), sums: None };
        k.quantize(&s, &q).unwrap();
    };
    let eight = |m: &LinearLayer, [x, w, dy]: [&Pair; 3], which: usize, fast: bool| {
        let (a, b, c, name) = [
            (&x.rows, &w.rows, &m.y, "gemm (output, fp8)"),
            (&dy.rows, &w.cols, &m.dx, "gemm (input gradient, fp8)"),
            (&dy.cols, &x.cols, &m.dw, "gemm (weight gradient, fp8)"),
        ][which];
        k.fp8_gemm(&s, &Fp8Gemm { a, b, bias: None, accumulate: false, fast: fast && which == 0, name, c })
            .unwrap();
    };
    let flops = |i: usize| 2.0 * tokens as f64 * maps[i].1 as f64 * maps[i].2 as f64 / 1e9;
    for (i, (name, ..)) in maps.iter().enumerate() {
        let rates = [0, 1, 2].map(|w| flops(i) / best(&|| plain(&all[i], w)));
        println!("bf16 {name}: {rates:.0?} TFLOP/s");
    }
    let whole = || (0..4).for_each(|i| (0..3).for_each(|w| plain(&all[i], w)));
    let base = best(&whole);
    println!("bf16: {base:.2} ms a layer, {:.0} TFLOP/s", (0..4).map(flops).sum::<f64>() * 3.0 / base);
    for recipe in [Recipe::Current, Recipe::Delayed, Recipe::Block] {
        let block = recipe == Recipe::Block;
        let (lines, tiles) = if block {
            (ScalingMode::Block1x128, ScalingMode::Block128x128)
        } else {
            (ScalingMode::PerTensor, ScalingMode::PerTensor)
        };
        let gradients = if block { DType::E4M3 } else { DType::E5M2 };
        let pairs: Vec<[Pair; 3]> = all
            .iter()
            .map(|m| {
                [
                    pair(&m.x, DType::E4M3, lines),
                    pair(&m.w, DType::E4M3, tiles),
                    pair(&m.dy, gradients, lines),
                ]
            })
            .collect();
        let casts = |i: usize| {
            let [x, w, dy] = &pairs[i];
            cast(recipe, &all[i].x, x);
            cast(recipe, &all[i].w, w);
            cast(recipe, &all[i].dy, dy);
        };
        let product = |i: usize, w: usize| eight(&all[i], pairs[i].each_ref(), w, !block);
        (0..4).for_each(casts);
        for (i, (name, ..)) in maps.iter().enumerate() {
            let rates = [0, 1, 2].map(|w| flops(i) / best(&|| product(i, w)));
            println!("{recipe:?} {name}: {rates:.0?} TFLOP/s; casts {:.3} ms", best(&|| casts(i)));
        }
        let products = best(&|| (0..4).for_each(|i| (0..3).for_each(|w| product(i, w))));
        let all_casts = best(&|| (0..4).for_each(casts));
        let layer = best(&|| {
            (0..4).for_each(|i| {
                casts(i);
                (0..3).for_each(|w| product(i, w));
            })
        });
        let again = best(&whole);
        println!(
            "{recipe:?}: {layer:.2} ms a layer ({products:.2} products, {all_casts:.2} casts): {:.2} x, {:.2} x relative to bf16 measured just after ({again:.2} ms)",
            base / layer,
            again / layer
        );
    }
}
