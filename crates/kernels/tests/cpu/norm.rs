use super::support::{Random, close, everywhere, wide};
use ferrotron_kernels::cpu::norm::{
    AddNorm, Affine, InOut, add_layer_norm, add_rms_norm, layer_norm, rms_norm,
};
use ferrotron_kernels::cpu::norm_backward::{NormGrad, norm_backward};
use ferrotron_kernels::cpu::{CpuContext, Isa, elementwise, rows::Rows};
use ferrotron_tensor::{Float, Threads, bf16};

/// y, mean, rstd of each row, by definition.
fn oracle(x: &[f64], gain: &[f64], bias: &[f64], eps: f64, centred: bool) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let h = gain.len();
    let (mut y, mut means, mut rstds) = (vec![], vec![], vec![]);
    for row in x.chunks(h) {
        let mean = if centred { row.iter().sum::<f64>() / h as f64 } else { 0.0 };
        let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / h as f64;
        let r = 1.0 / (var + eps).sqrt();
        y.extend(row.iter().zip(gain).zip(bias).map(|((x, g), b)| (x - mean) * r * g + b));
        means.push(mean);
        rstds.push(r);
    }
    (y, means, rstds)
}

fn gains<T: Float>(gamma: &[T], zero_centred: bool) -> Vec<f64> {
    gamma.iter().map(|g| g.to_f64() + f64::from(u8::from(zero_centred))).collect()
}

fn forward<T: Float>(rows: usize, h: usize, centred: bool, zero_centred: bool) {
    let mut random = Random(rows as u64 * 31 + h as u64);
    let x: Vec<T> = random.vec(rows * h, 2.0);
    let (gamma, beta): (Vec<T>, Vec<T>) = (random.vec(h, 1.0), random.vec(h, 1.0));
    let eps = 1e-5;
    let bias = if centred { wide(&beta) } else { vec![0.0; h] };
    let (y, mean, rstd) = oracle(&wide(&x), &gains(&gamma, zero_centred), &bias, f64::from(eps), centred);
    let (ours, our_mean, our_rstd) = everywhere(|cpu| {
        let (mut y, mut m, mut r) = (vec![T::from_f32(9.0); rows * h], vec![9.0; rows], vec![9.0; rows]);
        let affine = Affine { gamma: &gamma, beta: centred.then_some(&beta[..]), eps, zero_centred };
        let io = InOut::dense(&x, &mut y, rows, h);
        if centred {
            layer_norm(cpu, io, affine, &mut m, &mut r).unwrap();
        } else {
            rms_norm(cpu, io, affine, &mut r).unwrap();
            m.fill(0.0);
        }
        (y, m, r)
    });
    close("rstd", &our_rstd, &rstd, 1e-6, 0.0);
    close("mean", &our_mean, &mean, 1e-6, 1e-6);
    close("y", &ours, &y, 2e-6, 2e-6);
}

#[test]
fn forward_matches_the_definition() {
    for (rows, h) in [(1, 1), (3, 5), (7, 33), (5, 64), (300, 257), (1000, 256), (2, 20000)] {
        for (centred, zero_centred) in [(false, false), (false, true), (true, false), (true, true)] {
            // LayerNorm of a single column is 0/√eps: the result is the rounding error of the mean.
            if h > 1 || !centred {
                forward::<f32>(rows, h, centred, zero_centred);
                forward::<bf16>(rows, h, centred, zero_centred);
            }
        }
    }
}

