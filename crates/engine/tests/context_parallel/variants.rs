//! Every context-parallel variant against an f64 reference of attention.

use super::oracle::{self, Answer, Dense};
use super::ranks::{Grid, local, tokens};
use super::support::{close, host, numbers, rounded, write};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::attention::context_parallel::{ContextParallel, CpVariant, Gradients, Inputs, choose};
use ferrotron_kernels::cpu::attention::{AttentionShape, MaskAlign as CpuAlign, Span};
use ferrotron_kernels::{AttentionParams, MaskAlign};
use ferrotron_tensor::{Category, DType, Tensor, bf16};

/// A model's attention and a batch.
#[derive(Clone, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    sink: bool,
    layout: Layout,
    /// Channels of q and k, and of v.
    channels: [usize; 2],
    /// What values of the middle half of all tokens are multiplied by: with chunks dealt in zigzag, ranks of the second
    /// half hold no others.
    middle: f64,
}

const D: usize = 8;
const D_V: usize = 4;

fn scores(c: &Case) -> AttentionParams {
    let left = c.window.map(|w| w - 1);
    AttentionParams {
        scale: 0.6,
        softcap: c.softcap,
        causal: true,
        align: MaskAlign::TopLeft,
        left,
        right: None,
        fp8: false,
    }
}

fn cases() -> Vec<(Case, Vec<CpVariant>)> {
    use CpVariant::{AllGather, AllToAll, Ring};
    let rows = Layout::Rows { count: 2, len: 24 };
    // Longer than a key block, odd, shorter than all chunks, one token, and empty sequences at both ends.
    let packed = Layout::Packed { offsets: vec![0, 0, 131, 134, 134, 135, 172, 172] };
    let (channels, middle) = ([D, D_V], 1.0);
    let plain = Case {
        heads: 4,
        kv_heads: 4,
        window: None,
        softcap: None,
        sink: false,
        layout: rows,
        channels,
        middle,
    };
    let gqa = Case { heads: 8, kv_heads: 4, layout: packed.clone(), ..plain.clone() };
    let few = Case { heads: 3, kv_heads: 1, layout: packed, ..plain.clone() };
    vec![
        (plain.clone(), vec![Ring, AllGather, AllToAll]),
        (gqa.clone(), vec![Ring, AllGather, AllToAll]),
        (Case { softcap: Some(1.5), ..gqa.clone() }, vec![Ring, AllGather, AllToAll]),
        (few.clone(), vec![Ring, AllGather]),
        (Case { window: Some(5), ..gqa.clone() }, vec![AllGather, AllToAll]),
        (Case { window: Some(40), softcap: Some(0.9), ..few.clone() }, vec![AllGather]),
        (Case { sink: true, ..plain }, vec![Ring, AllGather, AllToAll]),
        (Case { sink: true, softcap: Some(1.5), ..gqa.clone() }, vec![Ring, AllGather, AllToAll]),
        (Case { sink: true, window: Some(7), softcap: Some(2.0), ..gqa }, vec![AllGather, AllToAll]),
        (Case { sink: true, ..few.clone() }, vec![Ring, AllGather]),
        (Case { sink: true, window: Some(5), ..few.clone() }, vec![AllGather]),
        (Case { layout: Layout::Packed { offsets: vec![0, 0, 0] }, ..few }, vec![Ring, AllGather]),
    ]
}

/// Values of the full batch: q, k, v, dout, sink.
struct Values([Vec<f64>; 5]);

impl Case {
    fn sizes(&self) -> [[usize; 2]; 4] {
        let [d, d_v] = self.channels;
        [[self.heads, d], [self.kv_heads, d], [self.kv_heads, d_v], [self.heads, d_v]]
    }

    fn values(&self, dtype: DType) -> Values {
        let t = self.layout.tokens();
        let draw = |i: usize, n| rounded(dtype, numbers(i as u64 + 1, n));
        let [q, k, mut v, dout] =
            std::array::from_fn(|i| draw(i, t * self.sizes()[i].iter().product::<usize>()));
        let quarter = v.len() / 4;
        v[quarter..3 * quarter].iter_mut().for_each(|x| *x *= self.middle);
        Values([q, k, v, dout, rounded(DType::F32, numbers(9, self.heads))])
    }

