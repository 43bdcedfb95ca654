//! Attention by definition: every score of every pair, in f64.

use ferrotron_kernels::cpu::attention::{AttentionShape, MaskAlign, Span};

/// A dense `[batch, tokens, heads, channels]` tensor.
#[derive(Clone, Debug, Default)]
pub struct Dense {
    pub dims: [usize; 4],
    pub data: Vec<f64>,
}

impl Dense {
    pub fn zeros(dims: [usize; 4]) -> Dense {
        Dense { dims, data: vec![0.0; dims.iter().product()] }
    }

    pub fn row(&self, b: usize, t: usize, h: usize) -> &[f64] {
        let [_, ts, hs, cs] = self.dims;
        &self.data[((b * ts + t) * hs + h) * cs..][..cs]
    }

    pub fn row_mut(&mut self, b: usize, t: usize, h: usize) -> &mut [f64] {
        let [_, ts, hs, cs] = self.dims;
        &mut self.data[((b * ts + t) * hs + h) * cs..][..cs]
    }
}

/// Everything attention returns. `lse` is `[batch, q tokens, heads, 1]` and includes the sink.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub out: Dense,
    pub lse: Dense,
    pub dq: Dense,
    pub dk: Dense,
    pub dv: Dense,
    pub dsink: Vec<f64>,
    /// Sum of the absolute values of the terms of `dsink`, to which its rounding error is relative.
    pub dsink_size: Vec<f64>,
}

pub fn sees(shape: &AttentionShape, span: &Span, i: usize, j: usize) -> bool {
    let off = match shape.align {
        MaskAlign::TopLeft => 0,
        MaskAlign::BottomRight => span.k_len as i64 - span.q_len as i64,
    };
    let (i, j) = (i as i64 + off, j as i64);
    shape.window.0.is_none_or(|l| j >= i - l as i64)
        && shape.window.1.is_none_or(|r| j <= i + r as i64)
        && (!shape.causal || j <= i)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn axpy(x: f64, a: &[f64], to: &mut [f64]) {
    to.iter_mut().zip(a).for_each(|(to, a)| *to += x * a);
}

/// A problem: the shape, sequences and inputs of the forward and backward pass.
pub struct Inputs<'a> {
    pub shape: &'a AttentionShape,
    pub spans: &'a [Span],
    pub q: &'a Dense,
    pub k: &'a Dense,
    pub v: &'a Dense,
    pub dout: &'a Dense,
    pub sink: Option<&'a [f64]>,
}

/// Forward and backward. `saved` rounds the output to its dtype: the backward pass reads the rounded output.
pub fn attention(saved: fn(f64) -> f64, inputs: &Inputs<'_>) -> Answer {
    let Inputs { shape, spans, q, k, v, dout, sink } = *inputs;
    let mut lse_dims = q.dims;
    lse_dims[3] = 1;
    let mut a = Answer {
        out: Dense::zeros(dout.dims),
        lse: Dense::zeros(lse_dims),
        dq: Dense::zeros(q.dims),
        dk: Dense::zeros(k.dims),
        dv: Dense::zeros(v.dims),
        dsink: vec![0.0; shape.heads],
        dsink_size: vec![0.0; shape.heads],
    };
    let scale = f64::from(shape.scale);
    for span in spans {
        for h in 0..shape.heads {
            let g = h / (shape.heads / shape.kv_heads);
            for i in 0..span.q_len {
                let (b, t) = (span.batch, span.q_start + i);
                let keys: Vec<usize> = (0..span.k_len).filter(|j| sees(shape, span, i, *j)).collect();
                let raw = |j: &usize| scale * dot(q.row(b, t, h), k.row(b, span.k_start + j, g));
                let cap = |s: f64| shape.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh());
                let scores: Vec<f64> = keys.iter().map(raw).map(cap).collect();
                let sink_score = sink.map_or(f64::NEG_INFINITY, |s| s[h]);
                let top = scores.iter().copied().fold(sink_score, f64::max);
                let total: f64 = scores.iter().chain([&sink_score]).map(|s| (s - top).exp()).sum();
                let lse = if top == f64::NEG_INFINITY { top } else { top + total.ln() };
                a.lse.row_mut(b, t, h)[0] = lse;
                let p: Vec<f64> = scores.iter().map(|s| (s - lse).exp()).collect();
                for (p, j) in p.iter().zip(&keys) {
                    axpy(*p, v.row(b, span.k_start + j, g), a.out.row_mut(b, t, h));
                }
                let out: Vec<f64> = a.out.row(b, t, h).iter().map(|x| saved(*x)).collect();
                let delta = dot(&out, dout.row(b, t, h));
                if sink.is_some() {
                    let share = (sink_score - lse).exp();
                    a.dsink[h] -= share * delta;
                    let terms = out.iter().zip(dout.row(b, t, h)).map(|(a, b)| (a * b).abs());
                    a.dsink_size[h] += share * terms.sum::<f64>();
                }
                for ((p, s), j) in p.iter().zip(&scores).zip(&keys) {
                    let u = span.k_start + j;
                    axpy(*p, dout.row(b, t, h), a.dv.row_mut(b, u, g));
                    let slope = shape.softcap.map_or(1.0, |c| 1.0 - (s / f64::from(c)).powi(2));
                    let ds = p * (dot(dout.row(b, t, h), v.row(b, u, g)) - delta) * slope * scale;
                    axpy(ds, k.row(b, u, g), a.dq.row_mut(b, t, h));
                    axpy(ds, q.row(b, t, h), a.dk.row_mut(b, u, g));
                }
            }
        }
    }
    a
}