#[test]
fn add_norm_is_bit_equal_to_add_then_norm() {
    for (rows, h) in [(1, 1), (130, 257), (70, 512)] {
        let mut random = Random(5);
        let (x, res): (Vec<bf16>, Vec<bf16>) = (random.vec(rows * h, 1.0), random.vec(rows * h, 3.0));
        let gamma: Vec<bf16> = random.vec(h, 1.0);
        for centred in [false, true] {
            let affine =
                Affine { gamma: &gamma, beta: centred.then_some(&gamma[..]), eps: 1e-6, zero_centred: false };
            let fused = everywhere(|cpu| {
                let (mut sum, mut y) = (vec![bf16::ZERO; rows * h], vec![bf16::ZERO; rows * h]);
                let (mut mean, mut rstd) = (vec![0f32; rows], vec![0f32; rows]);
                let io = AddNorm { x: &x, residual: &res, sum: &mut sum, y: &mut y };
                if centred {
                    add_layer_norm(cpu, io, affine, &mut mean, &mut rstd).unwrap();
                } else {
                    add_rms_norm(cpu, io, affine, &mut rstd).unwrap();
                }
                (sum, y, mean, rstd)
            });
            let apart = everywhere(|cpu| {
                let (mut sum, mut y) = (vec![bf16::ZERO; rows * h], vec![bf16::ZERO; rows * h]);
                let (mut mean, mut rstd) = (vec![0f32; rows], vec![0f32; rows]);
                elementwise::add(cpu, &x, &res, &mut sum).unwrap();
                let io = InOut::dense(&sum, &mut y, rows, h);
                if centred {
                    layer_norm(cpu, io, affine, &mut mean, &mut rstd).unwrap();
                } else {
                    rms_norm(cpu, io, affine, &mut rstd).unwrap();
                }
                (sum, y, mean, rstd)
            });
            assert_eq!(fused, apart);
        }
    }
}

/// Heads inside a fused qkv buffer, out to a contiguous one.
#[test]
fn strided_heads_match_dense_rows() {
    let (tokens, heads, d, stride) = (37, 3, 20, 5 * 20 + 7);
    let mut random = Random(8);
    let qkv: Vec<f32> = random.vec(tokens * stride, 1.0);
    let gamma: Vec<f32> = random.vec(d, 1.0);
    let affine = Affine { gamma: &gamma, beta: None, eps: 1e-6, zero_centred: false };
    let view = Rows::heads(tokens, stride, heads, d, d);
    let out = Rows::dense(tokens * heads, d);
    let dense: Vec<f32> =
        (0..tokens * heads).flat_map(|r| qkv[r / heads * stride + r % heads * d..][..d].to_vec()).collect();
    let strided = everywhere(|cpu| {
        let (mut y, mut rstd) = (vec![0f32; tokens * heads * d], vec![0f32; tokens * heads]);
        let y_rows = Rows::heads(tokens, heads * d, heads, d, d);
        rms_norm(cpu, InOut { x: &qkv, x_rows: view, y: &mut y, y_rows }, affine, &mut rstd).unwrap();
        (y, rstd)
    });
    let plain = everywhere(|cpu| {
        let (mut y, mut rstd) = (vec![0f32; tokens * heads * d], vec![0f32; tokens * heads]);
        rms_norm(cpu, InOut { x: &dense, x_rows: out, y: &mut y, y_rows: out }, affine, &mut rstd).unwrap();
        (y, rstd)
    });
    assert_eq!(strided, plain);

    // The backward pass in place on a strided gradient buffer writes nothing outside the heads.
    let dy: Vec<f32> = random.vec(qkv.len(), 1.0);
    let (grad, dgamma) = everywhere(|cpu| {
        let (mut grad, mut dgamma) = (dy.clone(), vec![0f32; d]);
        let args = NormGrad {
            x: &qkv,
            x_rows: view,
            mean: None,
            rstd: &plain.1,
            gamma: &gamma,
            zero_centred: false,
            dy: None,
            residual: None,
            dx: &mut grad,
            dx_rows: view,
            dgamma: Some(&mut dgamma),
            dbeta: None,
            accumulate: false,
        };
        norm_backward(cpu, args).unwrap();
        (grad, dgamma)
    });
    let dy_dense: Vec<f32> =
        (0..tokens * heads).flat_map(|r| dy[r / heads * stride + r % heads * d..][..d].to_vec()).collect();
    let (dx, dg, _) = backward_oracle(&wide(&dense), &wide(&dy_dense), &wide(&gamma), 1e-6, false);
    close("dgamma", &dgamma, &dg, 1e-6, 1e-5);
    for (at, (g, before)) in grad.iter().zip(&dy).enumerate() {
        let (token, inside) = (at / stride, at % stride);
        if inside < heads * d {
            close("dx", &[*g], &[dx[token * heads * d + inside]], 1e-5, 1e-5);
        } else {
            assert_eq!(g, before);
        }
    }
}

