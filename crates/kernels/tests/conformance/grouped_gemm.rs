//! Grouped GEMMs: every segment of rows is multiplied by the weight of its expert.

use super::devices::*;
use ferrotron_kernels::{GroupedGemm, GroupedWgrad, Segments};
use ferrotron_tensor::{DType, Tensor};

/// Rows of segments, each starting at a multiple of `align`, and `behind` padding rows after the last.
pub struct Layout {
    pub counts: Vec<usize>,
    pub offsets: Vec<usize>,
    pub rows: usize,
}

impl Layout {
    pub fn new(counts: &[usize], align: usize, behind: usize) -> Layout {
        let (mut at, mut offsets) = (0, Vec::new());
        for n in counts {
            offsets.push(at);
            at = (at + n).next_multiple_of(align);
        }
        offsets.push(at);
        Layout { counts: counts.to_vec(), offsets, rows: at + behind }
    }

    pub fn on(&self, h: &TestDevice) -> [Tensor; 2] {
        let ids = |v: &[usize]| h.ids(&v.iter().map(|x| *x as i32).collect::<Vec<_>>());
        [ids(&self.offsets), ids(&self.counts)]
    }

    /// The segment of each row.
    pub fn owners(&self) -> Vec<Option<usize>> {
        let mut all = vec![None; self.rows];
        for (e, n) in self.counts.iter().enumerate() {
            all[self.offsets[e]..][..*n].fill(Some(e));
        }
        all
    }

    /// Random values `[rows, width]`, NaN in padding rows.
    fn numbers(&self, dtype: DType, seed: u64, width: usize) -> Vec<f64> {
        let mut x = numbers(dtype, seed, self.rows * width);
        for (r, owner) in self.owners().iter().enumerate() {
            if owner.is_none() {
                x[r * width..][..width].fill(f64::NAN);
            }
        }
        x
    }
}

/// Few and many segments, with lengths around tile boundaries.
fn layouts() -> Vec<Layout> {
    let cycle = |n: usize, of: &[usize]| (0..n).map(|i| of[i % of.len()]).collect::<Vec<_>>();
    vec![
        Layout::new(&[15], 1, 0),
        Layout::new(&[300], 1, 7),
        Layout::new(&[0, 0, 0], 1, 5),
        Layout::new(&[129, 0, 127], 1, 0),
        Layout::new(&[0, 1, 15, 127, 128, 129, 300, 0], 1, 40),
        Layout::new(&[300, 129, 0, 128, 1, 127, 15, 128], 16, 0),
        Layout::new(&[1, 0, 127, 300], 128, 130),
        Layout::new(&cycle(130, &[0, 1, 3, 0, 15, 0, 0, 9, 2]), 1, 3),
        Layout::new(&cycle(130, &[2, 0, 17, 0, 1]), 8, 0),
    ]
}

const WIDTHS: [[usize; 2]; 8] =
    [[8, 24], [24, 8], [64, 96], [96, 200], [200, 64], [264, 96], [64, 264], [200, 264]];

/// `y = x·wᵀ` per segment, zeros in padding rows; x `[rows, k]`, w `[E, n, k]`.
fn expected(l: &Layout, [k, n]: [usize; 2], x: &[f64], w: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let mut y = vec![0.0; l.rows * n];
    for (r, owner) in l.owners().iter().enumerate() {
        let Some(e) = owner else { continue };
        for j in 0..n {
            let sum = dot(&x[r * k..][..k], &w[(e * n + j) * k..][..k]);
            y[r * n + j] = sum + bias.map_or(0.0, |b| b[e * n + j]);
        }
    }
    y
}

/// The transpose of each matrix of `w [E, n, k]`.
fn transposed(w: &[f64], e: usize, n: usize, k: usize) -> Vec<f64> {
    (0..e * n * k).map(|i| w[i / (n * k) * n * k + i % n * k + i / n % k]).collect()
}

