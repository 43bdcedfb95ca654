//! Attention with probabilities rounded to FP8: exact by definition where all keys of a query fit one tile of every kernel,
//! within the format's error where they span several.

use super::devices::*;
use ferrotron_kernels::{AttentionBackward, AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::fp8::E4m3;
use ferrotron_tensor::{DType, Float, Tensor};

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub tq: usize,
    pub tk: usize,
    pub n: usize,
    pub g: usize,
    pub d: usize,
    pub dv: usize,
}

impl Sizes {
    pub fn shapes(&self) -> [[usize; 4]; 4] {
        let &Sizes { tq, tk, n, g, d, dv } = self;
        [[1, tq, n, d], [1, tk, g, d], [1, tk, g, dv], [1, tq, n, dv]]
    }
}

fn scores(d: usize, softcap: Option<f32>, fp8: bool) -> AttentionParams {
    let scale = 4.0 / (d as f32).sqrt();
    AttentionParams {
        scale,
        softcap,
        causal: true,
        align: MaskAlign::BottomRight,
        left: None,
        right: None,
        fp8,
    }
}

/// The nearest E4M3 value of scale 256, and by how much it would change if `p` were slightly larger or smaller.
fn nearest_e4m3(p: f64) -> (f64, f64) {
    let at = |p: f64| <E4m3 as Float>::from_f32((p * 256.0) as f32).to_f64() / 256.0;
    (at(p), at(p * (1.0 + 1e-4)) - at(p * (1.0 - 1e-4)))
}

/// Result of a query: output, its uncertainty from rounding ties, `Σ p·|v| / Σ p` per channel, and lse.
pub struct Row {
    pub out: Vec<f64>,
    slack: Vec<f64>,
    pub weight: Vec<f64>,
    pub lse: f64,
}

/// Query `i` of a head, with probabilities rounded or not.
pub fn row(
    z: &Sizes,
    s: &AttentionParams,
    [q, k, v]: [&[f64]; 3],
    (head, i): (usize, usize),
    sink: Option<f64>,
) -> Row {
    let (from, kv) = ((i * z.n + head) * z.d, head / (z.n / z.g));
    let at = i as isize + if s.align == MaskAlign::BottomRight { z.tk as isize - z.tq as isize } else { 0 };
    let seen = |j: &usize| {
        let ahead = *j as isize - at;
        (!s.causal || ahead <= 0) && s.left.is_none_or(|left| -ahead <= left as isize)
    };
    let score = |j: usize| {
        let x = f64::from(s.scale) * dot(&q[from..][..z.d], &k[(j * z.g + kv) * z.d..][..z.d]);
        s.softcap.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh())
    };
    let all: Vec<(usize, f64)> = (0..z.tk).filter(seen).map(|j| (j, score(j))).collect();
    let most = all.iter().fold(f64::NEG_INFINITY, |m, (_, x)| m.max(*x));
    let sum: f64 = all.iter().map(|(_, x)| (x - most).exp()).sum();
    let total = sum + sink.map_or(0.0, |x| (x - most).exp());
    let mut r =
        Row { out: vec![0.0; z.dv], slack: vec![0.0; z.dv], weight: vec![0.0; z.dv], lse: most + total.ln() };
    for (j, x) in all {
        let p = (x - most).exp();
        let (rounded, may) = if s.fp8 { nearest_e4m3(p) } else { (p, 0.0) };
        for (c, v) in v[(j * z.g + kv) * z.dv..][..z.dv].iter().enumerate() {
            r.out[c] += rounded * v / total;
            r.slack[c] += may * v.abs() / total;
            r.weight[c] += p * v.abs() / total;
        }
    }
    r
}

/// Random inputs, and the tensors that hold them.
struct Case {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    sink: Vec<f64>,
    tensors: [Tensor; 3],
    sink_t: Tensor,
    out: Tensor,
    lse: Tensor,
}

impl Case {
    fn new(h: &TestDevice, dtype: DType, z: &Sizes) -> Case {
        let [qs, ks, vs, os] = z.shapes();
        let numbers = |seed, shape: &[usize]| numbers(dtype, seed, shape.iter().product());
        let (q, k, v) = (numbers(1, &qs), numbers(2, &ks), numbers(3, &vs));
        let sink = super::devices::numbers(DType::F32, 4, z.n);
        let tensors = [h.tensor(dtype, &qs, &q), h.tensor(dtype, &ks, &k), h.tensor(dtype, &vs, &v)];
        let sink_t = h.tensor(DType::F32, &[z.n], &sink);
        let (out, lse) = (h.poisoned(dtype, &os), h.poisoned(DType::F32, &[1, z.n, z.tq]));
        Case { q, k, v, sink, tensors, sink_t, out, lse }
    }

