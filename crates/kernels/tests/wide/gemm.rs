//! The GEMMs of a linear layer over all tokens of a long sequence.

use super::scene::Scene;
use ferrotron_kernels::{Fp8Gemm, Fp8Tensor, Gemm, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::{Category, DType, Tensor};

/// Tokens, outputs and inputs of the layer: the output has more than 2³¹ elements.
fn layer(h: &Scene) -> [usize; 3] {
    let (outputs, inputs) = (h.size(28_672, 96), h.size(4096, 64));
    [h.rows(outputs, 1), outputs, inputs]
}

fn gemm(h: &Scene, large: bool, [a, b, c]: [&Tensor; 3], [trans_a, trans_b]: [bool; 2]) {
    let side = if large { &h.large } else { &h.cpu };
    let g = Gemm { a, trans_a, b, trans_b, bias: None, accumulate: false, c };
    side.k.gemm(&side.s, &g).unwrap();
}

pub fn bf16_gemms(h: &Scene) {
    let [tokens, outputs, inputs] = layer(h);
    let x = h.random(DType::BF16, [tokens, inputs], 1);
    let w = h.random(DType::BF16, [outputs, inputs], 2);
    let y = h.empty(DType::BF16, &[tokens, outputs]);
    let at = h.samples(&y);
    let [cx, cw] = [h.gather(&x, &at), h.fetch(&w)];
    let sampled = cx.shape()[0];
    let cy = h.cpu_empty(DType::BF16, &[sampled, outputs]);
    gemm(h, true, [&x, &w, &y], [false, true]);
    gemm(h, false, [&cx, &cw, &cy], [false, true]);
    h.alike("output", &y, &at, &cy);

    let (dx, cdx) = (h.empty(DType::BF16, &[tokens, inputs]), h.cpu_empty(DType::BF16, &[sampled, inputs]));
    gemm(h, true, [&y, &w, &dx], [false, false]);
    gemm(h, false, [&h.gather(&y, &at), &cw, &cdx], [false, false]);
    h.alike("input gradient", &dx, &at, &cdx);
    drop((y, dx));

    let dy = h.sparse(DType::BF16, [tokens, outputs], 3);
    let (dw, cdw) = (h.empty(DType::F32, &[outputs, inputs]), h.cpu_empty(DType::F32, &[outputs, inputs]));
    gemm(h, true, [&dy, &x, &dw], [true, false]);
    gemm(h, false, [&h.gather(&dy, &at), &cx, &cdw], [true, false]);
    h.alike("weight gradient", &dw, std::slice::from_ref(&(0..outputs)), &cdw);
}

/// FP8 of a matrix as it lies and transposed, under the scale 16.
fn fp8(h: &Scene, large: bool, x: &Tensor) -> [Fp8Tensor; 2] {
    let side = if large { &h.large } else { &h.cpu };
    let [r, c] = [x.shape()[0], x.shape()[1]];
    let both = [[r, c], [c, r]].map(|shape| {
        Fp8Tensor::empty(&side.s, shape, DType::E4M3, ScalingMode::PerTensor, Category::Workspace).unwrap()
    });
    let one = |value: f32| side.s.upload(&[value], &[1], Category::Workspace).unwrap();
    let range = ScaleSource::Given { scale: &one(16.0), amax: &one(0.0) };
    let q = Quantize { x, range, rows: Some(&both[0]), cols: Some(&both[1]), sums: None };
    side.k.quantize(&side.s, &q).unwrap();
    both
}

fn fp8_gemm(h: &Scene, large: bool, [a, b]: [&Fp8Tensor; 2], c: &Tensor) {
    let side = if large { &h.large } else { &h.cpu };
    let g = Fp8Gemm { a, b, bias: None, accumulate: false, fast: false, name: "gemm (fp8)", c };
    side.k.fp8_gemm(&side.s, &g).unwrap();
}

pub fn fp8_gemms(h: &Scene) {
    let [tokens, outputs, inputs] = layer(h);
    let x = h.random(DType::BF16, [tokens, inputs], 1);
    let w = h.random(DType::BF16, [outputs, inputs], 2);
    let y = h.empty(DType::BF16, &[tokens, outputs]);
    let at = h.samples(&y);
    let cx = h.gather(&x, &at);
    let sampled = cx.shape()[0];
    let ([x8, x8_t], [w8, w8_t]) = (fp8(h, true, &x), fp8(h, true, &w));
    let ([cx8, cx8_t], [cw8, cw8_t]) = (fp8(h, false, &cx), fp8(h, false, &h.fetch(&w)));
    let cy = h.cpu_empty(DType::BF16, &[sampled, outputs]);
    fp8_gemm(h, true, [&x8, &w8], &y);
    fp8_gemm(h, false, [&cx8, &cw8], &cy);
    h.alike("FP8 output", &y, &at, &cy);
    drop(y);

    let dy = h.sparse(DType::BF16, [tokens, outputs], 3);
    let ([dy8, dy8_t], [cdy8, cdy8_t]) = (fp8(h, true, &dy), fp8(h, false, &h.gather(&dy, &at)));
    drop(dy);
    let (dx, cdx) = (h.empty(DType::BF16, &[tokens, inputs]), h.cpu_empty(DType::BF16, &[sampled, inputs]));
    fp8_gemm(h, true, [&dy8, &w8_t], &dx);
    fp8_gemm(h, false, [&cdy8, &cw8_t], &cdx);
    h.alike("FP8 input gradient", &dx, &at, &cdx);
    let (dw, cdw) = (h.empty(DType::F32, &[outputs, inputs]), h.cpu_empty(DType::F32, &[outputs, inputs]));
    fp8_gemm(h, true, [&dy8_t, &x8_t], &dw);
    fp8_gemm(h, false, [&cdy8_t, &cx8_t], &cdw);
    h.alike("FP8 weight gradient", &dw, std::slice::from_ref(&(0..outputs)), &cdw);
}
