//! FP8 attention, where the GPU supports it: the output is that of E4M3 inputs, within the precision of probabilities and
//! accumulators.

use super::attention_fp8_probs::{Sizes, row};
use super::devices::*;
use ferrotron_kernels::{AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::fp8::E4m3;
use ferrotron_tensor::{DType, Float, Tensor};

/// Values rounded to E4M3 under the largest power-of-two scale that does not overflow, and their amax.
fn rounded(x: &[f64]) -> (Vec<f64>, f64) {
    let most = x.iter().filter(|x| !x.is_nan()).fold(0.0f64, |m, x| m.max(x.abs()));
    let scale = if most > 0.0 { (448.0 / most).log2().floor().exp2() } else { 1.0 };
    (x.iter().map(|x| <E4m3 as Float>::from_f32((x * scale) as f32).to_f64() / scale).collect(), most)
}

fn is_hopper(h: &TestDevice) -> bool {
    h.s.device().gpu().is_some_and(|c| c.capability == (9, 0))
}

struct Case {
    z: Sizes,
    batch: usize,
    scores: AttentionParams,
    sink: bool,
    /// Row stride of q, k and v beyond the row, and the offset of the first row.
    late: usize,
    /// What q and k are multiplied by, a power of two.
    size: f64,
}

fn scores(d: usize) -> AttentionParams {
    let scale = 4.0 / (d as f32).sqrt();
    AttentionParams {
        scale,
        softcap: None,
        causal: true,
        align: MaskAlign::BottomRight,
        left: None,
        right: None,
        fp8: true,
    }
}

impl Case {
    fn new(d: usize, dv: usize, [tq, tk]: [usize; 2]) -> Case {
        Case {
            z: Sizes { tq, tk, n: 4, g: 2, d, dv },
            batch: 2,
            scores: scores(d),
            sink: false,
            late: 0,
            size: 1.0,
        }
    }

    /// Random values, and the tensor view that holds them.
    fn operand(
        &self,
        h: &TestDevice,
        seed: u64,
        tokens: usize,
        heads: usize,
        d: usize,
    ) -> (Vec<f64>, Tensor) {
        let size = if seed < 3 { self.size } else { 1.0 };
        let draw = numbers(DType::BF16, seed, self.batch * tokens * heads * d);
        let x: Vec<f64> = draw.into_iter().map(|x| x * size).collect();
        let row = heads * d + self.late;
        let mut all = vec![f64::NAN; self.batch * tokens * row];
        for (i, from) in x.chunks(heads * d).enumerate() {
            all[i * row + self.late..][..heads * d].copy_from_slice(from);
        }
        let t = h.tensor(DType::BF16, &[self.batch, tokens, row], &all);
        let t = t.narrow(2, self.late, heads * d).unwrap().view(&[self.batch, tokens, heads, d]).unwrap();
        (x, t)
    }

    fn check(&self, h: &TestDevice) {
        let z = &self.z;
        let what = format!("{} {z:?} {:?} {} {} {:e}", h.name, self.scores, self.sink, self.late, self.size);
        let (q, q_t) = self.operand(h, 1, z.tq, z.n, z.d);
        let (k, k_t) = self.operand(h, 2, z.tk, z.g, z.d);
        let (v, v_t) = self.operand(h, 3, z.tk, z.g, z.dv);
        let ((q, q_most), (k, k_most), (v, v_most)) = (rounded(&q), rounded(&k), rounded(&v));
        let sink: Vec<f64> = numbers(DType::F32, 4, z.n);
        let sink_t = self.sink.then(|| h.tensor(DType::F32, &[z.n], &sink));
        let magnitudes = h.tensor(DType::F32, &[3], &[q_most, k_most, v_most]);
        let out = h.poisoned(DType::BF16, &[self.batch, z.tq, z.n, z.dv]);
        let lse = h.poisoned(DType::F32, &[self.batch, z.n, z.tq]);
        let a = AttentionForward { q: &q_t, k: &k_t, v: &v_t, sink: sink_t.as_ref(), out: &out, lse: &lse };
        let run = || h.k.attention_fp8(&h.s, &self.scores, Sequences::Batch, &a, &magnitudes).unwrap();
        let done = run();
        assert_eq!(done, is_hopper(h), "{what}");
        if !done {
            return;
        }
        let (ours, ours_lse) = (h.host(&out), h.host(&lse));
        run();
        assert_eq!(ours, h.host(&out), "{what}: the same bits twice");
        let exact = AttentionParams { fp8: false, ..self.scores };
        let (mut error, mut size, mut seen) = (0.0, 0.0, 0);
        for b in 0..self.batch {
            let of = |x: &Vec<f64>| x[b * x.len() / self.batch..][..x.len() / self.batch].to_vec();
            let (q, k, v) = (of(&q), of(&k), of(&v));
            for (head, i) in (0..z.n).flat_map(|head| (0..z.tq).map(move |i| (head, i))) {
                let got = &ours[((b * z.tq + i) * z.n + head) * z.dv..][..z.dv];
                let want = row(z, &exact, [&q, &k, &v], (head, i), self.sink.then(|| sink[head]));
                if want.weight.iter().all(|x| x.is_nan() || *x == 0.0) {
                    assert!(got.iter().all(|x| *x == 0.0), "{what}: {b} {head} {i} sees nothing");
                    continue;
                }
                seen += 1;
                for (c, got) in got.iter().enumerate() {
                    let off = (got - want.out[c]).abs();
                    // Half an ulp of E4M3 (three mantissa bits), and half of its smallest subnormal.
                    let room = want.weight[c] / 16.0 + z.tk as f64 / 2f64.powi(18) + 2.0 * eps(DType::BF16);
                    assert!(off <= room, "{what} {b} {head} {i} {c}: {got} {}", want.out[c]);
                    (error, size) = (error + off * off, size + want.out[c] * want.out[c]);
                }
                let off = (ours_lse[(b * z.n + head) * z.tq + i] - want.lse).abs();
                assert!(off <= 4e-3, "{what} {b} {head} {i}: lse off by {off}");
            }
        }
        let error = (error / size).sqrt();
        // A query that sees one key returns its value exactly, and equal probabilities are not rounded.
        let least = if z.tk > 1 && self.size == 1.0 { 0.002 } else { 0.0 };
        assert!(seen > 0 && (least..0.05).contains(&error), "{what}: {error}");
    }
}

#[test]
fn fp8_attention_matches_attention_on_dequantized_inputs() {
    for h in devices() {
        for (d, dv) in [(16, 16), (64, 64), (64, 48), (48, 64), (96, 96), (128, 128), (128, 64)] {
            for tokens in [[1, 1], [200, 330], [129, 129], [65, 515], [300, 200]] {
                Case::new(d, dv, tokens).check(&h);
            }
        }
        for d in [64, 128] {
            let case = || Case::new(d, d, [260, 400]);
            Case { sink: true, ..case() }.check(&h);
            Case { late: 3, ..case() }.check(&h);
            Case { late: 8, ..case() }.check(&h);
            Case { scores: AttentionParams { causal: false, ..scores(d) }, ..case() }.check(&h);
            Case { scores: AttentionParams { align: MaskAlign::TopLeft, ..scores(d) }, ..case() }.check(&h);
            Case { scores: AttentionParams { left: Some(70), ..scores(d) }, ..case() }.check(&h);
            // Logits that f32 cannot tell from 0: the mean of the values that a query sees.
            for size in [-40, -66, -70, -110].map(|e| 2f64.powi(e)) {
                Case { size, ..case() }.check(&h);
                let left = AttentionParams { left: Some(70), ..scores(d) };
                Case { size, scores: left, ..case() }.check(&h);
            }
        }
    }
}

/// Sums over many tiles are promoted to f32, beyond the precision of tensor-core accumulators: equal values come out
/// unchanged.
#[test]
fn long_sequences_accumulate_in_f32() {
    for h in devices() {
        if !is_hopper(&h) {
            eprintln!("SKIPPED on {}: FP8 attention kernels need Hopper", h.name);
            continue;
        }
        let (tokens, d) = (6000, 128);
        let shape = [1, tokens, 1, d];
        let ones = vec![1.0; tokens * d];
        let q = h.tensor(DType::BF16, &shape, &vec![0.0; tokens * d]);
        let v = h.tensor(DType::BF16, &shape, &ones);
        let magnitudes = h.tensor(DType::F32, &[3], &[0.0, 0.0, 1.0]);
        let (out, lse) = (h.poisoned(DType::BF16, &shape), h.poisoned(DType::F32, &[1, 1, tokens]));
        let a = AttentionForward { q: &q, k: &q, v: &v, sink: None, out: &out, lse: &lse };
        assert!(h.k.attention_fp8(&h.s, &scores(d), Sequences::Batch, &a, &magnitudes).unwrap());
        assert_eq!(h.host(&out), ones);
    }
}

/// Problems without an FP8 kernel are rejected.
#[test]
fn unsupported_fp8_problems_are_errors() {
    for h in devices() {
        let left_alone = |dtype, d: usize, s: &AttentionParams, sequences: Sequences, what: &str| {
            let z = Sizes { tq: 40, tk: 40, n: 2, g: 1, d, dv: d };
            let batch = matches!(sequences, Sequences::Batch);
            let [q, k, v, o] = z.shapes().map(|shape| {
                let shape = if batch { &shape[..] } else { &shape[1..] };
                h.tensor(dtype, shape, &vec![0.5; shape.iter().product()])
            });
            let lse = h.poisoned(DType::F32, if batch { &[1, 2, 40] } else { &[40, 2] });
            let magnitudes = h.tensor(DType::F32, &[3], &[0.5; 3]);
            let a = AttentionForward { q: &q, k: &k, v: &v, sink: None, out: &o, lse: &lse };
            assert!(!h.k.attention_fp8(&h.s, s, sequences, &a, &magnitudes).unwrap(), "{what}");
            assert!(h.host(&o).iter().all(|x| *x == 0.5), "{what}");
        };
        let (bf16, s) = (DType::BF16, scores(64));
        left_alone(bf16, 24, &s, Sequences::Batch, "channels");
        left_alone(bf16, 144, &s, Sequences::Batch, "many channels");
        left_alone(DType::F32, 64, &s, Sequences::Batch, "f32");
        left_alone(bf16, 64, &AttentionParams { softcap: Some(5.0), ..s }, Sequences::Batch, "a soft cap");
        left_alone(bf16, 64, &AttentionParams { fp8: false, ..s }, Sequences::Batch, "whole numbers");
        let offsets = [0, 17, 40];
        left_alone(bf16, 64, &s, Sequences::Packed { q: &offsets, k: &offsets }, "packed sequences");
    }
}
