//! MoE permutation: selections sorted by expert, and rows moved by the map.

use super::devices::*;
use ferrotron_kernels::RowMap;
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{Category, DType, Element, Tensor};

/// Contiguous; not aligned to 16 bytes with `shift`.
pub fn shifted(h: &TestDevice, shift: usize, dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
    let whole: Vec<f64> = vec![0.0; shift].into_iter().chain(values.iter().copied()).collect();
    h.tensor(dtype, &[whole.len()], &whole).narrow(0, shift, values.len()).unwrap().view(shape).unwrap()
}

/// Random integers in `low..high`.
pub fn draws(seed: u64, n: usize, low: i32, high: i32) -> Vec<i32> {
    let span = f64::from(high - low);
    numbers(DType::F32, seed, n).iter().map(|x| low + ((x + 1.0) / 2.0 * span).floor() as i32).collect()
}

pub fn ints(h: &TestDevice, shape: &[usize], values: &[i32]) -> Tensor {
    h.s.upload(values, shape, Category::Workspace).unwrap()
}

/// A row map filled with values that the sort must overwrite.
fn fresh(h: &TestDevice, shape: &[usize], experts: usize, rows: usize) -> RowMap {
    let junk = |shape: &[usize]| ints(h, shape, &vec![-77; shape.iter().product()]);
    RowMap {
        offsets: junk(&[experts + 1]),
        counts: junk(&[experts]),
        rows: junk(shape),
        source: junk(&[rows]),
    }
}

/// By definition: expert by expert, selection by selection.
#[derive(Debug, PartialEq)]
pub struct Plan {
    pub offsets: Vec<i32>,
    pub counts: Vec<i32>,
    pub rows: Vec<i32>,
    pub source: Vec<i32>,
}

pub fn plan(index: &[i32], first: i32, experts: usize, align: usize, n: usize) -> Plan {
    let (mut rows, mut source) = (vec![-1; index.len()], Vec::new());
    let (mut offsets, mut counts) = (vec![], vec![]);
    for e in first..first + experts as i32 {
        offsets.push(source.len() as i32);
        for selection in (0..index.len()).filter(|c| index[*c] == e) {
            rows[selection] = source.len() as i32;
            source.push(selection as i32);
        }
        counts.push(source.len() as i32 - offsets[offsets.len() - 1]);
        while source.len() % align != 0 {
            source.push(-1);
        }
    }
    offsets.push(source.len() as i32);
    source.resize(n, -1);
    Plan { offsets, counts, rows, source }
}

fn found(h: &TestDevice, map: &RowMap) -> Plan {
    let get = |t: &Tensor| h.s.download::<i32>(t).unwrap();
    Plan {
        offsets: get(&map.offsets),
        counts: get(&map.counts),
        rows: get(&map.rows),
        source: get(&map.source),
    }
}

/// Selections: random; with empty slots; few of many experts; one expert only.
fn selections(kind: usize, seed: u64, n: usize, first: i32, experts: usize) -> Vec<i32> {
    let e = experts as i32;
    match kind {
        0 => draws(seed, n, first, first + e),
        // Experts of other ranks, and -1.
        1 => draws(seed, n, -1, first + e + 2),
        2 => draws(seed, n, first, first + e).iter().map(|i| if i % 3 == 0 { first } else { *i }).collect(),
        _ => vec![first + e - 1; n],
    }
}

#[test]
fn selections_are_sorted_by_expert() {
    for h in devices() {
        let check = |tokens: usize, k: usize, experts: usize, align: usize, first: i32, kind: usize| {
            let index = selections(kind, 1 + tokens as u64, tokens * k, first, experts);
            let n = tokens * k + experts * (align - 1) + kind;
            let map = fresh(&h, &[tokens, k], experts, n);
            h.k.sort_by_expert(&h.s, &ints(&h, &[tokens, k], &index), first as usize, align, &map).unwrap();
            let what = format!("{} {tokens}x{k} of {first}+{experts} by {align} kind {kind}", h.name);
            assert_eq!(found(&h, &map), plan(&index, first, experts, align, n), "{what}");
        };
        for tokens in [0, 1, 15, 129, 1000] {
            for k in [1, 2, 5] {
                for experts in [1, 4, 7, 130] {
                    for (align, first) in [(1, 0), (16, 3), (128, 0), (1, 260)] {
                        (0..4).for_each(|kind| check(tokens, k, experts, align, first, kind));
                    }
                }
            }
        }
        for (experts, first) in [(130, 7), (1024, 0), (1500, 3)] {
            (0..4).for_each(|kind| check(9001, 5, experts, 16, first, kind));
        }
        check(7, 0, 3, 16, 0, 0);
        check(5, 2, 0, 1, 0, 1);
    }
}

