//! GEMMs of strided views.

use super::devices::*;
use ferrotron_kernels::Gemm;
use ferrotron_tensor::DType;

const SIZES: [(usize, usize, usize); 11] = [
    (1, 1, 1),
    (5, 7, 3),
    (33, 31, 65),
    (64, 96, 32),
    (1, 40, 129),
    (70, 1, 2),
    (0, 3, 2),
    (3, 0, 2),
    (2, 3, 0),
    (128, 192, 96),
    (40, 264, 520),
];

#[test]
fn gemm_of_strided_views() {
    everywhere(|h, dtype| {
        for (m, n, k) in SIZES {
            for bits in 0..32 {
                let flag = |i: i32| bits >> i & 1 == 1;
                let (trans_a, trans_b, with_bias, accumulate) = (flag(0), flag(1), flag(2), flag(3));
                // As views inside larger buffers, and contiguous with the alignment that cuBLASLt prefers.
                let framed = flag(4);
                let (a, b) = (numbers(dtype, 1, m * k), numbers(dtype, 2, k * n));
                let (bias, old) = (numbers(dtype, 3, n), numbers(dtype, 4, m * n));
                let at = h.placed(framed, dtype, &if trans_a { [k, m] } else { [m, k] }, &a);
                let bt = h.placed(framed, dtype, &if trans_b { [n, k] } else { [k, n] }, &b);
                let bias_t = h.tensor(dtype, &[n], &bias);
                let wanted: Vec<f64> = (0..m * n)
                    .map(|i| {
                        let (r, c) = (i / n, i % n);
                        let left = |p: usize| if trans_a { a[p * m + r] } else { a[r * k + p] };
                        let right = |p: usize| if trans_b { b[c * k + p] } else { b[p * n + c] };
                        let sum: f64 = (0..k).map(|p| left(p) * right(p)).sum();
                        sum + if with_bias { bias[c] } else { 0.0 } + if accumulate { old[i] } else { 0.0 }
                    })
                    .collect();
                for out in [dtype, DType::F32] {
                    let before = if accumulate { old.clone() } else { vec![f64::NAN; m * n] };
                    let c = h.placed(framed, out, &[m, n], &before);
                    let g = Gemm {
                        a: &at.view,
                        trans_a,
                        b: &bt.view,
                        trans_b,
                        bias: with_bias.then_some(&bias_t),
                        accumulate,
                        c: &c.view,
                    };
                    h.k.gemm(&h.s, &g).unwrap();
                    let what = format!("{} {dtype}->{out} {m}x{n}x{k} bits {bits:05b}", h.name);
                    close(&what, out, &h.inside(&c), &wanted, (k + 2) as f64 * 2f64.powi(-23));
                }
            }
        }
    });
}
