//! Self-attention: QKV projection, QK norm, RoPE, core attention, output projection.

use super::support::*;
use super::{linear, norm};
use ferrotron_engine::attention::{Attention, AttentionConfig, Layout, RopeTable};
use ferrotron_engine::{Declarations, Rank};
use ferrotron_kernels::{AttentionParams, MaskAlign, Norm, RopeStyle};
use ferrotron_tensor::{Category, DType};

/// One configuration of the block.
#[derive(Clone, Debug)]
pub struct Case {
    pub heads: usize,
    pub kv_heads: usize,
    pub bias: bool,
    pub qk_norm: Option<Norm>,
    pub qk_norm_all_heads: bool,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
    pub sink: bool,
    pub rope: Option<(RopeStyle, usize)>,
    pub layout: Layout,
}

pub const HIDDEN: usize = 6;
const DIM: usize = 4;

pub fn plain() -> Case {
    Case {
        heads: 2,
        kv_heads: 2,
        bias: false,
        qk_norm: None,
        qk_norm_all_heads: false,
        window: None,
        softcap: None,
        sink: false,
        rope: None,
        layout: Layout::Rows { count: 2, len: 5 },
    }
}

pub fn cases() -> Vec<Case> {
    let packed = Layout::Packed { offsets: vec![0, 3, 3, 4, 10] };
    let (half, pairs) = (Some((RopeStyle::Half, DIM)), Some((RopeStyle::Interleaved, DIM)));
    vec![
        plain(),
        Case { heads: 4, kv_heads: 2, bias: true, rope: half, ..plain() },
        Case { heads: 3, kv_heads: 1, rope: pairs, layout: packed.clone(), ..plain() },
        Case { qk_norm: Some(norm::NORMS[1]), rope: Some((RopeStyle::Half, 2)), ..plain() },
        // Without RoPE a key bias shifts all scores of a query alike: its gradient is exactly 0.
        Case { qk_norm: Some(norm::NORMS[0]), bias: true, rope: half, layout: packed.clone(), ..plain() },
        Case { qk_norm: Some(norm::NORMS[1]), qk_norm_all_heads: true, kv_heads: 1, rope: half, ..plain() },
        Case {
            qk_norm: Some(norm::NORMS[0]),
            qk_norm_all_heads: true,
            rope: half,
            layout: packed.clone(),
            ..plain()
        },
        Case { window: Some(3), softcap: Some(1.5), ..plain() },
        Case { window: Some(1), rope: half, layout: packed.clone(), ..plain() },
        Case { sink: true, ..plain() },
        Case { heads: 4, kv_heads: 2, softcap: Some(1.5), sink: true, layout: packed.clone(), ..plain() },
        Case { heads: 4, bias: true, sink: true, window: Some(3), rope: half, ..plain() },
        Case {
            heads: 4,
            kv_heads: 2,
            bias: true,
            qk_norm: Some(norm::NORMS[2]),
            qk_norm_all_heads: false,
            window: Some(2),
            softcap: Some(0.7),
            sink: false,
            rope: pairs,
            layout: packed,
        },
    ]
}

impl Case {
    pub fn config(&self) -> AttentionConfig {
        AttentionConfig {
            hidden: HIDDEN,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: DIM,
            qkv_bias: self.bias,
            out_bias: self.bias,
            scores: AttentionParams {
                scale: 0.8,
                softcap: self.softcap,
                causal: true,
                align: MaskAlign::TopLeft,
                left: self.window.map(|w| w - 1),
                right: None,
                fp8: false,
            },
            qk_norm: self.qk_norm,
            qk_norm_all_heads: self.qk_norm_all_heads,
            sink: self.sink,
            std: (0.1, 0.1),
        }
    }

    pub fn tokens(&self) -> usize {
        match &self.layout {
            Layout::Rows { count, len } => count * len,
            Layout::Packed { offsets } => *offsets.last().unwrap() as usize,
        }
    }

    /// Sequence index of each token, and its position in it.
    fn places(&self) -> Vec<(usize, usize)> {
        let lengths: Vec<usize> = match &self.layout {
            Layout::Rows { count, len } => vec![*len; *count],
            Layout::Packed { offsets } => offsets.windows(2).map(|w| (w[1] - w[0]) as usize).collect(),
        };
        lengths.iter().enumerate().flat_map(|(s, n)| (0..*n).map(move |i| (s, i))).collect()
    }

    pub fn positions(&self) -> Vec<i32> {
        self.places().iter().map(|p| p.1 as i32).collect()
    }

