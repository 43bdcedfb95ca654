//! Gradients of attention over a part of the keys, as ring attention takes them: output and log-sum-exp are those of all
//! keys, so that values of other parts, of any magnitude, enter every query's delta = Σ dout·out.

use super::devices::*;
use ferrotron_kernels::{AttentionBackward, AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{DType, Tensor};

/// Queries, keys of a part, query and key heads.
const TQ: usize = 72;
const KEYS: usize = 40;
const N: usize = 2;
const G: usize = 1;

struct Case {
    d: usize,
    dv: usize,
    softcap: Option<f32>,
    /// Magnitudes of the parts' keys and values.
    parts: Vec<[f64; 2]>,
}

/// A sum, and to what its rounding errors are relative: the magnitudes of its terms, and of the terms that those are
/// differences of.
#[derive(Clone, Default)]
struct Sum {
    value: Vec<f64>,
    size: Vec<f64>,
    before: Vec<f64>,
}

impl Sum {
    fn zeros(n: usize) -> Sum {
        Sum { value: vec![0.0; n], size: vec![0.0; n], before: vec![0.0; n] }
    }

    /// Adds `x`, a difference of numbers as large as `before`, times `row`.
    fn add(&mut self, at: usize, (x, before): (f64, f64), row: &[f64]) {
        for (c, y) in row.iter().enumerate() {
            self.value[at + c] += x * y;
            self.size[at + c] += (x * y).abs();
            self.before[at + c] += before * y.abs();
        }
    }

    fn check(&self, what: &str, dtype: DType, ours: &[f64]) {
        // bf16: p, ds and the result are rounded, each by at most 2^-8 of its value.
        let room = if dtype == DType::F32 { 2e-5 } else { 3.0 * eps(dtype) };
        for (i, got) in ours.iter().enumerate() {
            let off = (got - self.value[i]).abs();
            let room = room * self.size[i] + 2e-6 * self.before[i] + 1e-35;
            assert!(off <= room, "{what} [{i}]: {got} instead of {}, allowed {room:.1e}", self.value[i]);
        }
    }
}

impl Case {
    fn check(&self, h: &TestDevice, dtype: DType) {
        let (d, dv, cp) = (self.d, self.dv, self.parts.len());
        let what = format!("{} {dtype} {d} {dv} {:?} {:?}", h.name, self.softcap, self.parts);
        let scale = 1.5 / (d as f32).sqrt();
        let scores = AttentionParams {
            scale,
            softcap: self.softcap,
            causal: false,
            align: MaskAlign::TopLeft,
            left: None,
            right: None,
            fp8: false,
        };
        // A part's keys and values, at its magnitudes (powers of two).
        let part = |seed: usize, width: usize, which: usize| -> Vec<Vec<f64>> {
            let draw = |p: usize| numbers(dtype, (seed + p) as u64, KEYS * G * width).into_iter();
            (0..cp).map(|p| draw(p).map(|x| x * self.parts[p][which]).collect()).collect()
        };
        let (k, v) = (part(10, d, 0), part(20, dv, 1));
        let (q, dout) = (numbers(dtype, 1, TQ * N * d), numbers(dtype, 2, TQ * N * dv));
        let (mut out, mut lse) = (vec![0.0; TQ * N * dv], vec![0.0; N * TQ]);
        let mut dq = vec![Sum::zeros(TQ * N * d); cp];
        let mut dk = vec![Sum::zeros(KEYS * G * d); cp];
        let mut dv_sums = vec![Sum::zeros(KEYS * G * dv); cp];
        for (i, head) in (0..TQ).flat_map(|i| (0..N).map(move |head| (i, head))) {
            let (row, to) = (&q[(i * N + head) * d..][..d], (i * N + head) * dv);
            let at = |j: usize, width: usize| (j * G + head / (N / G)) * width;
            let logit = |p: usize, j: usize| {
                let s = f64::from(scale) * dot(row, &k[p][at(j, d)..][..d]);
                self.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
            };
            let logits: Vec<Vec<f64>> = (0..cp).map(|p| (0..KEYS).map(|j| logit(p, j)).collect()).collect();
            let total: f64 = logits.iter().flatten().map(|s| s.exp()).sum();
            // As the kernels read it.
            let all = rounded(DType::F32, total.ln());
            lse[head * TQ + i] = all;
            for (p, j) in (0..cp).flat_map(|p| (0..KEYS).map(move |j| (p, j))) {
                let weight = (logits[p][j] - all).exp();
                for c in 0..dv {
                    out[to + c] += weight * v[p][at(j, dv) + c];
                }
            }
            let up = &dout[to..][..dv];
            let saved: Vec<f64> = out[to..][..dv].iter().map(|x| rounded(dtype, *x)).collect();
            let delta = dot(&saved, up);
            let magnitude = |x: &[f64]| x.iter().zip(up).map(|(x, y)| (x * y).abs()).sum::<f64>();
            for (p, j) in (0..cp).flat_map(|p| (0..KEYS).map(move |j| (p, j))) {
                let weight = (logits[p][j] - all).exp();
                let slope = self.softcap.map_or(1.0, |c| 1.0 - (logits[p][j] / f64::from(c)).powi(2));
                let (value, factor) = (&v[p][at(j, dv)..][..dv], weight * slope * f64::from(scale));
                let ds = (factor * (dot(up, value) - delta), factor * (magnitude(value) + magnitude(&saved)));
                dq[p].add((i * N + head) * d, ds, &k[p][at(j, d)..][..d]);
                dk[p].add(at(j, d), ds, row);
                dv_sums[p].add(at(j, dv), (weight, weight), up);
            }
        }
        let tensor =
            |heads, width, x: &[f64]| h.tensor(dtype, &[1, x.len() / heads / width, heads, width], x);
        let (q_t, out_t, dout_t) = (tensor(N, d, &q), tensor(N, dv, &out), tensor(N, dv, &dout));
        let lse_t = h.tensor(DType::F32, &[1, N, TQ], &lse);
        for p in 0..cp {
            let (k_t, v_t) = (tensor(G, d, &k[p]), tensor(G, dv, &v[p]));
            let like = |t: &Tensor| h.poisoned(dtype, t.shape());
            let (dq_t, dk_t, dv_t) = (like(&q_t), like(&k_t), like(&v_t));
            let forward =
                AttentionForward { q: &q_t, k: &k_t, v: &v_t, sink: None, out: &out_t, lse: &lse_t };
            let b =
                AttentionBackward { forward, dout: &dout_t, dq: &dq_t, dk: &dk_t, dv: &dv_t, dsink: None };
            h.k.attention_backward(&h.s, &scores, Sequences::Batch, &b).unwrap();
            for (name, sum, t) in [("dq", &dq[p], &dq_t), ("dk", &dk[p], &dk_t), ("dv", &dv_sums[p], &dv_t)] {
                sum.check(&format!("{what} part {p} {name}"), dtype, &h.host(t));
            }
        }
    }
}

#[test]
fn parts_of_very_different_magnitude_have_their_own_gradients() {
    let small = 2f64.powi(-30);
    let parts = [
        vec![[1.0, 1.0], [1.0, 0.0]],
        vec![[1.0, small], [1.0, 1024.0]],
        vec![[1.0, 1.0], [2f64.powi(-12), small]],
        vec![[1.0, 0.0], [1.0, 1.0], [0.5, small], [2f64.powi(-6), 65536.0]],
    ];
    for h in devices() {
        for dtype in [DType::F32, DType::BF16] {
            for parts in &parts {
                for (d, dv) in [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)] {
                    Case { d, dv, softcap: None, parts: parts.clone() }.check(&h, dtype);
                }
                for d in [128, 256] {
                    Case { d, dv: d, softcap: Some(3.0), parts: parts.clone() }.check(&h, dtype);
                }
            }
        }
    }
}
