//! Causal attention over one sequence of 262,144 tokens whose q, k and v have more than 2³¹ elements each.

use super::scene::{Scene, assert_close};
use ferrotron_kernels::{AttentionBackward, AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{DType, Tensor};

const D: usize = 128;

/// One head of everything, on the host: `[tokens, D]`, and the log-sum-exp of each query.
struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    out: Vec<f64>,
    dout: Vec<f64>,
    lse: Vec<f64>,
}

fn row(x: &[f64], t: usize) -> &[f64] {
    &x[t * D..][..D]
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], x: f64, a: &[f64]) {
    to.iter_mut().zip(a).for_each(|(to, a)| *to += x * a);
}

/// Row `t` of head `head` of a `[1, tokens, heads, D]` tensor.
fn fetched(h: &Scene, x: &Tensor, t: usize, head: usize) -> Vec<f64> {
    h.values(&h.fetch(&x.narrow(1, t, 1).unwrap().narrow(2, head, 1).unwrap()))
}

/// All tokens of a head.
fn whole(h: &Scene, x: &Tensor, head: usize) -> Vec<f64> {
    let view = x.narrow(2, head, 1).unwrap();
    let out = h.empty(x.dtype(), view.shape());
    h.large.k.copy(&h.large.s, &view, &out).unwrap();
    h.values(&h.fetch(&out))
}

/// Kernels for Hopper, and, with f16, those for every GPU: there only a sliding window is affordable.
pub fn forward_and_backward(h: &Scene) {
    case(h, DType::BF16, None);
    h.trim();
    case(h, DType::F16, Some(h.size(2000, 20)));
}

fn case(h: &Scene, dtype: DType, left: Option<usize>) {
    let (tokens, heads) = (h.size(262_144, 200), h.size(66, 3));
    let scale = (D as f32).powf(-0.5);
    let p = AttentionParams {
        scale,
        softcap: None,
        causal: true,
        align: MaskAlign::TopLeft,
        left,
        right: None,
        fp8: false,
    };
    let shape = [1, tokens, heads, D];
    let random = |seed| h.random(dtype, [tokens, heads * D], seed).view(&shape).unwrap();
    let [q, k, v, dout] = [1, 2, 3, 4].map(random);
    let [out, dq, dk, dv] = [(); 4].map(|()| h.empty(dtype, &shape));
    let lse = h.empty(DType::F32, &[1, heads, tokens]);
    let (kernels, s) = (&h.large.k, &h.large.s);
    let forward = || AttentionForward { q: &q, k: &k, v: &v, sink: None, out: &out, lse: &lse };
    kernels.attention_forward(s, &p, Sequences::Batch, &forward()).unwrap();
    let b = AttentionBackward { forward: forward(), dout: &dout, dq: &dq, dk: &dk, dv: &dv, dsink: None };
    kernels.attention_backward(s, &p, Sequences::Batch, &b).unwrap();

    // Tokens at the start, where element 2³¹ lies, and at the end.
    let boundary = (h.ranges(tokens, heads * D, 4, 1)[1].start + 2).min(tokens - 2);
    for head in [0, heads - 1] {
        let x = Head {
            q: whole(h, &q, head),
            k: whole(h, &k, head),
            v: whole(h, &v, head),
            out: whole(h, &out, head),
            dout: whole(h, &dout, head),
            lse: h.values(&h.fetch(&lse.narrow(1, head, 1).unwrap())),
        };
        for t in [1, tokens / 2, boundary, tokens - 1] {
            let what = format!("{dtype}, token {t} of head {head}");
            let (lse, wanted, wanted_dq) = x.query(t, left, f64::from(scale));
            assert!((x.lse[t] - lse).abs() < 1e-3, "{what}: lse {} instead of {lse}", x.lse[t]);
            assert_close(&format!("{what}: out"), row(&x.out, t), &wanted);
            assert_close(&format!("{what}: dq"), &fetched(h, &dq, t, head), &wanted_dq);
            let (wanted_dk, wanted_dv) = x.key(t, left, f64::from(scale));
            assert_close(&format!("{what}: dv"), &fetched(h, &dv, t, head), &wanted_dv);
            assert_close(&format!("{what}: dk"), &fetched(h, &dk, t, head), &wanted_dk);
        }
    }
}

impl Head {
    /// lse, output and gradient of query `i` by definition.
    fn query(&self, i: usize, left: Option<usize>, scale: f64) -> (f64, Vec<f64>, Vec<f64>) {
        let first = left.map_or(0, |left| i.saturating_sub(left));
        let scores: Vec<f64> = (first..=i).map(|j| scale * dot(row(&self.q, i), row(&self.k, j))).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = top + scores.iter().map(|s| (s - top).exp()).sum::<f64>().ln();
        let (mut out, mut dq) = (vec![0.0; D], vec![0.0; D]);
        let delta = dot(row(&self.dout, i), row(&self.out, i));
        for (j, s) in (first..=i).zip(scores) {
            let p = (s - lse).exp();
            add(&mut out, p, row(&self.v, j));
            add(&mut dq, scale * p * (dot(row(&self.dout, i), row(&self.v, j)) - delta), row(&self.k, j));
        }
        (lse, out, dq)
    }

    /// Gradients of key and value `j`, from the log-sum-exp and the outputs of the queries that see it.
    fn key(&self, j: usize, left: Option<usize>, scale: f64) -> (Vec<f64>, Vec<f64>) {
        let tokens = self.lse.len();
        let end = left.map_or(tokens, |left| tokens.min(j + left + 1));
        let (mut dk, mut dv) = (vec![0.0; D], vec![0.0; D]);
        for i in j..end {
            let p = (scale * dot(row(&self.q, i), row(&self.k, j)) - self.lse[i]).exp();
            add(&mut dv, p, row(&self.dout, i));
            let dp = dot(row(&self.dout, i), row(&self.v, j)) - dot(row(&self.dout, i), row(&self.out, i));
            add(&mut dk, scale * p * dp, row(&self.q, i));
        }
        (dk, dv)
    }
}
