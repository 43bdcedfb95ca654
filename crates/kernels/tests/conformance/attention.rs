//! Attention on strided views: every common layout of q, k and v.

use super::devices::*;
use super::oracle::{self, Dense};
use ferrotron_kernels::cpu::attention::{AttentionShape, MaskAlign as CpuAlign, Span};
use ferrotron_kernels::{AttentionBackward, AttentionForward, AttentionParams, MaskAlign, Sequences};
use ferrotron_tensor::{DType, Tensor};

#[derive(Clone, Copy, Debug)]
enum Layout {
    /// `[batch, tokens, heads, d]`
    Bshd,
    /// `[tokens, batch, heads, d]`
    Sbhd,
    /// `[batch, heads, tokens, d]`
    Bhsd,
    /// One `[batch, tokens, n + 2g, d]`
    Fused,
    /// One `[batch, tokens, heads, 3, d]`
    PerHead,
    /// Separate q, and `[tokens, batch, g, 2, d]` for k and v
    KvPairs,
    /// Views with a gap after every row.
    Framed,
}

const LAYOUTS: [Layout; 7] = [
    Layout::Bshd,
    Layout::Sbhd,
    Layout::Bhsd,
    Layout::Fused,
    Layout::PerHead,
    Layout::KvPairs,
    Layout::Framed,
];

struct Sizes {
    batch: usize,
    tq: usize,
    tk: usize,
    n: usize,
    g: usize,
    d: usize,
    /// Channels of values.
    dv: usize,
}

impl Sizes {
    fn q(&self) -> [usize; 4] {
        [self.batch, self.tq, self.n, self.d]
    }
    fn k(&self) -> [usize; 4] {
        [self.batch, self.tk, self.g, self.d]
    }
    fn v(&self) -> [usize; 4] {
        [self.batch, self.tk, self.g, self.dv]
    }
    fn out(&self) -> [usize; 4] {
        [self.batch, self.tq, self.n, self.dv]
    }
}

/// `[batch, tokens, heads, d]` views of q, k and v in the layout, filled with NaN.
fn views(h: &TestDevice, dtype: DType, layout: Layout, z: &Sizes) -> [Tensor; 3] {
    let new = |shape: &[usize]| h.poisoned(dtype, shape);
    let each = |make: &dyn Fn([usize; 4]) -> Tensor| [make(z.q()), make(z.k()), make(z.v())];
    match layout {
        Layout::Bshd => each(&|s| new(&s)),
        Layout::Sbhd => each(&|[b, t, n, d]| new(&[t, b, n, d]).transpose(0, 1).unwrap()),
        Layout::Bhsd => each(&|[b, t, n, d]| new(&[b, n, t, d]).transpose(1, 2).unwrap()),
        Layout::Fused => {
            let all = new(&[z.batch, z.tq, z.n + 2 * z.g, z.d]);
            [(0, z.n), (z.n, z.g), (z.n + z.g, z.g)].map(|(at, heads)| all.narrow(2, at, heads).unwrap())
        }
        Layout::PerHead => {
            let all = new(&[z.batch, z.tq, z.n, 3, z.d]);
            [0, 1, 2].map(|i| all.select(3, i).unwrap())
        }
        Layout::KvPairs => {
            let all = new(&[z.tk, z.batch, z.g, 2, z.d]);
            let of = |i| all.select(3, i).unwrap().transpose(0, 1).unwrap();
            [new(&z.q()), of(0), of(1)]
        }
        Layout::Framed => {
            each(&|s: [usize; 4]| h.framed(dtype, &s, &vec![f64::NAN; s.iter().product()]).view)
        }
    }
}

/// Puts values into a view row by row.
fn fill(h: &TestDevice, view: &Tensor, values: &[f64]) {
    let [b, t, n, d] = *view.shape() else { panic!("{view:?}") };
    for i in 0..b * t * n {
        let row =
            view.select(0, i / (t * n)).unwrap().select(0, i / n % t).unwrap().select(0, i % n).unwrap();
        let values = h.tensor(view.dtype(), &[d], &values[i * d..(i + 1) * d]);
        h.k.copy(&h.s, &values, &row).unwrap();
    }
}

fn dense(dims: [usize; 4], data: &[f64]) -> Dense {
    Dense { dims, data: data.to_vec() }
}

fn near(what: &str, dtype: DType, ours: &[f64], wanted: &[f64]) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    let size = wanted.iter().fold(0.0f64, |m, x| m.max(x.abs())).max(1e-2);
    let most = ours.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / size;
    assert!(!ours.iter().any(|x| x.is_nan()), "{what}: NaN reached the output");
    // With bf16 inputs the probabilities are rounded to bf16, too.
    assert!(most <= if dtype == DType::F32 { 5e-6 } else { 2e-2 }, "{what}: {most:.1e} apart");
}

