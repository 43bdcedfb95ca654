//! Norms over rows and over heads of a larger buffer.

use super::devices::*;
use ferrotron_kernels::{Norm, NormBackward, NormForward, ResidualAdd};
use ferrotron_tensor::{DType, Tensor};

const NORMS: [Norm; 4] = [
    Norm { subtract_mean: true, eps: 1e-5, zero_centred: false },
    Norm { subtract_mean: true, eps: 1e-5, zero_centred: true },
    Norm { subtract_mean: false, eps: 1e-6, zero_centred: false },
    Norm { subtract_mean: false, eps: 1e-6, zero_centred: true },
];

struct Naive {
    y: Vec<f64>,
    mean: Vec<f64>,
    rstd: Vec<f64>,
    dx: Vec<f64>,
    dgamma: Vec<f64>,
    dbeta: Vec<f64>,
}

fn naive(norm: Norm, x: &[f64], gamma: &[f64], beta: &[f64], dy: &[f64], residual: &[f64]) -> Naive {
    let n = gamma.len();
    let gain = |i: usize| if norm.zero_centred { 1.0 + gamma[i] } else { gamma[i] };
    let mut o = Naive {
        y: vec![],
        mean: vec![],
        rstd: vec![],
        dx: vec![],
        dgamma: vec![0.0; n],
        dbeta: vec![0.0; n],
    };
    for ((x, dy), residual) in x.chunks(n).zip(dy.chunks(n)).zip(residual.chunks(n)) {
        let mean = if norm.subtract_mean { x.iter().sum::<f64>() / n as f64 } else { 0.0 };
        let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        let rstd = 1.0 / (var + f64::from(norm.eps)).sqrt();
        let hat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
        let dhat: Vec<f64> = dy.iter().enumerate().map(|(i, d)| d * gain(i)).collect();
        let m1 = if norm.subtract_mean { dhat.iter().sum::<f64>() / n as f64 } else { 0.0 };
        let m2 = dot(&dhat, &hat) / n as f64;
        for i in 0..n {
            o.y.push(hat[i] * gain(i) + if norm.subtract_mean { beta[i] } else { 0.0 });
            o.dx.push(rstd * (dhat[i] - m1 - hat[i] * m2) + residual[i]);
            o.dgamma[i] += dy[i] * hat[i];
            o.dbeta[i] += dy[i];
        }
        o.mean.push(mean);
        o.rstd.push(rstd);
    }
    o
}