    fn wanted(&self, dtype: DType, x: &Values) -> Answer {
        let s = scores(self);
        let shape = AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            d_qk: self.channels[0],
            d_v: self.channels[1],
            scale: s.scale,
            softcap: s.softcap,
            causal: true,
            align: CpuAlign::TopLeft,
            window: (s.left, None),
            fp8: false,
            lse_head: 1,
            lse_token: 1,
        };
        let mut start = 0;
        let span = |len: &usize| {
            start += len;
            let from = start - len;
            Span { batch: 0, q_start: from, q_len: *len, k_start: from, k_len: *len, lse_base: 0 }
        };
        let spans: Vec<Span> = self.layout.lengths().iter().map(span).collect();
        let dense = |i: usize| {
            let [n, d] = self.sizes()[i];
            Dense { dims: [1, self.layout.tokens(), n, d], data: x.0[i].clone() }
        };
        let stored: fn(f64) -> f64 = match dtype {
            DType::BF16 => |x| bf16::from_f32(x as f32).to_f64(),
            _ => |x| x,
        };
        let sink = self.sink.then_some(&x.0[4][..]);
        let (shape, spans, [q, k, v, dout]) = (&shape, &spans[..], &[0, 1, 2, 3].map(dense));
        oracle::attention(stored, &oracle::Inputs { shape, spans, q, k, v, dout, sink })
    }

    /// out, dq, dk, dv of the full batch and dsink.
    fn run(&self, variant: CpVariant, grid: Grid, dtype: DType, x: &Values) -> [Vec<f64>; 5] {
        let s = scores(self);
        let sizes = [self.sizes()[3], self.sizes()[0], self.sizes()[1], self.sizes()[2]];
        let parts = grid.run(|rank| {
            let tokens = tokens(rank, &self.layout);
            let rows = tokens.rows().len();
            let context = ContextParallel::new(rank, &s, tokens.layout(), variant).unwrap();
            assert_eq!(context.local(), rows);
            // q, k and v are columns of one buffer, as the QKV projection writes them.
            let widths = self.sizes().map(|[n, d]| n * d);
            let columns = |t: &Tensor| -> [Tensor; 3] {
                let at = [0, widths[0], widths[0] + widths[1]];
                let view = |i: usize| t.narrow(1, at[i], widths[i]).unwrap();
                std::array::from_fn(|i| {
                    view(i).view(&[rows, self.sizes()[i][0], self.sizes()[i][1]]).unwrap()
                })
            };
            let fused = || rank.activation(&[rows, widths[0] + widths[1] + widths[2]], dtype).unwrap();
            let buffer = fused();
            let mut data = Vec::new();
            let each: [Vec<f64>; 3] = std::array::from_fn(|i| local(&tokens, widths[i], &x.0[i]));
            for r in 0..rows {
                (0..3).for_each(|i| data.extend_from_slice(&each[i][r * widths[i]..(r + 1) * widths[i]]));
            }
            write(rank, &buffer, &data);
            let [q, k, v] = columns(&buffer);
            let of_out = || rank.activation(&[rows, self.heads, self.channels[1]], dtype).unwrap();
            let (out, dout) = (of_out(), of_out());
            write(rank, &dout, &local(&tokens, widths[3], &x.0[3]));
            let upload = |x: &[f64]| {
                let x: Vec<f32> = x.iter().map(|x| *x as f32).collect();
                rank.compute.upload(&x, &[x.len()], Category::Parameters).unwrap()
            };
            let (sink, dsink) = (upload(&x.0[4]), upload(&vec![0.0; self.heads]));
            let sink = self.sink.then_some(&sink);
            let saved = context.forward(&Inputs { q: &q, k: &k, v: &v, sink }, &out).unwrap();
            let gradients = fused();
            let [dq, dk, dv] = columns(&gradients);
            let dsink = self.sink.then_some(&dsink);
            let y = Gradients { out: &out, dout: &dout, sink, dq: &dq, dk: &dk, dv: &dv, dsink };
            context.backward(saved, &y).unwrap();
            let results =
                [&out, &dq, &dk, &dv].map(|t| if t.numel() == 0 { Vec::new() } else { host(rank, t) });
            (tokens, results, dsink.map_or(vec![0.0; self.heads], |d| host(rank, d)))
        });
        let mut all: [Vec<f64>; 5] = std::array::from_fn(|i| match sizes.get(i) {
            Some([n, d]) => vec![f64::NAN; self.layout.tokens() * n * d],
            None => vec![0.0; self.heads],
        });
        for (tokens, results, dsink) in &parts {
            for (i, result) in results.iter().enumerate() {
                tokens.put(result, sizes[i][0] * sizes[i][1], &mut all[i]).unwrap();
            }
            all[4].iter_mut().zip(dsink).for_each(|(sum, x)| *sum += x);
        }
        all
    }
}

