//! Multi-head latent attention.

use super::support::*;
use super::{linear, norm};
use ferrotron_engine::attention::{Layout, MlaConfig, MultiLatentAttention, RopeTable};
use ferrotron_engine::{Declarations, Rank, Recompute, StepContext};
use ferrotron_kernels::{AttentionParams, MaskAlign, Norm, RopeStyle};
use ferrotron_tensor::{Category, DType};

/// One configuration of the block.
#[derive(Clone, Debug)]
pub struct Case {
    pub heads: usize,
    pub q_rank: Option<usize>,
    pub kv_rank: usize,
    /// Channels without RoPE, with RoPE, and of values.
    pub widths: [usize; 3],
    pub bias: bool,
    pub sink: bool,
    pub style: Option<RopeStyle>,
    pub window: Option<usize>,
    pub layout: Layout,
}

pub const HIDDEN: usize = 6;
const NORM: Norm = Norm { subtract_mean: false, eps: 1e-6, zero_centred: false };
const SCALE: f32 = 0.8;

pub fn plain() -> Case {
    Case {
        heads: 2,
        q_rank: Some(5),
        kv_rank: 4,
        widths: [4, 2, 3],
        bias: false,
        sink: false,
        style: Some(RopeStyle::Interleaved),
        window: None,
        layout: Layout::Rows { count: 2, len: 5 },
    }
}

pub fn cases() -> Vec<Case> {
    let packed = Layout::Packed { offsets: vec![0, 3, 3, 4, 10] };
    vec![
        plain(),
        Case { heads: 3, q_rank: None, layout: packed.clone(), ..plain() },
        Case { widths: [3, 4, 7], style: Some(RopeStyle::Half), bias: true, ..plain() },
        Case { heads: 4, q_rank: None, bias: true, sink: true, layout: packed.clone(), ..plain() },
        Case { heads: 1, style: None, window: Some(2), layout: packed, ..plain() },
    ]
}

impl Case {
    fn config(&self) -> MlaConfig {
        let [nope, rope, v] = self.widths;
        MlaConfig {
            hidden: HIDDEN,
            heads: self.heads,
            q_rank: self.q_rank,
            kv_rank: self.kv_rank,
            nope,
            rope,
            v,
            norm: NORM,
            down_bias: self.bias,
            out_bias: self.bias,
            sink: self.sink,
            scores: AttentionParams {
                scale: SCALE,
                softcap: None,
                causal: true,
                align: MaskAlign::TopLeft,
                left: self.window.map(|w| w - 1),
                right: None,
                fp8: false,
            },
            std: (0.1, 0.1),
        }
    }

    pub fn tokens(&self) -> usize {
        self.layout.tokens()
    }

    /// Sequence index of each token, and its position in it.
    fn places(&self) -> Vec<(usize, usize)> {
        self.layout.lengths().iter().enumerate().flat_map(|(s, n)| (0..*n).map(move |i| (s, i))).collect()
    }

    pub fn positions(&self) -> Vec<i32> {
        self.places().iter().map(|p| p.1 as i32).collect()
    }

    /// Cosine and sine of channel pair `i` at a position, as in the RoPE table.
    fn angle(&self, place: usize, i: usize) -> (f64, f64) {
        let a = place as f64 * 10f64.powf(-2.0 * i as f64 / self.widths[1] as f64);
        (f64::from(a.cos() as f32), f64::from(a.sin() as f32))
    }

    fn table(&self, rank: &Rank) -> Option<RopeTable> {
        let (style, pairs) = (self.style?, self.widths[1] / 2);
        let up = |f: fn((f64, f64)) -> f64| {
            let x: Vec<f32> = (0..16 * pairs).map(|i| f(self.angle(i / pairs, i % pairs)) as f32).collect();
            rank.compute.upload(&x, &[16, pairs], Category::Parameters).unwrap()
        };
        Some(RopeTable { cos: up(|a| a.0), sin: up(|a| a.1), style })
    }

    pub fn declare(&self, d: &mut Declarations, rank: &Rank) -> MultiLatentAttention {
        MultiLatentAttention::declare(d, "attn", self.config(), self.table(rank)).unwrap()
    }

    pub fn build(&self, dtype: DType) -> (MultiLatentAttention, Setup) {
        let rank = Rank::cpu(2, 1).unwrap();
        let mut d = Declarations::default();
        let a = self.declare(&mut d, &rank);
        (a, Setup::on(rank, d, dtype, 5, 0.9))
    }

