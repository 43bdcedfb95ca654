//! Elementwise operations: casts, sums, scaling, soft caps, copies and transposes.

use super::math::{multiversion_fma, tanh};
use super::rows::{PIECE, Rows, check_len};
use super::{CpuContext, multiversion};
use ferrotron_tensor::{Element, Float, Result, Threads};

/// `y = x` in another element type, rounded to nearest even.
pub fn cast<S: Float, D: Float>(cpu: CpuContext, x: &[S], y: &mut [D]) -> Result<()> {
    check_len("cast", "y", y.len(), x.len())?;
    cpu.threads.parallel_chunks(y, PIECE, &|i, y| {
        let x = &x[i * PIECE..][..y.len()];
        if S::DTYPE == D::DTYPE {
            // Equal types are copied: a detour through f32 would lose bits of f64 and NaN payloads.
            bytemuck::cast_slice_mut::<D, u8>(y).copy_from_slice(bytemuck::cast_slice(x));
        } else {
            cast_piece(cpu.isa, x, y);
        }
    });
    Ok(())
}

multiversion! {
    fn cast_piece<S: Float, D: Float>(x: &[S], y: &mut [D]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = D::from_f32(x.to_f32());
        }
    }
}

/// `y = a + b`
pub fn add<T: Float>(cpu: CpuContext, a: &[T], b: &[T], y: &mut [T]) -> Result<()> {
    check_len("add", "b", b.len(), a.len())?;
    check_len("add", "y", y.len(), a.len())?;
    cpu.threads.parallel_chunks(y, PIECE, &|i, y| {
        add_piece(cpu.isa, &a[i * PIECE..][..y.len()], &b[i * PIECE..][..y.len()], y);
    });
    Ok(())
}

multiversion! {
    fn add_piece<T: Float>(a: &[T], b: &[T], y: &mut [T]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = T::from_f32(a.to_f32() + b.to_f32());
        }
    }
}

/// `y += x`, rounded to the type of `y`; with f32 `y` it accumulates into the main gradient.
pub fn accumulate<S: Float, D: Float>(cpu: CpuContext, x: &[S], y: &mut [D]) -> Result<()> {
    check_len("accumulate", "y", y.len(), x.len())?;
    cpu.threads.parallel_chunks(y, PIECE, &|i, y| accumulate_piece(cpu.isa, &x[i * PIECE..][..y.len()], y));
    Ok(())
}

multiversion! {
    fn accumulate_piece<S: Float, D: Float>(x: &[S], y: &mut [D]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = D::from_f32(y.to_f32() + x.to_f32());
        }
    }
}

/// `x = max(x, y)`, NaN where either is NaN.
pub fn max_assign<T: Float>(cpu: CpuContext, y: &[T], x: &mut [T]) -> Result<()> {
    check_len("max_assign", "x", x.len(), y.len())?;
    cpu.threads.parallel_chunks(x, PIECE, &|i, x| max_piece(cpu.isa, &y[i * PIECE..][..x.len()], x));
    Ok(())
}

multiversion! {
    fn max_piece<T: Float>(y: &[T], x: &mut [T]) {
        for (x, y) in x.iter_mut().zip(y) {
            let (a, b) = (x.to_f32(), y.to_f32());
            *x = T::from_f32(if b > a || b.is_nan() { b } else { a });
        }
    }
}

/// `y[r, j] += bias[j]` over dense `[rows, width]`.
pub fn add_bias<T: Float>(cpu: CpuContext, bias: &[T], y: &mut [T]) -> Result<()> {
    let width = bias.len();
    check_len("add_bias", "y", y.len(), y.len() / width.max(1) * width)?;
    let piece = (PIECE / width.max(1)).max(1) * width;
    cpu.threads.parallel_chunks(y, piece, &|_, y| {
        y.chunks_mut(width).for_each(|row| accumulate_piece(cpu.isa, bias, row));
    });
    Ok(())
}

/// `x *= factor`
pub fn scale<T: Float>(cpu: CpuContext, x: &mut [T], factor: f32) {
    cpu.threads.parallel_chunks(x, PIECE, &|_, x| scale_piece(cpu.isa, x, factor));
}

multiversion! {
    fn scale_piece<T: Float>(x: &mut [T], factor: f32) {
        for x in x {
            *x = T::from_f32(x.to_f32() * factor);
        }
    }
}

