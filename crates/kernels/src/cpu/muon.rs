//! Muon on slices: momentum, normalization, the combinations of Newton–Schulz, adaptive scaling, and the step.

use super::grad_norm::grad_square_sum;
use super::optimizer::UpdateSlices;
use super::optimizer_chunks::{Chunk, Grad, over_master, split_chunks};
use super::rows::PIECE;
use super::{CpuContext, multiversion};
use crate::muon::{AdaptiveScale, MuonMomentum, WeightDecay};
use ferrotron_tensor::{Float, Result};

/// Momentum of one parameter.
pub struct MomentumSlices<'a, M> {
    /// Gradient.
    pub grad: &'a [f32],
    /// Momentum.
    pub momentum: &'a mut [M],
    /// Weights whose decay is added to the gradient, and the decay.
    pub l2: Option<(&'a [f32], f32)>,
    /// The update.
    pub update: &'a mut [f32],
}

/// See [`MuonMomentum`]; `grad_scale` multiplies gradients.
pub fn momentum<M: Float>(cpu: CpuContext, m: MuonMomentum, grad_scale: f32, u: MomentumSlices<'_, M>) {
    let (grad, l2) = (u.grad, u.l2);
    let mut chunks: Vec<_> = u.momentum.chunks_mut(PIECE).zip(u.update.chunks_mut(PIECE)).collect();
    cpu.threads.parallel_chunks(&mut chunks, 1, &|i, chunk| {
        for (momentum, update) in chunk {
            let range = i * PIECE..i * PIECE + update.len();
            update.copy_from_slice(&grad[range.clone()]);
            scale(cpu.isa, update, grad_scale);
            if let Some((p, wd)) = l2 {
                add_scaled(cpu.isa, update, &p[range], wd);
            }
            momentum_block(cpu.isa, m, momentum, update);
        }
    });
}