#[test]
fn segments_use_the_weight_of_their_expert() {
    for_moe_dtypes(|h, dtype| {
        for (which, l) in layouts().iter().enumerate() {
            let (segments, experts) = (l.on(h), l.counts.len());
            let segments = Segments { offsets: &segments[0], counts: &segments[1] };
            for (at, [k, n]) in WIDTHS.into_iter().enumerate() {
                if experts > 8 && k * n > 8000 {
                    continue;
                }
                let framed = (which + at) % 2 == 1;
                let x = l.numbers(dtype, 1, k);
                let (w, bias) = (numbers(dtype, 2, experts * n * k), numbers(dtype, 3, experts * n));
                let bias_t = h.tensor(dtype, &[experts, n], &bias);
                let xt = h.placed(framed, dtype, &[l.rows, k], &x);
                let without = expected(l, [k, n], &x, &w, None);
                let with = expected(l, [k, n], &x, &w, Some(&bias));
                for (as_stored, biased) in [(false, false), (true, true), (false, true), (true, false)] {
                    let shape = if as_stored { [experts, k, n] } else { [experts, n, k] };
                    let stored = if as_stored { transposed(&w, experts, n, k) } else { w.clone() };
                    let wt = h.placed(framed, dtype, &shape, &stored);
                    let y = h.placed(framed, dtype, &[l.rows, n], &vec![f64::NAN; l.rows * n]);
                    let (x, w) = (&xt.view, &wt.view);
                    let bias_t = biased.then_some(&bias_t);
                    let g = GroupedGemm { x, w, as_stored, segments, bias: bias_t, y: &y.view };
                    h.k.grouped_gemm(&h.s, &g).unwrap();
                    let what = format!(
                        "{} {dtype} layout {which} k {k} n {n} stored {as_stored} bias {biased} framed {framed}",
                        h.name
                    );
                    let wanted = if biased { &with } else { &without };
                    close(&what, dtype, &h.inside(&y), wanted, (k + 2) as f64 * 2f64.powi(-23));
                }
            }
        }
    });
}

/// `dw [E, n, k]`, added to `old`.
fn gradient(l: &Layout, [k, n]: [usize; 2], dy: &[f64], x: &[f64], old: Option<&[f64]>) -> Vec<f64> {
    let mut dw = vec![0.0; l.counts.len() * n * k];
    for (r, owner) in l.owners().iter().enumerate() {
        let Some(e) = owner else { continue };
        for (j, dy) in dy[r * n..][..n].iter().enumerate() {
            let row = &mut dw[(e * n + j) * k..][..k];
            row.iter_mut().zip(&x[r * k..][..k]).for_each(|(sum, x)| *sum += dy * x);
        }
    }
    dw.iter_mut().zip(old.unwrap_or_default()).for_each(|(sum, old)| *sum += old);
    dw
}

fn check_gradient(
    h: &TestDevice,
    dtype: DType,
    l: &Layout,
    [k, n]: [usize; 2],
    framed: bool,
    accumulate: bool,
) {
    let (segments, experts) = (l.on(h), l.counts.len());
    let segments = Segments { offsets: &segments[0], counts: &segments[1] };
    let (dy, x) = (l.numbers(dtype, 4, n), l.numbers(dtype, 5, k));
    let old = numbers(DType::F32, 6, experts * n * k);
    let dyt = h.placed(framed, dtype, &[l.rows, n], &dy);
    let xt = h.placed(framed, dtype, &[l.rows, k], &x);
    let before = if accumulate { old.clone() } else { vec![f64::NAN; old.len()] };
    let run = || {
        let dw = h.placed(framed, DType::F32, &[experts, n, k], &before);
        let g = GroupedWgrad { dy: &dyt.view, x: &xt.view, segments, dw: (&dw.view, accumulate) };
        h.k.grouped_wgrad(&h.s, &g).unwrap();
        h.inside(&dw)
    };
    let (counts, ours) = (&l.counts, run());
    let what = format!("{} {dtype} {counts:?} k {k} n {n} accumulate {accumulate} framed {framed}", h.name);
    let wanted = gradient(l, [k, n], &dy, &x, accumulate.then_some(&old));
    let most = counts.iter().max().copied().unwrap_or(0);
    close(&what, DType::F32, &ours, &wanted, (most + 2) as f64 * 2f64.powi(-23));
    let same = run().iter().zip(&ours).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same, "{what}: another run gave other bits");
}

#[test]
fn wgrad_of_every_segment() {
    for_moe_dtypes(|h, dtype| {
        for (which, l) in layouts().iter().enumerate() {
            for (at, widths) in WIDTHS.into_iter().enumerate() {
                if l.counts.len() > 8 && widths[0] * widths[1] > 8000 {
                    continue;
                }
                let framed = (which + at) % 2 == 1;
                for accumulate in [false, true] {
                    check_gradient(h, dtype, l, widths, framed, accumulate);
                }
            }
        }
    });
}

