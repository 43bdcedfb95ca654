//! Activations weighted by routing probabilities, forward and backward. Arithmetic is in f32.

use super::CpuContext;
use super::activation::{Activation, with_activation};
use super::math::multiversion_fma;
use super::reduce::lane_dot;
use super::rows::PIECE;
use crate::Act;
use ferrotron_tensor::Float;

/// `y[r] = p[r]·act(x[r, :f])·gate(x[r, f:])` (not gated: `p[r]·act(x[r])`); zeros where p is 0. y is `[N, f]`.
pub fn weighted<T: Float>(
    cpu: CpuContext,
    (act, gated): (Act, bool),
    f: usize,
    x: &[T],
    p: &[f32],
    y: &mut [T],
) {
    let (rows, width) = ((PIECE / f.max(1)).max(1), if gated { 2 * f } else { f });
    cpu.threads.parallel_chunks(y, rows * f, &|i, y| {
        let (x, p) = (&x[i * rows * width..], &p[i * rows..]);
        for ((y, x), p) in y.chunks_exact_mut(f).zip(x.chunks_exact(width)).zip(p) {
            if *p == 0.0 {
                y.fill(T::from_f32(0.0));
            } else if gated {
                with_activation!(act, curve => gated_row(cpu.isa, curve, *p, x, y));
            } else {
                with_activation!(act, curve => plain_row(cpu.isa, curve, *p, x, y));
            }
        }
    });
}

/// Operands of [`weighted_backward`], and the gradients to write.
#[derive(Debug)]
pub struct WeightedGrad<'a, T> {
    /// Input of the forward pass, `[N, f]` or gated `[N, 2f]`.
    pub x: &'a [T],
    /// Gradient of the output, `[N, f]`.
    pub dy: &'a [T],
    /// Probabilities `[N]`.
    pub probs: &'a [f32],
    /// Selection of each row `[N]`, negative for padding.
    pub source: &'a [i32],
    /// Written: gradient of `x`, zeros in padding.
    pub dx: &'a mut [T],
    /// Written: gradient of `probs`, zeros in padding.
    pub dprobs: &'a mut [f32],
}

/// Gradients of [`weighted`].
pub fn weighted_backward<T: Float>(
    cpu: CpuContext,
    (act, gated): (Act, bool),
    f: usize,
    grad: WeightedGrad<'_, T>,
) {
    let WeightedGrad { x, dy, probs, source, dx, dprobs } = grad;
    if f == 0 {
        dprobs.fill(0.0);
        return;
    }
    let (rows, width) = ((PIECE / f).max(1), if gated { 2 * f } else { f });
    let mut pieces: Vec<_> = dx.chunks_mut(rows * width).zip(dprobs.chunks_mut(rows)).collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        let mut values = vec![0f32; f];
        for (dx, dprobs) in pieces {
            for (r, (dx, dp)) in (i * rows..).zip(dx.chunks_exact_mut(width).zip(&mut **dprobs)) {
                if source[r] < 0 {
                    dx.fill(T::from_f32(0.0));
                    *dp = 0.0;
                    continue;
                }
                let (x, dy) = (&x[r * width..][..width], &dy[r * f..][..f]);
                let row = RowGrad { x, dy, dx, values: &mut values };
                *dp = if gated {
                    with_activation!(act, curve => gated_row_back(cpu.isa, curve, probs[r], row))
                } else {
                    with_activation!(act, curve => plain_row_back(cpu.isa, curve, probs[r], row))
                };
            }
        }
    });
}

/// One row of the backward pass; `values [f]` is scratch for the output before weighting.
struct RowGrad<'a, T> {
    x: &'a [T],
    dy: &'a [T],
    dx: &'a mut [T],
    values: &'a mut [f32],
}

multiversion_fma! {
    fn gated_row<F: Fma, T: Float, A: Activation>(act: A, p: f32, x: &[T], y: &mut [T]) {
        let (x1, x2) = x.split_at(y.len());
        for ((y, a), u) in y.iter_mut().zip(x1).zip(x2) {
            *y = T::from_f32(p * (act.value::<F>(a.to_f32()) * act.gate(u.to_f32())));
        }
    }
}

multiversion_fma! {
    fn plain_row<F: Fma, T: Float, A: Activation>(act: A, p: f32, x: &[T], y: &mut [T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(p * act.value::<F>(x.to_f32()));
        }
    }
}

multiversion_fma! {
    fn gated_row_back<F: Fma, T: Float, A: Activation>(act: A, p: f32, row: RowGrad<'_, T>) -> f32 {
        let RowGrad { x, dy, dx, values } = row;
        let (x1, x2) = x.split_at(dy.len());
        let (dx1, dx2) = dx.split_at_mut(dy.len());
        let outs = dx1.iter_mut().zip(dx2).zip(values.iter_mut());
        for ((((dx1, dx2), v), dy), (a, u)) in outs.zip(dy).zip(x1.iter().zip(x2)) {
            let (q, u) = (p * dy.to_f32(), u.to_f32());
            let (value, slope) = act.slope::<F>(a.to_f32());
            let gate = act.gate(u);
            *dx1 = T::from_f32(slope * gate * q);
            *dx2 = T::from_f32(act.gate_slope(u, value * q));
            *v = value * gate;
        }
        lane_dot(values, dy)
    }
}

multiversion_fma! {
    fn plain_row_back<F: Fma, T: Float, A: Activation>(act: A, p: f32, row: RowGrad<'_, T>) -> f32 {
        let RowGrad { x, dy, dx, values } = row;
        for (((dx, v), dy), x) in dx.iter_mut().zip(values.iter_mut()).zip(dy).zip(x) {
            let (value, slope) = act.slope::<F>(x.to_f32());
            *dx = T::from_f32(slope * (p * dy.to_f32()));
            *v = value;
        }
        lane_dot(values, dy)
    }
}
