//! The element-wise half of attention, over one block of scores held transposed: `[keys, QUERIES]`, a key a row and
//! a query a lane.

use super::QUERIES;
use super::lanes::{Past, Sight};
use super::levels::leveled;
use super::math::{exp, fma, tanh};

/// Queries worked on together: enough for two of the widest vectors.
const GROUP: usize = 32;

/// What turns a product `q·k` into a score.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scores {
    /// The scale.
    pub scale: f32,
    /// The soft cap, if any.
    pub softcap: Option<f32>,
    /// Must the lanes' ranges be looked at, or is the whole block visible?
    pub masked: bool,
    /// Key of row 0.
    pub first_key: i32,
    /// Rows.
    pub keys: usize,
}

leveled! {
    /// Online softmax over one more block: `s` holds products and becomes `exp(score - max)`, 0 where invisible.
    /// `past` takes up the new maxima and sums, and says by how much what was summed before must shrink.
    pub(super) fn absorb(scores: Scores, s: &mut [f32], sight: &Sight, past: &mut Past) = absorb_body;
}

#[inline(always)]
fn absorb_body<const FMA: bool>(scores: Scores, s: &mut [f32], sight: &Sight, past: &mut Past) {
    match (scores.masked, scores.softcap.is_some()) {
        (false, false) => absorb_as::<FMA, false, false>(scores, s, sight, past),
        (false, true) => absorb_as::<FMA, false, true>(scores, s, sight, past),
        (true, false) => absorb_as::<FMA, true, false>(scores, s, sight, past),
        (true, true) => absorb_as::<FMA, true, true>(scores, s, sight, past),
    }
}

#[inline(always)]
fn absorb_as<const FMA: bool, const MASKED: bool, const CAP: bool>(
    scores: Scores,
    s: &mut [f32],
    sight: &Sight,
    past: &mut Past,
) {
    let cap = scores.softcap.unwrap_or(1.0);
    for g in (0..QUERIES).step_by(GROUP) {
        let (lo, hi) = (group(&sight.lo, g), group(&sight.hi, g));
        let mut top = *group(&past.max, g);
        for (row, j) in s.chunks_exact_mut(QUERIES).take(scores.keys).zip(scores.first_key..) {
            let row = group_mut(row, g);
            for i in 0..GROUP {
                let x = row[i] * scores.scale;
                let x = if CAP { cap * tanh::<FMA>(x / cap) } else { x };
                let x = if MASKED && (j < lo[i] || j > hi[i]) { f32::NEG_INFINITY } else { x };
                if MASKED || CAP {
                    row[i] = x;
                }
                // A NaN score loses this comparison and shows up in the sum instead.
                top[i] = if x > top[i] { x } else { top[i] };
            }
        }
        // While a query has seen nothing its maximum is -inf, which must not meet another -inf.
        let mut base = [0.0f32; GROUP];
        let mut sum = [0.0f32; GROUP];
        let (max, total, shrink) =
            (group_mut(&mut past.max, g), group_mut(&mut past.sum, g), group_mut(&mut past.shrink, g));
        for i in 0..GROUP {
            base[i] = if top[i] == f32::NEG_INFINITY { 0.0 } else { top[i] };
            shrink[i] = exp::<FMA>(max[i] - base[i]);
            max[i] = top[i];
        }
        for row in s.chunks_exact_mut(QUERIES).take(scores.keys) {
            let row = group_mut(row, g);
            for i in 0..GROUP {
                let x =
                    if MASKED || CAP { row[i] - base[i] } else { fma::<FMA>(row[i], scores.scale, -base[i]) };
                row[i] = exp::<FMA>(x);
                sum[i] += row[i];
            }
        }
        for i in 0..GROUP {
            total[i] = fma::<FMA>(total[i], shrink[i], sum[i]);
        }
    }
}

leveled! {
    /// Backward of one block: `s` holds products and becomes probabilities, `dp` holds `dout·v` and becomes the
    /// gradient of `q·k` before the scale. `lse` and `delta = Σ dout·out` are per query.
    pub(super) fn differentiate(
        scores: Scores, s: &mut [f32], dp: &mut [f32], sight: &Sight, lse: &[f32], delta: &[f32],
    ) = differentiate_body;
}

#[inline(always)]
fn differentiate_body<const FMA: bool>(
    scores: Scores,
    s: &mut [f32],
    dp: &mut [f32],
    sight: &Sight,
    lse: &[f32],
    delta: &[f32],
) {
    match (scores.masked, scores.softcap.is_some()) {
        (false, false) => differentiate_as::<FMA, false, false>(scores, s, dp, sight, lse, delta),
        (false, true) => differentiate_as::<FMA, false, true>(scores, s, dp, sight, lse, delta),
        (true, false) => differentiate_as::<FMA, true, false>(scores, s, dp, sight, lse, delta),
        (true, true) => differentiate_as::<FMA, true, true>(scores, s, dp, sight, lse, delta),
    }
}

#[inline(always)]
fn differentiate_as<const FMA: bool, const MASKED: bool, const CAP: bool>(
    scores: Scores,
    s: &mut [f32],
    dp: &mut [f32],
    sight: &Sight,
    lse: &[f32],
    delta: &[f32],
) {
    let cap = scores.softcap.unwrap_or(1.0);
    for g in (0..QUERIES).step_by(GROUP) {
        let (lo, hi) = (group(&sight.lo, g), group(&sight.hi, g));
        let (lse, delta) = (group(lse, g), group(delta, g));
        let rows = s.chunks_exact_mut(QUERIES).zip(dp.chunks_exact_mut(QUERIES)).take(scores.keys);
        for ((s, dp), j) in rows.zip(scores.first_key..) {
            let (s, dp) = (group_mut(s, g), group_mut(dp, g));
            for i in 0..GROUP {
                let (x, slope) = if CAP {
                    let t = tanh::<FMA>(s[i] * scores.scale / cap);
                    (fma::<FMA>(cap, t, -lse[i]), fma::<FMA>(-t, t, 1.0))
                } else {
                    (fma::<FMA>(s[i], scores.scale, -lse[i]), 1.0)
                };
                let p = exp::<FMA>(x);
                let d = p * (dp[i] - delta[i]);
                let d = if CAP { d * slope } else { d };
                let seen = !MASKED || (j >= lo[i] && j <= hi[i]);
                s[i] = if seen { p } else { 0.0 };
                dp[i] = if seen { d } else { 0.0 };
            }
        }
    }
}

leveled! {
    /// `block[r, lane] *= factor[lane]` for every row of a `[rows, QUERIES]` block.
    pub(super) fn scale_lanes(block: &mut [f32], factor: &[f32]) = scale_lanes_body;
}

#[inline(always)]
fn scale_lanes_body<const FMA: bool>(block: &mut [f32], factor: &[f32]) {
    for row in block.chunks_exact_mut(QUERIES) {
        for (x, f) in row.iter_mut().zip(&factor[..QUERIES]) {
            *x *= f;
        }
    }
}

/// Lanes `g..g + GROUP`, as an array so that loops over them become vectors. `g` is a multiple of `GROUP` below
/// `QUERIES`, so the conversion cannot fail.
#[inline(always)]
fn group<X>(lanes: &[X], g: usize) -> &[X; GROUP] {
    let (head, _) = lanes[g..].as_chunks::<GROUP>();
    &head[0]
}

#[inline(always)]
fn group_mut<X>(lanes: &mut [X], g: usize) -> &mut [X; GROUP] {
    let (head, _) = lanes[g..].as_chunks_mut::<GROUP>();
    &mut head[0]
}