#[test]
fn the_row_map_holds_the_largest_number_of_rows() {
    for h in devices() {
        // Two selections reach at most two of 130 experts.
        let index = [3, 99];
        let map = fresh(&h, &[1, 2], 130, 32);
        h.k.sort_by_expert(&h.s, &ints(&h, &[1, 2], &index), 0, 16, &map).unwrap();
        assert_eq!(found(&h, &map), plan(&index, 0, 130, 16, 32), "{}", h.name);
    }
}

/// A permutation of rows.
struct Case {
    tokens: usize,
    k: usize,
    width: usize,
    n: usize,
    plan: Plan,
    map: RowMap,
}

/// Every case on rows of several widths.
fn cases(h: &TestDevice, test: impl Fn(&Case, usize)) {
    for tokens in [0, 1, 15, 129, 1000] {
        for (k, experts, align, kind) in
            [(1, 4, 1, 0), (2, 7, 16, 1), (5, 130, 1, 1), (5, 1, 128, 3), (9, 7, 1, 2)]
        {
            for width in if tokens > 200 { vec![8] } else { vec![1, 8, 19, 64, 264] } {
                let index = selections(kind, 5, tokens * k, 2, experts);
                let n = tokens * k + experts * (align - 1) + 2;
                let map = fresh(h, &[tokens, k], experts, n);
                h.k.sort_by_expert(&h.s, &ints(h, &[tokens, k], &index), 2, align, &map).unwrap();
                let plan = plan(&index, 2, experts, align, n);
                let case = Case { tokens, k, width, n, plan, map };
                (0..2).for_each(|shift| test(&case, shift));
            }
        }
    }
}

#[test]
fn permute_copies_tokens_to_the_rows_of_their_experts() {
    for_moe_dtypes(|h, dtype| {
        cases(h, |c, shift| {
            let what = format!("{} {dtype} {}x{}x{} shifted {shift}", h.name, c.tokens, c.k, c.width);
            let x = numbers(dtype, 1, c.tokens * c.width);
            let xt = shifted(h, shift, dtype, &[c.tokens, c.width], &x);
            let taken = |r: usize| usize::try_from(c.plan.source[r]).ok();
            let want: Vec<f64> = (0..c.n * c.width)
                .map(|i| taken(i / c.width).map_or(0.0, |s| x[s / c.k * c.width + i % c.width]))
                .collect();
            let out = shifted(h, shift, dtype, &[c.n, c.width], &vec![f64::NAN; c.n * c.width]);
            h.k.gather_rows(&h.s, &xt, &c.map.source, c.k, &out).unwrap();
            assert_eq!(h.host(&out), want, "{what}");
            let out = shifted(h, shift, dtype, &[c.n, c.width], &vec![f64::NAN; c.n * c.width]);
            h.k.moe_permute(&h.s, &xt, &c.map, &out).unwrap();
            assert_eq!(h.host(&out), want, "{what} spread");

            let w = numbers(DType::F32, 2, c.tokens * c.k);
            let wt = shifted(h, shift, DType::F32, &[c.tokens, c.k], &w);
            for from in DTYPES.into_iter().filter(|d| *d == dtype || *d == DType::F32) {
                let x = numbers(from, 3, c.tokens * c.width);
                let out = shifted(h, shift, dtype, &[c.n, c.width], &vec![f64::NAN; c.n * c.width]);
                let xt = shifted(h, shift, from, &[c.tokens, c.width], &x);
                h.k.moe_unpermute_backward(&h.s, &xt, &c.map.source, &wt, &out).unwrap();
                let value = |i: usize, s: usize| w[s] * x[s / c.k * c.width + i % c.width];
                let want: Vec<f64> =
                    (0..c.n * c.width).map(|i| taken(i / c.width).map_or(0.0, |s| value(i, s))).collect();
                close(&what, dtype, &h.host(&out), &want, 1e-12);
            }
        });
    });
}