    /// Cosine and sine of channel pair `i` at a position, as in the RoPE table.
    fn angle(&self, place: usize, i: usize) -> (f64, f64) {
        let rot = self.rope.map_or(0, |r| r.1) as f64;
        let a = place as f64 * 10f64.powf(-2.0 * i as f64 / rot);
        (f64::from(a.cos() as f32), f64::from(a.sin() as f32))
    }

    pub fn table(&self, rank: &Rank) -> Option<RopeTable> {
        let (style, rot) = self.rope?;
        let all: Vec<(f64, f64)> =
            (0..16).flat_map(|p| (0..rot / 2).map(move |i| (p, i))).map(|(p, i)| self.angle(p, i)).collect();
        let up = |x: Vec<f32>| rank.compute.upload(&x, &[16, rot / 2], Category::Parameters).unwrap();
        let (cos, sin) = (all.iter().map(|a| a.0 as f32).collect(), all.iter().map(|a| a.1 as f32).collect());
        Some(RopeTable { cos: up(cos), sin: up(sin), style })
    }

    pub fn build(&self, dtype: DType) -> (Attention, Setup) {
        let rank = Rank::cpu(2, 1).unwrap();
        let mut d = Declarations::default();
        let a = Attention::declare(&mut d, "attn", self.config(), self.table(&rank)).unwrap();
        (a, Setup::on(rank, d, dtype, 5, 0.9))
    }

    fn rotate(&self, head: &mut [f64], place: usize) {
        let Some((style, rot)) = self.rope else { return };
        for i in 0..rot / 2 {
            let (a, b) = if style == RopeStyle::Half { (i, i + rot / 2) } else { (2 * i, 2 * i + 1) };
            let (c, s) = self.angle(place, i);
            (head[a], head[b]) = (head[a] * c - head[b] * s, head[b] * c + head[a] * s);
        }
    }

    /// f64 reference: all query-key pairs, masked.
    pub fn reference(&self, arrays: &[Vec<f64>]) -> Vec<f64> {
        let (n, g, d) = (self.heads, self.kv_heads, DIM);
        let mut rest = arrays[1..].iter().map(|a| &a[..]);
        let mut next = || rest.next().unwrap();
        let (w, b) = (next(), if self.bias { Some(next()) } else { None });
        let width = (n + 2 * g) * d;
        let mut qkv = linear::reference(&arrays[0], w, b, width);
        let places = self.places();
        if let Some(norm) = self.qk_norm {
            let mut gains = || (next(), if norm.subtract_mean { Some(next()) } else { None });
            for (gain, range) in [(gains(), 0..n), (gains(), n..n + g)] {
                let heads = if self.qk_norm_all_heads { range.len() } else { 1 };
                for t in 0..places.len() {
                    for h in range.clone().step_by(heads) {
                        let (at, all) = (t * width + h * d, heads * d);
                        let y = norm::reference(norm, &qkv[at..at + all], gain.0, gain.1);
                        qkv[at..at + all].copy_from_slice(&y);
                    }
                }
            }
        }
        let sink = if self.sink { Some(next()) } else { None };
        for (t, place) in places.iter().enumerate() {
            for h in 0..n + g {
                self.rotate(&mut qkv[t * width + h * d..][..d], place.1);
            }
        }
        let head = |t: usize, h: usize| &qkv[t * width + h * d..][..d];
        let mut out = vec![0.0; places.len() * n * d];
        for (t, q_place) in places.iter().enumerate() {
            for h in 0..n {
                let kv = h / (n / g);
                let seen: Vec<usize> = (0..places.len())
                    .filter(|k| {
                        let k = places[*k];
                        k.0 == q_place.0
                            && k.1 <= q_place.1
                            && self.window.is_none_or(|w| q_place.1 - k.1 < w)
                    })
                    .collect();
                let score = |k: usize| {
                    let s = f64::from(0.8f32) * dot(head(t, h), head(k, n + kv));
                    self.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
                };
                let weights: Vec<f64> = seen.iter().map(|k| score(*k).exp()).collect();
                let sum = weights.iter().sum::<f64>() + sink.map_or(0.0, |s| s[h].exp());
                for (k, weight) in seen.iter().zip(&weights) {
                    for (o, v) in out[(t * n + h) * d..].iter_mut().zip(head(*k, n + g + kv)) {
                        *o += weight / sum * v;
                    }
                }
            }
        }
        let (w, b) = (next(), if self.bias { Some(next()) } else { None });
        linear::reference(&out, w, b, HIDDEN)
    }
}