/// `x = value`
pub fn fill<T: Element>(threads: &Threads, x: &mut [T], value: T) {
    threads.parallel_chunks(x, PIECE, &|_, x| x.fill(value));
}

/// `x = c·tanh(x/c)`, in place.
pub fn softcap<T: Float>(cpu: CpuContext, cap: f32, x: &mut [T]) {
    cpu.threads.parallel_chunks(x, PIECE, &|_, x| softcap_piece(cpu.isa, cap, x));
}

multiversion_fma! {
    fn softcap_piece<F: Fma, T: Float>(cap: f32, x: &mut [T]) {
        for x in x {
            *x = T::from_f32(cap * tanh::<F>(x.to_f32() / cap));
        }
    }
}

/// Gradient of [`softcap`], in place: `dy *= 1 − (y/c)²`; y is the output of the forward pass.
pub fn softcap_backward<T: Float>(cpu: CpuContext, cap: f32, y: &[T], dy: &mut [T]) -> Result<()> {
    check_len("softcap_backward", "dy", dy.len(), y.len())?;
    cpu.threads.parallel_chunks(dy, PIECE, &|i, dy| {
        softcap_back_piece(cpu.isa, cap, &y[i * PIECE..][..dy.len()], dy)
    });
    Ok(())
}

multiversion! {
    fn softcap_back_piece<T: Float>(cap: f32, y: &[T], dy: &mut [T]) {
        for (dy, y) in dy.iter_mut().zip(y) {
            let t = y.to_f32() / cap;
            *dy = T::from_f32(dy.to_f32() * ((1.0 - t) * (1.0 + t)));
        }
    }
}

/// Copies rows into another layout and element type.
pub fn cast_rows<S: Float, D: Float>(
    cpu: CpuContext,
    x: &[S],
    x_rows: Rows,
    y: &mut [D],
    y_rows: Rows,
) -> Result<()> {
    x_rows.check("cast_rows", "x", x.len())?;
    y_rows.check_like("cast_rows", "y", y.len(), &x_rows)?;
    let grain = x_rows.grain();
    let mut pieces: Vec<_> = x_rows.cut(x, grain).zip(y_rows.cut_mut(y, grain)).collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        for (x, y) in pieces {
            for row in 0..x_rows.piece(i * grain, grain).count() {
                cast_piece(cpu.isa, x_rows.row(x, row), y_rows.row_mut(y, row));
            }
        }
    });
    Ok(())
}

/// Copies rows into another layout.
pub fn copy_rows<T: Element>(
    threads: &Threads,
    x: &[T],
    x_rows: Rows,
    y: &mut [T],
    y_rows: Rows,
) -> Result<()> {
    x_rows.check("copy_rows", "x", x.len())?;
    y_rows.check_like("copy_rows", "y", y.len(), &x_rows)?;
    let grain = x_rows.grain();
    let mut pieces: Vec<_> = x_rows.cut(x, grain).zip(y_rows.cut_mut(y, grain)).collect();
    threads.parallel_chunks(&mut pieces, 1, &|i, pieces| {
        for (x, y) in pieces {
            for row in 0..x_rows.piece(i * grain, grain).count() {
                y_rows.row_mut(y, row).copy_from_slice(x_rows.row(x, row));
            }
        }
    });
    Ok(())
}

/// Side of a transpose's square blocks: a cache line of bf16.
const TILE: usize = 32;

/// `y[j, i] = x[i, j]`: x is `[rows, columns]`, y is `[columns, rows]`, both contiguous.
pub fn transpose<T: Element>(
    threads: &Threads,
    x: &[T],
    rows: usize,
    columns: usize,
    y: &mut [T],
) -> Result<()> {
    check_len("transpose", "x", x.len(), rows * columns)?;
    check_len("transpose", "y", y.len(), rows * columns)?;
    threads.parallel_chunks(y, TILE * rows, &|i, y| {
        let first = i * TILE;
        for top in (0..rows).step_by(TILE) {
            let bottom = (top + TILE).min(rows);
            for (j, y) in y.chunks_mut(rows).enumerate() {
                for (row, y) in (top..bottom).zip(&mut y[top..bottom]) {
                    *y = x[row * columns + first + j];
                }
            }
        }
    });
    Ok(())
}