    fn arguments(&self, sink: bool) -> AttentionForward<'_> {
        let [q, k, v] = &self.tensors;
        AttentionForward { q, k, v, sink: sink.then_some(&self.sink_t), out: &self.out, lse: &self.lse }
    }

    fn row(&self, z: &Sizes, s: &AttentionParams, at: (usize, usize), sink: bool) -> Row {
        row(z, s, [&self.q, &self.k, &self.v], at, sink.then(|| self.sink[at.0]))
    }
}

const WIDTHS: [(usize, usize); 6] = [(8, 8), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];

#[test]
fn probabilities_of_one_tile_match_the_definition() {
    everywhere(|h, dtype| {
        if dtype == DType::F16 {
            return;
        }
        for ((d, dv), softcap) in WIDTHS.into_iter().flat_map(|w| [(w, None), (w, Some(5.0))]) {
            // At most 16 keys, and queries that see fewer.
            let (z, sink) = (Sizes { tq: 21, tk: 16, n: 4, g: 2, d, dv }, softcap.is_some());
            let (case, s) = (Case::new(h, dtype, &z), scores(d, softcap, true));
            h.k.attention_forward(&h.s, &s, Sequences::Batch, &case.arguments(sink)).unwrap();
            let (out, lse) = (h.host(&case.out), h.host(&case.lse));
            let (mut changed, mut counted) = (0.0f64, 0);
            for at in (0..z.n).flat_map(|head| (0..z.tq).map(move |i| (head, i))) {
                let what = format!("{} {dtype} {d} {dv} {softcap:?} {at:?}", h.name);
                let ours = &out[(at.1 * z.n + at.0) * dv..][..dv];
                if at.1 + z.tk < z.tq {
                    assert!(ours.iter().all(|x| *x == 0.0), "{what}: it sees nothing");
                    continue;
                }
                let (want, exact) = (
                    case.row(&z, &s, at, sink),
                    case.row(&z, &AttentionParams { fp8: false, ..s }, at, sink),
                );
                let wanted = want.out.iter().zip(&want.slack).zip(&exact.out);
                for (c, (our, ((want, slack), exact))) in ours.iter().zip(wanted).enumerate() {
                    let room = 1.01 * eps(dtype) * want.abs() + slack + 2e-5;
                    assert!((our - want).abs() <= room, "{what} {c}: {our} {want}");
                    counted += 1;
                    changed += f64::from((want - exact).abs() > 3.0 * room);
                }
                let room = if dtype == DType::F32 { 2e-5 } else { 2e-3 };
                assert!((lse[at.0 * z.tq + at.1] - want.lse).abs() <= room, "{what} lse");
            }
            // Many outputs differ from those with unrounded probabilities.
            assert!(changed > 0.25 * counted as f64, "{dtype} {d}: {changed} of {counted}");
        }
    });
}

#[test]
fn probabilities_of_many_tiles_are_within_e4m3_precision() {
    everywhere(|h, dtype| {
        if dtype == DType::F16 {
            return;
        }
        for ((d, dv), softcap) in WIDTHS.into_iter().zip([None, None, Some(4.0), None, None, Some(6.0)]) {
            let z = Sizes { tq: 200, tk: 330, n: 2, g: 1, d, dv };
            let (case, s) = (Case::new(h, dtype, &z), scores(d, softcap, true));
            let exact = AttentionParams { fp8: false, ..s };
            h.k.attention_forward(&h.s, &s, Sequences::Batch, &case.arguments(true)).unwrap();
            let (out, lse) = (h.host(&case.out), h.host(&case.lse));
            let (mut error, mut size) = (0.0, 0.0);
            for at in (0..z.n).flat_map(|head| (0..z.tq).map(move |i| (head, i))) {
                let want = case.row(&z, &exact, at, true);
                for (c, ours) in out[(at.1 * z.n + at.0) * dv..][..dv].iter().enumerate() {
                    let off = (ours - want.out[c]).abs();
                    // Half an ulp of E4M3 (three mantissa bits), and half of its smallest subnormal.
                    let room = want.weight[c] / 16.0 + 330.0 / 2f64.powi(18) + 2.0 * eps(dtype);
                    assert!(off <= room, "{} {dtype} {d} {at:?} {c}: {ours} {}", h.name, want.out[c]);
                    (error, size) = (error + off * off, size + want.out[c] * want.out[c]);
                }
                let room = if dtype == DType::F32 { 2e-5 } else { 2e-3 };
                assert!((lse[at.0 * z.tq + at.1] - want.lse).abs() <= room, "{} {dtype} {d} lse", h.name);
            }
            let error = (error / size).sqrt();
            assert!((0.005..0.05).contains(&error), "{} {dtype} {d}: {error}", h.name);
        }
    });
}

