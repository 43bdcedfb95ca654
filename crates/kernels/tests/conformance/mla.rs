//! Keys of multi-head latent attention (MLA).

use super::devices::*;
use ferrotron_tensor::{DType, Tensor};

/// Tokens, heads, channels per head, channels shared by all heads: DeepSeek-V3's sizes, odd sizes, single channels, and
/// more than a thread block sums at once.
const SIZES: [[usize; 4]; 8] = [
    [0, 2, 4, 4],
    [1, 1, 1, 1],
    [5, 3, 7, 2],
    [3, 128, 128, 64],
    [70, 4, 16, 8],
    [2, 5, 24, 9],
    [2, 3, 8, 2100],
    [33, 2, 1, 130],
];

#[test]
fn mla_keys_concatenate_and_split() {
    everywhere(|h, dtype| {
        for ([t, n, a, b], framed) in SIZES.into_iter().flat_map(|z| [(z, false), (z, true)]) {
            let what = format!("{} {dtype} {t}x{n}x({a}+{b}) framed {framed}", h.name);
            let (own, shared) = (numbers(dtype, 1, t * n * a), numbers(dtype, 2, t * b));
            let own_t = h.placed(framed, dtype, &[t, n, a], &own);
            let shared_t = h.placed(framed, dtype, &[t, b], &shared);
            let k_t = h.placed(framed, dtype, &[t, n, a + b], &vec![f64::NAN; t * n * (a + b)]);
            h.k.mla_concat_keys(&h.s, &own_t.view, &shared_t.view, &k_t.view).unwrap();
            let heads = (0..t).flat_map(|i| (0..n).map(move |j| (i, j)));
            let row = |(i, j): (usize, usize)| [&own[(i * n + j) * a..][..a], &shared[i * b..][..b]].concat();
            let want: Vec<f64> = heads.flat_map(row).collect();
            assert_eq!(h.inside(&k_t), want, "{what}");

            let dk = numbers(dtype, 3, t * n * (a + b));
            let dk_t = h.placed(framed, dtype, &[t, n, a + b], &dk);
            let own_t = h.placed(framed, dtype, &[t, n, a], &vec![f64::NAN; t * n * a]);
            let shared_t = h.placed(framed, dtype, &[t, b], &vec![f64::NAN; t * b]);
            h.k.mla_split_keys(&h.s, &dk_t.view, &own_t.view, &shared_t.view).unwrap();
            let want: Vec<f64> = dk.chunks((a + b).max(1)).flat_map(|row| row[..a].to_vec()).collect();
            assert_eq!(h.inside(&own_t), want, "{what}");
            let sum = |(i, c): (usize, usize)| (0..n).map(|j| dk[(i * n + j) * (a + b) + a + c]).sum::<f64>();
            let want: Vec<f64> = (0..t).flat_map(|i| (0..b).map(move |c| (i, c))).map(sum).collect();
            close(&what, dtype, &h.inside(&shared_t), &want, 1e-6 * (n as f64).sqrt());
        }
    });
}

/// Sums over heads are bit-equal from run to run.
#[test]
fn sums_over_heads_are_deterministic() {
    everywhere(|h, dtype| {
        let [t, n, a, b] = [9, 37, 16, 24];
        let k = h.tensor(dtype, &[t, n, a + b], &numbers(dtype, 5, t * n * (a + b)));
        let run = || {
            let (own, shared) = (h.poisoned(dtype, &[t, n, a]), h.poisoned(dtype, &[t, b]));
            h.k.mla_split_keys(&h.s, &k, &own, &shared).unwrap();
            (h.host(&own), h.host(&shared))
        };
        assert_eq!(run(), run(), "{} {dtype}", h.name);
    });
}

#[test]
fn invalid_key_parts_are_errors() {
    everywhere(|h, dtype| {
        let make = |shape: &[usize]| h.poisoned(dtype, shape);
        let (own, shared, k) = (make(&[4, 2, 3]), make(&[4, 5]), make(&[4, 2, 8]));
        let other = h.poisoned(if dtype == DType::F32 { DType::BF16 } else { DType::F32 }, &[4, 5]);
        let transposed = make(&[5, 4]).transpose(0, 1).unwrap();
        let cases: [(&str, &Tensor, &Tensor, &Tensor); 7] = [
            ("tokens", &make(&[3, 2, 3]), &shared, &k),
            ("heads", &make(&[4, 1, 3]), &shared, &k),
            ("channels", &own, &make(&[4, 4]), &k),
            ("nothing shared", &make(&[4, 2, 8]), &make(&[4, 0]), &k),
            ("axes", &make(&[4, 6]), &shared, &k),
            ("types", &own, &other, &k),
            ("strides", &own, &transposed, &k),
        ];
        for (what, own, shared, k) in cases {
            assert!(h.k.mla_concat_keys(&h.s, own, shared, k).is_err(), "{} {dtype}: {what}", h.name);
            assert!(h.k.mla_split_keys(&h.s, k, own, shared).is_err(), "{} {dtype}: {what}", h.name);
        }
        let i = |shape: &[usize]| h.poisoned(DType::I32, shape);
        assert!(
            h.k.mla_concat_keys(&h.s, &i(&[4, 2, 3]), &i(&[4, 5]), &i(&[4, 2, 8])).is_err(),
            "{}",
            h.name
        );
    });
}