#[test]
fn norms_of_strided_views() {
    everywhere(|h, dtype| {
        // Short rows, rows for every number of cooperating threads, and rows that do not fit in registers.
        let short = [&[1usize, 4][..], &[7, 33], &[40, 128], &[5, 3, 16], &[0, 8]];
        let wide =
            [&[9usize, 400][..], &[7, 1032], &[5, 2048], &[3, 9000], &[2, 12008], &[2, 17001], &[2, 33000]];
        let cases = short.iter().chain(&wide).flat_map(|shape| [(*shape, true), (*shape, false)]);
        for (shape, framed) in cases {
            for norm in NORMS {
                let n = shape[shape.len() - 1];
                let all: usize = shape.iter().product();
                let rows = all / n;
                let v = |seed| numbers(dtype, seed, all);
                let (xs, dys, others) = (v(1), v(2), v(3));
                let (gammas, betas) = (numbers(dtype, 4, n), numbers(dtype, 5, n));
                let want = naive(norm, &xs, &gammas, &betas, &dys, &others);
                let what = format!("{} {dtype} {norm:?} {shape:?} framed {framed}", h.name);
                let place = |values: &[f64]| h.placed(framed, dtype, shape, values);

                let (x, y) = (place(&xs), place(&vec![f64::NAN; all]));
                let (gamma, beta) = (h.tensor(dtype, &[n], &gammas), h.tensor(dtype, &[n], &betas));
                let (mean, rstd) = (h.poisoned(DType::F32, &[rows]), h.poisoned(DType::F32, &[rows]));
                let some = |t| norm.subtract_mean.then_some(t);
                let f = NormForward {
                    x: &x.view,
                    gamma: &gamma,
                    beta: some(&beta),
                    y: &y.view,
                    mean: some(&mean),
                    rstd: &rstd,
                };
                h.k.norm_forward(&h.s, norm, &f).unwrap();
                close(&format!("{what} y"), dtype, &h.inside(&y), &want.y, 3e-6);
                close(
                    &format!("{what} rstd"),
                    DType::F32,
                    &h.host(&rstd),
                    &want.rstd,
                    1e-6 * most(&want.rstd),
                );
                if norm.subtract_mean {
                    close(&format!("{what} mean"), DType::F32, &h.host(&mean), &want.mean, 1e-6);
                }

                for (residual, accumulate) in [(false, false), (true, true)] {
                    let dy = place(&dys);
                    let dx = place(&vec![f64::NAN; all]);
                    let other = place(&others);
                    let old = numbers(DType::F32, 6, n);
                    let start = |h: &TestDevice| {
                        if accumulate {
                            h.tensor(DType::F32, &[n], &old)
                        } else {
                            h.poisoned(DType::F32, &[n])
                        }
                    };
                    let (dgamma, dbeta) = (start(h), start(h));
                    let parts = || h.poisoned(DType::F32, &[h.k.norm_partials(dtype, rows, n), n]);
                    let (gamma_parts, beta_parts) = (parts(), parts());
                    let b = NormBackward {
                        x: &x.view,
                        gamma: &gamma,
                        mean: some(&mean),
                        rstd: &rstd,
                        dy: &dy.view,
                        residual: residual.then_some(&other.view),
                        dx: &dx.view,
                        dgamma: &gamma_parts,
                        dbeta: norm.subtract_mean.then_some(&beta_parts),
                    };
                    h.k.norm_backward(&h.s, norm, &b).unwrap();
                    h.k.column_sum(&h.s, &gamma_parts, accumulate, &dgamma).unwrap();
                    if norm.subtract_mean {
                        h.k.column_sum(&h.s, &beta_parts, accumulate, &dbeta).unwrap();
                    }
                    let none = vec![0.0; all];
                    let want =
                        naive(norm, &xs, &gammas, &betas, &dys, if residual { &others } else { &none });
                    let size = 1e-5 * most(&want.rstd).max(1.0);
                    close(&format!("{what} dx"), dtype, &h.inside(&dx), &want.dx, size);
                    let plus = |g: &[f64]| -> Vec<f64> {
                        g.iter().zip(&old).map(|(g, o)| g + if accumulate { *o } else { 0.0 }).collect()
                    };
                    let slack = 1e-5 * rows.max(1) as f64;
                    close(
                        &format!("{what} dgamma"),
                        DType::F32,
                        &h.host(&dgamma),
                        &plus(&want.dgamma),
                        slack,
                    );
                    if norm.subtract_mean {
                        close(
                            &format!("{what} dbeta"),
                            DType::F32,
                            &h.host(&dbeta),
                            &plus(&want.dbeta),
                            slack,
                        );
                    }
                }
            }
        }
    });
}

fn most(x: &[f64]) -> f64 {
    x.iter().copied().fold(0.0, f64::max)
}

/// The fused kernel is bit-equal to its unfused parts.
#[test]
fn fused_add_norm_matches_add_then_norm() {
    everywhere(|h, dtype| {
        for norm in NORMS {
            for (rows, n) in [(1, 1), (9, 40), (3, 257), (0, 4), (3, 2048), (2, 16400), (1, 33001)] {
                let v = |seed, len| h.tensor(dtype, &[len / n.max(1), n][..], &numbers(dtype, seed, len));
                let (x, residual) = (v(1, rows * n), v(2, rows * n));
                let (gamma, beta) = (
                    h.tensor(dtype, &[n], &numbers(dtype, 3, n)),
                    h.tensor(dtype, &[n], &numbers(dtype, 4, n)),
                );
                let run = |fused: bool| {
                    let new = || h.poisoned(dtype, &[rows, n]);
                    let (sum, y) = (new(), new());
                    let (mean, rstd) = (h.poisoned(DType::F32, &[rows]), h.poisoned(DType::F32, &[rows]));
                    let of = |x: &Tensor, y: &Tensor, go: &dyn Fn(&NormForward)| {
                        let some = |t| norm.subtract_mean.then_some(t);
                        go(&NormForward {
                            x,
                            gamma: &gamma,
                            beta: some(&beta),
                            y,
                            mean: some(&mean),
                            rstd: &rstd,
                        });
                    };
                    if fused {
                        of(&x, &y, &|n| {
                            h.k.add_norm_forward(
                                &h.s,
                                norm,
                                &ResidualAdd { residual: &residual, sum: &sum },
                                n,
                            )
                            .unwrap()
                        });
                    } else {
                        h.k.add(&h.s, &x, &residual, &sum).unwrap();
                        of(&sum, &y, &|n| h.k.norm_forward(&h.s, norm, n).unwrap());
                    }
                    let stats = if norm.subtract_mean { h.host(&mean) } else { vec![] };
                    [h.host(&sum), h.host(&y), stats, h.host(&rstd)]
                };
                assert_eq!(run(true), run(false), "{} {dtype} {norm:?} {rows}x{n}", h.name);
            }
        }
    });
}
