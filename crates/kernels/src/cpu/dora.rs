//! DoRA: row norms, and columns scaled by factors.

use super::grouped_bias::Segments;
use super::reduce::lane_dot;
use super::rows::PIECE;
use super::{CpuContext, multiversion};
use ferrotron_tensor::Float;

/// `out[r] = Σ_c x[r, c]²`: x is `[n, width]`.
pub fn row_squares<T: Float>(cpu: CpuContext, width: usize, x: &[T], out: &mut [f32]) {
    let grain = (PIECE / width.max(1)).max(1);
    cpu.threads.parallel_chunks(out, grain, &|i, out| {
        for (r, out) in (i * grain..).zip(out) {
            *out = squares(cpu.isa, &x[r * width..][..width]);
        }
    });
}

/// What the update adds to squared norms, see [`DoraUpdate`](crate::DoraUpdate). `stride` lies between the groups of b.
pub fn update_squares<T: Float>(
    cpu: CpuContext,
    ([n, r], stride): ([usize; 2], usize),
    (u, b, gram): (&[f32], &[T], &[f32]),
    scale: f32,
    out: &mut [f32],
) {
    let grain = (PIECE / (r * r).max(1)).max(1);
    cpu.threads.parallel_chunks(out, grain, &|i, out| {
        for (row, out) in (i * grain..).zip(out) {
            let (g, o) = (row / n, row % n);
            let (b, u) = (&b[g * stride + o * r..][..r], &u[row * r..][..r]);
            *out = row_update(cpu.isa, u, b, &gram[g * r * r..][..r * r], scale);
        }
    });
}

multiversion! {
    fn squares<T: Float>(x: &[T]) -> f32 {
        lane_dot(x, x)
    }
}

multiversion! {
    fn row_update<T: Float>(u: &[f32], b: &[T], gram: &[f32], scale: f32) -> f32 {
        let r = b.len();
        let mut sum = 0.0;
        for i in 0..r {
            sum += b[i].to_f32() * scale * (2.0 * u[i] + scale * lane_dot(&gram[i * r..][..r], b));
        }
        sum
    }
}

/// Factor and inverse norm of a row, see [`DoraFactor`](crate::DoraFactor).
pub fn factor<T: Float>(base: f32, update: f32, m: T) -> (f32, f32) {
    let (w, v) = (base.sqrt(), (base + update).max(0.0).sqrt());
    let norm = if w > 0.0 { T::from_f32(w).to_f32() * (v / w) } else { v };
    if norm > 0.0 { (m.to_f32() / norm, 1.0 / norm) } else { (0.0, 0.0) }
}

/// The row of factors of a row of tokens; none in no segment.
fn of_row<'a>(factors: &'a [f32], n: usize, segments: Option<Segments>, row: usize) -> Option<&'a [f32]> {
    let e = segments.map_or(Some(0), |s| s.of(row))?;
    Some(&factors[e * n..][..n])
}

/// `y = x·factor (+ bias)` over `[tokens, n]`.
pub fn scale_columns<T: Float>(
    cpu: CpuContext,
    (n, segments): (usize, Option<Segments>),
    (x, factors, bias): (&[T], &[f32], Option<&[T]>),
    y: &mut [T],
) {
    if n == 0 {
        return;
    }
    let grain = (PIECE / n).max(1);
    cpu.threads.parallel_chunks(y, grain * n, &|i, y| {
        for (r, y) in (i * grain..).zip(y.chunks_exact_mut(n)) {
            let x = &x[r * n..][..n];
            match (of_row(factors, n, segments, r), bias) {
                (Some(factor), None) => scale_row(cpu.isa, x, factor, y),
                (Some(factor), Some(bias)) => scale_row_bias(cpu.isa, x, factor, bias, y),
                (None, _) => y.fill(T::from_f32(0.0)),
            }
        }
    });
}

multiversion! {
    fn scale_row<T: Float>(x: &[T], factor: &[f32], y: &mut [T]) {
        for ((y, x), f) in y.iter_mut().zip(x).zip(factor) {
            *y = T::from_f32(x.to_f32() * f);
        }
    }
}

multiversion! {
    fn scale_row_bias<T: Float>(x: &[T], factor: &[f32], bias: &[T], y: &mut [T]) {
        for (((y, x), f), b) in y.iter_mut().zip(x).zip(factor).zip(bias) {
            *y = T::from_f32(x.to_f32() * f + b.to_f32());
        }
    }
}

/// `dx = dy·factor`, `products = dy·x·inv_norm` over `[tokens, n]`.
pub fn scale_columns_backward<T: Float>(
    cpu: CpuContext,
    (n, segments): (usize, Option<Segments>),
    (dy, x): (&[T], &[T]),
    (factors, inv_norms): (&[f32], &[f32]),
    (dx, products): (&mut [T], &mut [T]),
) {
    scale_columns(cpu, (n, segments), (dy, factors, None), dx);
    if n == 0 {
        return;
    }
    let grain = (PIECE / n).max(1);
    cpu.threads.parallel_chunks(products, grain * n, &|i, products| {
        for (r, out) in (i * grain..).zip(products.chunks_exact_mut(n)) {
            match of_row(inv_norms, n, segments, r) {
                Some(inv) => products_row(cpu.isa, &dy[r * n..][..n], &x[r * n..][..n], inv, out),
                None => out.fill(T::from_f32(0.0)),
            }
        }
    });
}

multiversion! {
    fn products_row<T: Float>(dy: &[T], x: &[T], inv_norm: &[f32], out: &mut [T]) {
        for (((out, dy), x), inv) in out.iter_mut().zip(dy).zip(x).zip(inv_norm) {
            *out = T::from_f32(dy.to_f32() * x.to_f32() * inv);
        }
    }
}