/// Packed sequences are bit-equal to each sequence alone; the backward pass does not round probabilities.
#[test]
fn only_the_forward_pass_rounds_probabilities() {
    everywhere(|h, dtype| {
        let z = Sizes { tq: 150, tk: 150, n: 2, g: 1, d: 64, dv: 64 };
        let (case, s) = (Case::new(h, dtype, &z), scores(64, None, true));
        if dtype == DType::F16 {
            let refused = h.k.attention_forward(&h.s, &s, Sequences::Batch, &case.arguments(false));
            assert!(refused.unwrap_err().to_string().contains("f16"));
            return;
        }
        let offsets = [0, 70, 150];
        let flat = |t: &Tensor| t.select(0, 0).unwrap();
        let [q, k, v] = [0, 1, 2].map(|i| flat(&case.tensors[i]));
        let (out, lse) = (h.poisoned(dtype, &[150, 2, 64]), h.poisoned(DType::F32, &[150, 2]));
        let f = AttentionForward { q: &q, k: &k, v: &v, sink: None, out: &out, lse: &lse };
        let packed = Sequences::Packed { q: &offsets, k: &offsets };
        h.k.attention_forward(&h.s, &s, packed, &f).unwrap();
        for w in offsets.windows(2) {
            let (from, n) = (w[0] as usize, (w[1] - w[0]) as usize);
            let part = |t: &Tensor| t.narrow(1, from, n).unwrap();
            let [q, k, v] = [0, 1, 2].map(|i| part(&case.tensors[i]));
            let (one, lse) = (h.poisoned(dtype, &[1, n, 2, 64]), h.poisoned(DType::F32, &[1, 2, n]));
            let f = AttentionForward { q: &q, k: &k, v: &v, sink: None, out: &one, lse: &lse };
            h.k.attention_forward(&h.s, &s, Sequences::Batch, &f).unwrap();
            let all = h.host(&out.narrow(0, from, n).unwrap());
            assert_eq!(all, h.host(&one), "{} {dtype} {from}", h.name);
        }
        h.k.attention_forward(&h.s, &s, Sequences::Batch, &case.arguments(false)).unwrap();
        let dout = h.tensor(dtype, &z.shapes()[3], &numbers(dtype, 9, 150 * 2 * 64));
        let gradients = |fp8| {
            let [dq, dk, dv] = [0, 1, 2].map(|i| h.poisoned(dtype, &z.shapes()[i]));
            let forward = case.arguments(false);
            let b = AttentionBackward { forward, dout: &dout, dq: &dq, dk: &dk, dv: &dv, dsink: None };
            h.k.attention_backward(&h.s, &AttentionParams { fp8, ..s }, Sequences::Batch, &b).unwrap();
            [dq, dk, dv].map(|t| h.host(&t))
        };
        let (with, without) = (gradients(true), gradients(false));
        assert!(with == without && with.iter().flatten().all(|x| x.is_finite()), "{} {dtype}", h.name);
    });
}

/// NaN reaches only the queries that attend to it.
#[test]
fn nan_is_propagated() {
    everywhere(|h, dtype| {
        if dtype == DType::F16 {
            return;
        }
        let z = Sizes { tq: 40, tk: 40, n: 1, g: 1, d: 64, dv: 64 };
        let (mut case, s) = (Case::new(h, dtype, &z), scores(64, None, true));
        case.k[20 * 64 + 3] = f64::NAN;
        case.tensors[1] = h.tensor(dtype, &z.shapes()[1], &case.k);
        h.k.attention_forward(&h.s, &s, Sequences::Batch, &case.arguments(false)).unwrap();
        let out = h.host(&case.out);
        for (i, row) in out.chunks(64).enumerate() {
            assert!(row.iter().all(|x| x.is_nan() == (i >= 20)), "{} {dtype} {i}", h.name);
        }
    });
}