multiversion! {
    fn scale(x: &mut [f32], factor: f32) {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

multiversion! {
    fn add_scaled(x: &mut [f32], y: &[f32], factor: f32) {
        x.iter_mut().zip(y).for_each(|(x, y)| *x += factor * *y);
    }
}

multiversion! {
    /// Gradients become updates.
    fn momentum_block<M: Float>(m: MuonMomentum, momentum: &mut [M], update: &mut [f32]) {
        let (mu, new) = (m.momentum, 1.0 - m.momentum);
        for (b, g) in momentum.iter_mut().zip(update) {
            let held = mu * b.to_f32() + new * *g;
            *b = M::from_f32(held);
            *g = if m.nesterov { new * *g + mu * held } else { held };
        }
    }
}

/// `p = keep·p − lr·update`; updates are the gradients of `list`.
pub fn apply(cpu: CpuContext, decay: WeightDecay, list: Vec<UpdateSlices<'_>>) -> Result<()> {
    let (mut chunks, _) = split_chunks("apply_update", list, false)?;
    cpu.threads.parallel_chunks(&mut chunks, 1, &|_, chunks| {
        for Chunk { param, grad, lr, weight_decay, .. } in chunks {
            let keep = match decay {
                WeightDecay::Decoupled => 1.0 - *lr * *weight_decay,
                WeightDecay::Independent => 1.0 - *weight_decay,
                WeightDecay::L2 => 1.0,
            };
            over_master(cpu.isa, param, &mut None, |range, p| match grad.part(range) {
                Grad::F32(update) => apply_block(cpu.isa, [keep, *lr], p, update),
                Grad::Bf16(update) => apply_block(cpu.isa, [keep, *lr], p, update),
            });
        }
    });
    Ok(())
}

multiversion! {
    fn apply_block<G: Float>(factors: [f32; 2], p: &mut [f32], update: &[G]) {
        let [keep, lr] = factors;
        for (p, u) in p.iter_mut().zip(update) {
            *p = keep * *p - lr * u.to_f32();
        }
    }
}

/// `out = x / divisor`.
pub fn normalize<T: Float>(cpu: CpuContext, x: &[f32], divisor: f32, out: &mut [T]) {
    cpu.threads.parallel_chunks(out, PIECE, &|i, out| {
        divide(cpu.isa, &x[i * PIECE..][..out.len()], divisor, out);
    });
}

multiversion! {
    fn divide<T: Float>(x: &[f32], divisor: f32, out: &mut [T]) {
        out.iter_mut().zip(x).for_each(|(o, x)| *o = T::from_f32(*x / divisor));
    }
}

/// `x = α·x + β·y`.
pub fn combine<T: Float>(cpu: CpuContext, factors: [f32; 2], x: &mut [T], y: &[f32]) {
    cpu.threads.parallel_chunks(x, PIECE, &|i, x| {
        combine_block(cpu.isa, factors, x, &y[i * PIECE..][..x.len()]);
    });
}

multiversion! {
    fn combine_block<T: Float>(factors: [f32; 2], x: &mut [T], y: &[f32]) {
        let [alpha, beta] = factors;
        x.iter_mut().zip(y).for_each(|(x, y)| *x = T::from_f32(alpha * x.to_f32() + beta * *y));
    }
}

/// See [`crate::MuonKernels::mirror`]; matrices of `side` rows.
pub fn mirror<T: Copy + Send>(cpu: CpuContext, x: &mut [T], side: usize, from: usize) {
    cpu.threads.parallel_chunks(x, (side * side).max(1), &|_, x| {
        for r in from..side {
            for c in 0..from {
                x[c * side + r] = x[r * side + c];
            }
        }
    });
}

/// See [`crate::MuonKernels::adamuon`].
pub fn adamuon(cpu: CpuContext, a: AdaptiveScale, o: &mut [f32], v: &mut [f32]) {
    let mut chunks: Vec<_> = o.chunks_mut(PIECE).zip(v.chunks_mut(PIECE)).collect();
    cpu.threads.parallel_chunks(&mut chunks, 1, &|_, chunk| {
        chunk.iter_mut().for_each(|(o, v)| adamuon_block(cpu.isa, a, o, v));
    });
}

multiversion! {
    fn adamuon_block(a: AdaptiveScale, o: &mut [f32], v: &mut [f32]) {
        for (o, v) in o.iter_mut().zip(v) {
            *v = a.beta2 * *v + (1.0 - a.beta2) * (*o * *o);
            *o /= v.sqrt() + a.eps;
        }
    }
}

/// See [`crate::MuonKernels::normuon`].
pub fn normuon(cpu: CpuContext, a: AdaptiveScale, [rows, cols]: [usize; 2], o: &mut [f32], v: &mut [f32]) {
    if o.is_empty() {
        return;
    }
    let by_row = rows >= cols;
    let mut sums = vec![0f64; if by_row { rows } else { cols }];
    if by_row {
        let o = &*o;
        cpu.threads.parallel_chunks(&mut sums, 16, &|i, part| {
            for (k, sum) in part.iter_mut().enumerate() {
                *sum = grad_square_sum(cpu.isa, &o[(i * 16 + k) * cols..][..cols]);
            }
        });
    } else {
        o.chunks(cols).for_each(|row| add_squares(cpu.isa, row, &mut sums));
    }
    let factors = normuon_factors(a, if by_row { cols } else { rows }, &sums, v);
    cpu.threads.parallel_chunks(o, cols, &|r, row| {
        if by_row {
            scale(cpu.isa, row, factors[r]);
        } else {
            row.iter_mut().zip(&factors).for_each(|(o, f)| *o *= f);
        }
    });
}

/// Updates the second moments from the sums of squares of lines of `length` elements; returns the factor of each line.
fn normuon_factors(a: AdaptiveScale, length: usize, sums: &[f64], v: &mut [f32]) -> Vec<f32> {
    let (mut before, mut after) = (0f64, 0f64);
    for (v, sum) in v.iter_mut().zip(sums) {
        *v = a.beta2 * *v + (1.0 - a.beta2) * (sum / length as f64) as f32;
        before += sum;
        after += sum / f64::from(v.max(a.eps));
    }
    let rescale = if after > 0.0 { (before / after).sqrt() } else { 0.0 };
    v.iter().map(|v| (rescale / f64::from(v.max(a.eps)).sqrt()) as f32).collect()
}

multiversion! {
    fn add_squares(row: &[f32], sums: &mut [f64]) {
        sums.iter_mut().zip(row).for_each(|(s, x)| *s += f64::from(*x) * f64::from(*x));
    }
}
