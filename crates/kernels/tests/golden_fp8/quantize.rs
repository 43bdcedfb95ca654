//! FP8 quantization: codes and scales of every scaling mode.

use super::areas;
use super::compare::{format_of, same, same_codes};
use super::golden::{Tensors, list, only_keys, text};
use super::host::{BlockScaling, Host, Input};
use ferrotron_kernels::cpu::quant::{MX_BLOCK, Orientation, SmallBlocks, swizzle};
use ferrotron_kernels::quant::scale::{ScaleRule, largest};
use ferrotron_kernels::{BlockAxis, QuantKernels, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::DType;
use std::collections::BTreeSet;

/// Per-tensor scaling.
fn current((h, t): (&Host, &Tensors), at: &str, x: &Input, shape: [usize; 2], format: DType, pow2: bool) {
    let get = |what: &str| t.f32(&format!("{at}/{what}"));
    let xt = x.tensor(h, shape);
    let amax = h.up(&[0f32], &[1]);
    h.k.amax(&h.s, &xt, &amax).unwrap();
    same(&format!("{at} amax"), &h.f32(&amax), &get("amax"), 0);
    let rule = ScaleRule::tensor(largest("test", format).unwrap(), pow2);
    same(&format!("{at} scale"), &[rule.scale(h.f32(&amax)[0])], &get("scale"), 0);
    let (rows, cols) = (
        h.fp8_tensor(shape, format, ScalingMode::PerTensor),
        h.fp8_tensor([shape[1], shape[0]], format, ScalingMode::PerTensor),
    );
    let range = ScaleSource::Amax { amax: &amax, pow2 };
    let q = Quantize { x: &xt, range, rows: Some(&rows), cols: Some(&cols), sums: None };
    h.k.quantize(&h.s, &q).unwrap();
    let wanted = t.u8(&format!("{at}/q"));
    same_codes(at, format, &h.codes(&rows), &wanted);
    same_codes(at, format, &h.codes(&cols), &transposed(&wanted, shape));
    for b in [&rows, &cols] {
        same(&format!("{at} scale_inv"), &h.f32(&b.scale_inv), &get("scale_inv"), u32::from(!pow2));
    }
}

fn transposed<T: Copy>(x: &[T], [r, c]: [usize; 2]) -> Vec<T> {
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

/// Block scaling: rowwise, columnwise, or (128×128) both.
fn blocks(
    (h, t): (&Host, &Tensors),
    at: &str,
    kind: &str,
    x: &Input,
    [r, c]: [usize; 2],
    (format, pow2, eps): (DType, bool, f32),
) {
    let (scaling, uses): (_, &[Orientation]) = match kind {
        "block1x128" => (ScalingMode::Block1x128, &[Orientation::Rows]),
        "block128x1" => (ScalingMode::Block1x128, &[Orientation::Cols]),
        _ => (ScalingMode::Block128x128, &[Orientation::Rows, Orientation::Cols]),
    };
    let ulps = u32::from(!pow2);
    for how in uses {
        let shape = if *how == Orientation::Rows { [r, c] } else { [c, r] };
        let (codes, scales) = if eps == 0.0 {
            let (xt, out) = (x.tensor(h, [r, c]), h.fp8_tensor(shape, format, scaling));
            let (rows, cols) =
                if *how == Orientation::Rows { (Some(&out), None) } else { (None, Some(&out)) };
            let q = Quantize { x: &xt, range: ScaleSource::Blocks { pow2 }, rows, cols, sums: None };
            h.k.quantize(&h.s, &q).unwrap();
            (h.codes(&out), h.f32(&out.scale_inv))
        } else {
            x.blocks(h, *how, [r, c], BlockScaling { format, mode: scaling, pow2, eps })
        };
        // The stored codes and scales are those of x, or of the transpose for blocks along columns.
        let stored_transposed = kind == "block128x1";
        let name = format!("{at}/{}", if stored_transposed { "q_t" } else { "q" });
        let wanted = t.u8(&name);
        let wanted = if *how == Orientation::Cols && !stored_transposed {
            transposed(&wanted, [r, c])
        } else {
            wanted
        };
        same_codes(at, format, &codes, &wanted);
        let [m, n] = shape;
        let [down, width] = scaling.scales(m, n)[..] else { unreachable!() };
        let wanted = t.f32(&format!("{at}/scale_inv"));
        let ours = match (kind, how) {
            // Ours [blocks, rows], theirs [rows, blocks].
            ("block1x128", _) => transposed(&cut(&scales, width, m), [down, m]),
            ("block128x1", _) => cut(&scales, width, m),
            (_, Orientation::Rows) => cut(&scales, width, n.div_ceil(128)),
            (_, Orientation::Cols) => {
                transposed(&cut(&scales, width, n.div_ceil(128)), [down, n.div_ceil(128)])
            }
        };
        same(&format!("{at} scale_inv"), &ours, &wanted, ulps);
        let ready = if *how == Orientation::Rows { "scale_inv_gemm" } else { "scale_inv_t_gemm" };
        if t.has(&format!("{at}/{ready}")) {
            same(&format!("{at} {ready}"), &scales, &t.f32(&format!("{at}/{ready}")), ulps);
        }
    }
}

#[test]
fn golden_quantize() {
    let hosts = Host::all();
    for area in areas("quantize.json") {
        let json = area.json("quantize.json");
        only_keys("quantize.json", &json, &["producer", "cases", "gemm", "checked_against_te_reference"]);
        if !area.has("quantize.safetensors") {
            assert!(
                list(&json, "cases").is_empty() && area.has("gemm.safetensors"),
                "{}: cases without tensors",
                area.set
            );
            continue;
        }
        let t = area.tensors("quantize.safetensors");
        t.only_cases(list(&json, "cases"));
        let mut report = area.report();
        for case in list(&json, "cases") {
            let name = text(case, "name");
            report.case(&format!("quantize {name}"), || {
                only_keys(name, case, &["name", "rows", "cols", "kind", "dtype"]);
                let (x, shape) = Input::read(&t, &format!("{name}/x"), case["dtype"].as_str());
                assert_eq!(serde_json::json!(shape), serde_json::json!([case["rows"], case["cols"]]));
                // The results of a case are grouped by scaling mode: all but the last part of a tensor's name.
                let folders: BTreeSet<String> = t
                    .unread(&format!("{name}/"))
                    .iter()
                    .map(|n| n.rsplit_once('/').unwrap().0.to_string())
                    .collect();
                assert!(!folders.is_empty(), "{name} has no results");
                for at in &folders {
                    hosts.iter().for_each(|h| quantized(h, &t, at, &x, shape));
                }
                t.all_read(&format!("{name}/"));
            });
        }
        report.finish();
    }
}

/// One result of a case: `<case>/<scaling mode>/<number format>/...`
fn quantized(h: &Host, t: &Tensors, at: &str, x: &Input, shape: [usize; 2]) {
    let parts: Vec<&str> = at.split('/').collect();
    assert!(parts.len() > 2, "the format has no result {at}");
    let format = format_of(parts[2]);
    match parts[1..] {
        ["current", _, mode] => current((h, t), at, x, shape, format, pow2(mode)),
        [kind @ ("block1x128" | "block128x1" | "block128x128"), _, mode] => {
            blocks((h, t), at, kind, x, shape, (format, pow2(mode), 0.0));
        }
        [kind @ ("block1x128" | "block128x1" | "block128x128"), _, mode, eps] => {
            let eps = eps.strip_prefix("eps").and_then(|eps| eps.parse().ok());
            let eps = eps.unwrap_or_else(|| panic!("the format has no result {at}"));
            blocks((h, t), at, kind, x, shape, (format, pow2(mode), eps));
        }
        ["mxfp8", _, along @ ("row" | "col")] => {
            let along = if along == "row" { BlockAxis::Rows } else { BlockAxis::Cols };
            let grid = SmallBlocks::new(shape, MX_BLOCK, along, false);
            let (codes, scales) = x.mxfp8(h.isa, grid, format);
            same_codes(at, format, &codes, &t.u8(&format!("{at}/q")));
            let bytes: Vec<u8> = scales.iter().map(|s| s.0).collect();
            assert_eq!(bytes, t.u8(&format!("{at}/scale")), "{at}");
            if t.has(&format!("{at}/scale_swizzled")) {
                let bytes: Vec<u8> = scales.iter().map(|s| s.0).collect();
                assert_eq!(swizzle(&bytes, grid.blocks()), t.u8(&format!("{at}/scale_swizzled")), "{at}");
            }
        }
        _ => panic!("the format has no result {at}"),
    }
}

fn pow2(mode: &str) -> bool {
    match mode {
        "f32" => false,
        "pow2" => true,
        other => panic!("the format has no scale mode {other}"),
    }
}