fn scores(causal: bool, softcap: Option<f32>, left: Option<usize>, align: MaskAlign) -> AttentionParams {
    AttentionParams { scale: 0.6, softcap, causal, align, left, right: None, fp8: false }
}

fn shape(s: &AttentionParams, z: &Sizes) -> AttentionShape {
    AttentionShape {
        heads: z.n,
        kv_heads: z.g,
        d_qk: z.d,
        d_v: z.dv,
        scale: s.scale,
        softcap: s.softcap,
        causal: s.causal,
        align: if s.align == MaskAlign::TopLeft { CpuAlign::TopLeft } else { CpuAlign::BottomRight },
        window: (s.left, s.right),
        fp8: s.fp8,
        lse_head: 1,
        lse_token: 1,
    }
}

fn saved(dtype: DType) -> fn(f64) -> f64 {
    match dtype {
        DType::BF16 => |x| rounded(DType::BF16, x),
        _ => |x| rounded(DType::F32, x),
    }
}

/// Forward and backward of one case against the oracle.
fn compare(h: &TestDevice, dtype: DType, layout: Layout, z: &Sizes, s: &AttentionParams, with_sink: bool) {
    let what = format!("{} {dtype} {layout:?} {:?} {} {s:?} sink {with_sink}", h.name, z.q(), z.dv);
    let [nq, nk, nv, no] = [z.q(), z.k(), z.v(), z.out()].map(|s| s.iter().product::<usize>());
    let (q, k, v) = (numbers(dtype, 1, nq), numbers(dtype, 2, nk), numbers(dtype, 3, nv));
    let (dout, sink) = (numbers(dtype, 4, no), numbers(DType::F32, 5, z.n));
    let spans: Vec<Span> = (0..z.batch)
        .map(|batch| Span { batch, q_start: 0, q_len: z.tq, k_start: 0, k_len: z.tk, lse_base: 0 })
        .collect();
    let inputs = oracle::Inputs {
        shape: &shape(s, z),
        spans: &spans,
        q: &dense(z.q(), &q),
        k: &dense(z.k(), &k),
        v: &dense(z.v(), &v),
        dout: &dense(z.out(), &dout),
        sink: with_sink.then_some(&sink),
    };
    let want = oracle::attention(saved(dtype), &inputs);
    let [qt, kt, vt] = views(h, dtype, layout, z);
    [(&qt, &q), (&kt, &k), (&vt, &v)].iter().for_each(|(t, x)| fill(h, t, x));
    let [dq, dk, dv] = views(h, dtype, layout, z);
    let (out, doutt) = (h.poisoned(dtype, &z.out()), h.tensor(dtype, &z.out(), &dout));
    let lse = h.poisoned(DType::F32, &[z.batch, z.n, z.tq]);
    let sink_t = h.tensor(DType::F32, &[z.n], &sink);
    let dsink = h.tensor(DType::F32, &[z.n], &vec![1.0; z.n]);
    let f = || AttentionForward {
        q: &qt,
        k: &kt,
        v: &vt,
        sink: with_sink.then_some(&sink_t),
        out: &out,
        lse: &lse,
    };
    h.k.attention_forward(&h.s, s, Sequences::Batch, &f()).unwrap();
    near(&format!("{what} out"), dtype, &h.host(&out), &want.out.data);
    let lse_want: Vec<f64> = (0..z.batch * z.n * z.tq)
        .map(|i| want.lse.row(i / (z.n * z.tq), i % z.tq, i / z.tq % z.n)[0])
        .collect();
    near(&format!("{what} lse"), dtype, &h.host(&lse), &lse_want);
    let b = AttentionBackward {
        forward: f(),
        dout: &doutt,
        dq: &dq,
        dk: &dk,
        dv: &dv,
        dsink: with_sink.then_some(&dsink),
    };
    h.k.attention_backward(&h.s, s, Sequences::Batch, &b).unwrap();
    near(&format!("{what} dq"), dtype, &h.host(&dq), &want.dq.data);
    near(&format!("{what} dk"), dtype, &h.host(&dk), &want.dk.data);
    near(&format!("{what} dv"), dtype, &h.host(&dv), &want.dv.data);
    if with_sink {
        let sum: Vec<f64> = want.dsink.iter().map(|d| d + 1.0).collect();
        near(&format!("{what} dsink"), dtype, &h.host(&dsink), &sum);
    }
}

