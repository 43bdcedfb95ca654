//! Optimizer steps on packed moments: unpacked in cache, updated in f32, and packed again block by block.

use super::optimizer_chunks::CACHED;
use super::{Isa, multiversion};
use crate::moments::{self, BLOCK, Format, Scale, random_bits};
use std::ops::Range;

/// Codes and scales of the first moment, codes and scales of the second.
pub(super) type PackedMoments<'a, A, B> =
    (&'a mut [<A as Format>::Code], &'a mut [u8], &'a mut [<B as Format>::Code], &'a mut [u8]);

/// Runs `update(p, m, v)` with the f32 moments of elements `range`, a whole number of blocks.
pub(super) fn two_moments<A: Format, B: Format>(
    isa: Isa,
    seed: u32,
    range: Range<usize>,
    p: &mut [f32],
    (m, m_scales, v, v_scales): PackedMoments<A, B>,
    update: impl FnOnce(&mut [f32], &mut [f32], &mut [f32]),
) {
    let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
    let (m, v) = (&mut m[range.clone()], &mut v[range]);
    let (m_scales, v_scales) = (&mut m_scales[blocks.clone()], &mut v_scales[blocks]);
    let (mut wide, mut wide2) = ([0f32; CACHED], [0f32; CACHED]);
    let (wide, wide2) = (&mut wide[..m.len()], &mut wide2[..v.len()]);
    unpack(isa, A::default(), m, m_scales, wide);
    unpack(isa, B::default(), v, v_scales, wide2);
    update(p, wide, wide2);
    let rounding = StochasticRounding { seed, rotation: 0, masters: p, momentum: wide };
    pack(isa, A::default(), rounding, wide, m, m_scales);
    pack(isa, B::default(), StochasticRounding { rotation: 16, ..rounding }, wide2, v, v_scales);
}

/// [`two_moments`] for one moment.
pub(super) fn one_moment<A: Format>(
    isa: Isa,
    seed: u32,
    range: Range<usize>,
    p: &mut [f32],
    (m, scales): (&mut [A::Code], &mut [u8]),
    update: impl FnOnce(&mut [f32], &mut [f32]),
) {
    let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
    let (m, scales) = (&mut m[range], &mut scales[blocks]);
    let mut wide = [0f32; CACHED];
    let wide = &mut wide[..m.len()];
    unpack(isa, A::default(), m, scales, wide);
    update(p, wide);
    pack(
        isa,
        A::default(),
        StochasticRounding { seed, rotation: 0, masters: p, momentum: wide },
        wide,
        m,
        scales,
    );
}

/// Stochastic rounding by the random bits of each element's master and momentum, rotated by `rotation` bits.
#[derive(Clone, Copy)]
struct StochasticRounding<'a> {
    seed: u32,
    rotation: u32,
    masters: &'a [f32],
    momentum: &'a [f32],
}

multiversion! {
    /// Decodes values.
    pub fn unpack<F: Format>(_format: F, codes: &[F::Code], scales: &[u8], values: &mut [f32]) {
        for ((codes, values), scale) in codes.chunks(BLOCK).zip(values.chunks_mut(BLOCK)).zip(scales) {
            for (x, c) in values.iter_mut().zip(codes) {
                *x = moments::unpack::<F>(*c, *scale);
            }
        }
    }
}

multiversion! {
    /// Encodes values, rounded to nearest.
    pub fn pack_nearest<F: Format>(_format: F, values: &[f32], codes: &mut [F::Code], scales: &mut [u8]) {
        for ((values, codes), scale) in values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales) {
            let s = Scale::of::<F>(amax(values));
            *scale = s.byte();
            for (x, c) in values.iter().zip(codes) {
                *c = moments::pack_nearest::<F>(*x, s.inverse());
            }
        }
    }
}

multiversion! {
    /// Encodes values by stochastic rounding.
    fn pack<F: Format>(
        _format: F, rounding: StochasticRounding<'_>, values: &[f32], codes: &mut [F::Code], scales: &mut [u8],
    ) {
        let StochasticRounding { seed, rotation, masters, momentum } = rounding;
        let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales);
        for (((values, codes), scale), (p, m)) in blocks.zip(masters.chunks(BLOCK).zip(momentum.chunks(BLOCK))) {
            let s = Scale::of::<F>(amax(values));
            *scale = s.byte();
            for (((x, c), p), m) in values.iter().zip(codes).zip(p).zip(m) {
                *c = moments::pack::<F>(*x, s.inverse(), random_bits(seed, *p, *m).rotate_left(rotation));
            }
        }
    }
}

/// Amax; NaN is ignored.
#[inline(always)]
fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |a, x| a.max(x.abs()))
}
