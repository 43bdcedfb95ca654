//! DoRA: squared norms of rows, their factors, and scaled columns, against f64.

use super::devices::*;
use super::permutation::{draws, ints, plan, shifted};
use ferrotron_kernels::{DoraFactor, DoraUpdate, ScaleColumns, ScaleColumnsBackward, Segments};
use ferrotron_tensor::DType;

const F32: DType = DType::F32;

#[test]
fn squared_norms_of_rows() {
    everywhere(|h, dtype| {
        for (n, k) in [(0, 3), (1, 1), (5, 0), (3, 7), (9, 64), (17, 301), (2, 4096)] {
            for shift in [0, 1] {
                let x = numbers(dtype, 1, n * k);
                let out = h.poisoned(F32, &[n]);
                h.k.row_squares(&h.s, &shifted(h, shift, dtype, &[n, k], &x), &out).unwrap();
                let want: Vec<f64> = (0..n).map(|r| dot(&x[r * k..][..k], &x[r * k..][..k])).collect();
                let what = format!("{} {dtype} squares of {n} x {k}, {shift}", h.name);
                close(&what, F32, &h.host(&out), &want, 2f64.powi(-23) * (1.0 + k as f64));
            }
        }
        refused(h, "rows", h.k.row_squares(&h.s, &h.poisoned(dtype, &[3, 2]), &h.poisoned(F32, &[2])));
        refused(
            h,
            "16 bit",
            h.k.row_squares(&h.s, &h.poisoned(dtype, &[3, 2]), &h.poisoned(DType::BF16, &[3])),
        );
    });
}

/// Against the norm of W + s·B·A itself, formed in f64: for updates as large as the weight, and for small ones, whose effect on
/// the norm must have a small error of its own.
#[test]
fn norms_of_updated_rows() {
    everywhere(|h, dtype| {
        for (groups, n, k, r) in [(1, 1, 3, 1), (1, 7, 33, 4), (3, 5, 20, 40), (2, 9, 64, 3), (4, 0, 8, 2)] {
            for (size, scale) in [(1.0, 0.5), (1e-3, 2.0)] {
                let small = |v: Vec<f64>| v.into_iter().map(|x| rounded(dtype, x * size)).collect::<Vec<_>>();
                let (w, a) = (numbers(dtype, 1, groups * n * k), numbers(dtype, 2, groups * r * k));
                // B is a part of a wider stack: three more rows in each group.
                let wide = small(numbers(dtype, 3, groups * (n + 3) * r));
                let (mut u, mut gram) = (Vec::new(), Vec::new());
                let (mut base, mut update) = (Vec::new(), Vec::new());
                for g in 0..groups {
                    let a = |i: usize| &a[(g * r + i) * k..][..k];
                    gram.extend((0..r * r).map(|i| rounded(F32, dot(a(i / r), a(i % r)))));
                    for o in 0..n {
                        let (w, b) = (&w[(g * n + o) * k..][..k], &wide[(g * (n + 3) + o) * r..][..r]);
                        u.extend((0..r).map(|i| rounded(F32, dot(w, a(i)))));
                        let v: Vec<f64> = (0..k)
                            .map(|c| w[c] + scale * (0..r).map(|i| b[i] * a(i)[c]).sum::<f64>())
                            .collect();
                        base.push(rounded(F32, dot(w, w)));
                        update.push(dot(&v, &v) - dot(w, w));
                    }
                }
                let b = h.tensor(dtype, &[groups, n + 3, r], &wide).narrow(1, 0, n).unwrap();
                let (ut, gt) = (h.tensor(F32, &[groups, n, r], &u), h.tensor(F32, &[groups, r, r], &gram));
                let out = h.poisoned(F32, &[groups, n]);
                let d = DoraUpdate { u: &ut, b: &b, gram: &gt, scale: scale as f32, out: &out };
                h.k.dora_update(&h.s, &d).unwrap();
                let what = format!("{} {dtype} {groups} x {n} x {k}, rank {r}, size {size}", h.name);
                // The terms of the sum, some of which cancel.
                close(&what, F32, &h.host(&out), &update, 2e-6 * (r as f64) * size);

                let m = numbers(dtype, 4, groups * n);
                let (mt, base_t) = (h.tensor(dtype, &[groups, n], &m), h.tensor(F32, &[groups, n], &base));
                let update_t = h.tensor(F32, &[groups, n], &update);
                let (factor, inv) = (h.poisoned(F32, &[groups, n]), h.poisoned(F32, &[groups, n]));
                let d =
                    DoraFactor { base: &base_t, update: &update_t, m: &mt, factor: &factor, inv_norm: &inv };
                h.k.dora_factor(&h.s, &d).unwrap();
                let norm = |i: usize| {
                    let w = base[i].sqrt();
                    rounded(dtype, w) * ((base[i] + update[i]).max(0.0).sqrt() / w)
                };
                let want: Vec<f64> = (0..groups * n).map(|i| m[i] / norm(i)).collect();
                close(&format!("{what} factor"), F32, &h.host(&factor), &want, 2e-6);
                let want: Vec<f64> = (0..groups * n).map(|i| 1.0 / norm(i)).collect();
                close(&format!("{what} norm"), F32, &h.host(&inv), &want, 2e-6);
            }
        }
    });
}

