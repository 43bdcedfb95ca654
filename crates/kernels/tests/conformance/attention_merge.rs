//! Merging of attention over parts of the keys (ring attention).

use super::devices::*;
use ferrotron_kernels::{AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::DType;

fn log_add(a: f64, b: f64) -> f64 {
    let most = a.max(b);
    if most == f64::NEG_INFINITY { most } else { most + ((a - most).exp() + (b - most).exp()).ln() }
}

/// Pairs of lse: both finite, one −inf, both −inf; close together and far apart.
fn sums(rows: usize, seed: u64) -> Vec<f64> {
    let spread = numbers(DType::F32, seed, rows);
    let kind = |i: usize| (i as u64 * seed + i as u64 / 4) % 4;
    let value = |(i, x): (usize, &f64)| match kind(i) {
        0 => f64::NEG_INFINITY,
        1 => rounded(DType::F32, 200.0 * x),
        _ => *x,
    };
    spread.iter().enumerate().map(value).collect()
}

#[test]
fn partial_outputs_are_weighted_by_their_lse() {
    everywhere(|h, dtype| {
        for (tokens, heads, d) in [(0, 2, 4), (1, 1, 1), (7, 3, 5), (33, 2, 64), (3, 5, 130)] {
            for shift in [0, 1] {
                let (rows, n) = (tokens * heads, tokens * heads * d);
                let what = format!("{} {dtype} {tokens}x{heads}x{d} shifted {shift}", h.name);
                let (a, b) = (sums(rows, 3), sums(rows, 5));
                let seen = |lse: &[f64], i: usize, x: f64| if lse[i / d].is_finite() { x } else { 0.0 };
                let raw = numbers(DType::F32, 1, n);
                let out: Vec<f64> = raw.iter().enumerate().map(|(i, x)| seen(&a, i, *x)).collect();
                // The output of a part without keys is uninitialized.
                let raw = numbers(dtype, 2, n);
                let part: Vec<f64> =
                    (0..n).map(|i| if b[i / d].is_finite() { raw[i] } else { f64::NAN }).collect();
                // Contiguous, but not aligned to 16 bytes.
                let place = |dtype, shape: &[usize], values: &[f64]| {
                    let whole: Vec<f64> =
                        vec![0.0; shift].into_iter().chain(values.iter().copied()).collect();
                    let flat =
                        h.tensor(dtype, &[whole.len()], &whole).narrow(0, shift, values.len()).unwrap();
                    flat.view(shape).unwrap()
                };
                let (ot, lt) =
                    (place(DType::F32, &[tokens, heads, d], &out), place(DType::F32, &[tokens, heads], &a));
                let (pt, qt) =
                    (place(dtype, &[tokens, heads, d], &part), place(DType::F32, &[tokens, heads], &b));
                h.k.merge_attention(&h.s, &ot, &lt, &pt, &qt).unwrap();
                let total: Vec<f64> = a.iter().zip(&b).map(|(a, b)| log_add(*a, *b)).collect();
                let weight =
                    |lse: f64, total: f64| if lse == f64::NEG_INFINITY { 0.0 } else { (lse - total).exp() };
                let want = |i: usize| {
                    let (a, b, total) = (a[i / d], b[i / d], total[i / d]);
                    let new = if b == f64::NEG_INFINITY { 0.0 } else { part[i] * weight(b, total) };
                    out[i] * weight(a, total) + new
                };
                close(&what, DType::F32, &h.host(&ot), &(0..n).map(want).collect::<Vec<_>>(), 2e-7);
                for (ours, theirs) in h.host(&lt).iter().zip(&total) {
                    assert!(
                        ours == theirs || (ours - theirs).abs() <= 1.3e-7 * theirs.abs().max(1.0),
                        "{what}: {ours} {theirs}"
                    );
                }
            }
        }
    });
}

/// Keys split into two parts, given as packed sequences that may be empty: merged, they equal attention over all keys.
#[test]
fn merged_parts_equal_attention_over_all_keys() {
    everywhere(|h, dtype| {
        let (heads, d, tokens) = (2, 8, 11);
        let all = Sequences::Packed { q: &[0, 4, 4, 11], k: &[0, 4, 4, 11] };
        // The first sequence attends to its keys 0..1, then 1..4; the last to 0..7, then to none.
        let first = Sequences::Packed { q: &[0, 4, 4, 11], k: &[0, 1, 4, 11] };
        let second = Sequences::Packed { q: &[0, 0, 4, 11], k: &[0, 1, 4, 4] };
        let values = |seed| h.tensor(dtype, &[tokens, heads, d], &numbers(dtype, seed, tokens * heads * d));
        let (q, k, v) = (values(1), values(2), values(3));
        let scores = AttentionParams {
            scale: 0.5,
            softcap: None,
            causal: false,
            align: MaskAlign::TopLeft,
            left: None,
            right: None,
            fp8: false,
        };
        let run = |sequences: Sequences, keys: usize| {
            let out = h.poisoned(dtype, &[tokens, heads, d]);
            let lse = h.poisoned(DType::F32, &[tokens, heads]);
            let (k, v) = (k.narrow(0, 0, keys).unwrap(), v.narrow(0, 0, keys).unwrap());
            let a = AttentionForward { q: &q, k: &k, v: &v, sink: None, out: &out, lse: &lse };
            h.k.attention_forward(&h.s, &scores, sequences, &a).unwrap();
            (out, lse)
        };
        let (want, want_lse) = run(all, tokens);
        let ((out, lse), (part, part_lse)) = (run(first, tokens), run(second, 4));
        let sum = h.poisoned(DType::F32, &[tokens, heads, d]);
        h.k.copy(&h.s, &out, &sum).unwrap();
        h.k.merge_attention(&h.s, &sum, &lse, &part, &part_lse).unwrap();
        let room = if dtype == DType::F32 { 1e-6 } else { 1e-2 };
        let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= room);
        assert!(near(&h.host(&sum), &h.host(&want)), "{} {dtype}", h.name);
        assert!(near(&h.host(&lse), &h.host(&want_lse)), "{} {dtype}", h.name);
    });
}

#[test]
fn invalid_parts_are_errors() {
    everywhere(|h, dtype| {
        let make = |dtype, shape: &[usize]| h.poisoned(dtype, shape);
        let (out, lse) = (make(DType::F32, &[4, 2, 3]), make(DType::F32, &[4, 2]));
        let (part, part_lse) = (make(dtype, &[4, 2, 3]), make(DType::F32, &[4, 2]));
        let transposed = make(DType::F32, &[2, 4]).transpose(0, 1).unwrap();
        for (what, result) in [
            ("rows", h.k.merge_attention(&h.s, &out, &lse, &make(dtype, &[3, 2, 3]), &part_lse)),
            (
                "sums",
                h.k.merge_attention(&h.s, &out, &make(DType::F32, &[8]), &part, &make(DType::F32, &[8])),
            ),
            ("strides", h.k.merge_attention(&h.s, &out, &transposed, &part, &part_lse)),
            ("type", h.k.merge_attention(&h.s, &make(DType::BF16, &[4, 2, 3]), &lse, &part, &part_lse)),
            (
                "type of the part",
                h.k.merge_attention(&h.s, &out, &lse, &make(DType::I32, &[4, 2, 3]), &part_lse),
            ),
            (
                "nothing to a row",
                h.k.merge_attention(
                    &h.s,
                    &make(DType::F32, &[4, 2, 0]),
                    &lse,
                    &make(dtype, &[4, 2, 0]),
                    &part_lse,
                ),
            ),
        ] {
            assert!(result.is_err(), "{} {dtype}: {what}", h.name);
        }
    });
}
