//! Golden vectors of the 8-bit formats: every tensor and row of `fp8` in the folder FERROTRON_GOLDEN names.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_kernels::cpu::quant::{
    Blocks, Grid, MX_BLOCK, Use, mxfp8_dequantise, mxfp8_quantise, quantise_blocks, swizzle,
};
use ferrotron_kernels::cpu::rows::Rows;
use ferrotron_kernels::cpu::{CpuKernels, Isa};
use ferrotron_kernels::quant::scale::{ScaleRule, largest, power_of_two};
use ferrotron_kernels::{ALIGN, Along, Bytes, Delayed, Gemm8, QuantKernels, Quantise, Range, Scaling};
use ferrotron_tensor::fp8::{E2m1, E4m3, E5m2, E8m0};
use ferrotron_tensor::{Category, DType, Device, Element, Float, Stream, Tensor, Threads, bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;

fn file(name: &str) -> Vec<u8> {
    let root = std::env::var_os("FERROTRON_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")),
        PathBuf::from,
    );
    let path = root.join("fp8").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&file(name)).unwrap()
}

/// Tensors of a file; what no test has asked for in the end is a failure.
struct Tensors {
    bytes: Vec<u8>,
    open: std::cell::RefCell<BTreeSet<String>>,
}

impl Tensors {
    fn read(name: &str) -> Tensors {
        let bytes = file(name);
        let names: BTreeSet<String> =
            SafeTensors::deserialize(&bytes).unwrap().names().iter().map(|s| s.to_string()).collect();
        assert!(!names.is_empty(), "{name} is empty");
        Tensors { bytes, open: names.into() }
    }

    fn get(&self, name: &str) -> Option<(Dtype, Vec<usize>, Vec<u8>)> {
        let all = SafeTensors::deserialize(&self.bytes).unwrap();
        let t = all.tensor(name).ok()?;
        self.open.borrow_mut().remove(name);
        Some((t.dtype(), t.shape().to_vec(), t.data().to_vec()))
    }

    fn u8(&self, name: &str) -> Option<Vec<u8>> {
        let (dtype, _, data) = self.get(name)?;
        assert_eq!(dtype, Dtype::U8, "{name}");
        Some(data)
    }

    fn f32(&self, name: &str) -> Option<Vec<f32>> {
        let (dtype, _, data) = self.get(name)?;
        assert_eq!(dtype, Dtype::F32, "{name}");
        Some(data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    /// Tensor names that no one has asked for, under a folder.
    fn left(&self, under: &str) -> Vec<String> {
        self.open.borrow().iter().filter(|n| n.starts_with(under)).cloned().collect()
    }

    fn all_known(&self) {
        assert_eq!(self.left(""), Vec::<String>::new(), "unknown tensors");
    }
}

fn format_of(name: &str) -> DType {
    match name {
        "e4m3" => DType::E4M3,
        "e5m2" => DType::E5M2,
        other => panic!("unknown format {other}"),
    }
}

fn nan(format: DType, code: u8) -> bool {
    if format == DType::E4M3 { E4m3(code).decode().is_nan() } else { E5m2(code).decode().is_nan() }
}

fn same_codes(what: &str, format: DType, ours: &[u8], wanted: &[u8]) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        assert!(o == w || (nan(format, *o) && nan(format, *w)), "{what}[{i}]: {o:#x} instead of {w:#x}");
    }
}

/// Equal bits, or within `ulps`; NaN is NaN.
fn same(what: &str, ours: &[f32], wanted: &[f32], ulps: u32) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        let near = o.to_bits().abs_diff(w.to_bits()) <= ulps || (o.is_nan() && w.is_nan());
        assert!(near, "{what}[{i}]: {o:e} instead of {w:e}");
    }
}

