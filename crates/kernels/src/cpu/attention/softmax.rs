//! The element-wise half of attention, over one block of scores held transposed: `[keys, QUERIES]`, a key a row and
//! a query a lane. Scores are multiplied by log2 e, so that every exponential is a power of two.

use super::QUERIES;
use super::math::{exp2, exp2_any, fma, ln, tanh};
use super::multiversion_fma::leveled;
use super::softmax_state::{OnlineSoftmax, SavedQueries, VisibleRange};
use std::f32::consts::{LN_2, LOG2_E};

/// Queries worked on together: enough for two of the widest vectors.
const GROUP: usize = 32;

/// How `q·k` becomes a score, for one block of keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScoreBlock {
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
    /// Online softmax over one more block: `s` holds `q·k` and becomes `exp(score - max)`, 0 where masked. Updates the maxima and
    /// sums of `past`, and its factor that rescales earlier sums.
    pub(super) fn absorb(scores: ScoreBlock, s: &mut [f32], visible: &VisibleRange, past: &mut OnlineSoftmax) = absorb_body;
}

#[inline(always)]
fn absorb_body<const FMA: bool>(
    scores: ScoreBlock,
    s: &mut [f32],
    visible: &VisibleRange,
    past: &mut OnlineSoftmax,
) {
    match (scores.masked, scores.softcap.is_some()) {
        (false, false) => absorb_as::<FMA, false, false>(scores, s, visible, past),
        (false, true) => absorb_as::<FMA, false, true>(scores, s, visible, past),
        (true, false) => absorb_as::<FMA, true, false>(scores, s, visible, past),
        (true, true) => absorb_as::<FMA, true, true>(scores, s, visible, past),
    }
}