    fn rotate(&self, x: &mut [f64], place: usize) {
        let Some(style) = self.style else { return };
        let half = x.len() / 2;
        for i in 0..half {
            let (a, b) = if style == RopeStyle::Half { (i, i + half) } else { (2 * i, 2 * i + 1) };
            let (c, s) = self.angle(place, i);
            (x[a], x[b]) = (x[a] * c - x[b] * s, x[b] * c + x[a] * s);
        }
    }

    /// f64 reference, token by token and head by head.
    pub fn reference(&self, arrays: &[Vec<f64>]) -> Vec<f64> {
        let (n, [nope, rope, dv], kv_rank) = (self.heads, self.widths, self.kv_rank);
        let (q_rank, places) = (self.q_rank.unwrap_or(0), self.places());
        let mut rest = arrays[1..].iter().map(|a| &a[..]);
        let mut next = || rest.next().unwrap();
        let down = next();
        let bias = if self.bias { Some(next()) } else { None };
        let narrow_width = q_rank + kv_rank + rope;
        let narrow = linear::reference(&arrays[0], down, bias, narrow_width);
        let part = |from: usize, len: usize| -> Vec<f64> {
            narrow.chunks(narrow_width).flat_map(|row| row[from..from + len].to_vec()).collect()
        };
        let mut q = match self.q_rank {
            Some(r) => {
                let gain = next();
                linear::reference(
                    &norm::reference(NORM, &part(0, r), gain, None),
                    next(),
                    None,
                    n * (nope + rope),
                )
            }
            None => linear::reference(&arrays[0], next(), None, n * (nope + rope)),
        };
        let gain = next();
        let normed = norm::reference(NORM, &part(q_rank, kv_rank), gain, None);
        let kv = linear::reference(&normed, next(), None, n * (nope + dv));
        let sink = if self.sink { Some(next()) } else { None };
        let mut k_rope = part(q_rank + kv_rank, rope);
        for (t, place) in places.iter().enumerate() {
            self.rotate(&mut k_rope[t * rope..][..rope], place.1);
            for h in 0..n {
                self.rotate(&mut q[(t * n + h) * (nope + rope) + nope..][..rope], place.1);
            }
        }
        let mut out = Vec::new();
        for (t, at) in places.iter().enumerate() {
            for h in 0..n {
                let q = &q[(t * n + h) * (nope + rope)..][..nope + rope];
                let sees = |k: &(usize, usize)| {
                    k.0 == at.0 && k.1 <= at.1 && self.window.is_none_or(|w| at.1 - k.1 < w)
                };
                let seen: Vec<usize> = (0..places.len()).filter(|k| sees(&places[*k])).collect();
                let kv = |k: usize| &kv[(k * n + h) * (nope + dv)..][..nope + dv];
                let weight = |k: &usize| {
                    let key = [&kv(*k)[..nope], &k_rope[k * rope..][..rope]].concat();
                    (f64::from(SCALE) * dot(q, &key)).exp()
                };
                let weights: Vec<f64> = seen.iter().map(weight).collect();
                let sum = weights.iter().sum::<f64>() + sink.map_or(0.0, |s| s[h].exp());
                out.extend((0..dv).map(|i| {
                    let terms = seen.iter().zip(&weights).map(|(k, w)| w / sum * kv(*k)[nope + i]);
                    terms.sum::<f64>()
                }));
            }
        }
        let (w, b) = (next(), if self.bias { Some(next()) } else { None });
        linear::reference(&out, w, b, HIDDEN)
    }
}

/// Output, input gradient and parameter gradients, with saved activations moved before backward.
fn run(
    case: &Case,
    s: &Setup,
    block: &MultiLatentAttention,
    recompute: Recompute,
) -> super::tensor_parallel::Numbers {
    let p = &StepContext { recompute, ..s.pass() };
    let ((x, _), (dy, _)) = (s.input(15, &[case.tokens(), HIDDEN]), s.input(25, &[case.tokens(), HIDDEN]));
    let positions = s.integers(&case.positions());
    let (y, mut saved) = block.forward(p, &x, &case.layout, &positions).unwrap();
    if recompute.norm {
        saved.drop_input();
    }
    let count = move_saved(&s.rank, &s.params, &mut saved);
    assert!(count >= 8, "{count}");
    if recompute.norm {
        saved.restore_input(&x);
    }
    let (dx, work) = block.backward(p, saved, &case.layout, &positions, &dy).unwrap();
    (s.host(&y), s.host(&dx), s.gradients(work))
}