#[test]
fn every_variant_matches_the_reference() {
    for dtype in [DType::F32, DType::BF16] {
        for (case, variants) in cases() {
            let x = case.values(dtype);
            let want = case.wanted(dtype, &x);
            let want = [want.out.data, want.dq.data, want.dk.data, want.dv.data, want.dsink];
            for (variant, cp) in variants.iter().flat_map(|v| [1, 2, 4].map(|cp| (*v, cp))) {
                // Also with one rank, lengths must be whole chunks.
                if cp == 1 && case.layout.lengths().iter().any(|n| n % 2 != 0) {
                    continue;
                }
                if variant == CpVariant::AllToAll && (case.heads % cp != 0 || case.kv_heads % cp != 0) {
                    continue;
                }
                let what = format!("{case:?} {variant:?} over {cp}");
                let ours = case.run(variant, Grid { cp, tp: 1, overlap: true }, dtype, &x);
                let names = ["out", "dq", "dk", "dv", "dsink"];
                for ((ours, want), name) in ours.iter().zip(&want).zip(names) {
                    let wanted_sum = name == "dsink" && !case.sink;
                    if !wanted_sum && !want.is_empty() {
                        close(&format!("{what} {dtype} {name}"), dtype, ours, want);
                    }
                }
                let bits = case.run(variant, Grid { cp, tp: 1, overlap: false }, dtype, &x);
                assert_eq!(bits, ours, "{what}: overlap changes bits");
            }
        }
    }
}

/// Every rank's keys and values are a part of all: a query's delta = Σ dout·out is not bounded by the values of the part
/// that its rank holds just now. Heads as wide as those of the GPU's kernels with fixed-point sums of dq.
#[test]
fn ring_parts_of_very_different_magnitude_match_the_reference() {
    for (channels, middle) in
        [[64, 64], [128, 128]].into_iter().flat_map(|c| [0.0, 2f64.powi(-30), 65536.0].map(|m| (c, m)))
    {
        let layout = Layout::Rows { count: 1, len: 128 };
        let case = Case { heads: 4, kv_heads: 2, layout, channels, middle, ..cases()[0].0.clone() };
        for dtype in [DType::F32, DType::BF16] {
            let x = case.values(dtype);
            let want = case.wanted(dtype, &x);
            let want = [want.out.data, want.dq.data, want.dk.data, want.dv.data];
            for cp in [2, 4] {
                let what = format!("{case:?} over {cp} {dtype}");
                let ours = case.run(CpVariant::Ring, Grid { cp, tp: 1, overlap: true }, dtype, &x);
                for ((ours, want), name) in ours.iter().zip(&want).zip(["out", "dq", "dk", "dv"]) {
                    close(&format!("{what} {name}"), dtype, ours, want);
                }
            }
        }
    }
}

#[test]
fn variant_is_chosen_by_model() {
    let plain = cases()[0].0.clone();
    let choice = |c: &Case, heads, kv_heads, ranks| choose(&scores(c), heads, kv_heads, ranks);
    let capped = Case { softcap: Some(30.0), ..plain.clone() };
    let window = Case { window: Some(4), ..plain.clone() };
    let sink = Case { sink: true, ..plain.clone() };
    for (case, heads, kv_heads, ranks, variant) in [
        (&plain, 8, 8, 4, CpVariant::Ring),
        (&plain, 3, 1, 4, CpVariant::Ring),
        (&capped, 8, 2, 2, CpVariant::Ring),
        (&window, 8, 4, 4, CpVariant::AllToAll),
        (&window, 8, 2, 4, CpVariant::AllGather),
        (&window, 6, 4, 4, CpVariant::AllGather),
        (&sink, 8, 2, 4, CpVariant::Ring),
    ] {
        let (chosen, reason) = choice(case, heads, kv_heads, ranks).unwrap();
        assert_eq!(chosen, variant, "{case:?} {heads} {kv_heads} {ranks}: {reason}");
    }
    let open = AttentionParams { causal: false, ..scores(&plain) };
    let e = choose(&open, 8, 8, 2).unwrap_err().to_string();
    assert!(e.contains("cp=1"), "{e}");
}

