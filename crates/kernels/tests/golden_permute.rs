//! MoE permutation against golden vectors of Megatron Core (area `permute`), on every device present: permute, unpermute,
//! padding of expert segments, capacity padding, and sorting of chunks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "conformance/devices.rs"]
#[allow(dead_code)]
mod devices;
#[path = "../../../tests/support/golden.rs"]
mod golden;

use devices::{TestDevice, devices};
use ferrotron_kernels::RowMap;
use ferrotron_tensor::{Category, DType, Tensor};
use golden::{Area, Tensors, count, counts, list, only_keys, text};
use safetensors::Dtype;
use serde_json::Value;

/// The tensors of a case.
#[derive(Clone, Copy)]
struct CaseTensors<'a> {
    all: &'a Tensors,
    case: &'a str,
}

impl CaseTensors<'_> {
    fn get(&self, name: &str) -> (DType, Vec<usize>, Vec<f64>) {
        let full = format!("{}/{name}", self.case);
        let dtype = match self.all.dtype(&full) {
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::BF16,
            Dtype::I64 => DType::I64,
            Dtype::U8 => DType::U8,
            other => panic!("{full}: {other:?}"),
        };
        (dtype, self.all.shape(&full), self.all.values(&full))
    }

    fn has(&self, name: &str) -> bool {
        self.all.has(&format!("{}/{name}", self.case))
    }

    fn values(&self, name: &str) -> Vec<f64> {
        self.get(name).2
    }

    /// Rows on the device, followed by NaN up to `n` rows.
    fn rows(&self, h: &TestDevice, name: &str, n: usize) -> Tensor {
        let (dtype, mut shape, mut values) = self.get(name);
        let width: usize = shape[1..].iter().product();
        (shape[0], _) = (n, values.resize(n * width, f64::NAN));
        h.tensor(dtype, &shape, &values)
    }

    fn same(&self, h: &TestDevice, name: &str, ours: &[f64]) {
        let wanted = self.values(name);
        assert_eq!(ours, &wanted[..], "{} {}/{name}", h.name, self.case);
    }

    fn near(&self, h: &TestDevice, name: &str, ours: &[f64], (atol, rtol): (f64, f64)) {
        let wanted = self.values(name);
        assert_eq!(ours.len(), wanted.len(), "{} {}/{name}", h.name, self.case);
        for (i, (o, w)) in ours.iter().zip(&wanted).enumerate() {
            assert!((o - w).abs() <= atol + rtol * w.abs(), "{} {}/{name}[{i}]: {o} {w}", h.name, self.case);
        }
    }
}

/// A dense routing map as top-k indices, k being that of the token with the most experts.
struct TopK {
    tokens: usize,
    experts: usize,
    k: usize,
    /// `[tokens, k]`
    index: Vec<i32>,
}

impl TopK {
    fn from_map(t: CaseTensors) -> TopK {
        let (_, shape, map) = t.get("map");
        let on = |row: &[f64]| -> Vec<i32> {
            (0..).zip(row).filter(|(_, on)| **on != 0.0).map(|(e, _)| e).collect()
        };
        let lists: Vec<Vec<i32>> = map.chunks(shape[1]).map(on).collect();
        let k = lists.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let padded = lists.iter().flat_map(|l| l.iter().copied().chain(std::iter::repeat(-1)).take(k));
        TopK { tokens: shape[0], experts: shape[1], k, index: padded.collect() }
    }

    /// `[T, k]` values at the indices of a dense tensor `[T, E]`; 0 where a token has no such expert.
    fn chosen(&self, dense: &[f64]) -> Vec<f64> {
        let at =
            |(c, e): (usize, &i32)| usize::try_from(*e).map_or(0.0, |e| dense[c / self.k * self.experts + e]);
        self.index.iter().enumerate().map(at).collect()
    }

    /// The inverse of `chosen`: `[T, E]`, zeros elsewhere.
    fn dense(&self, chosen: &[f64]) -> Vec<f64> {
        let mut dense = vec![0.0; self.tokens * self.experts];
        for (c, (e, value)) in self.index.iter().zip(chosen).enumerate() {
            match usize::try_from(*e) {
                Ok(e) => dense[c / self.k * self.experts + e] = *value,
                Err(_) => assert_eq!(*value, 0.0, "a value without an expert"),
            }
        }
        dense
    }

    fn sorted(&self, h: &TestDevice, align: usize) -> RowMap {
        let ints = |shape: &[usize], v: &[i32]| h.s.upload(v, shape, Category::Workspace).unwrap();
        let n = self.index.len() + self.experts * (align - 1);
        let junk = |n: usize| ints(&[n], &vec![-7; n]);
        let shape = [self.tokens, self.k];
        let map = RowMap {
            offsets: junk(self.experts + 1),
            counts: junk(self.experts),
            rows: ints(&shape, &vec![-7; self.index.len()]),
            source: junk(n),
        };
        h.k.sort_by_expert(&h.s, &ints(&shape, &self.index), 0, align, &map).unwrap();
        map
    }
}