#[test]
fn mla_matches_the_reference() {
    for dtype in DTYPES {
        for case in cases() {
            let (block, s) = case.build(dtype);
            let (xs, dys) =
                (s.input(15, &[case.tokens(), HIDDEN]).1, s.input(25, &[case.tokens(), HIDDEN]).1);
            let ours = run(&case, &s, &block, Recompute::default());
            let again = run(&case, &s, &block, Recompute { norm: true, ..Recompute::default() });
            assert_eq!(ours, again, "{case:?} {dtype}: norms made again");
            s.compare(&format!("{case:?}"), &|a: &[Vec<f64>]| case.reference(a), &xs, &dys, ours);
        }
    }
}

/// Decoding token by token and in chunks with a KV cache matches one forward over all tokens.
#[test]
fn kv_cache_of_mla_matches_full_forward() {
    for dtype in DTYPES {
        for case in cases().into_iter().map(|c| Case { layout: Layout::Rows { count: 2, len: 5 }, ..c }) {
            let (block, s) = case.build(dtype);
            let (x, _) = s.input(17, &[10, HIDDEN]);
            let (y, _) = block.forward(&s.pass(), &x, &case.layout, &s.integers(&case.positions())).unwrap();
            let (x, y) = (s.host(&x), s.host(&y));
            let portion = |v: &[f64], start: usize, len: usize| -> Vec<f64> {
                let rows = v.chunks(5 * HIDDEN);
                rows.flat_map(|row| row[start * HIDDEN..(start + len) * HIDDEN].to_vec()).collect()
            };
            for lengths in [&[5][..], &[1, 1, 1, 1, 1], &[2, 3], &[3, 1, 1]] {
                let mut cache = block.cache(&s.pass(), 2, 5).unwrap();
                let mut start = 0;
                for &len in lengths {
                    let new = s.upload(&portion(&x, start, len), &[2 * len, HIDDEN]);
                    let positions: Vec<i32> = (0..2 * len).map(|i| (start + i % len) as i32).collect();
                    let (rows, positions) = (Layout::Rows { count: 2, len }, s.integers(&positions));
                    let out = block.decode(&s.pass(), &new, &mut cache, &rows, &positions).unwrap();
                    let what = format!("{case:?} {dtype} portions {lengths:?} from {start}");
                    close(&what, dtype, &s.host(&out), &portion(&y, start, len));
                    start += len;
                }
                let more = s.upload(&portion(&x, 0, 1), &[2, HIDDEN]);
                let (rows, positions) = (Layout::Rows { count: 2, len: 1 }, s.integers(&[5, 5]));
                let e = block.decode(&s.pass(), &more, &mut cache, &rows, &positions).unwrap_err();
                assert!(e.to_string().contains("5 of 5 places taken"), "{e}");
            }
        }
    }
}

/// Assembled keys are not saved: only q, k_nope with v, and the shared k_rope.
#[test]
fn mla_saves_the_parts_of_keys() {
    let case = Case { heads: 4, ..plain() };
    let (block, s) = case.build(DType::F32);
    let (x, _) = s.input(15, &[10, HIDDEN]);
    let (_, mut saved) = block.forward(&s.pass(), &x, &case.layout, &s.integers(&case.positions())).unwrap();
    let mut kept = std::collections::BTreeMap::new();
    ferrotron_engine::Saved::tensors(&mut saved, &mut |t| {
        let size: &mut usize = kept.entry(t.allocation_id()).or_default();
        *size = (*size).max(t.numel());
    });
    let ([nope, rope, v], n) = (case.widths, case.heads);
    // Attention output, q, k and v, log-sum-exp; norm outputs, their input (with the shared channels), one statistic per
    // norm; the block's input.
    let narrow = 5 + case.kv_rank;
    let wanted = n * v + n * (nope + rope) + n * (nope + v) + n + narrow + (narrow + rope) + 2 + HIDDEN;
    // Views of the down-projection buffer cover less than all of it.
    let found: usize = kept.values().sum();
    assert!(found <= 10 * wanted && found + 10 * narrow >= 10 * wanted, "{found} of {}", 10 * wanted);
}

#[test]
fn a_rope_table_of_another_width_is_refused() {
    let rank = Rank::cpu(1, 1).unwrap();
    let (case, other) = (plain(), Case { widths: [4, 4, 3], ..plain() });
    let mut d = Declarations::default();
    let made = MultiLatentAttention::declare(&mut d, "attn", case.config(), other.table(&rank));
    assert!(made.err().unwrap().to_string().contains("2 channels"));
}
