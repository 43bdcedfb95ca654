//! Rotary position embedding, in place on heads. With angle a: `(u, v) → (u·cos a − v·sin a, v·cos a + u·sin a)`.

use super::rows::{RowsViewMut, check_len};
use super::vocab::{Id, check_ids};
use super::{CpuContext, multiversion};
use crate::RopeStyle;
use ferrotron_tensor::{Float, Result, shape_error};

/// Cosines and sines of the angles, f32 `[positions, half]`, with any scaling of attention in them.
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
    /// Rotated pairs of channels per head.
    pub half: usize,
}

/// How pairs of channels rotate.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// Pairing of channels.
    pub style: RopeStyle,
    /// Rotate by the negative angle: the backward pass, which applies any scaling in cos and sin again.
    pub inverse: bool,
}

/// Rotates the first `2·half` channels of every head of `x` (`[tokens, heads, d]`) by row `positions[t]` of the angles.
pub fn rope<T: Float, I: Id>(
    cpu: CpuContext,
    x: RowsViewMut<'_, T>,
    angles: Angles<'_>,
    positions: &[I],
    rotation: Rotation,
) -> Result<()> {
    let Angles { cos, sin, half } = angles;
    x.check("rope", "x")?;
    let RowsViewMut { data, rows: heads } = x;
    check_len("rope", "sin", sin.len(), cos.len())?;
    check_len("rope", "positions", positions.len(), heads.outer)?;
    if 2 * half > heads.width {
        return shape_error("rope", format!("{} rotated channels in heads of {}", 2 * half, heads.width));
    }
    if half == 0 || heads.elements() == 0 {
        return Ok(());
    }
    check_len("rope", "cos", cos.len(), cos.len() / half * half)?;
    check_ids(cpu.threads, "rope", positions, cos.len() / half, None)?;
    let grain = heads.grain();
    let mut pieces: Vec<_> = heads.cut_mut(data, grain).zip(positions.chunks(grain)).collect();
    cpu.threads.parallel_chunks(&mut pieces, 1, &|_, pieces| {
        let mut scratch = vec![0f32; 2 * half];
        for (data, positions) in pieces {
            let x = RowsViewMut { data, rows: heads };
            rotate(cpu.isa, x, angles, positions, rotation, &mut scratch);
        }
    });
    Ok(())
}

multiversion! {
    fn rotate<T: Float, I: Id>(
        x: RowsViewMut<'_, T>, angles: Angles<'_>, positions: &[I], rotation: Rotation, scratch: &mut [f32],
    ) {
        let (RowsViewMut { data, rows: heads }, Angles { cos, sin, half }) = (x, angles);
        let Rotation { style, inverse } = rotation;
        let sign = if inverse { -1.0 } else { 1.0 };
        for (token, position) in positions.iter().enumerate() {
            let at = (*position).into() as usize * half;
            let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
            for head in 0..heads.inner {
                let x = &mut heads.row_mut(data, token * heads.inner + head)[..2 * half];
                match (style, inverse) {
                    (RopeStyle::Half, _) => halves(x, half, cos, sin, sign),
                    (RopeStyle::Interleaved, _) => pairs(x, cos, sin, sign),
                    (RopeStyle::PairsToHalves, false) => {
                        pairs(x, cos, sin, sign);
                        for (s, x) in scratch.iter_mut().zip(&*x) {
                            *s = x.to_f32();
                        }
                        let (first, second) = x.split_at_mut(half);
                        for ((a, b), pair) in first.iter_mut().zip(second).zip(scratch.chunks_exact(2)) {
                            (*a, *b) = (T::from_f32(pair[0]), T::from_f32(pair[1]));
                        }
                    }
                    (RopeStyle::PairsToHalves, true) => {
                        halves(x, half, cos, sin, sign);
                        for (s, x) in scratch.iter_mut().zip(&*x) {
                            *s = x.to_f32();
                        }
                        let (first, second) = scratch.split_at(half);
                        for ((a, b), pair) in first.iter().zip(second).zip(x.chunks_exact_mut(2)) {
                            (pair[0], pair[1]) = (T::from_f32(*a), T::from_f32(*b));
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn halves<T: Float>(x: &mut [T], half: usize, cos: &[f32], sin: &[f32], sign: f32) {
    let (first, second) = x.split_at_mut(half);
    for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (u, v, s) = (a.to_f32(), b.to_f32(), sign * s);
        *a = T::from_f32(u * c - v * s);
        *b = T::from_f32(v * c + u * s);
    }
}

#[inline(always)]
fn pairs<T: Float>(x: &mut [T], cos: &[f32], sin: &[f32], sign: f32) {
    for ((pair, c), s) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
        let (u, v, s) = (pair[0].to_f32(), pair[1].to_f32(), sign * s);
        pair[0] = T::from_f32(u * c - v * s);
        pair[1] = T::from_f32(v * c + u * s);
    }
}