#[test]
fn golden_casts() {
    let t = Tensors::read("cast.safetensors");
    let inputs = t.f32("f32_in").expect("f32_in");
    for name in t.left("") {
        let encode = |format: &str| -> fn(f32) -> u8 {
            match format {
                "e4m3" => |x| E4m3::encode(x).0,
                "e5m2" => |x| E5m2::encode(x).0,
                "e2m1" => |x| E2m1::encode(x).0,
                other => panic!("{name}: unknown format {other}"),
            }
        };
        let check = |format: &str, inputs: &[f32]| {
            let ours: Vec<u8> = inputs.iter().map(|x| encode(format)(*x)).collect();
            let wanted = t.u8(&name).unwrap();
            match format {
                "e2m1" => assert_eq!(ours, wanted, "{name}"),
                _ => same_codes(&name, format_of(format), &ours, &wanted),
            }
        };
        if let Some(format) = name.strip_prefix("bf16_to_") {
            check(format, &(0..=u16::MAX).map(|b| bf16::from_bits(b).to_f32()).collect::<Vec<_>>());
        } else if let Some(format) = name.strip_prefix("fp16_to_") {
            check(format, &(0..=u16::MAX).map(|b| f16::from_bits(b).to_f32()).collect::<Vec<_>>());
        } else if let Some(format) = name.strip_prefix("f32_") {
            check(format, &inputs);
        } else if let Some(format) = name.strip_prefix("decode_") {
            let wanted = t.f32(&name).unwrap();
            let value = |c: u8| match format {
                "e4m3" => E4m3(c).decode(),
                "e5m2" => E5m2(c).decode(),
                "e2m1" => E2m1(c).decode(),
                "e8m0" => E8m0(c).decode(),
                other => panic!("{name}: unknown format {other}"),
            };
            let ours: Vec<f32> = (0..wanted.len()).map(|c| value(c as u8)).collect();
            same(&name, &ours, &wanted, 0);
        }
    }
    t.all_known();
}

#[test]
fn golden_scales() {
    let j = json("scales.json");
    let columns =
        ["amax_bits", "format", "pow2", "eps", "input_dtype_for_inf", "scale_bits", "scale_inv_bits"];
    assert_eq!(j["columns"], serde_json::json!(columns));
    let bits = |v: &Value| f32::from_bits(v.as_u64().unwrap() as u32);
    let rows = j["rows"].as_array().expect("rows");
    assert!(!rows.is_empty());
    for row in rows {
        let input = match row[4].as_str().unwrap() {
            "f32" => DType::F32,
            "bf16" => DType::BF16,
            "f16" | "fp16" => DType::F16,
            other => panic!("unknown input {other}"),
        };
        let top = largest("test", format_of(row[1].as_str().unwrap())).unwrap();
        let pow2 = row[2].as_u64().unwrap() != 0;
        let rule = ScaleRule { eps: row[3].as_f64().unwrap() as f32, ..ScaleRule::block(top, pow2, input) };
        let scale = rule.scale(bits(&row[0]));
        assert_eq!(scale.to_bits(), bits(&row[5]).to_bits(), "{row}");
        same(&row.to_string(), &[1.0 / scale], &[bits(&row[6])], u32::from(!pow2));
        if input == DType::F32 && rule.eps == 0.0 {
            assert_eq!(rule, ScaleRule::tensor(top, pow2));
        }
    }
    assert_eq!(j["mx_columns"], serde_json::json!(["amax_bits", "format", "e8m0_byte", "multiplier_bits"]));
    let rows = j["mx_rows"].as_array().expect("mx_rows");
    assert!(!rows.is_empty());
    for row in rows {
        let top = largest("test", format_of(row[1].as_str().unwrap())).unwrap();
        let scale = power_of_two(bits(&row[0]), top);
        assert_eq!(u64::from(scale.0), row[2].as_u64().unwrap(), "{row}");
        same(&row.to_string(), &[scale.reciprocal()], &[bits(&row[3])], 0);
    }
}