/// The first `n` rows on the host; those behind must be zeros.
fn first_rows(h: &TestDevice, t: &Tensor, n: usize) -> Vec<f64> {
    let width: usize = t.shape()[1..].iter().product();
    let mut all = h.host(t);
    assert!(all[n * width..].iter().all(|x| *x == 0.0), "rows behind the last segment are not zero");
    all.truncate(n * width);
    all
}

fn ints(h: &TestDevice, t: &Tensor) -> Vec<f64> {
    h.s.download::<i32>(t).unwrap().into_iter().map(f64::from).collect()
}

/// The type of rows.
fn row_type(case: &Value) -> DType {
    match case["dtype"].as_str() {
        None | Some("f32") => DType::F32,
        Some("bf16") => DType::BF16,
        Some(other) => panic!("the format has no dtype {other}"),
    }
}

fn mask(h: &TestDevice, case: &Value, t: CaseTensors) {
    let dtype = row_type(case);
    let (c, n, width) = (TopK::from_map(t), count(case, "rows"), count(case, "hidden"));
    assert_eq!((c.tokens, c.experts), (count(case, "tokens"), count(case, "experts")), "{}", t.case);
    let map = c.sorted(h, 1);
    let all = map.source.numel();
    let near = match dtype {
        DType::BF16 => (2e-2, 1e-2),
        _ => (1e-6, 1e-5),
    };
    let weighted_near = if dtype == DType::BF16 { (1e-2, 8e-3) } else { (1e-6, 1e-5) };
    let empty = |dtype, shape: &[usize]| h.poisoned(dtype, shape);

    // permute
    let source = ints(h, &map.source);
    let tokens: Vec<f64> = source[..n].iter().map(|s| (s / c.k as f64).floor()).collect();
    t.same(h, "sorted_indices", &tokens);
    assert!(source[n..].iter().all(|s| *s == -1.0), "{}", t.case);
    let x = t.rows(h, "tokens", c.tokens);
    assert_eq!(x.dtype(), dtype, "{}", t.case);
    let permuted = empty(dtype, &[all, width]);
    h.k.gather_rows(&h.s, &x, &map.source, c.k, &permuted).unwrap();
    t.same(h, "permuted", &first_rows(h, &permuted, n));
    let permuted = empty(dtype, &[all, width]);
    h.k.moe_permute(&h.s, &x, &map, &permuted).unwrap();
    t.same(h, "permuted", &first_rows(h, &permuted, n));
    let probs = h.tensor(DType::F32, &[c.tokens, c.k], &c.chosen(&t.values("probs")));
    let permuted_probs = empty(DType::F32, &[all]);
    h.k.gather_values(&h.s, &probs, &map.source, &permuted_probs).unwrap();
    t.same(h, "permuted_probs", &first_rows(h, &permuted_probs, n));
    let d_tokens = empty(dtype, &[c.tokens, width]);
    h.k.moe_unpermute(&h.s, &t.rows(h, "d_permuted", all), &map.rows, None, &d_tokens).unwrap();
    t.near(h, "d_tokens", &h.host(&d_tokens), near);
    let d_probs = empty(DType::F32, &[c.tokens, c.k]);
    h.k.gather_values(&h.s, &t.rows(h, "d_permuted_probs", all), &map.rows, &d_probs).unwrap();
    t.near(h, "d_probs", &c.dense(&h.host(&d_probs)), (1e-6, 1e-5));

    // unpermute
    let (un_in, dy) = (t.rows(h, "un_in", all), t.rows(h, "un_d_out", c.tokens));
    let un_out = empty(dtype, &[c.tokens, width]);
    h.k.moe_unpermute(&h.s, &un_in, &map.rows, None, &un_out).unwrap();
    let un_out = h.host(&un_out);
    // Megatron accumulates in the dtype of the rows, we in f32: bf16 sums are compared with exact ones.
    if case["kind"] == "mask" || t.has("un_out_exact") {
        t.near(h, "un_out_exact", &un_out, near);
    }
    match dtype {
        DType::BF16 => assert_eq!(t.values("un_out").len(), un_out.len(), "{}", t.case),
        _ => t.near(h, "un_out", &un_out, near),
    }
    let un_d_in = empty(dtype, &[all, width]);
    h.k.gather_rows(&h.s, &dy, &map.source, c.k, &un_d_in).unwrap();
    t.near(h, "un_d_in", &first_rows(h, &un_d_in, n), (1e-6, 1e-5));
    let unp_out = empty(dtype, &[c.tokens, width]);
    h.k.moe_unpermute(&h.s, &un_in, &map.rows, Some(&probs), &unp_out).unwrap();
    t.near(h, "unp_out", &h.host(&unp_out), weighted_near);
    let unp_d_in = empty(dtype, &[all, width]);
    h.k.moe_unpermute_backward(&h.s, &dy, &map.source, &probs, &unp_d_in).unwrap();
    t.near(h, "unp_d_in", &first_rows(h, &unp_d_in, n), weighted_near);
    let unp_d_probs = empty(DType::F32, &[c.tokens, c.k]);
    h.k.moe_unpermute_dprobs(&h.s, &un_in, &map.rows, &dy, &unp_d_probs).unwrap();
    t.near(h, "unp_d_probs", &c.dense(&h.host(&unp_d_probs)), weighted_near);

    let dropped = text(case, "kind") == "drop_and_pad";
    if dropped {
        assert!(ints(h, &map.counts).iter().all(|n| *n == count(case, "capacity") as f64), "{}", t.case);
    }
    if !dropped || t.has("tokens_per_expert") {
        t.same(h, "tokens_per_expert", &ints(h, &map.counts));
    }
    if !dropped || t.has("padded") {
        padded(h, count(case, "align"), t, (&c, &x, &probs));
    }
}