/// Without an update and with m as it is initialized the factor is exactly 1; a row of zeros has none.
#[test]
fn the_first_factor_is_one() {
    everywhere(|h, dtype| {
        let mut base: Vec<f64> = numbers(F32, 5, 200).iter().map(|x| rounded(F32, x * x * 40.0)).collect();
        base[7] = 0.0;
        let m: Vec<f64> = base.iter().map(|b| rounded(dtype, f64::from((*b as f32).sqrt()))).collect();
        let (bt, mt) = (h.tensor(F32, &[2, 100], &base), h.tensor(dtype, &[2, 100], &m));
        let (zero, factor, inv) =
            (h.tensor(F32, &[2, 100], &[0.0; 200]), h.poisoned(F32, &[2, 100]), h.poisoned(F32, &[2, 100]));
        let part = |t: &ferrotron_tensor::Tensor| t.narrow(1, 0, 60).unwrap();
        // Parts of wider rows, then the rest.
        for (start, len) in [(0, 60), (60, 40)] {
            let [base, update, m, factor, inv] =
                [&bt, &zero, &mt, &factor, &inv].map(|t| t.narrow(1, start, len).unwrap());
            let d = DoraFactor { base: &base, update: &update, m: &m, factor: &factor, inv_norm: &inv };
            h.k.dora_factor(&h.s, &d).unwrap();
        }
        for (i, f) in h.host(&factor).into_iter().enumerate() {
            assert_eq!(f, if i == 7 { 0.0 } else { 1.0 }, "{} {dtype} {i}", h.name);
        }
        assert_eq!(h.host(&inv)[7], 0.0);
        let d = DoraFactor { base: &bt, update: &zero, m: &part(&mt), factor: &factor, inv_norm: &inv };
        refused(h, "m of other rows", h.k.dora_factor(&h.s, &d));
    });
}

#[test]
fn scaled_columns_and_their_gradients() {
    everywhere(|h, dtype| {
        for n in [1, 8, 19, 300] {
            for (rows, experts, shift) in
                [(0, 0, 0), (1, 0, 1), (37, 0, 0), (40, 3, 0), (70, 9, 1), (12, 0, 1)]
            {
                let what = format!("{} {dtype} {rows} x {n}, {experts} experts, {shift}", h.name);
                let t = |dtype, shape: &[usize], v: &[f64]| shifted(h, shift, dtype, shape, v);
                let many = experts.max(1);
                let found = plan(&draws(1, rows * 3 / 4, 0, many as i32), 0, many, 2, rows);
                let (offsets, counts) =
                    (ints(h, &[many + 1], &found.offsets), ints(h, &[many], &found.counts));
                let segments = (experts > 0).then_some(Segments { offsets: &offsets, counts: &counts });
                let owner = |r: usize| match experts {
                    0 => Some(0),
                    _ => (0..experts).find(|e| {
                        let from = found.offsets[*e] as usize;
                        (from..from + found.counts[*e] as usize).contains(&r)
                    }),
                };
                let (f, v) = (numbers(F32, 2, many * n), numbers(F32, 3, many * n));
                let shape: &[usize] = if experts > 0 { &[experts, n] } else { &[n] };
                let (factor, inv) = (t(F32, shape, &f), t(F32, shape, &v));
                let mut x = numbers(dtype, 4, rows * n);
                for r in (0..rows).filter(|r| owner(*r).is_none()) {
                    x[r * n..][..n].fill(f64::NAN);
                }
                let (dy, b) = (numbers(dtype, 5, rows * n), numbers(dtype, 6, n));
                let (xt, dyt) = (t(dtype, &[rows, n], &x), t(dtype, &[rows, n], &dy));
                let of =
                    |i: usize, term: &dyn Fn(usize) -> f64| owner(i / n).map_or(0.0, |e| term(e * n + i % n));
                for biased in [false, true] {
                    if biased && experts > 0 {
                        continue;
                    }
                    let bias = t(dtype, &[n], &b);
                    let y = h.poisoned(dtype, &[rows, n]);
                    let c = ScaleColumns {
                        x: &xt,
                        factor: &factor,
                        segments,
                        bias: biased.then_some(&bias),
                        y: &y,
                    };
                    h.k.scale_columns(&h.s, &c).unwrap();
                    let add = |i: usize| if biased { b[i % n] } else { 0.0 };
                    let want: Vec<f64> = (0..rows * n).map(|i| of(i, &|at| x[i] * f[at] + add(i))).collect();
                    close(&what, dtype, &h.host(&y), &want, 2e-7);
                }
                let (dx, products) = (h.poisoned(dtype, &[rows, n]), h.poisoned(dtype, &[rows, n]));
                let c = ScaleColumnsBackward {
                    dy: &dyt,
                    x: &xt,
                    factor: &factor,
                    inv_norm: &inv,
                    segments,
                    dx: &dx,
                    products: &products,
                };
                h.k.scale_columns_backward(&h.s, &c).unwrap();
                let want: Vec<f64> = (0..rows * n).map(|i| of(i, &|at| dy[i] * f[at])).collect();
                close(&format!("{what} dx"), dtype, &h.host(&dx), &want, 2e-7);
                let want: Vec<f64> = (0..rows * n).map(|i| of(i, &|at| dy[i] * x[i] * v[at])).collect();
                close(&format!("{what} products"), dtype, &h.host(&products), &want, 3e-7);
            }
        }
        let z = |dtype, shape: &[usize]| h.poisoned(dtype, shape);
        let (x, y, f, b) = (z(dtype, &[4, 5]), z(dtype, &[4, 5]), z(F32, &[5]), z(dtype, &[4]));
        let c = ScaleColumns { x: &x, factor: &f, segments: None, bias: Some(&b), y: &y };
        refused(h, "a short bias", h.k.scale_columns(&h.s, &c));
        let short = z(F32, &[4]);
        let c = ScaleColumns { factor: &short, bias: None, ..c };
        refused(h, "few factors", h.k.scale_columns(&h.s, &c));
        let c = ScaleColumns { factor: &f, y: &x, ..c };
        refused(h, "in place", h.k.scale_columns(&h.s, &c));
    });
}