/// dx, dgamma, dbeta through the full Jacobian of a row, which shares no formula with the kernel.
fn backward_oracle(
    x: &[f64],
    dy: &[f64],
    gain: &[f64],
    eps: f64,
    centred: bool,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let h = gain.len();
    let n = h as f64;
    let (mut dx, mut dgamma, mut dbeta) = (vec![0.0; x.len()], vec![0.0; h], vec![0.0; h]);
    for (row, (x, dy)) in x.chunks(h).zip(dy.chunks(h)).enumerate() {
        let mean = if centred { x.iter().sum::<f64>() / n } else { 0.0 };
        let r = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + eps).sqrt();
        for j in 0..h {
            dgamma[j] += dy[j] * (x[j] - mean) * r;
            dbeta[j] += dy[j];
            for i in 0..h {
                let same = f64::from(u8::from(i == j)) - if centred { 1.0 / n } else { 0.0 };
                // d((x_i − µ)·r)/dx_j; the sum over rows of (x_k − µ) kills µ's part inside dr/dx_j.
                let slope = same * r - (x[i] - mean) * r.powi(3) * (x[j] - mean) / n;
                dx[row * h + j] += dy[i] * gain[i] * slope;
            }
        }
    }
    (dx, dgamma, dbeta)
}

fn backward<T: Float>(rows: usize, h: usize, centred: bool, with_residual: bool, accumulate: bool) {
    let mut random = Random(rows as u64 * 7 + h as u64);
    let x: Vec<T> = random.vec(rows * h, 2.0);
    let dy: Vec<T> = random.vec(rows * h, 1.0);
    let res: Vec<T> = random.vec(rows * h, 1.0);
    let gamma: Vec<T> = random.vec(h, 1.0);
    let before: Vec<f32> = random.vec(h, 1.0);
    let (eps, zero_centred) = (1e-5f32, centred);
    let gain = gains(&gamma, zero_centred);
    let (mut dx, mut dg, mut db) = backward_oracle(&wide(&x), &wide(&dy), &gain, f64::from(eps), centred);
    if with_residual {
        dx.iter_mut().zip(&res).for_each(|(d, r)| *d += r.to_f64());
    }
    if accumulate {
        dg.iter_mut().zip(&before).for_each(|(d, b)| *d += f64::from(*b));
        db.iter_mut().zip(&before).for_each(|(d, b)| *d += f64::from(*b));
    }
    let (_, mean, rstd) = oracle(&wide(&x), &gain, &vec![0.0; h], f64::from(eps), centred);
    let (mean, rstd): (Vec<f32>, Vec<f32>) =
        (mean.iter().map(|m| *m as f32).collect(), rstd.iter().map(|r| *r as f32).collect());
    let all = Rows::dense(rows, h);
    for in_place in [false, true] {
        let (our_dx, our_dg, our_db) = everywhere(|cpu| {
            let mut dx = if in_place { dy.clone() } else { vec![T::from_f32(9.0); rows * h] };
            let (mut dg, mut db) = (before.clone(), before.clone());
            let args = NormGrad {
                x: &x,
                x_rows: all,
                mean: centred.then_some(&mean[..]),
                rstd: &rstd,
                gamma: &gamma,
                zero_centred,
                dy: (!in_place).then_some((&dy[..], all)),
                residual: with_residual.then_some(&res[..]),
                dx: &mut dx,
                dx_rows: all,
                dgamma: Some(&mut dg),
                dbeta: centred.then_some(&mut db[..]),
                accumulate,
            };
            norm_backward(cpu, args).unwrap();
            (dx, dg, db)
        });
        let (scale, sums) = (rstd.iter().fold(1f64, |a, r| a.max(f64::from(*r))), rows as f64);
        close("dx", &our_dx, &dx, 1e-5, 2e-6 * scale * (1.0 + h as f64).ln());
        close("dgamma", &our_dg, &dg, 1e-6, 1e-6 * sums.sqrt() + 1e-6);
        if centred {
            close("dbeta", &our_db, &db, 1e-6, 1e-6 * sums.sqrt() + 1e-6);
        }
    }
}

