//! Runs the kernels in any memory layout, and compares results.

use crate::oracle::{Answer, Dense, Inputs};
use ferrotron_kernels::cpu::attention::{
    AttentionGradients, AttentionInputs, AttentionOutputs, AttentionShape, Heads, HeadsMut, backward, forward,
};
use ferrotron_kernels::cpu::{CpuContext, Isa};
use ferrotron_tensor::{Float, Threads};

/// Memory layout of q, k and v, and of their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Three tensors `[batch, tokens, heads, channels]`.
    Bshd,
    /// Three tensors `[tokens, batch, heads, channels]`.
    Sbhd,
    /// One `[batch, tokens, (q heads, k heads, v heads), channels]`, as a fused projection writes it.
    Fused,
    /// Separate q; k and v as `[tokens, batch, heads, 2, channels]`.
    KvPairs,
    /// One `[batch, tokens, heads, 3, channels]`: as many key heads as query heads.
    PerHead,
}

/// Strides of one tensor in the shared buffer of its set.
#[derive(Clone, Copy, Debug)]
struct Place {
    offset: usize,
    batch: usize,
    token: usize,
    head: usize,
}

/// Places of q, k and v in one buffer, and its size.
fn places(layout: Layout, dims: [[usize; 4]; 3]) -> ([Place; 3], usize) {
    let [[bs, tq, h, d], [_, tk, g, _], [_, _, _, dv]] = dims;
    let alone = |offset, [b, t, h, d]: [usize; 4]| match layout {
        Layout::Bshd => Place { offset, batch: t * h * d, token: h * d, head: d },
        _ => Place { offset, batch: h * d, token: b * h * d, head: d },
    };
    let (q, k, v) = (bs * tq * h * d, bs * tk * g * d, bs * tk * g * dv);
    match layout {
        Layout::Bshd | Layout::Sbhd => {
            ([alone(0, dims[0]), alone(q, dims[1]), alone(q + k, dims[2])], q + k + v)
        }
        Layout::Fused => {
            assert_eq!(tq, tk);
            let token = h * d + g * d + g * dv;
            let at = |offset, head| Place { offset, batch: tq * token, token, head };
            ([at(0, d), at(h * d, d), at(h * d + g * d, dv)], bs * tq * token)
        }
        Layout::KvPairs => {
            let token = bs * g * (d + dv);
            let at = |offset| Place { offset: q + offset, batch: g * (d + dv), token, head: d + dv };
            ([alone(0, dims[0]), at(0), at(d)], q + k + v)
        }
        Layout::PerHead => {
            assert_eq!((tq, h), (tk, g));
            let (head, token) = (2 * d + dv, h * (2 * d + dv));
            let at = |offset| Place { offset, batch: tq * token, token, head };
            ([at(0), at(d), at(2 * d)], bs * tq * token)
        }
    }
}

fn scatter<T: Float>(x: &Dense, place: Place, buffer: &mut [T]) {
    let [bs, ts, hs, cs] = x.dims;
    for (b, t, h) in all(bs, ts, hs) {
        let at = place.offset + b * place.batch + t * place.token + h * place.head;
        for (to, from) in buffer[at..at + cs].iter_mut().zip(x.row(b, t, h)) {
            *to = T::from_f32(*from as f32);
        }
    }
}

fn gather<T: Float>(dims: [usize; 4], place: Place, buffer: &[T]) -> Dense {
    let mut x = Dense::zeros(dims);
    for (b, t, h) in all(dims[0], dims[1], dims[2]) {
        let at = place.offset + b * place.batch + t * place.token + h * place.head;
        for (to, from) in x.row_mut(b, t, h).iter_mut().zip(&buffer[at..]) {
            *to = from.to_f64();
        }
    }
    x
}

fn all(bs: usize, ts: usize, hs: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..bs).flat_map(move |b| (0..ts).flat_map(move |t| (0..hs).map(move |h| (b, t, h))))
}

/// Filler of elements that the kernel must not write.
pub const UNTOUCHED: f32 = -77.0;

