//! Golden vectors of permutations: every case and tensor of `permute` in the folder FERROTRON_GOLDEN names, on every home.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "conformance/devices.rs"]
#[allow(dead_code)]
mod devices;

use devices::{TestDevice, devices};
use ferrotron_kernels::RowMap;
use ferrotron_tensor::{Category, DType, Tensor, bf16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;

fn file(name: &str) -> Vec<u8> {
    let root = std::env::var_os("FERROTRON_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")),
        PathBuf::from,
    );
    let path = root.join("permute").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Tensors of the file; what no case has asked for in the end is a failure.
struct Tensors {
    bytes: Vec<u8>,
    open: RefCell<BTreeSet<String>>,
}

/// The tensors of a case.
#[derive(Clone, Copy)]
struct Of<'a> {
    all: &'a Tensors,
    case: &'a str,
}

impl Of<'_> {
    fn get(&self, name: &str) -> (DType, Vec<usize>, Vec<f64>) {
        let full = format!("{}/{name}", self.case);
        let file = SafeTensors::deserialize(&self.all.bytes).unwrap();
        let t = file.tensor(&full).unwrap_or_else(|e| panic!("{full}: {e}"));
        self.all.open.borrow_mut().remove(&full);
        let data = t.data();
        let (dtype, values) = match t.dtype() {
            Dtype::F32 => {
                (DType::F32, data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect())
            }
            Dtype::BF16 => {
                let value = |b: &[u8; 2]| bf16::from_bits(u16::from_le_bytes(*b)).to_f64();
                (DType::BF16, data.as_chunks().0.iter().map(value).collect())
            }
            Dtype::I64 => {
                (DType::I64, data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect())
            }
            Dtype::U8 => (DType::U8, data.iter().map(|b| f64::from(*b)).collect()),
            other => panic!("{full}: {other:?}"),
        };
        (dtype, t.shape().to_vec(), values)
    }

    fn values(&self, name: &str) -> Vec<f64> {
        self.get(name).2
    }

    /// Rows on the device, with rows of nonsense behind until there are `n`.
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

/// A dense map as lists of choices, as wide as its widest row.
struct Choices {
    tokens: usize,
    experts: usize,
    k: usize,
    /// `[tokens, k]`
    index: Vec<i32>,
}

impl Choices {
    fn of(t: Of) -> Choices {
        let (_, shape, map) = t.get("map");
        let on = |row: &[f64]| -> Vec<i32> {
            (0..).zip(row).filter(|(_, on)| **on != 0.0).map(|(e, _)| e).collect()
        };
        let lists: Vec<Vec<i32>> = map.chunks(shape[1]).map(on).collect();
        let k = lists.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let padded = lists.iter().flat_map(|l| l.iter().copied().chain(std::iter::repeat(-1)).take(k));
        Choices { tokens: shape[0], experts: shape[1], k, index: padded.collect() }
    }

    /// Of a dense tensor, the values of the choices; 0 where there is none.
    fn chosen(&self, dense: &[f64]) -> Vec<f64> {
        let at =
            |(c, e): (usize, &i32)| usize::try_from(*e).map_or(0.0, |e| dense[c / self.k * self.experts + e]);
        self.index.iter().enumerate().map(at).collect()
    }

    /// And back: zeros elsewhere.
    fn dense(&self, chosen: &[f64]) -> Vec<f64> {
        let mut dense = vec![0.0; self.tokens * self.experts];
        for (c, (e, value)) in self.index.iter().zip(chosen).enumerate() {
            match usize::try_from(*e) {
                Ok(e) => dense[c / self.k * self.experts + e] = *value,
                Err(_) => assert_eq!(*value, 0.0, "a value of no choice"),
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

/// Rows on the device to numbers, the first `n` of them; those behind are zeros.
fn first_rows(h: &TestDevice, t: &Tensor, n: usize) -> Vec<f64> {
    let width: usize = t.shape()[1..].iter().product();
    let mut all = h.host(t);
    assert!(all[n * width..].iter().all(|x| *x == 0.0), "rows of nobody");
    all.truncate(n * width);
    all
}

fn ints(h: &TestDevice, t: &Tensor) -> Vec<f64> {
    h.s.download::<i32>(t).unwrap().into_iter().map(f64::from).collect()
}

fn mask(h: &TestDevice, case: &Value, t: Of) {
    let dtype = match case["dtype"].as_str().unwrap() {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        other => panic!("unknown type {other}"),
    };
    let count = |name: &str| case[name].as_u64().unwrap() as usize;
    let (c, n, width) = (Choices::of(t), count("rows"), count("hidden"));
    assert_eq!((c.tokens, c.experts), (count("tokens"), count("experts")), "{}", t.case);
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
    // The peer adds up in the type of the rows, we in f32: with bf16 the exact sums are what to meet.
    if case["kind"] == "mask" {
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

    if case["kind"] == "drop_and_pad" {
        assert!(ints(h, &map.counts).iter().all(|n| *n == count("capacity") as f64), "{}", t.case);
        return;
    }
    t.same(h, "tokens_per_expert", &ints(h, &map.counts));
    padded(h, count("align"), t, (&c, &x, &probs));
}

fn padded(h: &TestDevice, align: usize, t: Of, (c, x, probs): (&Choices, &Tensor, &Tensor)) {
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

fn chunk_sort(h: &TestDevice, case: &Value, t: Of) {
    assert_eq!(case["dtype"], "f32", "{}", t.case);
    let list = |name: &str| -> Vec<i32> {
        case[name].as_array().unwrap().iter().map(|n| n.as_i64().unwrap() as i32).collect()
    };
    let (sizes, order) = (list("split_sizes"), list("order"));
    let n = sizes.iter().sum::<i32>() as usize;
    let (source, back) = (h.ids(&vec![-7; n]), h.ids(&vec![-7; n]));
    h.k.chunk_map(&h.s, &h.ids(&sizes), &h.ids(&order), &source, &back).unwrap();
    for (from, to, by) in [("rows", "out", &source), ("d_out", "d_rows", &back)] {
        let x = t.rows(h, from, n);
        let out = h.poisoned(DType::F32, x.shape());
        h.k.gather_rows(&h.s, &x, by, 1, &out).unwrap();
        t.same(h, to, &h.host(&out));
    }
    for (from, to, by) in [("probs", "out_probs", &source), ("d_out_probs", "d_probs", &back)] {
        let out = h.poisoned(DType::F32, &[n]);
        h.k.gather_values(&h.s, &t.rows(h, from, n), by, &out).unwrap();
        t.same(h, to, &h.host(&out));
    }
}

#[test]
fn golden_permutations() {
    let json: Value = serde_json::from_slice(&file("permute.json")).unwrap();
    let cases = json["cases"].as_array().expect("cases");
    assert!(!cases.is_empty(), "no cases");
    for h in devices() {
        let bytes = file("permute.safetensors");
        let names = SafeTensors::deserialize(&bytes).unwrap().names().iter().map(|s| s.to_string()).collect();
        let all = Tensors { bytes, open: RefCell::new(names) };
        for case in cases {
            let t = Of { all: &all, case: case["name"].as_str().expect("name") };
            match case["kind"].as_str().expect("kind") {
                "mask" | "drop_and_pad" => mask(&h, case, t),
                "chunk_sort" => chunk_sort(&h, case, t),
                other => panic!("unknown kind {other}"),
            }
        }
        assert_eq!(all.open.take(), BTreeSet::new(), "tensors of no case");
    }
}