#[test]
fn unpermute_sums_the_rows_of_each_token() {
    for_moe_dtypes(|h, dtype| {
        cases(h, |c, shift| {
            // Padding rows are uninitialized.
            let is_padding = |i: usize| c.plan.source[i / c.width] < 0;
            let raw = numbers(dtype, 1, c.n * c.width);
            let x: Vec<f64> =
                raw.iter().enumerate().map(|(i, x)| if is_padding(i) { f64::NAN } else { *x }).collect();
            let xt = shifted(h, shift, dtype, &[c.n, c.width], &x);
            let w = numbers(DType::F32, 2, c.tokens * c.k);
            let wt = shifted(h, shift, DType::F32, &[c.tokens, c.k], &w);
            let row = |selection: usize| usize::try_from(c.plan.rows[selection]).ok();
            for other in DTYPES.into_iter().filter(|d| *d == dtype || *d == DType::F32) {
                let what = format!("{} {dtype} {other} {}x{}x{} {shift}", h.name, c.tokens, c.k, c.width);
                for weighted in [false, true] {
                    let out =
                        shifted(h, shift, other, &[c.tokens, c.width], &vec![f64::NAN; c.tokens * c.width]);
                    h.k.moe_unpermute(&h.s, &xt, &c.map.rows, weighted.then_some(&wt), &out).unwrap();
                    let term = |selection: usize, column: usize| {
                        let weight = if weighted { w[selection] } else { 1.0 };
                        row(selection).map_or(0.0, |r| weight * x[r * c.width + column])
                    };
                    let want: Vec<f64> = (0..c.tokens * c.width)
                        .map(|i| (0..c.k).map(|j| term(i / c.width * c.k + j, i % c.width)).sum())
                        .collect();
                    // Partial sum j is below j, and each step rounds the sum and the product.
                    let slack = 2f64.powi(-25) * (c.k * (c.k + 3)) as f64;
                    close(&what, other, &h.host(&out), &want, slack);
                }
                let dy = numbers(other, 3, c.tokens * c.width);
                let dyt = shifted(h, shift, other, &[c.tokens, c.width], &dy);
                let out = shifted(h, shift, DType::F32, &[c.tokens, c.k], &vec![f64::NAN; c.tokens * c.k]);
                h.k.moe_unpermute_dprobs(&h.s, &xt, &c.map.rows, &dyt, &out).unwrap();
                let want: Vec<f64> = (0..c.tokens * c.k)
                    .map(|i| {
                        let dy = &dy[i / c.k * c.width..][..c.width];
                        row(i).map_or(0.0, |r| dot(&x[r * c.width..][..c.width], dy))
                    })
                    .collect();
                close(&what, DType::F32, &h.host(&out), &want, 2f64.powi(-24) * c.width as f64);
            }
        });
    });
}

/// Gradients of `moe_unpermute` against finite differences of the loss `Σ dy·moe_unpermute(x, w)`.
#[test]
fn unpermute_gradients_match_finite_differences() {
    for h in devices() {
        let (tokens, k, width) = (15, 3, 5);
        let index = selections(1, 8, tokens * k, 1, 4);
        let n = tokens * k + 4 * 15;
        let map = fresh(&h, &[tokens, k], 4, n);
        h.k.sort_by_expert(&h.s, &ints(&h, &[tokens, k], &index), 1, 16, &map).unwrap();
        let rows = found(&h, &map).rows;
        let f32s = |seed, n| numbers(DType::F32, seed, n);
        let (x, w, dy) = (f32s(1, n * width), f32s(2, tokens * k), f32s(3, tokens * width));
        let loss = |x: &[f64], w: &[f64]| -> f64 {
            let of = |c: usize| rows[c] as usize * width;
            let one = |c: usize| w[c] * dot(&x[of(c)..][..width], &dy[c / k * width..][..width]);
            (0..tokens * k).filter(|c| rows[*c] >= 0).map(one).sum()
        };
        let slope = |v: &[f64], f: &dyn Fn(&[f64]) -> f64| -> Vec<f64> {
            let at = |i: usize, by: f64| {
                let mut v = v.to_vec();
                v[i] += by;
                f(&v)
            };
            (0..v.len()).map(|i| (at(i, 1e-3) - at(i, -1e-3)) / 2e-3).collect()
        };
        let t = |shape: &[usize], v: &[f64]| h.tensor(DType::F32, shape, v);
        let (xt, wt, dyt) = (t(&[n, width], &x), t(&[tokens, k], &w), t(&[tokens, width], &dy));
        let dx = h.poisoned(DType::F32, &[n, width]);
        h.k.moe_unpermute_backward(&h.s, &dyt, &map.source, &wt, &dx).unwrap();
        close(&h.name, DType::F32, &h.host(&dx), &slope(&x, &|x| loss(x, &w)), 1e-6);
        let dw = h.poisoned(DType::F32, &[tokens, k]);
        h.k.moe_unpermute_dprobs(&h.s, &xt, &map.rows, &dyt, &dw).unwrap();
        close(&h.name, DType::F32, &h.host(&dw), &slope(&w, &|w| loss(&x, w)), 1e-6);
        // The gradient of a gather is the sum.
        let ones = vec![1.0; tokens * k];
        let dx = h.poisoned(DType::F32, &[n, width]);
        h.k.gather_rows(&h.s, &dyt, &map.source, k, &dx).unwrap();
        close(&h.name, DType::F32, &h.host(&dx), &slope(&x, &|x| loss(x, &ones)), 1e-6);
    }
}

