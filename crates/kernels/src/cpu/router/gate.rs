//! Router GEMM with f64 accumulation.

use crate::cpu::{CpuContext, multiversion};
use ferrotron_tensor::Float;

/// Number of parallel partial sums.
const LANES: usize = 16;

multiversion! {
    fn dot<T: Float>(a: &[T], b: &[T]) -> f64 {
        let mut lanes = [0f64; LANES];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for l in 0..LANES {
                lanes[l] += f64::from(a[l].to_f32()) * f64::from(b[l].to_f32());
            }
        }
        for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
            *lane += f64::from(a.to_f32()) * f64::from(b.to_f32());
        }
        lanes.iter().sum()
    }
}

multiversion! {
    fn add_times<T: Float>(sum: &mut [f64], factor: f64, x: &[T]) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += factor * f64::from(x.to_f32());
        }
    }
}

/// `logits [T, E] = x [T, h]·wᵀ`, `w [E, h]`.
pub fn gate<T: Float>(cpu: CpuContext, x: &[T], w: &[T], [experts, h]: [usize; 2], logits: &mut [f32]) {
    cpu.threads.parallel_chunks(logits, experts, &|t, logits| {
        for (e, logit) in logits.iter_mut().enumerate() {
            *logit = dot(cpu.isa, &x[t * h..][..h], &w[e * h..][..h]) as f32;
        }
    });
}

/// `dx [T, h] = dlogits [T, E]·w`
pub fn gate_dx<T: Float>(cpu: CpuContext, w: &[T], dlogits: &[f32], [experts, h]: [usize; 2], dx: &mut [T]) {
    cpu.threads.parallel_chunks(dx, h, &|t, dx| {
        let mut sum = vec![0f64; h];
        for (e, d) in dlogits[t * experts..][..experts].iter().enumerate() {
            add_times(cpu.isa, &mut sum, f64::from(*d), &w[e * h..][..h]);
        }
        dx.iter_mut().zip(sum).for_each(|(dx, sum)| *dx = T::from_f32(sum as f32));
    });
}

/// `dw [E, h] (+)= dlogitsᵀ·x`
pub fn gate_dw<T: Float>(
    cpu: CpuContext,
    x: &[T],
    dlogits: &[f32],
    [experts, h]: [usize; 2],
    dw: &mut [f32],
    accumulate: bool,
) {
    cpu.threads.parallel_chunks(dw, h, &|e, dw| {
        let mut sum = vec![0f64; h];
        for (d, x) in dlogits.iter().skip(e).step_by(experts).zip(x.chunks(h.max(1))) {
            add_times(cpu.isa, &mut sum, f64::from(*d), x);
        }
        for (dw, sum) in dw.iter_mut().zip(sum) {
            *dw = if accumulate { (f64::from(*dw) + sum) as f32 } else { sum as f32 };
        }
    });
}