#[test]
fn every_layout_matches_the_reference() {
    everywhere(|h, dtype| {
        for layout in LAYOUTS {
            let alike = matches!(layout, Layout::Fused | Layout::PerHead);
            let z = Sizes {
                batch: 2,
                tq: 9,
                tk: if alike { 9 } else { 13 },
                n: 4,
                g: if matches!(layout, Layout::PerHead) { 4 } else { 2 },
                d: 8,
                dv: 8,
            };
            for s in [
                scores(true, None, None, MaskAlign::TopLeft),
                scores(false, Some(1.5), None, MaskAlign::TopLeft),
                scores(true, None, Some(3), MaskAlign::BottomRight),
            ] {
                for with_sink in [false, true] {
                    compare(h, dtype, layout, &z, &s, with_sink);
                }
            }
        }
    });
}

fn scaled(s: AttentionParams, d: usize) -> AttentionParams {
    AttentionParams { scale: 1.0 / (d as f32).sqrt(), ..s }
}

/// More tokens than a tile of any kernel, all head dimensions that have an instance, and enough heads for one per thread
/// block.
#[test]
fn lengths_around_tile_boundaries() {
    everywhere(|h, dtype| {
        for (batch, tq, tk, n, g, d, dv) in [
            (2, 200, 261, 4, 2, 64, 64),
            (1, 200, 200, 2, 1, 128, 128),
            (1, 260, 130, 2, 2, 96, 96),
            (1, 210, 150, 2, 1, 192, 128),
            (1, 150, 210, 2, 2, 256, 256),
            (33, 140, 140, 4, 4, 64, 64),
        ] {
            let z = Sizes { batch, tq, tk, n, g, d, dv };
            let of = |s: AttentionParams| scaled(s, d);
            compare(h, dtype, Layout::Bshd, &z, &of(scores(true, None, None, MaskAlign::TopLeft)), false);
            if batch < 10 {
                let all = of(scores(false, None, None, MaskAlign::TopLeft));
                compare(h, dtype, Layout::Bhsd, &z, &all, true);
                let window = of(scores(true, None, Some(70), MaskAlign::BottomRight));
                compare(h, dtype, Layout::Sbhd, &z, &window, false);
            }
        }
    });
}

/// Soft caps with all head dimensions, forward and backward.
#[test]
fn soft_caps_over_many_tiles() {
    everywhere(|h, dtype| {
        for (tq, tk, n, g, d, dv, cap) in [
            (140, 201, 2, 1, 64, 64, 2.0),
            (201, 140, 2, 2, 128, 128, 10.0),
            (150, 150, 2, 1, 192, 128, 4.0),
            (135, 200, 2, 1, 256, 256, 30.0),
        ] {
            let z = Sizes { batch: 1, tq, tk, n, g, d, dv };
            let of = |s: AttentionParams| AttentionParams { scale: 3.0 / (d as f32).sqrt(), ..s };
            compare(h, dtype, Layout::Bshd, &z, &of(scores(true, Some(cap), None, MaskAlign::TopLeft)), true);
            compare(
                h,
                dtype,
                Layout::Bhsd,
                &z,
                &of(scores(false, Some(cap), None, MaskAlign::TopLeft)),
                false,
            );
            let window = of(scores(true, Some(cap), Some(60), MaskAlign::BottomRight));
            compare(h, dtype, Layout::Sbhd, &z, &window, false);
        }
    });
}

