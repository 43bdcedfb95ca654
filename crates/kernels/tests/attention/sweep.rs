//! Every option, size, layout, instruction-set level and dtype against the f64 reference, over seeded random problems.

pub use crate::rng::SeededRng as Random;

use crate::launch::{Layout, UNTOUCHED, compare, launch, lse_strides, rounded};
use crate::oracle::{Answer, Dense, Inputs, attention};
use ferrotron_kernels::cpu::Isa;
use ferrotron_kernels::cpu::attention::{AttentionShape, MaskAlign, Span};
use ferrotron_tensor::{Float, Threads, bf16};

impl Random {
    pub fn pick<X: Copy>(&mut self, from: &[X]) -> X {
        from[self.below(from.len())]
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// Approximately normal: a sum of uniform values.
    pub fn normal(&mut self) -> f64 {
        (0..6).map(|_| self.next() as f64 / u64::MAX as f64 - 0.5).sum::<f64>() * std::f64::consts::SQRT_2
    }

    pub fn dense(&mut self, dims: [usize; 4]) -> Dense {
        // f32 values, so that the reference and an f32 kernel read the same inputs.
        let data = (0..dims.iter().product()).map(|_| f64::from(self.normal() as f32)).collect();
        Dense { dims, data }
    }
}

#[derive(Clone, Debug)]
pub struct Case {
    pub shape: AttentionShape,
    pub spans: Vec<Span>,
    pub layout: Layout,
    pub q: Dense,
    pub k: Dense,
    pub v: Dense,
    pub dout: Dense,
    pub sink: Option<Vec<f64>>,
}

impl Case {
    /// A random problem; long sequences are rare, since the reference is slow.
    pub fn random(r: &mut Random) -> Case {
        let kv_heads = r.pick(&[1, 2, 3]);
        let heads = kv_heads * r.pick(&[1, 1, 2, 4]);
        let d_qk = r.pick(&[1, 3, 8, 16, 24, 32, 33, 40, 64, 64, 80, 128, 192, 256]);
        let d_v = if r.chance(70) { d_qk } else { r.pick(&[1, 5, 16, 48, 64, 128]) };
        let length = |r: &mut Random| match r.below(20) {
            0 => 0,
            1 => 1,
            2 => 300 + r.below(300),
            3..=8 => 60 + r.below(140),
            9 => r.pick(&[32, 64, 96, 128, 256]),
            _ => 1 + r.below(70),
        };
        let packed = r.chance(40);
        let count = if packed { 1 + r.below(4) } else { 1 + r.below(3) };
        let (mut spans, mut tq, mut tk) = (Vec::new(), 0, 0);
        let same = r.chance(60);
        let lengths = (length(r), length(r));
        for s in 0..count {
            let (q_len, k_len) = if packed { (length(r), length(r)) } else { lengths };
            let k_len = if same { q_len } else { k_len };
            // Tokens in gaps between packed sequences belong to none.
            let gap = if packed { r.below(3) } else { 0 };
            let (batch, q_start, k_start) = if packed { (0, tq + gap, tk + gap) } else { (s, 0, 0) };
            spans.push(Span { batch, q_start, q_len, k_start, k_len, lse_base: 0 });
            (tq, tk) = if packed { (q_start + q_len, k_start + k_len) } else { (q_len, k_len) };
        }
        let (tq, tk) = if packed { (tq + r.below(3), tk) } else { (tq, tk) };
        let (tq, tk) = if same { (tq.max(tk), tq.max(tk)) } else { (tq, tk) };
        for s in &mut spans {
            s.lse_base = (s.batch * tq + s.q_start) * heads;
        }
        let window = match r.below(4) {
            0 => (Some(r.below(40)), Some(r.below(20))),
            1 => (Some(r.below(100)), None),
            _ => (None, None),
        };
        let mut shape = AttentionShape {
            heads,
            kv_heads,
            d_qk,
            d_v,
            scale: (d_qk as f32).sqrt().recip() * r.pick(&[1.0, 1.0, 0.5, 2.0]),
            softcap: r.chance(25).then(|| r.pick(&[0.5, 2.0, 30.0])),
            causal: r.chance(60),
            align: r.pick(&[MaskAlign::TopLeft, MaskAlign::BottomRight]),
            window,
            fp8: false,
            lse_head: 0,
            lse_token: 0,
        };
        lse_strides(&mut shape);
        let mut layouts = vec![Layout::Bshd, Layout::Sbhd, Layout::KvPairs];
        layouts.extend((tq == tk).then_some(Layout::Fused));
        layouts.extend((tq == tk && heads == kv_heads).then_some(Layout::PerHead));
        let batches = spans.iter().map(|s| s.batch + 1).max().unwrap_or(1);
        Case {
            layout: r.pick(&layouts),
            q: r.dense([batches, tq, heads, d_qk]),
            k: r.dense([batches, tk, kv_heads, d_qk]),
            v: r.dense([batches, tk, kv_heads, d_v]),
            dout: r.dense([batches, tq, heads, d_v]),
            sink: r.chance(35).then(|| (0..heads).map(|_| f64::from(r.normal() as f32)).collect()),
            shape,
            spans,
        }
    }

    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            shape: &self.shape,
            spans: &self.spans,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            dout: &self.dout,
            sink: self.sink.as_deref(),
        }
    }

    /// The same problem with inputs rounded to `T`.
    pub fn rounded<T: Float>(&self) -> Case {
        Case {
            q: rounded::<T>(&self.q),
            k: rounded::<T>(&self.k),
            v: rounded::<T>(&self.v),
            dout: rounded::<T>(&self.dout),
            ..self.clone()
        }
    }

    /// Reference result, with outputs rounded to `T`.
    pub fn oracle<T: Float>(&self) -> Answer {
        let mut a = attention(|x| T::from_f32(x as f32).to_f64(), &self.inputs());
        // Tokens outside all spans are not written.
        for b in 0..self.q.dims[0] {
            for t in 0..self.q.dims[1] {
                if !self.spans.iter().any(|s| s.batch == b && (s.q_start..s.q_start + s.q_len).contains(&t)) {
                    for h in 0..self.shape.heads {
                        for x in [&mut a.out, &mut a.lse, &mut a.dq] {
                            x.row_mut(b, t, h).fill(f64::from(UNTOUCHED));
                        }
                    }
                }
            }
            for t in 0..self.k.dims[1] {
                if !self.spans.iter().any(|s| s.batch == b && (s.k_start..s.k_start + s.k_len).contains(&t)) {
                    for h in 0..self.shape.kv_heads {
                        a.dk.row_mut(b, t, h).fill(f64::from(UNTOUCHED));
                        a.dv.row_mut(b, t, h).fill(f64::from(UNTOUCHED));
                    }
                }
            }
        }
        a
    }

    pub fn describe(&self) -> String {
        format!("{:?} {:?} {:?} sink {:?}", self.layout, self.shape, self.spans, self.sink)
    }
}