fn bytes<E: Element>(h: &TestDevice, make: fn(u8) -> E) {
    for (tokens, k, width, shift) in
        [(3, 2, 1, 0), (40, 2, 48, 0), (40, 2, 48, 3), (9, 5, 77, 0), (0, 2, 16, 0)]
    {
        let source = draws(3, 3 * tokens, -1, (tokens * k) as i32);
        let x: Vec<E> = draws(4, shift + tokens * width, 0, 256).iter().map(|b| make(*b as u8)).collect();
        let up = |v: &[E]| h.s.upload(v, &[v.len()], Category::Workspace).unwrap();
        let place =
            |v: &[E], shape: &[usize]| up(v).narrow(0, shift, v.len() - shift).unwrap().view(shape).unwrap();
        let out = place(&vec![make(0x5a); shift + source.len() * width], &[source.len(), width]);
        h.k.gather_rows(&h.s, &place(&x, &[tokens, width]), &h.ids(&source), k, &out).unwrap();
        let value = |i: usize| match source[i / width] {
            -1 => make(0),
            s => x[shift + s as usize / k * width + i % width],
        };
        let want: Vec<E> = (0..source.len() * width).map(value).collect();
        assert_eq!(h.s.download::<E>(&out).unwrap(), want, "{} {tokens}x{width}", h.name);
    }
}

#[test]
fn fp8_rows_are_moved_unchanged() {
    for h in devices() {
        bytes(&h, E4m3);
        bytes(&h, E5m2);
    }
}

/// The transposed permutation equals the permutation, transposed; trailing columns may be left out.
#[test]
fn transposed_permute_matches_permute() {
    for h in devices() {
        for (tokens, k, experts, align, width) in [
            (0usize, 2, 3, 128, 16usize),
            (1, 1, 1, 1, 1),
            (9, 2, 4, 16, 19),
            (40, 2, 4, 128, 48),
            (129, 5, 7, 1, 130),
            (300, 3, 5, 128, 272),
        ] {
            let index = selections(1, 5, tokens * k, 2, experts);
            let n = tokens * k + experts * (align - 1) + 2;
            let map = fresh(&h, &[tokens, k], experts, n);
            h.k.sort_by_expert(&h.s, &ints(&h, &[tokens, k], &index), 2, align, &map).unwrap();
            let source = plan(&index, 2, experts, align, n).source;
            let (pitch, part) = (n.next_multiple_of(16), width.div_ceil(2));
            for (shift, columns) in [(0, width), (3, width), (0, part), (8, part)] {
                let what = format!("{} {tokens}x{k}x{width} {columns} columns shifted {shift}", h.name);
                let x: Vec<E5m2> =
                    draws(4, shift + tokens * width, 0, 256).iter().map(|b| E5m2(*b as u8)).collect();
                let place = |v: &[E5m2], shape: &[usize]| {
                    let all = h.s.upload(v, &[v.len()], Category::Workspace).unwrap();
                    all.narrow(0, shift, v.len() - shift).unwrap().view(shape).unwrap()
                };
                let out = place(&vec![E5m2(0x5a); shift + columns * pitch], &[columns, pitch]);
                h.k.moe_permute_transposed(&h.s, &place(&x, &[tokens, width]), &map, &out).unwrap();
                let value = |at: usize| match source.get(at % pitch) {
                    None | Some(-1) => E5m2(0),
                    Some(s) => x[shift + *s as usize / k * width + at / pitch],
                };
                let want: Vec<E5m2> = (0..columns * pitch).map(value).collect();
                assert_eq!(h.s.download::<E5m2>(&out).unwrap(), want, "{what}");
            }
            let zeros = |dtype, shape: &[usize]| h.s.zeros(shape, dtype, Category::Workspace).unwrap();
            let x = zeros(DType::E4M3, &[tokens, width]);
            for (what, x, out) in [
                ("more columns", &x, zeros(DType::E4M3, &[width + 1, pitch])),
                ("another format", &x, zeros(DType::E5M2, &[width, pitch])),
                ("more rows", &x, zeros(DType::E4M3, &[width, pitch + 16])),
                (
                    "more tokens",
                    &zeros(DType::E4M3, &[tokens + 1, width]),
                    zeros(DType::E4M3, &[width, pitch]),
                ),
                ("numbers", &zeros(DType::F32, &[tokens, width]), zeros(DType::F32, &[width, pitch])),
            ] {
                assert!(h.k.moe_permute_transposed(&h.s, x, &map, &out).is_err(), "{}: {what}", h.name);
            }
        }
    }
}