/// Packed sequences against the oracle: `oq` and `ok` are their offsets.
fn packed(
    (h, dtype): (&TestDevice, DType),
    layout: Layout,
    z: &Sizes,
    s: &AttentionParams,
    [oq, ok]: [&[i32]; 2],
    with_sink: bool,
) {
    let [nq, nk, nv, no] = [z.q(), z.k(), z.v(), z.out()].map(|s| s.iter().product::<usize>());
    let (q, k, v) = (numbers(dtype, 1, nq), numbers(dtype, 2, nk), numbers(dtype, 3, nv));
    let (dout, sink) = (numbers(dtype, 4, no), numbers(DType::F32, 5, z.n));
    let spans: Vec<Span> = oq
        .windows(2)
        .zip(ok.windows(2))
        .map(|(q, k)| Span {
            batch: 0,
            q_start: q[0] as usize,
            q_len: (q[1] - q[0]) as usize,
            k_start: k[0] as usize,
            k_len: (k[1] - k[0]) as usize,
            lse_base: 0,
        })
        .collect();
    let inputs = oracle::Inputs {
        shape: &shape(s, z),
        spans: &spans,
        q: &dense(z.q(), &q),
        k: &dense(z.k(), &k),
        v: &dense(z.v(), &v),
        dout: &dense(z.out(), &dout),
        sink: with_sink.then_some(&sink),
    };
    let want = oracle::attention(saved(dtype), &inputs);
    let flat = |t: [Tensor; 3]| t.map(|t| t.select(0, 0).unwrap());
    let wide = views(h, dtype, layout, z);
    [(&wide[0], &q), (&wide[1], &k), (&wide[2], &v)].iter().for_each(|(t, x)| fill(h, t, x));
    let [qt, kt, vt] = flat(wide);
    let [dq, dk, dv] = flat(views(h, dtype, layout, z));
    let out_shape = [z.tq, z.n, z.dv];
    let (out, doutt) = (h.poisoned(dtype, &out_shape), h.tensor(dtype, &out_shape, &dout));
    let lse = h.poisoned(DType::F32, &[z.tq, z.n]);
    let sink_t = h.tensor(DType::F32, &[z.n], &sink);
    let dsink = h.tensor(DType::F32, &[z.n], &vec![0.0; z.n]);
    let sequences = Sequences::Packed { q: oq, k: ok };
    let f = || AttentionForward {
        q: &qt,
        k: &kt,
        v: &vt,
        sink: with_sink.then_some(&sink_t),
        out: &out,
        lse: &lse,
    };
    h.k.attention_forward(&h.s, s, sequences, &f()).unwrap();
    let what = format!("{} {dtype} {layout:?} {:?} {} packed {s:?} sink {with_sink}", h.name, z.q(), z.dv);
    near(&format!("{what} out"), dtype, &h.host(&out), &want.out.data);
    let lse_host = h.host(&lse);
    for t in oq[0] as usize..oq[oq.len() - 1] as usize {
        for head in 0..z.n {
            let (ours, theirs) = (lse_host[t * z.n + head], want.lse.row(0, t, head)[0]);
            let room = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
            assert!(ours == theirs || (ours - theirs).abs() < room, "{what} lse {t} {head}: {ours} {theirs}");
        }
    }
    let b = AttentionBackward {
        forward: f(),
        dout: &doutt,
        dq: &dq,
        dk: &dk,
        dv: &dv,
        dsink: with_sink.then_some(&dsink),
    };
    h.k.attention_backward(&h.s, s, sequences, &b).unwrap();
    near(&format!("{what} dq"), dtype, &h.host(&dq), &want.dq.data);
    near(&format!("{what} dk"), dtype, &h.host(&dk), &want.dk.data);
    near(&format!("{what} dv"), dtype, &h.host(&dv), &want.dv.data);
    if with_sink {
        near(&format!("{what} dsink"), dtype, &h.host(&dsink), &want.dsink);
    }
}

/// Packed sequences, with tokens before and after that belong to no sequence.
#[test]
fn packed_sequences_with_gaps() {
    everywhere(|h, dtype| {
        let (oq, ok) = ([2, 9, 9, 10, 25], [0, 7, 9, 12, 27]);
        let z = Sizes { batch: 1, tq: 30, tk: 30, n: 4, g: 2, d: 8, dv: 8 };
        let apart = scores(true, None, None, MaskAlign::BottomRight);
        packed((h, dtype), Layout::Bshd, &z, &apart, [&oq, &ok], false);
        packed(
            (h, dtype),
            Layout::Fused,
            &z,
            &scores(true, None, None, MaskAlign::TopLeft),
            [&oq, &oq],
            false,
        );
    });
}

/// Queries that see nothing: the packed sequences have no keys at all.
#[test]
fn packed_sequences_without_keys() {
    everywhere(|h, dtype| {
        for (d, dv) in [(8, 8), (64, 64), (128, 128), (192, 128), (256, 256)] {
            let z = Sizes { batch: 1, tq: 425, tk: 20, n: 2, g: 1, d, dv };
            let s = scaled(scores(true, None, None, MaskAlign::BottomRight), d);
            packed((h, dtype), Layout::Bshd, &z, &s, [&[3, 133, 420], &[7, 7, 7]], true);
        }
    });
}

/// Sequences of several tiles, of one token and of none, with all head dimensions.
#[test]
fn packed_sequences_of_many_tiles() {
    everywhere(|h, dtype| {
        let (oq, ok) = ([3, 133, 134, 134, 420], [5, 195, 198, 205, 480]);
        for (d, dv, cap) in [
            (64, 64, None),
            (96, 96, None),
            (128, 128, None),
            (192, 128, None),
            (256, 256, None),
            (128, 128, Some(3.0)),
            (256, 256, Some(10.0)),
        ] {
            let z = Sizes { batch: 1, tq: 425, tk: 490, n: 2, g: 1, d, dv };
            let s = scaled(scores(true, cap, None, MaskAlign::BottomRight), d);
            packed((h, dtype), Layout::Bshd, &z, &s, [&oq, &ok], true);
        }
        let z = Sizes { batch: 1, tq: 425, tk: 425, n: 2, g: 1, d: 64, dv: 64 };
        let s = scaled(scores(true, None, Some(50), MaskAlign::TopLeft), 64);
        packed((h, dtype), Layout::Fused, &z, &s, [&oq, &oq], false);
    });
}