/// The host with its kernels at one level.
struct Host {
    isa: Isa,
    k: CpuKernels,
    s: Stream,
}

impl Host {
    fn all() -> Vec<Host> {
        let stream = || Device::cpu(Threads::new(2).unwrap()).stream("compute").unwrap();
        Isa::all().into_iter().map(|isa| Host { isa, k: CpuKernels::with(isa), s: stream() }).collect()
    }

    fn up<T: Element>(&self, values: &[T], shape: &[usize]) -> Tensor {
        self.s.upload(values, shape, Category::Workspace).unwrap()
    }

    fn f32(&self, t: &Tensor) -> Vec<f32> {
        self.s.download(t).unwrap()
    }

    fn bytes(&self, shape: [usize; 2], format: DType, scaling: Scaling) -> Bytes {
        Bytes::empty(&self.s, shape, format, scaling, Category::Workspace).unwrap()
    }

    /// The codes without their padding, which must be zero.
    fn codes(&self, b: &Bytes) -> Vec<u8> {
        let raw: Vec<u8> = self.s.download(&b.data.as_bytes().unwrap()).unwrap();
        let mut out = Vec::new();
        for row in raw.chunks(b.cols.next_multiple_of(ALIGN).max(1)) {
            out.extend_from_slice(&row[..b.cols]);
            assert!(row[b.cols..].iter().all(|c| *c == 0), "padding");
        }
        out
    }
}

#[test]
fn golden_delayed() {
    let (j, t) = (json("delayed.json"), Tensors::read("delayed.safetensors"));
    let cases = j["cases"].as_array().expect("cases");
    assert!(!cases.is_empty());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let count = |key: &str| case[key].as_u64().unwrap() as usize;
        let (len, n, steps) = (count("length"), count("num_scales"), count("steps"));
        let margin = case["margin"].as_f64().unwrap();
        assert_eq!(margin, margin.round(), "{name}: margins are whole numbers");
        let most_recent = match case["algo"].as_str().unwrap() {
            "max" => false,
            "most_recent" => true,
            other => panic!("{name}: unknown algo {other}"),
        };
        let how = Delayed { margin: margin as i32, most_recent };
        let together = case["with_reduction"].as_bool().unwrap();
        let top = largest("test", format_of(case["format"].as_str().unwrap())).unwrap();
        let get = |what: &str| t.f32(&format!("{name}/{what}")).unwrap_or_else(|| panic!("{name}/{what}"));
        let (amax, reduced, history, scale) = (get("amax"), get("reduced"), get("history"), get("scale"));
        for h in Host::all() {
            let state = h.up(&vec![0f32; len * n], &[len, n]);
            let (ours, tops) = (h.up(&vec![1f32; n], &[n]), h.up(&vec![top; n], &[n]));
            for step in 0..steps {
                let row = state.select(0, 0).unwrap();
                for i in 0..n {
                    let x = h.up(&[amax[step * n + i]], &[1, 1]);
                    h.k.amax(&h.s, &x, &row.narrow(0, i, 1).unwrap()).unwrap();
                }
                let agreed = if together { h.up(&reduced[step * n..][..n], &[n]) } else { row };
                h.k.delayed_update(&h.s, how, &state, &agreed, &tops, &ours).unwrap();
                let what = format!("{name} step {step}");
                same(&what, &h.f32(&state), &history[step * len * n..][..len * n], 0);
                same(&what, &h.f32(&ours), &scale[step * n..][..n], 0);
            }
        }
    }
    t.all_known();
}