fn padded(h: &TestDevice, align: usize, t: CaseTensors, (c, x, probs): (&TopK, &Tensor, &Tensor)) {
    let map = c.sorted(h, align);
    let (all, width) = (map.source.numel(), x.shape()[1]);
    let offsets = ints(h, &map.offsets);
    let per_expert: Vec<f64> = offsets.windows(2).map(|o| o[1] - o[0]).collect();
    t.same(h, "padded_tokens_per_expert", &per_expert);
    let n = offsets[c.experts] as usize;
    let rows = h.poisoned(x.dtype(), &[all, width]);
    h.k.moe_permute(&h.s, x, &map, &rows).unwrap();
    t.same(h, "padded", &first_rows(h, &rows, n));
    let values = h.poisoned(DType::F32, &[all]);
    h.k.gather_values(&h.s, probs, &map.source, &values).unwrap();
    t.same(h, "padded_probs", &first_rows(h, &values, n));
    let dense: Vec<u8> = t.values("map").iter().map(|x| *x as u8).collect();
    let dense = h.s.upload(&dense, &[c.tokens, c.experts], Category::Workspace).unwrap();
    h.k.pad_routing_map(&h.s, align, &dense).unwrap();
    let filled: Vec<f64> = h.s.download::<u8>(&dense).unwrap().into_iter().map(f64::from).collect();
    t.same(h, "map_padded", &filled);
}

fn chunk_sort(h: &TestDevice, case: &Value, t: CaseTensors) {
    let dtype = row_type(case);
    let as_i32 = |key: &str| -> Vec<i32> { counts(case, key).into_iter().map(|n| n as i32).collect() };
    let (sizes, order) = (as_i32("split_sizes"), as_i32("order"));
    let n = sizes.iter().sum::<i32>() as usize;
    let (source, back) = (h.ids(&vec![-7; n]), h.ids(&vec![-7; n]));
    h.k.chunk_map(&h.s, &h.ids(&sizes), &h.ids(&order), &source, &back).unwrap();
    for (from, to, by) in [("rows", "out", &source), ("d_out", "d_rows", &back)] {
        let x = t.rows(h, from, n);
        assert_eq!(x.dtype(), dtype, "{}/{from}", t.case);
        let out = h.poisoned(dtype, x.shape());
        h.k.gather_rows(&h.s, &x, by, 1, &out).unwrap();
        t.same(h, to, &h.host(&out));
    }
    for (from, to, by) in [("probs", "out_probs", &source), ("d_out_probs", "d_probs", &back)] {
        let out = h.poisoned(DType::F32, &[n]);
        h.k.gather_values(&h.s, &t.rows(h, from, n), by, &out).unwrap();
        t.same(h, to, &h.host(&out));
    }
}

const KEYS: [&str; 12] = [
    "name",
    "kind",
    "tokens",
    "hidden",
    "experts",
    "topk",
    "rows",
    "dtype",
    "align",
    "capacity",
    "split_sizes",
    "order",
];

#[test]
fn golden_permutations() {
    let all_devices = devices();
    for area in Area::all("permute") {
        area.known_files(|file| ["permute.json", "permute.safetensors"].contains(&file));
        let (json, all) = (area.json("permute.json"), area.tensors("permute.safetensors"));
        only_keys("permute.json", &json, &["producer", "cases"]);
        all.only_cases(list(&json, "cases"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            let name = text(case, "name");
            report.case(name, || {
                only_keys(name, case, &KEYS);
                let t = CaseTensors { all: &all, case: name };
                for h in &all_devices {
                    match text(case, "kind") {
                        "mask" | "drop_and_pad" => mask(h, case, t),
                        "chunk_sort" => chunk_sort(h, case, t),
                        other => panic!("the format has no kind {other}"),
                    }
                }
                all.all_read(&format!("{name}/"));
            });
        }
        report.finish();
    }
}