#[inline(always)]
fn absorb_as<const FMA: bool, const MASKED: bool, const CAP: bool>(
    scores: ScoreBlock,
    s: &mut [f32],
    visible: &VisibleRange,
    past: &mut OnlineSoftmax,
) {
    let (factor, cap) = (scores.scale * LOG2_E, scores.softcap.unwrap_or(1.0));
    for g in (0..QUERIES).step_by(GROUP) {
        let (lo, hi) = (group(&visible.lo, g), group(&visible.hi, g));
        let mut top = *group(&past.max, g);
        for (row, j) in s.chunks_exact_mut(QUERIES).take(scores.keys).zip(scores.first_key..) {
            let row = group_mut(row, g);
            for i in 0..GROUP {
                let x = if CAP {
                    cap * LOG2_E * tanh::<FMA>(row[i] * scores.scale / cap)
                } else {
                    row[i] * factor
                };
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
            (group_mut(&mut past.max, g), group_mut(&mut past.sum, g), group_mut(&mut past.rescale, g));
        for i in 0..GROUP {
            base[i] = if top[i] == f32::NEG_INFINITY { 0.0 } else { top[i] };
            shrink[i] = exp2::<FMA>(max[i] - base[i]);
            max[i] = top[i];
        }
        for row in s.chunks_exact_mut(QUERIES).take(scores.keys) {
            let row = group_mut(row, g);
            for i in 0..GROUP {
                // The same rounding as above, so that the largest score gives exactly 1.
                let x = if MASKED || CAP { row[i] } else { row[i] * factor };
                row[i] = exp2::<FMA>(x - base[i]);
                sum[i] += row[i];
            }
        }
        for i in 0..GROUP {
            total[i] = fma::<FMA>(total[i], shrink[i], sum[i]);
        }
    }
}

leveled! {
    /// Rounds probabilities in 0..=1 to the nearest E4M3 value of scale 256, ties to even; NaN stays.
    pub(super) fn round_to_e4m3(s: &mut [f32]) = round_to_e4m3_body;
}

#[inline(always)]
fn round_to_e4m3_body<const FMA: bool>(s: &mut [f32]) {
    for x in s {
        *x = nearest_e4m3(*x);
    }
}

/// Adding and subtracting 1.5·2^20 times the power of two of `x` rounds it to the three mantissa bits of E4M3. Below
/// 2^-14, the smallest normal value at this scale, the step is that of subnormals.
#[inline(always)]
fn nearest_e4m3(x: f32) -> f32 {
    let power = f32::from_bits((x.to_bits() & 0x7f80_0000).max(0x3880_0000));
    let shift = power * 1_572_864.0;
    (x + shift) - shift
}

leveled! {
    /// Backward of one block: `s` holds `q·k` and becomes probabilities, `dp` holds `dout·v` and becomes the
    /// gradient of `q·k` before the scale.
    pub(super) fn differentiate(
        scores: ScoreBlock, s: &mut [f32], dp: &mut [f32], visible: &VisibleRange, saved: &SavedQueries,
    ) = differentiate_body;
}

#[inline(always)]
fn differentiate_body<const FMA: bool>(
    scores: ScoreBlock,
    s: &mut [f32],
    dp: &mut [f32],
    visible: &VisibleRange,
    saved: &SavedQueries,
) {
    match (scores.masked, scores.softcap.is_some()) {
        (false, false) => differentiate_as::<FMA, false, false>(scores, s, dp, visible, saved),
        (false, true) => differentiate_as::<FMA, false, true>(scores, s, dp, visible, saved),
        (true, false) => differentiate_as::<FMA, true, false>(scores, s, dp, visible, saved),
        (true, true) => differentiate_as::<FMA, true, true>(scores, s, dp, visible, saved),
    }
}

#[inline(always)]
fn differentiate_as<const FMA: bool, const MASKED: bool, const CAP: bool>(
    scores: ScoreBlock,
    s: &mut [f32],
    dp: &mut [f32],
    visible: &VisibleRange,
    saved: &SavedQueries,
) {
    let (factor, cap) = (scores.scale * LOG2_E, scores.softcap.unwrap_or(1.0));
    for g in (0..QUERIES).step_by(GROUP) {
        let (lo, hi) = (group(&visible.lo, g), group(&visible.hi, g));
        let (lse, delta) = (group(&saved.lse, g), group(&saved.delta, g));
        let rows = s.chunks_exact_mut(QUERIES).zip(dp.chunks_exact_mut(QUERIES)).take(scores.keys);
        for ((s, dp), j) in rows.zip(scores.first_key..) {
            let (s, dp) = (group_mut(s, g), group_mut(dp, g));
            for i in 0..GROUP {
                let (x, slope) = if CAP {
                    let t = tanh::<FMA>(s[i] * scores.scale / cap);
                    (fma::<FMA>(cap * LOG2_E, t, -lse[i]), fma::<FMA>(-t, t, 1.0))
                } else {
                    (fma::<FMA>(s[i], factor, -lse[i]), 1.0)
                };
                let p = exp2_any::<FMA>(x);
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
    /// After the last block: the log-sum-exp of each query, and the factor that turns its weighted sum of values into
    /// its output. The sink, one logit or -inf, is one more score that no value belongs to.
    pub(super) fn conclude(past: &OnlineSoftmax, sink: f32, lse: &mut [f32; QUERIES], factor: &mut [f32; QUERIES])
        = conclude_body;
}

#[inline(always)]
fn conclude_body<const FMA: bool>(
    past: &OnlineSoftmax,
    sink: f32,
    lse: &mut [f32; QUERIES],
    factor: &mut [f32; QUERIES],
) {
    let sink = sink * LOG2_E;
    for i in 0..QUERIES {
        let (max, sum) = (past.max[i], past.sum[i]);
        let top = if sink > max { sink } else { max };
        // No key, or only scores of -inf, and no sink: nothing to see, unless it is NaN.
        let nothing = top == f32::NEG_INFINITY;
        let base = if nothing { 0.0 } else { top };
        let shift = exp2::<FMA>(max - base);
        let total = fma::<FMA>(sum, shift, exp2::<FMA>(sink - base));
        let found = fma::<FMA>(base, LN_2, ln::<FMA>(total));
        lse[i] = if nothing && !sum.is_nan() { f32::NEG_INFINITY } else { found };
        factor[i] = if nothing && !sum.is_nan() { 0.0 } else { shift / total };
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