/// Unsupported combinations are refused before any communication.
#[test]
fn unsupported_combinations_are_refused() {
    let case = Case { window: Some(4), ..cases()[0].0.clone() };
    let (s, open) = (scores(&case), AttentionParams { left: None, ..scores(&case) });
    Grid { cp: 2, tp: 1, overlap: true }.run(|rank| {
        let layout = Layout::Rows { count: 1, len: 8 };
        let make = |t: usize, n: usize| rank.activation(&[t, n, D], DType::F32).unwrap();
        let sink = rank.activation(&[4], DType::F32).unwrap();
        let attempt = |scores: &AttentionParams, variant, tokens, heads, sink| {
            let (q, k, v, out) =
                (make(tokens, heads), make(tokens, heads), make(tokens, heads), make(tokens, heads));
            let context = ContextParallel::new(rank, scores, &layout, variant).unwrap();
            context.forward(&Inputs { q: &q, k: &k, v: &v, sink }, &out).err().unwrap().to_string()
        };
        for (error, part) in [
            (attempt(&s, CpVariant::Ring, 4, 4, None), "does not support sliding windows"),
            (attempt(&open, CpVariant::Ring, 4, 8, Some(&sink)), "for 8 heads"),
            (attempt(&open, CpVariant::AllToAll, 4, 3, None), "do not divide over 2"),
            (attempt(&open, CpVariant::Ring, 8, 4, None), "not 4 tokens"),
        ] {
            assert!(error.contains(part), "{error}");
        }
        let odd = Layout::Rows { count: 1, len: 6 };
        let e = ContextParallel::new(rank, &s, &odd, CpVariant::Ring).err().unwrap().to_string();
        assert!(e.contains("multiple of 4"), "{e}");
    });
}

/// Communication volume per rank: keys and values (and their f32 gradients), or its share of all heads.
#[test]
fn volume_matches_the_table() {
    let (t, n, g) = (48, 8, 4);
    let layout = Layout::Rows { count: 2, len: 48 };
    for (dtype, size) in [(DType::F32, 4), (DType::BF16, 2)] {
        for (cp, variant) in [2, 4]
            .into_iter()
            .flat_map(|c| [CpVariant::Ring, CpVariant::AllGather, CpVariant::AllToAll].map(|v| (c, v)))
        {
            let case = Case { heads: n, kv_heads: g, layout: layout.clone(), ..cases()[0].0.clone() };
            let s = scores(&case);
            let sent = Grid { cp, tp: 1, overlap: true }.run(|rank| {
                let local = 2 * t / cp;
                let make = |n: usize, d: usize| {
                    rank.compute.zeros(&[local, n, d], dtype, Category::Activations).unwrap()
                };
                let context = ContextParallel::new(rank, &s, &layout, variant).unwrap();
                let (q, k, v, out) = (make(n, D), make(g, D), make(g, D_V), make(n, D_V));
                let x = Inputs { q: &q, k: &k, v: &v, sink: None };
                let saved = context.forward(&x, &out).unwrap();
                let forward = rank.cp.volume().total();
                let (dq, dk, dv) = (make(n, D), make(g, D), make(g, D_V));
                let (dout, sink, dsink) = (&out, None, None);
                let y = Gradients { out: &out, dout, sink, dq: &dq, dk: &dk, dv: &dv, dsink };
                context.backward(saved, &y).unwrap();
                (forward, rank.cp.volume().total() - forward)
            });
            let (local, pair) = (2 * t / cp, g * (D + D_V));
            let heads = (cp - 1) * local * (n * D + pair + n * D_V) / cp * size;
            let want = match variant {
                CpVariant::Ring => {
                    let keys = |times: usize| times * local * pair * size;
                    (keys(cp - 1), keys(cp - 2) + (cp - 1) * local * pair * 4)
                }
                CpVariant::AllGather => {
                    let keys = (cp - 1) * local * pair;
                    (keys * size, keys * size + keys * 4)
                }
                CpVariant::AllToAll => (heads, heads),
            };
            assert_eq!(sent, vec![(want.0 as u64, want.1 as u64); cp], "{variant:?} over {cp} {dtype}");
        }
    }
}
