//! Element-wise kernels and reductions.

use super::scene::{Scene, fill};
use ferrotron_kernels::{Dropout, RngKey};
use ferrotron_tensor::{Category, DType, Tensor};

pub fn fills_casts_and_copies(h: &Scene) {
    let (k, s, cpu) = (&h.large.k, &h.large.s, &h.cpu);
    let width = h.size(28_672, 96);
    let rows = h.rows(width, 1);
    let floats = h.empty(DType::F32, &[rows, width]);
    k.normal(s, fill(1, 0, width), &floats).unwrap();
    let at = h.samples(&floats);
    for r in &at {
        let want = h.cpu_empty(DType::F32, &[r.len(), width]);
        cpu.k.normal(&cpu.s, fill(1, r.start, width), &want).unwrap();
        h.same("normal", &floats, std::slice::from_ref(r), &want);
    }
    let halves = h.empty(DType::BF16, &[rows, width]);
    let cast = |from: &Tensor, to: &Tensor| {
        k.copy(s, from, to).unwrap();
        let from = h.gather(from, &at);
        let want = h.cpu_empty(to.dtype(), from.shape());
        cpu.k.copy(&cpu.s, &from, &want).unwrap();
        h.same("copy", to, &at, &want);
    };
    cast(&floats, &halves);
    cast(&halves, &floats);
    drop(floats);
    let other = h.empty(DType::BF16, &[rows, width]);
    cast(&halves, &other);
    // Between strides: 16 bytes at a time, and element by element.
    for first in [8, 1] {
        let view = halves.narrow(1, first, width - first).unwrap();
        let out = h.empty(DType::BF16, &[rows, width - first]);
        k.copy(s, &view, &out).unwrap();
        let want = h.cpu_empty(DType::BF16, &[4 * at.len(), width - first]);
        let from = h.gather(&halves, &at).narrow(1, first, width - first).unwrap();
        cpu.k.copy(&cpu.s, &from, &want).unwrap();
        h.same("strided copy", &out, &at, &want);
    }
    s.copy(&halves, &other).unwrap();
    h.same("device copy", &other, &at, &h.gather(&halves, &at));
    s.zero(&other).unwrap();
    let zeros = cpu.s.zeros(&[4 * at.len(), width], DType::BF16, Category::Workspace).unwrap();
    h.same("zero", &other, &at, &zeros);
}

pub fn sums_and_scales(h: &Scene) {
    let (k, s, cpu) = (&h.large.k, &h.large.s, &h.cpu);
    let width = h.size(4096, 64);
    let rows = h.rows(width, 1);
    let [a, b] = [2, 3].map(|seed| h.random(DType::BF16, [rows, width], seed));
    let (out, at) = (h.empty(DType::BF16, &[rows, width]), h.samples(&a));
    let [ca, cb] = [&a, &b].map(|t| h.gather(t, &at));
    let want = h.cpu_empty(DType::BF16, ca.shape());
    k.add(s, &a, &b, &out).unwrap();
    cpu.k.add(&cpu.s, &ca, &cb, &want).unwrap();
    h.same("add", &out, &at, &want);
    k.scale(s, &out, -1.5).unwrap();
    cpu.k.scale(&cpu.s, &want, -1.5).unwrap();
    h.same("scale", &out, &at, &want);
    k.max_assign(s, &out, &a).unwrap();
    cpu.k.max_assign(&cpu.s, &want, &ca).unwrap();
    h.same("max_assign", &out, &at, &want);
    k.softcap_forward(s, 2.0, &out).unwrap();
    cpu.k.softcap_forward(&cpu.s, 2.0, &want).unwrap();
    h.near("softcap_forward", &out, &at, &want, 1e-6);
    drop((out, a));
    let sums = h.random(DType::F32, [rows, width], 4);
    let want = h.gather(&sums, &at);
    k.add_assign(s, &sums, &b).unwrap();
    cpu.k.add_assign(&cpu.s, &want, &cb).unwrap();
    h.same("add_assign", &sums, &at, &want);
}

/// More than 2³² elements, whose rows are found by 64-bit division; and rows that share Philox blocks.
pub fn dropout(h: &Scene) {
    let key = RngKey { seed: 1, step: 2, layer: 3, site: 4 };
    for (width, times) in [(h.size(28_672, 96), 2), (h.size(28_670, 98), 1)] {
        let rows = h.rows(width, times);
        let (x, y) = (h.random(DType::BF16, [rows, width], 5), h.empty(DType::BF16, &[rows, width]));
        let numbers: Vec<i32> = (0..rows as i32).map(|r| r * 3 + 1).collect();
        let [numbers, _] = h.both(&numbers, &[rows]);
        let at = h.samples(&x);
        h.large
            .k
            .dropout(&h.large.s, &Dropout { p: 0.3, key: key.into(), rows: &numbers, x: &x, y: &y })
            .unwrap();
        let [rows, x] = [&numbers, &x].map(|t| h.gather(t, &at));
        let want = h.cpu_empty(DType::BF16, x.shape());
        h.cpu
            .k
            .dropout(&h.cpu.s, &Dropout { p: 0.3, key: key.into(), rows: &rows, x: &x, y: &want })
            .unwrap();
        h.near("dropout", &y, &at, &want, 0.0);
    }
}

/// Of zeros but for the sampled rows, over which the CPU reduces alone.
pub fn reductions(h: &Scene) {
    let (k, s, cpu) = (&h.large.k, &h.large.s, &h.cpu);
    let width = h.size(28_672, 96);
    let rows = h.rows(width, 1);
    let x = h.sparse(DType::F32, [rows, width], 6);
    let at = h.samples(&x);
    let sampled = h.gather(&x, &at);
    let squares: f64 = h.values(&sampled).iter().map(|x| x * x).sum();
    let dot = h.empty(DType::F32, &[1]);
    k.dot(s, &x, &x, &dot).unwrap();
    assert!((h.number(&dot) / squares - 1.0).abs() < 1e-6, "dot: {} of {squares}", h.number(&dot));
    let square = h.empty(DType::F64, &[1]);
    k.grad_square_sum(s, &[&x], &square).unwrap();
    assert!((h.number(&square) / squares - 1.0).abs() < 1e-9, "grad_square_sum: {}", h.number(&square));
    for dtype in [DType::F32, DType::BF16] {
        let x = h.sparse(dtype, [rows, width], 7);
        let sampled = h.gather(&x, &at);
        let (sums, want) = (h.empty(DType::F32, &[width]), h.cpu_empty(DType::F32, &[width]));
        k.column_sum(s, &x, false, &sums).unwrap();
        cpu.k.column_sum(&cpu.s, &sampled, false, &want).unwrap();
        h.near("column_sum", &sums, std::slice::from_ref(&(0..width)), &want, 1e-5);
        // Each sampled range in turn gets the largest value.
        for (i, r) in at.iter().enumerate() {
            let part = x.narrow(0, r.start, r.len()).unwrap();
            k.scale(s, &part, 4f32.powi(i as i32 + 1)).unwrap();
            let most = s.zeros(&[1], DType::F32, Category::Workspace).unwrap();
            k.amax(s, &x, &most).unwrap();
            let want = h.values(&h.gather(&x, &at)).iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            assert_eq!(h.number(&most), want, "amax, the largest in {r:?}");
        }
    }
}
