//! LayerNorm and RMSNorm.

use super::support::*;
use ferrotron_engine::{Declarations, NormLayer};
use ferrotron_kernels::Norm;

pub const NORMS: [Norm; 3] = [
    Norm { subtract_mean: true, eps: 1e-5, zero_centred: false },
    Norm { subtract_mean: false, eps: 1e-6, zero_centred: false },
    Norm { subtract_mean: false, eps: 1e-3, zero_centred: true },
];

/// f64 reference: the norm of each row of `gamma.len()`.
pub fn reference(norm: Norm, x: &[f64], gamma: &[f64], beta: Option<&[f64]>) -> Vec<f64> {
    let n = gamma.len();
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks(n) {
        let mean = if norm.subtract_mean { row.iter().sum::<f64>() / n as f64 } else { 0.0 };
        let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        let rstd = 1.0 / (var + f64::from(norm.eps)).sqrt();
        for (i, x) in row.iter().enumerate() {
            let gain = if norm.zero_centred { 1.0 + gamma[i] } else { gamma[i] };
            out.push((x - mean) * rstd * gain + beta.map_or(0.0, |b| b[i]));
        }
    }
    out
}

fn of(norm: Norm) -> impl Fn(&[Vec<f64>]) -> Vec<f64> {
    move |a| reference(norm, &a[0], &a[1], a.get(2).map(|b| &b[..]))
}

#[test]
fn norm_matches_the_reference() {
    for dtype in DTYPES {
        for norm in NORMS {
            for (tokens, width) in [(1, 5), (7, 24), (3, 130)] {
                let mut d = Declarations::default();
                let layer = NormLayer::declare(&mut d, "norm", width, norm).unwrap();
                let s = Setup::new(d, dtype, 2, 1.0);
                let (x, xs) = s.input(11, &[tokens, width]);
                let (dy, dys) = s.input(21, &[tokens, width]);
                let what = format!("{norm:?} {tokens}x{width}");
                let (y, saved) = layer.forward(&s.pass(), &x).unwrap();
                // The output is recomputed from what was saved, bit for bit.
                assert_eq!(
                    s.host(&layer.recompute(&s.pass(), &saved, false).unwrap().values),
                    s.host(&y),
                    "{what}"
                );
                let (dx, work) = layer.backward(&s.pass(), saved, &dy, None).unwrap();
                let ours = (s.host(&y), s.host(&dx), s.gradients(work));
                s.compare(&what, &of(norm), &xs, &dys, ours);
            }
        }
    }
}

/// `r = x + residual`, `y = norm(r)`; backward adds the gradient of the residual branch.
#[test]
fn fused_residual_norm_matches_the_reference() {
    for dtype in DTYPES {
        for norm in NORMS {
            let (tokens, width) = (6, 20);
            let mut d = Declarations::default();
            let layer = NormLayer::declare(&mut d, "norm", width, norm).unwrap();
            let s = Setup::new(d, dtype, 3, 1.0);
            let (x, xs) = s.input(12, &[tokens, width]);
            let (residual, rs) = s.input(13, &[tokens, width]);
            let (dy, dys) = s.input(22, &[tokens, width]);
            let (other, others) = s.input(23, &[tokens, width]);
            let (y, sum, saved) = layer.add_forward(&s.pass(), &x, &residual, false).unwrap();
            let sums = rounded(dtype, xs.iter().zip(&rs).map(|(a, b)| a + b).collect());
            assert_eq!(s.host(&sum), sums, "{norm:?}: the sum is rounded once");
            let (dx, work) = layer.backward(&s.pass(), saved, &dy, Some(&other)).unwrap();
            let at = s.arrays(&sums);
            let f = of(norm);
            close(&format!("{norm:?} {dtype} output"), dtype, &s.host(&y.values), &f(&at));
            let mut theirs = differences(&|a: &[Vec<f64>]| dot(&f(a), &dys), &at);
            theirs[0].iter_mut().zip(&others).for_each(|(g, o)| *g += o);
            close(&format!("{norm:?} {dtype} input gradient"), dtype, &s.host(&dx), &theirs[0]);
            for (ours, theirs) in s.gradients(work).iter().zip(&theirs[1..]) {
                close(&format!("{norm:?} {dtype} weight gradient"), dtype, ours, theirs);
            }
        }
    }
}