/// Runs a problem in `T` on every level and compares.
pub fn verify<T: Float>(threads: &Threads, case: &Case) {
    let case = case.rounded::<T>();
    let want = case.oracle::<T>();
    // The error of a score is relative to its magnitude, and determines all other errors.
    let size = f64::from(case.shape.scale * (case.shape.d_qk as f32).sqrt()).max(1.0);
    for isa in Isa::all() {
        let got = launch::<T>(threads, isa, case.layout, &case.inputs());
        compare::<T>(&format!("{isa:?} {} {}", T::DTYPE, case.describe()), &got, &want, 1e-5, size);
    }
}

#[test]
fn random_problems_match_the_f64_reference() {
    let threads = Threads::new(2).unwrap();
    let mut r = Random(20_261_115);
    for _ in 0..150 {
        let case = Case::random(&mut r);
        verify::<f32>(&threads, &case);
        verify::<bf16>(&threads, &case);
    }
}

/// Sequences long enough that the keys of a head are split over several tasks.
#[test]
fn sequences_of_several_chunks_match_the_f64_reference() {
    let threads = Threads::new(2).unwrap();
    let mut r = Random(7);
    for (q_len, k_len, causal, window) in [
        (1100, 1100, true, (None, None)),
        (70, 1300, true, (None, None)),
        (900, 900, true, (Some(100), None)),
        (513, 257, false, (None, None)),
    ] {
        let mut case = Case::random(&mut r);
        case.shape.heads = 2;
        case.shape.kv_heads = 1;
        (case.shape.d_qk, case.shape.d_v) = (16, 8);
        (case.shape.causal, case.shape.window, case.shape.align) = (causal, window, MaskAlign::BottomRight);
        (case.shape.scale, case.shape.softcap) = (0.25, None);
        lse_strides(&mut case.shape);
        case.spans = vec![Span { batch: 0, q_start: 0, q_len, k_start: 0, k_len, lse_base: 0 }];
        (case.q, case.dout) = (r.dense([1, q_len, 2, 16]), r.dense([1, q_len, 2, 8]));
        (case.k, case.v) = (r.dense([1, k_len, 1, 16]), r.dense([1, k_len, 1, 8]));
        case.sink = Some(vec![0.3, -1.0]);
        case.layout = Layout::Sbhd;
        verify::<f32>(&threads, &case);
        verify::<bf16>(&threads, &case);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut r = Random(99);
    for _ in 0..12 {
        let case = Case::random(&mut r);
        for isa in Isa::all() {
            let bits = |n: usize| {
                let threads = Threads::new(n).unwrap();
                let a = launch::<bf16>(&threads, isa, case.layout, &case.inputs());
                let b = launch::<f32>(&threads, isa, case.layout, &case.inputs());
                [a, b].map(|a| {
                    [a.out.data, a.lse.data, a.dq.data, a.dk.data, a.dv.data, a.dsink]
                        .map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
                })
            };
            let one = bits(1);
            for n in [2, 3, 7] {
                assert!(bits(n) == one, "{n} threads, {isa:?}, {}", case.describe());
            }
        }
    }
}