/// A case's input in its own type.
enum Input {
    F32(Vec<f32>),
    BF16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Input {
    fn read(t: &Tensors, name: &str, declared: Option<&str>) -> (Input, [usize; 2]) {
        let (dtype, shape, data) = t.get(name).unwrap_or_else(|| panic!("{name}"));
        let halves = || data.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
        let input = match dtype {
            Dtype::F32 => {
                Input::F32(data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
            }
            Dtype::BF16 => Input::BF16(halves().map(bf16::from_bits).collect()),
            Dtype::F16 => Input::F16(halves().map(f16::from_bits).collect()),
            other => panic!("{name}: {other:?}"),
        };
        let same = match declared {
            None => true,
            Some("f32") => dtype == Dtype::F32,
            Some("bf16") => dtype == Dtype::BF16,
            Some("f16" | "fp16") => dtype == Dtype::F16,
            Some(other) => panic!("{name}: unknown type {other}"),
        };
        assert!(same, "{name}: {dtype:?} declared {declared:?}");
        (input, shape.try_into().unwrap())
    }

    fn tensor(&self, h: &Host, shape: [usize; 2]) -> Tensor {
        match self {
            Input::F32(x) => h.up(x, &shape),
            Input::BF16(x) => h.up(x, &shape),
            Input::F16(x) => h.up(x, &shape),
        }
    }

    /// Quantised without the trait, which has no smallest magnitude.
    fn blocks(
        &self,
        h: &Host,
        how: Use,
        shape: [usize; 2],
        format: DType,
        scaling: Scaling,
        pow2: bool,
        eps: f32,
    ) -> (Vec<u8>, Vec<f32>) {
        match self {
            Input::F32(x) => with_eps(h, x, how, shape, format, scaling, pow2, eps),
            Input::BF16(x) => with_eps(h, x, how, shape, format, scaling, pow2, eps),
            Input::F16(x) => with_eps(h, x, how, shape, format, scaling, pow2, eps),
        }
    }

    fn mxfp8(&self, isa: Isa, grid: Grid, format: DType) -> (Vec<u8>, Vec<E8m0>) {
        match self {
            Input::F32(x) => mxfp8(isa, x, grid, format),
            Input::BF16(x) => mxfp8(isa, x, grid, format),
            Input::F16(x) => mxfp8(isa, x, grid, format),
        }
    }
}

fn with_eps<T: Float>(
    h: &Host,
    x: &[T],
    how: Use,
    [r, c]: [usize; 2],
    format: DType,
    scaling: Scaling,
    pow2: bool,
    eps: f32,
) -> (Vec<u8>, Vec<f32>) {
    let rule = ScaleRule { eps, ..ScaleRule::block(largest("test", format).unwrap(), pow2, T::DTYPE) };
    let [m, n] = if how == Use::Rows { [r, c] } else { [c, r] };
    let (width, blocks) = (n.next_multiple_of(ALIGN), Blocks { scaling, rule });
    let mut scales = vec![f32::NAN; scaling.scales(m, n).iter().product()];
    let (threads, rows) = (Threads::new(2).unwrap(), Rows::dense(r, c));
    let codes: Vec<u8> = match format {
        DType::E4M3 => {
            let mut q = vec![E4m3(0xff); m * width];
            quantise_blocks(&threads, h.isa, how, x, rows, blocks, &mut q, &mut scales).unwrap();
            q.iter().map(|q| q.0).collect()
        }
        _ => {
            let mut q = vec![E5m2(0xff); m * width];
            quantise_blocks(&threads, h.isa, how, x, rows, blocks, &mut q, &mut scales).unwrap();
            q.iter().map(|q| q.0).collect()
        }
    };
    let unpadded = codes.chunks(width.max(1)).flat_map(|row| row[..n].to_vec()).collect();
    (unpadded, scales)
}

fn mxfp8<T: Float>(isa: Isa, x: &[T], grid: Grid, format: DType) -> (Vec<u8>, Vec<E8m0>) {
    let mut scales = vec![E8m0(7); grid.blocks().iter().product()];
    let (threads, rows) = (Threads::new(2).unwrap(), Rows::dense(grid.r, grid.c));
    if format == DType::E4M3 {
        let mut codes = vec![E4m3(0xff); x.len()];
        mxfp8_quantise(&threads, isa, grid, x, rows, &mut codes, &mut scales).unwrap();
        (codes.iter().map(|q| q.0).collect(), scales)
    } else {
        let mut codes = vec![E5m2(0xff); x.len()];
        mxfp8_quantise(&threads, isa, grid, x, rows, &mut codes, &mut scales).unwrap();
        (codes.iter().map(|q| q.0).collect(), scales)
    }
}

/// One scale for the tensor.
fn current(h: &Host, t: &Tensors, at: &str, x: &Input, shape: [usize; 2], format: DType, pow2: bool) {
    let get = |what: &str| t.f32(&format!("{at}/{what}")).unwrap_or_else(|| panic!("{at}/{what}"));
    let xt = x.tensor(h, shape);
    let amax = h.up(&[0f32], &[1]);
    h.k.amax(&h.s, &xt, &amax).unwrap();
    same(&format!("{at} amax"), &h.f32(&amax), &get("amax"), 0);
    let rule = ScaleRule::tensor(largest("test", format).unwrap(), pow2);
    same(&format!("{at} scale"), &[rule.scale(h.f32(&amax)[0])], &get("scale"), 0);
    let (rows, cols) =
        (h.bytes(shape, format, Scaling::Tensor), h.bytes([shape[1], shape[0]], format, Scaling::Tensor));
    let range = Range::Amax { amax: &amax, pow2 };
    let q = Quantise { x: &xt, range, rows: Some(&rows), cols: Some(&cols), sums: None };
    h.k.quantise(&h.s, &q).unwrap();
    let wanted = t.u8(&format!("{at}/q")).unwrap_or_else(|| panic!("{at}/q"));
    same_codes(at, format, &h.codes(&rows), &wanted);
    same_codes(at, format, &h.codes(&cols), &turned(&wanted, shape));
    for b in [&rows, &cols] {
        same(&format!("{at} scale_inv"), &h.f32(&b.scale_inv), &get("scale_inv"), u32::from(!pow2));
    }
}

fn turned<T: Copy>(x: &[T], [r, c]: [usize; 2]) -> Vec<T> {
    (0..c).flat_map(|j| (0..r).map(move |i| x[i * c + j])).collect()
}

/// Cuts the padding off scales `[_, width]`, which must be zero.
fn cut(scales: &[f32], width: usize, columns: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for row in scales.chunks(width) {
        out.extend_from_slice(&row[..columns]);
        assert!(row[columns..].iter().all(|s| s.to_bits() == 0), "padding of scales");
    }
    out
}

/// A scale for every block, in one use or (tiles) both.
fn blocks(
    h: &Host,
    t: &Tensors,
    at: &str,
    kind: &str,
    x: &Input,
    [r, c]: [usize; 2],
    format: DType,
    pow2: bool,
    eps: f32,
) {
    let (scaling, uses): (_, &[Use]) = match kind {
        "block1x128" => (Scaling::Rows, &[Use::Rows]),
        "block128x1" => (Scaling::Rows, &[Use::Cols]),
        _ => (Scaling::Tiles, &[Use::Rows, Use::Cols]),
    };
    let ulps = u32::from(!pow2);
    for how in uses {
        let shape = if *how == Use::Rows { [r, c] } else { [c, r] };
        let (codes, scales) = if eps == 0.0 {
            let (xt, out) = (x.tensor(h, [r, c]), h.bytes(shape, format, scaling));
            let (rows, cols) = if *how == Use::Rows { (Some(&out), None) } else { (None, Some(&out)) };
            let q = Quantise { x: &xt, range: Range::Blocks { pow2 }, rows, cols, sums: None };
            h.k.quantise(&h.s, &q).unwrap();
            (h.codes(&out), h.f32(&out.scale_inv))
        } else {
            x.blocks(h, *how, [r, c], format, scaling, pow2, eps)
        };
        // The stored codes and scales are those of x, or of the transpose for blocks along columns.
        let stored_turned = kind == "block128x1";
        let name = format!("{at}/{}", if stored_turned { "q_t" } else { "q" });
        let wanted = t.u8(&name).unwrap_or_else(|| panic!("{name}"));
        let wanted = if *how == Use::Cols && !stored_turned { turned(&wanted, [r, c]) } else { wanted };
        same_codes(at, format, &codes, &wanted);
        let [m, n] = shape;
        let [down, width] = scaling.scales(m, n)[..] else { unreachable!() };
        let wanted = t.f32(&format!("{at}/scale_inv")).unwrap_or_else(|| panic!("{at}/scale_inv"));
        let ours = match (kind, how) {
            // Ours [blocks, rows], theirs [rows, blocks].
            ("block1x128", _) => turned(&cut(&scales, width, m), [down, m]),
            ("block128x1", _) => cut(&scales, width, m),
            (_, Use::Rows) => cut(&scales, width, n.div_ceil(128)),
            (_, Use::Cols) => turned(&cut(&scales, width, n.div_ceil(128)), [down, n.div_ceil(128)]),
        };
        same(&format!("{at} scale_inv"), &ours, &wanted, ulps);
        let ready = if *how == Use::Rows { "scale_inv_gemm" } else { "scale_inv_t_gemm" };
        if let Some(wanted) = t.f32(&format!("{at}/{ready}")) {
            same(&format!("{at} {ready}"), &scales, &wanted, ulps);
        }
    }
}

#[test]
fn golden_quantise() {
    let (j, t) = (json("quantize.json"), Tensors::read("quantize.safetensors"));
    let cases = j["cases"].as_array().expect("cases");
    assert!(!cases.is_empty());
    let hosts = Host::all();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let (x, shape) = Input::read(&t, &format!("{name}/x"), case["dtype"].as_str());
        assert_eq!(serde_json::json!(shape), serde_json::json!([case["rows"], case["cols"]]));
        // Folders of the case: all but the last part of a tensor's name.
        let folders: BTreeSet<String> =
            t.left(&format!("{name}/")).iter().map(|n| n.rsplit_once('/').unwrap().0.to_string()).collect();
        assert!(!folders.is_empty(), "{name} has no results");
        for at in &folders {
            let parts: Vec<&str> = at.split('/').collect();
            let format = format_of(parts[2]);
            for h in &hosts {
                match parts[1..] {
                    ["current", _, mode] => current(h, &t, at, &x, shape, format, pow2(mode)),
                    [kind @ ("block1x128" | "block128x1" | "block128x128"), _, mode] => {
                        blocks(h, &t, at, kind, &x, shape, format, pow2(mode), 0.0);
                    }
                    [kind @ ("block1x128" | "block128x1" | "block128x128"), _, mode, eps] => {
                        let eps = eps.strip_prefix("eps").expect("eps").parse().unwrap();
                        blocks(h, &t, at, kind, &x, shape, format, pow2(mode), eps);
                    }
                    ["mxfp8", _, along @ ("row" | "col")] => {
                        let along = if along == "row" { Along::Rows } else { Along::Cols };
                        let grid = Grid::new(shape, MX_BLOCK, along, false);
                        let (codes, scales) = x.mxfp8(h.isa, grid, format);
                        same_codes(at, format, &codes, &t.u8(&format!("{at}/q")).unwrap());
                        let bytes: Vec<u8> = scales.iter().map(|s| s.0).collect();
                        assert_eq!(bytes, t.u8(&format!("{at}/scale")).unwrap(), "{at}");
                        if let Some(wanted) = t.u8(&format!("{at}/scale_swizzled")) {
                            assert_eq!(swizzle(&scales, grid.blocks()), wanted, "{at}");
                        }
                    }
                    _ => panic!("unknown kind {at}"),
                }
            }
        }
    }
    t.all_known();
}

fn pow2(mode: &str) -> bool {
    match mode {
        "f32" => false,
        "pow2" => true,
        other => panic!("unknown mode {other}"),
    }
}

#[test]
fn golden_products() {
    let (j, t) = (json("quantize.json"), Tensors::read("gemm.safetensors"));
    let cases = j["gemm"].as_array().expect("gemm");
    assert!(!cases.is_empty());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let (a, [m, k]) = Input::read(&t, &format!("{name}/a"), None);
        let (b, [n, _]) = Input::read(&t, &format!("{name}/b"), None);
        let kinds = t.left(&format!("{name}/"));
        assert!(!kinds.is_empty(), "{name} has no results");
        for full in kinds {
            let wanted = t.f32(&full).unwrap();
            for h in Host::all() {
                let make = |x: &Input, shape: [usize; 2], format: DType, scaling: Scaling| {
                    let (xt, out) = (x.tensor(&h, shape), h.bytes(shape, format, scaling));
                    let amax = h.up(&[0f32], &[1]);
                    h.k.amax(&h.s, &xt, &amax).unwrap();
                    let range = match scaling {
                        Scaling::Tensor => Range::Amax { amax: &amax, pow2: false },
                        _ => Range::Blocks { pow2: true },
                    };
                    let q = Quantise { x: &xt, range, rows: Some(&out), cols: None, sums: None };
                    h.k.quantise(&h.s, &q).unwrap();
                    out
                };
                let product = |fa, sa, fb, sb| {
                    let (a, b) = (make(&a, [m, k], fa, sa), make(&b, [n, k], fb, sb));
                    let c = h.up(&vec![f32::NAN; m * n], &[m, n]);
                    let g = Gemm8 {
                        a: &a,
                        b: &b,
                        bias: None,
                        accumulate: false,
                        fast: false,
                        name: "gemm8",
                        c: &c,
                    };
                    h.k.gemm8(&h.s, &g).unwrap();
                    h.f32(&c)
                };
                let e4 = DType::E4M3;
                let ours = match full.rsplit_once('/').unwrap().1 {
                    "current" => product(e4, Scaling::Tensor, DType::E5M2, Scaling::Tensor),
                    "block_1d2d" => product(e4, Scaling::Rows, e4, Scaling::Tiles),
                    "block_1d1d" => product(e4, Scaling::Rows, e4, Scaling::Rows),
                    "mxfp8" => {
                        let (a, b) = (mx_values(&h, &a, [m, k]), mx_values(&h, &b, [n, k]));
                        let dot = |i: usize, j: usize| {
                            let pairs = a[i * k..][..k].iter().zip(&b[j * k..][..k]);
                            pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
                        };
                        (0..m * n).map(|i| dot(i / n, i % n)).collect()
                    }
                    other => panic!("unknown product {other}"),
                };
                for (row, (ours, wanted)) in ours.chunks(n).zip(wanted.chunks(n)).enumerate() {
                    let norm = wanted.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().sqrt();
                    for (o, w) in ours.iter().zip(wanted) {
                        let off = (f64::from(*o) - f64::from(*w)).abs();
                        assert!(off <= 1e-5 * norm, "{full} {:?} row {row}: {o} {w}", h.isa);
                    }
                }
            }
        }
    }
    t.all_known();
}

fn mx_values(h: &Host, x: &Input, shape: [usize; 2]) -> Vec<f32> {
    let grid = Grid::new(shape, MX_BLOCK, Along::Rows, false);
    let (codes, scales) = x.mxfp8(h.isa, grid, DType::E4M3);
    let codes: Vec<E4m3> = codes.into_iter().map(E4m3).collect();
    let mut out = vec![0f32; codes.len()];
    mxfp8_dequantise(&Threads::new(1).unwrap(), h.isa, grid, &codes, &scales, &mut out).unwrap();
    out
}