#[test]
fn backward_matches_the_jacobian() {
    for (rows, h) in [(1, 2), (3, 5), (7, 33), (200, 130), (1500, 16)] {
        for centred in [false, true] {
            for (residual, accumulate) in [(false, false), (true, true)] {
                backward::<f32>(rows, h, centred, residual, accumulate);
                backward::<bf16>(rows, h, centred, residual, accumulate);
            }
        }
    }
}

#[test]
fn no_rows_write_nothing_but_zero_sums() {
    let threads = Threads::new(2).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let (gamma, mut rstd, mut dg) = (vec![1f32; 4], vec![0f32; 0], vec![3f32; 4]);
    let affine = Affine { gamma: &gamma, beta: None, eps: 1e-6, zero_centred: false };
    let io = InOut::dense(&[] as &[f32], &mut [], 0, 4);
    rms_norm(cpu, io, affine, &mut rstd).unwrap();
    let none = Rows::dense(0, 4);
    for (accumulate, left) in [(true, 3.0), (false, 0.0)] {
        let args = NormGrad {
            x: &[] as &[f32],
            x_rows: none,
            mean: None,
            rstd: &[],
            gamma: &gamma,
            zero_centred: false,
            dy: None,
            residual: None,
            dx: &mut [],
            dx_rows: none,
            dgamma: Some(&mut dg),
            dbeta: None,
            accumulate,
        };
        norm_backward(cpu, args).unwrap();
        assert_eq!(dg, [left; 4]);
    }
}

#[test]
fn nan_and_infinity_stay_in_their_row() {
    // NaN, infinity, zeros and subnormals in some rows: other rows are bit-equal.
    let h = 48;
    let mut x: Vec<f32> = Random(3).vec(6 * h, 1.0);
    let gamma = vec![1f32; h];
    let run = |x: &[f32]| {
        everywhere(|cpu| {
            let (mut y, mut rstd) = (vec![0f32; 6 * h], vec![0f32; 6]);
            let affine = Affine { gamma: &gamma, beta: None, eps: 1e-6, zero_centred: false };
            rms_norm(cpu, InOut::dense(x, &mut y, 6, h), affine, &mut rstd).unwrap();
            y.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
        })
    };
    let before = run(&x);
    x[5] = f32::NAN;
    x[h + 7] = f32::INFINITY;
    x[2 * h..3 * h].fill(0.0);
    x[3 * h..4 * h].fill(1e-41);
    let after = run(&x);
    assert_eq!(before[4 * h..], after[4 * h..]);
    assert!(after[..h].iter().all(|y| f32::from_bits(*y).is_nan()));
    assert!(after[2 * h..3 * h].iter().all(|y| *y == 0));
    assert!(after[3 * h..4 * h].iter().all(|y| f32::from_bits(*y).is_finite()));
}

#[test]
fn wrong_shapes_are_errors() {
    let threads = Threads::new(1).unwrap();
    let cpu = CpuContext::new(&threads, Isa::detect());
    let (x, mut y, gamma, mut rstd) = (vec![0f32; 12], vec![0f32; 12], vec![0f32; 4], vec![0f32; 3]);
    let affine = Affine { gamma: &gamma, beta: None, eps: 1e-6, zero_centred: false };
    let good = Rows::dense(3, 4);
    for (x_rows, y_rows) in [
        (Rows::dense(4, 3), good),
        (Rows::dense(4, 4), Rows::dense(4, 4)),
        (Rows::strided(3, 4, 2), good),
        (good, Rows::strided(3, 4, 5)),
        (Rows::heads(3, 4, 2, 4, 2), Rows::heads(3, 4, 2, 4, 2)),
    ] {
        let io = InOut { x: &x, x_rows, y: &mut y, y_rows };
        assert!(rms_norm(cpu, io, affine, &mut rstd).is_err(), "{x_rows:?} {y_rows:?}");
    }
    let io = InOut::dense(&x, &mut y, 3, 4);
    assert!(layer_norm(cpu, io, affine, &mut [0.0; 2], &mut rstd).is_err());
}