/// Forward and backward in dtype `T`. `lse` is `[batch, tokens, heads]`, and the strides of the shape must match; see
/// `lse_strides`.
pub fn launch<T: Float>(threads: &Threads, isa: Isa, layout: Layout, x: &Inputs<'_>) -> Answer {
    let (p, size) = places(layout, [x.q.dims, x.k.dims, x.v.dims]);
    let mut qkv = vec![T::from_f32(0.0); size];
    scatter(x.q, p[0], &mut qkv);
    scatter(x.k, p[1], &mut qkv);
    scatter(x.v, p[2], &mut qkv);
    let out_place = Place {
        offset: 0,
        batch: x.dout.dims[1] * x.dout.dims[2] * x.dout.dims[3],
        token: x.dout.dims[2] * x.dout.dims[3],
        head: x.dout.dims[3],
    };
    let mut dout = vec![T::from_f32(0.0); x.dout.data.len()];
    scatter(x.dout, out_place, &mut dout);
    let mut out = vec![T::from_f32(UNTOUCHED); dout.len()];
    let lse_dims = [x.q.dims[0], x.q.dims[1], x.q.dims[2], 1];
    let mut lse = vec![UNTOUCHED; lse_dims.iter().product()];
    let sink: Option<Vec<f32>> = x.sink.map(|s| s.iter().map(|s| *s as f32).collect());
    fn read<T>(data: &[T], p: Place) -> Heads<'_, T> {
        Heads { data, batch: p.batch, token: p.token, head: p.head }
    }
    let cpu = CpuContext::new(threads, isa);
    let inputs = AttentionInputs {
        q: read(&qkv[p[0].offset..], p[0]),
        k: read(&qkv[p[1].offset.min(size)..], p[1]),
        v: read(&qkv[p[2].offset.min(size)..], p[2]),
        sink: sink.as_deref(),
    };
    {
        // SAFETY: dense strides.
        let out = unsafe { HeadsMut::of(&mut out, out_place.batch, out_place.token, out_place.head) };
        forward(cpu, x.shape, x.spans, inputs, &out, &mut lse).unwrap();
    }
    let mut grads = vec![T::from_f32(UNTOUCHED); size];
    let mut dsink = vec![0.5f32; x.shape.heads];
    {
        let base = grads.as_mut_ptr();
        // SAFETY: the three places describe different elements of one buffer.
        let at = |p: Place| unsafe {
            let offset = p.offset.min(size);
            HeadsMut::new(base.add(offset), size - offset, p.batch, p.token, p.head)
        };
        let gradients = AttentionGradients {
            dq: &at(p[0]),
            dk: &at(p[1]),
            dv: &at(p[2]),
            dsink: sink.is_some().then_some(&mut dsink),
        };
        let (out, dout) = (read(&out, out_place), read(&dout, out_place));
        let outputs = AttentionOutputs { out, dout, lse: &lse };
        backward(cpu, x.shape, x.spans, inputs, outputs, gradients).unwrap();
    }
    Answer {
        out: gather(x.dout.dims, out_place, &out),
        lse: Dense { dims: lse_dims, data: lse.iter().map(|l| f64::from(*l)).collect() },
        dq: gather(x.q.dims, p[0], &grads),
        dk: gather(x.k.dims, p[1], &grads),
        dv: gather(x.v.dims, p[2], &grads),
        dsink: dsink.iter().map(|d| f64::from(*d) - 0.5).collect(),
        dsink_size: Vec::new(),
    }
}

/// `[batch, tokens, heads]` log-sum-exps.
pub fn lse_strides(shape: &mut AttentionShape) {
    (shape.lse_head, shape.lse_token) = (1, shape.heads);
}

/// Rounds the inputs to `T`, so that the reference reads the same values as the kernel.
pub fn rounded<T: Float>(x: &Dense) -> Dense {
    Dense { dims: x.dims, data: x.data.iter().map(|x| T::from_f32(*x as f32).to_f64()).collect() }
}

/// Every element is within `atol + rtol |want|`; infinities must be equal.
pub fn close(what: &str, got: &[f64], want: &[f64], atol: f64, rtol: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g == w || (g - w).abs() <= atol + rtol * w.abs(), "{what}[{i}]: {g} is not {w}");
    }
}

/// Relative L2 distance is at most `limit`, with a floor on the norm where the reference is nearly zero.
pub fn near(what: &str, got: &[f64], want: &[f64], limit: f64) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut got.iter().zip(want).map(|(g, w)| g - w));
    let size = norm(&mut want.iter().copied()).max(1e-3 * (want.len() as f64).sqrt());
    assert!(off <= limit * size, "{what}: off by {off} of {size}");
}

/// Compares with the tolerances of the golden vectors; absolute tolerances of f32 are multiplied by `size`.
pub fn compare<T: Float>(what: &str, got: &Answer, want: &Answer, grad_atol: f64, size: f64) {
    let grads = [
        ("dq", &got.dq.data, &want.dq.data),
        ("dk", &got.dk.data, &want.dk.data),
        ("dv", &got.dv.data, &want.dv.data),
        ("dsink", &got.dsink, &want.dsink),
    ];
    if size_of::<T>() == 4 {
        close(&format!("{what} out"), &got.out.data, &want.out.data, 2e-6 * size, 1e-5);
        close(&format!("{what} lse"), &got.lse.data, &want.lse.data, 2e-6 * size, 1e-5);
        for (name, got, want) in grads {
            close(&format!("{what} {name}"), got, want, grad_atol * size, 1e-4);
        }
    } else {
        close(&format!("{what} out"), &got.out.data, &want.out.data, 2e-2, 2e-2);
        close(&format!("{what} lse"), &got.lse.data, &want.lse.data, 1e-2, 0.0);
        for (name, got, want) in &grads[..3] {
            near(&format!("{what} {name}"), got, want, 1e-2);
        }
        if want.dsink_size.is_empty() {
            near(&format!("{what} dsink"), &got.dsink, &want.dsink, 1e-2);
        }
        for (h, size) in want.dsink_size.iter().enumerate() {
            let off = (got.dsink[h] - want.dsink[h]).abs();
            assert!(off <= size / 256.0, "{what} dsink[{h}]: off by {off}, terms of {size}");
        }
    }
}