#[test]
fn gathered_values_follow_the_row_map() {
    for h in devices() {
        for (n, m) in [(0, 0), (0, 5), (1, 1), (70, 1000), (1000, 3)] {
            let source = draws(1, m, -1, n as i32);
            let x = numbers(DType::F32, 2, n);
            let want: Vec<f64> = source.iter().map(|s| usize::try_from(*s).map_or(0.0, |s| x[s])).collect();
            let out = h.poisoned(DType::F32, &[m]);
            h.k.gather_values(&h.s, &h.tensor(DType::F32, &[n], &x), &h.ids(&source), &out).unwrap();
            assert_eq!(h.host(&out), want, "{} {n} {m}", h.name);
            let x = draws(3, n, -1000, 1000);
            let want: Vec<i32> = source.iter().map(|s| usize::try_from(*s).map_or(0, |s| x[s])).collect();
            let out = ints(&h, &[m, 1], &vec![-5; m]);
            h.k.gather_values(&h.s, &h.ids(&x), &h.ids(&source), &out).unwrap();
            assert_eq!(h.s.download::<i32>(&out).unwrap(), want, "{} {n} {m}", h.name);
        }
    }
}

/// Indices out of range count as padding and read nothing.
#[test]
fn indices_out_of_range_count_as_none() {
    for_moe_dtypes(|h, dtype| {
        let x = h.tensor(dtype, &[3, 2], &numbers(dtype, 1, 6));
        let wild = h.ids(&[i32::MIN, -2, 6, i32::MAX]);
        let out = h.poisoned(dtype, &[4, 2]);
        h.k.gather_rows(&h.s, &x, &wild, 2, &out).unwrap();
        assert_eq!(h.host(&out), [0.0; 8], "{}", h.name);
        let out = h.poisoned(dtype, &[4, 2]);
        let w = h.tensor(DType::F32, &[3, 2], &[f64::NAN; 6]);
        h.k.moe_unpermute_backward(&h.s, &x, &wild, &w, &out).unwrap();
        assert_eq!(h.host(&out), [0.0; 8], "{}", h.name);
        let rows = ints(h, &[2, 2], &[i32::MIN, -2, 3, i32::MAX]);
        let out = h.poisoned(dtype, &[2, 2]);
        h.k.moe_unpermute(&h.s, &x, &rows, None, &out).unwrap();
        assert_eq!(h.host(&out), [0.0; 4], "{}", h.name);
        let dprobs = h.poisoned(DType::F32, &[2, 2]);
        h.k.moe_unpermute_dprobs(&h.s, &x, &rows, &h.poisoned(dtype, &[2, 2]), &dprobs).unwrap();
        assert_eq!(h.host(&dprobs), [0.0; 4], "{}", h.name);
        let values = h.poisoned(DType::F32, &[4]);
        h.k.gather_values(&h.s, &h.poisoned(DType::F32, &[6]), &wild, &values).unwrap();
        assert_eq!(h.host(&values), [0.0; 4], "{}", h.name);
    });
}