/// One segment has most of the rows: its wgrad is summed in several partial sums.
#[test]
fn a_long_segment_is_summed_in_order() {
    for_moe_dtypes(|h, dtype| {
        let l = Layout::new(&[70, 6400, 0, 2049, 300], 1, 9);
        for (accumulate, widths) in [(false, [264, 136]), (true, [72, 264])] {
            check_gradient(h, dtype, &l, widths, false, accumulate);
        }
    });
}

/// k = 0.
#[test]
fn k_of_zero_leaves_only_the_bias() {
    for_moe_dtypes(|h, dtype| {
        let l = Layout::new(&[3, 0, 2], 4, 1);
        let segments = l.on(h);
        let segments = Segments { offsets: &segments[0], counts: &segments[1] };
        let (n, bias) = (8, numbers(dtype, 1, 24));
        let bias_t = h.tensor(dtype, &[3, n], &bias);
        let (x, w) = (h.tensor(dtype, &[l.rows, 0], &[]), h.tensor(dtype, &[3, n, 0], &[]));
        let y = h.poisoned(dtype, &[l.rows, n]);
        let g = GroupedGemm { x: &x, w: &w, as_stored: false, segments, bias: Some(&bias_t), y: &y };
        h.k.grouped_gemm(&h.s, &g).unwrap();
        let wanted = expected(&l, [0, n], &[], &[], Some(&bias));
        close(&h.name, dtype, &h.host(&y), &wanted, 0.0);
        // n = 0 is accepted.
        let (w, y) = (h.tensor(dtype, &[3, 0, 0], &[]), h.tensor(dtype, &[l.rows, 0], &[]));
        h.k.grouped_gemm(&h.s, &GroupedGemm { w: &w, y: &y, bias: None, ..g }).unwrap();
    });
}

#[test]
fn invalid_segments_are_errors() {
    for_moe_dtypes(|h, dtype| {
        let make = |shape: &[usize]| h.poisoned(dtype, shape);
        let l = Layout::new(&[2, 3], 1, 0);
        let [offsets, counts] = l.on(h);
        let segments = Segments { offsets: &offsets, counts: &counts };
        let (x, w, y) = (make(&[5, 4]), make(&[2, 6, 4]), make(&[5, 6]));
        let good = GroupedGemm { x: &x, w: &w, as_stored: false, segments, bias: None, y: &y };
        let short = h.ids(&[0, 2]);
        let wide = h.poisoned(DType::F32, &[3]);
        let (other, bias) = (make(&[2, 4, 6]), make(&[2, 4]));
        let odd = h.tensor(if dtype == DType::F32 { DType::BF16 } else { DType::F32 }, &[5, 6], &[0.0; 30]);
        for (what, bad) in [
            ("transposed weights", GroupedGemm { w: &other, ..good }),
            ("as stored, but they are not", GroupedGemm { as_stored: true, ..good }),
            ("bias", GroupedGemm { bias: Some(&bias), ..good }),
            ("rows", GroupedGemm { y: &make(&[4, 6]), ..good }),
            ("type", GroupedGemm { y: &odd, ..good }),
            ("offsets", GroupedGemm { segments: Segments { offsets: &short, counts: &counts }, ..good }),
            (
                "type of offsets",
                GroupedGemm { segments: Segments { offsets: &wide, counts: &counts }, ..good },
            ),
        ] {
            assert!(h.k.grouped_gemm(&h.s, &bad).is_err(), "{} {dtype}: {what}", h.name);
        }
        let (dy, dw) = (make(&[5, 6]), h.poisoned(DType::F32, &[2, 6, 4]));
        let good = GroupedWgrad { dy: &dy, x: &x, segments, dw: (&dw, false) };
        let transposed = h.poisoned(DType::F32, &[2, 4, 6]);
        let bf16_dw = h.poisoned(DType::BF16, &[2, 6, 4]);
        for (what, bad) in [
            ("transposed gradient", GroupedWgrad { dw: (&transposed, false), ..good }),
            ("type of the gradient", GroupedWgrad { dw: (&bf16_dw, false), ..good }),
            ("rows", GroupedWgrad { dy: &make(&[4, 6]), ..good }),
        ] {
            assert!(h.k.grouped_wgrad(&h.s, &bad).is_err(), "{} {dtype}: {what}", h.name);
        }
    });
}