#[test]
fn attention_matches_the_reference() {
    for dtype in DTYPES {
        for case in cases() {
            let (attention, s) = case.build(dtype);
            let tokens = case.tokens();
            let (x, xs) = s.input(15, &[tokens, HIDDEN]);
            let (dy, dys) = s.input(25, &[tokens, HIDDEN]);
            let positions = s.integers(&case.positions());
            let (y, saved) = attention.forward(&s.pass(), &x, &case.layout, &positions).unwrap();
            let (dx, work) = attention.backward(&s.pass(), saved, &case.layout, &positions, &dy).unwrap();
            let ours = (s.host(&y), s.host(&dx), s.gradients(work));
            s.compare(&format!("{case:?}"), &|a: &[Vec<f64>]| case.reference(a), &xs, &dys, ours);
        }
    }
}

/// Batched (bshd) and packed (thd) layouts of equal sequences give the same result.
#[test]
fn batched_and_packed_layouts_agree() {
    let rows = Case { heads: 4, rope: Some((RopeStyle::Half, DIM)), window: Some(4), ..plain() };
    let packed = Case { layout: Layout::Packed { offsets: vec![0, 5, 10] }, ..rows.clone() };
    let run = |case: &Case| {
        let (attention, s) = case.build(DType::F32);
        let ((x, _), (dy, _)) = (s.input(16, &[10, HIDDEN]), s.input(26, &[10, HIDDEN]));
        let positions = s.integers(&case.positions());
        let (y, saved) = attention.forward(&s.pass(), &x, &case.layout, &positions).unwrap();
        let (dx, work) = attention.backward(&s.pass(), saved, &case.layout, &positions, &dy).unwrap();
        (s.host(&y), s.host(&dx), s.gradients(work))
    };
    assert_eq!(run(&rows), run(&packed));
}

/// Decoding token by token and in chunks with a KV cache matches one forward over all tokens.
#[test]
fn kv_cache_matches_full_forward() {
    for dtype in DTYPES {
        for case in cases().into_iter().filter(|c| matches!(c.layout, Layout::Rows { .. })) {
            let (attention, s) = case.build(dtype);
            let (x, _) = s.input(17, &[10, HIDDEN]);
            let (y, _) =
                attention.forward(&s.pass(), &x, &case.layout, &s.integers(&case.positions())).unwrap();
            let (x, y) = (s.host(&x), s.host(&y));
            let portion = |v: &[f64], start: usize, len: usize| -> Vec<f64> {
                v.chunks(5 * HIDDEN)
                    .flat_map(|row| row[start * HIDDEN..(start + len) * HIDDEN].to_vec())
                    .collect()
            };
            for lengths in [&[5][..], &[1, 1, 1, 1, 1], &[2, 3], &[3, 1, 1]] {
                let mut cache = attention.cache(&s.pass(), 2, 5).unwrap();
                let mut start = 0;
                for &len in lengths {
                    let new = s.upload(&portion(&x, start, len), &[2 * len, HIDDEN]);
                    let positions: Vec<i32> = (0..2 * len).map(|i| (start + i % len) as i32).collect();
                    let (rows, positions) = (Layout::Rows { count: 2, len }, s.integers(&positions));
                    let out = attention.decode(&s.pass(), &new, &mut cache, &rows, &positions).unwrap();
                    let what = format!("{case:?} {dtype} portions {lengths:?} from {start}");
                    close(&what, dtype, &s.host(&out), &portion(&y, start, len));
                    start += len;
                    assert_eq!(cache.len(), start);
                }
                // A sixth token exceeds the capacity.
                let more = s.upload(&portion(&x, 0, 1), &[2, HIDDEN]);
                let (rows, positions) = (Layout::Rows { count: 2, len: 1 }, s.integers(&[5, 5]));
                let e = attention.decode(&s.pass(), &more, &mut cache, &rows, &positions).unwrap_err();
                assert!(e.to_string().contains("5 of 5 places taken"), "{e}");
            }
        }
    }
}

#[test]
fn layouts_are_checked() {
    for (layout, tokens) in [
        (Layout::Rows { count: 2, len: 5 }, 11),
        (Layout::Rows { count: usize::MAX, len: 2 }, 10),
        (Layout::Packed { offsets: vec![] }, 0),
        (Layout::Packed { offsets: vec![0, 4, 3, 10] }, 10),
        (Layout::Packed { offsets: vec![1, 10] }, 10),
        (Layout::Packed { offsets: vec![0, -1, 10] }, 10),
        (Layout::Packed { offsets: vec![0, 9] }, 10),
    ] {
        let e = layout.check(tokens).unwrap_err().to_string();
        assert!(e.contains("does not cut"), "{e}");
    }
    Layout::Packed { offsets: vec![0, 0, 10] }.check(10).unwrap();
}
